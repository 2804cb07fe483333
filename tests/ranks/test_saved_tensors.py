"""The tensors that layers save for backward: their bytes, and that fewer saved bytes leave the gradients unchanged."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sft.estimate.stage import Stage
from sft.estimate.working_sets import StageWork
from sft.layers.adapters import Trained
from sft.mcore.activations import offload, saved_tensors
from tests.ranks import mtp_models, scenarios
from tests.ranks.alive import Alive
from tests.ranks.layouts import GEMMA, GRADIENT_TOLERANCE, MODELS
from tests.ranks.pool import Ranks

# Relative to the norm of a gradient, fp32: a weight's gradient is summed tile by tile, or in another order if heads are
# gathered in groups.
TILE_TOLERANCE = 1e-6
# for a layer of experts: the count omits a few masks and indices, which depend on the version of core
MASKS_TOLERANCE = 0.02
PACKS = [[1, 2, 3, 5], [0]]
TOKENS = 256
LONG = 1024
LONGER = [f"data.seq_length={LONG}", "train.global_batch_size=1", "run.precision=bf16"]
WIDE = [
    *("model.hidden_size=64", "model.ffn_hidden_size=192", "model.num_attention_heads=8", "model.num_query_groups=2"),
    *("model.head_dim=16", "run.precision=bf16", "train.global_batch_size=1"),
]
MOE = ["model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=32", "model.moe.aux_loss_coef=1e-2"]
DELTA = (
    "model.linear_attention={layers: ALL, num_key_heads: 2, num_value_heads: 4, key_head_dim: 16, value_head_dim: 32}"
)
KIMI = DELTA.replace("heads: 2", "heads: 4").replace("}", ", decay: channel, gate: sigmoid}")
LOW_RANK = KIMI.replace("}", ", low_rank: 8}")
MAMBA = "model.mamba={layers: ALL, num_heads: 8, num_groups: 2, head_dim: 16, state_dim: 24}"
LATENT = [
    *("model.latent_attention.kv_lora_rank=20", "model.latent_attention.q_lora_rank=16"),
    *("model.latent_attention.qk_nope_head_dim=8", "model.latent_attention.qk_rope_head_dim=4"),
    "model.latent_attention.v_head_dim=10",
    *("model.head_dim=null", "model.num_query_groups=null", "model.qk_norm=false", "model.qkv_bias=false"),
]
# A layer with a window before each layer that has other heads, and whose keys are also values.
KINDS = [
    *("model.sliding_window=16", "model.sliding_window_layers=ODD", "model.value_norm=true", "model.layer_scalar=true"),
    *("model.full_attention={head_dim: 32, num_query_groups: 1, keys_as_values: true}", "model.qkv_bias=false"),
    "model.rope.window_base=3e3",
]

# A layer that is only attention before each layer that is only an MLP, without a gate.
HALVES = ["model.halves={without_mlp: ODD, without_mixer: EVEN}", "model.activation=relu2"]


def one_document(engine: Any) -> Any:
    corpus = scenarios.SkewedCorpus([TOKENS])
    return scenarios.microbatch_of(engine, [corpus.sample(0)])


def forward(engine: Any, microbatch: Any) -> torch.Tensor:
    for chunk in engine.chunks:
        chunk.train()
    hidden, _ = engine._forward_step(lambda *told: None, iter([("microbatch 1 of 1", microbatch)]), engine.chunks[0])
    assert isinstance(hidden, torch.Tensor)
    return hidden


def bytes_kept(overrides: Sequence[str], num_layers: int) -> int:
    """The bytes per token that exist after a forward pass."""
    numbers = range(1, num_layers + 1)
    named = {"ALL": numbers, "ODD": numbers[::2], "EVEN": numbers[1::2]}
    for name, layers in named.items():
        overrides = [text.replace(name, str([*layers])) for text in overrides]
    with scenarios.running([*WIDE, *overrides, f"model.num_layers={num_layers}"]) as engine:
        microbatch = one_document(engine)
        engine._set_denominator([microbatch])  # experts have losses of their own, which need a denominator
        with Alive() as alive:
            hidden = forward(engine, microbatch)
        gc.collect()
        assert hidden.shape[0] == TOKENS
        return alive.num_bytes() // TOKENS  # linear attention also saves 32 bytes for the decays of each layer


@pytest.mark.parametrize(
    "overrides, expected",
    [
        # bf16, 2 bytes: hidden 64 (128 bytes), 8 heads of 16 (256), 2 key/value heads of 16 (64), ffn 192 (384)
        # the layer's input 128, and the input of the MLP half 128
        # attention: query 256, key 64, value 64, output 256, log-sum-exp 8 x 4; fp32 scales of the norms 4 + (8 + 2) x
        # 4
        (["train.recompute=selective"], 128 + 128 + 256 + 64 + 64 + 256 + 32 + 4 + 40),
        (["train.recompute=selective", "model.qk_norm=false"], 128 + 128 + 256 + 64 + 64 + 256 + 32 + 4),
        # norms after attention and MLP: the projected output of attention 128; each norm across heads has one scale, 4
        (
            ["train.recompute=selective", "model.norm_placement=post", "model.qk_norm_across_heads=true"],
            128 + 128 + 128 + 256 + 64 + 64 + 256 + 32 + 4 + 8,
        ),
        # norms before and after: the first case, plus the projected output of attention, 128, and the fp32 scale of its
        # norm
        (["train.recompute=selective", "model.norm_placement=both"], 972 + 128 + 4),
        # without recomputation also: normed input, 128; normed query and key, 320; normed input and the output of the
        # MLP, each with a scale of 4; gate and up, and their product (GeGLU)
        (
            ["train.recompute=none", "model.norm_placement=both", "model.activation=geglu"],
            972 + 128 + 4 + 128 + 320 + 2 * (128 + 4) + 768 + 384,
        ),
        (["train.recompute=full"], 128),
        # the input 128, attention's output 256, log-sum-exp 8 x 4
        (["train.recompute=attention_kept"], 128 + 256 + 32),
        # also: outputs of both norms 2 x 128, fp32 scale of the second one 4, normed query and key 320;
        # inside the MLP: gate and up 768, gate after silu 384, up plus an offset of 0 (core) 384, their product 384
        (["train.recompute=none"], 972 + 256 + 4 + 320 + 768 + 384 + 384 + 384),
        # GeGLU saves gate and up, and their product
        (["train.recompute=none", "model.activation=geglu"], 972 + 256 + 4 + 320 + 768 + 384),
        # the output gate in fp32, and the gated output
        (["train.recompute=selective", "model.attention_output_gate=true"], 972 + 512 + 256),
        # values of 8 elements: value 32 and output 128 instead of 64 and 256; the gates of 8 heads in fp32, 32, and in
        # bf16, 16; the gated output
        (
            ["train.recompute=selective", "model.value_head_dim=8", "model.value_multiplier=0.5"]
            + ["model.attention_head_gate=softplus", "model.qk_norm_after_rotary=true"],
            972 - 32 - 128 + 48 + 128,
        ),
        # selective recomputes all of linear attention; 4 is the fp32 scale of the norm before it
        ([DELTA, "train.recompute=selective"], 128 + 128 + 4),
        ([DELTA, "train.recompute=attention_kept"], 128 + 256),
        # q and k 2 x 16 (32), v and z 4 x 32 (128): projections 656, q, k and v 384, decays 3 x 16, beta 8, output 256,
        # fp32 scales of the gated norm 16; the bytes outside of attention of the first case without recomputation;
        # output of the gated norm 256
        ([DELTA, "train.recompute=none"], 260 + 656 + 384 + 56 + 256 + 16 + 256 + 4 + 256 + 768 + 384 + 384 + 384),
        # the last case, and beta of 4 heads before its factor
        (
            [DELTA.replace("}", ", beta_factor: 2.0}"), "train.recompute=none"],
            260 + 656 + 384 + 56 + 256 + 16 + 256 + 4 + 256 + 768 + 384 + 384 + 384 + 8,
        ),
        # decays of channels, 4 x 16 (64): projections of q and k 256, v and z 512, beta 8, decays 128; q, k, v 512;
        # decays 64 x 12; the rest as above
        ([KIMI, "train.recompute=none"], 260 + 904 + 512 + 768 + 8 + 256 + 16 + 256 + 4 + 256 + 768 + 384 + 384 + 384),
        # two inner values of 8, in place of the projection of decays
        ([LOW_RANK, "train.recompute=none"], 260 + 808 + 512 + 776 + 256 + 16 + 256 + 4 + 256 + 768 + 384 + 384 + 384),
        # Mamba-2: z, x of 8 x 16 (128), B, C of 2 x 24 (48), dt 8: projections 720, x, B and C 448, time steps and
        # decays 2 x 32, output 256, fp32 scales of 2 groups 8; the bytes outside of attention; output of the norm 256
        ([MAMBA, "train.recompute=selective"], 128 + 128 + 4),
        ([MAMBA, "train.recompute=attention_kept"], 128 + 256),
        ([MAMBA, "train.recompute=none"], 260 + 720 + 448 + 64 + 256 + 8 + 256 + 4 + 256 + 768 + 384 + 384 + 384),
        # latent attention: 2 x 24 (latent and rotary key); 8 queries of 12 (192), output 8 x 10 (160), log-sum-exp 32;
        # both latents before their norms, 2 x 16 and 2 x 20, each with an fp32 scale of 4
        ([*LATENT, "train.recompute=selective"], 260 + 48 + 192 + 160 + 32 + 36 + 44),
        ([*LATENT, "train.recompute=attention_kept"], 128 + 160 + 32),
        # gates of 8 heads in fp32 and bf16, and the gated output 160
        ([*LATENT, "model.latent_attention.head_gate=true", "train.recompute=selective"], 772 + 32 + 16 + 160),
        # keys and values of 22 elements for each of 8 heads (352), fewer bytes than 2 x 204 of the latent and rotary
        # key (408)
        (
            [*LATENT, "model.latent_attention.kv_lora_rank=200", "train.recompute=selective"],
            260 + 408 + 192 + 160 + 32 + 36 + 404 + 352,
        ),
        # without recomputation also: normed input, 128, and normed latent of queries, 32
        (
            [*LATENT, "train.recompute=none"],
            260 + 48 + 192 + 160 + 32 + 36 + 44 + 128 + 32 + 128 + 4 + 768 + 384 + 384 + 384,
        ),
        # the mean of two layers: the first case, plus 2 fp32 scales of norms of values; and a layer with query 512, key
        # 64 (and no value), output 512, log-sum-exp 32, fp32 scales of norms 4 + (8 + 1 + 1) x 4
        ([*KINDS, "train.recompute=selective"], (972 + 8 + 128 + 128 + 512 + 64 + 512 + 32 + 4 + 40) // 2),
        # without recomputation also: normed values, 64 and 64, and normed queries and keys, 320 and 576
        (
            [*KINDS, "train.recompute=none"],
            (980 + 1420 + 2 * (256 + 4 + 768 + 384 + 384 + 384) + 64 + 64 + 320 + 576) // 2,
        ),
        # the mean of two layers: only attention, the first case without the input of the MLP, 128; and only an MLP, 128
        ([*HALVES, "train.recompute=selective"], (844 + 128) // 2),
        ([*HALVES, "train.recompute=attention_kept"], (128 + 256 + 32 + 128) // 2),
        # without recomputation also: normed input, 128, normed query and key, 320; normed input of the MLP, its scale,
        # the projection, 384, and its activation, 384
        ([*HALVES, "train.recompute=none"], (844 + 128 + 320 + 128 + 128 + 4 + 384 + 384) // 2),
        # with tiles, neither the inside of the MLP nor the output of its norm is saved
        (["train.recompute=none", "train.mlp_tile=64"], 972 + 128 + 320),
    ],
)
def test_bytes_of_a_layer_and_token(ranks: Ranks, overrides: list[str], expected: int) -> None:
    (two,), (four,) = (ranks(1).run(bytes_kept, overrides, layers) for layers in (2, 4))
    assert (four - two) / 2 == expected


def bytes_by_equations(overrides: Sequence[str]) -> float:
    """The bytes per token of `StageWork.saved_by_layers`."""
    with scenarios.running(overrides) as engine:
        stage = Stage.of(engine.config, engine.layout, scenarios.VOCAB, 0, Trained())
        return StageWork.of(stage, TOKENS).saved_by_layers()[0] / TOKENS


@pytest.mark.parametrize("recompute,expected", [("none", 128 + 4), ("selective", 4), ("full", 128 + 4)])
def test_bytes_of_a_norm_on_embeddings(ranks: Ranks, recompute: str, expected: int) -> None:
    """Its input, and an fp32 scale.  With selective, its output is not saved, which is the input of the first layer."""
    recipe = [*WIDE, f"train.recompute={recompute}", "model.num_layers=2"]
    both = [[*recipe, "model.embedding_norm=true"], recipe]
    (normed,), (plain,) = (ranks(1).run(bytes_kept, overrides, 2) for overrides in both)
    assert normed - plain == expected
    (normed,), (plain,) = (ranks(1).run(bytes_by_equations, overrides) for overrides in both)
    assert normed - plain == expected


def kept_beyond_full(overrides: Sequence[str]) -> tuple[int, float]:
    """The bytes that layers save with attention_kept beyond those with full: counted after forward, and by the
    equations."""
    counted, predicted = [], []
    for recompute in ("attention_kept", "full"):
        with scenarios.running([*overrides, *LONGER, f"train.recompute={recompute}"]) as engine:
            corpus = scenarios.SkewedCorpus([LONG])
            microbatch = scenarios.microbatch_of(engine, [corpus.sample(0)])
            engine._set_denominator([microbatch])
            with Alive() as alive:
                given = iter([("microbatch 1 of 1", microbatch)])
                outputs = engine._forward_step(lambda *told: None, given, engine.chunks[0].train())
            gc.collect()
            counted.append(alive.num_bytes())
            del outputs
            work = StageWork.of(Stage.of(engine.config, engine.layout, scenarios.VOCAB, 0, Trained()), LONG)
            predicted.append(work.saved_by_layers()[0] + work.saved_by_mtp())
    return counted[0] - counted[1], predicted[0] - predicted[1]


@pytest.mark.parametrize("model", [*MODELS, "mtp"])
def test_attention_keeps_the_bytes_of_the_equations(ranks: Ranks, tmp_path: Path, model: str) -> None:
    """All kinds of layers.  The delta rule keeps a state where an interval of 512 tokens begins, but none of the first;
    the equations count a state for each 512 tokens."""
    recipe = MODELS[model] if model in MODELS else mtp_models.joint(tmp_path)
    ((counted, predicted),) = ranks(1).run(kept_beyond_full, recipe)
    first_states = 3 * 4 * 8 * 6 * 10 if model in ("linear", "linear_experts") else 0
    assert counted + first_states == predicted > 0


@pytest.mark.parametrize(
    "own, more",
    [
        ([], 0),
        (["model.moe.shared_ffn_hidden_size=96", "model.moe.shared_gate=true"], 0),
        # 48 elements are sent instead of 64; the sum of the experts' outputs, which is projected back, is saved
        (["model.moe.latent_size=48"], -2 * 32 + 96),
    ],
)
def test_bytes_of_a_layer_of_experts_and_token(ranks: Ranks, own: list[str], more: int) -> None:
    """A shared expert saves nothing of its own: its input is also the input of the router.

    A dense layer has 972; scale of the norm 4; two choices of 64 elements that are sent to experts, 256; scores,
    probabilities, weights and masks of four experts, 56; two choices, 48."""
    recipe = [*MOE, *own, "train.recompute=selective"]
    (two,), (four,) = (ranks(1).run(bytes_kept, recipe, layers) for layers in (2, 4))
    assert (four - two) / 2 == pytest.approx(972 + 4 + 256 + 56 + 48 + more, rel=MASKS_TOLERANCE)


def bytes_with_host(overrides: Sequence[str], num_layers: int) -> dict[str, int]:
    """The bytes per token: in host slabs; on the device after forward; and the maximum on the device in backward."""
    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 1 << 12),
        mock.patch.object(offload, "SLAB_BYTES", 1 << 14),
        scenarios.running([*WIDE, *overrides, "train.offload_fraction=1"]) as engine,
    ):
        microbatch = one_document(engine)
        with Alive() as alive:
            hidden = forward(engine, microbatch)
            del microbatch
            after, alive.peak = alive.num_bytes(), 0
            in_slabs = in_host_memory(engine)
            hidden.sum().backward()
            peak = alive.peak
            del hidden
        gc.collect()
        free = len(engine._save_policy.memory._free) * offload.SLAB_BYTES
    return {"slabs": in_slabs, "after": after, "peak": peak, "free": free}  # no operation of torch makes a slab


def in_host_memory(engine: Any) -> int:
    """Bytes of all slabs, including free ones."""
    memory = engine._save_policy.memory
    return memory.num_slabs * memory.slab_bytes


@contextmanager
def small_slabs() -> Iterator[None]:
    """Makes slabs smaller than the tensors that they should hold."""
    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 1 << 8),
        mock.patch.object(offload, "SLAB_BYTES", 5000),
    ):
        yield


def with_host(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    with small_slabs():
        return scenarios.gradients([*overrides, "train.offload_fraction=1"], packs)


ONE_OF_EACH = ["model.sliding_window_layers=[1]"]  # one layer with a window and one without
DEEPSEEK = [*MODELS["routers"], "model.qk_norm_across_heads=false", "model.rope.fraction=1", *MODELS["latent"]]
SMALL = ["model.num_layers=2", "train.global_batch_size=2", "model.init_std=0.2"]


@pytest.mark.parametrize(
    "way,model,saving",
    [
        (scenarios.gradients, [], ["train.recompute=selective"]),
        (scenarios.gradients, [], ["train.recompute=full", "train.mlp_tile=4096"]),
        (with_host, [], ["train.recompute=full"]),
        (with_host, ["model.qk_norm=false", "model.num_query_groups=1"], ["train.recompute=selective"]),
        (with_host, [*MOE, "model.moe.shared_ffn_hidden_size=48"], ["train.recompute=selective"]),
        (with_host, ["model.norm_placement=post", "model.qk_norm_across_heads=true"], ["train.recompute=selective"]),
        (with_host, [*GEMMA, "model.sliding_window_layers=[1]"], ["train.recompute=selective"]),
        (with_host, [DELTA.replace("ALL", "[1]"), *MOE], ["train.recompute=selective"]),
        (with_host, [*MODELS["gemma4"], *ONE_OF_EACH], ["train.recompute=selective"]),
        (with_host, [*MODELS["gemma4"], *ONE_OF_EACH], ["train.recompute=full"]),
        (with_host, DEEPSEEK, ["train.recompute=selective"]),
        (with_host, DEEPSEEK, ["train.recompute=attention_kept"]),
        (scenarios.gradients, [DELTA.replace("ALL", "[1]"), *MOE], ["train.recompute=attention_kept"]),
        (with_host, [MAMBA.replace("ALL", "[1]")], ["train.recompute=selective"]),
        (scenarios.gradients, [MAMBA.replace("ALL", "[1]")], ["train.recompute=attention_kept"]),
        (with_host, [*MODELS["gpt_oss"], *ONE_OF_EACH], ["train.recompute=attention_kept"]),
    ],
)
def test_gradients_are_the_same_bit_for_bit(ranks: Ranks, way: Any, model: list[str], saving: list[str]) -> None:
    (plain,) = ranks(1).run(scenarios.gradients, [*SMALL, *model], PACKS)
    (found,) = ranks(1).run(way, [*SMALL, *model, *saving], PACKS)
    assert found["loss"] == plain["loss"]
    scenarios.check_parameters(found["gradients"], plain["gradients"], 0)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_tiles_change_no_more_than_the_order_of_sums(ranks: Ranks, recompute: str) -> None:
    """The tile of 40 tokens does not divide any pack."""
    (plain,) = ranks(1).run(scenarios.gradients, SMALL, PACKS)
    tiles = [*SMALL, f"train.recompute={recompute}", "train.mlp_tile=40"]
    (found,) = ranks(1).run(scenarios.gradients, tiles, PACKS)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    scenarios.check_parameters(found["gradients"], plain["gradients"], TILE_TOLERANCE)


@pytest.mark.parametrize(
    "saving",
    [
        ["train.recompute=full"],
        ["train.recompute=selective", "train.mlp_tile=24"],
        ["train.recompute=attention_kept", "train.mlp_tile=24"],
    ],
    ids=" ".join,
)
def test_cut_documents_and_host_memory(ranks: Ranks, saving: list[str]) -> None:
    """Backward gathers keys once more, one head group after the other."""
    recipe = [*SMALL, "parallel.cp=2"]
    expected = ranks(2).run(scenarios.gradients, recipe, PACKS)
    for plain, found in zip(expected, ranks(2).run(with_host, [*recipe, *saving], PACKS)):
        scenarios.check_parameters(found["gradients"], plain["gradients"], GRADIENT_TOLERANCE)


def output_bytes(overrides: Sequence[str]) -> list[int]:
    """The memory of a layer's output after each pass of the layer, in bytes."""
    with scenarios.running([*WIDE, *overrides, "model.num_layers=1"]) as engine:
        sizes: list[int] = []
        layer = engine.chunks[0].module.decoder.layers[0]
        layer.register_forward_hook(lambda module, given, found: sizes.append(found[0].untyped_storage().nbytes()))
        scenarios.backward(engine, [one_document(engine)])
        return sizes


