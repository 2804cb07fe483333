"""FP8 scales in a checkpoint, from layers that hold the scales as Transformer Engine does: as a pickle in
`_extra_state`.

Transformer Engine needs a GPU to have scales; tests/unit/mcore/backends/test_te.py gives Transformer Engine's layers
the values that this file makes.
"""

import enum
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine
from tests.ranks import scenarios
from tests.ranks.pool import Ranks

TE, CORE = "transformer_engine.common.recipe", "megatron.core.extensions.transformer_engine"
LAYERS = ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv"]
LAYOUTS = [(1, []), (2, ["parallel.tp=2"]), (2, ["parallel.pp=2", "parallel.virtual_stages=2"])]


class Format(enum.Enum):
    """A type with the name and the module of Transformer Engine's type."""

    HYBRID = (448.0, 57344.0)


class TEDelayedScaling:
    """A type with the name and the module of megatron-core's type."""

    def __init__(self) -> None:
        self.fp8_format, self.amax_compute_algo = Format.HYBRID, "max"


class Poison:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


Format.__module__, TEDelayedScaling.__module__ = TE, CORE


def layers(engine: Engine) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """The key in a checkpoint, the module, and the number of the layer in the model."""
    for chunk in engine.chunks:
        modules = dict(chunk.module.named_modules())
        for name, entry in chunk.module.sharded_state_dict().items():
            if isinstance(entry, ShardedObject):
                module = modules[name.removesuffix("._extra_state")]
                # base: the module of an adapted layer
                yield entry.key, getattr(module, "base", module), entry.global_offset[0]


def payload(layer: int, steps: int, **other: Any) -> torch.Tensor:
    """The result of Transformer Engine's `get_extra_state`: the scale of layer 2 is 3, its history is 3, 6, 9, ..."""
    history = torch.arange(1.0, steps + 1.0)[:, None] * (layer + 1)
    state = {
        "recipe": TEDelayedScaling(),
        "scale_fwd": torch.full((3,), layer + 1.0),
        "amax_history_fwd": history.expand(steps, 3).contiguous(),
        "scale_bwd": torch.full((2,), layer + 1.5),
        "amax_history_bwd": history.expand(steps, 2).contiguous(),
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True},
        **other,
    }
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def save(overrides: list[str], folder: str, steps: int, poison: bool = False) -> None:
    """Writes a checkpoint of a run with delayed scaling."""
    there = {name: types.ModuleType(name) for name in ("transformer_engine", "transformer_engine.common", TE, CORE)}
    there[TE].Format, there[CORE].TEDelayedScaling = Format, TEDelayedScaling  # type: ignore[attr-defined]
    with scenarios.running(overrides) as engine, mock.patch.dict(sys.modules, there):
        set_fp8(engine, "delayed")
        for _, module, layer in list(layers(engine)):
            state = payload(layer, steps, **({"recipe": Poison()} if poison else {}))
            module.get_extra_state = lambda state=state: state  # type: ignore[method-assign, misc]
        scenarios.save(engine, Path(folder), {"iteration": 3})


def set_fp8(engine: Engine, fp8: str | None) -> None:
    """Sets `fp8` in the config directly, because a recipe may not set it on a CPU."""
    run = engine.config.run.model_copy(update={"fp8": fp8})
    engine.config = engine.config.model_copy(update={"run": run})


