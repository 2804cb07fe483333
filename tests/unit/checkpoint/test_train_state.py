"""Changes between two starts of a run: which are reported, refused, allowed or ignored; and the state of a run after
steps."""

import importlib.metadata
import json
from configparser import ConfigParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sft.checkpoint.train_state import Changes, Conditions, TrainState, changes, installed
from sft.config.keys import values
from sft.errors import ConfigError
from sft.metrics.totals import StepResult
from tests.unit.metric_values import config, totals

PLAN = {"data": "9f2c", "run.seed": 1, "data.seq_length": 128, "data.train": None, "planner": 2}
RECIPE = {
    "run.dir": "runs/a",
    "run.seed": 1,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.95],
    "log.every": 1,
    "checkpoint.save_every": None,
    "profile.memory.ranks": [0],
    "model.rope.base": 10000.0,
    "model.init_from": None,
    "model.init_std": 0.02,
    "lora.init_from": None,
}
MEGATRON = "model.megatron={disable_bf16_reduced_precision_matmul: false}"
LAYOUT = {"world_size": 4, "tp": 2, "cp": 2, "pp": 1, "dp": 1}
VERSIONS = {"torch": "2.13.0", "megatron-core": "0.16.1"}


def conditions(plan: Any = PLAN, recipe: Any = RECIPE, layout: Any = LAYOUT, versions: Any = VERSIONS) -> Conditions:
    return Conditions(plan=plan, recipe=recipe, layout=layout, versions=versions)


BEFORE = asdict(conditions())


def after_changing(key: str, value: Any) -> Changes:
    return changes(BEFORE, conditions(recipe={**RECIPE, key: value}), [])


@pytest.mark.parametrize(
    "key, value, how",
    [
        ("optim.lr", 2e-3, "was 0.001, is 0.002"),
        ("optim.betas", [0.9, 0.99], "was [0.9, 0.95], is [0.9, 0.99]"),
        ("run.precision", "fp32", "was bf16, is fp32"),
        ("lora.lr_ratio", 16.0, "was 1.0, is 16.0"),
        # Only a new run reads these settings of weights.  In older checkpoints, null meant random weights.
        ("lora.init_from", "a", "was null, is a"),
        ("model.init_from", "a/b", "was null, is a/b"),
        ("model.init_from", "random", "was null, is random"),
        ("model.init_std", 0.01, "was 0.02, is 0.01"),
    ],
)
def test_a_change_of_how_it_trains_is_told(key: str, value: Any, how: str) -> None:
    assert after_changing(key, value) == Changes(reported=[f"{key} {how}"], refused={})


def test_null_as_older_versions_wrote_it_is_no_change() -> None:
    """Without held-out data, older versions stored [], and a source had fewer keys."""
    source = {"files": ["a.jsonl"], "weight": None, "epochs": None}
    old = {**RECIPE, "data.eval": [], "data.train": {"chat": source}}
    now = {**RECIPE, "data.eval": None, "data.train": {"chat": {**source, "dataset": None}}}
    assert changes(asdict(conditions(recipe=old)), conditions(recipe=now), []).reported == []
    now["data.train"] = {"chat": {**source, "weight": 2.0}}
    assert len(changes(asdict(conditions(recipe=old)), conditions(recipe=now), []).reported) == 1


@pytest.mark.parametrize(
    "key",
    ["run.dir", "run.device", "run.timeout_s", "run.grace_s", "run.progress_timeout_s", "run.exit_after_minutes",
     "log.every", "checkpoint.save_every", "profile.memory.ranks", "data.num_workers", "data.cache_dir",
     "model.hf_read_once"],
)  # fmt: skip
def test_what_changes_no_number_is_silent(key: str) -> None:
    assert after_changing(key, 7) == Changes(reported=[], refused={})


def test_another_model_is_refused() -> None:
    refused = {"model.rope.base": "was 10000.0, is 500000.0"}
    assert after_changing("model.rope.base", 500000.0) == Changes(reported=[], refused=refused)


@pytest.mark.parametrize(
    "key, how",
    [
        ("data", "has other samples (digest was 9f2c, is other)"),
        ("run.seed", "was 1, is other"),
        ("data.train", "was null, is other"),
    ],
)
def test_another_order_of_the_data_is_refused(key: str, how: str) -> None:
    now = conditions(plan={**PLAN, key: "other"})
    assert changes(BEFORE, now, []) == Changes(reported=[], refused={key: how})
    assert changes(BEFORE, now, [key]) == Changes(reported=[f"{key} {how}, as allowed"], refused={})


def test_a_key_of_plan_and_recipe_is_told_once() -> None:
    now = conditions(plan={**PLAN, "run.seed": 2}, recipe={**RECIPE, "run.seed": 2})
    assert changes(BEFORE, now, []) == Changes(reported=[], refused={"run.seed": "was 1, is 2"})
    assert changes(BEFORE, now, ["run.seed"]) == Changes(reported=["run.seed was 1, is 2, as allowed"], refused={})


def test_layout_and_versions_are_told_last() -> None:
    now = conditions(
        recipe={**RECIPE, "optim.lr": 2e-3},
        layout={**LAYOUT, "cp": 1, "dp": 2},
        versions={"torch": "2.14.0", "sft": "0.1.0"},
    )
    assert changes(BEFORE, now, []) == Changes(
        reported=[
            "optim.lr was 0.001, is 0.002",
            "cp was 2, is 1",
            "dp was 1, is 2",
            "torch was 2.13.0, is 2.14.0",
            "megatron-core was 0.16.1, is null",
            "sft was null, is 0.1.0",
        ],
        refused={},
    )


