"""What one process of bench_step measures: constants of the device, then steps of the trainer, or of its peer.

The peer is what a user writes without a trainer: transformers with torch's own attention, fp32 weights under bf16
autocast, gradient checkpointing, fused AdamW, full logits, one document.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from torch import Tensor

from sft.batch import Sample
from sft.config import Config
from sft.data.loader import Loader, make_loader
from sft.mcore import device as devices
from sft.mcore import engine as engine_module
from sft.mcore import model as model_module
from sft.mcore import process_groups
from sft.mcore.optimizer import build
from sft.parallel import context_parallel
from sft.parallel.layout import Layout
from tools import attention_ways as ways
from tools import measure

RANGE = "sft: "
PADDED = 16  # samples
MULTIPLE = 64
STEPS = 1000  # of the schedule, more than are done


class Corpus:
    """Random tokens; the second half of every sample is supervised."""

    sources = ("random",)

    def __init__(self, lengths: np.ndarray, vocab: int) -> None:
        self.lengths, self._vocab = lengths.astype(np.int64), vocab

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, sample_id: int) -> Sample:
        n = int(self.lengths[sample_id])
        tokens = np.random.default_rng(sample_id).integers(0, self._vocab, size=n, dtype=np.int32)
        return Sample(sample_id=sample_id, tokens=tokens, weights=(np.arange(n) >= n // 2).astype(np.float32))


# --- constants ---------------------------------------------------------------------------------------------------


def constants(case: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Rates of this device, now: FLOP/s and bytes/s.  None of its tensors are left."""
    attention, absent = attention_rates(case, device, options.kernels)
    found = {**rates(device), "attention": attention, "attention not run": absent}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def rates(device: torch.device) -> dict[str, float]:
    """Of a large product, and of copies: on the device (what is read and what is written), and over the bus."""
    on_cuda = device.type == "cuda"
    n, size = (8192, 1 << 30) if on_cuda else (64, 1 << 16)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    c, source = torch.empty_like(a), torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {"gemm": lambda: torch.mm(a, b, out=c), "copy": lambda: target.copy_(source)}
    if on_cuda:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        calls["to device"] = lambda: target.copy_(host, non_blocking=True)
        calls["to host"] = lambda: host.copy_(target, non_blocking=True)
    seconds = measure.medians(calls, device, repeats=10)
    amounts = {"gemm": 2.0 * n**3, "copy": 2.0 * size, "to device": size, "to host": size}
    return {name: amounts[name] / taken for name, taken in seconds.items()}


