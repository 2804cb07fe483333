"""Defines planning tasks (a recipe without its layout, and the hardware that it runs on), and proposals for them.

A proposal is a layout with its settings, its predicted memory and its predicted time.  This module defines the
dimensions of the search, and makes a Config from a choice.  `candidates.py` lists the values of the dimensions, and
`search.py` finds the best ones.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm
from typing import Any, Literal, NamedTuple, get_args

from sft.config import Config, ModelConfig
from sft.config.keys import leaves, values
from sft.config.parallel import Shard
from sft.config.train import Recompute
from sft.estimate.attention_kernels import highest_tflops
from sft.estimate.constants import Constants
from sft.estimate.gpus import Gpu, Usable
from sft.estimate.lengths import Lengths
from sft.estimate.memory import Memory
from sft.estimate.step_time import StepTime
from sft.layers.adapters import Trained
from sft.layers.flops import TrainFlops
from sft.layers.matrices import ModelProducts
from sft.layers.mixers import softmax
from sft.parallel.layout import Layout

# Share of the model's FLOPs that the bound counts.  A run may not compute all of them: backward ends at the lowest
# trained weight.
_COUNTED = 0.9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster of equal nodes."""

    gpu: Gpu
    gpus_per_node: int
    fabric: str  # name of the network in FABRICS
    constants: Constants
    host_bytes: float  # host memory of a node that a run may use

    def nodes(self, num_gpus: int) -> int:
        """The number of nodes.  8 GPUs per node: 4 -> 1, 8 -> 1, 72 -> 9"""
        return -(-num_gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A recipe whose layout is to be planned.

    config   the recipe; its keys of the layout and of savings have no effect
    lengths  the lengths of documents
    tokens   number of tokens of the whole run, for GPU hours; None: unknown
    price    price of an hour of a GPU; None: no cost is given
    """

    name: str
    config: Config
    vocab_size: int
    trained: Trained
    lengths: Lengths
    hardware: Hardware
    tokens: float | None = None
    price: float | None = None

    @staticmethod
    def of(name: str, config: Config, *, hardware: Hardware, **fields: Any) -> "Task":
        """A task whose config has the sizes and bandwidths of `hardware`, which dynamic CP reads."""
        constants = hardware.constants
        bandwidths = {
            "intra_node_gb_s": float(constants.intra_gb_s.value),
            "inter_node_gb_s": float(constants.inter_gb_s.value),
        }
        parallel = _changed(config.parallel, {"gpus_per_node": hardware.gpus_per_node, **bandwidths})
        return Task(name=name, config=_changed(config, {"parallel": parallel}), hardware=hardware, **fields)

    @cached_property
    def products(self) -> ModelProducts:
        """The matrices of the model, which are the same for every layout."""
        return ModelProducts.of(self.config.model, self.trained, self.config.lora.rank or 0)

    @cached_property
    def least_gpu_s(self) -> float:
        """A lower bound of a step's GPU seconds on any layout: the layers' FLOPs at the highest rate of all kernels."""
        flops = TrainFlops.of(self.config.model, 0, self.trained, self.config.lora.rank or 0)
        tokens, counts = self.lengths.of_pack(self.config.data.seq_length)
        attention = (flops.per_token + flops.saved) * float(counts @ flops.cost(tokens))
        constants = self.hardware.constants
        rates = [rate for _, rate in constants.gemm_tflops.points]
        rates.append(highest_tflops(self.config, constants))
        pack_flops = self.config.data.seq_length * flops.per_token + attention
        return _COUNTED * pack_flops * self.config.train.global_batch_size / (max(rates) * 1e12)

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.data.seq_length

    def changed(self, **fields: Any) -> "Task":
        return replace(self, **fields)

    def with_packs(self, packs: int) -> "Task":
        """The task with another number of packs per step."""
        train = _changed(self.config.train, {"global_batch_size": packs})
        return self.changed(config=self.config.model_copy(update={"train": train}))

    def with_length(self, seq_length: int) -> "Task":
        """The task with packs of another length, and about as many tokens per step."""
        data = _changed(self.config.data, {"seq_length": seq_length})
        changed = self.changed(config=self.config.model_copy(update={"data": data}))
        return changed.with_packs(max(1, self.tokens_per_step // seq_length))


class Sizes(NamedTuple):
    """Sizes of a layout.  dp follows from the number of GPUs."""

    tp: int
    cp: int
    pp: int
    virtual_stages: int
    ep: int
    dynamic_cp: bool


class CpComm(NamedTuple):
    """The recipe's keys for the exchange of keys and values between cp ranks."""

    cp_comm: str
    cp_a2a: int | None


class Savings(NamedTuple):
    """Settings that save device memory, and cannot shorten a step, except `head_chunks`.  `Savings()` saves nothing.

    head_chunks: the most chunks of heads; `configured` takes the largest number that fits the layout.  It selects the
        portable backend, whose kernels may be faster, so all choices of one search have the same value
    """

    recompute: Recompute = "none"
    offload_fraction: float = 0.0
    optim_offload_fraction: float = 0.0
    mlp_tile: int | None = None
    chunk_size: int | None | Literal["auto"] = "auto"
    head_chunks: int | None = None


class Shards(NamedTuple):
    """The recipe's keys that say what the ranks of dp x cp divide among them."""

    shard: Shard = "optimizer"
    shard_size: int | None = None


class Choice(NamedTuple):
    """The settings that a proposal decides.  cp_comm: None: not chosen yet, counts as p2p"""

    sizes: Sizes
    cp_comm: CpComm | None
    savings: Savings
    shards: Shards = Shards()


RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)  # the more a value recomputes, the later it stands
P2P = CpComm("p2p", None)
# The keys of a recipe that a proposal decides.
PLANNED = (
    *("parallel.tp", "parallel.cp", "parallel.pp", "parallel.virtual_stages", "parallel.ep", "parallel.dynamic_cp"),
    *("parallel.shard", "parallel.shard_size", "parallel.cp_comm", "parallel.cp_a2a", "data.doc_multiple"),
    *("train.recompute", "train.offload_fraction", "train.mlp_tile", "optim.offload_fraction", "loss.chunk_size"),
    *("train.head_chunks", "checkpoint.async_save"),
)