def load(overrides: list[str], folder: str, steps: int, fp8: str | None = "delayed") -> dict[tuple[str, int], Any]:
    """The states that the layers get, by key and number of the layer."""
    with scenarios.running(overrides) as engine:
        set_fp8(engine, fp8)
        engine.core_config.fp8_amax_history_len = steps
        got: dict[tuple[str, int], Any] = {}
        for key, module, layer in list(layers(engine)):
            module.set_extra_state = (  # type: ignore[method-assign]
                lambda state, key=key, layer=layer: got.__setitem__((key, layer), pickle.loads(state.numpy().tobytes()))
            )
        engine_state.load(engine, Path(folder))
        return {where: {name: _plain(value) for name, value in state.items()} for where, state in got.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("scales")
    ranks(2).run(save, ["parallel.pp=2"], str(folder), 2)
    return str(folder)


@pytest.mark.parametrize("world_size, overrides", LAYOUTS, ids=str)
def test_each_layer_gets_its_scales_on_any_layout(
    ranks: Ranks, saved: str, world_size: int, overrides: list[str]
) -> None:
    results = ranks(world_size).run(load, overrides, saved, 2)
    together = {where: state for result in results for where, state in result.items()}
    assert sorted(together) == sorted((f"decoder.layers.{name}._extra_state", i) for name in LAYERS for i in range(4))
    if "pp" not in "".join(overrides):
        assert all(len(result) == 16 for result in results)
    assert together["decoder.layers.mlp.linear_fc1._extra_state", 2] == {
        "recipe": None,  # core's recipe of this run; it does not exist without Transformer Engine
        "scale_fwd": [3.0, 3.0, 3.0],
        "amax_history_fwd": [[3.0, 3.0, 3.0], [6.0, 6.0, 6.0]],
        "scale_bwd": [3.5, 3.5],
        "amax_history_bwd": [[3.0, 3.0], [6.0, 6.0]],
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True},
    }
    assert together["decoder.layers.self_attention.linear_qkv._extra_state", 0]["scale_bwd"] == [1.5, 1.5]


def test_adapters_are_stored_with_the_scales_of_the_frozen_layers(ranks: Ranks, tmp_path: Path) -> None:
    lora = ["model.qkv_bias=false", "lora.rank=2", "lora.targets=[q_proj, down_proj]"]
    ranks(2).run(save, [*lora, "parallel.pp=2"], str(tmp_path), 2)
    (scales,) = ranks(1).run(load, lora, str(tmp_path), 2)
    assert sorted(scales) == sorted((f"decoder.layers.{name}._extra_state", i) for name in LAYERS for i in range(4))
    assert scales["decoder.layers.mlp.linear_fc2._extra_state", 2]["scale_fwd"] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("steps, history", [(1, [[1.0, 1.0]]), (3, [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])])
def test_a_history_of_another_length(ranks: Ranks, saved: str, steps: int, history: list[list[float]]) -> None:
    """The newest steps are kept at the beginning, as Transformer Engine does when its recipe changes."""
    (found,) = ranks(1).run(load, [], saved, steps)
    assert found["decoder.layers.mlp.linear_fc2._extra_state", 0]["amax_history_bwd"] == history


@pytest.mark.parametrize("fp8", [None, "tensorwise", "mxfp8", "blockwise"])
def test_who_does_not_scale_by_steps_before_is_handed_nothing(ranks: Ranks, saved: str, fp8: str | None) -> None:
    assert ranks(1).run(load, [], saved, 2, fp8) == [{}]


def test_a_run_without_fp8_leaves_nothing_to_begin_from(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(save_plain, str(tmp_path))
    assert ranks(1).run(load, [], str(tmp_path), 2) == [{}]


def save_plain(folder: str) -> None:
    """Writes a checkpoint without FP8: Transformer Engine's layers then store no bytes, portable layers store None."""
    with scenarios.running([]) as engine:
        for _, module, layer in list(layers(engine)):
            if layer < 2:
                module.get_extra_state = lambda: torch.empty(0, dtype=torch.uint8)  # type: ignore[method-assign]
        scenarios.save(engine, Path(folder), {"iteration": 3})


def test_a_pickle_that_would_run_something(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(save, [], str(tmp_path), 2, True)
    (told,) = ranks(1).run(refusal, str(tmp_path))
    assert told.endswith(
        f"of {tmp_path} does not hold FP8 scales: it names builtins.print, which FP8 scales never contain.  No code "
        f"of the pickle was run.  model.init_from={tmp_path} loads only the weights."
    )


def refusal(folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load([], folder, 2)
    return str(caught.value)
