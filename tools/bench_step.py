"""A whole training step on one GPU: tokens per second, FLOPs, memory, where the time goes, beside what is possible.

    python -m tools.bench_step --minutes 20 --out rows.jsonl           the cases of --list, in that order
    python -m tools.bench_step --cases 4b:128k:one:full,4b:64k:chat    SHAPE:LENGTH:MIX[:train.recompute]
    python -m tools.bench_step --cases none --peer 1.7b,4b             plain transformers, the longest that it survives
    python -m tools.bench_step --device cpu --tiny                     whether the tool itself works

Not yet run on a GPU.  Random weights of Qwen3 shapes, one pack a step, the second half of every sample supervised,
through sft's recipe, planner, loader and engine; --set train.recompute=full and such reach every recipe key.  Mixes are
those of bench_packing; `one` is a single document, `padded` 16 samples of chat each padded to the longest of them.
Every case has a process of its own, and one that does not fit is a row.  After a step that does not count, steps are
timed for --seconds, and one more is profiled (the timed one itself where steps are longer than --seconds).

MFU counts causal attention, and the head where supervised, against --peak-tflops.  The floor is the roofline of
keep-attention: matrix products of the layers 8 times a parameter, of the head 6 times, at 650 / 790 of the rate of an
8192 x 8192 x 8192 product measured by the case itself; attention forward and backward once, at the best rate that
kernels here show on one document of that length.  `of keep`, `of full`: of the floors of keep-attention and of full
recomputation.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft.config import ModelConfig
from sft.cost import num_parameters, train_flops
from tools import measure, step_case

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 151_936
LINEAR = 650 / 790  # of the rate of a large product: what matrix products of a layer are granted
GRACE_S = 90  # that the last case may take beyond --minutes
STATIC = 18  # bytes a parameter: weights 2, gradients 4, optimizer 12
MIXES = (*measure.MIXES, "padded")
COMPONENTS = ("attention", "linear", "head", "optimizer", "copies", "other", "idle", "data")
SIZES = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim tie_embeddings".split()
SHAPES = {
    "0.6b": (28, 1024, 3072, 16, 8, 128, True),
    "1.7b": (28, 2048, 6144, 16, 8, 128, True),
    "4b": (36, 2560, 9728, 32, 8, 128, True),
    "8b": (36, 4096, 12_288, 32, 8, 128, False),
    "tiny": (2, 64, 128, 4, 2, 16, True),
}
# By importance: what is last may find no time.
CASES = (
    "1.7b:64k:one:full 4b:64k:one:full 1.7b:128k:one:full 4b:128k:one:full 1.7b:32k:chat:full 1.7b:32k:padded:full "
    "1.7b:128k:longmix:full 1.7b:128k:agent:full 0.6b:64k:one:selective 1.7b:64k:one:selective 4b:64k:longmix:full "
    "4b:32k:chat:full 0.6b:32k:chat:full 0.6b:128k:one:full 8b:32k:one:full 1.7b:256k:longmix:full 1.7b:256k:one:full"
)
PEER_LENGTHS = (128, 64, 32, 16)  # K tokens
WIDTHS = (29, 6, 9, 9, 8, 8, 9, 9, 9)
HEAD = ("", "steps", "s/step", "tokens/s", "TFLOP/s", "MFU", "GiB", "of keep", "of full")


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    length: int
    mix: str
    recompute: str = "full"

    @classmethod
    def read(cls, text: str) -> "Case":
        """`4b:64k:chat:full`; the recomputation is train.recompute, or `peer`.  Raises ValueError."""
        shape, length, mix, *rest = text.lower().split(":")
        if shape not in SHAPES or mix not in MIXES or len(rest) > 1:
            raise ValueError(f"{text} is not one of {', '.join(SHAPES)}, a length and one of {', '.join(MIXES)}")
        return cls(shape=shape, length=measure.length_of(length), mix=mix, recompute=(rest or ["full"])[0])

    def __str__(self) -> str:
        return f"{self.shape}:{measure.short(self.length).lower()}:{self.mix}:{self.recompute}"

    @property
    def vocab(self) -> int:
        return 512 if self.shape == "tiny" else VOCAB

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(zip(SIZES, SHAPES[self.shape]))

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(**self.sizes, qk_norm=True)


# --- arithmetic --------------------------------------------------------------------------------------------------


def useful_flops(case: Case, row: Mapping[str, Any]) -> float:
    """Of forward and backward of what the row's steps saw."""
    per_token, per_label, per_square = train_flops(case.model, case.vocab)
    return per_token * row["tokens"] + per_label * row["labels"] + per_square * row["squares"]


