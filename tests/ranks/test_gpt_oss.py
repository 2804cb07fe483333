"""gpt-oss beyond test_hf_variants.py: experts split over etp, and losses over steps that are equal on every layout.

Biases of experts are the delicate part: the dispatcher sums the outputs of etp ranks, and weighs each expert's output.
"""

from pathlib import Path

import pytest
import torch

from sft.batch import Sample
from sft.mcore.model.chunks import sharded_tensors
from tests.ranks import etp_on_gloo, scenarios
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    PACKS,
    Reference,
    backward,
    check_losses,
    check_parameters,
    chunked_gradients,
    in_float64,
    in_stored_names,
    packed_losses,
    recipe_of,
    stored_gradients,
)
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf
from tests.unit.fixtures.mxfp4 import quantise


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(tmp_path_factory.mktemp("model") / "source", "gpt_oss")


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    return [[corpus.sample(i) for i in pack] for pack in PACKS]


ETP = ["parallel.etp=2", "run.device=auto"]
SPLIT = {
    "dp 2": (2, ETP),  # dense gradients are summed over dp, those of experts are not
    "tp 2": (2, [*ETP, "parallel.tp=2", "parallel.sequence_parallel=true", "train.recompute=selective"]),
}


@pytest.mark.parametrize("layout", [pytest.param("dp 2", marks=pytest.mark.grid), "tp 2"])
def test_experts_with_biases_may_be_split_over_etp(
    ranks: Ranks, source: Path, packs: list[list[Sample]], layout: str
) -> None:
    world_size, overrides = SPLIT[layout]
    recipe, reference = [*recipe_of(source), *overrides], in_float64(hf.load(source).train())
    if layout != "dp 2":
        results = ranks(world_size).run(etp_on_gloo.run, packed_losses, recipe, str(source), packs)
        check_losses(results, Reference(str(source), reference), packs)
    loss, count = backward(reference, [sample for pack in packs for sample in pack])
    results = ranks(world_size).run(etp_on_gloo.run, chunked_gradients, recipe, str(source), packs)
    assert sum({result["num_tokens"] for result in results}) in (count, sum(r["num_tokens"] for r in results))
    check_parameters(in_stored_names(source, results), stored_gradients(reference), GRADIENT_TOLERANCE)


def test_a_bias_is_a_part_of_an_output_that_has_a_factor(ranks: Ranks, tmp_path: Path) -> None:
    """Granite multiplies outputs with their biases."""
    source = hf.save(tmp_path / "source", "granite", attention_bias=True, mlp_bias=True)
    samples = [scenarios.SkewedCorpus((40,)).sample(0)]
    results = ranks(1).run(packed_losses, [*recipe_of(source), "train.mlp_tile=24"], str(source), [samples])
    check_losses(results, Reference(str(source), hf.load(source)), [samples])


def new_weights(overrides: list[str]) -> dict[str, torch.Tensor]:
    """New weights of this rank, by their keys in a checkpoint; those of all layers and experts one after another."""
    with scenarios.running(overrides) as engine:
        shards = sharded_tensors(engine.chunks[0].module.sharded_state_dict())
        values: dict[str, list[torch.Tensor]] = {}
        for shard in shards:
            values.setdefault(shard.key, []).append(shard.data.detach().flatten())
        return {key: torch.cat(parts) for key, parts in values.items()}


def test_new_weights(ranks: Ranks, source: Path) -> None:
    """Sinks and the router's bias are drawn, as in transformers; other biases are 0.  The same values at tp 2."""
    recipe = [*recipe_of(source), "model.init_std=0.3", "model.num_attention_heads=64", "model.num_query_groups=2"]
    (one,) = ranks(1).run(new_weights, recipe)
    layers, attention = "decoder.layers", "decoder.layers.self_attention"
    sinks, router = one[f"{attention}.core_attention.softmax_offset"], one[f"{layers}.mlp.router.bias"]
    # 128 and 8 normal numbers; 4 standard errors of a standard deviation are 25% and 100%.
    assert len(sinks) == 128 and 0.22 < float(sinks.std()) < 0.38 and abs(float(sinks.mean())) < 0.1
    assert len(router) == 8 and 0.05 < float(router.std()) < 0.6
    experts = f"{layers}.mlp.experts.experts"
    for key in (f"{attention}.linear_proj.bias", f"{experts}.linear_fc1.bias", f"{experts}.linear_fc2.bias"):
        assert not one[key].any()
    split = ranks(2).run(new_weights, [*recipe, "parallel.tp=2", "parallel.sequence_parallel=true"])
    parts = [found[f"{attention}.core_attention.softmax_offset"].view(2, 32) for found in split]
    assert torch.equal(torch.cat(parts, 1).flatten(), sinks)


def test_mxfp4_files_are_trained_as_the_numbers_that_they_mean(
    ranks: Ranks, packs: list[list[Sample]], tmp_path: Path
) -> None:
    """Straight from the files, each rank its part: the losses are those of a plain folder of these numbers."""
    sizes = dict(hidden_size=64, intermediate_size=32, dtype=torch.bfloat16)  # blocks have 32 numbers
    quantised = hf.save(tmp_path / "quantised", "gpt_oss", **sizes)
    meant = quantise(quantised)
    plain = hf.save(tmp_path / "plain", "gpt_oss", **sizes)
    hf.rewrite(plain, **{name.replace(".", "/"): numbers.bfloat16() for name, numbers in meant.items()})
    layout = ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2"]
    results = ranks(2).run(packed_losses, [*recipe_of(quantised), *layout], str(quantised), packs)
    check_losses(results, Reference(str(plain), hf.load(plain)), packs)
