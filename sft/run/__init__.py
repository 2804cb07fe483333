"""The code around the training loop.

`lifecycle.py` combines lock, signals, watchdog and status over all ranks.  `evaluation.py`, `step_check.py`,
`sample_log.py` and `profiler.py` do not depend on each other.  The trainer decides what a step and a save are.
"""
