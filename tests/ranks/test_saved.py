"""What layers keep for backward: how many bytes, and that the gradients do not notice."""

import gc
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sft.mcore import host, saved
from sft.mcore.layer import _ByTiles
from tests.ranks import scenarios
from tests.ranks.pool import RankPool
from tests.ranks.test_one_curve import GRADIENT_TOLERANCE

Ranks = Callable[[int], RankPool]
# Of a norm of a gradient, fp32: a weight's is summed tile by tile, or otherwise where heads are gathered in lots.
TILE_TOLERANCE = 1e-6
PACKS = [[1, 2, 3, 5], [0], [11, 10, 6]]
TOKENS = 256
WIDE = [
    "model.hidden_size=64",
    "model.ffn_hidden_size=192",
    "model.num_attention_heads=8",
    "model.num_query_groups=2",
    "model.head_dim=16",
    "run.precision=bf16",
    "train.global_batch_size=1",
]
MOE = ["model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=32", "model.moe.aux_loss_coef=1e-2"]


class Alive(TorchDispatchMode):
    """Storages that operations made, and that something still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.num_bytes())
        return result

    def num_bytes(self) -> int:
        self._storages = {key: pair for key, pair in self._storages.items() if not pair[0].expired()}
        return sum(size for _, size in self._storages.values())


def one_document(engine: Any) -> Any:
    corpus = scenarios.SkewedCorpus([TOKENS])
    return scenarios.microbatch_of(engine, [corpus.sample(0)])


def forward(engine: Any, microbatch: Any) -> torch.Tensor:
    for chunk in engine.chunks:
        chunk.train()
    hidden, _ = engine._forward_step(lambda *told: None, iter([microbatch]), engine.chunks[0])
    assert isinstance(hidden, torch.Tensor)
    return hidden


def bytes_kept(overrides: Sequence[str], num_layers: int) -> int:
    """After a forward pass, in bytes per token."""
    with scenarios.running([*WIDE, *overrides, f"model.num_layers={num_layers}"]) as engine:
        microbatch = one_document(engine)
        with Alive() as alive:
            hidden = forward(engine, microbatch)
        gc.collect()
        assert hidden.shape[0] == TOKENS and alive.num_bytes() % TOKENS == 0
        return alive.num_bytes() // TOKENS


@pytest.mark.parametrize(
    "overrides, expected",
    [
        # hidden 64, heads 8 of 16 (128), key/value heads 2 of 16 (32), ffn 192; 2 bytes each
        # what comes in 128, and to the second half 128
        # attention: query 256, key 64, value 64, out 256, log-sum-exp 8 x 4; fp32 of the norms 4 + (8 + 2) x 4
        (["train.recompute=selective"], 128 + 128 + 256 + 64 + 64 + 256 + 32 + 4 + 40),
        (["train.recompute=selective", "model.qk_norm=false"], 128 + 128 + 256 + 64 + 64 + 256 + 32 + 4),
        (["train.recompute=full"], 128),
        # and both norms' output 2 x 128, the second's fp32 4, normed query and key 320,
        # the MLP's inside: gate and up 768, gate after silu 384, up and an offset of 0 (core) 384, their product 384
        (["train.recompute=none"], 972 + 256 + 4 + 320 + 768 + 384 + 384 + 384),
        # tiles take the MLP's inside away, and its norm's output
        (["train.recompute=none", "train.mlp_tile=64"], 972 + 128 + 320),
    ],
)
def test_bytes_of_a_layer_and_token(ranks: Ranks, overrides: list[str], expected: int) -> None:
    (two,), (four,) = (ranks(1).run(bytes_kept, overrides, layers) for layers in (2, 4))
    assert (four - two) / 2 == expected


def bytes_with_host(overrides: Sequence[str], num_layers: int) -> dict[str, int]:
    """Bytes per token: in slabs, and beyond them after forward and at most in backward."""
    with (
        mock.patch.object(saved, "LEAST_BYTES", 1 << 12),
        mock.patch.object(host, "SLAB_BYTES", 1 << 14),
        scenarios.running([*WIDE, *overrides, "train.offload_fraction=1"]) as engine,
    ):
        microbatch = one_document(engine)
        with Alive() as alive:
            hidden = forward(engine, microbatch)
            del microbatch
            after, alive.peak = alive.num_bytes(), 0
            in_slabs = engine._saving._host.num_bytes
            hidden.sum().backward()
            peak = alive.peak
            del hidden
        gc.collect()
        free = len(engine._saving._host._free) * host.SLAB_BYTES
    return {"slabs": in_slabs, "after": after - in_slabs, "peak": peak - in_slabs, "free": free}


def with_host(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Gradients, with slabs smaller than what they are to hold."""
    with mock.patch.object(saved, "LEAST_BYTES", 1 << 8), mock.patch.object(host, "SLAB_BYTES", 5000):
        return scenarios.gradients([*overrides, "train.offload_fraction=1"], packs)


