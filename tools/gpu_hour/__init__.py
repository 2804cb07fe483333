"""Runs probes, tests and benchmarks for the first hour on a GPU machine with one command, and reports every bar.

    python -m tools.gpu_hour --gpus 8        all steps, 86 minutes at most; a second start continues
    python -m tools.gpu_hour --tiny          toy sizes on a CPU, about a minute

step.py     the types of a step             steps.py    declares the steps and their commands
runner.py   runs and records the steps      bars.py     the bars of their measurements
ranks.py    runs a measurement on ranks     report.py   writes the report as JSON and as Markdown
measured.py measures curves, speed, memory  curves.py   declares and judges curves on layouts, backends, precisions
machine.py  versions and hardware           kinds.py    models with each kind of layer

docs/numbers/gpu-hour.md is the page for users.
"""
