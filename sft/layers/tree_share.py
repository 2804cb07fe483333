"""Describes the trees (sft/parallel/branches.py) of an average pack by the numbers that memory depends on."""

from dataclasses import dataclass, replace
from typing import NamedTuple


class TreeDocuments(NamedTuple):
    """A group of documents of trees with about the same length.

    number  number of these documents in an average pack
    length  mean number of tokens of a document
    depth   mean number of tokens before a document; 0: the documents have no parents
    """

    number: float
    length: float
    depth: float


@dataclass(frozen=True)
class TreeShare:
    """The trees of an average pack.

    documents  the documents of the trees, in groups; (): a pack has no trees
    forks      number of different forks
    keys       number of tokens of parents to which branches attend
    """

    documents: tuple[TreeDocuments, ...] = ()
    forks: float = 0.0
    keys: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.documents)

    @property
    def branches(self) -> float:
        """Number of branches."""
        return sum(group.number for group in self.documents if group.depth)

    @property
    def tokens(self) -> float:
        """Number of tokens of branches."""
        return sum(group.number * group.length for group in self.documents if group.depth)

    def times(self, factor: float) -> "TreeShare":
        """The trees of a pack that is longer by this factor."""
        documents = tuple(group._replace(number=factor * group.number) for group in self.documents)
        return replace(self, documents=documents, forks=factor * self.forks, keys=factor * self.keys)

    def halo(self, window: int, cp_size: int) -> float:
        """The most keys before the chunks of trees that a rank needs in a layer with a window (halo.py).

        3 branches of 40 tokens at depth 10, window 21 -> 3 x 10 with cp 1, 3 x (20 + 20) with cp 2
        """
        total = 0.0
        for number, length, depth in self.documents:
            positions = [depth] if cp_size == 1 else [depth + length / 2, depth + length]
            total += number * sum(min(window - 1, position) for position in positions)
        return total

    def fragments(self, max_short: int, cp_size: int) -> float:
        """The number of a rank's fragments of trees in a layer with linear attention (sft/parallel/fragments.py).

        max_short: length of the longest document that counts as short (`RecurrentSizes.max_short`)
        """
        long = sum(group.number for group in self.documents if group.length > max_short) * (cp_size > 1)
        short = sum(group.number for group in self.documents) - long
        return 2 * long + (short + self.forks) / cp_size
