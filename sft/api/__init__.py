"""The Python API: load, prepare, train, export and plan, for notebooks and pipelines.  The command line calls it.

One module for each function and its result.  `import sft` offers them all.  Every function checks as its command does,
prints on stdout what its command prints while it works (`plan` on stderr), and returns a frozen value.  A mistake is an
SftError (sft/errors.py), never an exit of the process.  Heavy modules are imported where they are first used.
"""
