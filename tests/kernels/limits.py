"""Decides whether a compiled kernel is good: it must not keep too many registers in memory."""

from collections.abc import Sequence

from tests.kernels.cubins import Compiled

SPILLED = 256  # bytes a thread, of the best variant of a kernel
# Kernels of FLA whose best variant spills more, and the most that it may.  With fla-core 0.6.0 and Triton 3.7.1: 1,048
# and 1,496 bytes (sm_90a, sm_100a) for maps of fragments; 0 and 840 for gradients of the WY representation.
KNOWN_SPILLS = {"chunk_cp_fwd_kernel_h": 1536, "prepare_wy_repr_bwd_kernel": 1024}


def spills(found: Sequence[Compiled]) -> str:
    """Which kernels spill too much; "" if none does."""
    most = {one.kernel: KNOWN_SPILLS.get(one.kernel, SPILLED) for one in found}
    return "; ".join(
        f"{one.kernel} spills {one.usage.spilled} bytes, more than {most[one.kernel]}"
        for one in found
        if one.usage.spilled > most[one.kernel]
    )
