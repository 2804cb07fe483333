"""Samples that are too long: no token is supervised twice, and only tokens that the policy names are lost."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.data.cache.truncation import Excerpt, OverLong, excerpts, turns
from sft.errors import DataError

# Runs of tokens with equal weights: a prompt, an answer, a message, an answer of half the weight ...
RUNS = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 1.0, 0.5])), min_size=1, max_size=8)


def weights_of(runs: list[tuple[int, float]]) -> np.ndarray:
    return np.concatenate([np.full(size, weight, dtype=np.float32) for size, weight in runs])


def fitted(runs: list[tuple[int, float]], room: int, over_long: OverLong, doc_multiple: int = 1) -> list[Excerpt]:
    return excerpts(weights_of(runs), seq_length=room, doc_multiple=doc_multiple, over_long=over_long)


def shown(found: list[Excerpt]) -> list[tuple[str, str]]:
    """The tokens of each piece, and its supervised tokens: ("0-5 14-23", "16-23")."""
    return [(ranges(positions), ranges(positions[weights > 0])) for positions, weights in found]


def ranges(positions: np.ndarray) -> str:
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return " ".join(f"{part[0]}-{part[-1]}" for part in parts if len(part))


def test_turns() -> None:
    assert turns(np.array([1, 0, 1, 1, 0, 0.5])) == [(2, 4), (5, 6)]
    assert turns(np.array([1, 1, 1])) == [(1, 3)]
    assert turns(np.array([1.0])) == turns(np.zeros(4)) == []


def test_what_fits_is_left_alone() -> None:
    for over_long in ("error", "drop", "cut_turns", "windows"):
        assert shown(fitted([(4, 0), (3, 1), (1, 0)], 8, over_long, doc_multiple=4)) == [("0-7", "4-6")]


def test_the_padded_length_must_fit() -> None:
    """5 tokens become 8 if padded to a multiple of 4; a window of 7 tokens holds one document of 4."""
    with pytest.raises(
        DataError, match=r"5 tokens \(8 when padded to a multiple of 4\) do not fit .*  Raise data.seq_length to 8"
    ):
        fitted([(4, 0), (1, 1)], 7, "error", doc_multiple=4)
    assert fitted([(4, 0), (1, 1)], 7, "drop", doc_multiple=4) == []
    assert shown(fitted([(2, 0), (1, 1), (1, 0), (1, 1)], 7, "cut_turns", doc_multiple=4)) == [("0-2", "2-2")]
    assert shown(fitted([(4, 0), (1, 1)], 7, "windows", doc_multiple=4)) == [("1-4", "4-4")]


def test_windows_of_whole_turns() -> None:
    """The limit is 16: the first two turns share a window; the third turn comes with its message and the repeated
    prompt."""
    runs = [(4, 0), (3, 1), (2, 0), (3, 1), (5, 0), (3, 1), (1, 0)]
    assert shown(fitted(runs, 16, "windows")) == [("0-11", "4-6 9-11"), ("0-3 12-20", "17-19")]


def test_windows_inside_a_turn_repeat_an_eighth() -> None:
    """The limit is 16: at most 8 for the prompt, 2 repeated, the rest new.  The last piece also holds the next turn."""
    runs = [(6, 0), (24, 1), (1, 0), (1, 1)]
    assert shown(fitted(runs, 16, "windows")) == [
        ("0-15", "6-15"),
        ("0-5 14-23", "16-23"),
        ("0-5 22-31", "24-29 31-31"),
    ]


def test_the_prompts_end_is_kept() -> None:
    """The first window keeps as much of the prompt as fits beside the first turn; later windows keep half a window of
    it."""
    runs = [(30, 0), (4, 1), (3, 0), (5, 1)]
    assert shown(fitted(runs, 16, "windows")) == [("18-33", "30-33"), ("22-29 34-41", "37-41")]
    # 11 tokens before the turn: 5 of the end of the prompt and 6 of the end of the message
    runs = [(10, 0), (4, 1), (90, 0), (5, 1)]
    assert shown(fitted(runs, 16, "windows")) == [("0-13", "10-13"), ("5-9 98-108", "104-108")]


def test_a_row_that_is_learnt_whole() -> None:
    """With supervise: all, the row is a single turn, whose prompt is its first token."""
    assert shown(fitted([(40, 1)], 16, "windows")) == [
        ("0-15", "1-15"),
        ("0-0 14-28", "16-28"),
        ("0-0 27-39", "29-39"),
    ]
    assert fitted([(40, 1)], 16, "cut_turns") == []


@settings(max_examples=200, deadline=None)
@given(runs=RUNS, room=st.integers(1, 48), doc_multiple=st.sampled_from([1, 4, 8]))
def test_windows_conserve_every_label(runs: list[tuple[int, float]], room: int, doc_multiple: int) -> None:
    weights = weights_of(runs)
    found = excerpts(weights, seq_length=room, doc_multiple=doc_multiple, over_long="windows")
    largest = room // doc_multiple * doc_multiple
    learnt: Counter[int] = Counter()
    for positions, learning in found:
        assert 0 < len(positions) == len(learning) <= largest
        assert (np.diff(positions) > 0).all()
        labels = np.flatnonzero(learning[1:] > 0) + 1
        assert (learning[labels] == weights[positions[labels]]).all()
        assert (positions[labels] - 1 == positions[labels - 1]).all(), "a label is predicted from its predecessor"
        learnt.update(positions[labels].tolist())
    expected = (np.flatnonzero(weights[1:] > 0) + 1).tolist() if largest >= 2 else []
    assert len(weights) <= largest or sorted(learnt.elements()) == expected
    assert sorted(learnt) == list(learnt), "windows come in the order of the sample"


@settings(max_examples=100, deadline=None)
@given(runs=RUNS, room=st.integers(2, 48))
def test_a_turn_that_fits_is_never_cut(runs: list[tuple[int, float]], room: int) -> None:
    """This holds if the turn leaves an eighth of the window for the text before it.  The message before the turn is
    kept if it fits."""
    weights = weights_of(runs)
    found = excerpts(weights, seq_length=room, doc_multiple=1, over_long="windows")
    ends = [0, *(stop for _, stop in turns(weights))]
    for before, (first, stop) in zip(ends, turns(weights), strict=False):
        holding = [piece for piece in found if {*range(first, stop)} & {*piece.positions[piece.weights > 0].tolist()}]
        if stop - first + max(1, room // 8) <= room:
            [(positions, _)] = holding
            assert {*range(first, stop)} <= {*positions.tolist()}
            if stop - before + min(turns(weights)[0][0], room // 2) <= room:
                assert {*range(before, stop)} <= {*positions.tolist()}
        end = [piece for piece in holding if stop - 1 in piece.positions]
        assert end and end[-1] is holding[-1], "the end of a turn is in its last part"


@settings(max_examples=100, deadline=None)
@given(runs=RUNS, room=st.integers(1, 48))
def test_cut_turns_keeps_a_beginning_that_ends_a_turn(runs: list[tuple[int, float]], room: int) -> None:
    weights = weights_of(runs)
    found = excerpts(weights, seq_length=room, doc_multiple=1, over_long="cut_turns")
    ends = [stop for _, stop in turns(weights)]
    if len(weights) <= room:
        assert [len(piece.positions) for piece in found] == [len(weights)]
    elif any(stop <= room for stop in ends):
        [(positions, learnt)] = found
        size = max(stop for stop in ends if stop <= room)
        assert positions.tolist() == list(range(size)) and (learnt == weights[:size]).all()
    else:
        assert found == []
