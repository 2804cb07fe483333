"""A plugin of pytest: tests of GPUs run on a CPU, so that on a GPU only their numbers can be wrong.

    python -m pytest -p tests.gpu.on_cpu tests/gpu/test_kernels.py

"cuda" becomes "cpu", torch's flash operators become those of tests/plain_flash.py, FLA becomes plain torch, a
curve has one step, and the longest document 512 tokens.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sft.layers.kernel_rates import FLASH2
from sft.mcore.backends import kernels
from sft.mcore.linear_attention import fla_functions, fla_kernel, ssd_fla
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tests.gpu import runs
from tests.plain_flash import PLAIN

runs.DEVICE = "cpu"  # before the tests are imported


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return func(*args, **named)


@pytest.fixture(autouse=True, scope="session")
def _replaced() -> Iterator[None]:
    train = runs.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLASH", {**kernels.FLASH, FLASH2: PLAIN})
        patch.setattr(fla_functions, "problem", lambda *wanted: None)
        patch.setattr(fla_functions, "functions", lambda: None)
        patch.setattr(fla_kernel, "FlaKernel", lambda functions: TorchDeltaKernel())
        patch.setattr(ssd_fla, "made", TorchSsdKernel)
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
        patch.setattr(runs, "LONGEST", 512)
        patch.setattr(runs, "train", lambda engine, steps: train(engine, steps if len(steps) < 3 else steps[:1]))
        yield


@pytest.fixture(autouse=True)
def _redirected(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.name == "test_training.py":  # a mode over all functions of torch makes steps slow
        yield
        return
    with _OnCpu():
        yield
