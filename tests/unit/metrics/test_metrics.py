"""Totals become records: every number is checked, every name is documented, and every record fits
metrics.schema.json."""

import json
import re
from typing import Any

import numpy as np
import pytest

from sft.metrics.records import train_record
from sft.metrics.results.records import flat
from sft.metrics.totals import ExpertLoad, Peak
from tests.unit.metric_values import (
    START,
    check,
    config,
    evaluation,
    page,
    questions,
    result,
    run_of,
    totals,
    train,
    validator,
)


def mixture(*overrides: str, **changes: np.ndarray) -> dict[str, Any]:
    """A step of a mixture of experts."""
    recipe = config("model.moe.num_experts=4", "model.moe.top_k=2", *overrides)
    load = dict(
        chosen=np.array([[6.0, 4.0, 2.0, 0.0], [0.0, 12.0, 0.0, 0.0]]),
        dropped=np.array([1.0, 5.0]),
        aux=np.array([1.0, 2.0]),
        z=np.array([4.0, 6.0]),
    )
    return train_record(3, result(ExpertLoad(**{**load, **changes})), run_of(recipe), seconds=2.0)


def dynamic(**changes: Any) -> dict[str, Any]:
    """A step with dynamic CP."""
    packs = dict(num_slots=8, num_packs_by_cp_size={"1": 3, "2": 2}, num_aligned_by_cp_size={"1": 32, "2": 96})
    packs |= dict(cp_bytes=1000.0, cp_bytes_fixed=4000.0)
    return train("parallel.cp=2", "parallel.dynamic_cp=true", **{**packs, **changes})


DYNAMIC, DYNAMIC_NAMES = dynamic(), ("microbatches", "cp-size", "cp-bytes", "cp-bytes-fixed", "by cp size")
EVERYTHING = ["loss.entropy=true", "loss.z_loss_coef=1e-4", "log.peak_tflops=989"]
EXPERTS = mixture("model.moe.aux_loss_coef=0.01", *EVERYTHING)


def test_written_out() -> None:
    """Two ranks, two seconds.  FLOPs: 6 * 160 per token (qkv 48, proj 16, MLP 96), 6 * 40 per label, 6 * 4 per squared
    length."""
    found = dict(flat(train(*EVERYTHING)))
    assert found["token accuracy"] == 0.25
    assert found["lm loss"] == 1.5 and found["nll"] == 1.25 and found["entropy"] == 2.5
    assert found["perplexity/avg"] == 5.0 and (found["perplexity/min"], found["perplexity/max"]) == (3.0, 7.0)
    assert found["loss by position/0-4K/loss"] == 1.25 and found["loss by position/0-4K/tokens"] == 20
    assert found["loss by position/4K+/loss"] is None and found["loss by position/4K+/tokens"] == 0
    assert (found["loss by source/chat/loss"], found["loss by source/code/loss"]) == (0.5, 2.0)
    assert (found["padding/alignment"], found["padding/filler"], found["padding/tail"]) == (28, 32, 96)
    assert found["tokens/capacity"] == 256
    assert found["tokens-per-second"] == 50.0 and found["tokens-per-second-per-rank"] == 25.0
    assert found["tokens-per-second-supervised"] == 10.0 and found["data-wait-share"] == 0.25
    flops = 100 * 960 + 20 * 240 + 3000 * 24
    assert found["tflops-per-rank"] == pytest.approx(flops / 2 / 2 / 1e12)
    assert found["mfu"] == pytest.approx(flops / 2 / 2 / 1e12 / 989)
    # In a tree, 20 labels of texts may be those of 15 tokens, whose scores are computed once.
    shared = dict(flat(train(*EVERYTHING, num_rows=15)))
    assert shared["tflops-per-rank"] == pytest.approx((flops - 5 * 240) / 2 / 2 / 1e12)
    assert (found["memory/allocated-gib"], found["memory/allocated-rank"]) == (2.0, 3)
    assert (found["memory/reserved-gib"], found["memory/reserved-rank"]) == (4.0, 2)
    told = dict(flat(evaluation()))
    assert (told["sample loss"], told["token accuracy"], told["set"]) == (1.5, 0.25, "eval")


def test_dynamic_cp_written_out() -> None:
    """dp 1 x cp 2, C = 64 tokens: three packs on one rank each, one of them filler, and two packs on both ranks."""
    assert {name: DYNAMIC[name] for name in (*DYNAMIC_NAMES, "tokens/capacity", "padding/tail")} == {
        "microbatches": 4,  # 8 slots, of which a pack on both ranks has two; one slot has filler
        "cp-size": 1.75,  # (32 x 1 + 96 x 2) / 128
        "cp-bytes": 1000,
        "cp-bytes-fixed": 4000,
        "by cp size": {"1": {"packs": 3, "tokens": 32}, "2": {"packs": 2, "tokens": 96}},
        "tokens/capacity": 8 * 64,
        "padding/tail": 8 * 64 - 160,
    }
    assert not set(DYNAMIC_NAMES) & train("parallel.cp=2").keys()  # the log of a run with fixed cp has none of these
    empty = dynamic(num_aligned_tokens=0, num_real_tokens=0, num_aligned_by_cp_size={"1": 0, "2": 0})
    assert empty["cp-size"] == 0.0


