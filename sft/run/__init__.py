"""What surrounds the training loop.

The lifecycle joins lock, signals, watchdog and status over all ranks; evaluation, step_check, sample_log and profiler
stand beside it.  Decides nothing about training itself: the trainer says what a step or a save is.
"""