SAME = [
    ("selective", []),
    ("full", []),
    ("selective", ["model.qk_norm=false", "model.num_query_groups=1"]),
    ("full", ["train.mlp_tile=4096"]),
    ("selective", MOE),
]


@pytest.mark.parametrize("way", [scenarios.gradients, with_host])
@pytest.mark.parametrize("recompute, model", SAME)
def test_gradients_are_the_same_bit_for_bit(ranks: Ranks, way: Any, recompute: str, model: list[str]) -> None:
    recipe = ["train.global_batch_size=3", "model.init_std=0.2", *model]
    (plain,) = ranks(1).run(scenarios.gradients, [o for o in recipe if "tile" not in o], PACKS)
    (found,) = ranks(1).run(way, [*recipe, f"train.recompute={recompute}"], PACKS)
    assert found["loss"] == plain["loss"]
    for name, gradient in plain["gradients"].items():
        assert np.array_equal(found["gradients"][name], gradient), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_tiles_change_no_more_than_the_order_of_sums(ranks: Ranks, recompute: str) -> None:
    """A tile of 40 divides no pack."""
    recipe = ["train.global_batch_size=3", "model.init_std=0.2"]
    (plain,) = ranks(1).run(scenarios.gradients, recipe, PACKS)
    tiles = [*recipe, f"train.recompute={recompute}", "train.mlp_tile=40"]
    (found,) = ranks(1).run(scenarios.gradients, tiles, PACKS)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    for name, gradient in plain["gradients"].items():
        error = np.linalg.norm(found["gradients"][name] - gradient)
        assert error <= TILE_TOLERANCE * np.linalg.norm(gradient), name


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.cp=2", "train.recompute=selective"],
        ["parallel.cp=4", "train.recompute=full"],
        ["parallel.cp=2", "train.recompute=selective", "train.mlp_tile=24"],
    ],
)
def test_cut_documents_and_host_memory(ranks: Ranks, layout: list[str]) -> None:
    """Keys are gathered once more in backward, in lots of heads."""
    recipe = ["train.global_batch_size=3", "model.init_std=0.2", "data.doc_multiple=32"]
    cp = int(layout[0][-1])
    expected = ranks(cp).run(scenarios.gradients, [*recipe, layout[0]], PACKS)
    for plain, found in zip(expected, ranks(cp).run(with_host, [*recipe, *layout], PACKS)):
        for name, gradient in plain["gradients"].items():
            error = np.linalg.norm(found["gradients"][name] - gradient)
            assert error <= GRADIENT_TOLERANCE * np.linalg.norm(gradient), name


def curve_with_host(overrides: Sequence[str]) -> dict[str, Any]:
    with mock.patch.object(saved, "LEAST_BYTES", 1 << 8), mock.patch.object(host, "SLAB_BYTES", 5000):
        return scenarios.curve(overrides)


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.pp=2", "train.recompute=selective", "train.offload_fraction=1"],
        ["parallel.pp=2", "parallel.virtual_stages=2", "train.recompute=full", "train.offload_fraction=1"],
        [
            *["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.distributed_optimizer=true"],
            *["train.recompute=selective", "train.offload_fraction=0.5"],
        ],
    ],
    ids=" ".join,
)
def test_curves_are_the_same_bit_for_bit(ranks: Ranks, layout: list[str]) -> None:
    """Several passes in flight, and layers cut over ranks."""
    plain = [part for part in layout if not part.startswith("train.")]
    expected = ranks(2).run(scenarios.curve, plain)
    for one, other in zip(expected, ranks(2).run(curve_with_host, layout)):
        assert (other["loss"], other["hash"]) == (one["loss"], one["hash"])


@pytest.mark.parametrize("recompute, per_layer", [("selective", 972), ("full", 128)])
def test_two_layers_are_on_the_device_at_a_time(ranks: Ranks, recompute: str, per_layer: int) -> None:
    overrides = [f"train.recompute={recompute}"]
    (four,), (eight,) = (ranks(1).run(bytes_with_host, [*overrides, f"model.num_layers={n}"], n) for n in (4, 8))
    small = 4 + 8 if recompute == "selective" else 0  # too small for the host here: fp32 of two norms
    assert eight["after"] - four["after"] == 4 * small * TOKENS
    assert eight["peak"] - four["peak"] == 4 * small * TOKENS
    stored = 4 * (per_layer - small) * TOKENS
    assert stored <= eight["slabs"] - four["slabs"] <= stored + (1 << 14)
    assert four["free"] == four["slabs"] and eight["free"] == eight["slabs"]