def floors(case: Case, row: Mapping[str, Any], *, gemm: float, forward: float, backward: float) -> dict[str, float]:
    """Seconds that the row's steps take at least, by what is recomputed; rates in FLOP/s."""
    per_token, per_label, per_square = train_flops(case.model, case.vocab)
    layers, head = per_token * row["tokens"], per_label * row["labels"]
    attention = per_square * row["squares"] / 3  # of one forward
    linear = LINEAR * gemm
    none = (layers + head) / linear + attention / forward + measure.BACKWARD * attention / backward
    keep = none + layers / 3 / linear
    return {"none": none, "keep": keep, "full": keep + attention / forward}


def finished(case: Case, row: dict[str, Any], peak_tflops: float) -> dict[str, Any]:
    """The row with what follows from its measurements."""
    seconds, flops = row["seconds"], useful_flops(case, row)
    found = {**row, "tokens_per_s": row["tokens"] / seconds, "tflops": flops / seconds / 1e12}
    if row["device"] == "cuda":
        found["mfu"] = found["tflops"] / peak_tflops
    constants = row["constants"]
    best = {way: max(rates[way] for rates in constants["attention"].values()) for way in ("forward", "backward")}
    least = floors(case, row, gemm=constants["gemm"], **best)
    return {**found, "floors_s": least, **{f"of_{mode}": least[mode] / seconds for mode in least}}


def at_least(case: Case) -> float:
    """Bytes without which no step is possible: weights, gradients, optimizer, and what enters each layer."""
    model = case.model
    return STATIC * num_parameters(model, case.vocab) + 2.0 * model.hidden_size * model.num_layers * case.length


def shares(events: Iterable[Mapping[str, Any]], wall_s: float) -> dict[str, float]:
    """Component -> share of the step, from a trace of one: what runs within a range of ours is that range's."""
    found = [e for e in events if e.get("ph") == "X"]
    ranges = [e for e in found if e.get("cat") == "gpu_user_annotation" and e["name"].startswith(step_case.RANGE)]
    kernels = [e for e in found if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {}
    busy = dict.fromkeys(COMPONENTS[:-2], 0.0)
    for kernel in kernels:
        inside = (r["name"] for r in ranges if r["ts"] <= kernel["ts"] < r["ts"] + r["dur"])
        owner = next(inside, "").removeprefix(step_case.RANGE) or kind_of(kernel)
        busy[owner] += kernel["dur"] / 1e6 / wall_s
    return {**busy, "idle": max(0.0, 1.0 - sum(busy.values()))}


def kind_of(kernel: Mapping[str, Any]) -> str:
    """By its name; attention first, whose names have `cutlass` in them too."""
    if kernel["cat"] != "kernel":
        return "copies"
    name = kernel["name"].lower()
    if re.search(r"flash|fmha|sdpa|attention", name):
        return "attention"
    return "linear" if re.search(r"gemm|nvjet|cublas|xmma|cutlass", name) else "other"


# --- one case, in a process of its own ---------------------------------------------------------------------------


def child(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured; `status` says more where it was not."""
    device = torch.device(options.device)
    begun = time.monotonic()
    try:
        run = step_case.peer if case.recompute == "peer" else step_case.trainer
        row = run(case, options, device)
        events = row.pop("events")
        row["shares"] = shares(events, row["profiled_s"])
        if row["shares"]:
            row["shares"]["data"] = row["data_wait_s"] / row["seconds"]
        return finished(case, {**row, "status": "done", "device": device.type}, options.peak_tflops)
    except torch.OutOfMemoryError as error:
        gib = torch.cuda.max_memory_allocated() / 2**30
        return {
            "status": f"out of memory at {gib:.1f} GiB, after {time.monotonic() - begun:.0f} s",
            "error": str(error),
        }


def in_a_process(case: Case, options: argparse.Namespace, argv: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The row of a case, whatever becomes of it."""
    total = options.memory_gib * 2**30
    if case.recompute != "peer" and total and at_least(case) > total and not options.try_all:
        needed = f"{at_least(case) / 2**30:.0f} GiB by arithmetic, {options.memory_gib:.0f} GiB there"
        return {"case": str(case), "status": f"skipped: {needed}; --try-all tries"}
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="bench_step-") as folder:
        result = Path(folder) / "row.json"
        command = [sys.executable, "-m", "tools.bench_step", *argv, "--child", str(case), str(result)]
        try:
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"case": str(case), "status": f"stopped after {limit_s:.0f} s"}
        if done.returncode or not result.exists():
            said = done.stderr.strip().splitlines() or ["no word"]
            return {"case": str(case), "status": f"failed: {said[-1]}", "error": done.stderr[-4000:]}
        return {"case": str(case), **json.loads(result.read_text(encoding="utf-8"))}


# --- the table ---------------------------------------------------------------------------------------------------


