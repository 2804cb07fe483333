"""Weights that ranks read from safetensors files equal imported weights, on any layout; a rank reads only its own
parts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.console import QUIET
from sft.errors import CheckpointError
from sft.hf.source import open_source
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine
from sft.mcore.modules.stored import sharded_tensors
from sft.weights.import_hf import import_hf
from sft.weights.load import load_weights
from tests.ranks import scenarios
from tests.ranks.hf_models import recipe_of
from tests.ranks.layouts import CP, EP, PP, SHARDED, SP, TP
from tests.ranks.pool import Ranks
from tests.unit.fixtures import fp8, hf

BF16 = ["run.precision=bf16"]
MOST = 1.05  # bound on requested bytes / bytes that the rank keeps
Loaded = dict[str, Any]


def forget(engine: Engine) -> None:
    """Sets all weights to NaN."""
    with torch.no_grad():
        for chunk in engine.chunks:
            for param in chunk.parameters():
                param.fill_(torch.nan)
    engine.optimizer.reload_model_params()


def load_in_three_ways(overrides: list[str], source: str, imported: str) -> dict[str, Loaded]:
    """For this rank and each way to load: hashes of the weights and of the optimizer's copies, and requested bytes."""
    ways: dict[str, Callable[[Engine], int]] = {
        "imported": lambda engine: engine_state.load_weights(engine, Path(imported)) or 0,
        "straight": partial(load_straight, source=source),
        "read once": partial(load_straight, source=source, read_once=True),
    }
    found = {}
    with scenarios.running(overrides, has_weights=False) as engine:
        for way, load in ways.items():
            forget(engine)
            requested = load(engine)
            found[way] = {
                "weights": scenarios.parameter_hash(engine),
                "optimizer": scenarios.optimizer_hash(engine),
                "requested": requested,
                "kept": kept(engine),
            }
            assert engine.has_weights and engine_state.is_finite(engine)
    return found


def load_straight(engine: Engine, source: str, *, read_once: bool = False) -> int:
    """Loads from the files.  Returns the bytes that this rank requested from them."""
    opened = open_source(Path(source), compare=False)
    load_weights(engine, opened, QUIET, read_once=read_once)
    return opened.stored.requested_bytes


def kept(engine: Engine) -> int:
    """The number of elements that this rank holds."""
    shards = [shard for chunk in engine.chunks for shard in sharded_tensors(chunk.module.sharded_state_dict())]
    return sum(shard.data.numel() for shard in shards)


# Tensors that tp does not split: both tp ranks read them.
NOT_SPLIT = ("norm.weight", ".gate.weight")


