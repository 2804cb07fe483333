"""FLA's kernels, as this trainer calls them, against the recurrence in float64, by Triton's interpreter on a CPU.

`make test` skips this file, because fla-core needs Triton; `make test-triton` installs both.  The interpreter computes
one variant of each kernel.  A GPU compiles them, and chooses between variants: tests/gpu/test_fla.py.
"""

import builtins
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
if os.environ["TRITON_INTERPRET"] == "0":
    pytest.skip("on a GPU, tests/gpu/test_fla.py runs the compiled kernels", allow_module_level=True)
pytest.importorskip("triton", reason="make test-triton installs it")
pytest.importorskip("fla", reason="make test-triton installs it")

from sft.mcore.linear_attention import fla_functions  # noqa: E402
from sft.mcore.linear_attention.delta_rule import Fragments, Inputs  # noqa: E402
from sft.mcore.linear_attention.fla_kernel import FlaKernel  # noqa: E402
from sft.mcore.linear_attention.gated_delta import gated_delta_rule  # noqa: E402
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel  # noqa: E402
from sft.parallel.taps import Taps  # noqa: E402
from tests.unit.fixtures.recurrence import OneProcess, recurrence  # noqa: E402

KEY_HEADS, VALUE_HEADS, K, V = 1, 2, 16, 16
TOLERANCE = 2e-6  # share of the norm: fp32 sums over chunks of 64 tokens; measured at most 4e-7
BF16_TOLERANCE = 2e-2  # products of bf16 numbers, 2^-8 each; measured at most 6e-3
TAPS, CHANNELS = 4, 16


class Index(int):
    """A number of a loop.  In the interpreter it is a Python int, on which a kernel of FLA calls `to`."""

    def to(self, dtype: Any) -> "Index":
        return self


@pytest.fixture(scope="module")
def kernel() -> Iterator[FlaKernel]:
    """FLA by the interpreter: one variant of each kernel, and no question for the GPU's compute capability."""
    from fla.ops.common import chunk_delta_h
    from fla.ops.cp import chunk_fwd
    from triton.runtime.autotuner import Autotuner

    with pytest.MonkeyPatch.context() as patch:
        assert fla_functions.problem() is None
        for tuned in {id(x): x for module in list(__import__("sys").modules.values()) for x in autotuned(module)}.values():
            patch.setattr(tuned, "configs", tuned.configs[:1])
        patch.setattr(chunk_fwd, "_check_cp_device", lambda device: None)
        patch.setattr(chunk_delta_h, "range", lambda *x: map(Index, builtins.range(*map(int, x))), raising=False)
        yield FlaKernel(fla_functions.functions())
