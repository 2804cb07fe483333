"""FP8: what `run.fp8` is to megatron-core, and which GPUs and releases of Transformer Engine can do it.

Weights, their gradients and the optimizer stay what they are without: FP8 is what the layers' products are computed
in, forward and backward, each operand scaled anew.  Attention, norms, the embedding and the loss head stay in bf16.
What it asks of lengths and widths is `sft.parallel.alignment`'s business.
"""

from dataclasses import dataclass
from typing import Any

# Formats and histories are the defaults of Transformer Engine's own recipes; megatron-core's history is one step long.
_FIELDS: dict[str, dict[str, Any]] = {
    "delayed": dict(fp8="hybrid", fp8_margin=0, fp8_amax_history_len=1024, fp8_amax_compute_algo="max"),
    "tensorwise": dict(fp8="hybrid"),
    "blockwise": dict(fp8="e4m3"),
    "mxfp8": dict(fp8="e4m3"),
}


@dataclass(frozen=True, kw_only=True)
class _Needs:
    """te: release of Transformer Engine; gpu, below: compute capabilities; cuda: version that torch is built for"""

    te: tuple[int, int]
    gpu: tuple[int, int]
    named: str
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (12, 1)


# Releases from megatron-core's fp8_utils (0.16.1, 0.19.2), the rest from Transformer Engine's quantization.py (2.20).
_NEEDS = {
    "delayed": _Needs(te=(1, 0), gpu=(8, 9), named="Ada or later"),
    "tensorwise": _Needs(te=(2, 2), gpu=(8, 9), named="Ada or later"),
    "blockwise": _Needs(te=(2, 3), gpu=(9, 0), named="Hopper or later", cuda=(12, 9)),
    "mxfp8": _Needs(te=(2, 1), gpu=(10, 0), named="Blackwell of data centres", below=(12, 0)),
}


def fields(fp8: str | None) -> dict[str, Any]:
    """Fields of TransformerConfig, by run.fp8.

    "mxfp8" -> fp8 "e4m3", fp8_recipe "mxfp8", and weights and attention not in FP8
    """
    if fp8 is None:
        return {"fp8": None}  # said, so that model.megatron cannot switch it on past the checks
    return {
        **_FIELDS[fp8],
        "fp8_recipe": fp8,
        "fp8_param": False,  # a checkpoint has the weights that any other run can read
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
    }


def why_not(fp8: str, *, te: tuple[int, int], gpu: tuple[int, int], cuda: tuple[int, int]) -> str | None:
    """Why these versions and this GPU cannot, in words; None where they can.

    te, cuda: (major, minor); gpu: compute capability, (9, 0) for H100 and H200
    """
    needs = _NEEDS[fp8]
    if te < needs.te:
        return f"it needs Transformer Engine {_dotted(needs.te)}, and {_dotted(te)} is here"
    if gpu < needs.gpu or (needs.below and gpu >= needs.below):
        limit = f", below {_dotted(needs.below)}" if needs.below else ""
        return (
            f"it needs a GPU of compute capability {_dotted(needs.gpu)} or more{limit} ({needs.named}), and this one "
            f"has {_dotted(gpu)}"
        )
    if cuda < needs.cuda:
        return f"it needs CUDA {_dotted(needs.cuda)}, and torch was built for {_dotted(cuda)}"
    return None


def recipes_for(gpu: tuple[int, int]) -> list[str]:
    """What run.fp8 can be on such a GPU, releases apart.  (9, 0) -> delayed, tensorwise, blockwise"""
    return [name for name, needs in _NEEDS.items() if needs.gpu <= gpu and not (needs.below and gpu >= needs.below)]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
