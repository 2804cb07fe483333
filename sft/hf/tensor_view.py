"""Tensors as they are stored in Hugging Face files, and views of their rows.

Names and shapes are those of the files, which may differ from those in the memory of transformers.  Letters stand for
the sizes in a shape:

    v vocabulary    h hidden size    f MLP width    x experts    e width of an expert's MLP
    q query heads * head width    k key heads * head width    d head width    s width of the shared expert    1 one
    a query heads

    of layers with linear attention:
    K key heads * key width    V value heads * value width    n key heads    m value heads    u value width
    c kernel of the convolution
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Placeholders in Hugging Face names: the number of a layer, and the number of an expert in a layer.
LAYER, EXPERT = "{i}", "{e}"


@dataclass(frozen=True)
class HfTensor:
    """A tensor as it is stored in a file, whole."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HfView:
    """Rows `first` to `first + num_rows` of one matrix of a stored tensor, or of a vector.

    index: the matrix is `tensor[index]`; (3,) is the fourth expert of a tensor [experts, rows, columns]
    transposed: rows are counted in the transposed matrix, so that they are columns of the stored one
    num_blocks: the matrix consists of so many equal blocks of rows, and the view has the same rows of each block

    first 4, 2 rows, transposed, of a tensor [8, 6] -> the columns 4 and 5 as a matrix [2, 8]
    first 1, 4 rows, 2 blocks, of a tensor [6, 9] -> the rows 1, 2, 4 and 5
    """

    tensor: HfTensor
    index: tuple[int, ...]
    first: int
    num_rows: int
    transposed: bool = False
    num_blocks: int = 1

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = self.tensor.shape[len(self.index) :]
        return (self.num_rows, *(matrix[:1] if self.transposed else matrix[1:]))

    @property
    def is_whole(self) -> bool:
        """Whether the view is the tensor itself."""
        return not self.index and not self.transposed and self.shape == self.tensor.shape

    @property
    def rows_of_block(self) -> int:
        """Consecutive rows of the matrix that the view has of each block."""
        return self.num_rows // self.num_blocks

    def row(self, number: int) -> int:
        """The row of the matrix that is row `number` of the view.

        the second example of the class: 0 1 2 3 -> 1 2 4 5
        """
        if self.num_blocks == 1:
            return self.first + number
        block, inside = divmod(number, self.rows_of_block)
        return block * (self.tensor.shape[len(self.index)] // self.num_blocks) + self.first + inside


@dataclass(frozen=True)
class View:
    """An `HfView` in a rule, with placeholders in the name and letters in the shape.

    shape: of the stored tensor.  "q+k+k h" has rows of queries, then keys, then values; "x h e+e" is one matrix for
        each expert, with columns of gate, then up.
    part: number of the summand that the view contains.  ("q+k+k h", part=1) -> the rows of keys
    blocks: letter of a number of blocks, each of which has rows of all summands; "" is one block
    """

    name: str
    shape: str
    part: int = 0
    transposed: bool = False
    blocks: str = ""

    @property
    def stacks_experts(self) -> bool:
        return len(self.shape.split()) == 3 and self.shape.startswith("x")

    def of(self, layer: int | None, expert: int | None, sizes: Mapping[str, int]) -> HfView:
        """The view of this layer and expert.  sizes: by letter"""
        axes = [[sizes[letter] for letter in axis.split("+")] for axis in self.shape.split()]
        index = (expert,) if self.stacks_experts and expert is not None else ()
        parts = axes[-1] if self.transposed else axes[len(index)]
        num_blocks = sizes[self.blocks] if self.blocks else 1
        assert num_blocks == 1 or not self.transposed
        name = self.name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
        return HfView(
            tensor=HfTensor(name, tuple(sum(axis) for axis in axes)),
            index=index,
            first=sum(parts[: self.part]) // num_blocks,
            num_rows=parts[self.part],
            transposed=self.transposed,
            num_blocks=num_blocks,
        )
