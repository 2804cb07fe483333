"""Maps `run.fp8` to fields of megatron-core, and checks that the GPU and Transformer Engine can run the FP8 recipe.

The linear layers of attention, MLP and experts compute in FP8, forward and backward.  Each operand has separate scales.
The dtypes of weights, of their gradients and of optimizer states do not change.  The attention kernel, norms, the
embedding and the loss head stay in bf16.  sft/parallel/alignment.py has the multiples of lengths and widths that FP8
requires.
"""

from dataclasses import dataclass
from typing import Any

# The formats and the amax history of 1024 steps are Transformer Engine's defaults.  Core's default history is one step.
_FIELDS: dict[str, dict[str, Any]] = {
    "delayed": dict(fp8="hybrid", fp8_margin=0, fp8_amax_history_len=1024, fp8_amax_compute_algo="max"),
    "tensorwise": dict(fp8="hybrid"),
    "blockwise": dict(fp8="e4m3"),
    "mxfp8": dict(fp8="e4m3"),
}


@dataclass(frozen=True, kw_only=True)
class _Requirements:
    """The versions and GPUs that an FP8 recipe needs."""

    te: tuple[int, int]  # first release of Transformer Engine that has the recipe
    gpu: tuple[int, int]  # first compute capability that can run the recipe
    gpu_name: str
    below: tuple[int, int] | None = None  # first compute capability that cannot run the recipe
    cuda: tuple[int, int] = (12, 1)  # oldest version that torch may be built for

    def fit(self, gpu: tuple[int, int]) -> bool:
        return self.gpu <= gpu and (self.below is None or gpu < self.below)


# The releases are from megatron-core's fp8_utils (0.16.1, 0.19.2), the rest from Transformer Engine's quantization.py
# (2.20).
_REQUIREMENTS = {
    "delayed": _Requirements(te=(1, 0), gpu=(8, 9), gpu_name="Ada or later"),
    "tensorwise": _Requirements(te=(2, 2), gpu=(8, 9), gpu_name="Ada or later"),
    "blockwise": _Requirements(te=(2, 3), gpu=(9, 0), gpu_name="Hopper or later", cuda=(12, 9)),
    "mxfp8": _Requirements(te=(2, 1), gpu=(10, 0), gpu_name="Blackwell of data centres", below=(12, 0)),
}


def fields(fp8: str | None) -> dict[str, Any]:
    """The fields of TransformerConfig for this value of run.fp8."""
    if fp8 is None:
        return {"fp8": None}  # a set field, which model.megatron cannot override to enable FP8 without checks
    return {
        **_FIELDS[fp8],
        "fp8_recipe": fp8,
        "fp8_param": False,  # keeps weights in bf16, so any other run can read the weights of a checkpoint
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
    }


def why_not(fp8: str, *, te: tuple[int, int], gpu: tuple[int, int], cuda: tuple[int, int]) -> str | None:
    """The reason why these versions or this GPU cannot run this recipe; None if they can.

    te, cuda: (major, minor); gpu: compute capability, (9, 0) for H100 and H200
    """
    needs = _REQUIREMENTS[fp8]
    if te < needs.te:
        return f"it needs Transformer Engine {_dotted(needs.te)}, but {_dotted(te)} is installed"
    if not needs.fit(gpu):
        limit = f", below {_dotted(needs.below)}" if needs.below else ""
        return (
            f"it needs a GPU of compute capability {_dotted(needs.gpu)} or more{limit} ({needs.gpu_name}), but this "
            f"GPU has {_dotted(gpu)}"
        )
    if cuda < needs.cuda:
        return f"it needs CUDA {_dotted(needs.cuda)}, but torch was built for {_dotted(cuda)}"
    return None


def recipes_for(gpu: tuple[int, int]) -> list[str]:
    """Values of run.fp8 that this GPU can run if the versions suit.  (9, 0) -> delayed, tensorwise, blockwise"""
    return [name for name, needs in _REQUIREMENTS.items() if needs.fit(gpu)]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
