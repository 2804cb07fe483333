"""Attention over packed documents: time, TFLOP/s and memory, alone and as the ranks of a context-parallel group.

    python -m tools.bench_attention                           8K to 256K, three mixes, cp 1, 2, 4, 8, 16
    python -m tools.bench_attention --lengths 64k,128k --mixes one --cp 1,8 --out rows.jsonl
    python -m tools.bench_attention --device cpu --tiny       whether the tool itself works

Not yet run on a GPU.  Rows: `flash` is sft's path through torch's kernel, `tiles` its plain torch (short packs only),
`sdpa` torch's own attention, one call a document, `cudnn` the same by cuDNN, `te` Transformer Engine's over packed
documents (tools/attention_ways.py); what does not run here is told, with the reason.  With cp above 1 every rank's
share is run on this one device in turn, by the trainer's own code; what ranks would send each other is copied in memory
instead, so communication costs nothing and `efficiency` (one device's time / cp / the slowest rank's) is that of
computing alone.

A way whose results are not those of sdpa at the shortest length is refused: nothing is timed then.  Medians of
--repeats (fewer above 64K), the ranks of a row in turns; CUDA events.  `fwd+bwd` includes forward.  FLOPs are causal;
backward counts 2.5 times forward, as it computes the scores again.  `slowest` is over the fastest rank.  `extra` is the
most memory beyond the inputs, gradients included.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sft.mcore.attention import packed_attention
from sft.parallel import context_parallel
from tools import attention_ways as ways
from tools import measure
from tools.attention_ways import Problem, Way

MULTIPLE = 64  # of a document, enough for cp 16 and 32
TILES_UP_TO = 8192  # tokens; plain torch has millions of small steps beyond
TOLERANCE = 2e-2  # of the norm, bf16 on both sides
WIDTHS = (26, 5, 11, 11, 9, 11, 9, 12, 11)
HEAD = ("", "cp", "fwd ms", "fwd+bwd ms", "TFLOP/s", "fwd+bwd", "slowest", "efficiency", "extra MiB")


class WrongResult(Exception):
    """A way that must not be timed."""


@contextmanager
def alone(p: Problem, cp_size: int) -> Iterator[None]:
    """The exchange between ranks, by copies in this device's memory."""
    order = np.concatenate([context_parallel.local_indices(p.boundaries, cp_size, rank) for rank in range(cp_size)])
    both = torch.cat([x.detach() for x in p.tensors[1:3]], dim=-1)[torch.from_numpy(order).to(p.device)]

    done, lots = SimpleNamespace(wait=lambda: None), itertools.count()

    def all_gather_into_tensor(out: Tensor, local: Tensor, group: Any, async_op: bool) -> Any:
        some = local.shape[1]  # of the heads; lots come in order, forward and backward
        first = next(lots) * some % both.shape[1]
        out.copy_(both[:, first : first + some])
        return done

    def reduce_scatter_tensor(local: Tensor, total: Tensor, group: Any, async_op: bool) -> Any:
        local.copy_(total[group.rank() * len(local) : (group.rank() + 1) * len(local)])
        return done

    stand_in = SimpleNamespace(
        all_gather_into_tensor=all_gather_into_tensor, reduce_scatter_tensor=reduce_scatter_tensor
    )
    with mock.patch.object(packed_attention, "dist", stand_in):
        yield


def forward(way: Way) -> None:
    with torch.no_grad():
        way()


def backward(way: Way) -> None:
    out, gradient = way()
    out.backward(gradient)


