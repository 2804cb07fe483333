"""What bench_step can be asked for: a shape, a length, a mix of documents, and the recipe keys that trade memory.

    4b:64k:one:selective+offload0.8+tile4k+optim1

    train.recompute: selective    train.offload_fraction: 0.8    train.mlp_tile: 4096    optim.offload_fraction: 1.0

What is not named is off, and a share that is not said is 1; without any of it recomputation is selective.  `peer` in
its place is plain transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft.config import Config, ModelConfig
from sft.estimate import memory
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tools import measure

VOCAB = 151_936
MIXES = (*measure.MIXES, "padded", "1k")
RECOMPUTE = ("none", "selective", "full", "peer")
SIZES = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim tie_embeddings".split()
SHAPES = {
    "0.6b": (28, 1024, 3072, 16, 8, 128, True),
    "1.7b": (28, 2048, 6144, 16, 8, 128, True),
    "4b": (36, 2560, 9728, 32, 8, 128, True),
    "8b": (36, 4096, 12_288, 32, 8, 128, False),
    "tiny": (2, 64, 128, 4, 2, 16, True),
}
# By importance: what is last may find no time.
CASES = (
    "1.7b:64k:one:selective 4b:64k:one:selective+offload 1.7b:128k:one:selective+offload "
    "4b:128k:one:selective+offload0.8 4b:128k:one:full 1.7b:32k:chat 1.7b:32k:padded "
    "1.7b:64k:one:selective+offload 1.7b:64k:one:full "
    "1.7b:128k:longmix:selective+offload 1.7b:128k:agent:selective+offload 0.6b:64k:one 8b:32k:one:full+optim0.5 "
    "4b:64k:longmix:selective+offload 4b:32k:chat 0.6b:32k:chat 0.6b:128k:one:selective+offload "
    "8b:64k:one:full+offload+optim0.5 1.7b:256k:longmix:selective+offload0.75 1.7b:256k:one:selective+offload0.75 "
    "8b:128k:one:full+offload+optim0.5 4b:256k:one:full+offload"
)
TILE = 4096  # tokens
RECIPE = """
run: {dir: unused, seed: 7}
model: {qk_norm: true, norm_epsilon: 1e-6, rope: {base: 1e6}}
data: {train: unused}
train: {num_steps: 1000, global_batch_size: 1}
optim: {lr: 1e-5, schedule: constant, weight_decay: 0.1}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    length: int
    mix: str
    recompute: str = "selective"
    offload: float = 0.0
    tile: int | None = None
    optim: float = 0.0

    @classmethod
    def read(cls, text: str) -> "Case":
        """`4b:64k:chat:full+offload`.  Raises ValueError."""
        shape, length, mix, *rest = text.lower().split(":")
        if shape not in SHAPES or mix not in MIXES or len(rest) > 1:
            raise ValueError(f"{text} is not one of {', '.join(SHAPES)}, a length and one of {', '.join(MIXES)}")
        return cls(shape=shape, length=measure.length_of(length), mix=mix).using(*rest)

    def using(self, text: str = "selective") -> "Case":
        """The same with `full+offload+tile4k+optim0.5`.  Raises ValueError."""
        first, *flags = text.split("+")
        if first not in RECOMPUTE:
            raise ValueError(f"{first} is not one of {', '.join(RECOMPUTE)}, which come first")
        found = replace(self, recompute=first)
        for flag in flags:
            name = flag.rstrip("0123456789.k")
            amount = flag.removeprefix(name)
            if name == "offload":
                found = replace(found, offload=float(amount or 1))
            elif name == "tile":
                found = replace(found, tile=measure.length_of(amount) if amount else TILE)
            elif name == "optim":
                found = replace(found, optim=float(amount or 1))
            else:
                raise ValueError(f"{flag} is not offload or optim with a share, or tile with a length")
        return found

    @property
    def way(self) -> str:
        """`selective+offload0.5+tile4k+optim1`; `offload` is all of it"""
        flags = [f"offload{self.offload:g}" if self.offload != 1 else "offload"] if self.offload else []
        flags += [f"tile{measure.short(self.tile).lower()}"] if self.tile else []
        flags += [f"optim{self.optim:g}"] if self.optim else []
        return "+".join([self.recompute, *flags])

    def __str__(self) -> str:
        return f"{self.shape}:{measure.short(self.length).lower()}:{self.mix}:{self.way}"

    @property
    def vocab(self) -> int:
        return 512 if self.shape == "tiny" else VOCAB

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(zip(SIZES, SHAPES[self.shape]))

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(**self.sizes, qk_norm=True)

    def config(self, device: str, *, seq_length: int = 0, multiple: int = 64, also: Sequence[str] = ()) -> Config:
        """The recipe of this case.  seq_length: 0 is `length`; also: further KEY=VALUE, which win."""
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
        }
        return parse_recipe(RECIPE, "bench_step", [*(f"{k}={str(v).lower()}" for k, v in keys.items()), *also]).config

    def estimate(self, device: str, *, also: Sequence[str] = ()) -> memory.Memory:
        """By the equations of sft/estimate/memory.py, on one device."""
        config = self.config(device, also=also)
        return memory.estimate(config, Layout.resolve(config, 1), self.vocab)

    def longest(self, device: str, bytes_available: float, *, also: Sequence[str] = ()) -> int:
        """Tokens that fit by the same equations."""
        config = self.config(device, also=also)
        return memory.longest_context(config, Layout.resolve(config, 1), self.vocab, bytes_available)


def at_least(case: Case, device: str, also: Sequence[str] = ()) -> float:
    """Bytes without which no step is possible: weights, gradients, optimizer, and what layers keep."""
    found = case.estimate(device, also=also)
    return found.static + found.layers


def trades(text: str) -> list[Case]:
    """The cases that tell what each key costs and saves: `1.7b:64k`, or `8b:32k+optim1`, where all of them have that.

    The first is measured once more at the end: how far apart the two are is how far the others are to be trusted.
    """
    place, *flags = text.lower().split("+")
    start = Case.read(f"{place}:one")
    tile = f"tile{min(TILE, start.length // 4)}"
    ways = ["selective", "full", "selective+offload", "full+offload", f"selective+{tile}", "none"]
    ways += [] if any(flag.startswith("optim") for flag in flags) else ["selective+optim1"]
    return [start.using("+".join([way, *flags])) for way in [*ways, "selective"]]
