"""Layouts and settings whose steps `plan_ranking` predicts and measures, and their recipes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sft.config import Config
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe

NUM_RANKS, MULTIPLE = 2, 32
LAYOUTS = {
    "tp2": {"parallel.tp": 2},
    "cp2": {"parallel.cp": 2},
    "pp2": {"parallel.pp": 2},
    "dp2": {},
    "ep2": {"parallel.ep": 2},
}
SHORT = 16  # documents in a pack with the extra `short`; otherwise a pack is one document
EXTRAS: dict[str, dict[str, Any]] = {
    "short": {},
    "experts": {"model.moe.num_experts": 8, "model.moe.top_k": 2},
    "chunked": {"loss.impl": "chunked"},
    "wide": {"model.vocab_size": 8192},
}


@dataclass(frozen=True)
class Setting:
    """A layout, a pack length, train.recompute, and extras: `cp2:2048:full:short`."""

    layout: str
    seq_length: int
    recompute: str
    extras: tuple[str, ...] = ()

    @staticmethod
    def read(text: str) -> "Setting":
        """Raises ValueError."""
        layout, length, recompute, *extras = text.split(":")
        unknown = [extra for extra in extras if extra not in EXTRAS]
        if layout not in LAYOUTS or not length.isdecimal() or recompute not in ("none", "selective", "full") or unknown:
            names = f"{'|'.join(LAYOUTS)}:LENGTH:none|selective|full with any of {', '.join(EXTRAS)}"
            raise ValueError(f"{text} is not {names}")
        return Setting(layout, int(length), recompute, tuple(extras))

    def __str__(self) -> str:
        return ":".join([self.layout, str(self.seq_length), self.recompute, *self.extras])

    @property
    def document(self) -> int:
        """Tokens of each document."""
        return self.seq_length // SHORT if "short" in self.extras else self.seq_length


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is measured.

    tokens: of a step; rounds: times that each setting takes `steps` timed steps; tiny: calibrates with tiny sizes
    """

    settings: Sequence[str]
    hidden: int
    layers: int
    tokens: int
    rounds: int
    steps: int
    tiny: bool = False

    def json(self) -> str:
        return json.dumps(asdict(self))

    def config(self, setting: Setting) -> Config:
        """The recipe of a setting.  All settings have the same model but for their extras, and the same tokens."""
        keys: dict[str, Any] = {
            "model.num_layers": self.layers, "model.hidden_size": self.hidden,
            "model.ffn_hidden_size": 3 * self.hidden, "model.num_attention_heads": self.hidden // 32,
            "model.num_query_groups": self.hidden // 64, "model.vocab_size": 1024,
            "data.seq_length": setting.seq_length, "data.doc_multiple": MULTIPLE,
            "train.recompute": setting.recompute,
            "train.global_batch_size": max(NUM_RANKS, self.tokens // setting.seq_length),
        }  # fmt: skip
        keys |= LAYOUTS[setting.layout]
        for extra in setting.extras:
            keys |= EXTRAS[extra]
        text = """
run: {dir: unused, device: cpu, precision: fp32, seed: 0}
model: {init_from: random}
data: {train: unused}
train: {num_steps: 1000}
optim: {lr: 1.0e-4, schedule: constant}
"""
        return parse_recipe(
            text, "bench plan_ranking", [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        ).config

    def layout(self, setting: Setting) -> Layout:
        return Layout.resolve(self.config(setting), NUM_RANKS)
