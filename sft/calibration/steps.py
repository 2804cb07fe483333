"""Times a few short training steps of models in which different parts take most of the time.

Every rank is a rank of data parallelism.  The tokens are random and all supervised, and a pack is one document.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sft.batch import Microbatch, Sample
from sft.calibration.clock import seconds
from sft.calibration.sizes import MeasuredSizes
from sft.config import Config
from sft.data.packing.pack import Collator
from sft.mcore.engine import Engine, release
from sft.mcore.initial_weights import initialise
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe

NUM_STEPS = 1000  # length of the learning-rate schedule; fewer steps are taken
SAMPLES = 3
SHORT = 64  # tokens of a short pack; most of the time of its step is overhead
_RECIPE = """
run: {dir: unused, seed: 0}
model: {init_from: random}
data: {train: unused}
train: {num_steps: 1000}
optim: {lr: 1.0e-4, schedule: constant}
"""


class Step(NamedTuple):
    """A recipe whose packs are one document each, and the measured seconds of one of its steps."""

    name: str
    config: Config
    layout: Layout
    seconds: float


def recipes(sizes: MeasuredSizes, device_type: str, num_ranks: int) -> dict[str, Config]:
    """The recipes to time.  Their names say what takes most of the time, or differs from "tokens"."""
    hidden = sizes.hidden_size
    long = {"seq_length": sizes.seq_length, "packs": 2}
    changes: dict[str, dict[str, Any]] = {
        "layers": {"seq_length": SHORT, "packs": 8, "num_layers": 4},
        "weights": {"seq_length": SHORT, "packs": 1, "num_layers": 1, "vocab_size": sizes.vocab_size},
        "tokens": {**long, "num_layers": 2},
        "narrow": {**long, "num_layers": 4, "hidden_size": hidden // 2},
        "recomputed": {**long, "num_layers": 2, "recompute": "full"},
        "experts": {**long, "num_layers": 2, "num_experts": 8, "top_k": 2},
    }
    return {name: _config(sizes, device_type, num_ranks, **change) for name, change in changes.items()}


def _config(
    sizes: MeasuredSizes,
    device_type: str,
    num_ranks: int,
    *,
    seq_length: int,
    packs: int,
    recompute: str = "none",
    **model: Any,
) -> Config:
    hidden = model.pop("hidden_size", sizes.hidden_size)
    experts = {f"model.moe.{name}": model.pop(name) for name in ("num_experts", "top_k") if name in model}
    heads = hidden // sizes.head_dim
    keys: dict[str, Any] = {
        "run.device": device_type, "run.precision": "bf16" if device_type == "cuda" else "fp32",
        "model.hidden_size": hidden, "model.ffn_hidden_size": 3 * hidden, "model.num_attention_heads": heads,
        "model.vocab_size": 1024, "data.seq_length": seq_length,
        "train.recompute": recompute, "train.global_batch_size": packs * num_ranks,
    }  # fmt: skip
    keys |= {f"model.{name}": value for name, value in model.items()} | experts
    return parse_recipe(_RECIPE, "calibration", [f"{key}={json.dumps(value)}" for key, value in keys.items()]).config


def measured(configs: Mapping[str, Config], groups: ProcessGroups) -> Iterator[Step]:
    """Measures a step of each recipe.  Collective over all ranks."""
    for name, config in configs.items():
        layout = Layout.resolve(config, groups.collection.dp.size())
        engine = Engine(config, layout, groups, vocab_size=config.model.vocab_size or 0, num_steps=NUM_STEPS)
        initialise(engine)
        batch = [_microbatch(config, number) for number in range(layout.num_microbatches)]

        def step(engine: Engine = engine, batch: list[Microbatch] = batch) -> None:
            engine.train_step(batch)

        taken = seconds(step, groups.device, SAMPLES)
        release(engine)
        yield Step(name, config, layout, taken)


def _microbatch(config: Config, number: int) -> Microbatch:
    """A pack of one document of random tokens."""
    length = config.data.seq_length
    tokens = np.random.default_rng(number).integers(0, config.model.vocab_size or 0, size=length, dtype=np.int32)
    sample = Sample(sample_id=number, tokens=tokens, weights=np.ones(length, dtype=np.float32))
    return Collator(doc_multiple=config.data.doc_multiple, pad_id=0).microbatch([sample])