def test_the_loss_is_over_its_denominator() -> None:
    """The sum of weights is 15, on 20 tokens."""
    assert train(denominator=15.0)["lm loss"] == evaluation(denominator=15.0)["lm loss"] == 2.0
    assert totals(denominator=15.0).lm_loss == 2.0 and totals(num_tokens=0).lm_loss is None


def test_experts_written_out() -> None:
    """Two layers of four experts.  Layer 0: 12 choices, mean 3, maximum 6.  Layer 1: all 12 choices are the same
    expert."""
    assert {name: value for name, value in EXPERTS.items() if name.startswith("experts/")} == {
        "experts/imbalance": 3.0,  # the larger of 6 / 3 and 12 / 3
        "experts/imbalance-max": 4.0,
        "experts/imbalance-layer": 1,
        "experts/unused-share": 0.5,  # one of four experts, and three of four
        "experts/dropped-share": 0.25,  # 6 of 24
        "experts/aux-loss": 1.5,
        "experts/z-loss": 5.0,
    }
    assert "experts/aux-loss" not in mixture() and "experts/z-loss" in mixture()


def test_experts_of_a_step_without_tokens_and_losses_of_routers_that_are_no_number() -> None:
    """Every value is a finite number: nothing is divided by zero choices."""
    nothing = mixture("model.moe.aux_loss_coef=0.01", chosen=np.zeros((2, 4)), dropped=np.zeros(2))
    assert [nothing[f"experts/{name}"] for name in ("imbalance", "imbalance-max", "dropped-share")] == [0.0, 0.0, 0.0]
    assert nothing["experts/unused-share"] == 1.0
    broken = mixture("model.moe.aux_loss_coef=0.01", aux=np.array([1.0, np.nan]), z=np.array([np.inf, 1.0]))
    assert broken["experts/aux-loss"] is broken["experts/z-loss"] is None


def test_what_nobody_asked_for_is_not_there() -> None:
    nothing = Peak(value=0.0, rank=0)
    found = train(data_wait_s=nothing, memory_allocated=nothing, memory_reserved=nothing)
    assert not {"nll", "entropy", "mfu", "memory/allocated-gib"} & found.keys()


def test_nothing_supervised_is_null_and_not_a_number_too_large() -> None:
    inf = float("inf")
    empty = dict(num_sequences=0, perplexity=0.0, perplexity_min=inf, perplexity_max=-inf)
    found = train(num_tokens=0, denominator=0.0, objective=0.0, **empty)
    names = ("lm loss", "token accuracy", "perplexity/avg", "perplexity/min", "perplexity/max")
    assert [found[name] for name in names] == [None] * 5
    check(found)
    assert train(perplexity_max=float("inf"))["perplexity/max"] is None
    json.dumps(found, allow_nan=False)


MTP, MTP_NAMES = train("train.mtp=joint"), ("mtp loss", "tokens/mtp")


def test_multi_token_prediction_has_a_loss_and_a_count_of_its_own() -> None:
    """9 nats over 18 tokens; `lm loss` is the same as without multi-token prediction."""
    assert [MTP[name] for name in (*MTP_NAMES, "lm loss")] == [0.5, 18, 1.5]
    assert not set(MTP_NAMES) & train().keys() and train()["lm loss"] == 1.5
    assert train("train.mtp=detached", mtp_nll=0.0, num_mtp_tokens=0)["mtp loss"] is None


TEACHER = dict(num_taught=16, divergence=4.0, num_agreeing=12, covered=14.0)
TEACHER |= dict(num_taught_by_source={"chat": 0, "code": 16}, divergence_by_source={"chat": 0.0, "code": 4.0})
DISTILL = ("loss.distill.weight=1.0", "data.teacher.k=4")
TAUGHT = train(*DISTILL, **TEACHER)
TEACHER_NAMES = (*(f"teacher/{name}" for name in ("divergence", "agreement", "covered", "tokens")), "teacher by source")


