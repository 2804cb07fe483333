"""Finds the rows of the embedding and of the output weight that a PEFT folder trains alone."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sft.config import Config
from sft.errors import CheckpointError
from sft.hf.family import Family
from sft.layers.adapters import EMBEDDING, HEAD
from sft.weights.lora.matched import shown
from sft.weights.lora.peft import folder, token_rows
from sft.weights.lora.peft.targets import module_of

if TYPE_CHECKING:
    from sft.weights.load import Shard


def rows_of(source: str, adapter: folder.PeftAdapter, family: Family, config: Config) -> dict[str, list[str]]:
    """The modules of the folder of which rows are trained, by the key of our weight.

    A key has two modules if the base model ties embedding and output weight, and PEFT saved both copies.
    Raises CheckpointError for rows of another weight, or of a tied output weight alone.
    """
    has_vision, is_tied = family.text_config != "none", config.model.tie_embeddings
    keys = {
        module_of(family.embedding, has_vision=has_vision): EMBEDDING,
        module_of(family.head, has_vision=has_vision): EMBEDDING if is_tied else HEAD,
    }
    stored = {module_of(module, has_vision=has_vision): module for module in adapter.contents.rows}
    embedding = next(iter(keys))
    if unknown := sorted(stored.keys() - keys.keys()) or (
        sorted(stored) if is_tied and embedding not in stored else []
    ):
        raise CheckpointError(
            f"{source} holds rows of {shown(unknown)} ({token_rows.OPTION}), but this trainer trains rows only of the "
            "embedding, and of an output weight that is not tied to it.  Use an adapter without them."
        )
    rows: dict[str, list[str]] = {}
    for name in filter(stored.__contains__, keys):
        rows.setdefault(keys[name], []).append(stored[name])
    return rows


def row_parts(shard: "Shard", module: str, contents: folder.Contents) -> Iterator[folder.AdapterPart]:
    """The rows of the folder that `shard` holds."""
    first, column = shard.global_offset
    for number, token_id in enumerate(contents.rows[module].ids):
        if first <= token_id < first + len(shard.data):
            where = slice(number, number + 1), slice(column, column + shard.data.shape[1])
            own = shard.data[token_id - first : token_id - first + 1]
            yield folder.AdapterPart(folder.key_of_rows(module), where, own)