@pytest.mark.parametrize("tile", ["null", "40"])
def test_a_repeated_layer_has_no_output(ranks: Ranks, tile: str) -> None:
    (found,) = ranks(1).run(output_bytes, ["train.recompute=full", f"train.mlp_tile={tile}"])
    assert found == [128 * TOKENS, 0]


def train_with_host(overrides: Sequence[str]) -> dict[str, Any]:
    with small_slabs():
        return scenarios.train(overrides, [0, 1])


@pytest.mark.parametrize(
    "layout,saving",
    [
        (
            ["parallel.pp=2", "parallel.virtual_stages=2"],
            ["train.recompute=attention_kept", "train.offload_fraction=1"],
        ),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.distributed_optimizer=true"],
            ["train.recompute=selective", "train.offload_fraction=0.5"],
        ),
    ],
    ids=["pp", "tp"],
)
def test_curves_are_the_same_bit_for_bit(ranks: Ranks, layout: list[str], saving: list[str]) -> None:
    """Several passes are in flight, and layers are split over ranks."""
    expected = ranks(2).run(scenarios.train, layout, [0, 1])
    for one, other in zip(expected, ranks(2).run(train_with_host, [*layout, *saving])):
        assert (other["loss"], other["parameters"]) == (one["loss"], one["parameters"])


