"""What surrounds the training loop.

lifecycle       joins lock, signals, watchdog and status over all ranks; decides after each step what is due
lock            one run in a folder at a time
signals         signals and the end of the job's time
watchdog        writes the stacks of a rank that hangs, and ends it
status          run_state.json: how the run ended, for the script that decides whether to start it again
evaluation      the held-out sets
sample_log      seen.jsonl: which samples each step trained on
step_check      warns of loss spikes, ends a run whose steps stay non-finite
nonfinite_dump  what is kept of a non-finite step
profiler        memory snapshots and traces of chosen steps

Decides nothing about training itself: the trainer says what a step or a save is.
"""
