"""Parts of a run on ranks: train some steps, save, load, and compare what is held bit for bit."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sft.mcore.checkpoint_io import engine_state, optimizer_shards
from sft.mcore.engine import Engine
from sft.mcore.optimizer import offload
from tests.ranks import scenarios
from tests.ranks.pool import RankPool

CUT = 2
# Another layout takes sums in another order: the last bits of a loss in fp32, those of every activation in bf16.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3}
# The norm adds up the squares of all gradients, whose own error is some ten times that of a loss.
NORM_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
SHARDED, WHOLE = "parallel.distributed_optimizer=true", "parallel.distributed_optimizer=false"


def part(overrides: list[str], steps: list[int], load: str | None, save: str | None) -> dict[str, Any]:
    """Train the given steps (counted from 0), from `load` on and into `save`."""
    with scenarios.running(overrides) as engine:
        if load:
            plain = engine_state.load(engine, Path(load))
            assert plain["iteration"] == steps[0]
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        results = [engine.train_step(loader.microbatches(step)) for step in steps]
        random.random(), np.random.random(), torch.rand(1)  # something to restore
        if save:
            Path(save).mkdir(exist_ok=True)
            scenarios.save(engine, Path(save), {"iteration": steps[-1] + 1})
        return {
            "loss": [r.objective / r.num_tokens for r in results],
            "grad_norm": [r.grad_norm for r in results],
            "learning_rate": [r.learning_rate for r in results],
            "parameters": scenarios.parameter_hash(engine),
            "optimizer": optimizer_hash(engine),
            "adam_steps": adam_steps(engine),
        }


def optimizer_hash(engine: Engine) -> str:
    """Of the moments and fp32 weights of this rank, in the order of the optimizer."""
    digest = hashlib.sha256()
    for one in optimizer_shards.optimizer_slices(engine.optimizer):
        for name, flat in sorted(one.tensors.items()):
            digest.update(name.encode() + flat.contiguous().numpy().tobytes())
    return digest.hexdigest()


def adam_steps(engine: Engine) -> set[float]:
    states = [s for o in offload.chained_optimizers(engine.optimizer) for s in o.optimizer.state.values()]
    assert len({s["step"].data_ptr() for s in states}) == len(states), "shared, it would advance once per parameter"
    return {float(s["step"]) for s in states}


def check_bitwise(pool: RankPool, folder: Path, overrides: list[str]) -> None:
    """Five steps at once, and cut in two, are the same to the last bit."""
    whole = pool.run(part, overrides, [0, 1, 2, 3, 4], None, None)
    first = pool.run(part, overrides, [0, 1], None, str(folder))
    second = pool.run(part, overrides, [2, 3, 4], str(folder), None)
    for w, f, s in zip(whole, first, second):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert f[name] + s[name] == w[name]
        assert s["parameters"] == w["parameters"] and s["optimizer"] == w["optimizer"]
        assert f["adam_steps"] == {2.0} and s["adam_steps"] == w["adam_steps"] == {5.0}
