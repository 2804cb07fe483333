"""Loads the weights of a Hugging Face folder into the model of this rank, straight from the safetensors files.

A rank reads only the values that it keeps: some rows of each stored tensor, and only some columns of these rows if tp
splits the inputs of the weight.  Values are copied from mapped files to parameters in blocks, so a rank needs little
memory in addition to its parameters.  `Family` maps the rows of stored tensors to the rows of parameters.

Frozen weights in low bits keep the stored numbers and scales of their rows and columns (model.base_dtype).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sft.console import Console
from sft.errors import CheckpointError
from sft.hf.family import TensorMapping
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder
from sft.hf.source import Source
from sft.hf.tensor_view import HfView
from sft.low_bits import nf4
from sft.low_bits.part import PlainPart, StoredPart
from sft.mcore.checkpoint_io import torch_dist_files
from sft.mcore.engine import Engine, weights_changed
from sft.mcore.low_bits.frozen_base import frozen_weight
from sft.mcore.low_bits.stored_weight import StoredWeight
from sft.mcore.sharding.parts import held
from sft.parallel.collectives import all_gather_objects


class Shard(Protocol):
    """The fields of core's ShardedTensor: `data` is this rank's part of the tensor `key`.

    global_shape: shape of the whole tensor; global_offset: position of `data` in it
    prepend_axis_num: number of leading axes of both, for layers and experts, that `data` does not have
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int


@dataclass(frozen=True, kw_only=True)
class WeightPiece:
    """A part of a parameter, and the place of its values in a Hugging Face view."""

    target: Tensor  # [rows] or [rows, columns, ...]; a slice of the parameter along its rows
    view: HfView | None  # None: the part is filled with zeros
    first_row: int  # row of the view that becomes the first row of `target`
    first_column: int


def load_weights(engine: Engine, source: Source, console: Console, *, read_once: bool = False) -> None:
    """Load the weights of `source`.  Adam's moments, the schedule and the step keep the values of a new run.

    Collective.
    read_once: only one of the ranks that hold the same values reads them, and sends them to the others; with
        parallel.shard = weights, every rank reads its own parts, and so it does with weights in low bits
    Raises CheckpointError on all ranks if one rank cannot read a file, or reads a value that is not finite.
    """
    whole, parts = held(engine.chunks, [chunk.module.sharded_state_dict() for chunk in engine.chunks])
    frozen: list[tuple[StoredWeight, WeightPiece]] = []
    all_gather_objects(lambda: frozen.extend(_frozen(engine, whole, source)), engine.groups.control)
    plain = [shard for shard in whole if frozen_weight(engine.chunks, shard.data) is None]
    groups = [_replicas(engine, shard) for shard in plain]
    readers = _readers(plain, groups) if read_once else [group.rank() for group in groups]
    own = [shard for shard, group, reader in zip(plain, groups, readers) if reader == group.rank()]
    to_nf4 = engine.config.model.base_dtype == "nf4"
    with torch.no_grad():
        all_gather_objects(
            lambda: _fill_checked([*own, *parts], frozen, source, console, to_nf4=to_nf4), engine.groups.control
        )
        if read_once:
            for shard, group, reader in zip(plain, groups, readers):
                dist.broadcast(shard.data, dist.get_global_rank(group, reader), group=group)
    weights_changed(engine)


def _replicas(engine: Engine, shard: Shard) -> dist.ProcessGroup:
    """The group of ranks that have the same values as this shard.  They all list the same shards in the same order."""
    collection = engine.groups.collection
    group: dist.ProcessGroup = collection.expt_dp if ".experts." in shard.key else collection.dp_cp
    return group


def _readers(shards: Sequence[Shard], groups: Sequence[dist.ProcessGroup]) -> list[int]:
    """For each shard, the rank in its group that reads it: the rank that has the fewest bytes to read so far."""
    loads: dict[dist.ProcessGroup, list[int]] = {group: [0] * group.size() for group in groups}
    readers = []
    for shard, group in zip(shards, groups):
        load = loads[group]
        readers.append(load.index(min(load)))
        load[readers[-1]] += shard.data.nbytes
    return readers


def _frozen(engine: Engine, shards: Sequence[Shard], source: Source) -> list[tuple[StoredWeight, WeightPiece]]:
    """The frozen weights in low bits among `shards`, and their pieces.

    A weight that the files do not store in low bits gets its memory, and is not among them.
    """
    pieces: dict[StoredWeight, list[WeightPiece]] = {}
    mapping_of = _mappings(source)
    for shard in shards:
        weight = frozen_weight(engine.chunks, shard.data)
        if weight is not None:
            position: Any = replace(shard, data=weight.position_of(shard.data))  # type: ignore[type-var]
            pieces.setdefault(weight, []).extend(pieces_of(position, _mapping(shard, mapping_of, source.name)))
    if engine.config.model.base_dtype == "as_stored":
        names = source.stored.dequantised
        for weight in [w for w, own in pieces.items() if all(p.view is None or p.view.name not in names for p in own)]:
            weight.keep_whole()
            del pieces[weight]
    for weight in pieces:
        weight.forget()
    return [(weight, piece) for weight, own in pieces.items() for piece in own]


def _fill_checked(
    shards: Sequence[Shard],
    frozen: Sequence[tuple[StoredWeight, WeightPiece]],
    source: Source,
    console: Console,
    *,
    to_nf4: bool,
) -> None:
    fill(shards, source, console)
    hold(frozen, source, console, to_nf4=to_nf4)
    if not torch_dist_files.are_finite([shard.data for shard in shards]):
        wrong = next(shard.key for shard in shards if not torch_dist_files.are_finite([shard.data]))
        raise CheckpointError(f"{source.name} holds values that are not finite, for example in {wrong}.")


