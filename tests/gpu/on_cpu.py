"""A plugin of pytest: tests of kernels run on a CPU, so that on a GPU only their numbers can be wrong.

    python -m pytest -p tests.gpu.on_cpu tests/gpu/test_kernels.py

"cuda" becomes "cpu", and torch's flash operators become those of tests/plain_flash.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sft.mcore.backends import kernels
from tests.plain_flash import PLAIN


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return func(*args, **named)


@pytest.fixture(autouse=True)
def _redirected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "FLASH", {**kernels.FLASH, "torch's flash kernel": PLAIN})
    with _OnCpu():
        yield
