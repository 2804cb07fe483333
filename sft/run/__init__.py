"""The code around the training loop.

The lifecycle combines lock, signals, watchdog and status over all ranks.  Evaluation, step_check, sample_log and
profiler do not depend on each other.  The trainer, not this package, defines a step and a save.
"""
