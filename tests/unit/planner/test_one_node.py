"""A million tokens on one node of 8 H100, as predicted with the assumed constants."""

import pytest

from sft.config.train import Recompute
from sft.estimate.gpus import GIB
from sft.planner.search import Search
from sft.planner.task import P2P, Choice, Proposal, Savings, Shards, Sizes
from tests.unit.fixtures.tasks import task_of

pytestmark = pytest.mark.usefixtures("released_models")
M = 2**20
CP_8 = Sizes(tp=1, cp=8, pp=1, virtual_stages=1, ep=1, dynamic_cp=False)


def proposal(model: str, recompute: Recompute, *, optimizer: float = 0.0, tile: int | None = None) -> Proposal:
    """Weights sharded over cp 8, activations on the host."""
    _, task = task_of(model, M)
    savings = Savings(recompute, 1.0, optimizer, tile)
    return Search(task, 8).proposal(Choice(CP_8, P2P, savings, Shards("weights")))


def test_attention_kept_takes_about_four_fifths_of_the_time_of_full() -> None:
    kept, full = (proposal("meta-llama/Llama-3.1-8B-Instruct", name) for name in ("attention_kept", "full"))
    assert kept.time.step_s <= 0.802 * full.time.step_s
    assert kept.memory.device <= 70 * GIB
    # full repeats a forward pass of attention, and nothing else differs: so the ratio cannot be below 0.793, that of
    # attention alone, whose backward takes 2.84 times as long as its forward.
    more = {name: full.time.parts[name] - seconds for name, seconds in kept.time.parts.items()}
    assert {name for name, seconds in more.items() if seconds > 0.001} == {"recompute"}
    forward = more["recompute"] / kept.time.parts["attention"]
    assert 1 / (1 + forward) == pytest.approx(0.793, abs=0.001)
    # Not even if nothing else were repeated, the ratio would be 0.80.
    others = kept.time.parts["recompute"]
    assert 0.800 < (kept.time.step_s - others) / (full.time.step_s - others) < 0.801


def test_shards_of_eight_billion_parameters() -> None:
    assert proposal("Qwen/Qwen3-8B", "full").memory.static <= 17.5 * GIB


def test_32_billion_parameters_need_most_of_the_optimizer_on_the_host() -> None:
    """Full recompute, with all activations on the host.  Less of the optimizer there does not fit."""
    needed = {"train.recompute": "full", "train.offload_fraction": 1.0, "train.mlp_tile": 8192}
    found = []
    for host_gib in (1050.0, 1000.0):
        best = Search(task_of("Qwen/Qwen3-32B", M, host_gib=host_gib)[1], 8).best(1)[0]
        assert best.memory.device <= 76 * GIB
        assert best.settings.items() >= needed.items()
        found.append((best.layout.tp, best.layout.cp, best.settings["optim.offload_fraction"]))
    assert found == [(1, 8, 0.875), (2, 4, 0.625)]
    less = proposal("Qwen/Qwen3-32B", "full", optimizer=0.75, tile=8192)
    assert less.memory.device > less.usable.bytes


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3.6-35B-A3B"])
def test_sharded_weights_with_kept_attention_come_first(model: str) -> None:
    _, task = task_of(model, M)
    best = Search(task, 8).best(1)[0]
    assert best.settings["parallel.shard"] == "weights"
    assert best.settings["train.recompute"] == "attention_kept"
    assert (best.layout.cp, best.layout.dp) == (8, 1)


def test_five_million_tokens_fit_with_chunks_of_heads() -> None:
    """79.1 GiB are a whole H100; a run may use less of it."""
    _, task = task_of("meta-llama/Llama-3.1-8B-Instruct", 5_000_192)
    search = Search(task, 8)
    plain, chunks, on_gpu = (
        search.proposal(Choice(CP_8, P2P, savings, Shards("weights")))
        for savings in (
            Savings("full", 1.0, 1.0, 8192),
            Savings("full", 1.0, 1.0, 8192, head_chunks=8),
            Savings("full", 1.0, 0.0, 8192, head_chunks=8),
        )
    )
    assert plain.memory.device > 100 * GIB
    assert chunks.memory.device <= 64 * GIB and 8 * chunks.memory.host <= 1300 * GIB
    assert on_gpu.memory.device <= on_gpu.usable.bytes < 79.1 * GIB and 8 * on_gpu.memory.host <= 1150 * GIB


def test_chunks_of_heads_are_tried_where_nothing_else_fits() -> None:
    """Nothing has room on a host of 1,000 GiB."""
    found = {}
    for tokens, host_gib in ((M, 1000.0), (5_000_192, 1300.0), (5_000_192, 1000.0)):
        _, task = task_of("meta-llama/Llama-3.1-8B-Instruct", tokens, host_gib=host_gib)
        found[tokens, host_gib] = [best.choice.savings.head_chunks for best in Search(task, 8).best(1)]
    assert [*found.values()] == [[None], [8], []]
