"""Runs a measurement on several ranks: processes on this machine, or this process as the only rank."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sft.mcore.process_groups import parallel_state
from tools.bench.harness import Refused, Row

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def rows_of_rank0(
    size: int,
    measure: Callable[..., Sequence[Row]],
    *arguments: Any,
    device_type: str = "cpu",
    start_method: str = "spawn",
) -> list[Row]:
    """The rows that rank 0 of `size` new processes returns.  Every rank runs `measure(*arguments)`.

    device_type: cpu makes a process group of gloo, and cuda one of NCCL
    start_method: fork gives the ranks the modules that this process has imported
    Raises Refused if a rank raises it, and torch's ProcessRaisedException with the traceback of a rank that fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            of_rank = (size, folder, BACKENDS[device_type], measure, arguments)
            mp.start_processes(_on_rank, of_rank, nprocs=size, start_method=start_method)
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            refusals = sorted(Path(folder).glob("refused-*"))
            if not refusals:
                raise
            raise Refused(refusals[0].read_text(encoding="utf-8")) from None
        rows: list[Row] = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
        return rows


def _on_rank(
    rank: int, size: int, folder: str, backend: str, measure: Callable[..., Sequence[Row]], arguments: Any
) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        rows = measure(*arguments)
    except Refused as error:
        (Path(folder) / f"refused-{rank}").write_text(str(error), encoding="utf-8")
        sys.stderr.flush()
        os._exit(2)  # skips cleanup, because other ranks may wait for this one in a collective
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone(device_type: str) -> Iterator[None]:
    """A context with a process group in which this process is the only rank."""
    dist.init_process_group(BACKENDS[device_type], store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def tensor_parallel() -> Iterator[None]:
    """A context in which all ranks are one tensor-parallel group in the parallel_state of megatron-core."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
