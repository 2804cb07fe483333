"""Compiles every kernel that a family or a recipe uses, for Hopper and for Blackwell, on a machine without a GPU.

    python -m tests.kernels                   all
    python -m tests.kernels --only sm_90a     those whose line has this text
    python -m tests.kernels --changed         a few of each kind that the commit touches, in two minutes
    python -m tests.kernels --missing         those without a good result in build/kernels.json
    python -m tests.kernels --write           the table of docs/numbers/kernels.md, from the stored results

Results are stored in build/kernels.json, so that a table can come from several calls; with --pinned, in
build/kernels-pinned.json.  The exit status is 1 if a kernel does not compile, spills too much (limits.py), or compiles
although our code says that its package refuses it.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from sft.mcore.backends import kernels
from tests.kernels import changed, configurations, limits, sample, table
from tests.kernels.changed import FFPA, FLASH4, LINEAR, LOSS, REFUSED, ROOT
from tests.kernels.sample import Item
from tests.kernels.table import Result, Stored

LIMIT_S = 900.0  # of one process; the longest compiles about 200 variants of FLA's kernels
RESULTS, PINNED = ROOT / "build" / "kernels.json", ROOT / "build" / "kernels-pinned.json"
PACKAGES = ("flash-attn-4", "ffpa-attn", "nvidia-cutlass-dsl", "quack-kernels", "triton", "fla-core", "torch")


def items() -> Iterator[Item]:
    for architecture, capability in configurations.ARCHITECTURES.items():
        for number, call in enumerate(configurations.attention_calls()):
            for name in (FLASH4, FFPA):
                if kernels.FLASH[name].refused(call.demand._replace(capability=capability)) is None:
                    yield Item(name, number, architecture, call.text)
        for number, refused in enumerate(configurations.REFUSED):
            if architecture in refused.architectures:
                yield Item(REFUSED, number, architecture, f"{refused.kernel}, {configurations.text(refused.demand)}")
        yield Item(LOSS, 0, architecture, "all options")
        for number, shape in enumerate(configurations.linear()):
            yield Item(LINEAR, number, architecture, shape.text)


def _our_reason(item: Item) -> str:
    """The reason against a configuration that its package must still refuse; "" for others."""
    if item.kind != REFUSED:
        return ""
    name, demand, _ = configurations.REFUSED[item.number]
    return (
        kernels.FLASH[name].refused(demand._replace(capability=configurations.ARCHITECTURES[item.architecture])) or ""
    )


def without() -> Iterator[str]:
    """The layers that neither FlashAttention-4 nor ffpa-attn computes: why, and what computes them."""
    layers: dict[tuple[str, str, str], list[str]] = {}
    for architecture, capability in configurations.ARCHITECTURES.items():
        for demand in configurations.softmax():
            on_gpu = demand._replace(capability=capability)
            reasons = {name: kernels.FLASH[name].refused(on_gpu) for name in kernels.by_rate(on_gpu)}
            if reasons[FLASH4] and reasons[FFPA]:
                runs = next((name for name, reason in reasons.items() if reason is None), kernels.PLAIN)
                why = reasons[FFPA] if demand.key_width == 512 else reasons[FLASH4]
                layers.setdefault((architecture, runs, why or ""), []).append(configurations.text(demand))
    for (architecture, runs, why), texts in layers.items():
        yield f"- {architecture}, {'; '.join(texts)}: {runs} computes them. Why: {why}."


def compiled(item: Item, is_quick: bool, limit_s: float) -> Result | None:
    """None: not ready after limit_s."""
    command = [sys.executable, "-m", "tests.kernels.compile_one", item.kind, str(item.number), item.architecture]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*command, *["--quick"] * is_quick], env=environment, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return None
    seconds = time.perf_counter() - start
    if done.returncode:
        problem = " ".join(done.stderr.strip().splitlines()[-1:]) or f"ended with {done.returncode}"
        return Result(*item.key, [], problem, seconds)
    found = table.read(json.loads(done.stdout.splitlines()[-1]))
    may_spill = is_quick and item.kind == LINEAR  # one variant of many may well spill
    return Result(*item.key, found, "" if may_spill else limits.spills(item.text, found), seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pinned", action="store_true", help="the packages are those that ffpa-attn pins")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    if options.write:
        order = {item.key: _our_reason(item) for item in items()}
        table.write(table.load(RESULTS), table.load(PINNED), order, [*without()], datetime.date.today())
        return 0
    chosen = [item for item in items() if options.only in item.line]
    if options.changed:
        return compile_changed(sample.chosen(chosen, changed.kinds(), changed.commit()), options.jobs)
    if options.pinned:  # its Triton and fla-core are the same
        chosen = [item for item in chosen if item.kind not in (LOSS, LINEAR)]
    file, with_versions = PINNED if options.pinned else RESULTS, versions()
    stored = table.load(file)
    if options.missing and stored.versions == with_versions:
        done = {result[:3] for result in stored.results if not result.problem}
        chosen = [item for item in chosen if item.key not in done]
    return compile_all(chosen, options.jobs, file, with_versions)


def compile_all(chosen: Sequence[Item], jobs: int, file: Path, with_versions: str) -> int:
    start, failed = time.perf_counter(), 0
    with ThreadPoolExecutor(jobs) as pool:
        for item, result in zip(chosen, pool.map(lambda item: compiled(item, False, LIMIT_S), chosen), strict=True):
            late = Result(*item.key, [], f"not ready after {LIMIT_S:.0f} s", LIMIT_S)
            result = result or late
            print(result.line, flush=True)
            failed += bool(result.problem)
            table.store(file, Stored(with_versions, [result]))
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(chosen)} compilations in {minutes:.1f} minutes with {jobs} processes, {failed} failed")
    return int(bool(failed))


def compile_changed(chosen: Sequence[Item], jobs: int) -> int:
    """What has no time is named, and is no failure: another commit may compile it."""
    failed, left_out = 0, list[str]()
    for item, result in sample.in_time(chosen, lambda item, left: compiled(item, True, left), jobs):
        if result is None:
            left_out.append(item.line)
            continue
        print(result.line, "(one variant of each)" if item.kind == LINEAR else "", flush=True)
        failed += bool(result.problem)
    if left_out:
        print(f"not compiled, for want of time: {'; '.join(left_out)}.  make test-kernels compiles everything")
    print(f"{len(chosen) - len(left_out)} compilations, {failed} failed")
    return int(bool(failed))


def versions() -> str:
    names = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{names}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
