"""Makes the sentence of docs/concepts/memory.md about the matrices that run.fp8 leaves in bf16.

The table of weights (sft/layers), the families' rules and the fields for megatron-core decide; nothing is measured.
`python -m tools.pages` writes the page.
"""

from collections.abc import Iterator

from sft.estimate.layer_work import NOT_IN_FP8
from sft.hf.families import FAMILIES
from sft.hf.family import Family
from sft.layers.mixers.latent import EXPANDED
from sft.layers.weight import LayerWeight
from sft.layers.weights import is_of_layer, weight_of
from sft.mcore import fp8
from tools import page_text

BEGIN, END = "<!-- made by tools/fp8_table.py -->\n", "<!-- end of products in FP8 -->\n"
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# fp8 of TransformerConfig -> formats of values of forward, and of gradients.
FORMATS = {"hybrid": ("E4M3", "E5M2"), "e4m3": ("E4M3", "E4M3")}


def formats(recipe: str) -> str:
    """The formats of values in forward, and of gradients if they differ, as the page writes them."""
    values, gradients = FORMATS[fp8.fields(recipe)["fp8"]]
    return values if gradients == values else f"{values}, gradients {gradients}"


def matrices(family: Family) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the matrices of the family's layers whose products are in FP8, and of those in bf16."""
    weights = [weight_of(rule.ours) for rule in family.rules if is_of_layer(rule.ours)]
    wanted = list(dict.fromkeys(weight for weight in weights if weight.role == "matrix"))
    in_fp8 = [weight for weight in wanted if weight.part not in NOT_IN_FP8]
    return tuple(map(_name, in_fp8)), tuple(_name(weight) for weight in wanted if weight not in in_fp8)


def _name(weight: LayerWeight) -> str:
    """The last parts of the key: self_attention.linear_qkv.weight -> linear_qkv"""
    parts = weight.key.replace(".weight", "").replace(".gate_weight", ".gate").split(".")
    name = ".".join(parts[-2:] if parts[0] == "mlp" and len(parts) > 2 else parts[-1:])
    return f"{name} (1)" if weight.part == EXPANDED else name


def sentence() -> Iterator[str]:
    """The lines of the sentence about matrices in bf16."""
    in_bf16 = dict.fromkeys(name for family in FAMILIES.values() for name in matrices(family)[1])
    yield from page_text.folded(f"Matrices of layers in FP8: all but {', '.join(in_bf16)}.")


def page(before: str) -> str:
    """The page with a new sentence between its marks."""
    return page_text.replaced(before, BEGIN, END, "\n".join(["", *sentence(), ""]))
