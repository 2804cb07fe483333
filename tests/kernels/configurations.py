"""Lists the kernels that the families and the recipes need: one configuration for each compiled variant of a kernel.

The list comes from the functions by which a run chooses its kernels.  A layer without a window has one configuration
more: in packs with trees, branches attend to tokens of their parents in calls without a mask (parent_keys.py).  The
keys of a window are copied before each branch instead.  Released models are those of
tests/unit/fixtures/released and tests/unit/hf/released.py; recipes are all files of recipes/.  Two layers share a
configuration if a kernel's compiled code is the same for both: the length of a window and the number of heads do not
matter, the number of query heads for each key head does.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from sft.config import Config
from sft.config.linear_attention import Activation
from sft.layers import kernel_rates
from sft.layers.kinds import all_layer_groups
from sft.layers.mixer import Mixer
from sft.mcore.attention.flash_kernel import Demand
from sft.mcore.backends import kernels
from sft.recipe.load import parse_recipe
from tests.unit.fixtures import hf
from tests.unit.hf import released
from tests.unit.hf.own_windows import ERNIE, HUNYUAN, LAGUNA, MIMO, STEP

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT / "tests" / "unit" / "fixtures" / "released"
RECIPES = ROOT / "recipes"
# Architecture as compilers name it -> the compute capability of its GPUs
ARCHITECTURES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


class Linear(NamedTuple):
    """Layers with linear attention.

    heads_per_key     number of value heads that share a key head
    decay, low_limit  `LinearAttentionConfig.decay` and `decay_floor`
    gate              activation of the gate on the output
    """

    key_width: int
    value_width: int
    heads_per_key: int
    taps: int
    decay: str
    low_limit: float | None
    gate: Activation

    @property
    def text(self) -> str:
        of_channels = ", decays of channels" if self.decay == "channel" else ""
        sizes = f"{self.key_width}/{self.value_width}, {self.heads_per_key} heads a key, {self.taps} taps"
        return f"{sizes}{of_channels}{'' if self.low_limit is None else ' with a limit'}"


class Mamba(NamedTuple):
    """Layers with Mamba-2.

    heads_per_group  number of heads that share B and C
    """

    state_width: int
    head_width: int
    heads_per_group: int
    taps: int

    @property
    def text(self) -> str:
        return f"Mamba-2 {self.state_width}/{self.head_width}, {self.heads_per_group} heads a group, {self.taps} taps"


class AttentionCall(NamedTuple):
    """One call of an attention kernel.  is_causal: False for calls in which branches attend to their parents"""

    demand: Demand
    is_causal: bool = True

    @property
    def text(self) -> str:
        return text(self.demand) + ("" if self.is_causal else ", parents")


def models() -> Iterator[tuple[str, Config]]:
    """Name and config of every recipe, and of every released model in a recipe of the least keys."""
    with TemporaryDirectory() as folder, chdir(folder):  # with a folder for each name on the hub
        for name, file in hf.ON_HUB.items():
            Path(name).mkdir(parents=True)
            Path(name, "config.json").write_text(json.dumps(hf.released(file)))
        for path in sorted(RECIPES.rglob("*.yaml")):
            yield str(path.relative_to(RECIPES)), parse_recipe(path.read_text(), str(path), []).config
    least = parse_recipe(_LEAST, "least", []).config
    for name, content in contents().items():
        yield name, least.model_copy(update={"model": hf.model_of(content)})


def contents() -> dict[str, dict[str, Any]]:
    """The config.json of released models, by name."""
    names = (*sorted(path.stem for path in RELEASED.glob("*.json")), *released.SIZES)
    own_windows = {content["model_type"]: content for content in (LAGUNA, MIMO, STEP, ERNIE, HUNYUAN)}
    return {name: released.config(name) for name in names} | own_windows | _OF_RECURRENCES


# Released models whose layers have a recurrence of their own sizes.
_OF_RECURRENCES: dict[str, dict[str, Any]] = {
    "nemotron_3_nano_4b": released.config("nemotron_3_nano_30b_a3b", mamba_num_heads=96, mamba_head_dim=80),
    "nemotron_3_super": released.config("nemotron_3_nano_30b_a3b", mamba_num_heads=128),
    "ling_3": {  # what it does not name has the defaults of transformers
        **dict(model_type="bailing_hybrid", num_hidden_layers=42, hidden_size=2560, intermediate_size=6144),
        **dict(num_attention_heads=32, vocab_size=157184, moe_intermediate_size=768, num_experts=512),
        **dict(num_experts_per_token=8, num_shared_experts=1, first_k_dense_replace=2),
    },
}
_LEAST = """
run: {dir: unused, device: cuda}
model: {num_layers: 1, init_from: random, hidden_size: 64, ffn_hidden_size: 64, num_attention_heads: 1}
data: {train: unused, seq_length: 64}
train: {num_steps: 1, global_batch_size: 1}
optim: {lr: 1.0e-5}
"""


def _mixers() -> Iterator[tuple[str, Config, Mixer]]:
    for name, config in models():
        for mixer in {group.mixer.kind: group.mixer for group in all_layer_groups(config.model)}.values():
            yield name, config, mixer


@cache
def softmax() -> dict[Demand, list[str]]:
    """What layers ask of an attention kernel, without the GPU -> the models with such layers.

    A recipe on the CPU in fp32 stands for itself on a GPU in bf16.
    """
    found: dict[Demand, list[str]] = {}
    for name, config, mixer in _mixers():
        if mixer.pair_width:
            found.setdefault(kernels.demand_of(_in_bf16(config), mixer, "cuda"), []).append(name)
    return found


def attention_calls() -> list[AttentionCall]:
    """All calls of `softmax`, then those without a mask."""
    demands = [*softmax()]
    return [
        *map(AttentionCall, demands),
        *(AttentionCall(demand, is_causal=False) for demand in demands if not demand.has_window),
    ]


def _in_bf16(config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"precision": "bf16"})})


@cache
def linear() -> dict[Linear | Mamba, tuple[Config, Mixer]]:
    """Shapes of layers with a recurrence -> the recipe, on a GPU in bf16, and the mixer of a model with them."""
    found: dict[Linear | Mamba, tuple[Config, Mixer]] = {}
    for _, config, mixer in _mixers():
        if mixer.kind == "Mamba-2":
            mamba = config.model.mamba
            heads = (mamba.num_heads or 0) // (mamba.num_groups or 1)
            shape: Linear | Mamba = Mamba(mamba.state_dim, mamba.head_dim, heads, mamba.conv_kernel)
            found.setdefault(shape, (_in_bf16(config), mixer))
        if mixer.kind == "linear attention":
            sizes = config.model.linear_attention
            ratio = (sizes.num_value_heads or 0) // (sizes.num_key_heads or 1)
            own = sizes.decay, sizes.decay_floor, sizes.gate
            shape = Linear(sizes.key_head_dim, sizes.value_head_dim, ratio, sizes.conv_kernel, *own)
            found.setdefault(shape, (_in_bf16(config), mixer))
    return found


def text(demand: Demand) -> str:
    """`128/128, 4 heads a key, window`"""
    parts = [f"{demand.key_width}/{demand.value_width}", f"{demand.heads_per_key} heads a key"]
    if demand.has_window:
        parts.append("window")
    if demand.softcap is not None:
        parts.append(f"soft cap {demand.softcap:g}")
    if demand.is_deterministic:
        parts.append("deterministic")
    return ", ".join(parts)


def _demand(key_width: int, value_width: int, heads_per_key: int = 1, has_window: bool = False) -> Demand:
    return Demand("cuda", torch.bfloat16, key_width, value_width, heads_per_key, has_window)


class Refused(NamedTuple):
    """Layers that our code refuses because a package does: on these architectures the package must still refuse."""

    kernel: str
    demand: Demand
    architectures: Sequence[str]


REFUSED: Sequence[Refused] = (
    Refused(kernel_rates.FLASH4, _demand(192, 128, heads_per_key=4), ["sm_90a"]),
    Refused(kernel_rates.FLASH4, _demand(256, 256, has_window=True), ["sm_100a"]),
    Refused(kernel_rates.FLASH4, _demand(512, 512), ["sm_90a", "sm_100a"]),
    Refused(kernel_rates.FFPA, _demand(512, 512, heads_per_key=3), ["sm_90a"]),
)
