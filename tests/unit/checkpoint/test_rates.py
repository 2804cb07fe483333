"""What a changed recipe does to the learning rate of a run that continues, with all rates written out."""

from pathlib import Path

import pytest

from sft.checkpoint import continuation, rates
from sft.checkpoint.continuation import Continuation
from tests.builders import parsed
from tests.unit.checkpoint.test_continuation import conditions, saved

COSINE = ["optim.schedule=cosine", "optim.lr=1e-3", "optim.min_lr=1e-5"]
FLAT, SIX, TWELVE = "optim.schedule=constant", "train.num_steps=6", "train.num_steps=12"
WSD = ["optim.schedule=wsd", "optim.lr=1e-3", "optim.wsd_decay_fraction=0.5"]
WARM = ["optim.schedule=linear", "optim.lr=1e-3", "optim.warmup_fraction=0.5"]
EPOCHS = ["train.num_steps=null", "train.num_epochs=1"]


def resumed_from(folder: Path, before: list[str], now: list[str], step: int) -> Continuation:
    saved(folder, step, conditions(*before))
    resumed = continuation.check(parsed(*now).config, folder, conditions(*now))
    assert resumed is not None
    return resumed


# The last rate, its step, the end of the checkpoint's recipe; the next rate, its step, the last rate.
@pytest.mark.parametrize(
    "before, now, step, then, here, jumps",
    [
        ([*COSINE, SIX], [*COSINE, TWELVE], 6, "1e-05 at step 6 of 6|ended with 1e-05",
         "0.000377 at step 7 of 12 by this recipe, which ends with 1e-05", True),
        ([SIX], [TWELVE], 6, "0 at step 6 of 6|ended with 0", "3.71e-06 at step 7 of 12|ends with 0", True),
        (["train.num_steps=100"], ["train.num_steps=60"], 50, "5e-06 at step 50 of 100|would have ended with 0",
         "5.45e-07 at step 51 of 60|ends with 0", True),
        ([FLAT], [FLAT, "optim.lr=3e-5"], 5, "1e-05 at step 5 of 10|would have ended with 1e-05",
         "3e-05 at step 6 of 10|ends with 3e-05", True),
        # The rate changes by less than twice, or later, or not at all.
        ([FLAT], [FLAT, "optim.lr=2e-5"], 5, "1e-05 at step 5 of 10", "2e-05 at step 6 of 10|ends with 2e-05", False),
        (["train.num_steps=100"], ["train.num_steps=110"], 50, "5e-06 at step 50 of 100",
         "5.57e-06 at step 51 of 110", False),
        ([FLAT, SIX], [FLAT, TWELVE], 6, "1e-05 at step 6 of 6|ended with 1e-05", "1e-05 at step 7 of 12|1e-05", False),
        # wsd before its decay and in it, with another shape, and a longer warm-up.
        ([*WSD, SIX], [*WSD, TWELVE], 3, "0.001 at step 3 of 6", "0.001 at step 4 of 12|ends with 0", False),
        ([*WSD, SIX], [*WSD, TWELVE], 5, "0.000333 at step 5 of 6", "0.001 at step 6 of 12", True),
        ([*WSD, TWELVE], [*WSD, TWELVE, "optim.wsd_decay=minus_sqrt"], 7, "0.000833 at step 7 of 12",
         "0.000423 at step 8 of 12|ends with 0", False),
        ([*WARM, SIX], [*WARM, "train.num_steps=100"], 4, "0.000667 at step 4 of 6", "0.0001 at step 5 of 100", True),
        (COSINE, WSD, 2, "0.000905 at step 2 of 10|would have ended with 1e-05", "0.001 at step 3 of 10|with 0", False),
    ],
)  # fmt: skip
def test_a_changed_schedule(
    tmp_path: Path, before: list[str], now: list[str], step: int, then: str, here: str, jumps: bool
) -> None:
    resumed, config = resumed_from(tmp_path, before, now, step), parsed(*now).config
    changed = rates.change(resumed, config, config.train.num_steps, None)
    assert changed is not None and changed[1] == jumps
    first, second = changed[0].split("; ", 1)
    assert f" by the recipe of {resumed.path}, which " in first and "by this recipe, which ends with " in second
    assert all(part in first for part in then.split("|")), first
    assert all(part in second for part in here.split("|")), second
    start = "the learning rate jumps where the run continues: " if jumps else "learning rate: "
    assert first.startswith(start) and ("give the keys of optim" in second) == jumps


@pytest.mark.parametrize(
    "recipe, step",
    [(["optim.warmup_steps=5"], 1), ([*COSINE, SIX], 3), ([*COSINE, SIX], 6), (["optim.weight_decay=0.1"], 2)],
)
def test_the_same_schedule(tmp_path: Path, recipe: list[str], step: int) -> None:
    """A warm-up doubles the rate, the last step is done, or another key of optim changed."""
    resumed = resumed_from(tmp_path, [*recipe, "optim.beta1=0.8"], recipe, step)
    assert rates.change(resumed, parsed(*recipe).config, 6, None) is None


def test_epochs_are_counted_or_not_compared(tmp_path: Path) -> None:
    now = [*COSINE, "train.num_steps=null", "train.num_epochs=2"]
    resumed, config = resumed_from(tmp_path, [*COSINE, *EPOCHS], now, 6), parsed(*now).config
    assert rates.change(resumed, config, None, None) == (
        "learning rates not compared: the data decide how many steps there are (--no-data)", False
    )  # fmt: skip
    assert rates.change(resumed, parsed(*COSINE, *EPOCHS).config, None, None) is None
    changed = rates.change(resumed, config, 12, lambda number: 6 * number)
    assert changed is not None and "1e-05 at step 6 of 6" in changed[0] and changed[1]
    steps = parsed(*COSINE, SIX).config  # as many steps as the epoch has
    assert (
        rates.change(resumed_from(tmp_path / "b", [*COSINE, *EPOCHS], [*COSINE, SIX], 3), steps, 6, lambda n: 6) is None
    )


def test_a_checkpoint_of_another_program(tmp_path: Path) -> None:
    resumed = Continuation(path=tmp_path / "iter_0000004", is_named=True, facts=None)
    config = parsed(*COSINE, SIX).config
    assert rates.change(resumed, config, 6, None) == (
        f"learning rate: 7.63e-05 at step 5 of 6 by this recipe, which ends with 1e-05; {resumed.path} does not say "
        "which rates it had", False
    )  # fmt: skip


def test_a_checkpoint_from_before_a_key_has_its_default(tmp_path: Path) -> None:
    resumed = resumed_from(tmp_path, [*WSD, TWELVE], [*WSD, TWELVE, "optim.wsd_decay=cosine"], 7)
    assert resumed.facts is not None
    del resumed.facts["recipe"]["optim.wsd_decay"]
    changed = rates.change(resumed, parsed(*WSD, TWELVE, "optim.wsd_decay=cosine").config, 12, None)
    assert changed is not None and "0.000833 at step 7 of 12" in changed[0] and "0.00075 at step 8" in changed[0]
