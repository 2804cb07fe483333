"""What an engine reports to the watchdog: the beginning of every pass of every microbatch."""

from collections.abc import Sequence

from tests.ranks import scenarios
from tests.ranks.pool import Ranks

START, SUM, UPDATE = "sum of the loss weights over ranks", "sum of the gradients over ranks", "update of the weights"


def reported(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The reports in a step, and in the evaluation of the same microbatches."""
    names: list[str] = []
    with scenarios.running(overrides, progress=names.append) as engine:
        microbatches = scenarios.loader_of(engine).microbatches(0)
        engine.train_step(microbatches)
        in_step = names.copy()
        names.clear()
        engine.evaluate(microbatches)
    return in_step, names


def of(num_microbatches: int, order: str) -> list[str]:
    """of(2, "F1 B1") -> ["forward of microbatch 1 of 2", "backward of microbatch 1 of 2"]"""
    kinds = {"F": "forward", "B": "backward"}
    return [f"{kinds[name[0]]} of microbatch {name[1]} of {num_microbatches}" for name in order.split()]


def test_one_rank(ranks: Ranks) -> None:
    (found,) = ranks(1).run(reported, ["train.global_batch_size=2"])
    assert found == ([START, *of(2, "F1 B1 F2 B2"), SUM, UPDATE], of(2, "F1 F2"))


def test_pipeline_stages(ranks: Ranks) -> None:
    """The first stage begins two forward passes before its first backward pass, and ends with a backward pass."""
    recompute = ["train.recompute=full", "parallel.pp=2", "train.global_batch_size=3"]
    first, last = ranks(2).run(reported, recompute)
    assert first == ([START, *of(3, "F1 F2 B1 F3 B2 B3"), SUM, UPDATE], of(3, "F1 F2 F3"))
    assert last == ([START, *of(3, "F1 B1 F2 B2 F3 B3"), SUM, UPDATE], of(3, "F1 F2 F3"))


def test_virtual_stages(ranks: Ranks) -> None:
    overrides = ["parallel.pp=2", "parallel.virtual_stages=2", "train.global_batch_size=2"]
    for in_step, in_evaluation in ranks(2).run(reported, overrides):
        for kind, names in (("forward", in_step), ("backward", in_step), ("forward", in_evaluation)):
            found = sorted(name for name in names if name.startswith(kind))
            assert found == [
                f"{kind} of microbatch 1 of 2 in model chunk 1 of 2",
                f"{kind} of microbatch 1 of 2 in model chunk 2 of 2",
                f"{kind} of microbatch 2 of 2 in model chunk 1 of 2",
                f"{kind} of microbatch 2 of 2 in model chunk 2 of 2",
            ]
