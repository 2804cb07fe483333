"""Finds the rows of the embedding and of the output weight that a PEFT folder trains alone."""

from collections.abc import Iterable, Iterator
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


def by_key(modules: Iterable[str], family: Family, config: Config) -> tuple[dict[str, list[str]], list[str]]:
    """The modules of a folder that are the embedding or the output weight, by the key of our weight, and all others.

    A key has two modules if the base model ties embedding and output weight, and PEFT saved both copies.
    """
    has_vision, is_tied = family.text_config != "none", config.model.tie_embeddings
    keys = {
        module_of(family.embedding, has_vision=has_vision): EMBEDDING,
        module_of(family.head, has_vision=has_vision): EMBEDDING if is_tied else HEAD,
    }
    stored = {module_of(module, has_vision=has_vision): module for module in modules}
    known: dict[str, list[str]] = {}
    for name in filter(stored.__contains__, keys):
        known.setdefault(keys[name], []).append(stored[name])
    return known, sorted(stored.keys() - keys.keys())


def rows_of(source: str, adapter: folder.PeftAdapter, family: Family, config: Config) -> dict[str, list[str]]:
    """The modules of the folder of which rows are trained, by the key of our weight.

    Raises CheckpointError for rows of another weight, or of a tied output weight alone.
    """
    rows, unknown = by_key(adapter.contents.rows, family, config)
    tied, has_vision = rows.get(EMBEDDING, []), family.text_config != "none"
    has_embedding = module_of(family.embedding, has_vision=has_vision) in (
        module_of(name, has_vision=has_vision) for name in tied
    )
    if unknown := unknown or ([] if has_embedding else tied):
        raise CheckpointError(
            f"{source} holds rows of {shown(unknown)} ({token_rows.OPTION}), but this trainer trains rows only of the "
            "embedding, and of an output weight that is not tied to it.  Use an adapter without them."
        )
    return rows


def row_parts(shard: "Shard", module: str, contents: folder.Contents) -> Iterator[folder.AdapterPart]:
    """The rows of the folder that `shard` holds."""
    first, column = shard.global_offset
    for number, token_id in enumerate(contents.rows[module].ids):
        if first <= token_id < first + len(shard.data):
            where = slice(number, number + 1), slice(column, column + shard.data.shape[1])
            own = shard.data[token_id - first : token_id - first + 1]
            yield folder.AdapterPart(folder.key_of_rows(module), where, own)
