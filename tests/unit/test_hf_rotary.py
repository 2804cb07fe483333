"""Rotary positions in config.json, in both of its forms, as transformers reads them."""

import json
from typing import Any

import pytest
import transformers

from sft.config import RopeConfig
from sft.hf.architecture import architecture
from tests.unit.fixtures.hf import llama, refusal

PLAIN: dict[str, Any] = dict(rope_scaling=..., rope_theta=...)


def rope(**changes: Any) -> RopeConfig:
    return architecture(llama(**{**PLAIN, **changes}), "config.json").model.rope


def yarn(**fields: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **fields}


YARN = RopeConfig(scaling="yarn", factor=4.0, original_max_position=4096)


@pytest.mark.parametrize(
    "fields,expected",
    [
        ({}, RopeConfig(base=10000.0)),
        ({"rope_scaling": None}, RopeConfig(base=10000.0)),
        ({"rope_theta": 1000000}, RopeConfig(base=1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(base=1e6)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e6}, RopeConfig(base=2e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(scaling="linear", factor=2.0)),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, RopeConfig()),
        ({"rope_scaling": yarn()}, YARN),
        ({"rope_scaling": yarn(attention_factor=None, truncate=True, mscale=None)}, YARN),
        ({"rope_scaling": yarn(attention_factor=1.3)}, YARN.model_copy(update={"attention_factor": 1.3})),
        ({"rope_scaling": yarn(beta_fast=8, beta_slow=0.5)}, YARN.model_copy(update=dict(beta_fast=8, beta_slow=0.5))),
        # No original length: one outside of the group, or the longest one.
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096},
            YARN,
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 4096},
            YARN,
        ),
        ({"rope_scaling": yarn(factor=None), "max_position_embeddings": 16384}, YARN),
        # Both forms in one file: the old one counts.
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
            RopeConfig(base=10000.0, scaling="linear", factor=2.0),
        ),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else "",
)
def test_positions_are_read_as_transformers_reads_them(fields: dict[str, Any], expected: RopeConfig) -> None:
    assert rope(**fields) == expected
    sizes = dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=131072)
    theirs = transformers.LlamaConfig(**{**sizes, **json.loads(json.dumps(fields))})
    theirs.standardize_rope_params()  # as every model does before it computes
    theirs = theirs.rope_parameters
    kind = {"default": "none"}.get(theirs["rope_type"], theirs["rope_type"])
    assert theirs["rope_theta"] == expected.base
    if theirs.get("factor") != 1.0:
        assert kind == expected.scaling
    if kind == "yarn":
        assert theirs["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    "fields,why",
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_type = "dynamic" is not supported'),
        ({"rope_scaling": {"rope_type": "longrope"}}, 'rope_type = "longrope" is not supported'),
        ({"rope_scaling": {"rope_type": "yarn", **yarn(mscale=1.0)}}, "mscale = 1.0 is not supported"),
        ({"rope_scaling": yarn(truncate=False)}, "truncate = false is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention = "),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "is not a group"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, 'rope_type = ["yarn"] is not supported'),
        ({"rope_scaling": yarn(factor=0.5)}, "rope_scaling = 0.5 (rope.factor)"),
        (
            {"rope_scaling": yarn(), "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 4096 for positions, and 1 outside of them",
        ),
    ],
    ids=str,
)
def test_positions_that_are_refused(fields: dict[str, Any], why: str) -> None:
    assert why in refusal(llama(**{**PLAIN, **fields}))
