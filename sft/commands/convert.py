"""`sft import` and `sft export`: convert models between Hugging Face and Megatron."""

import shlex
from argparse import BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from sft.commands.arguments import add_quiet
from sft.commands.output import show_next
from sft.console import Console
from sft.files.object_store import is_url

FORMATS = ("as_source", "bf16", "fp8_block", "mxfp4", "nvfp4", "int4")  # values of checkpoint.export_format


def add(commands: Any) -> None:
    to_megatron = commands.add_parser("import", help="convert a Hugging Face model to a Megatron checkpoint")
    about = "name on the hub, or folder with config.json and safetensors files"
    to_megatron.add_argument("source", metavar="SRC", help=about)
    to_megatron.add_argument(
        "target", metavar="DST", type=Path, help="checkpoint folder to create; set model.init_from to it"
    )
    to_megatron.set_defaults(action=import_model, parser=to_megatron)

    to_hf = commands.add_parser("export", help="convert a checkpoint to a Hugging Face folder that can be served")
    about = "checkpoint; or a run or a folder of checkpoints, whose newest checkpoint is converted"
    to_hf.add_argument("source", metavar="SRC", type=Path, help=about)
    about = (
        "Hugging Face folder to create; or s3://BUCKET/PATH; or hf://OWNER/NAME, with a branch hf://OWNER/NAME@BRANCH"
    )
    to_hf.add_argument("target", metavar="DST", help=about)
    about = "folder or hub name of the original model, for a checkpoint that does not name it"
    to_hf.add_argument("--hf", metavar="FOLDER", help=about)
    about = "compare the SHA-256 (full, the default) or only the sizes of the checkpoint's files with its manifest"
    to_hf.add_argument("--verify", choices=("full", "size"), default="full", help=about)
    about = "type of the trained tensors (default: the type that each has in the original model)"
    to_hf.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help=about)
    about = "form of the weights: not quantised (bf16), as the original model (as_source), or another quantised form "
    about += "(default: checkpoint.export_format of the recipe, or bf16)"
    to_hf.add_argument("--format", choices=FORMATS, help=about)
    about = (
        "add LoRA adapters to the weights, and write the whole model; --no-merged writes the adapters alone, for PEFT"
    )
    about += " (default: lora.export of the recipe)"
    to_hf.add_argument("--merged", action=BooleanOptionalAction, default=None, help=about)
    about = "process id of the run that starts this export; the export ends when the run ends"
    add_quiet(to_hf)
    to_hf.add_argument("--end-with", metavar="PID", type=int, help=about)
    to_hf.set_defaults(action=export_model, parser=to_hf)


def import_model(arguments: Namespace) -> None:
    from sft.hf.hub_weights import model_folder
    from sft.weights.import_hf import import_hf

    import_hf(model_folder(arguments.source), arguments.target, Console(0), name=arguments.source)


def export_model(arguments: Namespace) -> None:
    if arguments.end_with is not None:
        from sft.run.signals import leave_with

        leave_with(arguments.end_with)

    from sft.api.models import export

    export(
        arguments.source,
        arguments.target,
        hf=arguments.hf,
        verify=arguments.verify,
        dtype=arguments.dtype,
        format=arguments.format,
        merged=arguments.merged,
        quiet=arguments.quiet,
    )
    if arguments.end_with is None and not arguments.quiet and not is_url(arguments.target):
        show_next(f"sft generate {shlex.quote(arguments.target)} --prompt TEXT")
