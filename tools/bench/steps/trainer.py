"""Runs steps of the trainer on random tokens, with random weights; recipe, plan, loader and engine are those of sft.

The second half of every sample is supervised.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from sft.batch import Microbatch, Sample
from sft.config import Config
from sft.data.loader import Loader, make_loader
from sft.mcore import device as devices
from sft.mcore import engine as engine_module
from sft.mcore import process_groups
from sft.mcore.checkpoint_io.optimizer_shards import optimizer_slices
from sft.mcore.engine import Engine
from sft.mcore.initial_weights import initialise
from sft.mcore.lora import adapted
from sft.mcore.optimizer import build
from sft.parallel.layout import Layout
from sft.weights.trained import trained_weights
from tools.bench.clock import catch_out_of_memory, medians, wall_on
from tools.bench.mixes import lengths_to
from tools.bench.steps.case import StepCase
from tools.bench.steps.loop import StepOptions, measured, most_memory
from tools.bench.steps.roofline import constants

NUM_PADDED = 16  # number of samples of the mix `padded`
MULTIPLE = 64
NUM_STEPS = 1000  # steps of the learning rate schedule; fewer steps are timed
ROUNDS = 5  # timed steps of each engine, with and without adapters


class RandomCorpus:
    """A corpus of random tokens; the second half of every sample is supervised."""

    sources = ("random",)

    def __init__(self, lengths: np.ndarray, vocab: int) -> None:
        self.lengths, self._vocab = lengths.astype(np.int64), vocab
        self.shapes = self.lengths
        self.source_ids = np.zeros(len(lengths), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, sample_id: int) -> Sample:
        n = int(self.lengths[sample_id])
        tokens = np.random.default_rng(sample_id).integers(0, self._vocab, size=n, dtype=np.int32)
        return Sample(sample_id=sample_id, tokens=tokens, weights=(np.arange(n) >= n // 2).astype(np.float32))


def measure(case: StepCase, options: StepOptions) -> dict[str, Any]:
    """Measures the steps of one rank."""
    device = torch.device(options.device)
    rates = {} if options.only_fits else constants(case, options.kernels, device)
    seq_length, multiple, _ = documents_of(case, 1)
    config = case.config(device.type, seq_length=seq_length, multiple=multiple, also=options.overrides)
    layout = Layout.resolve(config, 1)
    groups = process_groups.start(layout, devices.start(device.type), seed=config.run.seed, timeout_s=300)
    before = host_bytes()
    engine, loader = engine_and_loader(case, config, layout, groups, num_steps=options.steps + 1)

    def step(index: int) -> dict[str, float]:
        start = time.perf_counter()
        microbatches = loader.microbatches(index)
        waited = time.perf_counter() - start
        totals = engine.train_step(microbatches, data_wait_s=waited)
        return {
            "tokens": totals.num_real_tokens, "labels": totals.num_tokens, "attention_flops": totals.attention_flops,
            "data_wait_s": waited, "peak_bytes": totals.memory_allocated.value,
            "reserved_bytes": totals.memory_reserved.value, "loss": totals.objective,
        }  # fmt: skip

    ranges = {"head": (engine_module, "lm_loss"), "optimizer": (build, "update")}
    row = most_memory(step, device) if options.only_fits else measured(step, options, ranges)
    row["host_bytes"] = max(0, host_bytes() - before)
    if case.lora and not options.only_fits:
        whole = replace(case, lora=0)
        recipe = whole.config(device.type, seq_length=seq_length, multiple=multiple, also=options.overrides)
        row |= against_full(engine, lambda: engine_of(whole, recipe, layout, groups), loader.microbatches(0))
    process_groups.stop()
    return {**row, "constants": rates, "backend": f"attention {engine.backend}"}


def engine_and_loader(
    case: StepCase, config: Config, layout: Layout, groups: process_groups.ProcessGroups, *, num_steps: int
) -> tuple[Engine, Loader]:
    """The engine of this rank with random weights, and a loader of random packs for `num_steps` steps."""
    engine = engine_of(case, config, layout, groups)
    lengths = documents_of(case, num_steps * config.train.global_batch_size + 2)[2]
    corpus: Any = RandomCorpus(lengths, case.vocab)
    loader = make_loader(config, layout, corpus, pad_id=0, dp_rank=groups.dp_rank, cp_rank=groups.cp_rank)
    loader.plans.plan(0)  # makes the plan before a clock starts
    return engine, loader


def engine_of(case: StepCase, config: Config, layout: Layout, groups: process_groups.ProcessGroups) -> Engine:
    """The engine of this rank with random weights, and adapters of a new run."""
    trained = trained_weights(config, case.vocab)
    engine = Engine(config, layout, groups, vocab_size=case.vocab, num_steps=NUM_STEPS, trained=trained)
    initialise(engine)
    adapted.initialise(engine.chunks, config.run.seed)
    engine_module.weights_changed(engine)  # else the optimizer's copies of bf16 factors stay NaN
    return engine


def against_full(
    adapted: Engine, make_full: Callable[[], Engine], microbatches: Sequence[Microbatch]
) -> dict[str, Any]:
    """Facts of an engine with adapters and of an engine for full fine-tuning, which train in turns on the same packs.

    time_ratio is the median time of a step with adapters / without them; None if both engines do not fit in memory.
    """
    facts: dict[str, Any] = {"time_ratio": None, "lora": state_of(adapted)}
    with catch_out_of_memory():
        engines = {"lora": adapted, "full": make_full()}
        calls = {name: partial(engine.train_step, microbatches) for name, engine in engines.items()}
        seconds = medians(calls, repeats=ROUNDS, clock=wall_on(adapted.groups.device))
        facts |= {"time_ratio": seconds["lora"] / seconds["full"], "full": state_of(engines["full"])}
    return facts


def state_of(engine: Engine) -> dict[str, int]:
    """The number of trained parameters, and the bytes of their gradients and of the optimizer's states.

    The weights of the model do not count as optimizer states, even if the optimizer uses them.
    Example: shape `tiny` with rank 8 in fp32 has 16,384 trained parameters, 65,536 bytes of gradients, and 131,072
    bytes of optimizer states.
    """
    params = [param for chunk in engine.chunks for param in chunk.parameters()]
    buffers = [buffer for chunk in engine.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    own = {param.untyped_storage().data_ptr() for param in params}
    states = [tensor for part in optimizer_slices(engine.optimizer) for tensor in part.tensors.values()]
    return {
        "trained": sum(param.numel() for param in params if param.requires_grad),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer_bytes": sum(x.nbytes for x in states if x.untyped_storage().data_ptr() not in own),
    }


def documents_of(case: StepCase, num_packs: int) -> tuple[int, int, np.ndarray]:
    """data.seq_length, data.doc_multiple, and the lengths of documents for `num_packs` packs."""
    if case.mix == "1k":  # needs as much memory as one long document, but less time
        size = min(1024, case.length)
        return case.length, MULTIPLE, np.full(-(-num_packs * case.length // size), size)
    if case.mix != "padded":
        return case.length, MULTIPLE, lengths_to(case.mix, num_packs * case.length, case.length)
    samples = lengths_to("chat", case.length, case.length)[:NUM_PADDED]
    longest = -(-int(samples.max()) // MULTIPLE) * MULTIPLE
    return case.length // longest * longest, longest, np.tile(samples, num_packs)


def host_bytes() -> int:
    """Host memory of this process in bytes: the larger of its resident memory and its pinned memory."""
    resident: int = psutil.Process().memory_info().rss
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if torch.cuda.is_available() else 0
    return max(resident, int(pinned))
