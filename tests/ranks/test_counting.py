"""Every supervised token counts once, and unsupervised tokens do not count."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from sft.batch import Sample
from sft.metrics.records import Record, eval_record, train_record
from sft.metrics.results.records import flat
from sft.metrics.run_facts import RunFacts
from sft.run.evaluation import evaluate
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.pool import Ranks
from tests.unit.metric_values import by_layout

# The same sums with another grouping of fp32 numbers.
TOLERANCE = 1e-6

LAYOUTS = [(1, []), (2, ["parallel.pp=2"]), (4, ["parallel.cp=2"])]  # the last layout has dp 2


def quarter(seed: int, length: int) -> Sample:
    """A sample whose last quarter is supervised: 2 of 10 tokens, 0 of 3."""
    return answer(length, length // 4, seed=seed, last=scenarios.VOCAB)


def question(seed: int, length: int) -> Sample:
    """A sample without a supervised token."""
    return answer(length, 0, seed=seed, last=scenarios.VOCAB)


def one_step(overrides: list[str], packs: list[list[Sample]]) -> dict[str, object]:
    """One training step over `packs`, which are dealt to the data-parallel ranks in turn."""
    with scenarios.running([*overrides, f"train.global_batch_size={len(packs)}"]) as engine:
        result = engine.train_step(scenarios.microbatches_of(engine, packs))
        return {
            "loss": result.objective,
            "grad_norm": result.grad_norm,
            "num_tokens": result.num_tokens,
            "documents": result.num_documents,
            "skipped": result.skipped,
            "hash": scenarios.parameter_hash(engine),
        }


@pytest.mark.parametrize("world_size,overrides", LAYOUTS, ids=str)
def test_a_batch_without_supervision_is_skipped(ranks: Ranks, world_size: int, overrides: list[str]) -> None:
    packs = [[question(i, 40)] for i in range(4)]
    before = ranks(world_size).run(untrained_hash, overrides)
    after = ranks(world_size).run(one_step, overrides, packs)
    for result, expected in zip(after, before):
        assert result["skipped"] and result["loss"] == 0.0 and result["num_tokens"] == 0
        assert result["hash"] == expected  # not even weight decay changes a weight


def untrained_hash(overrides: list[str]) -> str:
    with scenarios.running(overrides) as engine:
        return scenarios.parameter_hash(engine)


@pytest.mark.parametrize("world_size,overrides", LAYOUTS, ids=str)
def test_unsupervised_microbatches_change_nothing(ranks: Ranks, world_size: int, overrides: list[str]) -> None:
    """A whole microbatch, and with dp 2 a whole rank, has no supervised token: the result is bitwise the same without
    it."""
    some = [[quarter(0, 90)], [question(1, 33)], [quarter(2, 70)], []]
    other = [[quarter(0, 90)], [question(7, 64)], [quarter(2, 70)], [question(8, 9)]]
    for a, b in zip(
        ranks(world_size).run(one_step, overrides, some), ranks(world_size).run(one_step, overrides, other)
    ):
        assert a["num_tokens"] == 22 + 17
        assert (a["loss"], a["grad_norm"], a["hash"]) == (b["loss"], b["grad_norm"], b["hash"])
        assert np.isfinite(a["loss"]) and a["loss"] > 0 and a["grad_norm"] > 0


@pytest.mark.parametrize(
    "objective",
    [
        [],
        ["loss.reduction=sample"],
        ["loss.reduction=sqrt", "loss.denominator=tokens"],
        ["loss.z_loss_coef=0.01", "loss.entropy_coef=-0.1"],
        ["loss.impl=chunked", "loss.z_loss_coef=0.01", "loss.entropy_coef=0.1", "loss.reduction=sqrt"],
    ],
    ids=" ".join,
)
def test_the_logged_loss_is_the_optimised_one(ranks: Ranks, objective: list[str]) -> None:
    """With a small learning rate, one plain gradient step must lower the loss by lr * |gradient|^2, to first order
    (P67)."""
    packs = [[quarter(0, 90), quarter(2, 30)], [quarter(1, 60)]]
    (result,) = ranks(1).run(descent, objective, packs)
    assert result["fallen"] == pytest.approx(result["expected"], rel=0.02)  # the second order is neglected


@pytest.mark.parametrize("world_size,overrides,count", [(1, [], 4), (1, [], 1), (2, ["parallel.cp=2"], 2)], ids=str)
def test_the_logged_loss_is_what_went_backward(ranks: Ranks, world_size: int, overrides: list[str], count: int) -> None:
    """For any number of microbatches: the logged loss equals the sum of the roots of the autograd graphs, and fits the
    size of the step."""
    samples = [quarter(i, n) for i, n in enumerate([60, 31, 50, 20])]
    packs = [samples[i::count] for i in range(count)]
    found = ranks(world_size).run(descent, overrides, packs)
    assert found[0]["fallen"] == pytest.approx(found[0]["expected"], rel=0.02)
    supervised = 15 + 7 + 12 + 5
    for result in found:
        assert len(result["roots"]) == count
        assert result["logged"] == pytest.approx(sum(sum(r["roots"]) for r in found) / supervised, rel=1e-12)


@pytest.mark.parametrize("world_size,overrides", [(1, []), (2, ["parallel.cp=2"])], ids=str)
def test_the_size_of_weights_does_not_matter(ranks: Ranks, world_size: int, overrides: list[str]) -> None:
    """The sum of weights is the denominator, even far below 1 (megatron-core raises denominators to at least 1)."""
    packs = [[quarter(0, 90), quarter(2, 30)], [quarter(1, 60)]]
    plain, light = (ranks(world_size).run(weighed, overrides, packs, size)[0] for size in (1.0, 2.0**-10))
    assert light["denominator"] == plain["denominator"] / 1024 < 1
    assert light["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)
    assert light["grad_norm"] == pytest.approx(plain["grad_norm"], rel=TOLERANCE)


def weighed(overrides: list[str], packs: list[list[Sample]], size: float) -> dict[str, float]:
    with scenarios.running(["train.global_batch_size=2", *overrides]) as engine:
        microbatches = [scenarios.microbatch_of(engine, pack) for pack in packs]
        heavier = [replace(mb, loss_weights=mb.loss_weights * size) for mb in microbatches]
        result = engine.train_step(heavier)
        return {"loss": result.lm_loss, "denominator": result.denominator, "grad_norm": result.grad_norm}


def descent(overrides: list[str], packs: list[list[Sample]]) -> dict[str, Any]:
    """How far a small plain step lowers the loss, how far it should; the logged loss, and the root of each autograd
    graph."""
    with scenarios.running([f"train.global_batch_size={len(packs)}", *overrides]) as engine:
        microbatches = [scenarios.microbatch_of(engine, pack) for pack in packs]
        totals = [engine.evaluate(microbatches)]
        for chunk in engine.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        roots: list[float] = []
        engine._loss = partial(noting, engine._loss, roots)  # type: ignore[method-assign]
        logged = engine._run(microbatches, forward_only=False)
        del engine._loss
        step, norm = 1e-4, 0.0
        for param in engine.chunks[0].parameters():
            norm += float(param.main_grad.double().pow(2).sum())
            param.data.sub_(step * param.main_grad)
        totals.append(engine.evaluate(microbatches))
        before, after = (t.objective / t.denominator for t in totals)
        mean = logged.objective / logged.denominator
        return {"fallen": before - after, "expected": step * norm, "logged": mean, "roots": roots}


def noting(loss: Any, roots: list[float], *arguments: Any) -> Any:
    """Returns the result of `loss`; records its first value, the root of the graph."""
    found = loss(*arguments)
    roots.append(found[0].item())
    return found


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_the_norm_is_logged_with_clipping_switched_off(ranks: Ranks, sharded: str) -> None:
    overrides = [f"parallel.distributed_optimizer={sharded}"]
    (clipped,) = ranks(1).run(one_step, [*overrides, "optim.clip_grad=1.0"], [[quarter(0, 90)]])
    (whole,) = ranks(1).run(one_step, [*overrides, "optim.clip_grad=0"], [[quarter(0, 90)]])
    assert whole["grad_norm"] == clipped["grad_norm"] > 1.0
    assert whole["hash"] != clipped["hash"]


def test_biases_and_norms_do_not_decay(ranks: Ranks) -> None:
    for names in ranks(1).run(decaying, ["parallel.distributed_optimizer=false"]):
        assert names == {"linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight"} | {
            "word_embeddings.weight",
            "output_layer.weight",
        }


def decaying(overrides: list[str]) -> set[str]:
    """The last two parts of the names of parameters in groups with weight decay, after a step."""
    with scenarios.running(overrides) as engine:
        engine.train_step([scenarios.microbatch_of(engine, [quarter(0, 90)])] * engine.layout.num_microbatches)
        groups = [g for g in engine.optimizer.param_groups if g["weight_decay"] > 0]
        assert {g["weight_decay"] for g in groups} == {0.1}
        named = {id(p): n for n, p in engine.chunks[0].named_parameters()}
        return {".".join(named[id(p)].split(".")[-2:]) for g in groups for p in g["params"]}


# Five packs: a global batch of four packs, and a batch of one pack with three documents of 60 tokens; this batch lacks
# three packs.
SHORT_LAST = [200, 37, 64, 5, 111, 90, 2, 256, 60, 60, 60, 60]
# Sums of fp32 numbers in another order.  The relative error of a perplexity is the error of the loss times its 5.7
# nats.
RECORD_TOLERANCE = 1e-5
FILLER = {"tokens/padded", "padding/filler", "padding/tail"}
BALANCED = FILLER | {"work-imbalance"}
DYNAMIC = {"microbatches", "cp-size", "cp-bytes", "cp-bytes-fixed", "by cp size/NAME/packs", "by cp size/NAME/tokens"}
FILLED = ["data.pad_to_seq_length=true"]
# the pack's length is a multiple of it; tp 4 with sequence parallelism needs a multiple of 4
NARROW = ["data.doc_multiple=2"]


def records(overrides: list[str]) -> list[Record]:
    """The records of an epoch's two steps, and of the same samples as a held-out set; by flat names."""
    with scenarios.running(overrides) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(SHORT_LAST))
        run = RunFacts.of(engine.config, engine.layout, engine.vocab_size)
        found = []
        for step in range(2):
            result = engine.train_step(loader.microbatches(step), sources=loader.sources)
            found.append(train_record(step + 1, result, run, seconds=1.0))
        totals = evaluate(engine, loader)
        assert totals is not None
        found.append(eval_record(2, totals, run, set_name="eval", seconds=1.0))
        return [dict(flat(record)) for record in found]


