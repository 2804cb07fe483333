"""Describes the weights and adapters that a run trains.  `sft/weights/trained.py` makes the description.

A run trains all weights, or some of them (train.freeze), or LoRA adapters.  With LoRA, it can also train the embedding
and the output weight.  Weights that are not trained are frozen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from sft.layers.weights import is_of_layer, weight_of

_ANY = ".*"  # in a name, stands for the number of an expert
_LAYERS = "decoder.layers."  # the beginning of the keys of layers
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
Rows = tuple[tuple[int, int], ...]  # (first row, row after the last) of each run of rows that belongs to a projection


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of one Linear of the Hugging Face model.  One object describes the adapters of a layer's experts.
    name        the Linear's name, "model.layers.3.self_attn.q_proj"; for experts, * replaces the expert's number:
                "model.layers.3.mlp.experts.*.gate_proj".  If files hold the matrices of all experts as one tensor, the
                name is that of the tensor, then the number: "model.layers.3.mlp.experts.gate_up_proj.*"
    parts       the parts of our weight that hold the Linear's rows, in the order of these rows
    num_blocks  number of equal blocks of the Linear's rows; each block has rows of all parts
    """

    name: str
    parts: tuple[int, ...]
    num_blocks: int = 1

    @property
    def tensor(self) -> str | None:
        """The name of the tensor that holds the matrices of all experts in files; None: it is a Linear of its own."""
        return self.name.removesuffix(_ANY) if self.name.endswith(_ANY) else None


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """One of our weights, which holds the rows of one or several Linears, with the adapters of these Linears.

    One object describes the weights of all experts of a layer.
    module      name of the module in its layer, "self_attention.linear_qkv"
    layer       number of the layer, from 0
    num_experts number of the layer's experts, each of which has such a weight; 0: not a weight of experts
    part_rows   number of rows of each part: gate and up, or q, k and v
    num_groups  number of equal groups of rows; each group has rows of all parts.  1: each part is contiguous
    """

    module: str
    layer: int
    num_experts: int
    part_rows: tuple[int, ...]
    num_columns: int
    num_groups: int
    adapters: tuple[Adapter, ...]

    @property
    def shape(self) -> tuple[object, ...]:
        """Sizes that determine the number of adapter parameters.  Weights of several layers may have equal sizes."""
        parts = tuple(adapter.parts for adapter in self.adapters)
        return self.module, self.num_experts, self.part_rows, self.num_columns, parts

    @property
    def is_column_parallel(self) -> bool:
        """Whether each tensor-parallel rank holds some rows of the weight; False: some columns, or the whole weight."""
        return weight_of(f"{self.module}.weight").split == "rows"

    @property
    def is_duplicated(self) -> bool:
        """Whether every tensor-parallel rank holds the whole weight."""
        return weight_of(f"{self.module}.weight").split == ""

    def num_trained(self, rank: int, tp: int = 1) -> float:
        """Number of adapter parameters on one of `tp` ranks, if it holds all experts.  rank: rank of the adapters

        a weight of 6 x 4 with one adapter of rank 2: 20; on each of 2 ranks 14 (column parallel) or 16 (row parallel)
        """
        columns, rows = rank * self.num_columns * len(self.adapters), rank * sum(map(self.rows_of, self.adapters))
        split, whole = (rows, columns) if self.is_column_parallel else (columns, rows)
        if self.is_duplicated:
            split, whole = 0, rows + columns
        return max(1, self.num_experts) * (split / tp + whole)

    def rows_of(self, adapter: Adapter) -> int:
        """Number of rows of the adapter's Linear."""
        return sum(self.part_rows[part] for part in adapter.parts)

    def linears(self) -> list[str]:
        """The names of all Linears with an adapter."""
        return [name for adapter in self.adapters for name in names_of(adapter.name, range(self.num_experts))]