def check(p: Problem, degrees: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """Ways that do not take these documents, and why.  Raises WrongResult where the output or a query's gradient is
    not sdpa's."""
    expected, refused = _found(ways.by_sdpa(p), p.tensors), {}
    for name in names:
        if name in ("flash", "sdpa"):
            continue
        try:
            _compare(name, _found(ways.whole(p, name), p.tensors), expected)
        except ways.REFUSALS as error:
            if not ways.is_refusal(name, error):
                raise
            refused[name] = ways.reason(error)
            for x in p.tensors[:3]:
                x.grad = None
    for cp_size in degrees if "flash" in names else ():
        with alone(p, cp_size):
            for rank in range(cp_size):
                way, inputs, here = ways.by_flash(p, cp_size, rank)
                wanted = [x[torch.from_numpy(here).to(p.device)] for x in expected]
                _compare(f"flash, cp {cp_size}, rank {rank}", _found(way, inputs), wanted)
    return refused


def _found(way: Way, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradient of the queries."""
    out, gradient = way()
    out.backward(gradient)
    return [out.detach(), _taken(inputs)]


def _taken(tensors: Sequence[Tensor]) -> Tensor:
    """The gradient of the queries; none is left."""
    found = tensors[0].grad
    assert found is not None
    for x in tensors[:3]:
        x.grad = None
    return found


def _compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for what, mine, theirs in zip(("output", "gradient of the queries"), found, expected, strict=True):
        away = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        if not away <= TOLERANCE:
            raise WrongResult(f"{name}: the {what} is off by {away:.2%} of its norm; nothing was timed.")


def timed(p: Problem, name: str, cp_size: int, repeats: int) -> list[dict[str, Any]]:
    """One entry a rank: seconds of forward, of both, and bytes.  The ranks take turns."""
    shares: list[tuple[Way, Sequence[Tensor]]] = []
    if name == "flash":
        shares = [ways.by_flash(p, cp_size, rank)[:2] for rank in range(cp_size)]
    else:
        shares = [(ways.whole(p, name), p.tensors[:3])]

    def clear() -> None:
        for _, inputs in shares:
            for x in inputs:
                x.grad = None

    with alone(p, cp_size):
        calls = {f"fwd {i}": (lambda w=way: forward(w)) for i, (way, _) in enumerate(shares)}
        calls |= {f"both {i}": (lambda w=way: backward(w)) for i, (way, _) in enumerate(shares)}
        seconds = measure.medians(calls, p.device, repeats=repeats, prepare=clear)
        clear()
        found = []
        for i, (way, _) in enumerate(shares):
            extra = measure.peak_beyond(lambda: backward(way), p.device)
            clear()
            found.append({"fwd_s": seconds[f"fwd {i}"], "both_s": seconds[f"both {i}"], "extra": extra})
    return found


def row_of(
    name: str, cp_size: int, ranks: Sequence[dict[str, Any]], flops: float, whole: dict[str, Any] | None
) -> dict[str, Any]:
    """One line of the table.  flops: of forward of the whole pack; whole: what one device takes, where known.

    4 ranks that take 1.0, 1.0, 1.0 and 1.25 s of what one device does in 4 s: efficiency 4 / 4 / 1.25 = 80%
    """
    slowest = {key: max(rank[key] for rank in ranks) for key in ("fwd_s", "both_s")}
    extra = [rank["extra"] for rank in ranks if rank["extra"] is not None]
    found: dict[str, Any] = {"way": name, "cp": cp_size, "ranks": list(ranks), **slowest}
    found["fwd_tflops"] = flops / cp_size / slowest["fwd_s"] / 1e12
    found["both_tflops"] = (1 + measure.BACKWARD) * flops / cp_size / slowest["both_s"] / 1e12
    found["extra"] = max(extra) if extra else None
    if whole and cp_size > 1:
        found["fwd_efficiency"] = whole["fwd_s"] / cp_size / slowest["fwd_s"]
        found["efficiency"] = whole["both_s"] / cp_size / slowest["both_s"]
    return found


def line(title: str, row: dict[str, Any]) -> str:
    fastest = min(rank["both_s"] for rank in row["ranks"])
    cells = [
        title, row["cp"], f"{row['fwd_s'] * 1e3:.2f}", f"{row['both_s'] * 1e3:.2f}", f"{row['fwd_tflops']:.1f}",
        f"{row['both_tflops']:.1f}", f"{row['both_s'] / fastest:.3f}" if row["cp"] > 1 else "-",
        f"{row['efficiency']:.1%}" if "efficiency" in row else "-",
        "-" if row["extra"] is None else f"{row['extra'] / 2**20:,.0f}",
    ]  # fmt: skip
    return measure.columns(cells, WIDTHS)


def pack_of(mix: str, length: int, options: argparse.Namespace) -> Problem:
    device = torch.device(options.device)
    tensors = measure.random_inputs(length, options.heads, options.groups, options.head_dim, device)
    return Problem(boundaries=measure.boundaries_of(mix, length, MULTIPLE), tensors=tensors, device=device)


def bench(options: argparse.Namespace, emit: Callable[[dict[str, Any]], None]) -> int:
    """The exit status."""
    begun = time.monotonic()
    absent = {n: why for n in options.ways if (why := ways.why_not(n, torch.device(options.device)))}
    names = [name for name in options.ways if name not in absent]
    for mix in options.mixes:
        try:
            absent |= check(pack_of(mix, min(options.lengths), options), options.cp, names)
        except WrongResult as error:
            print(f"bench_attention: {mix}: {error}", file=sys.stderr)
            return 2
        names = [name for name in names if name not in absent]
    for name, why in absent.items():
        emit({"way": name, "status": f"does not run here: {why}"})
        print(f"{name} does not run here: {why}")
    print(measure.columns(HEAD, WIDTHS))
    for length in options.lengths:
        for mix in options.mixes:
            title = f"{measure.short(length)} {mix}"
            if time.monotonic() - begun > 60 * options.minutes:
                print(f"{title}: not begun, {options.minutes:g} minutes are over", flush=True)
                continue
            p = pack_of(mix, length, options)
            flops = measure.attention_flops(p.boundaries, options.heads, options.head_dim)
            whole: dict[str, Any] | None = None
            repeats = max(1, options.repeats // max(1, length // 65_536))  # a long one takes seconds
            for name, degree in rows_of(names, options.cp, length):
                about = {"length": length, "mix": mix, "documents": len(p.boundaries) - 1, "repeats": repeats}
                about |= {"way": name, "cp": degree}
                try:
                    row = row_of(name, degree, timed(p, name, degree, repeats), flops, whole)
                except torch.OutOfMemoryError as error:
                    emit({**about, "status": "out of memory", "error": str(error)})
                    print(f"{title} {name}, cp {degree}: out of memory", flush=True)
                    torch.cuda.empty_cache()
                    continue
                except ways.REFUSALS as error:
                    if not ways.is_refusal(name, error):
                        raise
                    emit({**about, "status": f"refused: {ways.reason(error)}", "error": str(error)})
                    print(f"{title} {name}: refused: {ways.reason(error)}", flush=True)
                    continue
                whole = row if name == "flash" and degree == 1 else whole
                emit({**about, **row})
                print(line(f"{title} {name}", row), flush=True)
            del p
    return 0


def rows_of(names: Sequence[str], degrees: Sequence[int], length: int) -> list[tuple[str, int]]:
    """(way, context_parallel); flash alone first, which the ranks are compared with."""
    found = [("flash", degree) for degree in degrees if "flash" in names]
    others = [name for name in ways.NAMES[1:] if name in names and (name != "tiles" or length <= TILES_UP_TO)]
    return found + [(name, 1) for name in others]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lengths", default="8k,16k,32k,64k,128k,256k", help="tokens of a pack")
    parser.add_argument("--mixes", default="one,chat,longmix", help=f"of {', '.join(measure.MIXES)}")
    parser.add_argument("--ways", default=",".join(ways.NAMES), help=f"of {', '.join(ways.NAMES)}")
    parser.add_argument("--cp", default="1,2,4,8,16", help="sizes of the group whose ranks are run in turn")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing new is begun after so many")
    parser.add_argument("--out", type=Path, help="a file that every row is added to, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a shape of seconds on a CPU")
    options = parser.parse_args(argv)
    if options.tiny:
        options.lengths, options.cp, options.repeats = "256,512", "1,2", 1
        options.heads, options.groups, options.head_dim = 4, 2, 16
    options.lengths = sorted(measure.length_of(text) for text in options.lengths.split(","))
    options.cp = sorted({int(text) for text in options.cp.split(",")} | {1})
    options.mixes, options.ways = options.mixes.split(","), options.ways.split(",")
    if unknown := {*options.mixes} - {*measure.MIXES} | {*options.ways} - {*ways.NAMES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.repeats < 1 or any(MULTIPLE % (2 * size) for size in options.cp):
        parser.error(f"--repeats is at least 1, and a size of --cp divides {MULTIPLE // 2}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --tiny tries the tool")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    header = measure.about(torch.device(options.device))
    shape = f"{options.heads} heads, {options.groups} groups, {options.head_dim} wide, bf16"
    print(f"{measure.told(header)}\n{shape}, medians of {options.repeats}, above 64K of fewer", flush=True)
    emit = measure.added_to(options.out)
    emit({"header": header, "shape": shape})
    return bench(options, emit)


if __name__ == "__main__":
    sys.exit(main())
