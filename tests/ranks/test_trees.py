"""Trees of texts: losses, gradients and statistics are those of the same texts as separate samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sft.batch import Sample
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.hf_cases import LINEAR_SEED
from tests.ranks.hf_comparison import Models, compare_gradients, layout_of, saved_once
from tests.ranks.hf_models import GRADIENT_TOLERANCE
from tests.ranks.layouts import AUX, CP, LATENT, LINEAR, MAMBA, MODELS, MOE
from tests.ranks.pool import Ranks
from tests.tree_samples import nested

# fp32 on other shapes: sums over keys have another order.  Relative to the largest gradient of the model.
TOLERANCE = 1e-5
# The gradients of the same texts as separate samples differ from those of transformers in float64 by up to 1.45e-5.
LINEAR_TOLERANCE = 2e-5


def samples(is_tree: bool) -> list[Sample]:
    """A tree between two plain samples, or its texts as separate samples."""
    before, after = answer(40, 10, seed=11, last=scenarios.VOCAB), answer(33, 33, seed=12, last=scenarios.VOCAB)
    tree, texts = nested(5, scenarios.VOCAB)
    return [before, tree, after] if is_tree else [before, *texts, after]


def passes(overrides: Sequence[str], is_tree: bool) -> dict[str, Any]:
    with scenarios.running(overrides) as engine:
        pack = scenarios.microbatch_of(engine, samples(is_tree))
        totals, gradients = scenarios.backward(engine, [pack])
        experts = engine._expert_load()
        return {
            "gradients": gradients,
            "loss": totals.objective,
            "denominator": totals.denominator,
            "nll": totals.nll,
            "tokens": totals.num_tokens,
            "experts": None if experts is None else [np.asarray(x) for x in (experts.chosen, experts.aux, experts.z)],
        }


CASES = {
    "full": [],
    "tokens": ["loss.denominator=tokens", "loss.reduction=sqrt"],
    "experts": [*MOE, *AUX],
    "gemma": MODELS["gemma"],
    "gpt_oss": MODELS["gpt_oss"],
    "latent": LATENT,
    "routers": MODELS["routers"],
    "linear": LINEAR,
    "linear_experts": MODELS["linear_experts"],
    "Mamba-2": MAMBA,
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_tree_has_the_losses_and_gradients_of_its_texts(ranks: Ranks, case: str, world_size: int) -> None:
    overrides = [*CASES[case], *(CP if world_size == 2 else [])]
    (whole,) = ranks(1).run(passes, CASES[case], False)
    found = ranks(world_size).run(passes, overrides, True)[0]
    assert found["tokens"] == whole["tokens"]
    assert found["denominator"] == pytest.approx(whole["denominator"], rel=1e-12)
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert found["nll"] == pytest.approx(whole["nll"], rel=1e-6)
    largest = max(np.abs(gradient).max() for gradient in whole["gradients"].values())
    for name, gradient in whole["gradients"].items():
        assert np.abs(found["gradients"][name] - gradient).max() <= TOLERANCE * largest, name
    for mine, theirs in zip(found["experts"] or [], whole["experts"] or []):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": dict(family="qwen3"),
    "gemma3": dict(family="gemma3_text"),
    "gpt_oss": dict(family="gpt_oss", num_hidden_layers=4),
    "qwen3_moe": dict(family="qwen3_moe"),
    "qwen3_5": dict(family="qwen3_5_text", seed=LINEAR_SEED),
    "deepseek": dict(family="deepseek_v3"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, FAMILIES)


@pytest.mark.parametrize(
    "name,layout",
    [
        ("qwen3", "one"),
        ("qwen3", "tp_cp+selective"),
        ("gemma3", "cp4"),
        ("gpt_oss", "tp_cp_ep+selective"),
        ("qwen3_moe", "cp_ep"),
        ("qwen3_5", "one"),
        ("qwen3_5", "tp_cp+full"),
        ("deepseek", "pp_cp"),
    ],
)
def test_trees_have_the_losses_and_gradients_of_transformers(
    ranks: Ranks, models: Models, name: str, layout: str
) -> None:
    """transformers computes each text by itself, in float64."""
    (first, texts), (second, others) = nested(5, scenarios.VOCAB), nested(6, scenarios.VOCAB)
    plain = answer(40, 10, seed=11, last=scenarios.VOCAB)
    packs, alone = [[first, plain], [second]], [*texts, plain, *others]
    tolerance = LINEAR_TOLERANCE if name == "qwen3_5" else GRADIENT_TOLERANCE
    compare_gradients(ranks, models(name), layout_of(layout), packs, texts=alone, tolerance=tolerance)


def changed(sample: Sample, document: int) -> Sample:
    """The sample with other tokens in one document."""
    assert sample.tree is not None
    tokens, (start, stop) = sample.tokens.copy(), sample.tree.starts[document : document + 2]
    tokens[start:stop] = (tokens[start:stop] + 1) % scenarios.VOCAB
    return replace(sample, tokens=tokens)


@pytest.mark.parametrize(
    "world_size,overrides", [(1, []), (2, CP), (4, ["parallel.cp=4", *MODELS["gpt_oss"]]), (2, [*CP, *LINEAR])]
)
def test_a_branch_changes_no_token_of_its_siblings_and_its_parent(
    ranks: Ranks, world_size: int, overrides: list[str]
) -> None:
    """Document 2 is replaced.  Document 3 continues it; documents 0, 1 and 4 do not."""
    tree, _ = nested(5, scenarios.VOCAB)
    before, after = ([answer(33, 9, seed=1), sample] for sample in (tree, changed(tree, 2)))
    results = ranks(world_size).run(scenarios.token_losses, overrides, [before, after])
    losses = [scenarios.in_pack_order(results, pack, 64 + 96 + 32 + 64 + 32 + 64) for pack in (0, 1)]
    # positions in the pack; the token at position 64 + 29 predicts the first token of documents 1 and 2
    bounds = {"plain": (0, 64), "0": (64, 93), "0, after": (94, 160), "1": (160, 192), "4": (288, 352)}
    for name, (start, stop) in bounds.items():
        assert (losses[0][start:stop] == losses[1][start:stop]).all(), name
    assert (losses[0][192:225] != losses[1][192:225]).mean() > 0.9
    assert (losses[0][256:263] != losses[1][256:263]).mean() > 0.9  # it follows document 2
