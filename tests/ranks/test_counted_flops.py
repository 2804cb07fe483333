"""The matrix products that a step executes are those of the prediction.  torch's dispatcher counts them.

The count uses the sizes of the tensors that each operation gets; it shares no formula with sft/estimate or sft/layers.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from sft.batch import Sample
from sft.estimate.products import attention_flops, attention_reached, head_product, layer_products
from sft.layers.flops import TrainFlops
from sft.layers.matrices import ModelProducts
from sft.mcore.attention import torch_kernel
from sft.mcore.linear_attention.chunked_kernel import ChunkedKernel
from sft.mcore.loss import fused
from sft.weights.trained import trained_weights
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.hf_models import recipe_of
from tests.ranks.layouts import GEMMA, GEMMA4, GEMMA4_EXPERTS, GPT_OSS, LATENT, LINEAR, MOE, ROUTERS
from tests.ranks.pool import Ranks
from tests.tree_samples import tree_and_texts
from tests.unit.fixtures import hf

# In attention, a tile of queries also computes the scores of keys after its first query: half a tile of 8 for each
# query.
ATTENTION_TOLERANCE = 0.02
LENGTH, SUPERVISED, TILE = 512, 151, 8
ONE = ["data.seq_length=512", "train.global_batch_size=1"]
TWO_LAYERS = ["model.num_layers=2"]
# operations, and the index of the first factor among the arguments of each
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
OTHERS = ("matmul", "linear", "einsum", "mv", "addmv", "addbmm", "dot", "conv", "attention")


class Counted(TorchDispatchMode):
    """FLOPs of matrix products, by the part of the program that runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.part = "products"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__.rstrip("_")
        assert not name.startswith("_") or name in PRODUCTS or not any(word in name for word in OTHERS), name
        if name in PRODUCTS:
            left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            self.flops[self.part] += 2 * left.numel() * right.shape[-1]
        else:
            assert name not in OTHERS, name
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, owner: Any, method: str, part: str) -> Iterator[None]:
        """While `method` runs, its products count for `part`."""
        original = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, part
            try:
                return original(*args, **kwargs)
            finally:
                self.part = before

        with mock.patch.object(owner, method, staticmethod(counted) if owner is fused._Loss else counted):
            yield


def count(overrides: list[str], samples: Sequence[Sample], tile: int = TILE) -> dict[str, dict[str, float]]:
    """FLOPs of one training step on this rank, counted and predicted.  tile: number of queries in a tile of scores"""
    counted = Counted()
    with scenarios.running(overrides) as engine, mock.patch.object(torch_kernel, "QUERY_TILE", tile):
        microbatch = scenarios.microbatch_of(engine, samples)
        labels = float((microbatch.loss_weights > 0).sum())
        with (
            counted.within(torch_kernel.TorchKernel, "forward", "attention"),
            counted.within(torch_kernel.TorchKernel, "backward", "attention gradients"),
            counted.within(ChunkedKernel, "forward", "states"),
            counted.within(ChunkedKernel, "backward", "states"),
            counted.within(fused._Loss, "forward", "head"),
            counted,
        ):
            engine.train_step([microbatch])
        tokens = microbatch.tokens.shape[-1]
        config, layout = engine.config, engine.layout
        trained = trained_weights(config, scenarios.VOCAB)
        of_model = ModelProducts.of(config.model, trained, config.lora.rank or 0)
        head = head_product(config, layout, of_model, scenarios.VOCAB, labels)
        keys, values = config.model.resolved_head_dim, config.model.resolved_value_head_dim
        attention = sum(flops for _, _, flops in attention_flops(config.model, LENGTH)) / layout.tp / layout.cp
        if microbatch.branches is not None:
            flops = TrainFlops.of(config.model, scenarios.VOCAB)
            attention = flops.attention(microbatch.lengths, microbatch.branches.depths) / 3 / layout.tp / layout.cp
        predicted = {
            "products": sum(p.flops * p.num_runs for p in layer_products(config, layout, of_model, tokens)),
            "head": head.flops * head.num_runs,
            "attention": attention * (2 if config.train.recompute == "full" else 1),
            # The kernel computes the scores again: backward has 3 products of the width of keys and 2 of values,
            # forward one of each.
            "attention gradients": attention
            * (3 * keys + 2 * values)
            / (keys + values)
            * attention_reached(config, layout, of_model),
        }
        return {"counted": dict(counted.flops), "predicted": predicted}


def check(result: dict[str, dict[str, float]]) -> None:
    counted, predicted = result["counted"], result["predicted"]
    assert counted["products"] == pytest.approx(predicted["products"], rel=1e-12)
    assert counted.get("head", 0) == predicted["head"]
    for name in ("attention", "attention gradients"):
        assert counted.get(name, 0) == pytest.approx(predicted[name], rel=ATTENTION_TOLERANCE)


def document() -> list[Sample]:
    return [answer(LENGTH, SUPERVISED, seed=0, last=scenarios.VOCAB)]


