"""What the tokens of a pack and the widths of a model must be multiples of.

Decides the multiples, and which widths fit.  sft/parallel/layout.py decides how many ranks there are and whether that
fits; the loader adds the filler documents that bring a pack to its multiple.
"""

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING, TypeVar

from sft.config import Config, divisors

if TYPE_CHECKING:
    import numpy as np  # a mistake in a recipe is reported before numpy is imported

# Tokens of one rank, as its layers keep them, by run.fp8.  From Transformer Engine's sources, 2.18 to 2.20.
#   delayed, tensorwise   16: cuBLASLt's products; tokens are the inner dimension of a weight's gradient
#   mxfp8                 32: the quantizer takes blocks of 1 x 32 and of 32 x 1, nothing less
#   blockwise            128: the quantizer's tile.  Products take 16, but a rank's part of any other length is
#                             gathered in bf16 under sequence parallel, with a warning for each
FP8_TOKENS = {None: 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
# Rows and columns of a rank's part of a weight.  blockwise: 16 on Hopper; Blackwell computes it by way of mxfp8.
FP8_WIDTHS = {None: 1, "delayed": 16, "tensorwise": 16, "blockwise": 32, "mxfp8": 32}

Lengths = TypeVar("Lengths", int, "np.ndarray")


def aligned(length: Lengths, doc_multiple: int) -> Lengths:
    """The length of a document with its padding: rounded up to a multiple of `doc_multiple`; for an int or an array.

    aligned(33, 32) -> 64        aligned(np.array([1, 32, 33]), 32) -> [32, 32, 64]

    Truncation, the planner and the packer all count with this function.  A packer that counts real lengths overfills
    its packs: 992 documents of 33 tokens are 32,736 real tokens, and 63,488 at doc_multiple 64.
    """
    return -(-length // doc_multiple) * doc_multiple


def pack_multiple(config: Config) -> int:
    """Whole documents, equal chunks for every cp rank, and local tokens that sequence parallel and FP8 can take.

    doc_multiple 32, cp 2, tp 4 with sequence parallel -> 32, and with mxfp8 -> 2 * 4 * 32 = 256
    """
    parallel = config.parallel
    return lcm(config.data.doc_multiple, 2 * parallel.cp, parallel.cp * _split(config) * FP8_TOKENS[config.run.fp8])


def explain_multiple(config: Config) -> str:
    """What the multiple follows from: "doc_multiple 32, cp 2, tp 4 with sequence parallel, 32 tokens of fp8 mxfp8"."""
    parallel, fp8 = config.parallel, config.run.fp8
    reasons = [f"doc_multiple {config.data.doc_multiple}", f"cp {parallel.cp}"]
    if _split(config) > 1:
        reasons.append(f"tp {parallel.tp} with sequence parallel")
    if fp8:
        reasons.append(f"{FP8_TOKENS[fp8]} tokens of a rank for fp8 {fp8}")
    return ", ".join(reasons)


def uneven_widths(config: Config) -> Iterator[str]:
    """One message about the widths that FP8 cannot take, or none.  For a tp that divides heads and feed-forward."""
    fp8, tp = config.run.fp8, config.parallel.tp
    multiple = FP8_WIDTHS[fp8]
    wrong = {name: width for name, width in _widths(config, tp).items() if width % multiple}
    if not wrong:
        return
    uneven = ", ".join(f"{name} = {width:,}" for name, width in wrong.items())
    fitting = [size for size in divisors(tp) if not any(width % multiple for width in _widths(config, size).values())]
    instead = f"Use a tp of {', '.join(map(str, fitting))}, or run.fp8=null" if fitting else "Use run.fp8=null"
    yield f"run.fp8 = {fp8} takes weights whose sides are multiples of {multiple}, and here {uneven}.  {instead}."


def _split(config: Config) -> int:
    return config.parallel.tp if config.parallel.sequence_parallel else 1


def _widths(config: Config, tp: int) -> dict[str, int]:
    """Sides of one rank's parts of the weights that Transformer Engine multiplies by."""
    model, etp = config.model, config.parallel.etp
    heads, groups, width = model.num_attention_heads, model.resolved_query_groups, model.resolved_head_dim
    if model.moe.num_experts:
        feed_forward = {"the width of an expert / etp": model.resolved_expert_ffn // etp}
    else:
        feed_forward = {"model.ffn_hidden_size / tp": model.ffn_hidden_size // tp}
    return {
        "model.hidden_size": model.hidden_size,
        "num_attention_heads x head_dim / tp": heads * width // tp,
        "(num_attention_heads + 2 x num_query_groups) x head_dim / tp": (heads + 2 * groups) * width // tp,
        **feed_forward,
    }
