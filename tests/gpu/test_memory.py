"""The memory that layers keep on a GPU and in host memory, and runs that end because memory is exhausted."""

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.config import ProfileConfig
from sft.console import Console
from sft.run.profiler import Profiler
from tests.gpu.runs import gradients, running
from tests.ranks import scenarios

# bf16, of the norm of a gradient: the flash kernel adds up the gradient of queries in no fixed order.
TOLERANCE = 2e-2
LONG = [
    "run.precision=bf16",
    "model.num_layers=8",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1536",
    "model.num_attention_heads=8",
    "model.num_query_groups=2",
    "data.seq_length=16384",
    "train.global_batch_size=1",
]
# Of one layer and token, see tests/ranks/test_saved_tensors.py: hidden 512 twice, query and out 512,
# key and value 128, bf16.
HIDDEN, KEPT = 2 * 512, 2 * (512 + 512 + 512 + 512 + 128 + 128)
# The output of attention and the log-sum-exp of 8 heads, in fp32.
OUTPUT = 2 * 512 + 8 * 4
# Its fused layers keep what they normalised besides what came in: twice hidden, query and key.
KEPT_BY_TE = KEPT + 2 * (512 + 512 + 128)
SLACK = 1.15  # small tensors, rounding by the allocator
CACHED = 16  # bytes a token: a block of up to 1 MiB more than was asked for counts as a whole, in the smaller run too


def one_document(engine: Any) -> Any:
    corpus = scenarios.SkewedCorpus([engine.config.data.seq_length])
    return scenarios.microbatch_of(engine, [corpus.sample(0)])


def gradients_of(overrides: list[str]) -> dict[str, np.ndarray]:
    with running([*LONG, *overrides]) as engine:
        return gradients(engine, [one_document(engine)])


WAYS = [
    ["train.recompute=selective"],
    ["train.recompute=full"],
    ["train.recompute=attention_kept"],
    ["train.recompute=attention_kept", "train.offload_fraction=1"],
    ["train.recompute=selective", "train.mlp_tile=1000"],
    ["train.recompute=selective", "train.offload_fraction=1"],
    ["train.recompute=full", "train.offload_fraction=1"],
]


@pytest.fixture(scope="module")
def plain() -> dict[str, np.ndarray]:
    return gradients_of(["train.recompute=none"])


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_gradients_do_not_notice(plain: dict[str, np.ndarray], way: list[str]) -> None:
    found = gradients_of(way)
    for name, gradient in plain.items():
        error = np.linalg.norm(found[name] - gradient)
        assert error <= TOLERANCE * np.linalg.norm(gradient), (name, error)


def bytes_after_forward(overrides: list[str], num_layers: int) -> int:
    with running([*LONG, *overrides, f"model.num_layers={num_layers}"]) as engine:
        microbatch = one_document(engine)
        for _ in range(2):  # the first pass makes buffers that stay
            gc.collect()
            before = torch.cuda.memory_allocated()
            for chunk in engine.chunks:
                chunk.train()
            hidden, _ = engine._forward_step(
                lambda *told: None, iter([("microbatch 1 of 1", microbatch)]), engine.chunks[0]
            )
            torch.cuda.synchronize()
            found = torch.cuda.memory_allocated() - before
            del hidden
        return found


@pytest.mark.parametrize(
    "way, kept",
    [
        (["train.recompute=selective"], {"portable": KEPT, "te": KEPT_BY_TE}),
        (["train.recompute=full"], {"portable": HIDDEN, "te": HIDDEN}),
        (["train.recompute=attention_kept"], {"portable": HIDDEN + OUTPUT, "te": HIDDEN + OUTPUT}),
        (["train.recompute=selective", "train.offload_fraction=1"], {"portable": 0, "te": 0}),
        (["train.recompute=full", "train.offload_fraction=1"], {"portable": 0, "te": 0}),
    ],
)
def test_bytes_of_a_layer(backend: str, way: list[str], kept: dict[str, int]) -> None:
    """Four layers more keep four layers' worth more, or next to nothing where that goes to the host.  Up to 16 bytes a
    token less: torch counts a block that it had cached as a whole, which may be the smaller run's."""
    way, per_token = [*way, f"attention.backend={backend}"], kept[backend]
    more = bytes_after_forward(way, 8) - bytes_after_forward(way, 4)
    least, most = 4 * 16384 * (per_token - CACHED), 4 * 16384 * (per_token * SLACK + 100)
    assert least <= more <= most, (more / 4 / 16384, per_token)


def test_an_end_for_want_of_memory_leaves_a_snapshot(tmp_path: Path) -> None:
    """At most 2 GiB may be taken, by the tests before this one too, and step 2 takes three."""
    fraction = 2 * 2**30 / torch.cuda.get_device_properties(0).total_memory
    config = ProfileConfig.model_validate({"memory": {"steps": [5], "ranks": [0]}})
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with running([]) as engine, pytest.raises(torch.OutOfMemoryError):
            with Profiler(config, tmp_path, engine.groups, Console(1)) as profile:
                for number in (1, 2):
                    with profile.step(number):
                        torch.empty(number * 3 * 2**29, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (path,) = (tmp_path / "memory_snapshots" / "step_2_oom").iterdir()
    found = pickle.loads(path.read_bytes())
    actions = {entry["action"] for trace in found["device_traces"] for entry in trace}
    assert "oom" in actions and "alloc" in actions
