"""Numbers are the same everywhere, equally probable, and in an order each once."""

from collections import Counter
from hashlib import blake2b

from sft.data.long.draws import Draws


def test_numbers_follow_from_the_name_as_documented() -> None:
    def hashed(i: int) -> int:
        return int(blake2b(f"a/{i}".encode(), digest_size=8).hexdigest(), 16)

    draws = Draws("a")
    assert [draws.below(1000) for _ in range(4)] == [hashed(i) % 1000 for i in range(4)] == [121, 376, 360, 500]
    assert Draws("b").below(1000) != Draws("c").below(1000)


def test_choices_are_equally_probable() -> None:
    draws = Draws("dice")
    counts = Counter(draws.below(6) for _ in range(6000))
    assert sorted(counts) == [0, 1, 2, 3, 4, 5]
    assert all(abs(count - 1000) < 150 for count in counts.values())  # 5 standard deviations are 144


def test_distinct_choices_and_numbers() -> None:
    draws = Draws("x")
    assert sorted(draws.distinct("abcd", 4)) == list("abcd")
    numbers = draws.numbers(2, 90)
    assert sorted(numbers) == list(range(10, 100)) and numbers != sorted(numbers)


def test_an_order_has_every_number_once_and_no_pattern() -> None:
    for size in (1, 2, 5, 64, 1000):
        order = Draws(f"size {size}").order(size)
        listed = [order[i] for i in range(size)]
        assert sorted(listed) == list(range(size))
        assert order[size] == listed[0]
    steps = {(b - a) % 1000 for a, b in zip(listed, listed[1:])}
    assert len(steps) > 500  # equal steps would let a model compute a number from its neighbours
