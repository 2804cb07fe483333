"""The first hour on a GPU machine: one command that runs probes, tests and benchmarks, and reports every bar.

    python -m tools.gpu_hour --gpus 8        all steps, 60 minutes at most; a second start continues
    python -m tools.gpu_hour --tiny          toy sizes on a CPU, about a minute

step.py     what a step is              steps.py   the declared steps         bars.py    the bars of their measurements
runner.py   runs and records them       report.py  one JSON, one Markdown     machine.py versions and hardware
curves.py   one small model on several layouts, backends and precisions       speed.py   speed and memory of a layout

docs/numbers/gpu-hour.md is the page for users.
"""