def attention_rates(
    case: Any, device: torch.device, kernels: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """FLOP/s of each kernel that runs here, on one document of the length: forward, backward; and why others do not."""
    heads, groups, width = (
        case.model.num_attention_heads,
        case.model.resolved_query_groups,
        case.model.resolved_head_dim,
    )
    boundaries = np.array([0, case.length], dtype=np.int32)
    tensors = measure.random_inputs(case.length, heads, groups, width, device)
    problem = ways.Problem(boundaries=boundaries, tensors=tensors, device=device)
    flops, found = measure.attention_flops(boundaries, heads, width), {}
    absent = {name: why for name in kernels if (why := ways.why_not(name, device))}
    for name in kernels:
        if name in absent:
            continue
        try:
            forward, backward = _seconds(ways.whole(problem, name), problem, 4 if case.length <= 65_536 else 2)
        except ways.REFUSALS as error:
            if not ways.is_refusal(name, error):
                raise
            absent[name] = ways.reason(error)
            continue
        found[name] = {"forward": flops / forward, "backward": measure.BACKWARD * flops / backward}
    return found, absent


def _seconds(way: ways.Way, problem: ways.Problem, times: int) -> tuple[float, float]:
    """Median of forward, of backward; the first of each does not count."""
    forward, backward = [], []
    for _ in range(times):
        for x in problem.tensors[:3]:
            x.grad = None
        outs: list[tuple[Tensor, Tensor]] = []
        forward.append(measure.seconds_of(lambda: outs.append(way()), problem.device))
        ((out, gradient),) = outs
        backward.append(measure.seconds_of(partial(out.backward, gradient), problem.device))
    return float(np.median(forward[1:])), float(np.median(backward[1:]))


# --- the two loops -----------------------------------------------------------------------------------------------


def trainer(case: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Steps of sft."""
    measured = {} if options.fit else constants(case, options, device)
    seq_length, multiple, _ = drawn(case, 1)
    config = case.config(device.type, seq_length=seq_length, multiple=multiple, also=options.set)
    layout = Layout.resolve(config, 1)
    place = process_groups.start(layout, devices.start(device.type), seed=config.run.seed, timeout_s=300)
    before = host_bytes()
    engine, loader = made(case, config, layout, place, num_steps=options.steps + 1)

    def step(index: int) -> dict[str, float]:
        start = time.perf_counter()
        microbatches = loader.microbatches(index)
        waited = time.perf_counter() - start
        totals = engine.train_step(microbatches, data_wait_s=waited)
        return {
            "tokens": totals.num_real_tokens, "labels": totals.num_tokens, "squares": totals.sum_of_squares,
            "data_wait_s": waited, "peak_bytes": totals.memory_allocated.value, "loss": totals.objective,
        }  # fmt: skip

    ranges = {"head": (engine_module, "lm_loss"), "optimizer": (build, "update")}
    found = twice(step, device) if options.fit else steps(step, options, device, ranges)
    found["host_bytes"] = max(0, host_bytes() - before)
    process_groups.stop()
    return {**found, "constants": measured, "backend": f"attention {engine.backend}"}


def made(
    case: Any, config: Config, layout: Layout, place: process_groups.ProcessGroups, *, num_steps: int
) -> tuple[engine_module.Engine, Loader]:
    """The trainer of this rank with random weights, and what it reads: random packs for so many steps."""
    with mock.patch.object(model_module, "_draw", partial(_draw, place.device)):
        engine = engine_module.Engine(config, layout, place, vocab_size=case.vocab, num_steps=STEPS)
    lengths = drawn(case, num_steps * config.train.global_batch_size + 2)[2]
    corpus: Any = Corpus(lengths, case.vocab)
    loader = make_loader(
        config, layout, corpus, dp_rank=place.dp_rank, pad_id=0,
        local_indices=partial(context_parallel.local_indices, cp_size=layout.cp, cp_rank=place.cp_rank),
    )  # fmt: skip
    loader.plans.steps_per_epoch(0)
    return engine, loader


def twice(step: Callable[[int], dict[str, float]], device: torch.device) -> dict[str, Any]:
    """The most memory of two steps: the first makes the optimizer's states, and the second finds them there."""
    seen = [timed(step, index, device)[1] for index in range(2)]
    return {"peak_bytes": max(one["peak_bytes"] for one in seen) or None, "tokens": seen[-1]["tokens"]}


def host_bytes() -> int:
    """What this process holds in host memory: what is resident, or what is pinned where that is more."""
    resident: int = psutil.Process().memory_info().rss
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if torch.cuda.is_available() else 0
    return max(resident, int(pinned))


def peer(case: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Steps of plain transformers on one document of the length."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    measured, model = constants(case, options, device), case.model
    config = Qwen3Config(
        vocab_size=case.vocab, hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups, head_dim=model.head_dim, tie_word_embeddings=model.tie_embeddings,
        max_position_embeddings=case.length, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with device:
        network = Qwen3ForCausalLM(config).float().train()
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.1, fused=device.type == "cuda")
    sample = Corpus(np.array([case.length]), case.vocab).sample(0)
    tokens = torch.from_numpy(sample.tokens).long()[None].to(device)
    labels = tokens.masked_fill(torch.from_numpy(sample.weights == 0).to(device), -100)

    def step(index: int) -> dict[str, float]:
        with torch.autocast(device.type, torch.bfloat16):
            loss = network(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        return {
            "tokens": case.length, "labels": sample.num_supervised, "squares": case.length**2, "data_wait_s": 0.0,
            "peak_bytes": peak, "loss": float(loss),
        }  # fmt: skip

    found = steps(step, options, device, {"optimizer": (optimizer, "step")})
    return {**found, "constants": measured, "backend": "transformers, torch SDPA, gradient checkpointing, full logits"}


def steps(
    step: Callable[[int], dict[str, float]], options: argparse.Namespace, device: torch.device, ranges: dict[str, Any]
) -> dict[str, Any]:
    """One that does not count, those that do, and a trace of the last or of one more."""
    total: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    warm, seen = timed(step, 0, device)
    peak, is_long = seen["peak_bytes"], warm > options.seconds
    seconds, count, profiled_s = 0.0, 0, 0.0
    events: list[dict[str, Any]] = []
    while count < (1 if is_long else options.steps) and seconds < options.seconds:
        if is_long:
            events, taken, seen = profiled(step, 1, device, ranges)
            profiled_s = taken
        else:
            taken, seen = timed(step, 1 + count, device)
        seconds, count, peak = seconds + taken, count + 1, max(peak, seen["peak_bytes"])
        for name in ("tokens", "labels", "squares", "data_wait_s"):
            total[name] = total.get(name, 0.0) + seen[name]
    if not is_long:
        events, profiled_s, _ = profiled(step, 1 + count, device, ranges)
    return {
        **total, "seconds": seconds, "steps": count, "events": events, "profiled_s": profiled_s,
        "timed_while_profiled": is_long, "first_step_s": warm, "peak_bytes": peak or None, "loss": seen["loss"],
    }  # fmt: skip


def timed(step: Callable[[int], dict[str, float]], index: int, device: torch.device) -> tuple[float, dict[str, float]]:
    """Seconds of a whole step by the wall clock, everything that it started done."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    seen = step(index)
    synchronize()
    return time.perf_counter() - start, seen


def profiled(
    step: Callable[[int], dict[str, float]], index: int, device: torch.device, ranges: dict[str, Any]
) -> tuple[list[dict[str, Any]], float, dict[str, float]]:
    """The events of a step in Chrome's format, its seconds, what it saw.  ranges: name -> (owner, its function)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    patches = [
        mock.patch.object(owner, n, named(RANGE + name, getattr(owner, n))) for name, (owner, n) in ranges.items()
    ]
    for patch in patches:
        patch.start()
    try:
        with torch.profiler.profile(activities=activities) as profile:
            taken, seen = timed(step, index, device)
    finally:
        for patch in patches:
            patch.stop()
    with tempfile.TemporaryDirectory(prefix="bench_step-") as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"], taken, seen


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)

    return call


def drawn(case: Any, packs: int) -> tuple[int, int, np.ndarray]:
    """data.seq_length, data.doc_multiple, and lengths of so many packs."""
    if case.mix == "1k":  # as much memory as one document, and little time
        size = min(1024, case.length)
        return case.length, MULTIPLE, np.full(-(-packs * case.length // size), size)
    if case.mix != "padded":
        return case.length, MULTIPLE, measure.lengths_to(case.mix, packs * case.length, case.length)
    few = measure.lengths_to("chat", case.length, case.length)[:PADDED]
    longest = -(-int(few.max()) // MULTIPLE) * MULTIPLE
    return case.length // longest * longest, longest, np.tile(few, packs)


def _draw(device: torch.device, shard: Any, seed: int, std: float) -> Tensor:
    """A random weight, made where it is needed: the trainer's own way takes a minute for billions of numbers."""
    return torch.randn(tuple(shard.data.shape), device=device) * std
