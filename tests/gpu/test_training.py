"""The whole trainer on one GPU."""

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.layout import Layout
from sft.mcore import device, groups, shards
from sft.mcore.engine import Engine
from sft.recipe import parse_recipe
from tests.ranks import scenarios
from tests.ranks.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
STEPS = 50
FP32_TOLERANCE = 1e-4  # other kernels, sums in another order; TF32 is off
BF16_TOLERANCE = 1e-2  # of each loss over 50 steps, against full precision
GPU = ["run.device=cuda", f"train.num_steps={STEPS}", "model.head_dim=64"]  # a width that the flash kernel has


@contextmanager
def running(overrides: Sequence[str]) -> Iterator[Engine]:
    """An engine in this process, on the GPU."""
    config = parse_recipe(scenarios.RECIPE, "tests", [*GPU, *overrides]).config
    layout = Layout.resolve(config, 1)
    place = groups.start(layout, device.start("cuda"), seed=config.run.seed, timeout_s=60)
    try:
        yield Engine(config, layout, place, vocab_size=scenarios.VOCAB, num_steps=STEPS)
    finally:
        groups.stop()


def losses(overrides: Sequence[str], steps: range = range(STEPS), load: Path | None = None) -> list[float]:
    with running(overrides) as engine:
        if load:
            shards.load(engine, load)
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        results = [engine.train_step(loader.microbatches(step)) for step in steps]
        return [r.totals.loss / r.totals.num_tokens for r in results]


def first_steps(overrides: Sequence[str], folder: str) -> list[float]:
    """Two steps on the CPU, in a process of a pool, and a checkpoint of them."""
    with scenarios.running(overrides) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        for step in range(2):
            engine.train_step(loader.microbatches(step))
        shards.save(engine, Path(folder), {"iteration": 2})
        rest = [engine.train_step(loader.microbatches(step)) for step in range(2, 4)]
        return [r.totals.loss / r.totals.num_tokens for r in rest]


MOE = ["model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=32", "model.init_std=0.2"]


@pytest.mark.parametrize("model", [[], MOE], ids=["dense", "experts"])
def test_bf16_follows_full_precision(model: list[str]) -> None:
    wide = losses([*model, "run.precision=fp32"])
    half = losses([*model, "run.precision=bf16"])
    np.testing.assert_allclose(half, wide, rtol=BF16_TOLERANCE)


def test_a_checkpoint_of_a_cpu_goes_on(tmp_path: Path) -> None:
    pool = RankPool(1)
    try:
        (expected,) = pool.run(first_steps, [*GPU[1:], "run.precision=fp32"], str(tmp_path))
    finally:
        pool.close()
    found = losses(["run.precision=fp32"], range(2, 4), tmp_path)
    np.testing.assert_allclose(found, expected, rtol=FP32_TOLERANCE)


def test_bars_of_the_loss_head() -> None:
    done = subprocess.run(
        [sys.executable, "tools/bench_loss_head.py", "--device", "cuda", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class _Inert(pickle.Unpickler):
    """A snapshot is lists, dictionaries, numbers and text."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def test_a_memory_history_can_be_read(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    try:
        kept = torch.empty(1 << 20, device="cuda")
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found = _Inert(io.BytesIO((tmp_path / "snapshot.pickle").read_bytes())).load()
    assert kept.numel() == 1 << 20 and found["segments"] and found["device_traces"]
