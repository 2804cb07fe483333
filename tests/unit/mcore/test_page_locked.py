"""An arena has the size of its tensors, and its pages are unlocked after the last of them is dropped."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sft.mcore import device, page_locked
from sft.mcore.page_locked import Arena, aligned

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PAGE = 4096


class Driver:
    """Locks pages as CUDA does, without CUDA: `held` has the bytes of each locked block by address."""

    def __init__(self, most: int) -> None:
        self.most, self.held, self.calls = most, dict[int, int](), 0

    def lock(self, address: int, num_bytes: int, where: torch.device) -> str | None:
        assert address % PAGE == 0 and where == GPU
        self.calls += 1
        if sum(self.held.values()) + num_bytes > self.most:
            return "CUDA reports: out of memory (2)"
        self.held[address] = num_bytes
        return None

    def unlock(self, address: int, where: torch.device) -> None:
        del self.held[address]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(most=1 << 20)
    monkeypatch.setattr(device, "lock_pages", found.lock)
    monkeypatch.setattr(device, "unlock_pages", found.unlock)
    monkeypatch.setattr(page_locked, "_available", lambda: 64 << 30)
    return found


def test_tensors_share_a_block_that_is_locked_once(driver: Driver) -> None:
    """5 x 3 fp32, 7 bf16, 33 bytes, nothing, and 4,100 bytes take 64 + 64 + 64 + 0 + 4,160 bytes: two pages."""
    wanted: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((5, 3), torch.float32), ((7,), torch.bfloat16), ((33,), torch.uint8), ((0, 4), torch.float32),
        ((4100,), torch.uint8),
    ]  # fmt: skip
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted]
    assert [aligned(num_bytes) for num_bytes in sizes] == [64, 64, 64, 0, 4160]
    arena = Arena(sum(map(aligned, sizes)), GPU)
    tensors = [arena.take(shape, dtype).fill_(number) for number, (shape, dtype) in enumerate(wanted)]
    assert arena.num_bytes == 2 * PAGE and list(driver.held.values()) == [2 * PAGE] and driver.calls == 1
    first = next(iter(driver.held))
    assert [tensor.data_ptr() - first for tensor in tensors if len(tensor)] == [0, 64, 128, 192]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, wanted)):
        assert tensor.shape == shape and tensor.dtype == dtype and bool((tensor == number).all())
        # torch writes a tensor to a file without a copy only if its storage holds nothing else
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    with pytest.raises(AssertionError):
        arena.take((PAGE,), torch.uint8)


def test_pages_are_unlocked_with_the_last_tensor(driver: Driver) -> None:
    arena = Arena(128, GPU)
    one, other = (arena.take((16,), torch.float32) for _ in range(2))
    del arena, one
    gc.collect()
    assert len(driver.held) == 1
    del other
    gc.collect()
    assert driver.held == {}


def test_a_run_on_a_cpu_locks_nothing(driver: Driver) -> None:
    assert Arena(5000, CPU).take((5000,), torch.uint8).sum() == 0
    assert driver.calls == 0


@pytest.mark.parametrize(
    ("num_bytes", "left", "where", "said"),
    [
        (2 << 20, 64 << 30, GPU, "2.0 MiB of host memory cannot be page-locked: CUDA reports: out of memory (2)"),
        (
            300 << 20, 3 << 30, GPU,
            "300 MiB of host memory cannot be page-locked: 3.0 GiB of memory are left, and 4.0 GiB are kept free",
        ),
        (1 << 50, 64 << 30, CPU, "1024 TiB of host memory cannot be allocated: Cannot allocate memory"),
    ],
)  # fmt: skip
def test_too_much_is_refused_with_its_size_and_the_reason(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, num_bytes: int, left: int, where: torch.device, said: str
) -> None:
    monkeypatch.setattr(page_locked, "_available", lambda: left)
    with pytest.raises(MemoryError) as error:
        Arena(num_bytes, where)
    assert str(error.value) == said
    gc.collect()
    assert driver.held == {}


@pytest.mark.parametrize(
    ("job", "limit", "left"),
    [("0::/slurm/job_7", "1048576", 300 << 10), ("0::/slurm/job_7", "max", 2 << 20), ("0::/", "", 2 << 20)],
)
def test_what_the_machine_and_the_job_have_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str, limit: str, left: int
) -> None:
    """The machine has 2 MiB.  The job may take 1 MiB and has taken 824 KiB, of which 100 KiB are cached files."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 24674500 kB\nMemAvailable:    2048 kB\nHugePages_Total:  0\n")
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/other\n{job}\n")
    if limit:
        group = tmp_path / "groups/slurm"
        (group / "job_7").mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{824 << 10}\n")
        (group / "memory.stat").write_text("anon 700000\nactive_file 40960\ninactive_file 61440\n")
    monkeypatch.setattr(page_locked, "_PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(page_locked, "_GROUPS", tmp_path / "groups")
    assert page_locked._available() == left


def test_an_error_of_cuda_stays_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises the last error of a thread after a later kernel, which has nothing to do with it."""
    import threading

    threads: list[threading.Thread] = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        threads.append(threading.current_thread())
        assert (address, num_bytes, flags) == (PAGE, 8192, 0)
        return 2

    def check(error: int) -> None:
        if error:
            raise RuntimeError(f"out of memory ({error})")

    monkeypatch.setattr(device, "enter", lambda where: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "check_error", check)
    assert device.lock_pages(PAGE, 8192, GPU) == "CUDA reports: out of memory (2)"
    assert threads[0] is not threading.current_thread()
