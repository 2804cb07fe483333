"""`python -m sft`, which torchrun starts: the same as the `sft` command."""

from sft.cli import run

if __name__ == "__main__":
    run()
