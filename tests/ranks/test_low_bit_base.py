"""LoRA beside frozen weights in low bits equals LoRA beside the same weights, dequantised beforehand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.mcore.gradients import gradient_chunks
from sft.mcore.lora import adapted
from sft.mcore.lora.factors import PREFIX
from sft.mcore.low_bits.stored_weight import StoredWeight
from sft.mcore.modules.stored import sharded_tensors
from tests.ranks import low_bit_bases, scenarios
from tests.ranks.hf_models import ADAMW, SHORT, load, packs_of, parts_of
from tests.ranks.layouts import CP, EP, PP, SHARDED, SP
from tests.ranks.low_bit_bases import BASES
from tests.ranks.peft_models import factors, fill, lora_recipe, shard_parts
from tests.ranks.pool import Ranks

FULL, SELECTIVE, KEPT = ("train.recompute=" + kind for kind in ("full", "selective", "attention_kept"))
ON_LAYOUTS = 1e-6  # relative, of the loss: sums over ranks have another order
NORM_ON_LAYOUTS = 1e-5  # relative, of the gradient norm; that of latent attention on two stages exceeds 1e-6
STEPS = 10


def trained(overrides: list[str], folder: str, packs: Any, values: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """This rank's token losses, and parts of gradients; the loss and the norm of the gradients; and this rank's factors
    after ten steps.  values: of all factors; None: random ones, which the result has on one process"""
    with scenarios.running([*overrides, *ADAMW]) as engine:
        load(engine, folder)
        if values is None:
            shards = adapted.linear_tensors(engine.chunks)
            values = factors({s.key.removeprefix(PREFIX): tuple(s.global_shape) for s in shards})
        fill(engine, values)
        losses = scenarios.losses_of(engine, packs)
        totals = engine._run(scenarios.microbatches_of(engine, packs), forward_only=False)
        gradients = parts_of(gradient_chunks(engine))
        steps = [engine.train_step(scenarios.microbatches_of(engine, packs)) for _ in range(STEPS)]
        return {
            "values": values,
            "token losses": [pack[0] for pack in losses if pack is not None],
            "gradients": [part for *_, part in gradients],
            "loss": totals.objective / totals.num_tokens,
            "norms": [step.grad_norm for step in steps],
            "factors": [part for *_, part in shard_parts(sharded_tensors(list(adapted.leaves(engine.chunks))))],
        }


def recipes(name: str, folder: Path, overrides: list[str] = []) -> list[tuple[list[str], str]]:
    """Recipe and folder of the model in low bits, and of the model with its dequantised values."""
    source, plain = low_bit_bases.save(name, folder)
    base = BASES[name]
    low = ["model.init_from=null", f"model.base_dtype={base.dtype}"]
    return [
        ([*lora_recipe(source, base.targets), *low, *overrides], str(source)),
        ([*lora_recipe(plain, base.targets), *overrides], str(plain)),
    ]


def check_same_bits(low: dict[str, Any], other: dict[str, Any]) -> None:
    assert low["loss"] == other["loss"] and low["norms"] == other["norms"]
    for key in ("token losses", "gradients", "factors"):
        for part, part_of_other in zip(low[key], other[key], strict=True):
            assert np.array_equal(part, part_of_other), key


def in_grid(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.grid) for case in cases]


@pytest.mark.parametrize(
    "name,overrides",
    [
        ("mxfp4", [SELECTIVE]),
        ("fp8", [FULL]),
        ("nvfp4", ["run.precision=bf16", SELECTIVE]),
        ("nf4", [KEPT]),
        *in_grid(
            ("int4", [SELECTIVE]),
            ("fp8 by row", ["train.recompute=none"]),
            ("int4 with zero points", [KEPT]),
            ("mxfp8", ["train.recompute=none", "train.mlp_tile=24"]),
            ("nf4 experts", [FULL]),
        ),
    ],
    ids=str,
)
def test_one_process_computes_the_same_bits(ranks: Ranks, tmp_path: Path, name: str, overrides: list[str]) -> None:
    packs = packs_of(SHORT)
    (low,), (other,) = (ranks(1).run(trained, *case, packs, None) for case in recipes(name, tmp_path, overrides))
    assert all(norm > 0 for norm in low["norms"]) and len({float(norm) for norm in low["norms"]}) == STEPS
    check_same_bits(low, other)


@pytest.mark.parametrize(
    "name,overrides",
    [
        ("mxfp4", [*EP, *CP, FULL]),
        ("fp8", [*PP, SELECTIVE]),
        ("nf4 experts", [*SP, *EP]),
        *in_grid(("mxfp4", [*SP, SELECTIVE]), ("int4", [*EP, FULL]), ("nf4", [*CP, KEPT])),
        *in_grid(("nf4", [*PP, FULL]), ("int4", [*SHARDED, "train.recompute=none"])),
    ],
    ids=str,
)
def test_two_processes_compute_what_one_computes(ranks: Ranks, tmp_path: Path, name: str, overrides: list[str]) -> None:
    """And the same bits as beside the dequantised weights on the same layout."""
    packs, cases = packs_of(SHORT), recipes(name, tmp_path)
    (alone,) = ranks(1).run(trained, *cases[0], packs, None)
    low, other = (
        ranks(2).run(trained, [*recipe, *overrides], folder, packs, alone["values"]) for recipe, folder in cases
    )
    for own, own_of_other in zip(low, other):
        check_same_bits(own, own_of_other)
    assert low[-1]["loss"] == pytest.approx(alone["loss"], rel=ON_LAYOUTS)
    assert low[-1]["norms"][0] == pytest.approx(alone["norms"][0], rel=NORM_ON_LAYOUTS)


def held_bytes(overrides: list[str], folder: str, packs: Any) -> dict[str, Any]:
    """Bytes of the stored forms, of the parameters' memory between passes, and at most during a step."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        bases = [chunk.module.frozen_base for chunk in engine.chunks]
        weights = [weight for base in bases for weight in base.weights if weight.is_held]
        found = {"stored": sum(weight.num_bytes for weight in weights), "between": _memory(weights), "most": 0}
        filled = StoredWeight.fill

        def noted(weight: StoredWeight) -> None:
            filled(weight)
            found["most"] = max(found["most"], _memory(weights))

        StoredWeight.fill = noted  # type: ignore[method-assign]
        try:
            engine.train_step(scenarios.microbatches_of(engine, packs))
        finally:
            StoredWeight.fill = filled  # type: ignore[method-assign]
        return found | {"after": _memory(weights)}


def _memory(weights: list[StoredWeight]) -> int:
    return sum(weight.param.untyped_storage().nbytes() for weight in weights)


# Bytes of the stored numbers and scales, and of the matrices of a layer in fp32, without those of experts.
#   mxfp4        17 bytes for 32 numbers.  2 layers of 4 experts with 128 x 64 and 64 x 64 numbers; attention is in bf16
#   nf4 experts  36 bytes for 64 numbers.  2 layers of 4 experts with 3 x 64 x 64 numbers; 768 x 64 of attention
BYTES = {"mxfp4": (52_224, 0), "nf4 experts": (110_592, 196_608)}


@pytest.mark.parametrize("name", BYTES)
def test_memory_is_that_of_the_stored_form_and_of_one_layer(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Experts have no memory between products.  tests/unit/mcore/experts/test_rows.py counts that of a product."""
    (low, source), _ = recipes(name, tmp_path, [SELECTIVE])
    (found,) = ranks(1).run(held_bytes, low, source, packs_of(SHORT))
    assert found == {"stored": BYTES[name][0], "most": BYTES[name][1], "between": 0, "after": 0}
