"""A whole training step on one GPU: tokens per second, FLOPs, memory, where the time goes, beside what is possible.

    python -m tools.bench_step --minutes 20 --out rows.jsonl           the cases of --list, in that order
    python -m tools.bench_step --cases 4b:128k:one:full,4b:64k:chat    SHAPE:LENGTH:MIX[:MEMORY]
    python -m tools.bench_step --cases none --trades 1.7b:64k          what each key that saves memory costs
    python -m tools.bench_step --cases none --longest 0.6b,1.7b,4b,8b  the longest context that fits, by trying
    python -m tools.bench_step --cases none --peer 1.7b,4b             plain transformers, the longest that it survives
    python -m tools.bench_step --check ...                             and exit 1 where a bar is missed
    python -m tools.bench_step --device cpu --tiny                     whether the tool itself works

Not yet run on a GPU.  Random weights of Qwen3 shapes, one pack a step, the second half of every sample supervised,
through sft's recipe, planner, loader and engine.  MEMORY is none, selective (where nothing is said) or full, and any of
+offload0.5 (+offload is 1), +tile4k and +optim0.5: train.recompute, train.offload_fraction, train.mlp_tile,
optim.offload_fraction.
--set reaches every other recipe key.  Mixes are those of bench_packing; `one` is a single document, `1k` documents of
1024 tokens, `padded` 16 samples of chat each padded to the longest of them.  Every case has a process of its own, and
one that does not fit is a row.  After a step that does not count, steps are timed for --seconds, and one more is
profiled (the timed one itself where steps are longer than --seconds).

MFU counts causal attention, and the head where supervised, against --peak-tflops.  `of keep`, `of full`: of the floors
of keep-attention and of full recomputation, made of rates that the case itself measured (tools/step_roofline.py).
`by eq.` is what sft/estimate/memory.py says the device holds, `host` what the process took of host memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tools import longest, measure, step_bars, step_case
from tools.step_choices import CASES, MIXES, SHAPES, Case, at_least, trades
from tools.step_roofline import finished, shares
from tools.step_tables import HEAD, WIDTHS, gib, lines, of_search, traded

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 90  # that the last case may take beyond --minutes
CONTEXT = 2**30  # bytes that CUDA takes for itself
HOST = 0.9  # of the host's memory that a case may take by arithmetic
PEER_LENGTHS = (128, 64, 32, 16)  # K tokens


# --- one case, in a process of its own ---------------------------------------------------------------------------


def child(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured; `status` says more where it was not."""
    device = torch.device(options.device)
    begun = time.monotonic()
    try:
        _limit(case, options)
        row = (step_case.peer if case.recompute == "peer" else step_case.trainer)(case, options, device)
        row |= {"status": "done", "device": device.type}
        if options.fit:
            return row
        row["shares"] = shares(row.pop("events"), row["profiled_s"])
        if row["shares"]:
            row["shares"]["data"] = row["data_wait_s"] / row["seconds"]
        return finished(case, row, options.peak_tflops)
    except torch.OutOfMemoryError as error:
        gib = torch.cuda.max_memory_allocated() / 2**30
        return {
            "status": f"out of memory at {gib:.1f} GiB, after {time.monotonic() - begun:.0f} s",
            "error": str(error),
        }


def _limit(case: Case, options: argparse.Namespace) -> None:
    """--memory; a CPU runs out of it where the equations say so."""
    if options.memory is None:
        return
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * 2**30 / total))
    elif case.estimate("cpu", also=options.set).device > options.memory * 2**30:
        raise torch.OutOfMemoryError(f"--memory {options.memory:g}")


def _too_much(case: Case, options: argparse.Namespace, of_host: float) -> str | None:
    """What is not there by arithmetic."""
    least = at_least(case, options.device, options.set)
    if options.memory_gib and least > options.memory_gib * 2**30:
        return f"{least / 2**30:.0f} GiB by arithmetic, {options.memory_gib:.0f} GiB there"
    if of_host > HOST * options.host_gib * 2**30:  # and what is pinned cannot be swapped out
        return f"{of_host / 2**30:.0f} GiB of host memory by arithmetic, {options.host_gib:.0f} GiB there"
    return None


