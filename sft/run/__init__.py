"""What happens to the processes of a run from outside: other runs, signals, kills, hangs; and what is told of it.

lock      one run in a folder at a time
status    run_state.json: what became of the run, for the script that decides whether to start it again
stop      signals and the end of the job's time
watchdog  the stacks of a rank that stands still, and its end

Decides nothing about training: what a step or a save is, the trainer says.
"""
