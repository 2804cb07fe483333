"""Decides whether a compiled kernel is good: it must not keep too many registers in memory."""

from collections.abc import Sequence

from tests.kernels.cubins import Compiled

SPILLED = 256  # bytes a thread, of the best variant of a kernel
# Kernel, and a part of the configuration's text -> the most that it may spill where its best variant spills more.  With
# fla-core 0.6.0 and Triton 3.7.1: 1,048 and 1,496 bytes (sm_90a, sm_100a) for maps of fragments; 0 and 840 for
# gradients of the WY representation, 1,320 (sm_100a) with heads of 96/192, which have one variant; 1,192 (sm_90a) for
# the fused gradients of Kimi Delta Attention.  With flash-attn-4 4.0.0b36: 400 bytes with a soft cap.
KNOWN_SPILLS = {
    ("chunk_cp_fwd_kernel_h", ""): 1536,
    ("prepare_wy_repr_bwd_kernel", ""): 1024,
    ("prepare_wy_repr_bwd_kernel", "96/192"): 1344,
    ("chunk_kda_bwd_kernel_wy_dqkg_fused", ""): 1280,
    ("FlashAttentionBackwardSm100", "soft cap"): 448,
}


def spills(text: str, found: Sequence[Compiled]) -> str:
    """Which kernels of a configuration spill too much; "" if none does."""
    problems = ((one, _most(one.kernel, text)) for one in found)
    return "; ".join(
        f"{one.kernel} spills {one.usage.spilled} bytes, more than {most}"
        for one, most in problems
        if one.usage.spilled > most
    )


def _most(kernel: str, text: str) -> int:
    return max(
        (most for (name, part), most in KNOWN_SPILLS.items() if name == kernel and part in text), default=SPILLED
    )
