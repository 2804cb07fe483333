"""The weights of our model that LoRA adapts, and the adapters of each: the contract between `hf` and `mcore`."""

from collections.abc import Iterable
from dataclasses import dataclass

_ANY = ".*."  # of a name: stands for the number of an expert
_COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of one Linear of the Hugging Face model, or those of the same Linear of all experts of a layer.

    name: of the Linear, "model.layers.3.self_attn.q_proj"; of experts with * in place of the expert's number,
        "model.layers.3.mlp.experts.*.gate_proj"
    parts: the parts of our weight that are its rows, in the order of its rows
    """

    name: str
    parts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """One of our weights, which consists of the rows of one or several Linears, and the adapters of these.

    The weights of all experts of a layer are described together.

    module      "self_attention.linear_qkv", within its layer
    layer       0 is the first layer
    num_experts so many experts have such a weight; 0: it is no weight of experts
    part_rows   rows of each part of the weight: of gate and up, or of q, k and v
    num_groups  in each of so many groups of rows, rows of all parts follow each other; 1: parts are contiguous
    """

    module: str
    layer: int
    num_experts: int
    part_rows: tuple[int, ...]
    num_columns: int
    num_groups: int
    adapters: tuple[Adapter, ...]

    @property
    def is_column_parallel(self) -> bool:
        """Whether tensor-parallel ranks hold rows of the weight; False: columns."""
        return self.module.endswith(_COLUMN_PARALLEL)

    def num_trained(self, rank: int, tp: int = 1) -> float:
        """Numbers in the factors that one of `tp` ranks holds, if it holds all experts.

        a weight of 6 x 4 with one adapter of rank 2: 20; on each of 2 ranks 14 (column parallel) or 16 (row parallel)
        """
        columns, rows = rank * self.num_columns * len(self.adapters), rank * sum(map(self.rows_of, self.adapters))
        split, whole = (rows, columns) if self.is_column_parallel else (columns, rows)
        return max(1, self.num_experts) * (split / tp + whole)

    def rows_of(self, adapter: Adapter) -> int:
        """Rows of the Linear."""
        return sum(self.part_rows[part] for part in adapter.parts)

    def linears(self) -> list[str]:
        """The names of all Linears with an adapter."""
        return [name for adapter in self.adapters for name in names_of(adapter.name, range(self.num_experts))]


def names_of(name: str, experts: Iterable[int]) -> list[str]:
    """The Linears that the name of an adapter means.

    "experts.*.w1", experts 2 and 3 -> "experts.2.w1", "experts.3.w1"; a name without * -> itself
    """
    return [name.replace(_ANY, f".{number}.") for number in experts] if _ANY in name else [name]


def describe_trained(weights: Iterable[AdaptedWeight], rank: int, num_frozen: int) -> str:
    """`trained 43,646,976 in 252 adapters of rank 16 (0.53% of 8,190,735,360)`"""
    weights = list(weights)
    trained = int(sum(weight.num_trained(rank) for weight in weights))
    count = sum(len(weight.linears()) for weight in weights)
    return f"trained {trained:,} in {count:,} adapters of rank {rank} ({trained / num_frozen:.2%} of {num_frozen:,})"
