"""The Python API: load, check, prepare, train, evaluate, export, plan and generate.  The command line calls it.

One module for each function and its result.  `import sft` offers them all.  Every function checks as its command does,
prints what its command prints while it works (`check` and `plan` only progress, on stderr), and returns a frozen value.
A mistake is an SftError (sft/errors.py), never an exit of the process.  Heavy modules are imported where they are first
used.
"""
