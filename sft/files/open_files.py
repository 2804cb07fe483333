"""Lets this process hold as many open files as the system allows.

The soft limit of a shell is often 1024.  A mapped store of tokens takes three file descriptors, and a gloo group takes
one for each of its ranks.
"""

import resource


def allow_most() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
