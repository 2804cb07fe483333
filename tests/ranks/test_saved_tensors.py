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

from sft.mcore import device
from sft.mcore.activations import offload, saved_tensors
from sft.mcore.layer import _TiledRecompute
from tests.ranks import scenarios
from tests.ranks.layouts import GRADIENT_TOLERANCE
from tests.ranks.pool import RankPool

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
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 1 << 12),
        mock.patch.object(offload, "SLAB_BYTES", 1 << 14),
        scenarios.running([*WIDE, *overrides, "train.offload_fraction=1"]) as engine,
    ):
        microbatch = one_document(engine)
        with Alive() as alive:
            hidden = forward(engine, microbatch)
            del microbatch
            after, alive.peak = alive.num_bytes(), 0
            in_slabs = engine._save_policy.memory.num_bytes
            hidden.sum().backward()
            peak = alive.peak
            del hidden
        gc.collect()
        free = len(engine._save_policy.memory._free) * offload.SLAB_BYTES
    return {"slabs": in_slabs, "after": after - in_slabs, "peak": peak - in_slabs, "free": free}


def with_host(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Gradients, with slabs smaller than what they are to hold."""
    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 1 << 8),
        mock.patch.object(offload, "SLAB_BYTES", 5000),
    ):
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
    """Keys are gathered once more in backward, one head group after the other."""
    recipe = ["train.global_batch_size=3", "model.init_std=0.2", "data.doc_multiple=32"]
    cp = int(layout[0][-1])
    expected = ranks(cp).run(scenarios.gradients, [*recipe, layout[0]], PACKS)
    for plain, found in zip(expected, ranks(cp).run(with_host, [*recipe, *layout], PACKS)):
        for name, gradient in plain["gradients"].items():
            error = np.linalg.norm(found["gradients"][name] - gradient)
            assert error <= GRADIENT_TOLERANCE * np.linalg.norm(gradient), name


def curve_with_host(overrides: Sequence[str]) -> dict[str, Any]:
    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 1 << 8),
        mock.patch.object(offload, "SLAB_BYTES", 5000),
    ):
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
            losses[tile] = engine.evaluate([one_document(engine)]).objective
    return sizes, losses["null"] == losses["100"]


def test_evaluation_has_tiles_too(ranks: Ranks) -> None:
    (found,) = ranks(1).run(rows_of_evaluation, [])
    assert found == ([100, 100, 56], True)


def bytes_of_two_passes(pipeline: bool) -> int:
    """On the device, once both are over and before any backward."""
    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 1 << 12),
        scenarios.running([*WIDE, "model.num_layers=4", "train.recompute=full", "train.offload_fraction=1"]) as engine,
    ):
        engine._save_policy.backward_is_next = not pipeline
        with Alive() as alive:
            found = [forward(engine, one_document(engine)) for _ in range(2)]
            assert len(found) == 2
            return alive.num_bytes() - engine._save_policy.memory.num_bytes


def test_a_pipeline_leaves_no_layer_on_the_device(ranks: Ranks) -> None:
    """Otherwise each pass has two there: 128 bytes a token of each one's input, and of what the last norm is given."""
    (stay,), (leave,) = (ranks(1).run(bytes_of_two_passes, pipeline) for pipeline in (False, True))
    assert stay - leave == 2 * (2 + 1) * 128 * TOKENS


def changed_while_kept() -> str:
    """A tensor that is kept, changed before backward."""
    x = torch.ones(4, requires_grad=True)
    with saved_tensors.SavePolicy(recompute=True).forward_pass(1):
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
    assert changed_while_kept() == "changed in place since it was saved"


def test_a_later_layer_that_keeps_the_same_keeps_it_itself(ranks: Ranks) -> None:
    """Else the last layer's backward would have to fetch what the first one keeps."""
    assert ranks(1).run(shared_by_layers) == [([1], True)]


def shared_by_layers() -> tuple[list[int], bool]:
    device.start("cpu")
    wanted: list[int] = []
    with mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 8), mock.patch.object(offload, "SLAB_BYTES", 64):
        table, x = torch.full((8,), 2.0), torch.ones(8, requires_grad=True)
        memory, bring = offload.PinnedMemory(torch.device("cpu")), offload.OffloadedLayers.fetch
        saving = saved_tensors.SavePolicy(recompute=False, memory=memory, backward_is_next=False)
        with saving.forward_pass(3):
            out = x
            for _ in range(3):
                saving.start_layer()
                out = out * table

        def noted(layers: offload.OffloadedLayers, number: int) -> None:
            wanted.append(number)
            bring(layers, number)

        with mock.patch.object(offload.OffloadedLayers, "fetch", noted):
            out.sum().backward()
    return wanted, x.grad is not None and x.grad.tolist() == [8.0] * 8


