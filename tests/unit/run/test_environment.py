"""Environment variables that a run sets before CUDA starts: the chosen values, and that values of the user stay."""

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft.config import Config
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from sft.run import environment

ROOT = Path(__file__).resolve().parents[3]
RECIPE = """
run: {dir: unused, device: cuda}
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, init_from: random}
data: {train: unused, seq_length: 256}
train: {num_steps: 2, global_batch_size: 8}
optim: {lr: 1e-3}
"""
HOPPER, BLACKWELL = 9, 10
ONE, ONE_WITH_COPIES, MANY = (
    {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
)


def resolved(world_size: int, *overrides: str) -> tuple[Config, Layout]:
    config = parse_recipe(RECIPE, "tests", list(overrides)).config
    return config, Layout.resolve(config, world_size)


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of this process without these variables, on a machine with Hopper GPUs."""
    monkeypatch.setattr(environment, "_compute_capability", lambda: HOPPER)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    variables = {name: value for name, value in os.environ.items() if name not in environment.NAMES}
    monkeypatch.setattr(os, "environ", variables)
    yield variables


def chosen(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in environment.NAMES}


def test_what_is_set_where_the_user_sets_nothing(unset: dict[str, str], tmp_path: Path) -> None:
    assert environment.prepare(*resolved(2, "parallel.cp=2")) == frozenset()
    assert chosen(unset) == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TRITON_CACHE_DIR": f"{tmp_path}/sft-triton-{os.getuid()}",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{tmp_path}/sft-flash-attention-4-sm90-{os.getuid()}",
        "NCCL_DEBUG": "WARN",
        "NVTE_BATCH_MHA_P2P_COMM": "1",
    }
    assert (tmp_path / f"sft-triton-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_no_cache_of_kernels_where_files_have_no_locks(unset: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 would wait for its file lock, and then end the run."""

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(environment.fcntl, "flock", flock)
    environment.prepare(*resolved(2, "parallel.cp=2"))
    assert "TRITON_CACHE_DIR" in unset and not [name for name in unset if name.startswith("FLASH_ATTENTION")]


@pytest.mark.parametrize(
    "name, value, absent",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "16", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"),
        ("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "2", "CUDA_DEVICE_MAX_CONNECTIONS"),
        ("TRITON_CACHE_DIR", "/scratch/triton", None),
        ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0", None),
        ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "/scratch/kernels", None),
        ("NCCL_DEBUG", "INFO", None),
        ("NVTE_BATCH_MHA_P2P_COMM", "0", None),
    ],
)
def test_the_users_own_value_stays(unset: dict[str, str], name: str, value: str, absent: str | None) -> None:
    unset[name] = value
    offloading = ["train.recompute=full", "train.offload_fraction=0.5"]
    assert environment.prepare(*resolved(2, "parallel.cp=2", *offloading)) == {name}
    assert unset[name] == value and absent not in unset
    assert f"{name}={value} (set by the user)" in environment.describe({name}, "cuda")


def test_a_run_without_cp_has_no_ring(unset: dict[str, str]) -> None:
    environment.prepare(*resolved(2, "parallel.tp=2"))
    assert "NVTE_BATCH_MHA_P2P_COMM" not in unset


def test_a_run_on_the_cpu_needs_none_of_them(unset: dict[str, str]) -> None:
    assert environment.prepare(*resolved(2, "parallel.cp=2", "run.device=cpu")) == frozenset()
    assert chosen(unset) == {}


def test_the_line_of_the_log(unset: dict[str, str]) -> None:
    assert environment.describe((), "cuda") == ""
    unset |= {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "UNRELATED": "1"}
    assert environment.describe({"NCCL_DEBUG"}, "cuda") == (
        "environment NCCL_DEBUG=INFO (set by the user), GLOO_SOCKET_IFNAME=eth0"
    )
    assert environment.describe((), "cpu") == "environment GLOO_SOCKET_IFNAME=eth0"


