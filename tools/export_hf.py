"""Converts a Megatron checkpoint to a Hugging Face model.

    python -m tools.export_hf runs/demo models/demo                        the newest checkpoint of a run
    python -m tools.export_hf runs/demo/checkpoints/iter_0000100 models/demo --hf models/Qwen3-8B

config.json, tokenizer and chat template come from the model that the run began with.  --hf gives the folder of this
model if the checkpoint does not name it.  Runs in one process, without a GPU.  docs/models.md lists supported models.
"""

import argparse
import sys
from pathlib import Path

from sft.console import Console
from sft.errors import SftError
from sft.hf.convert.export_hf import export_hf


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert a Megatron checkpoint to a Hugging Face model.")
    parser.add_argument("source", metavar="SRC", type=Path, help="checkpoint, folder of checkpoints, or run")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to create")
    parser.add_argument("--hf", metavar="DIR", type=Path, help="folder of the original Hugging Face model")
    verification = "how to compare the checkpoint with its manifest (full: every byte)"
    parser.add_argument("--verify", choices=("full", "size", "off"), default="full", help=verification)
    arguments = parser.parse_args()
    try:
        export_hf(arguments.source, arguments.target, Console(0), like=arguments.hf, verify=arguments.verify)
    except SftError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
