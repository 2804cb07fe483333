"""Implements the commands of the command line, one module for each: its arguments and its action.

`add(commands)` of a module adds the parser of its command.  sft/cli.py lists the modules.  Heavy modules are imported
where they are first used, so that help and error messages appear at once.
"""
