"""A model may mix all kinds of layers: its losses and gradients equal those of a float64 loop over layers.

No released model has these mixtures, so this file contains the reference, with our names of weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sft.batch import Sample
from sft.mcore import initial_weights
from sft.mcore.engine import Engine
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.weights import trained
from tests.ranks import scenarios
from tests.ranks.hf_models import MEAN_LOSS_TOLERANCE, check_token_losses
from tests.ranks.layouts import CP, PP, SP
from tests.ranks.pool import Ranks
from tests.unit.fixtures.recurrence import recurrence

HEADS, DIM, EPS = 8, 4, 1e-5  # sizes of RECIPE
KEY_HEADS, VALUE_HEADS, K, V = 2, 4, 6, 5
LATENT, PLAIN, ROTARY, VALUE = 12, 6, 4, 5
SSD_HEADS, GROUPS, P, N, LOW = 8, 4, 3, 6, 0.9  # of Mamba-2; some time steps are raised to LOW
WINDOW, WINDOW_BASE, EXPERTS, TOP_K = 24, 500.0, 4, 2
BLOCK_WEIGHT = 0.3  # weight of the loss of multi-token prediction
# Relative to a gradient's norm, for four layers in fp32; measured at most 1.8e-5, and 5.2e-5 for decays, whose gradient
# is a sum over all tokens whose terms cancel.  A window that is one token shorter changes losses by 1e-2.
GRADIENT_TOLERANCE = 4e-5
DECAY_TOLERANCE = 1.5e-4

LINEAR = [
    "model.init_std=0.08",  # so large that decays have an effect
    *(f"model.linear_attention.num_key_heads={KEY_HEADS}", f"model.linear_attention.num_value_heads={VALUE_HEADS}"),
    *(f"model.linear_attention.key_head_dim={K}", f"model.linear_attention.value_head_dim={V}"),
]
OWN_HEADS = [  # layers without a window have wider heads than layers with one, and fewer heads
    f"model.head_dim={DIM}",
    "model.full_attention.head_dim=8",
    "model.full_attention.num_query_groups=2",
    f"model.rope.window_base={WINDOW_BASE}",
]
MOE = [f"model.moe={{num_experts: {EXPERTS}, top_k: {TOP_K}, dense_layers: 1}}", "model.qkv_bias=false"]
MODELS: dict[str, list[str]] = {
    # linear, window, linear, full; norms before and after; the first layer has no experts
    "linear x windows x experts": [
        *LINEAR,
        "model.linear_attention.layers=[1,3]",
        f"model.sliding_window={WINDOW}",
        "model.sliding_window_layers=[2]",
        "model.norm_placement=both",
        *MOE,
    ],
    # window without experts, full, linear, full
    "own heads x linear x experts": [
        *LINEAR,
        "model.linear_attention.layers=[3]",
        f"model.sliding_window={WINDOW}",
        "model.sliding_window_layers=[1]",
        *OWN_HEADS,
        *MOE,
    ],
    # full without experts, window, window, full; then the block's layer, full: its kind follows the pattern of kinds
    "own heads x multi-token prediction": [
        f"model.sliding_window={WINDOW}",
        "model.sliding_window_layers=[2,3]",
        *OWN_HEADS,
        *MOE,
        "train.mtp=joint",
        f"train.mtp_loss_weight={BLOCK_WEIGHT}",
    ],
    # Mamba-2, linear, Mamba-2, full
    "Mamba-2 x linear": [
        *LINEAR,
        *("model.linear_attention.layers=[2]", "model.qkv_bias=false"),
        f"model.mamba={{layers: [1, 3], num_heads: {SSD_HEADS}, num_groups: {GROUPS}, head_dim: {P}, state_dim: {N},"
        f" min_time_step: {LOW}}}",
    ],
    # linear, latent, latent, linear
    "linear x latent": [
        *LINEAR,
        "model.linear_attention.layers=[1,4]",
        *(f"model.latent_attention.kv_lora_rank={LATENT}", f"model.latent_attention.v_head_dim={VALUE}"),
        *(f"model.latent_attention.qk_nope_head_dim={PLAIN}", f"model.latent_attention.qk_rope_head_dim={ROTARY}"),
        *("model.num_query_groups=null", "model.qk_norm=false", "model.qkv_bias=false"),
    ],
}
BASES = {  # rotary bases of layers with a window, by number of the layer
    "linear x windows x experts": {2: 10_000.0},
    "own heads x linear x experts": {1: WINDOW_BASE},
    "own heads x multi-token prediction": {2: WINDOW_BASE, 3: WINDOW_BASE},
}
LAYOUTS = [(4, [*SP, *CP, "train.recompute=selective"]), (4, [*PP, *CP, "train.recompute=full"])]


# --- the reference -----------------------------------------------------------------------------------------------


class Layer:
    """Computes one layer for one document in float64.

    weights: by name within the layer; base: base of rotary positions
    """

    def __init__(self, weights: Mapping[str, Tensor], window: int | None, base: float) -> None:
        self.weights, self.window, self.base = weights, window, base

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.after("post_self_attn_layernorm", self.mix(self.norm("input_layernorm", x)))
        return x + self.after("post_mlp_layernorm", self.mlp(self.norm("pre_mlp_layernorm", x)))

    def norm(self, name: str, x: Tensor, eps: float = EPS) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weights[f"{name}.weight"]

    def after(self, name: str, x: Tensor) -> Tensor:
        return self.norm(name, x) if f"{name}.weight" in self.weights else x

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def mix(self, x: Tensor) -> Tensor:
        if "self_attention.in_proj.weight" in self.weights:
            return self.mamba(x) if "self_attention.D" in self.weights else self.delta_rule(x)
        return self.latent(x) if "self_attention.linear_q_proj.weight" in self.weights else self.softmax(x)

    def softmax(self, x: Tensor) -> Tensor:
        projected = self.linear("self_attention.linear_qkv", x)
        dim = len(self.weights["self_attention.q_layernorm.weight"])
        groups = (projected.shape[1] // dim - HEADS) // 2
        rows = projected.view(len(x), groups, -1, dim)
        q, k, v = rows[:, :, :-2].flatten(1, 2), rows[:, :, -2], rows[:, :, -1]
        q, k = self.norm("self_attention.q_layernorm", q), self.norm("self_attention.k_layernorm", k)
        q, k = (rotated(each, self.base) for each in (q, k))
        k, v = (each.repeat_interleave(HEADS // groups, 1) for each in (k, v))
        return self.linear("self_attention.linear_proj", attend(q, k, v, self.window))

    def latent(self, x: Tensor) -> Tensor:
        q = self.linear("self_attention.linear_q_proj", x).view(len(x), HEADS, PLAIN + ROTARY)
        latent, rotary = self.linear("self_attention.linear_kv_down_proj", x).split([LATENT, ROTARY], -1)
        up = self.linear("self_attention.linear_kv_up_proj", self.norm("self_attention.kv_layernorm", latent, 1e-6))
        k, v = up.view(len(x), HEADS, PLAIN + VALUE).split([PLAIN, VALUE], -1)
        q = torch.cat((q[..., :PLAIN], rotated(q[..., PLAIN:], self.base)), -1)
        k = torch.cat((k, rotated(rotary[:, None], self.base).expand(-1, HEADS, -1)), -1)
        return self.linear("self_attention.linear_proj", attend(q, k, v, None))

    def delta_rule(self, x: Tensor) -> Tensor:
        keys, values = KEY_HEADS * K, VALUE_HEADS * V
        widths = [2 * keys + values, values, VALUE_HEADS, VALUE_HEADS]
        mixed, z, b, a = self.linear("self_attention.in_proj", x).split(widths, -1)
        kernel = self.weights["self_attention.conv1d.weight"]
        mixed = F.silu(F.conv1d(F.pad(mixed.T, (kernel.shape[-1] - 1, 0)), kernel, groups=len(kernel)).T)
        q, k, v = mixed.split([keys, keys, values], -1)
        a_log, bias = (self.weights[f"self_attention.{name}"] for name in ("A_log", "dt_bias"))
        inputs = Inputs(
            q=q.view(-1, KEY_HEADS, K),
            k=k.view(-1, KEY_HEADS, K),
            v=v.view(-1, VALUE_HEADS, V),
            g=-a_log.exp() * F.softplus(a + bias),
            beta=b.sigmoid(),
        )
        out, _ = recurrence(inputs, [0, len(x)], [None])
        gated = self.norm("self_attention.out_norm", out) * F.silu(z.view(-1, VALUE_HEADS, V))
        return self.linear("self_attention.out_proj", gated.flatten(1))

    def mamba(self, x: Tensor) -> Tensor:
        own = {name.removeprefix("self_attention."): weight for name, weight in self.weights.items()}
        inner, groups = SSD_HEADS * P, GROUPS * N
        z, mixed, raw = self.linear("self_attention.in_proj", x).split([inner, inner + 2 * groups, SSD_HEADS], -1)
        kernel = own["conv1d.weight"]
        mixed = F.pad(mixed.T, (kernel.shape[-1] - 1, 0))
        values, b, c = F.silu(F.conv1d(mixed, kernel, own["conv1d.bias"], groups=len(kernel)).T).split(
            [inner, groups, groups], -1
        )
        b, c = (y.view(-1, GROUPS, N).repeat_interleave(SSD_HEADS // GROUPS, 1) for y in (b, c))
        dt, values = F.softplus(raw + own["dt_bias"]).clamp(min=LOW), values.view(-1, SSD_HEADS, P)
        decays = torch.exp(-own["A_log"].exp() * dt)[..., None, None]
        state, outputs = x.new_zeros(SSD_HEADS, N, P), []
        for t in range(len(x)):
            state = decays[t] * state + torch.einsum("hn,hp->hnp", b[t], dt[t, :, None] * values[t])
            outputs.append(torch.einsum("hn,hnp->hp", c[t], state))
        y = (torch.stack(outputs) + own["D"][:, None] * values).flatten(1) * F.silu(z)
        y = y.view(len(x), GROUPS, -1)
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).flatten(1) * own["norm.weight"]
        return self.linear("self_attention.out_proj", y)

    def mlp(self, x: Tensor) -> Tensor:
        if "mlp.router.weight" not in self.weights:
            return self.gated("mlp", x)
        scores = self.linear("mlp.router", x).softmax(-1)
        top, chosen = scores.topk(TOP_K, -1)
        share = torch.zeros_like(scores).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        outputs = [self.gated(f"mlp.experts.local_experts.{number}", x) for number in range(EXPERTS)]
        return (share[..., None] * torch.stack(outputs, 1)).sum(1)

    def gated(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.linear_fc1", x).chunk(2, -1)
        return self.linear(f"{name}.linear_fc2", F.silu(gate) * up)


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotates [t, heads, d]: pairs element i of the first half of a head with element i of the second half."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)).double(), base ** (-torch.arange(half).double() / half))[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | (distance >= (window or len(q)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


def reference_losses(
    weights: Mapping[str, Tensor], tokens: np.ndarray, bases: Mapping[int, float]
) -> tuple[Tensor, Tensor]:
    """-log p of each token of one document except the first; and, if there is a block, of each except the first two by
    the block.

    bases: rotary bases of the layers with a window, by number of the layer from 1
    """
    ids = torch.from_numpy(tokens.astype(np.int64))
    table, output = weights["embedding.word_embeddings.weight"], weights["output_layer.weight"][: scenarios.VOCAB].T
    x = table[ids]
    for number in range(4):
        own = inside(weights, f"decoder.layers.{number}.")
        x = Layer(own, WINDOW if number + 1 in bases else None, bases.get(number + 1, 10_000.0))(x)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weights["decoder.final_layernorm.weight"]
    losses = F.cross_entropy(x[:-1] @ output, ids[1:], reduction="none")
    block = Layer(inside(weights, "multi_token."), None, 10_000.0)
    if not block.weights or len(ids) < 3:
        return losses, losses[:0]
    joined = torch.cat((block.norm("enorm", table[ids[1:-1]]), block.norm("hnorm", x[:-2])), -1)
    after = Layer(inside(block.weights, "transformer_layer."), None, 10_000.0)(block.linear("eh_proj", joined))
    second = block.norm("final_layernorm", after) @ output
    return losses, F.cross_entropy(second, ids[2:], reduction="none")


def inside(weights: Mapping[str, Tensor], first: str) -> dict[str, Tensor]:
    """The weights whose names begin with `first`, by the rest of their names."""
    return {name.removeprefix(first): weight for name, weight in weights.items() if name.startswith(first)}


# --- ours --------------------------------------------------------------------------------------------------------


@contextmanager
def running(overrides: Sequence[str]) -> Iterator[Engine]:
    """An engine for a model whose weights have no names in Hugging Face files."""
    with mock.patch.object(trained, "_check_mtp"), varied_weights(overrides), scenarios.running(overrides) as engine:
        yield engine


@contextmanager
def varied_weights(overrides: Sequence[str]) -> Iterator[None]:
    """With Mamba-2, no weight is 0 or 1 for all of its elements, and states last for several tokens, on any layout."""
    original = initial_weights._set_part

    def set_part(shard: Any, model: Any, seed: int) -> None:
        original(shard, model, seed)
        if len(shard.data.shape) == 1 and shard.data.unique().numel() == 1:
            before, axes = shard.data.clone(), shard.prepend_axis_num
            sizes = {"shape": shard.global_shape[axes:], "offset": shard.global_offset[axes:]}
            initial_weights.draw_in_sequence(shard.data, f"{shard.key}{shard.global_offset[:axes]}", 0.2, **sizes)
            shard.data.add_(before)
        if shard.key.endswith("A_log"):
            shard.data.sub_(2.5)

    with mock.patch.object(initial_weights, "_set_part", set_part if "mamba" in str(overrides) else original):
        yield


def weights_and_gradients(overrides: Sequence[str], packs: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    with running(overrides) as engine:
        (chunk,) = engine.chunks
        weights = {name: param.detach().numpy().copy() for name, param in chunk.module.named_parameters()}
        losses = scenarios.losses_of(engine, packs)
        chunk.train()
        chunk.zero_grad_buffer()
        totals = engine._run([scenarios.microbatch_of(engine, samples) for samples in packs], forward_only=False)
        grads = {name: param.main_grad.numpy().copy() for name, param in chunk.module.named_parameters()}
        return {"weights": weights, "losses": losses, "gradients": grads, "loss": totals.objective / totals.num_tokens}


def losses(overrides: Sequence[str], packs: Sequence[Sequence[Sample]]) -> list[Any]:
    with running(overrides) as engine:
        return scenarios.losses_of(engine, packs)


@pytest.mark.parametrize("name", MODELS)
def test_crossed_kinds_have_the_losses_and_gradients_of_a_loop(ranks: Ranks, name: str) -> None:
    corpus = scenarios.SkewedCorpus((90, 37, 64, 5))
    packs = [[corpus.sample(0), corpus.sample(1)], [corpus.sample(2), corpus.sample(3)]]
    (one,) = ranks(1).run(weights_and_gradients, MODELS[name], packs)
    weights = {key: torch.from_numpy(value).double().requires_grad_() for key, value in one["weights"].items()}
    both = [[reference_losses(weights, sample.tokens, BASES.get(name, {})) for sample in pack] for pack in packs]
    expected = [[first for first, _ in pack] for pack in both]
    check_token_losses([one["losses"]], expected, packs)
    masks = [[torch.from_numpy(sample.weights[1:] > 0) for sample in pack] for pack in packs]
    pairs = [(loss, mask) for pack, own in zip(expected, masks) for loss, mask in zip(pack, own)]
    mean = torch.cat([loss[mask] for loss, mask in pairs]).mean()
    assert one["loss"] == pytest.approx(float(mean.detach()), rel=MEAN_LOSS_TOLERANCE)
    of_block = [
        second[mask[1:]] for own, found in zip(masks, both) for mask, (_, second) in zip(own, found) if len(second)
    ]
    if of_block:
        mean = mean + BLOCK_WEIGHT * torch.cat(of_block).mean()
    mean.backward()
    gradients = {key: weight.grad.numpy() for key, weight in weights.items()}
    scenarios.check_parameters(one["gradients"], gradients, GRADIENT_TOLERANCE, DECAY_TOLERANCE)
    for world_size, overrides in LAYOUTS:
        check_token_losses(ranks(world_size).run(losses, [*MODELS[name], *overrides], packs), expected, packs)
