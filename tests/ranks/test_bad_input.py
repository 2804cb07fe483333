"""A mistake in the input ends a run of two real processes: one paragraph from rank 0, exit code 2, nothing left.

What the recipe alone shows is told without starting torch (tests/unit/test_cli.py, test_recipe.py, test_layout.py);
here are the mistakes that only the running processes can find.
"""

from pathlib import Path

import pytest

from tests.launching import GOOD, start

CASES = {  # name: (content of chat.jsonl, overrides, how rank 0 begins, what it must mention)
    "data that cannot be prepared": (
        GOOD + '\n{"messages": [',
        ["data.doc_multiple=64"],
        "DataError: {folder}/chat.jsonl is not tokenised for these settings in {folder}/run/cache.  Run this first, ",
        "sft data prepare {folder}/recipe.yaml data.doc_multiple=64",
    ),
    "empty file": ("", [], "DataError: data file {folder}/chat.jsonl is empty.", ""),
    "missing tokenizer": (
        GOOD,
        ["data.tokenizer=no/such/folder"],
        "ConfigError: data.tokenizer = no/such/folder",
        "",
    ),
    "no tokenizer in the folder": (GOOD, ["data.tokenizer=docs"], "DataError: ", "docs"),
    "absent Transformer Engine": (
        GOOD,
        ["attention.backend=te", "run.device=auto"],
        "ConfigError: attention.backend = te: Transformer Engine needs CUDA and this run is on the CPU.  "
        "attention.backend=portable runs anywhere.",
        "",
    ),
    "absent CUDA": (
        GOOD,
        ["run.device=cuda"],
        "ConfigError: run.device = cuda, but torch sees no CUDA device.",
        "cpu",
    ),
    "vocabulary too small": (
        GOOD,
        ["model.vocab_size=100"],
        "ConfigError: model.vocab_size = 100 is smaller",
        "259",
    ),
    "unknown megatron field": (
        GOOD,
        ["model.megatron={no_such: 1}"],
        "ConfigError: model.megatron names fields",
        "no_such",
    ),
    "megatron field of experts": (
        GOOD,
        ["model.megatron={moe_router_score_function: sigmoid, num_moe_experts: 4}"],
        "ConfigError: model.megatron sets moe_router_score_function, num_moe_experts, which this trainer's experts do "
        "not read",
        "parallel.ep",
    ),
    "an expert over ranks without NCCL": (
        GOOD,
        ["model.moe.num_experts=4", "model.moe.top_k=2", "parallel.etp=2", "run.device=auto"],
        "ConfigError: parallel.etp = 2 needs NCCL",
        "On the CPU etp is 1",
    ),
    "refused by megatron": (
        GOOD,
        ["model.megatron={recompute_granularity: sideways}"],
        "ConfigError: megatron-core refuses this model: ",
        "sideways",
    ),
    "warm-up as long as the run": (
        GOOD,
        ["train.num_steps=null", "train.num_epochs=2", "optim.warmup_steps=2"],
        "ConfigError: warm-up of 2 steps does not fit a run of 2 steps",
        "below 2 works",
    ),
    "no checkpoint to start from": (
        GOOD,
        ["model.init_from=no/where"],
        "CheckpointError: model.init_from = no/where",
        "",
    ),
    "no checkpoint to resume": (
        GOOD,
        ["checkpoint.resume=must"],
        "CheckpointError: checkpoint.resume = must",
        "",
    ),
    "more processes than the layout": (GOOD, ["parallel.cp=1", "parallel.tp=4"], "ConfigError: ", "tp = 4"),
}
ALONE = {  # found by every process in the same place as another mistake; one process is enough
    "empty file",
    "no tokenizer in the folder",
    "absent CUDA",
    "unknown megatron field",
    "megatron field of experts",
    "warm-up as long as the run",
    "no checkpoint to resume",
}


# One for each place that can refuse; the messages of the others have unit tests of their own.
QUICK = ("data that cannot be prepared", "no tokenizer in the folder", "vocabulary too small", "refused by megatron")
QUICK += ("no checkpoint to start from", "more processes than the layout")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.grid) for name in CASES]
)
def test_a_mistake_is_one_paragraph(name: str, tmp_path: Path) -> None:
    content, overrides, begins, mentions = CASES[name]
    (tmp_path / "chat.jsonl").write_text(content)
    alone = name in ALONE
    (code, _, told), *others = start(tmp_path, [*overrides, "parallel.cp=1"] if alone else overrides, 2 - alone)
    assert code == 2, told
    assert told.startswith(begins.format(folder=tmp_path)), told
    assert mentions.format(folder=tmp_path) in told and "Traceback" not in told
    assert len(told.strip().splitlines()) <= 6
    assert others in ([], [(2, "", "")])
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_without_mistakes_the_same_recipe_trains(tmp_path: Path) -> None:
    """So that the cases above fail for the reason they name."""
    (tmp_path / "chat.jsonl").write_text(GOOD)
    (code, out, told), (other_code, other_out, other_told) = start(tmp_path, [])
    assert (code, other_code) == (0, 0), told + other_told
    assert told == other_out == other_told == ""
    assert "step 2/2 | lm loss" in out
    written = {path.name for path in (tmp_path / "run").iterdir()}
    told = {"metrics.jsonl", "recipe.yaml", "run_state.json", "seen.jsonl", "tensorboard"}
    assert written == {"cache", "checkpoints", "data.json"} | told
