"""The fields that model.megatron may set with each version of megatron-core, and the message for all others."""

import pytest

from sft.config.keys import leaves
from sft.config.megatron_fields import _OWN_KEYS, fields_of, why_not

MAY = "Fields that can be set: disable_bf16_reduced_precision_matmul (true or false), moe_permute_fusion (false)"
REFUSED = {  # field, value, release of megatron-core
    ("num_layers", 3, "0.16.1"): "has its own key; use model.num_layers",
    ("hybrid_context_parallel", True, "0.16.1"): "has its own key; use parallel.dynamic_cp",
    ("cpu_offloading", True, "0.19.2"): "has its own key; use train.offload_fraction",
    ("hidden_dropout", 0.1, "0.16.1"): f"is decided by the trainer, and no key changes it; leave it out.  {MAY}",
    ("is_hybrid_model", True, "0.19.2"): f"has no effect in this trainer; leave it out.  {MAY}",
    ("test_mode", True, "0.16.1"): f"is not proven: no test has trained a step with it; leave it out.  {MAY}",
    ("foo", 1, "0.16.1"): f"is not a field of megatron-core's TransformerConfig; leave it out.  {MAY}",
    ("moe_permute_fusion", True, "0.16.1"): "; expected false",
    ("moe_permute_fusion", 0, "0.19.2"): "; expected false",
    ("disable_bf16_reduced_precision_matmul", None, "0.19.2"): "; expected true or false",
    ("mlp_chunks_for_training", 4, "0.16.1"): "is a field of megatron-core 0.19, but 0.16.1 is installed.  Also with "
    "0.19, it has its own key; use train.mlp_tile",
    ("moe_extended_tp", True, "0.19.2"): "is a field of megatron-core 0.16, but 0.19.2 is installed.  Also with 0.16, "
    f"it is not proven: no test has trained a step with it; leave it out.  {MAY}",
    ("moe_permute_fusion", False, "0.17.1"): "was never tried with megatron-core 0.17.1, which is installed; leave it "
    "out, or use 0.16 or 0.19",
}


@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_what_is_refused(asked: tuple[str, object, str]) -> None:
    assert why_not(*asked) == REFUSED[asked]


@pytest.mark.parametrize("release", ["0.16.1", "0.19.0", "0.19.2", None])
def test_what_is_allowed(release: str | None) -> None:
    assert why_not("moe_permute_fusion", False, release) is None
    assert why_not("disable_bf16_reduced_precision_matmul", True, release) is None
    assert why_not("disable_bf16_reduced_precision_matmul", False, release) is None


@pytest.mark.parametrize("version, num_fields", [("0.16", 242), ("0.19", 306)])
def test_everything_else_is_refused(version: str, num_fields: int) -> None:
    assert len(fields_of(version)) == num_fields
    asked = [(name, value) for name in fields_of(version) for value in (True, False, None, 1, "text", ["text"])]
    allowed = [(name, value) for name, value in asked if why_not(name, value, version) is None]
    reduced = "disable_bf16_reduced_precision_matmul"
    assert sorted(allowed) == [(reduced, False), (reduced, True), ("moe_permute_fusion", False)]


def test_every_key_that_is_named_exists() -> None:
    assert _OWN_KEYS.keys() <= leaves().keys()
