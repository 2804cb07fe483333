"""Attention over packed documents: time, TFLOP/s and memory, on one device and as the ranks of a cp group.

    python -m tools.bench attention                                    8K to 256K, three mixes, cp 1 to 16
    python -m tools.bench attention --cases 64k:one,128k:one --cp 1,8

A case is LENGTH:MIX (tools/bench/mixes.py).  tools/bench/attention_ways.py lists the implementations; `plain` runs only
on short packs.  With cp above 1, one device computes the parts of all ranks, one after another, with the trainer's
code.  Copies in memory replace the communication between ranks, so `efficiency` (time of one device / cp / time of the
slowest rank) measures computation alone.

If the result of an implementation differs from that of sdpa on a short pack, nothing is timed.  Times are medians of
--repeats repetitions (fewer above 64K); the ranks of a row take turns.  `fwd+bwd` includes forward.  FLOPs are causal;
backward counts 2.5 times forward, because backward recomputes the scores.  `slowest` is the time of the slowest rank /
the time of the fastest rank.  `extra` is the peak memory in addition to the inputs, gradients included.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sft.mcore.attention import key_source
from sft.parallel import context_parallel
from tools.bench import attention_ways as ways
from tools.bench.attention_ways import BACKWARD, Pack, Way
from tools.bench.clock import check_close, medians, peak_beyond, time_on
from tools.bench.harness import Column, Option, Row, Subject
from tools.bench.mixes import boundaries_of, read_length_and_mix

MULTIPLE = 64  # document lengths are multiples of 64 tokens, which allows cp up to 32
TOLERANCE = 2e-2  # norm of the difference / norm of the result; both results are bf16
PLAIN_UP_TO = 8192  # tokens; for longer packs, plain torch runs millions of small operations


def read_cp(text: str) -> list[int]:
    """The cp sizes of a text, sorted, with 1 added: "8,2" -> [1, 2, 8]"""
    return sorted({1, *map(int, text.split(","))})


def pack_of(mix: str, length: int, options: argparse.Namespace) -> Pack:
    heads = (options.heads, options.groups, options.head_dim)
    return Pack.random(boundaries_of(mix, length, MULTIPLE), heads, options.device)


def prepare(options: argparse.Namespace) -> Iterator[Row]:
    """Checks every implementation on a short pack of each mix.

    Removes implementations that cannot run here from `options.ways`, and yields a row for each.
    """
    absent = {name: why for name in options.ways if (why := ways.why_not(name, options.device))}
    length = min(length for length, _ in options.cases)
    for mix in {mix: None for _, mix in options.cases}:
        absent |= check(pack_of(mix, length, options), options.cp, [n for n in options.ways if n not in absent])
    options.ways = [name for name in options.ways if name not in absent]
    for name, why in absent.items():
        yield {"case": "every", "way": name, "status": f"does not run here: {why}"}


def check(p: Pack, cp_sizes: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """The implementations that cannot compute these documents, with reasons.

    Raises Refused if a result differs from the result of sdpa.
    """
    expected = list(_results(ways.by_sdpa(p), p.tensors).values())
    refusals: dict[str, str] = {}
    for name in names:
        if name in ("flash", "sdpa"):
            continue
        try:
            check_close(name, _results(ways.whole(p, name), p.tensors), expected, TOLERANCE)
        except ways.REFUSALS as error:
            if not ways.is_refusal(name, error):
                raise
            refusals[name] = ways.reason(error)
    for cp_size in cp_sizes if "flash" in names else ():
        with in_memory_group(p, cp_size):
            for rank in range(cp_size):
                way, inputs, indices = ways.by_flash(p, cp_size, rank)
                share = [x[torch.from_numpy(indices).to(p.device)] for x in expected]
                check_close(f"flash, cp {cp_size}, rank {rank}", _results(way, inputs), share, TOLERANCE)
    return refusals


def _results(way: Way, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The output and the gradient of the queries."""
    out, gradient = way()
    (dquery,) = torch.autograd.grad(out, inputs[:1], gradient)
    return {"the output": out.detach(), "the gradient of the queries": dquery}


@contextmanager
def in_memory_group(p: Pack, cp_size: int) -> Iterator[None]:
    """A context in which the collectives of a cp group are copies in the memory of this device."""
    order = np.concatenate([context_parallel.local_indices(p.boundaries, cp_size, rank) for rank in range(cp_size)])
    both = torch.cat([x.detach() for x in p.tensors[1:3]], dim=-1)[torch.from_numpy(order).to(p.device)]
    work, num_gathers = SimpleNamespace(wait=lambda: None), itertools.count()

    def all_gather_into_tensor(out: Tensor, local: Tensor, group: Any, async_op: bool) -> Any:
        num_heads = local.shape[1]  # of a head group; forward and backward gather the head groups in order
        first = next(num_gathers) * num_heads % both.shape[1]
        out.copy_(both[:, first : first + num_heads])
        return work

    def reduce_scatter_tensor(local: Tensor, total: Tensor, group: Any, async_op: bool) -> Any:
        local.copy_(total[group.rank() * len(local) : (group.rank() + 1) * len(local)])
        return work

    collectives = {"all_gather_into_tensor": all_gather_into_tensor, "reduce_scatter_tensor": reduce_scatter_tensor}
    with mock.patch.object(key_source, "dist", SimpleNamespace(**collectives)):
        yield


