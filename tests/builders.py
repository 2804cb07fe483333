"""Builds the inputs of tests: recipes, configs, samples, packs, chats, and small models."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.batch import Sample
from sft.config import Config
from sft.config.pretrained import Pretrained
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from sft.recipe.resolved import Recipe

RECIPE = """\
run: {dir: runs/a}
model:
  num_layers: 2
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 4
  init_from: random
data:
  train: a.jsonl
  seq_length: 1024
train: {num_steps: 10, global_batch_size: 4}
optim:
  lr: 1e-5
"""


def parsed(*overrides: str) -> Recipe:
    """RECIPE with overrides, parsed as if it were the file a.yaml."""
    return parse_recipe(RECIPE, "a.yaml", overrides)


# The config.json of a small Qwen3 model that was trained on 512 positions.
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


def of_hf(name: str, *overrides: str) -> Recipe:
    """RECIPE of the Hugging Face model `name`, with overrides."""
    return parse_recipe(re.sub("(?s)model:.*data:", f"model: {{hf: {name}}}\ndata:", RECIPE), "a.yaml", overrides)


def refusal_lines(text: str, *overrides: str) -> list[str]:
    """The lines of the error message that the recipe `text` with `overrides` raises."""
    with pytest.raises(ConfigError) as caught:
        parse_recipe(text, "a.yaml", overrides)
    return str(caught.value).split("\n")


def sample(tokens: Iterable[int], mask: Sequence[int] | None = None, *, sample_id: int = 0, source: int = 0) -> Sample:
    """sample([7, 8, 9], [0, 1, 1]): the last two tokens are supervised; without a mask, all tokens are."""
    ids = np.array(list(tokens), dtype=np.int32)
    weights = np.ones(len(ids), dtype=np.float32) if mask is None else np.array(mask, dtype=np.float32)
    return Sample(sample_id=sample_id, tokens=ids, weights=weights, source=source)


def answer(length: int, supervised: int, *, seed: int = 0, first: int = 0, last: int = 100, source: int = 0) -> Sample:
    """A sample of random tokens with first <= token < last, whose last `supervised` tokens are supervised.  The seed is
    the id of the sample."""
    tokens = np.random.default_rng(seed).integers(first, last, size=length, dtype=np.int32)
    return sample(tokens, np.arange(length) >= length - supervised, sample_id=seed, source=source)


def chats(folder: Path, count: int, name: str = "chat.jsonl") -> None:
    """Writes a file of `count` chats with one question each.  An answer has 1 to 7 words, which are digits."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i} + {i}?"},
                {"role": "assistant", "content": str(2 * i) * (i % 7 + 1)},
            ]
        }
        for i in range(count)
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def pretrained(folder: Path) -> Pretrained:
    """The pretrained model in `folder`, without reading it."""
    return Pretrained(name=str(folder), folder=folder, snapshot=None, family="qwen3", max_positions=None)


class Hostile:
    """A value whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


LLAMA_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14_336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "head_dim": 128,
}


def layout_config(**sections: Mapping[str, object]) -> Config:
    """A config with 12 layers, 24 query heads, 8 key/value heads, ffn 96, packs of 32,768 tokens, and 16 packs per
    step."""
    base: dict[str, dict[str, object]] = {
        "run": {"dir": "runs/a"},
        "model": {
            "num_layers": 12,
            "hidden_size": 48,
            "ffn_hidden_size": 96,
            "num_attention_heads": 24,
            "num_query_groups": 8,
            "head_dim": 8,
            "init_from": "random",
        },
        "data": {"train": ["a.jsonl"], "seq_length": 32768},
        "parallel": {},
        "attention": {},
        "lora": {},
        "train": {"num_steps": 10, "global_batch_size": 16},
        "optim": {"lr": 1e-5},
        "checkpoint": {},
        "profile": {},
    }
    return Config.model_validate({name: {**keys, **sections.get(name, {})} for name, keys in base.items()})