def test_the_gradient_of_a_weight_is_summed_where_core_sums() -> None:
    """Tiles of 2, 2 and 1 rows of y = x w: all but the last go to main_grad, the last is autograd's."""
    weight = torch.tensor([3.0], requires_grad=True)
    weight.main_grad = torch.tensor([100.0])  # type: ignore[attr-defined]
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]], requires_grad=True)
    y = _TiledRecompute.apply(lambda rows: rows * weight, 2, x, weight)
    assert y.flatten().tolist() == [3.0, 6.0, 12.0, 24.0, 48.0]
    y.sum().backward()
    assert weight.main_grad.tolist() == [100.0 + 1 + 2 + 4 + 8]  # type: ignore[attr-defined]
    assert weight.grad is not None and weight.grad.tolist() == [16.0]
    assert x.grad is not None and x.grad.flatten().tolist() == [3.0] * 5


def where_kept(fraction: float, pipeline: bool) -> dict[str, Any]:
    """Five layers that keep one tensor each, and one before them: what is stored, what of that has left, and in which
    order backward wants it."""
    device.start("cpu")
    stored: list[offload.OffloadedTensor] = []
    wanted: list[int] = []
    store, bring = offload.OffloadedLayers.store, offload.OffloadedLayers.fetch

    def noted(layers: offload.OffloadedLayers, flat: torch.Tensor) -> offload.OffloadedTensor:
        stored.append(store(layers, flat))
        return stored[-1]

    def brought(layers: offload.OffloadedLayers, number: int) -> None:
        wanted.append(number)
        bring(layers, number)

    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 8),
        mock.patch.object(offload, "SLAB_BYTES", 64),
        mock.patch.object(offload.OffloadedLayers, "store", noted),
        mock.patch.object(offload.OffloadedLayers, "fetch", brought),
    ):
        memory = offload.PinnedMemory(torch.device("cpu"))
        saving = saved_tensors.SavePolicy(
            recompute=False, memory=memory, offload_fraction=fraction, backward_is_next=not pipeline
        )
        x = torch.zeros(8, requires_grad=True)
        with saving.forward_pass(5):
            out = x.exp()
            for _ in range(5):
                saving.start_layer()
                out = out.sqrt()
        blocks = [(one.layer, one.tensor is None) for one in stored]
        out.sum().backward()
        assert x.grad is not None
        return {"blocks": blocks, "wanted": wanted, "gradient": x.grad.tolist()}


@pytest.mark.parametrize(
    "fraction, pipeline, left",
    [
        (1.0, False, 3),
        (1.0, True, 5),
        (0.5, True, 3),  # 2.5 layers are 3, the first ones
        (0.2, False, 1),
    ],
)
def test_which_layers_go_to_the_host(ranks: Ranks, fraction: float, pipeline: bool, left: int) -> None:
    """Where backward comes at once the last two stay.  The first that stays tells that backward is near."""
    (found,) = ranks(1).run(where_kept, fraction, pipeline)
    wanted = list(range(min(left + 1, 5), -1, -1))
    assert found == {
        "blocks": [(number, True) for number in range(left + 1)],
        "wanted": wanted,
        "gradient": [2.0**-5] * 8,
    }


def kept_in_parts() -> list[list[float]]:
    """The halves of one tensor are kept, and weights that are a part of a larger storage."""
    device.start("cpu")
    stored: list[int] = []
    store = offload.OffloadedLayers.store

    def noted(layers: offload.OffloadedLayers, flat: torch.Tensor) -> offload.OffloadedTensor:
        stored.append(flat.numel())
        return store(layers, flat)

    with (
        mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 8),
        mock.patch.object(offload, "SLAB_BYTES", 64),
        mock.patch.object(offload.OffloadedLayers, "store", noted),
    ):
        buffer = torch.full((16,), 3.0)
        memory = offload.PinnedMemory(torch.device("cpu"))
        saving = saved_tensors.SavePolicy(recompute=False, memory=memory, backward_is_next=False, resident=[buffer[8:]])
        x = torch.arange(8.0, requires_grad=True)
        with saving.forward_pass(1):
            saving.start_layer()
            whole = x * buffer[8:]
            first, second = whole.chunk(2)
            out = first * second
        out.sum().backward()
        assert x.grad is not None
        return [x.grad.tolist(), [float(n) for n in stored]]


def test_parts_of_a_storage(ranks: Ranks) -> None:
    """y = 9 x[i] x[i + 4]; one copy of both halves, none of the weights."""
    (found,) = ranks(1).run(kept_in_parts)
    assert found == [[36.0, 45.0, 54.0, 63.0, 0.0, 9.0, 18.0, 27.0], [8.0]]


def kept_as_two_dtypes() -> list[float]:
    """2.0 is 2**30 as an integer: y = 2 x + 2**30 x / 2**30."""
    device.start("cpu")
    with mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 8), mock.patch.object(offload, "SLAB_BYTES", 64):
        saving = saved_tensors.SavePolicy(recompute=False, memory=offload.PinnedMemory(torch.device("cpu")))
        x, table = torch.ones(8, requires_grad=True), torch.full((8,), 2.0)
        with saving.forward_pass(1):
            saving.start_layer()
            out = x * table + x * table.view(torch.int32) * 2.0**-30
        out.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()


