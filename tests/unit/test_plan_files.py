"""Plans in files: what is written is followed, what does not fit is refused, what differs is found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.packing.plan import Plan, plan_epoch
from sft.data.packing.plan_files import compare_plans, read_plans, write_plans
from sft.errors import ConfigError, DataError

LENGTHS = np.array([64, 40, 20, 64, 33, 10, 64, 5])
HEADER = {"data": "abc", "data.seq_length": 64, "data.doc_multiple": 8, "train.global_batch_size": 2, "run.seed": 1}


def plan(seed: int, epoch: int = 0) -> Plan:
    return plan_epoch(LENGTHS, capacity=64, doc_multiple=8, seed=seed, epoch=epoch, shuffle=True)


def packs(made: Plan) -> list[tuple[int, ...]]:
    return [made.pack(index) for index in range(len(made))]


def write(path: Path, *plans: Plan, **header: Any) -> Path:
    write_plans(path, {**HEADER, **header}, plans, 2)
    return path


def rewrite(path: Path, line: int, **changes: Any) -> Path:
    """The file with some values of a line, counted from 0, replaced."""
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[line] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_round_trip(tmp_path: Path) -> None:
    plans = [plan(3), plan(3, epoch=1)]
    read = read_plans(write(tmp_path / "p", *plans), HEADER, LENGTHS)
    assert [packs(p) for p in read] == [packs(p) for p in plans]
    assert [(p.fill, p.alignment_waste) for p in read] == [(p.fill, p.alignment_waste) for p in plans]


def test_the_file_in_letters(tmp_path: Path) -> None:
    in_order = plan_epoch(np.array([8, 8, 4]), capacity=16, doc_multiple=4, seed=0, epoch=0, shuffle=False)
    write_plans(tmp_path / "p", {"data": "abc"}, [in_order], 1)
    assert (tmp_path / "p").read_text() == (
        '{"format": "sft plan 1", "data": "abc"}\n'
        '{"epoch": 0, "batch": 0, "packs": [[0, 1]]}\n'
        '{"epoch": 0, "batch": 1, "packs": [[2]]}\n'
    )


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("data", "xyz", "data was abc, is xyz"),
        ("data.seq_length", 128, "data.seq_length was 64, is 128"),
        ("train.global_batch_size", 4, "train.global_batch_size was 2, is 4"),
    ],
)
def test_other_data_or_sizes_are_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    path = write(tmp_path / "p", plan(3))
    with pytest.raises(DataError) as caught:
        read_plans(path, {**HEADER, key: value}, LENGTHS)
    assert str(caught.value) == (
        f"the plan {path} was made for other data or sizes: {words}.  "
        f"Write it anew: sft data plan RECIPE --write {path}"
    )


def test_the_seed_is_the_plans_own(tmp_path: Path) -> None:
    path = write(tmp_path / "p", plan(3))
    assert packs(read_plans(path, {**HEADER, "run.seed": 9}, LENGTHS)[0]) == packs(plan(3))


@pytest.mark.parametrize(
    "line, changes, words",
    [
        (1, {"packs": [[0], [8]]}, "p:2: expected packs of sample numbers from 0 to 7, none empty."),
        (1, {"packs": [[0], []]}, "p:2: expected packs of sample numbers from 0 to 7, none empty."),
        (1, {"packs": [[4, 2, 5], [2]]}, "p:2: a pack of 80 padded tokens; data.seq_length is 64."),
        (1, {"packs": [[0], [1], [2]]}, "p:2: 3 packs; a global batch has 2."),
        (1, {"packs": [[0]]}, "p:3: the batch before is not full, and only the last of an epoch may be."),
        (1, {"epoch": 1}, "p:2: epoch 1 after 0 epochs; they come in order, from 0."),
        (1, {"packs": 5}, 'p:2: expected a global batch, as in {"epoch": 0, "batch": 0, "packs": [[0, 1], [2]]}.'),
        (1, {"packs": [1, 2]}, 'p:2: expected a global batch, as in {"epoch": 0, "batch": 0, "packs": [[0, 1], [2]]}.'),
        (1, {"epoch": -1}, 'p:2: expected a global batch, as in {"epoch": 0, "batch": 0, "packs": [[0, 1], [2]]}.'),
        (0, {"format": "x"}, "p is not a plan: its first line has no format sft plan 1."),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, line: int, changes: dict[str, Any], words: str) -> None:
    path = rewrite(write(tmp_path / "p", plan(3)), line, **changes)
    with pytest.raises(DataError) as caught:
        read_plans(path, HEADER, LENGTHS)
    assert str(caught.value) == f"{tmp_path}/{words}"


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("hello\n")
    with pytest.raises(DataError, match="p is not a plan: a line is no JSON object"):
        read_plans(tmp_path / "p", HEADER, LENGTHS)
    with pytest.raises(DataError, match="the plan .*/q cannot be read: No such file or directory."):
        read_plans(tmp_path / "q", HEADER, LENGTHS)
    with pytest.raises(ConfigError, match="the plan cannot be written to .*: Is a directory."):
        write_plans(tmp_path, HEADER, [plan(3)], 2)


def test_what_differs_is_found(tmp_path: Path) -> None:
    """Samples 2 and 5 change places between the second and third batch of the second file."""
    lines = [{"format": "sft plan 1", "run.seed": 1}]
    batches: list[dict[str, Any]] = [{"epoch": 0, "packs": packs} for packs in ([[0], [1]], [[2, 3]], [[4], [5]])]
    for name, rows in (
        ("a", batches),
        ("b", [batches[0], {"epoch": 0, "packs": [[5], [3]]}, {"epoch": 0, "packs": [[4, 2]]}]),
    ):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in [*lines, *rows]))
    (tmp_path / "b").write_text((tmp_path / "b").read_text().replace('"run.seed": 1', '"run.seed": 2'))
    assert compare_plans(tmp_path / "a", tmp_path / "b") == [
        "first difference: epoch 0, global batch 1, both counted from 0",
        f"2 of 3 batches differ; 2 samples of {tmp_path}/a are elsewhere in {tmp_path}/b",
        "made from run.seed 1 and 2",
    ]


def test_plans_of_other_data_differ(tmp_path: Path) -> None:
    """Though their numbers are the same: sample 7 of one is not sample 7 of the other."""
    write(tmp_path / "a", plan(3))
    write(tmp_path / "b", plan(3), data="xyz")
    assert compare_plans(tmp_path / "a", tmp_path / "b") == ["made from other data: abc and xyz"]


def test_packs_of_a_batch_do_not_count(tmp_path: Path) -> None:
    first, second = plan(3), plan(3)
    write(tmp_path / "a", first)
    rows = [json.loads(row) for row in write(tmp_path / "b", second, **{"run.seed": 2}).read_text().splitlines()]
    rewrite(tmp_path / "b", 1, packs=rows[1]["packs"][::-1])
    assert compare_plans(tmp_path / "a", tmp_path / "b") == []