def measure(case: tuple[int, str], options: argparse.Namespace) -> Iterator[Row]:
    length, mix = case
    pack = pack_of(mix, length, options)
    repeats = max(1, options.repeats // max(1, length // 65_536))  # a long pack takes seconds
    whole: Row | None = None  # the row of flash on one device
    for name, cp_size in rows_of(options.ways, options.cp, length):
        facts = {"way": f"{name}, cp {cp_size}" if cp_size > 1 else name, "length": length, "mix": mix, "cp": cp_size}
        facts |= {"documents": len(pack.boundaries) - 1, "repeats": repeats}
        try:
            row = row_of(cp_size, timed(pack, name, cp_size, repeats), pack.flops, whole)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            yield {**facts, "status": "out of memory", "error": str(error)}
            continue
        except ways.REFUSALS as error:
            if not ways.is_refusal(name, error):
                raise
            yield {**facts, "status": f"refused: {ways.reason(error)}", "error": str(error)}
            continue
        whole = row if name == "flash" and cp_size == 1 else whole
        yield {**facts, **row}


def rows_of(names: Sequence[str], cp_sizes: Sequence[int], length: int) -> list[tuple[str, int]]:
    """The implementation and the cp size of each row.

    The first row is flash on one device, with which the rows with cp above 1 are compared.
    """
    rows = [("flash", cp_size) for cp_size in cp_sizes if "flash" in names]
    others = [name for name in ways.NAMES[1:] if name in names and (name != "plain" or length <= PLAIN_UP_TO)]
    return rows + [(name, 1) for name in others]


def forward(way: Way) -> None:
    with torch.no_grad():
        way()


def backward(way: Way) -> None:
    out, gradient = way()
    out.backward(gradient)


def timed(pack: Pack, name: str, cp_size: int, repeats: int) -> list[Row]:
    """A row for each rank: seconds of forward, seconds of forward and backward, extra bytes.  The ranks take turns."""
    shares = [(ways.whole(pack, name), pack.tensors[:3])]
    if name == "flash":
        shares = [ways.by_flash(pack, cp_size, rank)[:2] for rank in range(cp_size)]

    def clear() -> None:
        for _, inputs in shares:
            for x in inputs:
                x.grad = None

    with in_memory_group(pack, cp_size):
        calls = {f"fwd {i}": partial(forward, way) for i, (way, _) in enumerate(shares)}
        calls |= {f"both {i}": partial(backward, way) for i, (way, _) in enumerate(shares)}
        seconds = medians(calls, repeats=repeats, clock=time_on(pack.device), prepare=clear)
        ranks = []
        for i, (way, _) in enumerate(shares):
            clear()
            extra = peak_beyond(partial(backward, way), pack.device)
            ranks.append({"fwd_s": seconds[f"fwd {i}"], "both_s": seconds[f"both {i}"], "extra": extra})
        clear()
    return ranks


def row_of(cp_size: int, ranks: Sequence[Row], flops: float, whole: Row | None) -> Row:
    """The row of an implementation.

    ranks  the measurements of each rank
    flops  FLOPs of a forward pass over the whole pack
    whole  the row of flash on one device, if known

    Example: one device takes 4 s, and 4 ranks take 1.0, 1.0, 1.0 and 1.25 s.  The efficiency is 4 / 4 / 1.25 = 80%.
    """
    fwd, both = (max(rank[key] for rank in ranks) for key in ("fwd_s", "both_s"))
    extra = [rank["extra"] for rank in ranks if rank["extra"] is not None]
    row: Row = {
        "ranks": list(ranks), "fwd_s": fwd, "both_s": both, "fwd_tflops": flops / cp_size / fwd / 1e12,
        "both_tflops": (1 + BACKWARD) * flops / cp_size / both / 1e12, "extra": max(extra) if extra else None,
    }  # fmt: skip
    if cp_size > 1:
        row["slowest"] = both / min(rank["both_s"] for rank in ranks)
    if whole and cp_size > 1:
        row |= {"fwd_efficiency": whole["fwd_s"] / cp_size / fwd, "efficiency": whole["both_s"] / cp_size / both}
    return row


def validate(options: argparse.Namespace) -> None:
    if options.repeats < 1 or any(MULTIPLE % (2 * size) for size in options.cp):
        raise ValueError(f"--repeats must be at least 1, and each size in --cp must divide {MULTIPLE // 2}")


LENGTHS = ("8k", "16k", "32k", "64k", "128k", "256k")
SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("fwd_s", "fwd ms", ".2f", 1e-3),
        Column("both_s", "fwd+bwd ms", ".2f", 1e-3),
        Column("fwd_tflops", "fwd TFLOP/s", ".1f"),
        Column("both_tflops", "fwd+bwd TFLOP/s", ".1f"),
        Column("slowest", "slowest", ".3f"),
        Column("efficiency", "efficiency", ".1%"),
        Column("extra", "extra MiB", ",.0f", 2**20),
    ],
    cases=[f"{length}:{mix}" for length in LENGTHS for mix in ("one", "chat", "longmix")],
    tiny_cases=["256:one", "512:chat"],
    ways=ways.NAMES,
    read=read_length_and_mix,
    options={
        "cp": Option("1,2,4,8,16", "1,2", "sizes of the cp groups", read=read_cp),
        "heads": Option(32, 4, "number of query heads"),
        "groups": Option(8, 2, "number of key and value heads"),
        "head_dim": Option(128, 16, "size of a head"),
        "repeats": Option(5, 1, "timed repetitions"),
    },
    validate=validate,
    prepare=prepare,
    device="gpu",
)
