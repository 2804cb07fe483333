"""Compiles every kernel that a family or a recipe uses, for Hopper and for Blackwell, on a machine without a GPU.

    python -m tests.kernels                   all
    python -m tests.kernels --only sm_90a     those whose line has this text
    python -m tests.kernels --changed         a few of each kind whose files differ from those of the commit before
    python -m tests.kernels --missing         those without a good result in build/kernels.json
    python -m tests.kernels --write           the table of docs/numbers/kernels.md, from the stored results

Results are stored in build/kernels.json, so that a table can come from several calls.  The exit status is 1 if a kernel
does not compile, spills more than SPILLED bytes a thread, or compiles although our code says that its package refuses
it.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from sft.layers import kernel_rates
from sft.mcore.backends import kernels
from tests.kernels import changed, configurations, table
from tests.kernels.changed import ROOT
from tests.kernels.table import Compiled, Result

LIMIT_S = 900  # of one process; the longest compiles about 200 variants of FLA's kernels
SPILLED = 256  # bytes a thread, of the best variant of a kernel
# Kernels of FLA whose best variant spills more, and the most that it may.  With fla-core 0.6.0 and Triton 3.7.1: 1,048
# and 1,496 bytes (sm_90a, sm_100a) for maps of fragments; 0 and 840 for gradients of the WY representation.
KNOWN_SPILLS = {"chunk_cp_fwd_kernel_h": 1536, "prepare_wy_repr_bwd_kernel": 1024}
_LOSS, _LINEAR, _REFUSED = "loss head", "linear attention", "refused"


class Item(NamedTuple):
    """Arguments of compile_one.py, and what they mean."""

    kind: str
    number: int
    architecture: str
    text: str
    models: Sequence[str] = ()

    @property
    def line(self) -> str:
        return f"{self.architecture}  {self.kind}  {self.text}"


def items() -> Iterator[Item]:
    for architecture, capability in configurations.ARCHITECTURES.items():
        for number, (demand, models) in enumerate(configurations.softmax().items()):
            for name in (kernel_rates.FLASH4, kernel_rates.FFPA):
                if kernels.FLASH[name].why_not(demand._replace(capability=capability)) is None:
                    yield Item(name, number, architecture, configurations.text(demand), models)
        for number, refused in enumerate(configurations.REFUSED):
            if architecture in refused.architectures:
                text = f"{refused.kernel}, {configurations.text(refused.demand)}"
                yield Item(_REFUSED, number, architecture, text)
        yield Item(_LOSS, 0, architecture, "all options")
        for number, shape in enumerate(configurations.linear()):
            yield Item(_LINEAR, number, architecture, shape.text)


def compiled(item: Item, is_quick: bool) -> Result:
    command = [sys.executable, "-m", "tests.kernels.compile_one", item.kind, str(item.number), item.architecture]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*command, *["--quick"] * is_quick], env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return Result(item.kind, item.text, item.architecture, [], f"not ready after {LIMIT_S} s", LIMIT_S)
    seconds = time.perf_counter() - start
    if done.returncode:
        problem = " ".join(done.stderr.strip().splitlines()[-1:]) or f"ended with {done.returncode}"
        return Result(item.kind, item.text, item.architecture, [], problem, seconds)
    found = table.read(json.loads(done.stdout.splitlines()[-1]))
    spilled = "" if is_quick else "; ".join(too_many_spills(found))  # one variant of many may well spill
    return Result(item.kind, item.text, item.architecture, found, spilled, seconds)


def too_many_spills(found: Sequence[Compiled]) -> Iterator[str]:
    for one in found:
        if one.usage.spilled > KNOWN_SPILLS.get(one.kernel, SPILLED):
            yield f"{one.kernel} spills {one.usage.spilled} bytes"


def which_run() -> Iterator[str]:
    """For each kind of layer, the kernels that compute it, the fastest first, as if all packages were installed."""
    for demand, models in configurations.softmax().items():
        for architecture, capability in configurations.ARCHITECTURES.items():
            on_gpu = demand._replace(capability=capability)
            able = [name for name in kernels.by_rate(on_gpu) if kernels.FLASH[name].refused(on_gpu) is None]
            names = ", then ".join([*able, kernels.PLAIN])
            yield f"{architecture}  {configurations.text(demand)}: {names}  ({len(models)} models)"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "kernels.json")
    options = parser.parse_args(argv)
    if options.write:
        order = [(item.kind, item.text, item.architecture) for item in items()]
        table.write(table.load(options.results), order, versions(), datetime.date.today())
        return 0
    print(*which_run(), sep="\n", flush=True)
    for name in (kernel_rates.FLASH4, kernel_rates.FFPA):
        package = kernels.FLASH[name].package
        if package is not None and (problem := package.absent() or package.broken()):
            raise SystemExit(f"{problem}: run make test-kernels")
    chosen = [item for item in items() if options.only in item.line]
    if options.missing:
        done = {result[:3] for result in table.load(options.results) if not result.problem}
        chosen = [item for item in chosen if (item.kind, item.text, item.architecture) not in done]
    if options.changed:
        touched = changed.kinds()
        chosen = [item for item in chosen if changed.is_in_sample(item.kind, item.text, touched)]
    start, results = time.perf_counter(), list[Result]()
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda item: compiled(item, options.changed), chosen):
            print(result.line, flush=True)
            results.append(result)
            if not options.changed:
                table.store(options.results, [result])
    failed, minutes = [result for result in results if result.problem], (time.perf_counter() - start) / 60
    print(f"{len(results)} compilations in {minutes:.1f} minutes with {options.jobs} processes, {len(failed)} failed")
    return int(bool(failed))


def versions() -> str:
    names = ["flash-attn-4", "ffpa-attn", "nvidia-cutlass-dsl", "quack-kernels", "triton", "fla-core", "torch"]
    return ", ".join(f"{name} {version(name)}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
