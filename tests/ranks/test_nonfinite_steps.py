"""A non-finite loss or gradient on one of two ranks: all ranks skip the step, and continue as if it had not
happened."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sft.mcore.checkpoint_io import optimizer_shards
from sft.mcore.engine import Engine
from sft.mcore.optimizer import build
from sft.mcore.optimizer.inner import chained_optimizers
from sft.metrics.totals import StepResult
from tests.ranks import scenarios
from tests.ranks.layouts import CP, PP, SHARDED, SP
from tests.ranks.pool import Ranks
from tests.ranks.saving import CORPUS, SMALL

LAYOUTS = [
    (CP, ["inf loss", "nan gradient"]),
    ([*SP, *SHARDED], ["nan activations"]),  # both ranks have the same loss
    (PP, ["nan activations"]),
    ([*SHARDED, "run.precision=bf16"], ["inf loss", "inf gradient"]),
]
# The learning rate of step 3 of 5, with a warm-up of one step and a linear decay from 1e-3 to 0 over the other four.
RATE = [1e-3, 0.75e-3, 0.5e-3]


@contextmanager
def spoilt(engine: Engine, how: str) -> Iterator[None]:
    """On the last rank, makes one value non-finite: the last activations or the loss of a microbatch, or an element of
    a local gradient."""
    if engine.groups.rank != 1:
        yield
        return
    value = float(how.split()[0])
    with pytest.MonkeyPatch.context() as patch:
        if not how.endswith("gradient"):
            inner, calls = engine._loss, []

            def loss(chunk: Any, mb: Any, hidden: Any) -> Any:
                calls.append(1)
                if len(calls) > 1:
                    return inner(chunk, mb, hidden)
                if how.endswith("activations"):
                    return inner(chunk, mb, hidden * value)
                objective, count, (detached, rows) = inner(chunk, mb, hidden)
                return objective + value, count, (detached + value, rows)

            patch.setattr(engine, "_loss", loss)
        else:
            finalize = engine.core_config.finalize_model_grads_func

            def finalize_spoilt(*given: Any, **core: Any) -> None:
                first = next(p for p in engine.chunks[0].parameters() if p.requires_grad)
                first.main_grad.view(-1)[0] = value
                finalize(*given, **core)

            patch.setattr(engine.core_config, "finalize_model_grads_func", finalize_spoilt)
        yield


def state_of(engine: Engine) -> tuple[str, str, int]:
    return (
        scenarios.parameter_hash(engine),
        scenarios.optimizer_hash(engine),
        optimizer_shards.step_of(engine.optimizer),
    )


def told(result: StepResult) -> tuple[Any, ...]:
    """The values as text, because NaN does not equal NaN."""
    return repr(result.objective), repr(result.grad_norm), result.learning_rate, result.skipped, result.is_nonfinite


def good_bad_good(overrides: list[str], how: str | None) -> dict[str, Any]:
    """Three steps, of which the second is non-finite; None: two steps, between which only the schedule advances."""
    with scenarios.running([*SMALL, *overrides]) as engine:
        loader = scenarios.loader_of(engine, CORPUS)
        results = [engine.train_step(loader.microbatches(0))]
        before = state_of(engine)
        if how is None:
            engine.scheduler.step(1)
        else:
            with spoilt(engine, how):
                results.append(engine.train_step(loader.microbatches(1)))
        losses = [repr(loss) for loss in engine.local_losses]
        after = state_of(engine)
        results.append(engine.train_step(loader.microbatches(2)))
        told_of = [told(result) for result in results]
        return {"results": told_of, "before": before, "after": after, "end": state_of(engine), "losses": losses}


@pytest.mark.parametrize("overrides,ways", LAYOUTS, ids=str)
def test_one_bad_rank_and_all_skip_the_step_and_nothing_else(
    ranks: Ranks, overrides: list[str], ways: list[str]
) -> None:
    without = ranks(2).run(good_bad_good, overrides, None)
    for how in ways:
        found = ranks(2).run(good_bad_good, overrides, how)
        for one, reference in zip(found, without):
            first, bad, last = one["results"]
            assert bad[3:] == (True, True), (how, bad)
            assert one["after"] == one["before"], how
            assert [first, last] == reference["results"] and first[3:] == last[3:] == (False, False)
            assert one["end"] == reference["end"] and one["end"][2] == 2, how  # [2]: number of Adam's updates
            assert [result[2] for result in one["results"]] == pytest.approx(RATE, rel=1e-12)
        assert found[0]["results"] == found[1]["results"], how
        loss, norm = found[0]["results"][1][:2]
        if not how.endswith("gradient"):
            assert (loss, norm) == (how.split()[0], "nan")
            bad_ranks = [any(told in one["losses"] for told in ("nan", "inf")) for one in found]
            # the ranks that had a non-finite value
            assert bad_ranks == [how == "nan activations" and "parallel.tp=2" in overrides, True]
        else:
            assert loss not in ("nan", "inf") and norm in ("nan", "inf")


@pytest.mark.parametrize("overrides", [[], SHARDED], ids=str)
def test_a_first_step_that_is_bad_leaves_a_new_run(ranks: Ranks, overrides: list[str]) -> None:
    """Adam has no moments yet that could stay unchanged."""
    assert all(ranks(2).run(bad_from_the_start, overrides))


def bad_from_the_start(overrides: list[str]) -> bool:
    with scenarios.running([*SMALL, *overrides]) as engine:
        loader = scenarios.loader_of(engine, CORPUS)
        weights = scenarios.parameter_hash(engine)
        for how in ("nan gradient", "inf loss"):
            with spoilt(engine, how):
                assert engine.train_step(loader.microbatches(0)).is_nonfinite
        held = [flat for one in optimizer_shards.optimizer_slices(engine.optimizer) for flat in one.tensors.items()]
        assert all(not flat.any() for name, flat in held if name != optimizer_shards.MAIN)
        assert not engine.train_step(loader.microbatches(0)).is_nonfinite
        return scenarios.parameter_hash(engine) != weights and optimizer_shards.step_of(engine.optimizer) == 1


def test_squares_that_overflow_are_a_bad_step_too(ranks: Ranks) -> None:
    """Every gradient is finite, but the norm is not: 1e30 squared does not fit into fp32."""
    for one in ranks(2).run(overflow, []):
        assert one == ("inf", True, True)


def overflow(overrides: list[str]) -> tuple[str, bool, bool]:
    with scenarios.running([*SMALL, *overrides]) as engine:
        loader = scenarios.loader_of(engine, CORPUS)
        weights, update = scenarios.parameter_hash(engine), build.update

        def large(*given: Any) -> float:
            next(iter(engine.chunks[0].parameters())).main_grad.view(-1)[0] = 1e30
            return update(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "update", large)
            result = engine.train_step(loader.microbatches(0))
        return repr(result.grad_norm), result.is_nonfinite, scenarios.parameter_hash(engine) == weights


def test_a_rank_without_gradients_of_its_own_adds_nothing_to_the_norm(ranks: Ranks) -> None:
    """Gradients 3 and 4 on one rank, and none on the other: the norm is 5 on both."""
    assert ranks(2).run(norm_of_half) == [5.0, 5.0]


def norm_of_half() -> float:
    with scenarios.running([*SMALL, *SHARDED]) as engine:
        (part,) = chained_optimizers(engine.optimizer)
        own = [torch.tensor([3.0]), torch.tensor([4.0])] if engine.groups.rank == 0 else []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm"):  # in core 0.19 and in core 0.16
                patch.setattr(part, name, lambda: own, raising=False)
            return build._norm(engine.optimizer, torch.device("cpu"))
