"""What sharded weights and gradients keep in memory and send, and where their values come from."""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from sft.console import QUIET
from sft.estimate.stage import Stage
from sft.estimate.units import StageUnits
from sft.mcore.engine import Engine, release
from sft.mcore.sharding.model import publish_weights
from sft.weights.import_hf import import_hf
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.hf_models import load, recipe_of
from tests.ranks.layouts import CP, GEMMA, LOSS_TOLERANCE, MIXTURES, MODELS, MOE, SHARDED
from tests.ranks.pool import Ranks
from tests.ranks.test_hf_load import hashes_of
from tests.ranks.test_traffic import Sent
from tests.unit.fixtures import hf

WEIGHTS, GRADIENTS = ([*SHARDED, f"parallel.shard={shard}"] for shard in ("weights", "gradients"))
FULL = "train.recompute=full"

# Elements of the model of scenarios.RECIPE in whole weights; each weight begins at a multiple of 64.
NORM = 64  # 32, padded
EMBEDDING = OUTPUT = 384 * 32
# qkv 64 x 32 with biases, two norms of heads, 32 x 32, gate and up 2 x 64 x 32, down 32 x 64, two norms
LAYER = 64 * 32 + 64 + 2 * NORM + 32 * 32 + 2 * 64 * 32 + 32 * 64 + 2 * NORM
PADDING = 2 * 64  # of a unit, on two ranks


