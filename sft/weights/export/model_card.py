"""Writes the README.md of an export: base model, step, serving, losses and answers from the log, and recipe."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft.config import yaml
from sft.config.keys import in_schema, leaves
from sft.files.folder_files import METRICS_BYTES, read_file
from sft.hf.hub import CONFIG
from sft.metrics.long import differences, grid
from sft.metrics.long_records import answers_of_run
from sft.weights.export.original import Original
from sft.weights.lora import merged_adapters
from sft.weights.serving import flags
from sft.weights.serving.served import Record

NAME = "README.md"
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_METRICS = ("lm loss", "perplexity/avg", "token accuracy")
_OF_WEIGHTS = (
    "model.hf",
    "model.base_dtype",
    "model.init_from",
)  # keys of the model that do not follow from config.json


def write_model_card(
    folder: Path, checkpoint: Path, common: Mapping[str, Any], original: Original, quantisation: Sequence[str] = ()
) -> None:
    """Write README.md into the export `folder` of `checkpoint`.

    common: the values in the checkpoint's common.pt; quantisation: the lines of the section about it
    The README has no recipe if Megatron-LM wrote the checkpoint.
    """
    sft = common.get("sft")
    recipe, state = (sft["recipe"], sft["state"]) if isinstance(sft, dict) else ({}, {})
    step = state.get("step", common.get("iteration", 0))
    name, _, revision = original.name.partition("@")
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if _ON_HUB.fullmatch(name) and not Path(name).exists():
        lines += [f"base_model: {name}"]
    commit = original.commit or revision
    lines += ["---", "", f"# {Path(str(recipe.get('run.dir', checkpoint.parent))).name}, step {step}", ""]
    lines += [f"Base model: {name}{f', revision {commit}' if commit else ''}.", ""]
    if merged := merged_adapters.read(folder):
        sources = ", ".join(f"{entry.checkpoint} (step {entry.step})" for entry in merged)
        lines += [f"These weights hold the LoRA adapters of {sources}; do not add them again.", ""]
    if state.get("num_tokens"):
        lines += [f"Fine-tuned on {state['num_tokens']:,} supervised tokens in {step:,} steps.", ""]
    if original.served is not None:
        rank = None if (folder / CONFIG).exists() else recipe.get("lora.rank")
        lines += _serving(original.served, name, rank)
    records = _records(checkpoint.parent.parent / "metrics.jsonl")
    lines += _losses(records, step) + _long_context(records, step)
    lines += quantisation
    if recipe:
        lines += [
            "## Recipe",
            "",
            "Keys that differ from their defaults:",
            "",
            "```yaml",
            *_recipe(recipe, original.served),
            "```",
            "",
        ]
    (folder / NAME).write_text("\n".join(lines), encoding="utf-8")


def _serving(record: Record, base: str, rank: int | None) -> list[str]:
    """The section about serving.  rank: the LoRA rank if the folder holds only adapters, else None"""
    lines = ["## Serving", "", *(f"- {sentence}" for sentence in flags.details(record)), ""]
    if rank is not None:
        command = " \\\n    ".join(flags.flags(record, base, rank))
        lines += ["With vLLM, where ADAPTER is this folder:", "", "```bash", command, "```", ""]
        if record.end_ids:
            lines += [f"Without `--generation-config`, give each request `{flags.stop_ids(record)}`.", ""]
    return lines


def _records(log: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, up to a line that is none; [] if there is no such file."""
    records: list[dict[str, Any]] = []
    try:
        for text in read_file(log, METRICS_BYTES).decode().splitlines():
            record = json.loads(text)
            if isinstance(record["kind"], str) and isinstance(record["step"], int):
                records.append(record)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    return records


def _losses(records: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """A table of losses up to `step`: one row for the last training record, and one for each held-out set.

    [] if there is no such record
    """
    last: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record["kind"] in ("train", "eval") and record["step"] <= step:
            last["training" if record["kind"] == "train" else str(record.get("set"))] = record
    if not last:
        return []
    rows = [
        f"| {name} | {record['step']} | {' | '.join(_number(record.get(metric)) for metric in _METRICS)} |"
        for name, record in last.items()
    ]
    return ["## Losses", "", f"| data | step | {' | '.join(_METRICS)} |", "|---|---|---|---|---|", *rows, ""]


def _long_context(records: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """The section about long-context questions after `step`, compared with the start of the run; [] without answers."""
    try:
        answers = answers_of_run(records, step)
    except (LookupError, TypeError, ValueError):
        return []
    if answers is None:
        return []
    changes = differences(answers.before, answers.after)

    def cell(task: str, length: int) -> str:
        key = (task, length)
        share = f"{answers.after[key].share:.2f}"
        if key not in changes:
            return share
        return f"{answers.before[key].share:.2f} → {share}" + (" ↓" if changes[key].is_fall else "")

    compared = ", before training → now" if changes else ""
    head, *rows = [f"| {' | '.join(line)} |" for line in grid("task", answers.after, cell)]
    lines = ["## Questions about long texts", ""]
    lines += [f"Share of right answers by the length of the text in tokens{compared}; answers are read, not generated:"]
    lines += ["", head, "|---" * head.count(" | ") + "|---|", *rows, ""]
    if answers.falls:
        lines += ["**Below the base, beyond chance (↓):**", "", *(f"- {fall}" for fall in answers.falls), ""]
    return lines


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else ""


def _recipe(recipe: Mapping[str, Any], served: Record | None) -> list[str]:
    """One line of YAML for each key that differs from its default, without the keys of the architecture."""
    schema = leaves()
    if file := recipe.get("data.chat_template"):  # leaves out the folder on the machine that trained
        recipe = {**recipe, "data.chat_template": served.templates[0] if served else Path(file).name}
    return [
        f"{key}: {yaml.write(value)}"
        for key, value in recipe.items()
        if not (key.startswith("model.") and key not in ("model.hf", "model.base_dtype", "model.init_from"))
        and (key if key in schema else in_schema(key)) in schema
        and value != schema[key if key in schema else in_schema(key)].get_default(call_default_factory=True)
    ]