def test_one_storage_as_two_dtypes(ranks: Ranks) -> None:
    assert ranks(1).run(kept_as_two_dtypes) == [[3.0] * 8]


@pytest.mark.parametrize("again", [False, True])
def test_what_nobody_wants_any_more_is_freed(ranks: Ranks, again: bool) -> None:
    assert ranks(1).run(still_there, again) == [(False, True)]


def still_there(again: bool) -> tuple[bool, bool]:
    """After a pass: whether an output that its own operation keeps is there once dropped; and while it is held."""
    device.start("cpu")
    with mock.patch.object(saved_tensors, "MIN_OFFLOADED_BYTES", 8), mock.patch.object(offload, "SLAB_BYTES", 64):
        memory = None if again else offload.PinnedMemory(torch.device("cpu"))
        x = torch.ones(8, requires_grad=True)
        small = torch.ones(1, requires_grad=True)
        saving = saved_tensors.SavePolicy(recompute=again, memory=memory)
        with saving.forward_pass(1):
            saving.start_layer()
            one = x if again else small  # either stays on the device
            dropped, held = one.exp(), one.exp()
        storages = [StorageWeakRef(out.untyped_storage()) for out in (dropped, held)]
        del dropped
        return not storages[0].expired(), not storages[1].expired()


def computed_again() -> tuple[list[float], bool]:
    """y = z * z of z = x w with w = 2, which is cheap, and not kept."""
    x, weight = torch.arange(4.0, requires_grad=True), torch.tensor([2.0], requires_grad=True)
    taken: list[torch.Tensor] = []
    take = saved_tensors.Recompute.restore

    def noted(kept: saved_tensors.Recompute) -> torch.Tensor:
        taken.append(take(kept))
        return taken[-1]

    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * weight

    with mock.patch.object(saved_tensors.Recompute, "restore", noted):
        saving = saved_tensors.SavePolicy(recompute=True)
        with saving.forward_pass(1):
            z = double(x)
            saving.mark_recomputable(z, double, x)
            out = z * z
        out.sum().backward()
    assert x.grad is not None and taken
    return x.grad.tolist(), any(tensor.requires_grad for tensor in taken)


def test_what_is_computed_again_has_no_gradient_of_its_own() -> None:
    assert computed_again() == ([0.0, 8.0, 16.0, 24.0], False)


def rule_of_the_engine(overrides: Sequence[str]) -> dict[str, Any]:
    """What the engine's rule was made of, and the layers it is told of for each microbatch."""
    told: list[int] = []
    forward_pass = saved_tensors.SavePolicy.forward_pass

    def noted(saving: saved_tensors.SavePolicy, num_layers: int) -> Any:
        told.append(num_layers)
        return forward_pass(saving, num_layers)

    with mock.patch.object(saved_tensors.SavePolicy, "forward_pass", noted), scenarios.running(overrides) as engine:
        corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
        engine.train_step([scenarios.microbatch_of(engine, [corpus.sample(i)]) for i in range(2)])
        rule = engine._save_policy
        weights = {p.untyped_storage().data_ptr() for chunk in engine.chunks for p in chunk.parameters()}
        return {
            "again": rule.recompute,
            "host": rule.memory is not None,
            "fraction": rule.offload_fraction,
            "pipeline": not rule.backward_is_next,
            "weights stay": weights <= rule.resident,
            "layers": sorted(set(told)),
        }


PLAIN = {"again": False, "host": False, "fraction": 0.0, "pipeline": False, "weights stay": True, "layers": [4]}


@pytest.mark.parametrize(
    "num_ranks, overrides, expected",
    [
        (1, ["train.recompute=none"], {}),
        (1, ["train.recompute=full"], {}),
        (1, ["train.recompute=selective"], {"again": True}),
        (1, ["train.recompute=full", "train.offload_fraction=0.5"], {"host": True, "fraction": 0.5}),
        (2, ["parallel.pp=2"], {"pipeline": "first stage", "layers": [2]}),
        (2, ["parallel.pp=2", "parallel.virtual_stages=2"], {"pipeline": True, "layers": [1]}),
        (2, ["parallel.tp=2"], {}),
    ],
)
def test_the_rule_is_what_the_recipe_says(
    ranks: Ranks, num_ranks: int, overrides: list[str], expected: dict[str, Any]
) -> None:
    for rank, found in enumerate(ranks(num_ranks).run(rule_of_the_engine, overrides)):
        wanted = PLAIN | expected
        if wanted["pipeline"] == "first stage":  # in the last one backward comes at once
            wanted["pipeline"] = rank == 0
        assert found == wanted


def test_what_cheap_things_are_made_of_is_not_held_once_the_pass_is_over() -> None:
    x = torch.ones(8, requires_grad=True)
    saving = saved_tensors.SavePolicy(recompute=True)
    with saving.forward_pass(1):
        held = x.exp()
        given = torch.ones(8)
        copy = given.clone()
        saving.mark_recomputable(copy, torch.clone, given)
    storage = StorageWeakRef(given.untyped_storage())
    del given, copy
    assert storage.expired() and held.requires_grad
