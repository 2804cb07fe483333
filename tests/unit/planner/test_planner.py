"""The planner finds the fastest layout that fits, with few predictions, and proposes only recipes that a run
accepts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from sft.cli import main
from sft.config.keys import values
from sft.console import short_count
from sft.errors import ConfigError
from sft.estimate import memory
from sft.estimate.constants import Curve
from sft.estimate.gpus import GIB
from sft.estimate.lengths import Lengths
from sft.planner import candidates
from sft.planner.cheapest import changes
from sft.planner.reasons import named, next_counts
from sft.planner.search import Search
from sft.planner.subject import recipe_of, slug, text_of
from sft.planner.task import PLANNED, Choice, Proposal, Savings, Sizes, Task, configured
from sft.planner.written import recipe_text
from tests.unit.fixtures.tasks import task_of

pytestmark = pytest.mark.usefixtures("released_models")
QWEN_8B, QWEN_30B = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
MIXED = Lengths.read("1024:0.5,16384:0.4,131072:0.1")
EQUAL_S = 1e-9  # relative: the same sum of floats
MOST_PREDICTIONS = 4500  # for 1,024 GPUs; one prediction takes 0.2 ms of a core, and all together may take 2 s


def every_plan(task: Task, num_gpus: int, parts: Sequence[int]) -> list[Proposal]:
    """Every combination that fits, found without a search; the fastest first.

    parts: the parts of the optimizer in host memory that are tried, in eighths
    """
    search, proposals = Search(task, num_gpus), []
    savings = [
        saving._replace(optim_offload_fraction=part / 8)
        for saving in candidates.savings(task)
        for part in (parts if saving.optim_offload_fraction else [0])
    ]
    for sizes in candidates.sizes(task, num_gpus):
        shards = candidates.shards(task, candidates.shard_kinds(task), sizes, num_gpus)
        for own in product(candidates.cp_comms(task, sizes, num_gpus), savings, shards):
            proposal = search.proposal(Choice(sizes, *own))
            fits = proposal.memory.device <= proposal.usable.bytes
            if fits and proposal.memory.host * num_gpus <= task.hardware.host_bytes:
                proposals.append(proposal)
    return sorted(proposals, key=lambda proposal: proposal.time.step_s)


def test_the_bound_of_a_step_knows_the_rate_of_attention() -> None:
    """Attention's curve is 602 / 530 TFLOP/s; with products at 100, MFU counts 3 / (1 / 602 + 2.5 / 530) at most."""
    _, task = task_of(QWEN_8B, 131072)
    rates = task.hardware.constants
    slow = replace(rates, gemm_tflops=Curve(((1.0, 100.0),), "assumed: for the test"))
    changed = task.changed(hardware=replace(task.hardware, constants=slow))
    highest = max(rate for _, rate in rates.gemm_tflops.points)
    assert changed.least_gpu_s / task.least_gpu_s == pytest.approx(highest * (1 / 602 + 2.5 / 530) / 3)


