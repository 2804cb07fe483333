"""Draws numbers that are the same on every machine and in every version of Python and numpy.

Number i of a stream is the first 8 bytes, big-endian, of BLAKE2b over the text "KEY/i", where KEY is the name of the
stream.  Streams with different names are independent, so a question does not depend on which other questions are made.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count
from typing import TypeVar

_T = TypeVar("_T")
_RANGE = 1 << 64


class Draws:
    """A stream of numbers.  key: the name of the stream"""

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers = self._stream()

    def below(self, end: int) -> int:
        """A number from 0 to end - 1, each with the same probability.  end: at least 1"""
        most = _RANGE - _RANGE % end  # larger numbers would make the first results more probable
        return next(number for number in self._numbers if number < most) % end

    def choice(self, options: Sequence[_T]) -> _T:
        """One of the options."""
        return options[self.below(len(options))]

    def distinct(self, options: Sequence[_T], number: int) -> list[_T]:
        """`number` different options, in random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(number)]

    def numbers(self, digits: int, number: int) -> list[int]:
        """`number` different numbers of `digits` digits, of which the first is not 0."""
        least, drawn = 10 ** (digits - 1), dict[int, None]()
        while len(drawn) < number:
            drawn[least + self.below(9 * least)] = None
        return list(drawn)

    def order(self, size: int) -> "Order":
        """A random order of the numbers from 0 to size - 1."""
        return Order(f"{self._key}/order {self.below(_RANGE)}", size)

    def _stream(self) -> Iterator[int]:
        for i in count():
            yield _hashed(f"{self._key}/{i}")


class Order:
    """The numbers from 0 to size - 1, each once, in a random order that needs no memory.

    A Feistel network of 4 rounds permutes the numbers of an even number of bits; a result of `size` or above is
    permuted again.  key: the name of the order
    """

    def __init__(self, key: str, size: int) -> None:
        self._key, self.size = key, size
        self._half = max(1, (size - 1).bit_length() + 1 >> 1)  # bits of each half

    def __getitem__(self, i: int) -> int:
        """Number i of the order; after `size` numbers, the order begins again."""
        number = self._permuted(i % self.size)
        while number >= self.size:
            number = self._permuted(number)
        return number

    def _permuted(self, number: int) -> int:
        left, right = number >> self._half, number & (1 << self._half) - 1
        for part in range(4):
            mixed = _hashed(f"{self._key}/{part}/{right}")
            left, right = right, left ^ mixed & (1 << self._half) - 1
        return left << self._half | right


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
