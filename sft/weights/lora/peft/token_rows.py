"""Reads and writes PEFT's trainable_token_indices: rows of the embedding, and of the output weight, trained alone.

    "trainable_token_indices": [5, 7]                                        rows of the embedding, tied or not
    "trainable_token_indices": {"embed_tokens": [5, 7], "lm_head": [5]}      rows of several modules

The file of tensors has the rows themselves, not their changes, as MODULE.token_adapter.trainable_tokens_delta.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sft.weights.lora.peft.targets import endings

OPTION = "trainable_token_indices"
SUFFIX, FROZEN_SUFFIX = ".token_adapter.trainable_tokens_delta", ".token_adapter.base_layer.weight"


class TokenRows(NamedTuple):
    """Rows of a module that are trained: their ids, and the number of columns."""

    ids: tuple[int, ...]
    width: int


def option_of(rows: Mapping[str, TokenRows], embedding: str) -> dict[str, Any]:
    """The option in adapter_config.json; {} without rows.  rows: by module; embedding: the last part of its name"""
    by_name = {module.rpartition(".")[2]: list(of_module.ids) for module, of_module in rows.items()}
    if not by_name:
        return {}
    return {OPTION: by_name[embedding] if by_name.keys() == {embedding} else by_name}


def read_rows(option: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, TokenRows], list[str]]:
    """The rows of each module, and one phrase for each reason why they cannot be used.

    option: the value in adapter_config.json; shapes: the shape of each module's rows in the file of tensors
    """
    if not option:
        return {}, [f"{module}{SUFFIX} is no part of a LoRA adapter without {OPTION}" for module in shapes]
    by_name = option if isinstance(option, dict) else {"": option}
    for ids in by_name.values():
        is_list = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
        if not is_list or len({*ids}) < len(ids):
            return {}, [f"{OPTION} = {option!r} is neither a list of different ids, nor such lists by module"]
    rows: dict[str, TokenRows] = {}
    problems = []
    for name, ids in by_name.items():
        modules = [module for module in shapes if not name or name in endings(module)]  # a list also fits a tied copy
        if not modules or any(len(shapes[module]) != 2 or shapes[module][0] != len(ids) for module in modules):
            problems.append(f"the file of tensors lacks rows of {name or 'a module'} for {OPTION} = {ids}")
        else:
            rows |= {module: TokenRows(tuple(ids), shapes[module][1]) for module in modules}
    unnamed = shapes.keys() - rows.keys() if not problems else ()
    return rows, problems + [f"{module}{SUFFIX} is not named by {OPTION}" for module in sorted(unnamed)]