def fill(shards: Sequence[Shard], source: Source, console: Console) -> None:
    """Read the values of the shards from the files of `source`.  Not collective."""
    mapping_of = _mappings(source)
    pieces = [piece for shard in shards for piece in pieces_of(shard, _mapping(shard, mapping_of, source.name))]
    num_bytes = sum(piece.target.nbytes for piece in pieces)
    with closing(source.stored) as stored, console.track(f"reading {source.name}", num_bytes, "bytes") as progress:
        for piece in sorted(pieces, key=lambda piece: _position(piece, stored)):
            _read(piece, piece.target, stored)
            progress.advance(piece.target.nbytes)


def _read(piece: WeightPiece, target: Tensor, stored: SafetensorsFolder) -> None:
    """Write the values of `piece` to `target`, a tensor of its shape."""
    if piece.view is None:
        target.zero_()
        return
    stored.read_rows(
        piece.view.name,
        piece.view.row(piece.first_row),
        target,
        index=piece.view.index,
        transposed=piece.view.transposed,
        step=piece.view.step,
        first_column=piece.first_column,
    )


def hold(frozen: Sequence[tuple[StoredWeight, WeightPiece]], source: Source, console: Console, *, to_nf4: bool) -> None:
    """Read pieces of frozen weights from the files of `source`, and hold them in low bits.  Not collective.

    to_nf4: whether the values are quantised in NF4; False: the weights hold what the files store
    Raises CheckpointError if a value is not finite.
    """
    num_bytes = sum(piece.target.nbytes for _, piece in frozen)
    with closing(source.stored) as stored, console.track(f"reading {source.name}", num_bytes, "bytes") as progress:
        for weight, piece in sorted(frozen, key=lambda pair: _position(pair[1], stored)):
            part, dtype, transposed = _stored_form(piece, stored, weight.param.device, to_nf4=to_nf4)
            if not part.values(dtype).isfinite().all():
                name = piece.view.name if piece.view else "a weight"
                raise CheckpointError(f"{source.name} holds values that are not finite, for example in {name}.")
            weight.hold(piece.target, part, dtype, transposed=transposed)
            progress.advance(piece.target.nbytes)


def _stored_form(
    piece: WeightPiece, stored: SafetensorsFolder, device: torch.device, *, to_nf4: bool
) -> tuple[StoredPart, torch.dtype, bool]:
    """The form of `piece` that a weight in low bits holds, the type of its values, and whether they are transposed."""
    target, view = piece.target, piece.view
    if not to_nf4 and view is not None and view.name in stored.dequantised:
        part = stored.stored_rows(
            view.name,
            view.row(piece.first_row),
            (target.shape[0], target.shape[1]),
            device,
            index=view.index,
            transposed=view.transposed,
            step=view.step,
            first_column=piece.first_column,
        )
        return part, DTYPES[stored.tensors[view.name].dtype], view.transposed
    values = torch.empty(target.shape, dtype=target.dtype, device=device)
    _read(piece, values, stored)
    if to_nf4 and values.isfinite().all():
        return nf4.quantised(values), values.dtype, False
    return PlainPart(numbers=values), values.dtype, False


def _position(piece: WeightPiece, stored: SafetensorsFolder) -> tuple[str, int, int]:
    """The sort key that orders pieces by their place in the files."""
    if piece.view is None:
        return "", 0, 0
    tensor = stored.tensors[piece.view.name]
    return str(tensor.file), tensor.start, piece.first_row


def _mappings(source: Source) -> dict[tuple[str, tuple[int, ...]], TensorMapping]:
    """The mapping of each of our tensors, by key and position in a stack."""
    return {(mapping.key, mapping.stack_index): mapping for mapping in source.mappings}


def _mapping(
    shard: Shard, mapping_of: Mapping[tuple[str, tuple[int, ...]], TensorMapping], source: str
) -> TensorMapping:
    axes = shard.prepend_axis_num
    mapping = mapping_of.get((shard.key, tuple(shard.global_offset[:axes])))
    num_rows = shard.global_shape[axes]
    if mapping is None or mapping.shape(num_rows if mapping.form == "vocabulary" else None) != shard.global_shape:
        held = "no such tensor" if mapping is None else f"shape {mapping.shape()}"
        raise CheckpointError(f"{source} is of another model: {shard.key} has {shard.global_shape}, the files {held}.")
    return mapping


def pieces_of(shard: Shard, mapping: TensorMapping) -> Iterator[WeightPiece]:
    """The pieces of which `shard`, a part of the tensor of `mapping`, consists.  Together they cover it once.

    Example: a tensor has 10 rows, 6 from a view and 4 of padding, and the shard has the rows 4 to 8 (exclusive).
    The pieces are rows 0 to 2 of the shard, from row 4 of the view, and rows 2 to 4 of the shard, which are zeros.
    """
    axes = shard.prepend_axis_num
    first, *columns = shard.global_offset[axes:]
    end = first + shard.data.shape[0]
    for span in mapping.spans(shard.global_shape[axes]):
        start, stop = max(first, span.target), min(end, span.target + span.num_rows)
        if start < stop:
            yield WeightPiece(
                target=shard.data[start - first : stop - first],
                view=None if span.source is None else mapping.sources[span.source],
                first_row=span.start + start - span.target,
                first_column=columns[0] if columns else 0,
            )
