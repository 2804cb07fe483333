"""Reads from docs/numbers/kernels.md which attention kernels of a recipe compile, without a GPU."""

import re
from functools import cache
from pathlib import Path

from sft.config import Config
from sft.layers.kinds import all_layer_groups

PAGE = Path(__file__).resolve().parents[1] / "docs" / "numbers" / "kernels.md"
ARCHITECTURES = ("sm_90a", "sm_100a")
_CALLS_OF_TREES = ", parents"


def lines(config: Config) -> list[str]:
    """A line for each kind of layer with attention: `128/128, window: FlashAttention-4 compiles for sm_90a, sm_100a`"""
    texts = []
    for group in all_layer_groups(config.model):
        mixer = group.mixer
        if mixer.pair_width:
            model, window = mixer.model, ", window" if mixer.window is not None else ""
            cap = "" if model.attention_softcap is None else f", soft cap {model.attention_softcap:g}"
            layers = f"{model.resolved_head_dim}/{model.resolved_value_head_dim}{window}{cap}"
            kernels = [
                f"{kernel} compiles for {', '.join(architectures)}"
                for kernel in dict.fromkeys(name for name, _, _ in compiled())
                if (architectures := [name for name in ARCHITECTURES if (kernel, layers, name) in compiled()])
            ]
            texts.append(f"{layers}: {'; '.join(kernels) or 'no kernel that is compiled here'}")
    return list(dict.fromkeys(texts))


@cache
def compiled() -> frozenset[tuple[str, str, str]]:
    """(kernel, layers without the number of heads, architecture) of the page's tables and lists."""
    text = PAGE.read_text(encoding="utf-8").partition("## Attention")[2].partition("## Layers without")[0]
    rows = re.findall(r"^\| ([\w-]+) \| (\d+/\d+[^|]*?) \|[^|]*\| (sm_\w+) \|", text, re.M)
    for item in text.partition("These spill nothing:")[2].split("\n- ")[1:]:
        named, _, layers = " ".join(item.split()).partition(": ")
        kernel, architecture = named.split(", ")
        rows += [(kernel, kind, architecture) for kind in layers.split("; ")]
    return frozenset(row for row in rows if not row[1].endswith(_CALLS_OF_TREES))