def configured(base: Config, choice: Choice) -> Config:
    """`base` with these settings; data.doc_multiple becomes a multiple of 2 x cp.
    The result is not validated, because a search makes thousands of configs.  `written.recipe_text` validates its text.
    """
    sizes, savings = choice.sizes, choice.savings
    of_parallel = sizes._asdict() | (choice.cp_comm or P2P)._asdict() | choice.shards._asdict()
    parallel = _changed(base.parallel, of_parallel)
    of_train = {name: getattr(savings, name) for name in ("recompute", "offload_fraction", "mlp_tile")}
    train = _changed(base.train, {**of_train, "head_chunks": _head_chunks(base.model, sizes.tp, savings.head_chunks)})
    changes: dict[str, Any] = {"parallel": parallel, "train": train}
    if base.data.doc_multiple % (2 * sizes.cp):
        changes["data"] = _changed(base.data, {"doc_multiple": lcm(base.data.doc_multiple, 2 * sizes.cp)})
    if savings.optim_offload_fraction != base.optim.offload_fraction:
        changes["optim"] = _changed(base.optim, {"offload_fraction": savings.optim_offload_fraction})
    if savings.chunk_size != base.loss.chunk_size:
        changes["loss"] = _changed(base.loss, {"chunk_size": savings.chunk_size})
    return base.model_copy(update=changes)


def _head_chunks(model: ModelConfig, tp: int, most: int | None) -> int | None:
    """The largest number of chunks that divides `most` and a rank's heads.  most 8, 8 key heads, tp 2 -> 4"""
    chunks = 1 if most is None else gcd(most, *(heads // tp for heads in softmax.heads(model).values()))
    return chunks if chunks > 1 else None


def without_copies(config: Config) -> Config:
    """`config` with checkpoint.async_save: false, for hosts without memory for copies of the state."""
    return config.model_copy(update={"checkpoint": _changed(config.checkpoint, {"async_save": False})})


def _changed(section: Any, values: dict[str, Any]) -> Any:
    return section.model_copy(update=values)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One layout with its settings, predicted time and predicted memory."""

    choice: Choice
    config: Config
    layout: Layout
    time: StepTime
    memory: Memory
    usable: Usable

    @property
    def num_gpus(self) -> int:
        return self.layout.world_size

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory of a node."""
        return self.memory.host_of_node(self.config.parallel.gpus_per_node, self.num_gpus)

    @property
    def group(self) -> tuple[int, ...]:
        """(tp, cp, pp, dp, ep).  Reports show only the best proposal of each group.

        The proposals of a group differ in virtual stages, dynamic CP, cp_comm, shards and savings.
        """
        sizes = self.choice.sizes
        return (sizes.tp, sizes.cp, sizes.pp, self.layout.dp, sizes.ep)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe keys that the proposal sets to a value other than the default.
        {"parallel.tp": 2, "parallel.cp": 8, "train.recompute": "selective"}
        """
        planned = values(self.config)
        return {key: planned[key] for key in PLANNED if planned[key] != leaves()[key].default}