@pytest.mark.parametrize("recompute, per_layer", [("selective", 972), ("attention_kept", 416), ("full", 128)])
def test_two_layers_are_on_the_device_at_a_time(ranks: Ranks, recompute: str, per_layer: int) -> None:
    overrides = [f"train.recompute={recompute}"]
    (four,), (eight,) = (ranks(1).run(bytes_with_host, [*overrides, f"model.num_layers={n}"], n) for n in (4, 8))
    small = 4 + 8 if recompute == "selective" else 0  # the fp32 scales of two norms are too small for offload here
    assert eight["after"] - four["after"] == 4 * small * TOKENS
    assert eight["peak"] - four["peak"] == 4 * small * TOKENS
    stored = 4 * (per_layer - small) * TOKENS
    assert stored <= eight["slabs"] - four["slabs"] <= stored + (1 << 14)
    assert four["free"] == four["slabs"] and eight["free"] == eight["slabs"]


def rows_of_evaluation(overrides: Sequence[str]) -> tuple[list[int], bool]:
    """The number of rows that the MLP gets at a time in evaluation; and whether the loss equals the loss without
    tiles."""
    losses = {}
    for tile in ("null", "100"):
        with scenarios.running([*WIDE, *overrides, f"train.mlp_tile={tile}", "model.num_layers=1"]) as engine:
            sizes: list[int] = []
            mlp = engine.chunks[0].module.decoder.layers[0].mlp
            mlp.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
            losses[tile] = engine.evaluate([one_document(engine)]).objective
    return sizes, losses["null"] == losses["100"]


