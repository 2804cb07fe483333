"""Divides a model chunk into units: weights that are gathered together, and whose gradients are summed together."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sft.mcore.sharding.flat import FlatWeights
from sft.mcore.sharding.ranks import ShardRanks

EMBEDDING = "embedding"


class Unit:
    """The weights of a module that are whole at the same time.

    name    "layer 3", "embedding", "final norm", "output", "multi-token prediction"
    module  the module whose forward pass uses the weights; None: the loss head uses them
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module | None,
        params: Sequence[torch.nn.Parameter],
        ranks: dict[bool, ShardRanks],
        *,
        keeps_weights: bool,
        grad_dtype: torch.dtype,
    ) -> None:
        self.name, self.module = name, module
        self.flats = [
            FlatWeights(same, ranks[key[0]], keeps_weights=keeps_weights, is_expert=key[0], grad_dtype=grad_dtype)
            for key, same in _alike(params)
        ]
        self.is_trained = any(flat.is_trained for flat in self.flats)
        self._gathers: list[dist.Work] | None = None  # None: the weights are not whole

    def gather(self) -> None:
        """Start making the weights whole, unless that was started already."""
        if self._gathers is None:
            self._gathers = [work for flat in self.flats if flat.frees_weights for work in flat.gather()]

    def make_whole(self) -> None:
        """Gather the weights, and make the kernels that are queued from now on wait until they have arrived."""
        self.gather()
        for work in self._gathers or ():
            work.wait()
        self._gathers = []

    def publish(self) -> None:
        """Gather whole weights that stay in memory again, after the optimizer has changed the shards."""
        kept = [flat for flat in self.flats if flat.is_trained and not flat.frees_weights]
        for work in [work for flat in kept for work in flat.gather()]:
            work.wait()

    def free(self) -> None:
        if self._gathers is not None:
            self.make_whole()  # waits for the gather, which must not write into freed memory
            self._gathers = None
            for flat in self.flats:
                flat.free_weights()

    def open_gradients(self) -> None:
        for flat in self.flats:
            flat.open_gradients()

    def reduce(self) -> "Reduction":
        return Reduction(self, [(flat, *flat.reduce()) for flat in self.flats])


class Reduction:
    """The sums of a unit's gradients over ranks, while they are computed."""

    def __init__(self, unit: Unit, parts: Sequence[tuple[FlatWeights, list[dist.Work], Tensor | None]]) -> None:
        self.unit, self._parts = unit, parts

    def finish(self) -> None:
        """Add the sums to the shards, and free the gradients of the whole weights."""
        for flat, works, summed in self._parts:
            for work in works:
                work.wait()
            flat.add(summed)


def _alike(params: Sequence[torch.nn.Parameter]) -> Iterator[tuple[tuple[bool, bool, str], list[torch.nn.Parameter]]]:
    """Yield (key, parameters) of parameters with the same key: (is of an expert, is trained, name of the dtype)."""

    def key(param: torch.nn.Parameter) -> tuple[bool, bool, str]:
        return not getattr(param, "allreduce", True), param.requires_grad, str(param.dtype)

    for same, group in groupby(sorted(params, key=key), key):
        yield same, list(group)


def units_of(chunk: Any, ranks: dict[bool, ShardRanks], *, keeps_weights: bool, grad_dtype: torch.dtype) -> list[Unit]:
    """The units of a model chunk (HiddenStatesGPT), in the order in which a forward pass uses them.

    The embedding is a unit of its own, and so is the output weight.  If they are tied, the first and the last pipeline
    stage then divide the weight in the same way.

    ranks: for dense weights (False) and for weights of experts (True)
    """
    modules: list[tuple[str, torch.nn.Module | None, list[torch.nn.Parameter]]] = []
    placed: set[int] = set()

    def add(name: str, module: torch.nn.Module | None, params: Iterator[torch.nn.Parameter]) -> None:
        new = [param for param in params if id(param) not in placed]
        placed.update(map(id, new))
        if new:
            modules.append((name, module, new))

    decoder = chunk.decoder
    if hasattr(chunk, "embedding"):
        table = chunk.embedding.word_embeddings
        add(EMBEDDING, table, table.parameters())
    for layer in decoder.layers:
        add(f"layer {layer.layer_number}", layer, layer.parameters())
    if getattr(decoder, "final_layernorm", None) is not None:
        add("final norm", decoder.final_layernorm, decoder.final_layernorm.parameters())
    if chunk.multi_token is not None:
        add("multi-token prediction", chunk.multi_token, chunk.multi_token.parameters())
    if chunk.post_process:
        add("output", None, iter([chunk.output_weight()]))
    missing = [name for name, param in chunk.named_parameters() if id(param) not in placed]
    assert not missing, missing
    make = partial(Unit, ranks=ranks, keeps_weights=keeps_weights, grad_dtype=grad_dtype)
    return [make(name, module, params) for name, module, params in modules]
