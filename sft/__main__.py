"""Runs the `sft` command as `python -m sft`, which torchrun starts."""

from sft.cli import run

if __name__ == "__main__":
    run()