def test_evaluation_has_tiles_too(ranks: Ranks) -> None:
    (found,) = ranks(1).run(rows_of_evaluation, [])
    assert found == ([100, 100, 56], True)


def bytes_of_two_passes(pipeline: bool) -> int:
    """The bytes on the device after two forward passes, before any backward pass."""
    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 1 << 12),
        scenarios.running([*WIDE, "model.num_layers=4", "train.recompute=full", "train.offload_fraction=1"]) as engine,
    ):
        engine._save_policy.backward_is_next = not pipeline
        with Alive() as alive:
            found = [forward(engine, one_document(engine)) for _ in range(2)]
            assert len(found) == 2
            return alive.num_bytes() - in_host_memory(engine)


def test_a_pipeline_leaves_no_layer_on_the_device(ranks: Ranks) -> None:
    """Otherwise, each pass would keep two layers on the device: 128 bytes per token for the input of each, and for the
    input of the last norm."""
    (stay,), (leave,) = (ranks(1).run(bytes_of_two_passes, pipeline) for pipeline in (False, True))
    assert stay - leave == 2 * (2 + 1) * 128 * TOKENS


def backward_is_next(overrides: Sequence[str]) -> bool:
    with scenarios.running(overrides) as engine:
        return engine._save_policy.backward_is_next


def test_backward_comes_at_once_but_in_a_pipeline(ranks: Ranks) -> None:
    """Without virtual stages, backward directly follows forward in the last stage."""
    pipeline = ["parallel.pp=2", "train.recompute=full", "train.offload_fraction=1"]
    assert ranks(2).run(backward_is_next, pipeline[1:]) == [True, True]
    assert ranks(2).run(backward_is_next, pipeline) == [False, True]
    assert ranks(2).run(backward_is_next, [*pipeline, "parallel.virtual_stages=2"]) == [False, False]