def names_of(name: str, experts: Iterable[int]) -> list[str]:
    """The names of the Linears that `name`, the name of an `Adapter`, stands for.

    "experts.*.w1", experts 2 and 3 -> "experts.2.w1", "experts.3.w1"; a name without * -> itself
    """
    return [name.replace(_ANY, f".{number}") for number in experts] if _ANY in name else [name]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One of our weights, stored as a checkpoint tensor or as a slice of one.

    key      "decoder.layers.mlp.linear_fc1.weight"; "decoder.layers.3.mlp.linear_fc1.weight" if layers are not stacked
    index    the weight's layer if layers are stacked, then its expert in the layer; () if it has neither
    shape    shape of the weight, without padding rows
    """

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The number of the weight's layer, from 0; None if the weight belongs to no layer."""
        _, is_in_layers, name = self.key.rpartition(_LAYERS)
        number = name.partition(".")[0]
        if not is_in_layers:
            return None
        return int(number) if number.isdecimal() else self.index[0]

    @property
    def is_expert(self) -> bool:
        return is_of_layer(self.key) and weight_of(self.key).is_of_expert

    @property
    def is_muon(self) -> bool:
        """Whether Muon updates the weight, if optim.name = muon."""
        return is_of_layer(self.key) and weight_of(self.key).is_muon

    @property
    def is_split(self) -> bool:
        """Whether each tensor-parallel rank holds a part of the weight."""
        return self.key in (EMBEDDING, HEAD) or (is_of_layer(self.key) and weight_of(self.key).split != "")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The trained part of a model.

    adapted  the weights with adapters
    whole    the model's own weights that the optimizer updates; None: all weights of the model
    muon     the weights that Muon updates (optim.name = muon), by their keys in checkpoints, each with the rows of the
             projections that it consists of.  Muon also updates all factors of adapters
    rows     for weights of `whole` of which only some rows are updated: key of the weight -> numbers of these rows
    groups   the group of optim.groups, by its number, of each weight in one: key and index of the weight -> number.  An
             adapter has its name for a key, and no index
    """

    adapted: Sequence[AdaptedWeight] = ()
    whole: Sequence[Weight] | None = None
    muon: Mapping[str, tuple[Rows, ...]] = field(default_factory=dict)
    rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    groups: Mapping[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    @cached_property
    def _whole(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        return frozenset((weight.key, weight.index) for weight in self.whole or ())

    @cached_property
    def by_layer(self) -> dict[int, tuple[list[AdaptedWeight], list[Weight]]]:
        """The weights with adapters and the trained weights of each layer, by its number from 1."""
        weights: dict[int, tuple[list[AdaptedWeight], list[Weight]]] = {}
        for adapted in self.adapted:
            weights.setdefault(adapted.layer + 1, ([], []))[0].append(adapted)
        for weight in self.whole or ():
            if weight.layer is not None:
                weights.setdefault(weight.layer + 1, ([], []))[1].append(weight)
        return weights

    @cached_property
    def alike(self) -> dict[int, int]:
        """For each layer that trains only adapters, the first such layer with adapted weights of equal `shape`.

        Both are numbers from 1.
        """
        first = dict[tuple[object, ...], int]()
        return {
            number: first.setdefault(tuple(weight.shape for weight in adapted), number)
            for number, (adapted, whole) in self.by_layer.items()
            if not whole
        }

    def has(self, key: str, index: tuple[int, ...]) -> bool:
        """Whether the optimizer updates this weight, and not only its adapters."""
        return self.whole is None or (key, index) in self._whole

    def _num_trained(self, weight: Weight) -> int:
        rows = self.rows.get(weight.key)
        return weight.size if rows is None else len(rows) * prod(weight.shape[1:])

    def describe(self, rank: int | None, num_parameters: int) -> str:
        """One line for `sft check`.  rank: rank of the adapters; num_parameters: parameters of the whole model
        `trained 43,646,976 in 252 adapters of rank 16 (0.53% of 8,190,735,360)`
        `trained 1,288,306,688, of which 43,646,976 in 252 adapters of rank 16 (15.73% of 8,190,735,360)`
        `trained 7,568,405,504 (92.40% of 8,190,735,360)`
        """
        whole = num_parameters if self.whole is None else sum(map(self._num_trained, self.whole))
        share = f"of {num_parameters:,}"
        if rank is None:
            return f"trained {whole:,} ({whole / num_parameters:.2%} {share})"
        factors = int(sum(weight.num_trained(rank) for weight in self.adapted))
        adapters = f"{factors:,} in {sum(len(w.linears()) for w in self.adapted):,} adapters of rank {rank}"
        numbers = f"{whole + factors:,}, of which {adapters}" if whole else adapters
        return f"trained {numbers} ({(whole + factors) / num_parameters:.2%} {share})"
