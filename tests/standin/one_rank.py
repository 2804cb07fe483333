"""Simulates one rank of any layout, in one process on the stand-in: groups have all ranks, collectives do nothing.

Kernels of the stand-in compute nothing either, so messages would change nothing that a rank allocates.  What other
ranks or kernels would answer is given here: what ranks gather as objects, that a step had supervised tokens and finite
numbers, and how many tokens experts get.  A collective in progress keeps its tensors, as with NCCL.
"""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sft.config import Config
from sft.config.model import ModelConfig
from sft.data.loader import make_loader
from sft.low_bits import fp4
from sft.mcore import device as devices
from sft.mcore import page_locked, process_groups
from sft.mcore.engine import Engine, release, weights_changed
from sft.mcore.experts.grouped import EachExpert
from sft.mcore.optimizer import build
from sft.metrics.accumulator import Accumulator
from sft.metrics.totals import Totals
from sft.parallel import collectives
from sft.parallel.layout import Layout
from sft.weights.trained import trained_weights
from tests.allocations.categories import OTHER, Peak, peak
from tests.allocations.recorded import cuda_events
from tests.allocations.standing import standing_bytes
from tests.standin.calls import counted
from tools.bench.steps.trainer import RandomCorpus

_IN_TRANSFER = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
STEPS = 2  # the first makes the optimizer states; the last is recorded


def count(config: Config, layout: Layout, vocab_size: int, *, rank: int, lengths: Any) -> tuple[Peak, int]:
    """The peak of the last step by category, by torch's allocator, and the bytes of page-locked memory.

    rank: of the layout; lengths: tokens of documents, enough for all steps
    """
    with alone(config.model, layout, rank):
        found = _count(config, layout, vocab_size, lengths)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # the next row counts its own
    torch._dynamo.reset()  # a compiled function runs uncompiled in a process that has seen too many widths
    return found


def _count(config: Config, layout: Layout, vocab_size: int, lengths: Any) -> tuple[Peak, int]:
    torch._C._host_emptyCache()  # of the row before
    ctypes.CDLL(None).standin_forget_host_peak()
    groups = process_groups.start(layout, devices.start("cuda"), seed=config.run.seed, timeout_s=300)
    trained = trained_weights(config, vocab_size)
    engine = Engine(config, layout, groups, vocab_size=vocab_size, num_steps=1000, trained=trained)
    for chunk in engine.chunks:
        if chunk.module.frozen_base is not None:
            _hold(chunk.module)
    weights_changed(engine)
    corpus: Any = RandomCorpus(lengths, vocab_size)
    loader = make_loader(config, layout, corpus, pad_id=0, dp_rank=groups.dp_rank, cp_rank=groups.cp_rank)

    def step(index: int) -> None:
        engine.train_step(loader.microbatches(index))

    for index in range(STEPS - 1):
        step(index)
    standing = standing_bytes(engine, "cuda")
    standing[OTHER] = torch.cuda.memory_allocated() - sum(standing.values())
    events = cuda_events(lambda: step(STEPS - 1))
    process_groups.stop()
    release(engine)
    return peak(events, standing), counted().most_host_bytes


def _hold(chunk: Any) -> None:
    """Gives experts a stored form in MXFP4, as the files of gpt-oss have them, and all other weights their memory."""
    experts = {id(weight) for module in chunk.modules() if isinstance(module, EachExpert) for weight in module.stored}
    for weight in chunk.frozen_base.weights:
        if id(weight) not in experts:
            weight.keep_whole()
            continue
        rows, columns = weight.param.shape
        blocks = torch.empty(rows, columns // fp4.GROUP, fp4.GROUP // 2, dtype=torch.uint8, device="cuda")
        part = fp4.TransposedMxfp4(blocks=blocks, scales=torch.empty_like(blocks[..., 0]), first=0, count=columns)
        weight.hold(weight.position_of(weight.param), part, weight.param.dtype, transposed=True)


@contextmanager
def alone(model: ModelConfig, layout: Layout, rank: int) -> Iterator[None]:
    """This process is `rank` of the layout's ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    new_group = dist.new_group

    def of_nothing(*given: Any, **how: Any) -> Any:
        return new_group(*given, **{**how, "backend": "fake"})

    def all_gather_object(objects: list[Any], obj: Any, group: Any = None) -> None:
        objects[:] = [obj] * len(objects)

    def all_gather_bytes(message: bytes, group: Any) -> list[bytes]:
        return [message] * layout.world_size

    own = Accumulator.totals

    def totals(self: Accumulator, *given: Any) -> Totals:
        """Supervised tokens are those of the last stage, which is not here.  A step without any updates nothing, and
        neither does one whose loss or norm is not finite: both are what memory held before."""
        return replace(own(self, *given), num_tokens=1, objective=0.0)

    with (
        mock.patch.multiple(dist, new_group=of_nothing, all_gather_object=all_gather_object),
        mock.patch.multiple(dist, **{name: _holding(getattr(dist, name)) for name in _IN_TRANSFER}),
        mock.patch.object(collectives, "all_gather_bytes", all_gather_bytes),
        mock.patch.object(process_groups.ProcessGroups, "reports", True),
        mock.patch.object(Accumulator, "totals", totals),
        mock.patch.object(page_locked, "populate", lambda memory: None),
        mock.patch.object(build, "_norm", lambda optimizer, device: 1.0),
    ):
        try:
            with _equal_shares(model.moe.num_experts, model.moe.top_k or 1) if model.moe.num_experts else nullcontext():
                yield
        finally:
            if dist.is_initialized():  # a failed row
                dist.destroy_process_group()


class _Held:
    """A collective in progress, which keeps its tensors until it is waited for, as NCCL's do."""

    def __init__(self, work: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()
        self._tensors = ()


def _holding(collective: Any) -> Any:
    def held(*given: Any, **how: Any) -> Any:
        work = collective(*given, **how)
        return work and _Held(work, tuple(one for one in given if isinstance(one, torch.Tensor)))

    return held


@contextmanager
def _equal_shares(num_experts: int, top_k: int) -> Iterator[None]:
    """All experts get the same number of tokens: those that a kernel would count, and those that it would select."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    preprocess = MoEAlltoAllTokenDispatcher.preprocess

    def with_counts(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        counts = preprocess(self, routing_map)
        sent = routing_map.shape[0] * top_k // num_experts  # tokens that a rank sends to an expert
        assert sent * num_experts == routing_map.shape[0] * top_k
        sources = self.ep_size * self.tp_size
        if sources > 1:
            to_rank = sent * self.num_local_experts
            _write(self.input_splits, to_rank)
            _write(self.output_splits, to_rank)
            _write(self.output_splits_tp, to_rank * self.ep_size)
        if self.num_local_experts > 1:
            _write(self.num_global_tokens_per_local_expert, sent)
        return _write(counts, sent * sources)

    def masked_select(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return numbers.new_empty(mask.numel() // num_experts * top_k)  # the mask is [experts, tokens]

    library = torch.library.Library("aten", "IMPL")
    library.impl("masked_select", masked_select, "CUDA")
    try:
        with mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", with_counts):
            yield
    finally:
        library._destroy()


def _write(counts: torch.Tensor, number: int) -> torch.Tensor:
    """Sets all counts on the device by a copy, which the stand-in does, and not by a kernel."""
    return counts.copy_(torch.full_like(counts, number, device="cpu"))
