"""Reads a training step to measure: a shape, a length, a mix of documents, and the recipe keys that save memory.

    4b:64k:one:selective+offload0.8+tile4k+optim1+lora16

    train.recompute: selective    train.offload_fraction: 0.8    train.mlp_tile: 4096    optim.offload_fraction: 1.0
    lora.rank: 16

The first key is the value of train.recompute; without any key, it is selective.  Keys that are not named are off.
Without a number, a share is 1, a tile has 4,096 tokens, and a rank is 16.  `peer` in place of the value of
train.recompute measures plain transformers.  A mix is a mix of tools/bench/mixes.py, `1k` (documents of 1,024 tokens)
or `padded` (16 samples of chat, each padded to the longest of the 16).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from sft.config import Config, ModelConfig
from sft.config.train import Recompute
from sft.estimate import memory
from sft.layers.adapters import Trained
from sft.layers.flops import TrainFlops
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from sft.weights.trained import trained_weights
from tools.bench.mixes import MIXES, read_length, short

VOCAB = 151_936
STEP_MIXES = (*MIXES, "padded", "1k")
RECOMPUTE = (*get_args(Recompute), "peer")
SIZES = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim tie_embeddings".split()
SHAPES = {  # shapes of Qwen3 models
    "0.6b": (28, 1024, 3072, 16, 8, 128, True),
    "1.7b": (28, 2048, 6144, 16, 8, 128, True),
    "4b": (36, 2560, 9728, 32, 8, 128, True),
    "8b": (36, 4096, 12_288, 32, 8, 128, False),
    "tiny": (2, 64, 128, 4, 2, 16, True),
}
TILE = 4096  # tokens of a tile without a number
RANK = 16
RECIPE = """
run: {dir: unused, seed: 0}
model: {init_from: random, qk_norm: true, norm_epsilon: 1e-6, rope: {base: 1e6}}
data: {train: unused}
train: {num_steps: 1000, global_batch_size: 1}
optim: {lr: 1e-5, schedule: constant, weight_decay: 0.1}
"""


@dataclass(frozen=True, kw_only=True)
class StepCase:
    shape: str
    length: int
    mix: str
    recompute: str = "selective"
    offload: float = 0.0
    tile: int | None = None
    optim: float = 0.0
    lora: int = 0

    @classmethod
    def read(cls, text: str) -> "StepCase":
        """Reads a case, such as `4b:64k:chat:full+offload`.  Raises ValueError."""
        shape, length, mix, *memory_keys = [*text.lower().split(":"), "", ""]
        memory_keys = [key for key in memory_keys if key]
        if shape not in SHAPES or mix not in STEP_MIXES or len(memory_keys) > 1:
            raise ValueError(f"{text} is not one of {', '.join(SHAPES)}, a length and one of {', '.join(STEP_MIXES)}")
        return cls(shape=shape, length=read_length(length), mix=mix).using(*memory_keys)

    def using(self, text: str = "selective") -> "StepCase":
        """This case with other memory keys, such as `full+offload+tile4k+optim0.5`.  Raises ValueError."""
        first, *flags = text.split("+")
        if first not in RECOMPUTE:
            raise ValueError(f"memory keys must begin with one of {', '.join(RECOMPUTE)}; got {first}")
        case = replace(self, recompute=first)
        for flag in flags:
            name = flag.rstrip("0123456789.k")
            amount = flag.removeprefix(name)
            if name == "offload":
                case = replace(case, offload=float(amount or 1))
            elif name == "tile":
                case = replace(case, tile=read_length(amount) if amount else TILE)
            elif name == "optim":
                case = replace(case, optim=float(amount or 1))
            elif name == "lora":
                case = replace(case, lora=int(amount or RANK))
            else:
                expected = "offload or optim with a share, tile with a length, or lora with a rank"
                raise ValueError(f"{flag} is not {expected}")
        return case

    @property
    def memory_keys(self) -> str:
        """The memory keys as text: `selective+offload0.5+tile4k+optim1`.  `offload` without a number means 1"""
        flags = [f"offload{self.offload:g}" if self.offload != 1 else "offload"] if self.offload else []
        flags += [f"tile{short(self.tile).lower()}"] if self.tile else []
        flags += [f"optim{self.optim:g}"] if self.optim else []
        flags += [f"lora{self.lora}"] if self.lora else []
        return "+".join([self.recompute, *flags])

    def __str__(self) -> str:
        return f"{self.shape}:{short(self.length).lower()}:{self.mix}:{self.memory_keys}"

    @property
    def vocab(self) -> int:
        return 512 if self.shape == "tiny" else VOCAB

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(zip(SIZES, SHAPES[self.shape]))

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(**self.sizes, qk_norm=True)

    @property
    def flops(self) -> TrainFlops:
        trained = trained_weights(self.config("cpu"), self.vocab) if self.lora else Trained()
        return TrainFlops.of(self.model, self.vocab, trained, self.lora)

    def config(self, device: str, *, seq_length: int = 0, multiple: int = 64, also: Sequence[str] = ()) -> Config:
        """The recipe of this case.  seq_length: 0 means `length`; also: KEY=VALUE that override the case"""
        keys = {f"model.{name}": value for name, value in self.sizes.items()} | {
            "model.vocab_size": self.vocab,
            "run.device": device,
            "run.precision": "bf16" if device == "cuda" or self.optim else "fp32",
            "data.seq_length": seq_length or self.length,
            "data.doc_multiple": multiple,
            "train.recompute": self.recompute,
            "train.offload_fraction": self.offload,
            "train.mlp_tile": "null" if self.tile is None else self.tile,
            "optim.offload_fraction": self.optim,
            "lora.rank": self.lora or "null",
        }
        overrides = [f"{key}={str(value).lower()}" for key, value in keys.items()]
        return parse_recipe(RECIPE, "bench step", [*overrides, *also]).config

    def estimate(self, device: str, *, also: Sequence[str] = ()) -> memory.Memory:
        """The memory of one device that sft/estimate/memory.py predicts."""
        config = self.config(device, also=also)
        trained = trained_weights(config, self.vocab)
        return memory.estimate(config, Layout.resolve(config, 1), self.vocab, trained=trained)

    def longest(self, device: str, bytes_available: float, *, also: Sequence[str] = ()) -> int:
        """The longest context, in tokens, that sft/estimate/memory.py predicts to fit."""
        config = self.config(device, also=also)
        trained = trained_weights(config, self.vocab)
        return memory.longest_context(config, Layout.resolve(config, 1), self.vocab, bytes_available, trained)
