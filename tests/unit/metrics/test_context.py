"""The gain of far context and its interval."""

import random

import pytest

from sft.metrics.context import DocumentScore, gain_of, longest_of, table


def of(tokens: int, whole: float, nearest: float, length: int = 100, source: str = "a") -> DocumentScore:
    return DocumentScore(source=source, row="r", length=length, tokens=tokens, whole=whole, nearest=nearest)


def test_the_gain_is_a_difference_of_means_over_tokens() -> None:
    found = gain_of([of(10, 20.0, 30.0), of(30, 60.0, 70.0)])
    assert (found.documents, found.tokens, found.whole, found.nearest, found.gain) == (2, 40, 2.0, 2.5, 0.5)
    # Residuals of 10 - 0.5 * 10 = 5 and 10 - 0.5 * 30 = -5: the root of 2 * (25 + 25) is 10, over 40 tokens.
    assert found.margin == pytest.approx(1.959964 * 10 / 40)
    assert gain_of([of(10, 20.0, 30.0)]).margin is None


def test_the_interval_contains_the_true_gain_in_95_of_100_cases() -> None:
    rng, inside = random.Random(0), 0
    for _ in range(1000):
        documents = []
        for _ in range(30):
            tokens = rng.randint(1, 50)
            documents.append(of(tokens, 0.0, tokens * rng.gauss(0.2, 0.5)))
        found = gain_of(documents)
        assert found.margin is not None
        inside += abs(found.gain - 0.2) <= found.margin
    assert 920 <= inside <= 975  # 950, less some for 30 documents


def test_rows_of_the_table() -> None:
    assert [longest_of(length) for length in (64, 65, 128, 129)] == [64, 128, 128, 256]
    lines = table([of(10, 0.0, 10.0), of(10, 0.0, 10.0), of(5, 5.0, 5.0, length=300), of(4, 4.0, 4.0, source="b/c")])
    assert [line.split() for line in lines[1:-1]] == [
        ["a", "to", "128", "2", "20", "1.000", "2.718", "+1.0000", "+-", "0.0000"],
        ["a", "to", "512", "1", "5", "2.718", "2.718", "+0.0000"],
        # Residuals of 10 - 8, 10 - 8 and 0 - 4: 1.96 * root(24 * 3 / 2) / 25.
        ["a", "all", "3", "25", "1.221", "2.718", "+0.8000", "+-", "0.4704"],
        ["b/c", "to", "128", "1", "4", "2.718", "2.718", "+0.0000"],
    ]
