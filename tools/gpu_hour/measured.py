"""The measurements that need all GPUs: what the ranks that torchrun started do.  Rank 0 writes and prints the rows.

    torchrun --standalone --nproc-per-node 8 -m tools.gpu_hour.ranks curves layouts --json FILE
    torchrun --standalone --nproc-per-node 8 -m tools.gpu_hour.ranks speed 8b:64k:one --set parallel.cp=8 --json FILE

curves  losses and gradient norms of a group of curves.py, one curve after the other, on random tokens in documents of
        the mix `chat`; differences are relative to the first curve, the largest of all steps
speed   time and memory of steps of a case (tools/bench/steps/case.py) on the layout of --set, beside the estimate
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from sft.estimate import memory
from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tools.bench.results import DONE, Column, Row, Table
from tools.bench.steps import trainer
from tools.bench.steps.case import StepCase
from tools.bench.steps.roofline import useful_flops
from tools.gpu_hour import curves

STEPS, SECONDS = 5, 60.0  # timed at most, after one that warms up
PEAK_TFLOPS = 989.0  # dense bf16, of an H100 or H200
CURVE_COLUMNS = [
    Column("loss", "last loss", ".6f"),
    Column("loss_error", "losses", ".1e"),
    Column("norm_error", "norms", ".1e"),
]
SPEED_COLUMNS = [
    Column("steps", "steps"),
    Column("step_s", "s/step", ".3f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("tflops", "TFLOP/s each", ".1f"),
    Column("mfu", "MFU", ".1%"),
    Column("peak_bytes", "GiB", ".1f", 2**30),
    Column("by_equations", "by eq.", ".1f", 2**30),
]


def curve_rows(group: str, device_type: str, sizes: Sequence[str]) -> Iterator[Row]:
    reference: Row | None = None
    store, _, _ = next(dist.rendezvous("env://"))
    for number, name in enumerate(curves.GROUPS[group][int(os.environ["WORLD_SIZE"])]):
        row: Row = {
            "case": name,
            "status": DONE,
            **curve([*sizes, *curves.overrides(name)], device_type, dist.PrefixStore(f"{number}", store)),
        }
        reference = reference or row
        row |= {"loss": row["losses"][-1], "loss_error": curves.difference(row, reference, "losses")}
        yield row | {"norm_error": curves.difference(row, reference, "norms")}


def curve(overrides: Sequence[str], device_type: str, store: dist.Store) -> Row:
    """Losses and gradient norms of a few steps, the same on every rank.  store: one for each curve."""
    config = parse_recipe(curves.RECIPE, "gpu hour", [f"run.device={device_type}", *overrides]).config
    num_steps = config.train.num_steps or 1
    layout = Layout.resolve(config, int(os.environ["WORLD_SIZE"]))
    groups = process_groups.start(
        layout,
        devices.start(device_type, deterministic=config.run.deterministic),
        seed=config.run.seed,
        timeout_s=120,
        store=store,
    )
    case = StepCase(shape="tiny", length=config.data.seq_length, mix="chat")  # of which only the data are used
    engine, loader = trainer.engine_and_loader(case, config, layout, groups, num_steps=num_steps)
    results = [engine.train_step(loader.microbatches(step)) for step in range(num_steps)]
    process_groups.stop()
    return {
        "losses": [result.objective / result.num_tokens for result in results],
        "norms": [result.grad_norm for result in results],
        "backend": str(engine.backend),
    }


def speed_rows(name: str, overrides: Sequence[str], device_type: str) -> Iterator[Row]:
    case, world_size = StepCase.read(name), int(os.environ["WORLD_SIZE"])
    seq_length, multiple, _ = trainer.documents_of(case, 1)
    config = case.config(device_type, seq_length=seq_length, multiple=multiple, also=overrides)
    layout = Layout.resolve(config, world_size)
    groups = process_groups.start(layout, devices.start(device_type), seed=config.run.seed, timeout_s=200)
    engine, loader = trainer.engine_and_loader(case, config, layout, groups, num_steps=STEPS + 1)
    totals: dict[str, float] = {"tokens": 0, "labels": 0, "attention_flops": 0}
    peak, count, seconds = 0.0, 0, 0.0
    for step in range(STEPS + 1):
        microbatches = loader.microbatches(step)
        start = time.perf_counter()
        result = engine.train_step(microbatches)
        if device_type == "cuda":
            torch.cuda.synchronize()
        local = (time.perf_counter() - start, result.memory_allocated.value)
        taken, allocated = (max(values) for values in zip(*all_gather_objects(lambda: local, groups.control)))
        peak = max(peak, allocated)
        if step:  # the first warms up
            totals["tokens"] += result.num_real_tokens
            totals["labels"] += result.num_tokens
            totals["attention_flops"] += result.attention_flops
            count, seconds = count + 1, seconds + taken
        if seconds > SECONDS:
            break
    tflops = useful_flops(case, totals) / seconds / world_size / 1e12
    yield {
        "case": f"{name} {' '.join(overrides)}", "status": DONE, "device": device_type, "world_size": world_size,
        "backend": str(engine.backend), **totals, "steps": count, "step_s": seconds / count,
        "tokens_per_s": totals["tokens"] / seconds, "tflops": tflops, "mfu": tflops / PEAK_TFLOPS,
        "peak_bytes": peak or None, "by_equations": memory.estimate(config, layout, case.vocab).device,
    }  # fmt: skip
    process_groups.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.gpu_hour.ranks", description=__doc__)
    parser.add_argument("subject", choices=["curves", "speed"])
    parser.add_argument("case", help=f"of curves: {', '.join(curves.GROUPS)}; of speed: a case of steps")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--tiny", action="store_true", help="curves of toy sizes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="append every row to this file")
    options = parser.parse_args()
    columns: Mapping[str, list[Column]] = {"curves": CURVE_COLUMNS, "speed": SPEED_COLUMNS}
    if options.subject == "curves":
        rows = curve_rows(options.case, options.device, curves.TINY_SIZES if options.tiny else ())
    else:
        rows = speed_rows(options.case, options.set, options.device)
    table, is_first = Table(columns[options.subject], [options.case]), os.environ["RANK"] == "0"
    if is_first:
        print(table.head(), flush=True)
    for row in rows:
        if is_first:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(table.line(row), flush=True)


if __name__ == "__main__":
    main()
