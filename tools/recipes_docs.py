"""Makes docs/reference/recipes.md: tables of the recipes in recipes/, from their headers and keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools import page_text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "recipes"
_MODELS = ("qwen3_0p6b", "qwen3_8b", "llama31_8b", "qwen3_30b", "gpt_oss", "gemma3", "qwen36_27b", "qwen36_35b")
_INTRO = """\
# The recipes

A recipe names its data as `data/train.jsonl`. Check it before a launch: `sft check RECIPE --world-size N`.
tools/recipes_docs.py generates this page from [recipes/](../../recipes).

## Written by hand

A recipe of GPUs is for cards of 80 GB in nodes of 8. Comments in each recipe have the command, the calculated memory
and related recipes. The two demos ran on CPUs. **No recipe has run on a GPU yet.**
"""
_PLANNED = """
## Written by the planner

[`sft plan`](../how-to/plan.md) chose these layouts for H100 GPUs (80 GB) in nodes of 8 with a 400 Gbit/s network, packs
of one document, and hosts of which offloading may use 1000 GiB (llama31_8b_5m_1n: 1300 GiB). **All numbers are
predicted, not measured, with assumed constants.** GiB is the memory of the fullest GPU, and tokens are per second and
GPU. YaRN by a large factor is only a start: look at the loss by position. For other hardware or data:
`sft plan --model RECIPE --gpus N --gpu h200 --lengths data --write FILE`. `python -m tools.plan_recipes` writes all of
them again.

A name ends with the number of nodes (`_4n`); recipes with `lora` train adapters, the others all weights. "weights"
and "gradients" are `parallel.shard`, "offload" `train.offload_fraction`, "tile" `train.mlp_tile`, "chunks"
`train.head_chunks`, and "optim" `optim.offload_fraction`.
"""


def page(before: str) -> str:
    """The whole page; `before` is not read."""
    written = sorted(path for path in FOLDER.glob("*.yaml"))
    planned = sorted((FOLDER / "planned").glob("*.yaml"), key=_order)
    return "\n".join([_INTRO, *_by_hand(written), _PLANNED, *_by_planner(planned), ""])


def header(path: Path) -> dict[str, str]:
    """The comments at the top of a recipe, by name: {"Purpose": ..., "Launch": ..., "Hardware": ..., ...}"""
    pairs = (re.fullmatch(r"# (\w+): *(.*)", line) for line in path.read_text(encoding="utf-8").splitlines()[:5])
    return {pair[1]: pair[2] for pair in pairs if pair}


def _by_hand(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        lines = header(path)
        purpose, hardware = (" ".join(lines[name].split()).rstrip(".") for name in ("Purpose", "Hardware"))
        shorter = re.sub(r" of 80 GB, \w+ nodes?", "", hardware)
        text = f"- [{path.stem}](../../recipes/{path.name}): {purpose.removeprefix('trains ')}. {shorter}."
        yield from page_text.folded(text)


def _by_planner(paths: list[Path]) -> Iterator[str]:
    yield "| recipe | layout and savings | GiB | host GiB | s/step | tokens | MFU |"
    yield "|---|---|---|---|---|---|---|"
    for path in paths:
        lines, keys = header(path), yaml.safe_load(path.read_text(encoding="utf-8"))
        expected = lines["Expected"]
        cells = [
            f"[{path.stem}]",
            _layout(keys),
            *(_number(pattern, expected) for pattern in (r"measured: (\d+) of", r"and ([\d,]+) GiB of each host")),
            *(_number(pattern, expected) for pattern in (r"a step ([\d.,]+) s", r"([\d,]+) tokens/s", r"(\d+%) MFU")),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from (f"[{path.stem}]: ../../recipes/planned/{path.name}" for path in paths)


def _layout(keys: dict[str, Any]) -> str:
    """The layout and the keys that save memory, as text: `tp 2, cp 8, selective, offload`."""
    shards = {"shard": "{}", "shard_size": "by {}"}  # "weights, by 8"
    words = [shards.get(name, name + " {}").format(value) for name, value in keys.get("parallel", {}).items()]
    names = {"recompute": "{}", "offload_fraction": "offload", "mlp_tile": "tile", "head_chunks": "chunks {}"}
    words += [text.format(keys["train"][name]) for name, text in names.items() if name in keys["train"]]
    words += ["optim"] if "offload_fraction" in keys["optim"] else []
    return ", ".join(words) or "dp only"


def _number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _order(path: Path) -> tuple[int, bool, int, str]:
    """The key to sort planned recipes: by model, recipes without LoRA first, then by the length of packs."""
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    number = next((i for i, model in enumerate(_MODELS) if path.stem.startswith(model)), len(_MODELS))
    return number, "lora" in keys, keys["data"]["seq_length"], path.name
