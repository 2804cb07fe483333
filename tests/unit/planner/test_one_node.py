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


def proposal(
    model: str, recompute: Recompute, *, offload: float = 1.0, optimizer: float = 0.0, tile: int | None = None
) -> Proposal:
    """Weights sharded over cp 8."""
    _, task = task_of(model, M)
    savings = Savings(recompute, offload, optimizer, tile)
    return Search(task, 8).proposal(Choice(CP_8, P2P, savings, Shards("weights")))


def test_attention_kept_takes_about_four_fifths_of_the_time_of_full() -> None:
    kept, full = (proposal("meta-llama/Llama-3.1-8B-Instruct", name) for name in ("attention_kept", "full"))
    assert kept.time.step_s <= 0.805 * full.time.step_s
    assert kept.memory.device <= 70 * GIB


def test_shards_of_eight_billion_parameters() -> None:
    assert proposal("Qwen/Qwen3-8B", "full").memory.static <= 17.5 * GIB


def test_32_billion_parameters_need_an_optimizer_on_the_host() -> None:
    """56 of 64 layers in host memory."""
    whole = proposal("Qwen/Qwen3-32B", "full", offload=0.875, optimizer=1.0, tile=8192)
    assert whole.memory.device <= 76 * GIB
    assert 8 * whole.memory.host <= 1050 * GIB
    assert proposal("Qwen/Qwen3-32B", "full", offload=1.0, optimizer=0.5, tile=8192).memory.device > whole.usable.bytes


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
