"""Learning from a teacher in the real trainer: one curve on every layout, and weights by step and by source."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.batch import Microbatch, TeacherTargets
from sft.mcore.engine import Engine
from tests.ranks import mtp_models, scenarios
from tests.ranks.layouts import CP, LOSS_TOLERANCE, NORM_TOLERANCE, PP, SLOW_CP, SP, TP
from tests.ranks.peft_models import lora_recipe
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

NUM_STEPS = 2
K = 8  # tokens of the teacher's lists
LENGTHS = [100, 37, 64, 5, 111, 90, 2, 128, 33, 31, 75] * 2  # 11 packs of up to 128 tokens
SMALL = ["model.num_layers=2", "data.seq_length=128", "loss.chunk_size=7"]
KNOWN = f"data.teacher.k={K}"
TAUGHT = [KNOWN, "loss.distill.weight=0.5", "loss.distill.temperature=2.0", "loss.distill.label_weight=0.25"]
NAMED = ["data.train={even: {files: unused}, odd: {files: unused}}"]
FULL = ["loss.impl=full", "loss.chunk_size=null"]
TREES = ["data.turns=each", "data.seq_length=256", "loss.shared=once"]
DYNAMIC = [*CP, "parallel.dynamic_cp=true", *SLOW_CP]
CP4 = ["parallel.cp=4", "train.global_batch_size=4"]


# --- on the ranks ------------------------------------------------------------------------------------------


def with_teacher(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """The microbatches with a teacher that knows only the current token: random lists, and none for a fifth of all
    ids."""
    generator = torch.Generator().manual_seed(1)
    top = (2 * torch.randn(scenarios.VOCAB, scenarios.VOCAB, generator=generator)).log_softmax(-1).topk(K)
    ids, logprobs = top.indices.int(), top.values
    ids[::5], ids[1::5, K // 2 :] = -1, -1
    found = []
    for mb in microbatches:
        tokens = mb.tokens.flatten()
        found.append(replace(mb, teacher=TeacherTargets(ids=ids[tokens], logprobs=logprobs[tokens])))
    return found


def steps_of(engine: Engine) -> Iterator[list[Microbatch]]:
    corpus = scenarios.TreeCorpus if engine.config.data.turns == "each" else scenarios.SkewedCorpus
    loader = scenarios.loader_of(engine, corpus(LENGTHS))
    return (with_teacher(loader.microbatches(step)) for step in range(NUM_STEPS))


def curves(many: Sequence[Sequence[str]]) -> list[dict[str, list[Any]]]:
    """Runs NUM_STEPS steps from random weights for each list of overrides.  A result has, by name, the value in each
    step."""
    return [curve(overrides) for overrides in many]


def curve(overrides: Sequence[str]) -> dict[str, list[Any]]:
    with scenarios.running([*SMALL, *overrides]) as engine:
        results = [engine.train_step(step, sources=("even", "odd")) for step in steps_of(engine)]
        evaluated = engine.evaluate(next(steps_of(engine)), sources=("even", "odd"))
        names = ("objective", "nll", "divergence", "covered", "grad_norm", "num_tokens", "num_taught", "num_agreeing")
        found: dict[str, list[Any]] = {name: [getattr(r, name) for r in results] for name in names}
        found["by_source"] = [r.divergence_by_source for r in results]
        found["evaluated"] = [evaluated.objective, evaluated.nll, evaluated.divergence]
        return found


# --- one curve ---------------------------------------------------------------------------------------------


def same_curve(found: dict[str, list[Any]], reference: dict[str, list[Any]]) -> None:
    for name, values in reference.items():
        if name.startswith("num_"):
            assert found[name] == values, name
        elif name != "by_source":
            limit = NORM_TOLERANCE if name == "grad_norm" else LOSS_TOLERANCE
            np.testing.assert_allclose(found[name], values, rtol=limit, err_msg=name)


LAYOUTS: dict[int, list[list[str]]] = {
    1: [["loss.impl=chunked"], FULL],
    2: [SP, CP, PP, ["parallel.cp=1", "loss.impl=chunked"], [*TP, *FULL], DYNAMIC],
    4: [CP4, [*SP, *CP, "loss.impl=chunked"], [*PP, *CP, *FULL], [*SP, "parallel.pp=1"]],
}


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, list[Any]]:
    ((found,),) = ranks(1).run(curves, [TAUGHT])
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_one_curve_on_every_layout(ranks: Ranks, reference: dict[str, list[Any]], world_size: int) -> None:
    for of_rank in ranks(world_size).run(curves, [[*TAUGHT, *layout] for layout in LAYOUTS[world_size]]):
        for found in of_rank:
            same_curve(found, reference)


@pytest.mark.parametrize("direction, tail", [("reverse", "bucket"), ("jsd", "renormalise")])
def test_other_divergences_of_trees_on_other_layouts(ranks: Ranks, direction: str, tail: str) -> None:
    """In trees, some tokens before a branch have several labels."""
    keys = [*TAUGHT, f"loss.distill.direction={direction}", f"loss.distill.tail={tail}"]
    ((first, plain),) = ranks(1).run(curves, [[*keys, *TREES], [*TAUGHT, *TREES]])
    assert first["divergence"][0] != plain["divergence"][0]
    for of_rank in ranks(2).run(curves, [[*keys, *TREES, *layout] for layout in (SP, CP)]):
        for found in of_rank:
            same_curve(found, first)


def adapters(folder: Path) -> list[str]:
    return lora_recipe(hf.save(folder, "llama"), "all-linear")


@pytest.mark.parametrize("model", [adapters, mtp_models.joint])
def test_adapters_and_multi_token_prediction(ranks: Ranks, tmp_path: Path, model: Callable[[Path], list[str]]) -> None:
    recipe = model(tmp_path)
    ((first, plain),) = ranks(1).run(curves, [[*recipe, *TAUGHT], recipe])
    assert first["divergence"][0] > 0 and first["grad_norm"][0] != plain["grad_norm"][0]
    for of_rank in ranks(2).run(curves, [[*recipe, *TAUGHT, *layout] for layout in (SP, CP)]):
        for found in of_rank:
            same_curve(found, first)


def test_the_student_learns_and_the_log_counts(reference: dict[str, list[Any]]) -> None:
    """The objective is 1/4 of -log p, and 1/2 x 2^2 of the divergence, of the tokens that have a teacher."""
    for step in range(NUM_STEPS):
        wanted = 0.25 * reference["nll"][step] + 2.0 * reference["divergence"][step]
        assert reference["objective"][step] == pytest.approx(wanted, rel=LOSS_TOLERANCE)
        assert 0 < reference["num_taught"][step] < reference["num_tokens"][step]
        assert 0 < reference["covered"][step] < reference["num_taught"][step]
    objective, nll, divergence = reference["evaluated"]
    assert objective == pytest.approx(0.25 * nll + 2.0 * divergence, rel=LOSS_TOLERANCE)
    assert divergence < reference["divergence"][0]


def test_weights_by_step_and_by_source(ranks: Ranks) -> None:
    """Weights 1, then 2 of 3 steps; tokens of `odd` count half, but not in an evaluation, which has weight 4."""
    weights = [KNOWN, "loss.distill.weight=4.0", "loss.distill.start_weight=1.0", "loss.distill.ramp_steps=3"]
    overrides = [*NAMED, *weights, "loss.distill.by_source={odd: 0.5}"]
    ((found, plain),) = ranks(1).run(curves, [overrides, NAMED])
    for step, weight in enumerate((1.0, 2.0)):
        divergences = found["by_source"][step]
        wanted = found["nll"][step] + weight * (divergences["even"] + 0.5 * divergences["odd"])
        assert found["objective"][step] == pytest.approx(wanted, rel=LOSS_TOLERANCE)
        assert min(divergences.values()) > 0
    objective, nll, divergence = found["evaluated"]
    assert objective == pytest.approx(nll + 4.0 * divergence, rel=LOSS_TOLERANCE)
    # Without a weight the divergence is logged and not learnt.
    assert plain["objective"][0] == pytest.approx(plain["nll"][0], rel=LOSS_TOLERANCE)
    assert plain["divergence"][0] == found["divergence"][0]
    assert plain["divergence"][1] != found["divergence"][1]