def lines(row: Mapping[str, Any]) -> list[str]:
    """Of one row: the numbers, the constants of that process, where the time went."""
    if row["status"] != "done":
        return [f"{row['case']:<{WIDTHS[0]}}  {row['status']}"]
    percent = {name: f"{row[name]:.1%}" if name in row else "-" for name in ("mfu", "of_keep", "of_full")}
    gib = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
    cells = [
        row["case"], row["steps"], f"{row['seconds'] / row['steps']:.3f}", f"{row['tokens_per_s']:,.0f}",
        f"{row['tflops']:.1f}", percent["mfu"], gib, percent["of_keep"], percent["of_full"],
    ]  # fmt: skip
    constants = row["constants"]
    rates = [f"{n} {r['forward'] / 1e12:.0f} / {r['backward'] / 1e12:.0f}" for n, r in constants["attention"].items()]
    told = [f"product {constants['gemm'] / 1e12:.0f} TFLOP/s", f"attention {', '.join(rates)}"]
    told += [f"{n} {constants[n] / 1e9:,.0f} GB/s" for n in ("copy", "to device", "to host") if n in constants]
    where = [f"{name} {share:.1%}" for name, share in row["shares"].items()]
    found = [measure.columns(cells, WIDTHS), f"    {row['backend']}", f"    {'; '.join(told)}"]
    return found + ([f"    {', '.join(where)}"] if where else [])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cases", default="", metavar="A,B", help="SHAPE:LENGTH:MIX[:RECOMPUTE]; none; see --list")
    parser.add_argument(
        "--list", action="store_true", help="print the cases of the default, and their mixes and shapes"
    )
    parser.add_argument(
        "--peer", default="", metavar="SHAPES", help="and plain transformers with models of these shapes"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a recipe key, of all cases")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed steps at most")
    parser.add_argument("--seconds", type=float, default=15.0, help="no further step is timed after so many")
    parser.add_argument(
        "--minutes",
        type=float,
        default=25.0,
        help="no further case is begun after so many, and the last ends soon after",
    )
    parser.add_argument("--limit", type=float, default=400.0, metavar="SECONDS", help="of one case")
    parser.add_argument("--kernels", default="flash,sdpa,cudnn", help="of attention, whose rates the floor takes")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the device, dense bf16")
    parser.add_argument("--try-all", action="store_true", help="also cases that by arithmetic cannot fit")
    parser.add_argument("--out", type=Path, help="a file that every row is added to, as JSON")
    parser.add_argument("--tiny", action="store_true", help="one toy case of seconds, and the same of the peer")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.tiny:
        options.cases, options.steps = options.cases or "tiny:512:chat:full", min(options.steps, 2)
    names = (options.cases or ",".join(CASES.split())).split(",") if options.cases != "none" else []
    try:
        options.cases = [Case.read(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    options.kernels = options.kernels.split(",")
    if unknown := sorted({*options.kernels} - {"flash", "sdpa", "cudnn"}):
        parser.error(f"--kernels {', '.join(unknown)}: of flash, sdpa and cudnn")
    options.peers = [shape for shape in options.peer.lower().split(",") if shape]
    if unknown := sorted({*options.peers} - {*SHAPES}):
        parser.error(f"--peer {', '.join(unknown)}: one of {', '.join(SHAPES)}")
    if options.steps < 1 or not options.seconds > 0:
        parser.error("--steps and --seconds: nothing to measure")
    if options.device == "cuda" and not options.list and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --tiny tries the tool")
    return options


def bench(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """The exit status: 1 where a case failed for another reason than memory or time."""
    header = measure.about(torch.device(options.device))
    options.memory_gib = header.get("memory_gib", 0.0)
    print(f"{measure.told(header)}\n\n{measure.columns(HEAD, WIDTHS)}", flush=True)
    begun, failed = time.monotonic(), False
    emit = measure.added_to(options.out)

    def measured(case: Case) -> dict[str, Any]:
        left = 60 * options.minutes - (time.monotonic() - begun)
        row = {"case": str(case), "status": f"not begun: {options.minutes:g} minutes are over"}
        row = row if left < 0 else in_a_process(case, options, argv, min(options.limit, left + GRACE_S))
        emit(row)
        print("\n".join(lines(row)), flush=True)
        return row

    emit({"header": header})
    for case in options.cases:
        failed |= measured(case)["status"].startswith("failed")
    for shape in options.peers:
        sizes = [512] if options.tiny else [1024 * k for k in PEER_LENGTHS]
        for length in sizes:
            row = measured(Case(shape=shape, length=length, mix="one", recompute="peer"))
            failed |= row["status"].startswith("failed")
            if not row["status"].startswith("out of memory"):
                break
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if options.list:
        for name in CASES.split():
            case = Case.read(name)
            print(f"{name:<28} at least {math.ceil(at_least(case) / 2**30)} GiB by arithmetic")
        return 0
    if options.child:
        case, result = Case.read(options.child[0]), Path(options.child[1])
        result.write_text(json.dumps(child(case, options)), encoding="utf-8")
        return 0
    return bench(options, argv)


if __name__ == "__main__":
    sys.exit(main())