@pytest.mark.parametrize(
    ("model", "length", "num_gpus", "lengths", "host_gib"),
    [
        ("Qwen/Qwen3-0.6B", 1048576, 4, None, 1000.0),
        ("Qwen/Qwen3-0.6B", 524288, 2, MIXED, 50.0),  # dynamic CP, and too little host memory to offload everything
        pytest.param(QWEN_8B, 65536, 8, None, 1000.0, marks=pytest.mark.grid),
        pytest.param(QWEN_8B, 131072, 8, MIXED, 100.0, marks=pytest.mark.grid),
        ("openai/gpt-oss-20b", 32768, 8, None, 1000.0),
        (QWEN_8B, 32768, 1, None, 1000.0),  # fits with a part of the optimizer in host memory
    ],
)
def test_the_search_finds_what_trying_everything_finds(
    model: str, length: int, num_gpus: int, lengths: Lengths | None, host_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without chunks of the loss head, which only double the combinations to try."""
    every_saving = candidates.savings
    monkeypatch.setattr(
        candidates, "savings", lambda task, **how: [s for s in every_saving(task, **how) if s.chunk_size == "auto"]
    )
    _, task = task_of(model, length, lengths=lengths, host_gib=host_gib)
    tried = every_plan(task, num_gpus, range(1, 9) if num_gpus == 1 else [8])
    found = Search(task, num_gpus).best(1)
    assert len(tried) > 10
    assert found[0].time.step_s == pytest.approx(tried[0].time.step_s, rel=EQUAL_S)


@pytest.mark.parametrize("is_lora", [False, True])
def test_the_bound_of_sizes_is_below_all_that_comes_of_them(is_lora: bool) -> None:
    """The search is exact only if no later choice makes a layout faster than its bound."""
    _, task = task_of(QWEN_8B, 131072, lengths=MIXED, is_lora=is_lora)
    search = Search(task, 16)
    search.best(1)
    smaller = 0
    for first, _, choice, _ in search._bounds or ():
        bound = search.bound(choice)
        assert first <= bound
        shards = candidates.shards(task, candidates.shard_kinds(task), choice.sizes, 16)
        for own in product(candidates.cp_comms(task, choice.sizes, 16), candidates.savings(task)[::29], shards):
            time = search.proposal(Choice(choice.sizes, *own)).time.step_s
            assert bound <= time * (1 + EQUAL_S)
            smaller += time < search.proposal(choice).time.step_s
    assert smaller  # some implementations are faster than p2p, which the bound must respect


def test_the_best_proposals_come_in_order_and_are_different_layouts() -> None:
    _, task = task_of(QWEN_8B, 131072)
    proposals = Search(task, 16).best(5)
    assert [proposal.time.step_s for proposal in proposals] == sorted(proposal.time.step_s for proposal in proposals)
    assert len({proposal.group for proposal in proposals}) == 5
    assert all(proposal.memory.device <= proposal.usable.bytes for proposal in proposals)
    assert all(proposal.memory.host * 8 <= 1000 * GIB for proposal in proposals)


@pytest.mark.parametrize(
    ("host_gib", "setting", "gib"), [(107.0, {}, 107), (106.0, {"checkpoint.async_save": False}, 0)]
)
def test_a_host_without_memory_for_copies(host_gib: float, setting: dict[str, bool], gib: int) -> None:
    """14 bytes for each of 8.19e9 parameters are 106.8 GiB.  Without them, training waits for saves."""
    _, task = task_of(QWEN_8B, 65536, host_gib=host_gib)
    best = Search(task, 8).best(1)[0]
    assert {key: value for key, value in best.settings.items() if key.startswith("checkpoint.")} == setting
    assert round(best.memory.host_of_node(8, 8) / GIB) == gib
    assert ("training waits for saves" in named(best)) == bool(setting)


def test_1024_gpus_take_few_predictions() -> None:
    _, task = task_of(QWEN_30B, 262144, packs=64, lengths=MIXED)
    search = Search(task, 1024)
    assert search.best(5)
    assert len(search._predicted._times) + len(search._predicted.memories) < MOST_PREDICTIONS


@pytest.mark.parametrize(
    "model, num_gpus",
    [
        ("google/gemma-4-26B-A4B-it", 16),
        ("zai-org/GLM-4.5-Air", 64),
        ("moonshotai/Moonlight-16B-A3B-Instruct", 16),
        ("Qwen/Qwen3.6-35B-A3B", 16),
    ],
)
def test_families_with_layers_of_several_kinds_are_planned(model: str, num_gpus: int) -> None:
    _, task = task_of(model, 131_072, packs=16)
    search = Search(task, num_gpus)
    best = search.best(1)[0]
    assert best.num_gpus == num_gpus and best.usable.bytes >= best.memory.device > best.memory.static > 0


def test_a_host_with_little_memory_forbids_offloading() -> None:
    _, task = task_of(QWEN_8B, 262144, host_gib=0.0)
    proposals = Search(task, 16).best(5)
    assert proposals
    for proposal in proposals:
        assert proposal.memory.host == 0.0
        assert proposal.config.train.offload_fraction == proposal.config.optim.offload_fraction == 0.0


def test_candidates_obey_the_schema_and_the_rules_of_layouts() -> None:
    """The candidates contain no combination that the schema refuses, and the planner does not repeat the rules of the
    schema."""
    _, dense = task_of(QWEN_8B, 65536)
    _, experts = task_of(QWEN_30B, 65536)
    assert Savings("none", offload_fraction=1.0) not in candidates.savings(dense)  # needs recompute
    assert any(savings.mlp_tile for savings in candidates.savings(dense))
    assert not any(savings.mlp_tile for savings in candidates.savings(experts))  # needs a dense model
    assert all(sizes.dynamic_cp is False for sizes in candidates.sizes(dense, 8))  # all documents are as long as packs
    _, mixed = task_of(QWEN_8B, 131072, lengths=MIXED)
    dynamic = [sizes for sizes in candidates.sizes(mixed, 8) if sizes.dynamic_cp]
    assert dynamic and all(sizes.cp > 1 for sizes in dynamic)
    four = next(sizes for sizes in dynamic if sizes.cp == 4)
    ways, fixed = (
        {way.cp_comm for way in candidates.cp_comms(mixed, sizes, 8)}
        for sizes in (four, four._replace(dynamic_cp=False))
    )
    assert fixed - ways == {"a2a+p2p"}  # dynamic CP cannot divide two levels


def test_experts_are_split_over_what_divides_them() -> None:
    _, task = task_of(QWEN_30B, 65536)
    found = {sizes.ep for sizes in candidates.sizes(task, 16)}
    assert found == {1, 2, 4, 8, 16}


def test_the_first_savings_are_none_and_all_others_save_more() -> None:
    _, task = task_of(QWEN_8B, 65536)
    listed = candidates.savings(task)
    assert listed[0] == Savings()
    for number, more in enumerate(listed):
        assert not any(candidates.saves_at_least(less, more) for less in listed[:number])


def test_more_context_ranks_than_documents_have_chunks_for() -> None:
    """doc_multiple 32 allows 2 x 16 chunks; cp 32 needs 64."""
    _, task = task_of(QWEN_8B, 1048576)
    sizes = Sizes(tp=2, cp=32, pp=1, virtual_stages=1, ep=1, dynamic_cp=False)
    assert configured(task.config, Choice(sizes, None, Savings())).data.doc_multiple == 64
    assert sizes in set(candidates.sizes(task, 64))


# --- when nothing fits -----------------------------------------------------------------------------------------------


def test_changes_that_make_it_fit() -> None:
    """8 billion weights with Adam need 16 bytes each, 122 GiB: one 80-GB GPU can train them only with packs of
    less than 1M tokens."""
    _, task = task_of(QWEN_8B, 1048576)
    assert Search(task, 1).best(1) == []
    found = changes(task, 1)
    assert {change.setting.partition("=")[0] for change in found} >= {"data.seq_length", "--gpus 2", "--gpu h200"}
    for change in found:
        assert change.proposal.memory.device <= change.proposal.usable.bytes
    assert [change.gpu_seconds for change in found] == sorted(change.gpu_seconds for change in found)
    length = next(change.proposal.config.data.seq_length for change in found if "seq_length" in change.setting)
    longer = task.with_length(length + 1048576 // 16)
    assert Search(longer, 1).best(1) == []


def test_lora_is_a_change_if_weights_are_too_many() -> None:
    _, task = task_of("Qwen/Qwen3.6-27B", 32768, host_gib=0.0)
    assert Search(task, 2).best(1) == []
    assert "LoRA (lora.rank=16) instead of all weights" in {change.setting for change in changes(task, 2)}


# --- the recipe ------------------------------------------------------------------------------------------------------


def written(model: str, length: int, num_gpus: int, **how: object) -> tuple[str, Proposal]:
    recipe, task = task_of(model, length, **how)  # type: ignore[arg-type]
    proposal = Search(task, num_gpus).best(1)[0]
    return recipe_text(recipe, task, proposal, path="planned.yaml", sibling="another.yaml"), proposal


def test_the_recipe_is_what_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, proposal = written(QWEN_8B, 262144, 64)
    Path("planned.yaml").write_text(text)
    recipe = recipe_of("planned.yaml")
    assert {key: values(recipe.config)[key] for key in PLANNED} == {
        key: values(proposal.config)[key] for key in PLANNED
    }
    assert main(["check", "planned.yaml", "--no-data", "--world-size", "64"]) == 0
    printed = capsys.readouterr().out
    assert f"world_size 64 = tp {proposal.layout.tp} x cp {proposal.layout.cp} x pp {proposal.layout.pp}" in printed
    needed = memory.estimate(recipe.config, proposal.layout, 151_936)
    assert needed.device == proposal.memory.device


def test_the_header_of_a_recipe() -> None:
    text, proposal = written(QWEN_8B, 131072, 16)
    lines = text.splitlines()
    assert lines[0] == "# Purpose:  trains Qwen/Qwen3-8B at 128K tokens; `sft plan` chose the layout."
    assert lines[1] == (
        "# Launch:   torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m sft "
        "train planned.yaml"
    )
    assert lines[2] == "# Hardware: 16 GPUs h100, 2 nodes of 8, network ib400."
    assert lines[3].startswith(f"# Expected: predicted, not measured: {proposal.memory.device / GIB:.0f} of ")
    assert lines[3].endswith("All constants of h100 are assumed; `sft plan --calibrate` measures them.")
    assert lines[4] == "# Sibling:  another.yaml"
    one_node, _ = written(QWEN_8B, 32768, 8, is_lora=True)
    assert one_node.splitlines()[:2] == [
        "# Purpose:  trains LoRA adapters of Qwen/Qwen3-8B at 32K tokens; `sft plan` chose the layout.",
        "# Launch:   sft train planned.yaml --processes 8",
    ]


def test_dynamic_cp_writes_the_bandwidths_it_was_planned_with() -> None:
    recipe, task = task_of(QWEN_8B, 131072, lengths=MIXED)
    sizes = Sizes(tp=2, cp=4, pp=1, virtual_stages=1, ep=1, dynamic_cp=True)
    proposal = Search(task, 8).proposal(Choice(sizes, next(candidates.cp_comms(task, sizes, 8)), Savings()))
    text = recipe_text(recipe, task, proposal, path="planned.yaml", sibling="-")
    assert "dynamic_cp: true" in text and "intra_node_gb_s: 340.0" in text


def test_a_recipe_keeps_what_the_user_set() -> None:
    Path("mine.yaml").write_text(
        "run: {dir: runs/mine}\nmodel: {hf: Qwen/Qwen3-8B}\ndata: {train: chat.jsonl, seq_length: 32768}\n"
        "parallel: {tp: 8}\ntrain: {num_steps: 10, global_batch_size: 8, recompute: full}\noptim: {lr: 0.001}\n"
    )
    recipe = recipe_of("mine.yaml")
    task = task_of(QWEN_8B, 32768)[1].changed(config=recipe.config)
    proposal = Search(task, 8).best(1)[0]
    text = recipe_text(recipe, task, proposal, path="b.yaml", sibling="mine.yaml")
    assert "lr: 0.001" in text and "dir: runs/mine" in text and "num_steps: 10" in text
    assert proposal.config.train.recompute != "full" and "recompute: full" not in text
    longer = recipe_of("mine.yaml", seq_length=40960, is_lora=True)
    assert longer.config.data.seq_length == 40960 and longer.config.lora.rank == 16
    assert longer.config.train.global_batch_size == 1_048_576 // 40960


def test_positions_beyond_those_of_the_model_are_scaled() -> None:
    rope = recipe_of(QWEN_8B, seq_length=131072).config.model.rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32768)
    assert recipe_of(QWEN_8B, seq_length=32768).config.model.rope.scaling == "none"
    rope = recipe_of("openai/gpt-oss-20b", seq_length=262144).config.model.rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 64.0, 4096)


def test_what_is_no_model() -> None:
    with pytest.raises(ConfigError, match="Give seq_length"):
        recipe_of(QWEN_8B)
    with pytest.raises(ConfigError, match="neither a recipe"):
        recipe_of("./nothing", seq_length=4096)


def test_names() -> None:
    models = (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3.6-27B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "google/gemma-3-27b-it",
        "./a/",
    )
    assert [slug(model) for model in models] == ["qwen3_0p6b", "qwen36_27b", "llama31_8b", "gemma3_27b", "a"]
    assert [short_count(length) for length in (32768, 1048576, 40000)] == ["32K", "1M", "40000"]
    assert text_of({"run.dir": "runs/a", "model.rope.factor": 2.0, "model.hf": "a/b"}) == (
        "run: {dir: runs/a}\nmodel: {hf: a/b, rope: {factor: 2.0}}\n"
    )


def test_next_counts() -> None:
    _, task = task_of(QWEN_8B, 32768)
    assert next_counts(task, 2) == [4]
    assert next_counts(task, 8) == [16]
    assert next_counts(task, 64) == [72, 128]


def test_shorter_packs_keep_the_tokens_of_a_step() -> None:
    _, task = task_of(QWEN_8B, 131072)
    shorter = task.with_length(32768)
    assert (task.config.train.global_batch_size, shorter.config.train.global_batch_size) == (8, 32)
    assert shorter.tokens_per_step == task.tokens_per_step == 2**20
