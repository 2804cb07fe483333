"""Defines views: parts of tensors as Hugging Face files store them.

Names and shapes are those in the files.  transformers may use others in memory.  `sft/layers/weights.py` explains the
letters of a shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

# Placeholders in Hugging Face names: the number of a layer, and the number of an expert in a layer.
LAYER, EXPERT = "{i}", "{e}"


@dataclass(frozen=True)
class HfTensor:
    """A whole tensor of a file."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HfView:
    """Rows `first` to `first + num_rows` of one matrix of a stored tensor, or of a vector.

    index: the matrix is `tensor[index]`; (3,) is the fourth expert of a tensor [experts, rows, columns]
    transposed: the rows are rows of the transposed matrix, which are columns of the stored matrix
    num_blocks: number of equal blocks of rows in the matrix.  The view has num_rows / num_blocks rows of each block,
        from row `first` of the block on

    first 4, 2 rows, transposed, of a tensor [8, 6] -> the columns 4 and 5 as a matrix [2, 8]
    first 1, 4 rows, 2 blocks, of a tensor [6, 9] -> the rows 1, 2, 4 and 5
    first 1, 3 rows, 3 blocks, of a vector [6] -> the elements 1, 3 and 5
    """

    tensor: HfTensor
    index: tuple[int, ...]
    first: int
    num_rows: int
    transposed: bool = False
    num_blocks: int = 1
    is_vector: bool = False  # the matrix has one column, and the view is a vector

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = self.tensor.shape[len(self.index) :]
        if self.is_vector:
            return (self.num_rows,)
        return (self.num_rows, *(matrix[:1] if self.transposed else matrix[1:]))

    @property
    def is_whole(self) -> bool:
        """Whether the view is the tensor itself."""
        return not self.index and not self.transposed and self.shape == self.tensor.shape

    @property
    def rows_of_block(self) -> int:
        """Number of consecutive rows that the view has of each block."""
        return self.num_rows // self.num_blocks

    def row(self, number: int) -> int:
        """The row of the matrix, or of its transpose, that is row `number` of the view.

        In the second example of the class, the rows 0 1 2 3 of the view are the rows 1 2 4 5 of the matrix.
        """
        if self.num_blocks == 1:
            return self.first + number
        block, inside = divmod(number, self.rows_of_block)
        return block * self._block_size + self.first + inside

    @property
    def step(self) -> int:
        """The distance of successive rows of a run in the matrix, or in its transpose (see `rows_of_run`)."""
        return self._block_size if self._takes_turns else 1

    @property
    def rows_of_run(self) -> int:
        """The number of rows in a run: rows of the view at equal distances in the matrix, which one read covers.

        A run has the rows of one block.  If the view has only one row of each block, all its rows are one run.
        """
        return self.num_rows if self._takes_turns else self.rows_of_block

    @property
    def _takes_turns(self) -> bool:
        return self.rows_of_block == 1 and self.num_blocks > 1

    @property
    def _block_size(self) -> int:
        axis = -1 if self.transposed else len(self.index)
        return self.tensor.shape[axis] // self.num_blocks


@dataclass(frozen=True)
class View:
    """An `HfView` in a rule, with placeholders in the name and letters in the shape.

    shape: shape of the stored tensor.  "q+k+k h" has rows of queries, then keys, then values.  "X h e+e" has one matrix
        for each expert, with columns of gate, then up.  0 is an axis of size 1 that the view drops: "0 x" and "0 0 x 0"
        are vectors.
    part: which summand of the shape the view contains, counted from 0.  ("q+k+k h", part=1) -> the rows of keys
    blocks: letter for the number of blocks.  Each block has rows of all summands.  "": one block.
        ("X e+e", part=1, blocks="e") -> the elements 1, 3, 5, ... for each expert
    """

    name: str
    shape: str
    part: int = 0
    transposed: bool = False
    blocks: str = ""

    @property
    def stacks_experts(self) -> bool:
        return self.shape.startswith("X")

    def _index(self, expert: int | None) -> tuple[int, ...]:
        """The index of the view's matrix or vector in the tensor: the expert, or a 0 for each leading axis "0"."""
        if self.stacks_experts and expert is not None:
            return (expert,)
        return tuple(0 for _ in takewhile("0".__eq__, self.shape.split()))

    def of(self, layer: int | None, expert: int | None, sizes: Mapping[str, int]) -> HfView:
        """The view for a layer and an expert, both counted from 0.  sizes: the size for each letter of the shape"""
        axes = [[sizes[letter] for letter in axis.split("+")] for axis in self.shape.split()]
        index = self._index(expert)
        parts = axes[-1] if self.transposed else axes[len(index)]
        num_blocks = sizes[self.blocks] if self.blocks else 1
        name = self.name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
        return HfView(
            tensor=HfTensor(name, tuple(sum(axis) for axis in axes)),
            index=index,
            first=sum(parts[: self.part]) // num_blocks,
            num_rows=parts[self.part],
            transposed=self.transposed,
            num_blocks=num_blocks,
            is_vector=self.shape.endswith(" 0"),
        )