class Held(TorchDispatchMode):
    """The most bytes that whole weights of layers, those of other units, and gradients have at any operation."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._units = [unit for chunk in engine.chunks for unit in chunk.units]
        self.weights: list[int] = []
        self.most: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held: Counter[str] = Counter()
        for unit in self._units:
            kind = "layers" if unit.name.startswith("layer") else "others"
            for flat in unit.flats:
                held[kind] += flat._weights.untyped_storage().nbytes()
                held["gradients"] += flat._grads.untyped_storage().nbytes() if flat.is_trained else 0
                held[f"{unit.name}'s gradients"] += flat._grads.untyped_storage().nbytes() if flat.is_trained else 0
        self.most |= held
        return func(*args, **(kwargs or {}))


def most_held(overrides: list[str], overlap: bool) -> tuple[dict[str, int], dict[str, int]]:
    """The most bytes in a step, and the bytes after it."""
    with scenarios.running(["run.precision=bf16", *overrides]) as engine:
        engine.chunks[0]._passes._overlap = overlap
        samples = [answer(256, 64, seed=seed, last=scenarios.VOCAB) for seed in range(2)]
        microbatches = [scenarios.microbatch_of(engine, [sample]) for sample in samples]
        with Held(engine) as held:
            engine.train_step(microbatches)
            engine.evaluate(microbatches)
        with Held(engine) as after:
            torch.zeros(())
        shards = sum(part.nbytes for chunk in engine.chunks for part in chunk.parameters())
        return {**held.most, "shards": shards}, dict(after.most)


@pytest.mark.parametrize(
    "recompute,overlap",
    [("none", False), ("selective", False), ("full", False), ("attention_kept", False), ("full", True)],
)
def test_at_most_two_layers_one_other_unit_and_one_gradient_are_whole(
    ranks: Ranks, recompute: str, overlap: bool
) -> None:
    """With overlap, the gradients of the unit before may still be in reduction."""
    for most, after in ranks(2).run(most_held, [*CP, *WEIGHTS, f"train.recompute={recompute}"], overlap):
        layer = -(-LAYER // PADDING) * PADDING
        assert most["layers"] == 2 * 2 * layer
        assert most["others"] <= 2 * (OUTPUT + 2 * NORM)
        # One unit at a time, of which the output has most.  With overlap: layer 1's in reduction, the embedding's made.
        assert most["gradients"] == 4 * (layer + EMBEDDING if overlap else OUTPUT)
        assert most["layer 1's gradients"] == 4 * layer
        assert most["shards"] < 2 * (EMBEDDING + OUTPUT + 4 * LAYER + NORM) / 2 + 2 * 7 * PADDING
        assert not any(after.values())


def sent(overrides: list[str]) -> dict[str, int]:
    with scenarios.running(["run.precision=bf16", *overrides]) as engine:
        samples = [answer(256, 64, seed=seed, last=scenarios.VOCAB) for seed in range(2)]
        microbatches = [scenarios.microbatch_of(engine, [sample]) for sample in samples]
        with Sent() as step:
            engine.measure(microbatches, forward_only=False)
            publish_weights(engine.chunks)
        return {name: step.num_bytes[name] for name in ("allgather", "reduce_scatter")}


def padded(*sizes: int) -> int:
    return sum(-(-size // PADDING) * PADDING for size in sizes)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_microbatch_gathers_twice_and_reduces_once(ranks: Ranks, recompute: str) -> None:
    """The weights of the embedding and of the output are gathered once: the first has no use in backward, and the
    fused loss head computes its gradients in the forward pass."""
    layers = [LAYER] * 4
    gathered = padded(EMBEDDING, *layers, NORM, OUTPUT) + padded(NORM, *layers)
    reduced = padded(EMBEDDING, *layers, NORM, OUTPUT)
    plain = [*SHARDED, "parallel.cp=1", "train.global_batch_size=4", f"train.recompute={recompute}"]
    for found in ranks(2).run(sent, [*plain, "parallel.shard=weights"]):
        assert found == {"allgather": 2 * 2 * gathered, "reduce_scatter": 2 * 4 * reduced}
    for found in ranks(2).run(sent, [*plain, "parallel.shard=gradients"]):  # all weights once, after the update
        assert found == {"allgather": 2 * reduced, "reduce_scatter": 2 * 4 * reduced}


@pytest.mark.parametrize(
    "overrides", [[*CP, *WEIGHTS, FULL], [*CP, *GRADIENTS], [*WEIGHTS, *MOE, "parallel.ep=2"]], ids=str
)
def test_a_resumed_run_is_bitwise_equal(ranks: Ranks, tmp_path: Path, overrides: list[str]) -> None:
    scenarios.check_bitwise(ranks(2), tmp_path, overrides)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma2", "gpt_oss"])
def test_each_rank_reads_its_parts_of_a_model_s_files(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """Convolutions, a tied embedding, and experts; also from a Megatron checkpoint, and beside unsharded ranks."""
    source = hf.save(tmp_path / "source", family)
    import_hf(source, tmp_path / "imported", QUIET)
    told = set()
    for overrides in ([], [*CP, *WEIGHTS], [*CP, *GRADIENTS]):
        recipe, sources = [*recipe_of(source), *overrides], [str(source)]
        for hashes in ranks(2 if overrides else 1).run(hashes_of, recipe, sources, f"{tmp_path}/imported/iter_0000000"):
            told.update(hashes)
    assert len(told) == 1


def first_weights(overrides: list[str]) -> str:
    with scenarios.running(overrides) as engine:
        return scenarios.parameter_hash(engine)


def test_random_weights_do_not_depend_on_sharding(ranks: Ranks) -> None:
    (alone,) = ranks(1).run(first_weights, GEMMA)
    assert ranks(2).run(first_weights, [*GEMMA, *CP, *WEIGHTS]) == [alone, alone]


def unit_sizes(overrides: list[str]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The elements of the flat buffers of each unit: of the engine, and of the estimate."""
    with scenarios.running(overrides) as engine:
        made = [
            {
                f"{kind} {state}": sum(
                    float(flat.size * flat.ranks.size)
                    for flat in unit.flats
                    if (flat.is_expert, flat.is_trained) == (kind == "experts", state == "trained")
                )
                for kind in ("dense", "experts")
                for state in ("trained", "frozen")
            }
            for unit in engine.chunks[0].units
        ]
        stage = Stage.of(engine.config, engine.layout, scenarios.VOCAB, 0, engine.trained)
        predicted = [
            {
                f"{kind} {state}": getattr(numbers, kind)
                for kind in ("dense", "experts")
                for state, numbers in (("trained", unit.trained), ("frozen", unit.frozen))
            }
            for unit in StageUnits.of(stage)
        ]
        return made, predicted