def in_a_process(
    case: Case, options: argparse.Namespace, argv: Sequence[str], limit_s: float, *flags: str
) -> dict[str, Any]:
    """The row of a case, whatever becomes of it."""
    about: dict[str, Any] = {"case": str(case)}
    if case.recompute != "peer":
        found = case.estimate(options.device, also=options.set)
        about |= {"by_equations": found.device, "host_by_equations": found.host}
        if not options.try_all and not flags and (short := _too_much(case, options, found.host)):
            return {**about, "status": f"skipped: {short}; --try-all tries"}
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="bench_step-") as folder:
        result = Path(folder) / "row.json"
        command = [sys.executable, "-m", "tools.bench_step", *argv, *flags, "--child", str(case), str(result)]
        try:
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {**about, "status": f"stopped after {limit_s:.0f} s"}
        if done.returncode or not result.exists():
            said = done.stderr.strip().splitlines() or ["no word"]
            return {**about, "status": f"failed: {said[-1]}", "error": done.stderr[-4000:]}
        return {**about, **json.loads(result.read_text(encoding="utf-8"))}


# --- what is asked for -------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--cases", default="", metavar="A,B", help="SHAPE:LENGTH:MIX[:MEMORY]; none; see --list")
    add("--list", action="store_true", help="print the cases of the default, and what they take by the equations")
    add("--trades", default="", metavar="A,B", help="and what each key costs: SHAPE:LENGTH, or 8b:32k+optim1")
    add("--longest", default="", metavar="SHAPES", help="and the longest context that fits")
    add(
        "--longest-with",
        default="full",
        metavar="MEMORY",
        help="its way; with as much of +optim as the host takes where nothing fits without",
    )
    add("--longest-mix", default="1k", choices=MIXES, help="its documents; `one` takes as much memory and far longer")
    add("--peer", default="", metavar="SHAPES", help="and plain transformers with models of these shapes")
    add("--check", action="store_true", help="judge what was measured by the bars; exit 1 where one is missed")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a recipe key, of all cases")
    add("--steps", type=int, default=5, metavar="N", help="timed steps at most")
    add("--seconds", type=float, default=15.0, help="no further step is timed after so many")
    add("--minutes", type=float, default=25.0, help="no further case is begun then, and the last ends soon after")
    add("--limit", type=float, default=400.0, metavar="SECONDS", help="of one case")
    add("--kernels", default="flash,sdpa,te,cudnn", help="of attention, whose best rates the floor takes")
    add("--peak-tflops", type=float, default=989.0, help="of the device, dense bf16")
    add("--memory", type=float, metavar="GIB", help="that torch may take of the device; all by default")
    add("--try-all", action="store_true", help="also cases that by arithmetic cannot fit")
    add("--out", type=Path, help="a file that every row is added to, as JSON")
    add("--tiny", action="store_true", help="toy sizes: one case where no other is asked for")
    add("--child", nargs=2, help=argparse.SUPPRESS)
    add("--fit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.tiny:
        options.cases, options.steps = options.cases or "tiny:512:chat:full", min(options.steps, 2)
    names = (options.cases or ",".join(CASES.split())).split(",") if options.cases != "none" else []
    try:
        options.cases = [Case.read(name) for name in names]
        options.trades = [trades(name) for name in options.trades.split(",") if name]
        shapes = [shape for shape in options.longest.lower().split(",") if shape]
        options.longest = [Case.read(f"{shape}:1k:{options.longest_mix}:{options.longest_with}") for shape in shapes]
    except ValueError as error:
        parser.error(str(error))
    options.kernels = options.kernels.split(",")
    if unknown := sorted({*options.kernels} - {"flash", "sdpa", "te", "cudnn"}):
        parser.error(f"--kernels {', '.join(unknown)}: of flash, sdpa, te and cudnn")
    options.peers = [shape for shape in options.peer.lower().split(",") if shape]
    if unknown := sorted({*options.peers} - {*SHAPES}):
        parser.error(f"--peer {', '.join(unknown)}: one of {', '.join(SHAPES)}")
    if options.steps < 1 or not options.seconds > 0:
        parser.error("--steps and --seconds: nothing to measure")
    if options.device == "cpu" and options.longest and options.memory is None:
        parser.error("--longest on a CPU needs --memory, a limit to search for")
    if options.device == "cuda" and not options.list and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --tiny tries the tool")
    return options


# --- all of it ---------------------------------------------------------------------------------------------------


class Bench:
    """One run of the tool: its clock, its rows, where they go."""

    def __init__(self, options: argparse.Namespace, argv: Sequence[str]) -> None:
        self.options, self.argv, self.rows = options, argv, list[dict[str, Any]]()
        self._add, self._begun = measure.added_to(options.out), time.monotonic()
        self.header = measure.about(torch.device(options.device))
        options.memory_gib = options.memory or self.header.get("memory_gib", 0.0)
        options.host_gib = self.header["host_gib"]

    def run(self) -> int:
        """The exit status: 1 where a case failed for another reason than memory or time, or a bar is missed."""
        options = self.options
        print(f"{measure.told(self.header)}\n\n{measure.columns(HEAD, WIDTHS)}", flush=True)
        self._add({"header": self.header})
        for case in options.cases:
            self.measured(case)
        for cases in options.trades:
            print("\n".join(["", *traded([self.measured(case) for case in cases]), ""]), flush=True)
        for case in options.longest:
            self.search(case)
        for shape in options.peers:
            self.peer(shape)
        bars = step_bars.judged(self.rows)
        if options.check:
            print(f"\n{step_bars.told(bars)}")
        failed = any(row["status"].startswith("failed") for row in self.rows)
        return 1 if failed or (options.check and step_bars.missed(bars)) else 0

    def measured(self, case: Case) -> dict[str, Any]:
        row = self._row(case)
        self._keep(row)
        print("\n".join(lines(row)), flush=True)
        return row

    def search(self, case: Case) -> None:
        """The longest context, in the way of the case; with the optimizer on the host where nothing fits without."""
        options = self.options
        available = options.memory_gib * 2**30 - (CONTEXT if options.memory is None else 0)
        predicted = case.longest(options.device, available, also=options.set)
        if not predicted and not case.optim:
            room = HOST * options.host_gib * 2**30
            ways = [replace(case, optim=share) for share in (1.0, 0.75, 0.5, 0.25)]
            case = next((way for way in ways if way.estimate(options.device).host <= room), case)
            predicted = case.longest(options.device, available, also=options.set)

        def fits(length: int) -> bool:
            row = self._row(replace(case, length=length), "--fit")
            print(f"    {row['case']}: {row['status']}, {gib(row.get('peak_bytes'))} GiB", flush=True)
            if row["status"] != "done" and not row["status"].startswith("out of memory"):
                raise longest.Stopped(row["status"])
            return bool(row["status"] == "done")

        found = longest.search(predicted, fits, grain=64 if options.tiny else 1024)
        row = {"longest": case.shape, "memory": case.way, "mix": case.mix, "device": options.device}
        row |= {**asdict(found), "ratio": found.ratio, "status": found.stopped or "done"}
        self._keep(row)
        print(of_search(row), flush=True)

    def peer(self, shape: str) -> None:
        """The longest document that plain transformers survive."""
        for length in [512] if self.options.tiny else [1024 * k for k in PEER_LENGTHS]:
            row = self.measured(Case(shape=shape, length=length, mix="one", recompute="peer"))
            if not row["status"].startswith("out of memory"):
                break

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._add(row)

    def _row(self, case: Case, *flags: str) -> dict[str, Any]:
        left = 60 * self.options.minutes - (time.monotonic() - self._begun)
        if left < 0:
            return {"case": str(case), "status": f"not begun: {self.options.minutes:g} minutes are over"}
        return in_a_process(case, self.options, self.argv, min(self.options.limit, left + GRACE_S), *flags)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if options.list:
        for name in CASES.split():
            taken = Case.read(name).estimate("cuda")
            print(f"{name:<42} {gib(taken.device):>7} GiB, host {gib(taken.host):>6} GiB, by the equations")
        return 0
    if options.child:
        case, result = Case.read(options.child[0]), Path(options.child[1])
        result.write_text(json.dumps(child(case, options)), encoding="utf-8")
        return 0
    return Bench(options, argv).run()


if __name__ == "__main__":
    sys.exit(main())