def test_a_teacher_written_out() -> None:
    """16 of 20 supervised tokens have a teacher; the objective of all of them is 30 nats, of which 25 are -log p."""
    assert {name: TAUGHT[name] for name in TEACHER_NAMES} == {
        "teacher/divergence": 0.25,
        "teacher/agreement": 0.75,
        "teacher/covered": 0.875,
        "teacher/tokens": 16,
        "teacher by source": {"chat": {"divergence": None, "tokens": 0}, "code": {"divergence": 0.25, "tokens": 16}},
    }
    assert (TAUGHT["lm loss"], TAUGHT["nll"]) == (1.5, 1.25)
    assert not set(TEACHER_NAMES) & train().keys() and "nll" not in train()
    # A held-out set may have a teacher in a run without distillation; without a token, there is no mean.
    assert evaluation(**TEACHER)["teacher/divergence"] == 0.25
    assert evaluation(*DISTILL)["teacher/divergence"] is None


RECORDS = {
    "start": START,
    "train": EXPERTS
    | {name: DYNAMIC[name] for name in DYNAMIC_NAMES}
    | {name: MTP[name] for name in MTP_NAMES}
    | {name: TAUGHT[name] for name in TEACHER_NAMES},
    "eval": evaluation(*EVERYTHING, "train.mtp=joint", **TEACHER),
    "long": questions(),
    "train with a teacher": TAUGHT,
    "eval without a teacher": evaluation(*EVERYTHING, "train.mtp=joint"),
    "train with multi-token prediction": MTP,
    "train of little": train(),
    "train with dynamic CP": DYNAMIC,
    "train without experts": train(*EVERYTHING),
    "eval of nothing": evaluation(num_tokens=0, denominator=0.0, num_sequences=0, sequence_nll=0.0),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_records_are_as_the_schema_says(record: dict[str, Any]) -> None:
    check(record)


@pytest.mark.parametrize("kind", ["start", "train", "eval", "long"])
def test_records_with_a_name_more_or_less_are_not(kind: str) -> None:
    record = RECORDS[kind]
    refused = [{**record, "loss": 1.0}] + [
        {k: v for k, v in record.items() if k != name} for name in record if name not in OPTIONAL
    ]
    assert len(refused) == {"start": 8, "train": 35, "eval": 19, "long": 7}[kind]
    assert not any(validator().is_valid(wrong) for wrong in refused)


OPTIONAL = ("nll", "entropy", "mfu", "memory/allocated-gib", "memory/allocated-rank", "memory/reserved-gib",
            "memory/reserved-rank", *DYNAMIC_NAMES, *MTP_NAMES, *TEACHER_NAMES,
            *(name for name in EXPERTS if name.startswith("experts/")))  # fmt: skip


@pytest.mark.parametrize(
    "kind, wrong",
    [
        ("train", {"tokens/supervised": 20.0}),
        ("train", {"step": 0}),
        ("train", {"skipped": 0}),
        ("train", {"documents": True}),
        ("train", {"grad-norm": -0.5}),
        ("train", {"bad": None}),
        ("train", {"token accuracy": 1.25}),
        ("train", {"kind": "eval"}),
        ("train", {"loss by source": {"chat": {"loss": 1.0}}}),
        ("eval", {"set": ""}),
        ("long", {"answers by task": {"needle": {"right": 0.5, "loss": 1.5, "each": "0-"}}}),
        ("start", {"schema": 2}),
        ("start", {"layout": {"world_size": 2, "tp": 1, "cp": 2, "pp": 1}}),
        ("start", {"layout": {"world_size": 2, "tp": 1, "cp": 2, "pp": 1, "dp": 0}}),
    ],
    ids=str,
)
def test_records_with_a_wrong_value_are_not(kind: str, wrong: dict[str, Any]) -> None:
    assert not validator().is_valid({**RECORDS[kind], **wrong})


KINDS = {"all": {"start", "train", "eval", "long"}, "both": {"train", "eval"}}


def documented(kind: str) -> set[str]:
    """The metric names of a kind of record in the table of docs/reference/metrics.md."""
    return {name for names, cells in page() for name in names if kind in KINDS.get(cells[0], {cells[0]})}


def in_schema(part: dict[str, Any], whole: dict[str, Any]) -> set[str]:
    """The names of all properties, nested names joined by "/"; NAME stands for names that come from data."""
    if "$ref" in part:
        part = whole["$defs"][part["$ref"].removeprefix("#/$defs/")]
    inner = dict(part.get("properties", {}))
    if part.get("additionalProperties"):
        inner["NAME"] = part["additionalProperties"]
    return {f"{n}/{deep}".rstrip("/") for n, below in inner.items() for deep in in_schema(below, whole) or {""}}


@pytest.mark.parametrize("kind", ["start", "train", "eval", "long"])
def test_the_page_the_schema_and_the_records_have_the_same_names(kind: str) -> None:
    written = {
        re.sub(r"^(loss by \w+|by cp size|teacher by source|answers by task)/[^/]+/", r"\1/NAME/", name)
        for name, _ in flat(RECORDS[kind])
    }
    assert written == documented(kind) == in_schema({"$ref": f"#/$defs/{kind}"}, validator().schema)