def test_filler_by_hand(ranks: Ranks) -> None:
    """If dp 2 puts documents into a missing pack, the pack gets no filler document of 32 tokens."""
    one, two = (ranks(world_size).run(records, [])[0] for world_size in (1, 2))
    for step in (one[1], two[1]):
        assert (step["documents"], step["tokens/real"], step["tokens/aligned"]) == (3, 3 * 60, 3 * 64)
        assert step["tokens/capacity"] == 4 * 256
    assert [one[1][name] for name in sorted(FILLER)] == [96, 736, 192 + 96]
    assert [two[1][name] for name in sorted(FILLER)] == [64, 768, 192 + 64]
    assert [r["tokens/real"] for r in one] == [r["tokens/real"] for r in two] == [825, 180, 1005]
    assert [r["documents"] for r in one] == [r["documents"] for r in two] == [9, 3, 12]


@pytest.mark.parametrize(
    "world_size,shared,overrides,expected",
    [
        (2, [], [], BALANCED),
        (2, FILLED, [], {"work-imbalance"}),
        (2, [], ["parallel.cp=2"], set()),
        (2, [], ["parallel.pp=2"], set()),
        (4, NARROW, ["parallel.tp=4", "parallel.sequence_parallel=true"], FILLER),
    ],
    ids=["dp 2", "dp 2 filled", "cp 2", "pp 2", "tp 4"],
)
def test_the_layout_changes_what_the_page_says(
    ranks: Ranks, world_size: int, shared: list[str], overrides: list[str], expected: set[str]
) -> None:
    """Layouts change a metric as the column layout of metrics.md says: `same` is equal, `rounding` is close, and of the
    others only `packs` differs."""
    page = by_layout()
    others = {"experts/dropped-share", *DYNAMIC}  # metrics of experts, which this model lacks, and of dynamic CP
    assert page["packs"] == BALANCED | {"tokens/capacity"} | others
    (one,), several = ranks(1).run(records, shared), ranks(world_size).run(records, [*shared, *overrides])
    assert [differing(one, found, page) for found in several] == [expected] * world_size


def differing(one: list[Record], other: list[Record], page: dict[str, set[str]]) -> set[str]:
    """The names, as in metrics.md, of metrics that differ although the page says `same`, or by more than rounding."""
    found = set()
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            told = re.sub(r"^(loss by \w+)/[^/]+/", r"\1/NAME/", name)
            if told in page["rounding"] and value is not None:
                assert b[name] == pytest.approx(value, rel=RECORD_TOLERANCE), name
            elif told not in page["machine"] and b[name] != value:
                found.add(told)
    return found
