"""Bytes of sharded gradients and weights, computed by hand."""

from typing import Any

import pytest

from sft.estimate.gpus import GIB
from sft.estimate.memory import Memory, estimate
from sft.estimate.parameters import Numbers
from sft.estimate.units import StageUnits, padded
from sft.estimate.units_in_use import WHOLE_GRADIENTS, WHOLE_WEIGHTS
from sft.estimate.working_sets import (
    ATTENTION,
    EMBEDDING_BACKWARD,
    HEAD,
    MLP,
)
from sft.layers.adapters import Trained, Weight
from sft.parallel.layout import Layout
from tests.builders import LLAMA_8B, layout_config
from tests.unit.fixtures.layouts import TINY, adapted, of, stage_of

EXPERTS = {**TINY, "num_layers": 2, "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 2, "dense_layers": 1}}


def taken(shard: str, trained: Trained = Trained(), **sections: Any) -> Memory:
    parallel = {"cp": 2, "shard": shard, **sections.pop("parallel", {})}
    return estimate(*of(8, parallel=parallel, **sections), 10, 1024, trained)


def whole(found: Memory) -> dict[str, tuple[float, float]]:
    """Bytes of gathered weights and of gradients in reduction, by the name of the working set."""
    return {
        next(iter(working.by_name)): (
            working.by_name.get(WHOLE_WEIGHTS, 0.0),
            working.by_name.get(WHOLE_GRADIENTS, 0.0),
        )
        for working in found.sets
    }


def test_a_flat_buffer_is_padded_to_64_elements_for_each_rank() -> None:
    layout = Layout.resolve(layout_config(parallel={"cp": 2, "shard": "weights"}), 8)
    assert padded(Numbers(dense=100, experts=0), layout) == Numbers(dense=512, experts=0)
    assert padded(Numbers(dense=513, experts=0), layout) == Numbers(dense=1024, experts=0)
    assert padded(Numbers(dense=512, experts=0), layout) == Numbers(dense=512, experts=0)


def test_the_parts_of_a_rank() -> None:
    """The embedding has 512 elements.  The layer has qkv 48, proj 16, fc1 64, fc2 32 and two norms of 4, six times 64
    with padding.  The last norm has 4.  Each unit becomes 512, of which a rank has 64."""
    weights, gradients = taken("weights"), taken("gradients")
    assert (weights.weights, weights.gradients, weights.optimizer) == (2 * 192, 4 * 192, 12 * 192)
    assert (gradients.weights, gradients.gradients, gradients.optimizer) == (2 * 1536, 4 * 192, 12 * 192)
    two = taken("weights", parallel={"shard_size": 2})  # 512 + 384 + 128, and half of them on a rank
    assert (two.weights, two.gradients, two.optimizer) == (2 * 512, 4 * 512, 12 * 512)
    half = taken("weights", optim={"offload_fraction": 0.5})
    assert (half.optimizer, half.host_optimizer) == (6 * 192, 8 * 192)


def test_experts_are_divided_over_the_ranks_that_hold_them() -> None:
    """Layer 2 has qkv, proj, two norms and a router: 320 with padding.  A rank of ep 4 has two experts with two weights
    of 16 and 8: 256 with padding, which two ranks divide."""
    found = taken("weights", model=EXPERTS, parallel={"ep": 4})
    assert found.weights == 2 * (64 + 64 + 64 + 128 + 64)  # embedding, layer 1, layer 2, its experts, norm
    four = taken("weights", model=EXPERTS, parallel={"ep": 4, "shard_size": 4})
    assert four.weights == 2 * (128 + 128 + 128 + 128 + 64)
    # Backward of layer 2: it and layer 1 are whole, and the norm's gradients are in reduction, with a rank's sum.
    assert found.sets[1].by_name[WHOLE_WEIGHTS] == 2 * (512 + 256 + 512)
    assert found.sets[1].by_name[WHOLE_GRADIENTS] == 4 * (512 + 256 + 512 + 64)
    assert whole(found)[MLP] == (2 * 512, 4 * (512 + 512 + 256 + 64 + 128))  # of layer 1, which comes last in `sets`
    alone = taken("weights", model=EXPERTS, parallel={"ep": 8})  # 128, on this rank alone
    assert alone.weights == 2 * (64 + 64 + 64 + 128 + 64)
    assert alone.sets[1].by_name[WHOLE_WEIGHTS] == 2 * (512 + 512)


def test_what_is_whole_in_backward() -> None:
    """StageUnits of 512.  A sum in reduction takes another 64."""
    assert whole(taken("weights")) == {
        HEAD: (2 * 512, 4 * 512),
        MLP: (2 * 512, 4 * 1088),
        ATTENTION: (2 * 512, 4 * 1088),
        EMBEDDING_BACKWARD: (0, 4 * 1088),
    }
    assert whole(taken("gradients"))[MLP] == (0, 4 * 1088)
    assert whole(taken("weights", parallel={"overlap": False}))[MLP] == (2 * 512, 4 * 512)
    assert whole(taken("weights", run={"device": "cpu"}))[MLP] == (2 * 512, 4 * 512)
    assert whole(taken("optimizer")) == {HEAD: (0, 0), MLP: (0, 0), ATTENTION: (0, 0)}
    three = taken("weights", model={**TINY, "tie_embeddings": False, "num_layers": 3})
    assert whole(three) == {
        HEAD: (2 * 512, 4 * 512),
        MLP: (2 * 1024, 4 * 1088),
        ATTENTION: (2 * 1024, 4 * 1088),
        EMBEDDING_BACKWARD: (0, 4 * 1088),
    }


def test_frozen_weights_are_gathered_and_have_no_gradients() -> None:
    """An adapter of rank 2 on qkv (4 + 12) x 2 = 32: 512; a frozen layer: 512."""
    trained = Trained(adapted=[adapted("self_attention.linear_qkv", (4, 4, 4), (0, 1, 2))], whole=[])
    found = taken("weights", trained, lora={"rank": 2})
    assert (found.weights, found.gradients, found.optimizer) == (2 * 4 * 64, 4 * 64, 12 * 64)
    assert whole(found)[HEAD] == (2 * 512, 0)
    assert whole(found)[MLP] == (2 * 1024, 4 * 512)


def test_each_layer_has_its_own_trained_weights() -> None:
    """train.freeze leaves the second layer's down projection, 32 parameters, and the final norm."""
    whole_ = [
        Weight(key="decoder.layers.mlp.linear_fc2.weight", index=(1,), shape=(4, 8)),
        Weight(key="decoder.final_layernorm.weight", index=(), shape=(4,)),
    ]
    model = {**TINY, "num_layers": 2}
    config, layout = of(8, model=model, parallel={"cp": 2, "shard": "weights"})
    stage = stage_of(config, layout, 0)
    units = StageUnits.of(type(stage)(**{**stage.__dict__, "trained": Trained(whole=whole_)}))
    sizes = [(unit.trained.total, unit.frozen.total) for unit in units]
    assert sizes == [(0, 512), (0, 512), (512, 512), (512, 0)]


def test_a_pipeline_stage_has_units_of_its_own() -> None:
    """Each of two stages has a copy of the tied table."""
    config, layout = of(8, model={**TINY, "num_layers": 2}, parallel={"pp": 2, "cp": 4, "shard": "gradients"})
    first, last = (StageUnits.of(stage_of(config, layout, number)) for number in (0, 1))
    assert [unit.trained.total for unit in first] == [512, 512]
    assert [unit.trained.total for unit in last] == [512, 256, 512]
    assert list(first.layers) == [1] and list(last.layers) == [2]


def test_eight_billion_parameters_on_eight_gpus() -> None:
    """8.03e9 parameters x 18 bytes / 8 ranks = 16.8 GiB, and no more than 1 MiB of padding."""
    parallel = {"cp": 8, "shard": "weights"}
    config = layout_config(model=LLAMA_8B, parallel=parallel, data={"seq_length": 2**20})
    found = estimate(config, Layout.resolve(config, 8), 128_256)
    assert found.static == pytest.approx(8_030_261_248 * 18 / 8, abs=2**20)
    assert found.static < 17.5 * GIB
    layer = 218_112_000
    assert whole(found)[MLP] == (2 * 2 * layer, 4 * (2 * layer + layer / 8))
