"""Makes engines on a GPU, and computes their losses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sft.mcore import device, process_groups
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine, weights_changed
from sft.mcore.initial_weights import initialise
from sft.mcore.lora import adapted
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from sft.run import environment
from sft.weights.trained import trained_weights
from tests.ranks import scenarios

STEPS = 50
BF16_TOLERANCE = 1e-2  # of each loss over 50 steps, against full precision
DEVICE, LONGEST = "cuda", 16_384  # of all documents, in tokens; other values in on_cpu.py
GPU = [f"train.num_steps={STEPS}", "model.head_dim=64"]  # a width that the flash kernel has


@contextmanager
def running(overrides: Sequence[str]) -> Iterator[Engine]:
    """An engine in this process, on the GPU."""
    config = parse_recipe(scenarios.RECIPE, "tests", [f"run.device={DEVICE}", *GPU, *overrides]).config
    layout = Layout.resolve(config, 1)
    environment.prepare(config, layout)
    place = process_groups.start(layout, device.start(DEVICE), seed=config.run.seed, timeout_s=60)
    try:
        trained = trained_weights(config, scenarios.VOCAB)
        engine = Engine(config, layout, place, vocab_size=scenarios.VOCAB, num_steps=STEPS, trained=trained)
        initialise(engine)
        adapted.initialise(engine.chunks, config.run.seed)
        weights_changed(engine)
        yield engine
    finally:
        process_groups.stop()


def train(engine: Engine, steps: range) -> list[float]:
    loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
    results = [engine.train_step(loader.microbatches(step)) for step in steps]
    return [r.objective / r.num_tokens for r in results]


def gradients(engine: Engine, microbatches: list[Any]) -> dict[str, np.ndarray]:
    """The gradient of each weight, summed over the microbatches."""
    for chunk in engine.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    engine._run(microbatches, forward_only=False)
    return {name: p.main_grad.cpu().numpy() for name, p in engine.chunks[0].named_parameters()}


def around_a_checkpoint(engine: Engine, folder: Path) -> list[float]:
    """Losses of steps 2 and 3, after two steps and a checkpoint of them."""
    train(engine, range(2))
    scenarios.save(engine, folder, {"iteration": 2})
    return train(engine, range(2, 4))


def losses(overrides: Sequence[str], steps: range = range(STEPS), load: Path | None = None) -> list[float]:
    with running(overrides) as engine:
        if load:
            engine_state.load(engine, load)
        return train(engine, steps)