@pytest.mark.parametrize(
    "capability, world_size, overrides, offloads, expected",
    [
        (HOPPER, 1, [], False, {}),
        (HOPPER, 8, ["parallel.pp=2"], True, {}),
        (HOPPER, 2, ["parallel.tp=2"], False, ONE),
        (HOPPER, 8, ["parallel.cp=2"], False, ONE),
        (HOPPER, 2, ["parallel.cp=2"], True, ONE_WITH_COPIES),
        (None, 2, ["parallel.tp=2"], True, ONE_WITH_COPIES),  # without NVML
        (BLACKWELL, 8, [], True, {}),
        (BLACKWELL, 2, ["parallel.cp=2"], True, {}),
        (BLACKWELL, 4, ["parallel.cp=2"], True, MANY),
        (BLACKWELL, 4, ["parallel.tp=2", "parallel.pp=2"], False, MANY),
        (12, 4, ["parallel.tp=2"], False, MANY),
    ],
)
def test_hardware_queues(
    capability: int | None, world_size: int, overrides: list[str], offloads: bool, expected: dict[str, str]
) -> None:
    _, layout = resolved(world_size, *overrides)
    assert environment.connections(layout, offloads=offloads, capability=capability) == expected


@pytest.mark.parametrize(
    "override", ["train.offload_fraction=0.5", "optim.offload_fraction=0.5"], ids=["activations", "optimizer"]
)
def test_either_offload_keeps_the_queues_of_copies(unset: dict[str, str], override: str) -> None:
    environment.prepare(*resolved(2, "parallel.cp=2", "train.recompute=full", override))
    assert unset["CUDA_DEVICE_MAX_COPY_CONNECTIONS"] == "8"


class Nvml:
    """Replaces libnvidia-ml: one GPU of compute capability 10.3, or no GPU."""

    def __init__(self, *, has_gpu: bool) -> None:
        self._error = 0 if has_gpu else 6  # NVML_ERROR_NOT_FOUND

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, gpu: Any) -> int:
        gpu._obj.value = 0xABC
        return self._error

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Any, major: Any, minor: Any) -> int:
        assert gpu.value == 0xABC
        major._obj.value, minor._obj.value = 10, 3
        return 0


def test_the_architecture_comes_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, expected in ((True, 10), (False, None)):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, nvml=Nvml(has_gpu=has_gpu): nvml)
        assert environment._compute_capability() == expected

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert environment._compute_capability() is None


def test_a_cache_that_somebody_else_can_write_is_not_used(unset: dict[str, str], tmp_path: Path) -> None:
    """Triton runs the files that it finds in its cache."""
    cache = tmp_path / f"sft-triton-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    for make in (
        lambda: (cache.mkdir(), cache.chmod(0o777)),
        lambda: cache.symlink_to(tmp_path / "elsewhere"),
        lambda: cache.write_text(""),
    ):
        make()
        environment.prepare(*resolved(1))
        assert "TRITON_CACHE_DIR" not in unset
        cache.rmdir() if cache.is_dir() and not cache.is_symlink() else cache.unlink()


def test_a_cache_of_another_user_is_not_used(
    unset: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    another = os.getuid() + 1
    (tmp_path / f"sft-triton-{another}").mkdir(mode=0o700)
    monkeypatch.setattr(environment, "os", SimpleNamespace(getuid=lambda: another, environ=unset))
    environment.prepare(*resolved(1))
    assert "TRITON_CACHE_DIR" not in unset


def test_it_is_set_before_anything_that_may_start_cuda_is_imported(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("train: unused", f"train: {tmp_path}/recipe.yaml"))
    code = f"""
import sys
from sft import cli
from sft.run import environment
heavy = ("megatron", "transformer_engine", "sft.mcore", "sft.api.rank", "sft.trainer")
environment.prepare = lambda config, layout: sys.exit(str([name for name in heavy if name in sys.modules]))
for words in (["train"], ["probe", "leak"]):
    try:
        cli.main([*words, "{tmp_path}/recipe.yaml"])
    except SystemExit as reached:
        print(words, reached)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout == "['train'] []\n['probe', 'leak'] []\n", done.stderr
