"""`python -m sft`: the same as the `sft` command, and what torchrun starts."""

import sys

from sft.cli import main

if __name__ == "__main__":
    sys.exit(main())