def test_one_is_allowed_the_other_still_refused() -> None:
    now = conditions(plan={**PLAN, "data": "77aa"}, recipe={**RECIPE, "model.rope.base": 5.0})
    found = changes(BEFORE, now, ["model.rope.base"])
    assert found.reported == ["model.rope.base was 10000.0, is 5.0, as allowed"]
    assert found.refused == {"data": "has other samples (digest was 9f2c, is 77aa)"}


@pytest.mark.parametrize("key", ["optim.lr", "rope.base", "run.dir", "model.init_std"])
def test_allowing_what_is_never_refused_is_a_mistake(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        changes(BEFORE, conditions(), ["run.seed", key])
    assert str(error.value) == (
        f"checkpoint.allow_changes names {key}, which is never refused.  It may name: data, data.seq_length, "
        "data.train, model.rope.base, planner, run.seed."
    )


def test_allowing_what_did_not_change_is_nothing() -> None:
    assert changes(BEFORE, conditions(), ["run.seed", "model.rope.base"]) == Changes(reported=[], refused={})


@pytest.mark.parametrize("forth", [True, False])
def test_whatever_is_refused_can_be_allowed(forth: bool) -> None:
    """A field of megatron-core is a recipe key only if the recipe sets it, so such keys appear and disappear."""
    none, one = (values(config(*given)) for given in ((), (MEGATRON,)))
    was, now = (none, one) if forth else (one, none)
    before = asdict(conditions(recipe=was))
    refused = changes(before, conditions(recipe=now), []).refused
    assert "model.megatron.disable_bf16_reduced_precision_matmul" in refused
    assert changes(before, conditions(recipe=now), list(refused)).refused == {}


def test_a_real_recipe_through_json_has_not_changed() -> None:
    recipe = values(config(MEGATRON, "log.position_edges=[4096]"))
    before = json.loads(json.dumps(asdict(conditions(recipe=recipe))))
    assert changes(before, conditions(recipe=recipe), []) == Changes(reported=[], refused={})


def test_a_key_newer_than_the_checkpoint_had_its_default() -> None:
    """model.moe.* is newer than the checkpoint; a dense run from before continues."""
    key = "model.moe.normalize_top_k"
    assert key not in RECIPE
    assert after_changing(key, True) == Changes(reported=[], refused={})
    assert after_changing(key, False).refused == {key: "was True, is False"}
    # the recipe of a checkpoint of another version
    unset = conditions(recipe={**RECIPE, "model.new": None, "optim.new": None})
    assert changes(BEFORE, unset, []) == Changes(reported=[], refused={})


def test_a_run_older_than_supervise_inserted_did_not_supervise_it() -> None:
    """With supervise_inserted = false its masks stay the same; with the default, the refusal of changed data says
    so."""
    assert after_changing("data.supervise_inserted", False) == Changes(reported=[], refused={})
    now = conditions(plan={**PLAN, "data": "77aa"}, recipe={**RECIPE, "data.supervise_inserted": True})
    assert changes(BEFORE, now, ()) == Changes(
        reported=["data.supervise_inserted was False, is True"],
        refused={
            "data": "has other samples (digest was 9f2c, is 77aa; the run began before data.supervise_inserted "
            "existed, and data.supervise_inserted = false gives the same tokens and masks)"
        },
    )


def test_the_version_of_sft_is_that_of_our_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index has another project named sft, which may also be installed."""
    setup = ConfigParser()
    setup.read(Path(__file__).resolve().parents[3] / "setup.cfg")
    installed_here = {"sft": "0.1.1", setup["metadata"]["name"]: "0.7.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed_here.get(name, "1.0"))
    assert installed()["sft"] == "0.7.0"


def test_versions_are_of_what_is_installed() -> None:
    assert {"torch", "megatron-core"} <= installed().keys() and all(installed().values())


def result(loss: float = 30.0, grad_norm: float = 0.5, **changes: Any) -> StepResult:
    found = totals(objective=loss, **changes)
    skipped = found.num_tokens == 0 or loss != loss or grad_norm != grad_norm
    return StepResult(**vars(found), grad_norm=grad_norm, learning_rate=1e-3, skipped=skipped)


def test_the_state_after_good_bad_and_empty_steps() -> None:
    """Each step has 100 tokens, of which 20 are supervised."""
    nan = float("nan")
    state = TrainState().after(result(), (0, 0), "a")
    assert state == TrainState(step=1, num_tokens=20, num_real_tokens=100, epoch=0, batch=0, chain="a")
    state = state.after(result(loss=nan, grad_norm=nan), (0, 1), "b").after(result(grad_norm=float("inf")), (0, 2), "c")
    assert state == TrainState(
        step=3, num_tokens=20, num_real_tokens=100, num_bad=2, bad_in_a_row=2, epoch=0, batch=2, chain="c"
    )
    state = state.after(result(), (1, 0), "d")
    assert state == TrainState(step=4, num_tokens=40, num_real_tokens=200, num_bad=2, epoch=1, batch=0, chain="d")
    state = state.after(result(loss=0.0, num_tokens=0), (1, 1), "e")
    assert (state.step, state.num_tokens, state.num_skipped, state.num_bad) == (5, 40, 1, 2)
    assert (state.epoch, state.batch, state.chain) == (1, 1, "e")
