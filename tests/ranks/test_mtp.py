"""Multi-token prediction: losses and every gradient are those of the block by hand, on every layout."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.batch import Sample
from sft.console import QUIET
from sft.hf.source import open_source
from sft.mcore.gradients import gradient_chunks
from sft.weights import kept
from sft.weights.export.export_hf import export_hf
from tests.builders import answer
from tests.ranks import mtp_models, scenarios
from tests.ranks.hf_comparison import DECAY_TOLERANCE
from tests.ranks.hf_models import GRADIENT_TOLERANCE, MEAN_LOSS_TOLERANCE, in_stored_names, load, parts_of, recipe_of
from tests.ranks.layouts import AUX, CP, LOSS_TOLERANCE, NORM_TOLERANCE, PP, SHARDED, SLOW_CP, SP
from tests.ranks.pool import Ranks
from tests.ranks.saving import train_and_save
from tests.unit.fixtures import hf

Model = tuple[Path, mtp_models.ByHand]
JOINT = ["train.mtp=joint"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, ["train.recompute=full"]),
    "dp": (2, [*SHARDED, "loss.impl=chunked"]),
    "cp": (2, [*CP, "train.recompute=selective"]),
    "pp": (2, [*PP, "loss.impl=full", "loss.chunk_size=null"]),
    "tp cp": (4, [*SP, *CP]),
    "tp pp": (4, [*SP, *PP]),
    "dynamic": (2, [*CP, "parallel.dynamic_cp=true", *SLOW_CP]),
    "sharded": (2, [*CP, *SHARDED, "parallel.shard=weights", "train.recompute=selective", "loss.impl=chunked"]),
    "sharded full": (2, [*CP, *SHARDED, "parallel.shard=weights", "train.recompute=full"]),
}


def samples() -> list[list[Sample]]:
    """Two packs.  A document without padding is followed by one that is supervised from its second token on.  In
    documents of one, two, three and four tokens, the block predicts 0, 0, 1 and 2 tokens."""
    lengths = {64: 40, 30: 29, 1: 0, 90: 20, 2: 1, 37: 37, 3: 2, 4: 1}
    made = [answer(length, count, seed=length, last=scenarios.VOCAB) for length, count in lengths.items()]
    return [made[:4], made[4:]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    return cache(lambda family: mtp_models.save(tmp_path_factory.mktemp("model") / "source", family))


def recipe(source: Path, overrides: Sequence[str]) -> list[str]:
    return [*recipe_of(source), f"train.mtp_loss_weight={mtp_models.WEIGHT}", *overrides]


def measured(overrides: Sequence[str], folder: str, packs: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Both mean losses, counts, and this rank's parts of gradients; a copied part comes from its first rank only."""
    with scenarios.running(overrides, has_weights=False) as engine:
        load(engine, folder)
        mine = packs[engine.groups.dp_rank :: engine.layout.dp]
        cp_sizes = [engine.layout.cp_sizes[0] if engine.layout.cp_sizes and i else None for i in range(len(mine))]
        microbatches = [scenarios.microbatch_of(engine, p, cp_size=size) for p, size in zip(mine, cp_sizes)]
        if engine.layout.cp_sizes and engine.groups.cp_rank == 0:  # the second pack is on one rank
            microbatches[1] = scenarios.microbatch_of(engine, [], cp_size=1)
        totals = engine._run(microbatches, forward_only=False)
        chunks = parts_of(gradient_chunks(engine))
        losses = (totals.objective / totals.num_tokens, totals.mtp_nll / max(1, totals.num_mtp_tokens))
        return {"chunks": chunks, "losses": losses, "count": totals.num_mtp_tokens}


CASES = [
    *(("glm4_moe", "joint", layout) for layout in LAYOUTS),
    *(("glm4_moe", "detached", layout) for layout in ("one", "pp", "sharded")),
    *(("deepseek_v3", "joint", "one"), ("qwen3_5_text", "joint", "cp")),
]


@pytest.mark.parametrize("family,mode,layout", CASES)
def test_losses_and_gradients_are_those_by_hand(
    ranks: Ranks, models: Callable[[str], Model], family: str, mode: str, layout: str
) -> None:
    (source, by_hand), (world_size, overrides) = models(family), LAYOUTS[layout]
    packs, is_joint = samples(), mode == "joint"
    first, second, count, expected = by_hand.gradients([s for pack in packs for s in pack], is_joint=is_joint)
    results = ranks(world_size).run(measured, recipe(source, [f"train.mtp={mode}", *overrides]), str(source), packs)
    for result in results:
        assert result["count"] == count == 40 + 28 + 20 + 35 + 1 + 1
        assert result["losses"] == pytest.approx((first, second), rel=MEAN_LOSS_TOLERANCE)
    gradients = in_stored_names(source, results, has_mtp=True)
    scenarios.check_parameters(gradients, expected, GRADIENT_TOLERANCE, DECAY_TOLERANCE)


def by_document(overrides: Sequence[str], folder: str, packs: Sequence[Sequence[Sample]]) -> list[tuple[float, int]]:
    """For each document, the sum of the block's losses and their number, if the other documents of the pack have weight
    0."""
    with scenarios.running(overrides, has_weights=False) as engine:
        load(engine, folder)
        found = []
        for pack in packs:
            for one in pack:
                weighed = [sample if sample is one else unsupervised(sample) for sample in pack]
                rest = [[unsupervised(sample) for sample in pack]] * (engine.layout.dp - 1)
                mine = [weighed, *rest][engine.groups.dp_rank]
                totals = engine._run([scenarios.microbatch_of(engine, mine)], forward_only=True)
                found.append((totals.mtp_nll, totals.num_mtp_tokens))
        return found


