"""Trees of texts, compared with the set of all beginnings of the texts."""

from collections import defaultdict

import numpy as np
import pytest

from sft.data.chat.tree import Grown, TreeText, grow, text_positions, texts_of


def text(tokens: list[int], weights: list[float] | None = None) -> TreeText:
    weights = [0.0] * len(tokens) if weights is None else weights
    return TreeText(np.array(tokens, dtype=np.int32), np.array(weights, dtype=np.float32))


def table(grown: Grown) -> list[tuple[list[int], int, int]]:
    """Tokens, parent and fork of each document."""
    tree = grown.tree
    return [
        (grown.tokens[start:stop].tolist(), parent, fork)
        for start, stop, parent, fork in zip(
            tree.starts[:-1], tree.starts[1:], tree.branches.parents.tolist(), tree.branches.forks.tolist()
        )
    ]


def test_an_agent_that_loses_its_thinking() -> None:
    """Prompt 1 2, thinking 9, action 3, observation 4, thinking 8, action 5; the second text lacks the thinking 9."""
    grown = grow([text([1, 2, 9, 3], [0, 0, 1, 1]), text([1, 2, 3, 4, 8, 5], [0, 0, 0, 0, 0.5, 0.5])])
    assert table(grown) == [([1, 2, 3, 4, 8, 5], -1, 0), ([9, 3], 0, 2)]
    assert grown.weights.tolist() == [0, 0, 0, 0, 0.5, 0.5, 1, 1]
    assert grown.tree.ends.tolist() == [[1, 2], [0, 6]]
    assert grown.tree.spans.tolist() == [[0, 6, 8], [1, 4, 6]]
    assert grown.tree.span_weights.tolist() == [1, 0.5]
    assert grown.tree.num_rendered == 10


def test_a_branch_of_a_branch_and_branches_in_the_order_of_their_forks() -> None:
    texts = [text([1, 5, 6]), text([1, 2, 3, 4, 9]), text([1, 2, 3, 4, 5, 6, 7]), text([1, 5, 7, 8])]
    assert table(grow(texts)) == [
        ([1, 2, 3, 4, 5, 6, 7], -1, 0),
        ([5, 7, 8], 0, 1),
        ([6], 1, 1),
        ([9], 0, 4),
    ]


def test_branches_at_one_fork_are_in_the_order_of_their_texts() -> None:
    """The first text is the beginning of a branch that the third text made."""
    texts = [text([1, 8]), text([1, 9, 9, 9]), text([1, 8, 8, 8, 8]), text([1, 2, 3, 4, 5, 6])]
    assert [tokens[0] for tokens, _, _ in table(grow(texts))] == [1, 8, 9]


def test_beginnings_of_one_text_are_one_document_with_the_weights_of_the_first_text() -> None:
    grown = grow([text([1, 2, 3], [0, 0, 1]), text([1, 2, 3, 4], [0, 0, 0, 1]), text([1, 2, 3, 4], [0, 1, 1, 0])])
    assert table(grown) == [([1, 2, 3, 4], -1, 0)]
    assert grown.weights.tolist() == [0, 1, 1, 1]
    assert grown.tree.ends.tolist() == [[0, 3], [0, 4], [0, 4]]


def test_a_span_of_a_trunk_and_a_branch_is_two_spans() -> None:
    """Harmony's last answer ends otherwise than the same answer in the history."""
    grown = grow([text([1, 2, 3, 7], [0, 1, 1, 1]), text([1, 2, 3, 8, 9])])
    assert grown.tree.spans.tolist() == [[0, 1, 3], [0, 5, 6]]


def test_texts_without_a_common_beginning_have_no_common_parent() -> None:
    assert table(grow([text([1, 2]), text([3, 2, 4])])) == [([1, 2], -1, 0), ([3, 2, 4], -1, 0)]


@pytest.mark.parametrize("seed", range(60))
def test_random_texts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(rng.integers(1, 9)):
        tokens = rng.integers(1, 3, rng.integers(1, 12)).tolist()
        texts.append(text(tokens, [0.0, *rng.choice([0, 0.5, 1, 3], len(tokens) - 1)]))
    grown = grow(texts)
    tree = grown.tree
    # Each stored token is the end of one beginning of the texts, and each beginning is stored once.
    longest: dict[tuple[int, ...], int] = defaultdict(int)  # the longest text with this beginning
    weights: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, of_text in texts:
        for n in range(1, len(tokens) + 1):
            beginning = tuple(tokens[:n].tolist())
            longest[beginning] = max(longest[beginning], len(tokens))
            weights[beginning] = weights[beginning] or float(of_text[n - 1])
    stored: dict[int, tuple[int, ...]] = {}
    for number, (tokens, _) in enumerate(texts):
        places = text_positions(tree, number)
        assert grown.tokens[places].tolist() == tokens.tolist()
        for n, place in enumerate(places.tolist(), 1):
            assert stored.setdefault(place, tuple(tokens[:n].tolist())) == tuple(tokens[:n].tolist())
    assert sorted(stored) == list(range(len(grown.tokens)))
    assert sorted(stored.values()) == sorted(longest)
    assert grown.weights.tolist() == [weights[stored[place]] for place in range(len(grown.tokens))]
    # The longest continuation stays in the document.
    previous = (-1, 0)
    for start, parent, fork in zip(tree.starts[:-1].tolist(), tree.branches.parents, tree.branches.forks):
        if parent >= 0:
            stays = stored[int(tree.starts[parent] + fork)]
            assert longest[stays] >= longest[stored[start]]
            assert parent != previous[0] or fork >= previous[1]
            previous = (int(parent), int(fork))
    # Documents of a branch follow it before the next branch of its parent.
    for number, parent in enumerate(tree.branches.parents.tolist()):
        ancestors, at = [], number - 1
        while at >= 0:
            ancestors.append(at)
            at = int(tree.branches.parents[at])
        assert parent in (-1, *ancestors)
    for before, after in zip(texts, texts_of(grown), strict=True):
        assert before.tokens.tolist() == after.tokens.tolist() and before.weights.tolist() == after.weights.tolist()
