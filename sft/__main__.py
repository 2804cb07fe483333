"""`python -m sft`: the same as the `sft` command, and what torchrun starts."""

from sft.cli import run

if __name__ == "__main__":
    run()
