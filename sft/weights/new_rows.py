"""Sets the rows of the embedding and of the output weight that data.add_tokens adds to a model of files."""

import hashlib
from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from sft.config import ModelConfig
from sft.config.pretrained import NewRow
from sft.hf.source import Source
from sft.layers.adapters import EMBEDDING, HEAD
from sft.mcore.engine import Engine, weights_changed
from sft.mcore.sharding.parts import held


def set_new_rows(engine: Engine, source: Source, rows: Sequence[NewRow]) -> None:
    """Set the new rows of the weights of `source`, which are loaded.  Every rank sets those that it holds.

    With model.added_rows = mean, a row is the mean, in float64, of the rows of its pieces in the files; with random, it
    is drawn from the run's seed and its id, whatever the layout.
    """
    if not rows:
        return
    model, seed = engine.config.model, engine.config.run.seed
    views = {mapping.key: mapping.sources[0] for mapping in source.mappings if mapping.key in (EMBEDDING, HEAD)}
    values: dict[str, Tensor] = {}
    with closing(source.stored) as stored:
        for key, view in views.items():
            if model.added_rows == "random":
                values[key] = torch.stack([_drawn(row, key, model, seed) for row in rows])
                continue
            pieces = {piece: torch.empty(1, model.hidden_size) for row in rows for piece in row.pieces}
            for piece, value in pieces.items():
                stored.read_rows(view.name, view.row(piece), value)
            values[key] = torch.stack([_mean([pieces[piece] for piece in row.pieces]) for row in rows])
    whole, parts = held(engine.chunks, [chunk.module.sharded_state_dict() for chunk in engine.chunks])
    with torch.no_grad():
        for shard in (shard for shard in (*whole, *parts) if shard.key in values):
            first, column = shard.global_offset
            columns = slice(column, column + shard.data.shape[1])
            for number, row in enumerate(rows):
                if first <= row.token_id < first + len(shard.data):
                    shard.data[row.token_id - first] = values[shard.key][number, columns].to(shard.data)
    weights_changed(engine)


def _mean(rows: list[Tensor]) -> Tensor:
    """The mean of rows [1, h], computed in float64: float32 [h]."""
    return torch.cat(rows).double().mean(0).float()


def _drawn(row: NewRow, key: str, model: ModelConfig, seed: int) -> Tensor:
    """A random row: float32 [h]."""
    digest = hashlib.sha256(f"{seed}:{key}:row {row.token_id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(model.hidden_size).normal_(generator=generator).mul_(model.init_std)
