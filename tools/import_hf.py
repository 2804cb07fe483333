"""Converts a Hugging Face model to a Megatron checkpoint from which a run can start.

    python -m tools.import_hf models/Qwen3-8B checkpoints/qwen3-8b
    then set model.init_from=checkpoints/qwen3-8b

Runs in one process, without a GPU; memory does not grow with the model.  docs/models.md lists supported models.
"""

import argparse
import sys
from pathlib import Path

from sft.console import Console
from sft.errors import SftError
from sft.hf.convert.import_hf import import_hf


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert a Hugging Face model to a Megatron checkpoint.")
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to create")
    arguments = parser.parse_args()
    try:
        import_hf(arguments.source, arguments.target, Console(0))
    except SftError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
