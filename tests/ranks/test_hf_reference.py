"""The model against Hugging Face transformers: an implementation that shares no code with ours.

Every sample is run alone and unpadded through a LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM with
the same weights; packed, padded and on every layout our model must give the same per-token losses and gradients.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from sft.batch import Sample
from tests.ranks import scenarios
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    LENGTHS,
    LLAMA,
    MEAN_LOSS_TOLERANCE,
    PACKS,
    VISIBLE,
    Architecture,
    Ranks,
    Reference,
    backward,
    check_losses,
    hf_losses,
    hf_model,
    in_hf_names,
    packed_gradients,
    packed_losses,
    write_weights,
)

LAYOUTS = [
    (1, []),
    (2, ["parallel.cp=2"]),
    (2, ["parallel.tp=2"]),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    (2, ["parallel.pp=2"]),
]


QWEN3 = ["model.qk_norm=true", "model.qkv_bias=false"]
QWEN2 = ["model.qk_norm=false", "model.qkv_bias=true"]
ARCHITECTURES = {
    "qwen3": Architecture("Qwen3", QWEN3),
    "qwen3 tied": Architecture("Qwen3", QWEN3, tied=True),
    "qwen2": Architecture("Qwen2", QWEN2),
    "llama": Architecture("Llama", LLAMA, norm_epsilon=1e-5),
}


def scaled(kind: str, ours: Sequence[str], **theirs: float) -> Architecture:
    """A Llama with changed rotary frequencies; samples of 200 tokens go far beyond the original 64."""
    overrides = [*LLAMA, f"model.rope.scaling={kind}", *(f"model.rope.{text}" for text in ours)]
    return Architecture("Llama", overrides, norm_epsilon=1e-5, rope={"rope_type": kind, **theirs})


ORIGINAL = 64
SCALED = {
    "linear": scaled("linear", ["factor=4"], factor=4.0),
    "llama3": scaled(
        "llama3",
        ["factor=8", f"original_max_position={ORIGINAL}", "low_freq_factor=1", "high_freq_factor=4"],
        factor=8.0,
        original_max_position_embeddings=ORIGINAL,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": scaled(
        "yarn",
        ["factor=8", f"original_max_position={ORIGINAL}"],
        factor=8.0,
        original_max_position_embeddings=ORIGINAL,
    ),
    "yarn with everything set": scaled(
        "yarn",
        [
            "factor=4",
            f"original_max_position={ORIGINAL}",
            "beta_fast=8",
            "beta_slow=0.5",
            "attention_factor=1.3",
        ],
        factor=4.0,
        original_max_position_embeddings=ORIGINAL,
        beta_fast=8.0,
        beta_slow=0.5,
        attention_factor=1.3,
    ),
}


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    """Samples supervised in their last quarter only."""
    corpus = scenarios.SkewedCorpus(LENGTHS)
    return [[corpus.sample(i) for i in pack] for pack in PACKS]


@pytest.fixture(scope="module")
def references(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Architecture], Reference]:
    made: dict[int, Reference] = {}

    def get(arch: Architecture) -> Reference:
        if id(arch) not in made:
            folder = str(tmp_path_factory.mktemp("weights"))
            (weights,) = ranks(1).run(write_weights, arch.recipe, folder)
            made[id(arch)] = Reference(folder, weights, hf_model(arch, weights))
        return made[id(arch)]

    return get


@pytest.mark.parametrize("world_size,overrides", LAYOUTS, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks,
    references: Callable[[Architecture], Reference],
    packs: list[list[Sample]],
    name: str,
    world_size: int,
    overrides: list[str],
) -> None:
    arch = ARCHITECTURES[name]
    reference = references(arch)
    results = ranks(world_size).run(packed_losses, arch.recipe + overrides, reference.folder, packs)
    check_losses(results, reference, packs)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_every_gradient_are_those_of_transformers(
    ranks: Ranks,
    references: Callable[[Architecture], Reference],
    packs: list[list[Sample]],
    name: str,
    cp_size: int,
) -> None:
    arch = ARCHITECTURES[name]
    reference = references(arch)
    expected_loss, count = backward(reference.model, [sample for pack in packs for sample in pack])
    assert count == 50 + 9 + 16 + 1 + 22  # the last quarters of 200, 37, 64, 5 and 90
    expected = {n: param.grad.clone() for n, param in reference.model.named_parameters()}
    recipe = [*arch.recipe, f"parallel.cp={cp_size}"]
    for result in ranks(cp_size).run(packed_gradients, recipe, reference.folder, packs):
        assert result["num_tokens"] == count
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
        found = in_hf_names(arch, result["gradients"])
        assert found.keys() == expected.keys()
        errors = {n: float((found[n] - grad).norm() / grad.norm()) for n, grad in expected.items()}
        wrong = {n: error for n, error in errors.items() if not error <= GRADIENT_TOLERANCE}
        assert not wrong, wrong
        # Rows that only pad the vocabulary are nobody's tokens.
        outer = ["embedding.word_embeddings.weight"] + ["output_layer.weight"] * (not arch.tied)
        assert all(not result["gradients"][n][scenarios.VOCAB :].any() for n in outer)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_positions_beyond_the_original_context(
    ranks: Ranks,
    references: Callable[[Architecture], Reference],
    packs: list[list[Sample]],
    name: str,
    cp_size: int,
) -> None:
    arch = SCALED[name]
    reference = references(arch)
    longest = packs[0][0]
    assert len(longest.tokens) > 3 * ORIGINAL
    with torch.no_grad():
        plain = hf_losses(hf_model(Architecture("Llama", LLAMA, norm_epsilon=1e-5), reference.weights), longest)
        scaled_losses = hf_losses(reference.model, longest)
    assert (plain - scaled_losses).abs().mean() > VISIBLE
    recipe = [*arch.recipe, f"parallel.cp={cp_size}"]
    check_losses(ranks(cp_size).run(packed_losses, recipe, reference.folder, packs), reference, packs)