@pytest.mark.parametrize(
    "family,world_size,overrides,fields,read_twice",
    [
        ("qwen2", 2, [*TP, *BF16], dict(dtype=torch.bfloat16, shard="20KB"), NOT_SPLIT),
        ("llama", 2, [*CP, *BF16, *SHARDED], dict(dtype=torch.float32), ()),  # rounds fp32 to bf16
        ("qwen3", 2, PP, dict(dtype=torch.bfloat16, tied=True), ("embed_tokens.weight",)),  # widens bf16 to fp32
        ("qwen3_moe", 2, [*EP, *CP], {}, ()),
        ("mixtral", 2, [*SP, *EP], {}, NOT_SPLIT),
        ("qwen3_moe", 4, [*SP, *EP], {}, NOT_SPLIT),  # two ranks hold each part
        pytest.param("mistral", 4, [*TP, *PP], {}, NOT_SPLIT, marks=pytest.mark.grid),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_weight_is_that_of_an_import(
    ranks: Ranks,
    tmp_path: Path,
    family: str,
    world_size: int,
    overrides: list[str],
    fields: dict[str, Any],
    read_twice: tuple[str, ...],
) -> None:
    source = hf.save(tmp_path / "source", family, **fields)
    import_hf(source, tmp_path / "imported", QUIET)
    recipe = [*recipe_of(source), *overrides]
    results = ranks(world_size).run(load_in_three_ways, recipe, str(source), f"{tmp_path}/imported/iter_0000000")
    width = fields.get("dtype", torch.float32).itemsize
    for result in results:
        imported, straight, once = (result[way] for way in ("imported", "straight", "read once"))
        assert straight["weights"] == once["weights"] == imported["weights"]
        assert straight["optimizer"] == once["optimizer"] == imported["optimizer"]
        padding = 2 * 83 * hf.WIDTH * width  # embedding and output have 384 rows, of which 301 are tokens
        assert straight["kept"] * width - padding <= straight["requested"] <= MOST * straight["kept"] * width
    stored = hf.tensors(source)
    again = sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(read_twice))
    requested = [result["read once"]["requested"] for result in results]
    assert sum(requested) == sum(tensor.nbytes for tensor in stored.values()) + again
    assert min(requested) > 0.5 * max(requested)  # the ranks share the work


def hashes_of(overrides: list[str], sources: list[str], imported: str) -> list[str]:
    """The hashes of this rank's weights: read from each folder, and from the checkpoint."""
    found = []
    with scenarios.running(overrides, has_weights=False) as engine:
        for source in sources:
            forget(engine)
            load_straight(engine, source)
            found.append(scenarios.parameter_hash(engine))
        forget(engine)
        engine_state.load_weights(engine, Path(imported))
        return [*found, scenarios.parameter_hash(engine)]


@pytest.mark.parametrize(
    "family,overrides",
    [
        ("deepseek_v3", [*SP, *EP, *BF16]),
        pytest.param("deepseek_v3", [*PP, *CP, *BF16], marks=pytest.mark.grid),
        pytest.param("minimax_m2", [*SP, *EP], marks=pytest.mark.grid),
        pytest.param("glm4_moe", [*SP, *EP, *BF16], marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_fp8_weights_are_the_numbers_that_they_mean(
    ranks: Ranks, tmp_path: Path, family: str, overrides: list[str]
) -> None:
    """Also if a rank's part begins or ends inside a block of 128 x 128."""
    numbers = fp8.save(tmp_path / "fp8", family)
    plain = hf.save(tmp_path / "plain", family, dtype=torch.bfloat16, **fp8.SIZES[family])
    hf.rewrite(plain, **{name.replace(".", "/"): tensor for name, tensor in numbers.items()})
    import_hf(tmp_path / "fp8", tmp_path / "imported", QUIET)
    sources, imported = [str(tmp_path / "fp8"), str(plain)], f"{tmp_path}/imported/iter_0000000"
    world_size = 4 if overrides[:2] == [*PP, *CP] else 2
    for result in ranks(world_size).run(hashes_of, [*recipe_of(plain), *overrides], sources, imported):
        assert len(set(result)) == 1


def refusal(overrides: list[str], source: str) -> str:
    with scenarios.running(overrides, has_weights=False) as engine:
        with pytest.raises(CheckpointError) as error:
            load_straight(engine, source)
        assert not engine.has_weights
        return str(error.value)


def test_a_fault_that_one_rank_meets_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    source = hf.save(tmp_path / "source", "llama")
    recipe = [*recipe_of(source), *TP]
    last = hf.tensors(source)["model.layers.1.mlp.down_proj.weight"]
    last[-1, -1] = torch.inf  # in the columns of the second rank
    hf.rewrite(source, **{"model/layers/1/mlp/down_proj/weight": last})
    told = f"{source} holds values that are not finite, for example in decoder.layers.mlp.linear_fc2.weight."
    assert ranks(2).run(refusal, recipe, str(source)) == [told, told]
    other = [*recipe, "model.ffn_hidden_size=128"]
    told = "decoder.layers.mlp.linear_fc1.weight has (2, 256, 32), the files shape (2, 128, 32)"
    assert all(told in one for one in ranks(2).run(refusal, other, str(source)))