def unsupervised(sample: Sample) -> Sample:
    return replace(sample, weights=np.zeros_like(sample.weights))


@pytest.mark.parametrize(
    "layout", ["cp", *(pytest.param(name, marks=pytest.mark.grid) for name in ("one", "dp", "pp", "tp cp"))]
)
def test_the_loss_of_each_document_is_that_by_hand(ranks: Ranks, models: Callable[[str], Model], layout: str) -> None:
    (source, hand), (world_size, overrides) = models("deepseek_v3"), LAYOUTS[layout]
    with torch.no_grad():
        losses = [hand.losses(sample, is_joint=True)[1] for pack in samples() for sample in pack]
    for result in ranks(world_size).run(by_document, recipe(source, [*JOINT, *overrides]), str(source), samples()):
        assert [count for _, count in result] == [len(loss) for loss in losses] == [40, 28, 0, 20, 0, 35, 1, 1]
        expected = [loss.sum().item() for loss in losses]
        assert [nll for nll, _ in result] == pytest.approx(expected, rel=MEAN_LOSS_TOLERANCE, abs=1e-12)


@pytest.mark.parametrize("overrides", [[], PP], ids=["one", "pp"])
def test_detached_leaves_the_gradients_of_the_model_bit_for_bit(
    ranks: Ranks, models: Callable[[str], Model], overrides: list[str]
) -> None:
    """With detached hidden states, the model's gradients are bitwise those without the block; joint training changes
    them."""
    source, _ = models("glm4_moe")

    def gradients(mode: str) -> dict[str, torch.Tensor]:
        of_mode = recipe_of(source) + overrides + [f"train.mtp={mode}"]
        results = ranks(2 if overrides else 1).run(measured, of_mode, str(source), samples())
        return in_stored_names(source, results, has_mtp=mode != "off")

    off = gradients("off")
    found = {mode: {n: x for n, x in gradients(mode).items() if n in off} for mode in ("detached", "joint")}
    assert hf.same(found["detached"], off)
    same = {name for name in off if hf.same({name: off[name]}, {name: found["joint"][name]})}
    assert same == set()


def test_checkpoints_carry_the_block_to_another_layout(
    ranks: Ranks, models: Callable[[str], Model], tmp_path: Path
) -> None:
    """Trains two steps on one layout and the third on another: losses and norms equal those of three steps on one
    process."""
    source, _ = models("glm4_moe")
    overrides = [*recipe(source, JOINT), *AUX, "train.num_steps=3", "model.moe.bias_update_rate=0.03"]
    (whole,) = ranks(1).run(scenarios.train, overrides)
    ranks(2).run(scenarios.train, overrides + PP, (0, 1), None, str(tmp_path))
    for result in ranks(2).run(scenarios.train, overrides + CP + SHARDED, (2,), str(tmp_path)):
        np.testing.assert_allclose(result["loss"], whole["loss"][2:], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], whole["grad_norm"][2:], rtol=NORM_TOLERANCE)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_an_export_has_the_trained_block(
    ranks: Ranks, models: Callable[[str], Model], tmp_path: Path, family: str
) -> None:
    """The export has the names of the source; copied tensors equal their originals; an import reads the export
    again."""
    source, _ = models(family)
    run = tmp_path / "run"
    kept.keep(open_source(source, has_mtp=True), run / "hf")
    overrides = recipe(source, [*JOINT, "optim.lr=1e-2", "checkpoint.async_save=false", *CP])
    ranks(2).run(train_and_save, overrides, str(source), str(run / "checkpoints"), [])
    export_hf(run, tmp_path / "exported", QUIET)
    before, after = hf.tensors(source), hf.tensors(tmp_path / "exported")
    assert {n: (x.dtype, x.shape) for n, x in before.items()} == {n: (x.dtype, x.shape) for n, x in after.items()}
    unchanged = {name for name in before if hf.same({name: before[name]}, {name: after[name]})}
    assert unchanged == {name for name in before if name.endswith("e_score_correction_bias")}
    if family == "glm4_moe":
        assert torch.equal(after["model.layers.2.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert torch.equal(after["model.layers.2.shared_head.head.weight"], after["lm_head.weight"])
    again = open_source(tmp_path / "exported", has_mtp=True)
    assert set(again.names("trained")) | set(again.names("tied copy")) == set(after)


def test_an_export_shares_the_trained_embedding_with_a_block_that_is_not_trained(
    ranks: Ranks, models: Callable[[str], Model], tmp_path: Path
) -> None:
    """Servers use one embedding for model and block, so the block's copies follow the model."""
    source, _ = models("glm4_moe")
    run, copies = tmp_path / "run", {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    kept.keep(open_source(source), run / "hf")
    overrides = [*recipe_of(source), "optim.lr=1e-2", "checkpoint.async_save=false"]
    ranks(1).run(train_and_save, overrides, str(source), str(run / "checkpoints"), [])
    export_hf(run, tmp_path / "exported", QUIET)
    before, after = hf.tensors(source), hf.tensors(tmp_path / "exported")
    block = {name for name in before if mtp_models.is_of_block("glm4_moe", name)}
    for copy, name in copies.items():
        assert torch.equal(after[f"model.layers.2.{copy}.weight"], after[f"{name}.weight"])
        assert not torch.equal(after[f"model.layers.2.{copy}.weight"], before[f"{name}.weight"])
        block.remove(f"model.layers.2.{copy}.weight")
    assert all(hf.same({name: before[name]}, {name: after[name]}) for name in block)
