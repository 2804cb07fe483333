"""The first hour on a GPU machine: one command that runs probes, tests and benchmarks, and reports every bar.

    python -m tools.gpu_hour --gpus 8        all steps, 60 minutes at most; a second start continues
    python -m tools.gpu_hour --tiny          toy sizes on a CPU, about a minute

step.py     what a step is                  steps.py    the declared steps, and their commands
runner.py   runs and records them           bars.py     the bars of their measurements
ranks.py    starts a measurement on ranks   report.py   one JSON, one Markdown
measured.py curves, speed and memory        curves.py   one small model on several layouts, backends, precisions
machine.py  versions and hardware

docs/numbers/gpu-hour.md is the page for users.
"""
