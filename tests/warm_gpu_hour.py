"""Runs `python -m tools.gpu_hour` with processes that are forked after their imports (tests/warm_commands.py).

    python -m tests.warm_gpu_hour --tiny --fresh

A tiny run starts some fifty processes, and each would import torch and megatron-core for several seconds.
"""

import sys
import tempfile
from pathlib import Path

from tests.warm_commands import commands
from tools.gpu_hour.__main__ import main

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        commands(Path(folder) / "bin")
        sys.executable = f"{folder}/bin/python"  # with which the steps start their commands
        sys.exit(main())
