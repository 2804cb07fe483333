"""The bars of the loss head, applied to the rows that tools/bench/loss_head.py measures.

Bars of FLOPs apply to every size, and the bar of `extra` bytes from LARGE_BUFFER on.  Bars of time apply on a CPU in
fp32 with CPU_SIZES, and on one H200 in bf16 with CUDA_SIZES; other rows have no bars of time.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from tools.bench.results import DONE, Bar, Row

BASELINE = "F.linear + F.cross_entropy"
CONCATENATE = "chunk list + concatenate"
RECOMPUTE = "recompute in backward"

CPU_SIZES = (2048, 1024, 32_768)  # tokens, hidden, vocabulary
CPU_RATIO = {(1.0, 256): 1.08, (1.0, 512): 1.00, (0.1, 256): 0.15, (0.1, 512): 0.15}  # (fraction, chunk)
CPU_FROZEN_RATIO = 0.75  # time of frozen / time of fused, all supervised; 2 of 3 GEMMs and the whole softmax
# Bytes of the logits of a chunk.  The softmax also copies rows, 512 KiB at a time, which is 2% of this.
LARGE_BUFFER = 25 * 2**20
CUDA_SIZES = (262_144, 2048, 62_080)
CUDA_MS, CUDA_GIB, CUDA_CHUNK = 316.0, 3.3, 4096


def extra_bar(chunk: int, row: Row) -> float | None:
    """Bytes of `extra` that fused may use in fp32: one buffer of logits plus 2%, and a few numbers per token.

    None if the buffer is too small for a bar.
    """
    buffer = chunk * row["vocab"] / row["tp"] * 4
    return 1.02 * buffer + 32 * row["tokens"] if buffer >= LARGE_BUFFER else None


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All bars that apply to the cases of these rows."""
    for _, block in groupby(rows, key=lambda row: (row["fraction"], row["tokens"], row["vocab"], row["dtype"])):
        yield from _of_case({row["way"]: row for row in block if row.get("status", DONE) == DONE})


def _of_case(ways: Mapping[str, Row]) -> Iterator[Bar]:
    fused, frozen = (
        {int(name.split()[1]): row for name, row in ways.items() if name.startswith(f"{impl} ")}
        for impl in ("fused", "frozen")
    )
    for chunk, row in fused.items():
        yield from _of_fused(chunk, row, ways.get(BASELINE))
    for chunk, row in frozen.items():
        yield from _of_frozen(chunk, row, fused.get(chunk))
    if not fused:
        return
    row = fused[max(fused)]
    name = f"fraction {row['fraction']:g}"
    if other := ways.get(RECOMPUTE):
        yield Bar(name=f"{name}, {RECOMPUTE}, FLOPs", value=other["flops"], bound=4 * row["unit"], relation="exactly")
    if (other := ways.get(CONCATENATE)) and "extra" in other and "extra" in row:
        title = f"{name}, {CONCATENATE}, extra bytes, compared with fused"
        yield Bar(name=title, value=other["extra"], bound=row["extra"], relation="above")


def _of_fused(chunk: int, row: Row, baseline: Row | None) -> Iterator[Bar]:
    name = f"fraction {row['fraction']:g}, fused {chunk}"
    flops = 3 * row["unit"] * row["supervised"] // row["tokens"]
    yield Bar(name=f"{name}, FLOPs", value=row["flops"], bound=flops, relation="exactly")
    sizes = (row["tokens"], row["hidden"], row["vocab"])
    if (row["device"], row["dtype"]) == ("cpu", "fp32"):
        if "extra" in row and (bound := extra_bar(chunk, row)):
            yield Bar(name=f"{name}, extra bytes", value=row["extra"], bound=bound)
        ratio = CPU_RATIO.get((row["fraction"], chunk))
        if sizes == CPU_SIZES and ratio and baseline and baseline.get("seconds") and row.get("seconds"):
            share = row["seconds"] / baseline["seconds"]
            yield Bar(name=f"{name}, time / time of {BASELINE}", value=share, bound=ratio)
    if (row["device"], row["dtype"], sizes, chunk, row["fraction"]) == ("cuda", "bf16", CUDA_SIZES, CUDA_CHUNK, 1.0):
        if row.get("seconds"):
            yield Bar(name=f"{name}, ms", value=row["seconds"] * 1e3, bound=CUDA_MS)
        if "total" in row:
            yield Bar(name=f"{name}, GiB", value=row["total"] / 2**30, bound=CUDA_GIB)


def _of_frozen(chunk: int, row: Row, trained: Row | None) -> Iterator[Bar]:
    name = f"fraction {row['fraction']:g}, frozen {chunk}"
    flops = 2 * row["unit"] * row["supervised"] // row["tokens"]
    yield Bar(name=f"{name}, FLOPs", value=row["flops"], bound=flops, relation="exactly")
    if trained is None or (row["device"], row["dtype"]) != ("cpu", "fp32"):
        return
    if "total" in row and "total" in trained:
        weight = row["hidden"] * row["vocab"] // row["tp"] * 4
        yield Bar(name=f"{name}, total bytes", value=row["total"], bound=trained["total"] - weight)
    sizes = (row["tokens"], row["hidden"], row["vocab"])
    if sizes == CPU_SIZES and row["fraction"] == 1.0 and row.get("seconds") and trained.get("seconds"):
        share = row["seconds"] / trained["seconds"]
        yield Bar(name=f"{name}, time / time of fused {chunk}", value=share, bound=CPU_FROZEN_RATIO)
