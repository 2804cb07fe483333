"""Counts the parameters of a model, and the FLOPs of tokens and of attention over documents.  Arithmetic only."""

import math
from dataclasses import dataclass

import numpy as np

from sft.config import ModelConfig
from sft.layers.adapters import EMBEDDING, HEAD, Trained
from sft.layers.kinds import all_layer_groups

ASSUMED_TFLOPS = 989.0  # the peak if log.peak_tflops is null: dense bf16 of an H100 SXM
# Share of the peak that a run is assumed to reach.  On one H200, steps with long packs had an MFU of 0.30 to 0.34 with
# FlashAttention-2, and of 0.48 with FlashAttention-4 (docs/numbers/h200.md).
ASSUMED_SHARE = 0.35


def num_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, with `vocab_size` rows in the embedding (no padding rows).

    hidden size 4, MLP width 8, 2 heads of width 2, 1 layer, tied embeddings, 10 tokens:
    embedding 40, qkv 48, proj 16, fc1 64, fc2 32, two norms 8, final norm 4 -> 212
    """
    embeddings = vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    layers = sum(len(group.numbers) * group.parameters.total for group in all_layer_groups(model))
    return embeddings + layers + model.hidden_size


def active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters that one token uses: all except those of experts that the token does not choose.

    Qwen3-30B-A3B: 3,353,032,704 of 30,532,122,624
    """
    unused = 0
    for group in all_layer_groups(model):
        layer = group.parameters
        unused += len(group.numbers) * (layer.num_experts - (model.moe.top_k or 0)) * layer.expert
    return num_parameters(model, vocab_size) - unused


def describe_parameters(model: ModelConfig, vocab_size: int) -> str:
    """The numbers of all parameters and of those that a token uses: `30,532,122,624 (3,353,032,704 for a token)`"""
    total, active = num_parameters(model, vocab_size), active_parameters(model, vocab_size)
    return f"{total:,}" + (f" ({active:,} for a token)" if active < total else "")


@dataclass(frozen=True)
class AttentionCost:
    """The cost of attention over a document.  The unit is the cost of one token in the layers without attention.

        cost = length ** 2 / crossover + m * (2 * length - m) / window_crossover, with m = min(length, window)

    crossover         length at which full attention takes as many FLOPs as all other computation of the layers
    window_crossover  the same length for the layers with a sliding window, as if they had no window
    """

    crossover: float = math.inf
    window: int | None = None
    window_crossover: float = math.inf

    @staticmethod
    def of(model: ModelConfig) -> "AttentionCost":
        """The cost for a model.
        Llama 8B: crossover 53,248.  With a window of 4,096 in half of the layers: both crossovers 106,496
        """
        of_layers, full, windows = sum(_products(model)), 0.0, 0.0
        for group in all_layer_groups(model):
            width = len(group.numbers) * group.mixer.pair_width
            if group.mixer.window is None:
                full += width
            else:
                windows += width
        return AttentionCost(
            crossover=of_layers / full if full else math.inf,
            window=model.sliding_window,
            window_crossover=of_layers / windows if windows else math.inf,
        )

    def __call__(self, lengths: np.ndarray, depths: np.ndarray | None = None) -> np.ndarray:
        """The cost of each document, float64 [n], in tokens.

        lengths [10, 100], crossover 10, window 20, window_crossover 10 -> [20, 1360]
        depths: number of tokens before each document, to which its tokens also attend (`Branches.depths`); None: 0
        """
        if depths is not None:
            return self(np.asarray(lengths, dtype=np.float64) + depths) - self(depths)
        real = np.asarray(lengths, dtype=np.float64)
        cost = real * (real / self.crossover)
        if self.window is not None:
            nearest = np.minimum(real, self.window)
            cost = cost + nearest * ((2 * real - nearest) / self.window_crossover)
        return cost

    def equal_length(self) -> float:
        """The length at which attention costs as much as all other computation of the layers; inf: no length does."""
        if self.window is None:
            return self.crossover
        low, high = 0.0, 2.0**40
        if self(np.array([high]))[0] < high:
            return math.inf
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if self(np.array([middle]))[0] >= middle else (middle, high)
        return high


def _products(model: ModelConfig) -> tuple[int, int]:
    """Multiplications per token in all layers: (with weights, with states of linear attention)."""
    top_k = model.moe.top_k or 0
    layers = [(group.parameters, len(group.numbers)) for group in all_layer_groups(model)]
    weights = sum(number * (layer.products + top_k * layer.expert_products) for layer, number in layers)
    return weights, sum(number * layer.state_products for layer, number in layers)


@dataclass(frozen=True)
class TrainFlops:
    """FLOPs of forward and backward.

    Only matrix products count.  A trained parameter that a token uses costs 2 FLOPs in forward and 4 in backward.  A
    frozen parameter costs 2 in backward.  This also counts for the lowest frozen layers, which backward may not reach.
    Causal attention costs heads * (key width + value width) FLOPs per layer and squared length in forward, and twice
    that in backward.  The cost of a token in linear attention does not depend on the length.

    per_token  FLOPs per token in the layers, with linear attention, without softmax attention
    per_label  FLOPs per supervised token in the loss head.  With multi-token prediction, in both heads, as if both had
               the same number of labels
    cost       FLOPs of softmax attention over a document, divided by per_token + saved
    saved      FLOPs per token that training all weights would take in addition
    """

    per_token: float
    per_label: float
    cost: AttentionCost
    saved: float = 0.0

    @staticmethod
    def of(model: ModelConfig, vocab_size: int, trained: Trained = Trained(), rank: int = 0) -> "TrainFlops":
        """The FLOPs of a model.  trained: its trained part; rank: rank of its adapters

        the example of `num_parameters` -> TrainFlops(6 * 160, 6 * 40, AttentionCost(40)): 24 per squared length"""
        (layers, states), head = _products(model), vocab_size * model.hidden_size * (2 if model.has_mtp else 1)
        if trained.whole is None:
            return TrainFlops(6.0 * (layers + states), 6.0 * head, AttentionCost.of(model))
        share = (model.moe.top_k or 0) / (model.moe.num_experts or 1)  # share of the experts that a token uses
        matrices = [weight for weight in trained.whole if weight.layer is not None and len(weight.shape) > 1]
        used = sum(weight.size * (share if weight.is_expert else 1.0) for weight in matrices)
        factors = sum(weight.num_trained(rank) * (share if weight.num_experts else 1.0) for weight in trained.adapted)
        trains_head = any(weight.key == (EMBEDDING if model.tie_embeddings else HEAD) for weight in trained.whole)
        per_token = 4.0 * layers + 6.0 * states + 2.0 * used + 6.0 * factors
        per_label = (6.0 if trains_head else 4.0) * head
        return TrainFlops(per_token, per_label, AttentionCost.of(model), saved=6.0 * (layers + states) - per_token)

    def attention(self, lengths: np.ndarray, depths: np.ndarray | None = None) -> float:
        """The FLOPs of softmax attention over documents of these lengths.  depths: see `AttentionCost.__call__`"""
        return (self.per_token + self.saved) * float(self.cost(lengths, depths).sum())