WINDOW = ["model.sliding_window=300", "model.sliding_window_layers=[1]"]
SHARED = [*MOE, "model.moe.shared_ffn_hidden_size=20"]
LINEAR_LAYER = [*LINEAR, "model.linear_attention.layers=[2]"]
MAMBA_LAYER = ["model.mamba={layers: [2], num_heads: 4, num_groups: 2, head_dim: 6, state_dim: 10}"]
CHANNELS = [
    *("model.linear_attention.num_key_heads=8", "model.linear_attention.decay=channel"),
    *("model.linear_attention.low_rank=8", "model.linear_attention.gate=sigmoid"),
]
HALVES = [  # attention alone, and then experts alone, without a gate, that read a latent
    *("model.halves={without_mlp: [1], without_mixer: [2]}", "model.moe.layers=[2]", "model.moe.latent_size=24"),
    "model.activation=relu2",
]
FULL, KEPT, SELECTIVE = (f"train.recompute={name}" for name in ("full", "attention_kept", "selective"))
CASES = {
    "dense": [],
    "dense, selective": [SELECTIVE],
    "norms on outputs, full": ["model.norm_placement=both", FULL],
    "tied, full": ["model.tie_embeddings=true", FULL],
    "tiles": ["train.mlp_tile=128"],
    "tiles, full": ["train.mlp_tile=128", FULL],
    "chunks of heads, full": ["train.head_chunks=2", FULL],
    "experts, selective": [*SHARED, SELECTIVE],
    "experts, full": [*SHARED, FULL, "model.moe.shared_gate=true"],
    "experts, kept": [*SHARED, KEPT],
    "gpt-oss": [*MOE, *GPT_OSS, *WINDOW],
    "gpt-oss, full": [*MOE, *GPT_OSS, *WINDOW, FULL],
    "gemma": [*GEMMA, *WINDOW],
    "gemma 4": [*GEMMA4, *WINDOW],
    "gemma 4, selective": [*MOE, *GEMMA4, *GEMMA4_EXPERTS, *WINDOW, SELECTIVE],
    "linear": LINEAR_LAYER,
    "linear, selective": [*LINEAR_LAYER, SELECTIVE],
    "linear, channels": [*LINEAR_LAYER, *CHANNELS],
    "Mamba-2, selective": [*MAMBA_LAYER, SELECTIVE],
    "halves, selective": [*SHARED, *HALVES, SELECTIVE],
    "halves, full": [*SHARED, *HALVES, FULL],
    "latent": LATENT,
    "latent, full": [*LATENT, FULL],
    "routers": [*MOE, *ROUTERS, SELECTIVE],  # the first layer has no experts
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank(ranks: Ranks, name: str) -> None:
    (result,) = ranks(1).run(count, [*ONE, *TWO_LAYERS, *CASES[name]], document())
    check(result)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp=2", "parallel.sequence_parallel=true"],
        ["parallel.cp=2"],
        [*LATENT, "parallel.tp=2", "parallel.sequence_parallel=true", SELECTIVE],
        ["parallel.tp=2", "parallel.sequence_parallel=true", KEPT],
        [*LATENT, "parallel.cp=2"],  # each rank expands the latents of the whole document
    ],
    ids=["tp", "cp", "tp latent", "tp, kept", "cp latent"],
)
def test_two_ranks(ranks: Ranks, overrides: list[str]) -> None:
    for result in ranks(2).run(count, [*ONE, *TWO_LAYERS, *overrides], document()):
        check(result)


def tree() -> list[Sample]:
    """512 tokens: a trunk, two branches at one fork, and a branch of the second of them."""
    sample, _ = tree_and_texts(
        lengths=[256, 128, 64, 64],
        parents=[-1, 0, 0, 2],
        forks=[0, 251, 251, 43],
        ends=[(0, 256), (1, 128), (2, 64), (3, 64)],
        supervised=[(200, 256), (251, 300), (251, 315), (260, 358)],
        seed=0,
        vocab=scenarios.VOCAB,
    )
    return [sample]


@pytest.mark.parametrize(
    "world_size,overrides",
    [(1, CASES["gpt-oss"]), (1, [*LATENT, FULL]), (2, ["parallel.cp=2"])],
    ids=["gpt-oss", "latent, full", "cp"],
)
def test_branches(ranks: Ranks, world_size: int, overrides: list[str]) -> None:
    """A token before branches counts once, and a pair of tokens of a branch and of its parent counts as any other.

    Tiles are half as large, because queries of short documents have fewer keys.
    """
    for result in ranks(world_size).run(count, [*ONE, *TWO_LAYERS, *overrides], tree(), TILE // 2):
        check(result)


def lora(*targets: str) -> str:
    return f"lora={{rank: 3, alpha: 8, targets: [{', '.join(targets)}]}}"


@pytest.mark.parametrize(
    ("family", "world_size", "overrides"),
    [
        ("qwen3", 1, [lora("q_proj", "down_proj")]),
        ("qwen3", 1, [lora("o_proj"), SELECTIVE]),
        ("qwen3", 1, [lora("all-linear"), FULL, "train.head_chunks=2"]),
        ("qwen3", 2, [lora("k_proj", "o_proj", "up_proj"), "parallel.tp=2", "parallel.sequence_parallel=true"]),
        ("qwen3", 1, ["train.freeze=[embed_tokens, model.layers.0.*]", SELECTIVE]),
        ("qwen3", 1, ["train.freeze=[embed_tokens, model.layers.*.mlp.*]", FULL]),
        ("qwen3", 2, [lora("down_proj"), "parallel.tp=2", "parallel.sequence_parallel=true", FULL]),
        ("qwen3_moe", 1, [lora("experts.*", "o_proj")]),
        ("qwen3_moe", 1, [lora("experts.*"), FULL]),
        ("granitemoe", 1, [lora("o_proj"), "lora.target_parameters=[experts.gate_up_proj, router.weight]", SELECTIVE]),
    ],
    ids=str,
)
def test_frozen_weights(ranks: Ranks, tmp_path: Path, family: str, world_size: int, overrides: list[str]) -> None:
    """No product computes a gradient that nothing needs: neither of frozen weights, nor below the lowest trained
    weight."""
    source = hf.save(tmp_path / "source", family)
    recipe = [*recipe_of(source), *ONE, f"model.hf={source}", "model.init_from=random", *overrides]
    for result in ranks(world_size).run(count, recipe, document()):
        check(result)
