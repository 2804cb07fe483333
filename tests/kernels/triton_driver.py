"""A driver of Triton for a GPU that is not there: kernels are compiled for it, recorded, and never launched.

A call of a kernel, or of a function that calls kernels, goes through Triton as on a GPU.  Instead of loading the
binary, this driver reads its resources.  Autotuning compiles every variant, and chooses the one with the fewest spilled
bytes.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton import runtime
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.autotuner import Autotuner

from tests.kernels.cubins import SHARED_BYTES, Usage, usage

MULTIPROCESSORS = {9: 132, 10: 148}
_THREADS = 1024


class Loaded(NamedTuple):
    name: str
    usage: Usage


class RecordingDriver(DriverBase):
    """Records all kernels that Triton would load.  major: of the GPU's compute capability"""

    def __init__(self, major: int) -> None:
        self.major = major
        self.loaded: list[Loaded] = []
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=self._properties)
        self.launcher_cls = _no_launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.major, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return self._fewest_spills

    def _fewest_spills(self, kernel_call: Callable[[], None], quantiles: Any = None, **unused: Any) -> list[float]:
        before = len(self.loaded)
        kernel_call()
        worst = max((loaded.usage.spilled for loaded in self.loaded[before:]), default=0)
        return [float(worst)] * 3

    def _properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES,
            "multiprocessor_count": MULTIPROCESSORS[self.major],
            "warpSize": 32,
            "max_num_regs": 65536,
        }

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            (found,) = usage(Path(file.name)).values()
        self.loaded.append(Loaded(name, found._replace(shared=shared)))
        return 1, 1, found.registers, found.spilled // 4, _THREADS


def _no_launcher(source: Any, metadata: Any) -> Callable[..., None]:
    return lambda *args: None


def activate(major: int) -> RecordingDriver:
    """Makes this process compile for the GPU, and tells libraries that it is there."""
    driver = RecordingDriver(major)
    runtime.driver.set_active(driver)
    torch.cuda.get_device_capability = lambda device=None: (major, 0)
    torch.cuda.get_device_name = lambda device=None: {9: "NVIDIA H100", 10: "NVIDIA B200"}[major]
    torch.cuda.device_count = lambda: 1
    return driver


def first_variants() -> None:
    """Leaves one variant to every autotuner."""
    pruned = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, arguments: list(pruned(self, arguments))[:1]
