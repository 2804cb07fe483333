"""Gemma 2 and 3 beyond test_hf_variants.py and the covering set of layouts.py: the scaled embedding in bf16."""

from pathlib import Path

import torch

from tests.ranks import scenarios
from tests.ranks.hf_models import load, recipe_of
from tests.ranks.layouts import GEMMA
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

BF16 = ["run.precision=bf16"]


def embedded(overrides: list[str], folder: str, tokens: torch.Tensor) -> torch.Tensor:
    """What the first layer gets, [t, h]."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        with torch.no_grad():
            output: torch.Tensor = engine.chunks[0].module.embedding(tokens, None)
        return output[:, 0]


def test_the_scaled_embedding_has_the_bits_of_transformers_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    """The root of 40 is 6.3125 in bf16, and 6.3246 in fp32."""
    source = hf.save(tmp_path / "source", "gemma2", tied=True, dtype=torch.bfloat16, hidden_size=40)
    tokens = torch.arange(hf.VOCAB)[None]
    embedding = hf.load(source).bfloat16().get_input_embeddings()
    with torch.no_grad():
        expected = embedding(tokens)[0]
        unrounded = (embedding.weight * 40**0.5)[tokens[0]]
    (found,) = ranks(1).run(embedded, [*recipe_of(source), *BF16], str(source), tokens)
    assert found.dtype is torch.bfloat16 and torch.equal(found, expected)
    assert (found != unrounded).float().mean() > 0.2


def norms(overrides: list[str]) -> list[torch.Tensor]:
    with scenarios.running(overrides) as engine:
        return [param.detach().clone() for name, param in engine.chunks[0].named_parameters() if "norm" in name]


def test_new_norms_multiply_by_1(ranks: Ranks) -> None:
    """Their weights are offsets from 1: four of each of two layers, those of queries and keys, and the last one."""
    (found,) = ranks(1).run(norms, [*GEMMA, "model.num_layers=2", "model.sliding_window_layers=[1]"])
    assert len(found) == 2 * 6 + 1 and not any(weight.any() for weight in found)