@pytest.mark.parametrize("model", MODELS)
def test_the_estimate_divides_every_model_in_the_same_way(ranks: Ranks, model: str) -> None:
    experts = ["parallel.ep=2"] if model in MIXTURES else []
    for made, predicted in ranks(2).run(unit_sizes, [*MODELS[model], *CP, *experts, *WEIGHTS]):
        assert made == predicted


def trained_weights(overrides: list[str], overlap: bool) -> str:
    """The hash of the weights after two steps of two microbatches."""
    with scenarios.running(overrides) as engine:
        engine.chunks[0]._passes._overlap = overlap
        scenarios.train_steps(engine, [0, 1])
        return scenarios.parameter_hash(engine)


@pytest.mark.parametrize("loss", ["fused", "chunked"])
def test_sums_that_run_while_the_next_unit_computes_change_nothing(ranks: Ranks, loss: str) -> None:
    """A tied weight is opened by the loss head while the sum of its last microbatch may still be under way."""
    overrides = [*GEMMA, *WEIGHTS, f"loss.impl={loss}", FULL]
    assert ranks(2).run(trained_weights, overrides, True) == ranks(2).run(trained_weights, overrides, False)


def what_stays(overrides: list[str]) -> bool:
    """Whether a buffer of gradients is still in memory after its engine was released."""
    with scenarios.running(overrides) as engine:
        scenarios.train_steps(engine, [0])
        buffer = weakref.ref(engine.chunks[0].units[1].flats[0])
    del engine
    gc.collect()
    return buffer() is not None


def test_a_released_engine_frees_its_buffers(ranks: Ranks) -> None:
    assert ranks(2).run(what_stays, WEIGHTS) == [False, False]


def groups_left(overrides: list[str]) -> int:
    """The number of process groups that a second engine leaves behind."""
    with scenarios.running(overrides) as engine:
        before = len(distributed_c10d._world.pg_names)
        place = engine.config, engine.layout, engine.groups
        other = Engine(*place, vocab_size=engine.vocab_size, num_steps=10, trained=engine.trained)
        assert len(distributed_c10d._world.pg_names) > before
        release(other)
        return len(distributed_c10d._world.pg_names) - before


def test_a_released_engine_destroys_the_groups_of_its_shards(ranks: Ranks) -> None:
    """Shards of two of four ranks: a group of shards, and one of their replicas."""
    assert ranks(4).run(groups_left, [*WEIGHTS, "parallel.shard_size=2"]) == [0] * 4


def steps_of_head(overrides: list[str], folder: str) -> list[tuple[float, float]]:
    """Losses and gradient norms of three steps."""
    with scenarios.running(overrides, has_weights=False) as engine:
        load(engine, folder)
        results = scenarios.train_steps(engine, [0, 1, 2])
        return [(result.objective, result.grad_norm) for result in results]


def test_a_head_that_is_trained_alone_is_reduced(ranks: Ranks, tmp_path: Path) -> None:
    """The hidden states then need no gradient, so only the head's own gradient begins the backward pass."""
    source = hf.save(tmp_path / "source", "qwen2")
    recipe = [*recipe_of(source), f"model.hf={source}", "train.freeze=[model.*]", "loss.impl=chunked", *CP]
    plain, sharded = (ranks(2).run(steps_of_head, [*recipe, *more], str(source)) for more in (SHARDED, WEIGHTS))
    np.testing.assert_allclose(sharded, plain, rtol=LOSS_TOLERANCE)
    assert min(norm for _, norm in sharded[0]) > 0