def rows_of_evaluation(overrides: Sequence[str]) -> tuple[list[int], bool]:
    """What the MLP takes at once in evaluation; and that the loss is the one without tiles."""
    losses = {}
    for tile in ("null", "100"):
        with scenarios.running([*WIDE, *overrides, f"train.mlp_tile={tile}", "model.num_layers=1"]) as engine:
            sizes: list[int] = []
            mlp = engine.chunks[0].module.decoder.layers[0].mlp
            mlp.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
            losses[tile] = engine.evaluate([one_document(engine)]).loss
    return sizes, losses["null"] == losses["100"]


def test_evaluation_has_tiles_too(ranks: Ranks) -> None:
    (found,) = ranks(1).run(rows_of_evaluation, [])
    assert found == ([100, 100, 56], True)


def later_stage(overrides: Sequence[str]) -> list[int]:
    """Of what two passes keep, which may not be on the device once both are over."""
    with (
        mock.patch.object(saved, "LEAST_BYTES", 1 << 12),
        scenarios.running([*WIDE, *overrides, "train.recompute=full", "train.offload_fraction=1"]) as engine,
    ):
        engine._saving._pipeline = True
        found = []
        with Alive() as alive:
            for _ in range(2):
                hidden = forward(engine, one_document(engine))
                found.append(hidden)
            del hidden
            return [alive.num_bytes() - engine._saving._host.num_bytes, sum(x.nbytes for x in found)]


def test_a_pipeline_leaves_no_layer_on_the_device(ranks: Ranks) -> None:
    (two,), (six,) = (ranks(1).run(later_stage, [f"model.num_layers={n}"]) for n in (2, 6))
    assert two == six


def changed_while_kept() -> str:
    """A tensor that is kept, changed before backward."""
    x = torch.ones(4, requires_grad=True)
    with saved.Saving(again=True).forward_pass(1):
        y = x * 2
        z = y * y
    with torch.no_grad():
        y.zero_()
    try:
        z.sum().backward()
    except AssertionError as error:
        return str(error)
    return "not noticed"


def test_what_is_kept_must_not_change() -> None:
    assert changed_while_kept() == "changed in place since it was kept"


def test_a_later_layer_that_keeps_the_same_keeps_it_itself(ranks: Ranks) -> None:
    """Else the last layer's backward would have to fetch what the first one keeps."""
    assert ranks(1).run(shared_by_layers) == [([1], True)]


def shared_by_layers() -> tuple[list[int], bool]:
    wanted: list[int] = []
    with mock.patch.object(saved, "LEAST_BYTES", 8), mock.patch.object(host, "SLAB_BYTES", 64):
        table, x = torch.full((8,), 2.0), torch.ones(8, requires_grad=True)
        saving, bring = saved.Saving(again=False, host=host.HostMemory(torch.device("cpu"))), host.Layers.bring
        with saving.forward_pass(3):
            out = x
            for _ in range(3):
                saved.begin_layer()
                out = out * table

        def noted(layers: host.Layers, number: int) -> None:
            wanted.append(number)
            bring(layers, number)

        with mock.patch.object(host.Layers, "bring", noted):
            out.sum().backward()
    return wanted, x.grad is not None and x.grad.tolist() == [8.0] * 8


def test_the_gradient_of_a_weight_is_summed_where_core_sums() -> None:
    """Tiles of 2, 2 and 1 rows of y = x w: all but the last go to main_grad, the last is autograd's."""
    weight = torch.tensor([3.0], requires_grad=True)
    weight.main_grad = torch.tensor([100.0])  # type: ignore[attr-defined]
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]], requires_grad=True)
    y = _ByTiles.apply(lambda rows: rows * weight, 2, x, weight)
    assert y.flatten().tolist() == [3.0, 6.0, 12.0, 24.0, 48.0]
    y.sum().backward()
    assert weight.main_grad.tolist() == [100.0 + 1 + 2 + 4 + 8]  # type: ignore[attr-defined]
    assert weight.grad is not None and weight.grad.tolist() == [16.0]
    assert x.grad is not None and x.grad.flatten().tolist() == [3.0] * 5
