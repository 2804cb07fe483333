"""The probes pass on the unchanged code, and each finds the faults for which it was written."""

from pathlib import Path

import pytest

from sft.cli import main
from tests.ranks import probing
from tests.ranks.commands import sft
from tests.ranks.layouts import MOE
from tests.ranks.pool import Ranks
from tests.ranks.probing import probe

CP_AGAINST_TP = ["parity", "--against", "parallel.cp=1,parallel.tp=2,parallel.sequence_parallel=true"]
DYNAMIC = "parallel.dynamic_cp=true"
CP, PP = "parallel.cp=2", ["parallel.cp=1", "parallel.pp=2"]
KINDS = [
    *("model.num_layers=4", "model.sliding_window=11", "model.sliding_window_layers=[1, 3]", "model.init_std=0.3"),
    *("model.rope={window_base: 1e3, skip_layers: [2]}", "model.attention_sinks=true", "model.attention_softcap=5"),
    *("model.logits_softcap=10", "model.norm_placement=both", "model.norm_zero_centered=true"),
    "model.activation=geglu",
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probing.prepare(tmp_path_factory.mktemp("probe"))


FOUR = ["train.global_batch_size=4", "model.num_layers=4"]
ON_TWO = [
    ["data", CP],
    ["leak", CP, "train.recompute=selective"],
    ["data", CP, DYNAMIC],
    ["leak", CP, DYNAMIC],
    ["parity", CP, DYNAMIC, "--against", "parallel.dynamic_cp=false"],
    ["leak", *PP, "train.recompute=full"],
    CP_AGAINST_TP,
    ["leak", CP, *KINDS],  # bitwise equal in forward, and no gradient in backward
]
ON_FOUR = [
    ["data", *FOUR, CP],
    ["leak", *FOUR, CP, "parallel.pp=2"],
    ["leak", *FOUR, CP, "parallel.tp=2", "parallel.sequence_parallel=true", "--document", "0"],
    ["parity", *FOUR, "run.precision=bf16", "--against", "parallel.cp=1,parallel.pp=2,parallel.tp=2"],
    ["leak", *FOUR, *PP, "parallel.virtual_stages=2", "parallel.distributed_optimizer=true"],
    ["leak", *FOUR, *MOE, CP, "parallel.ep=2", "model.moe.aux_loss_coef=0.1"],
    ["parity", *FOUR, CP, "--against", "parallel.pp=2,parallel.cp=1,parallel.virtual_stages=2"],
    [
        "parity",
        *FOUR,
        "parallel.cp=1",
        "parallel.distributed_optimizer=true",
        "--against",
        "parallel.pp=2,parallel.tp=2",
    ],
    ["parity", *FOUR, *MOE, "--against", "parallel.ep=4,parallel.cp=1"],
    ["parity", *FOUR, "model.tie_embeddings=true", "--against", "parallel.pp=2,parallel.tp=2,parallel.cp=1"],
]


@pytest.mark.parametrize(
    "world_size,words",
    [*((2, words) for words in ON_TWO), *(pytest.param(4, words, marks=pytest.mark.grid) for words in ON_FOUR)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_code_passes(ranks: Ranks, recipe: Path, world_size: int, words: list[str]) -> None:
    code, answer = probe(ranks(world_size), recipe, words)
    assert (code, answer["problems"]) == (0, []), answer
    assert answer["passed"] and answer["verdict"].startswith(f"{words[0]}: PASS: ")


@pytest.mark.parametrize(
    "words,fault,problems",
    [
        (
            ["leak", *PP],
            "cu_seqlens ignored on one stage",
            [
                "document 2 changes with another document, first after layer 2 (stage 1): 64 tokens, ",
                "document 2 changes with the end of a document, first after layer 2 (stage 1): ",
                "document 1 has a gradient of losses of other documents, first after layer 1 (stage 0): 64 tokens, ",
                "document 1 has, at its end, a gradient of earlier losses or other documents, first after layer 1 ",
            ],
        ),
        (["leak", CP], "labels shifted after the split", ["labels are not the next token of the same document: "]),
        (
            ["leak", CP],
            "positions not reset",
            ["position_ids are outside of their document, ", "first in document 1 ({folder}/chat"],
        ),
        (
            ["leak", CP],
            "contiguous split",
            [
                "document 1 changes with the end of a document, first after layer 1 (stage 0): ",
                "document 1 has, at its end, a gradient of earlier losses or other documents, first after layer 1 ",
            ],
        ),
        (
            ["data", CP],
            "labels shifted after the split",
            ["labels are not the next token of the same document: 2 tokens"],
        ),
        (["data", CP], "the same part on every rank", ["positions 0 to 23 are on two cp ranks", "are on no cp rank"]),
        (
            [*CP_AGAINST_TP, CP],
            "gradient times 1.001",
            ["gradients: relative 1.0e-03, allowed 1e-04: 2 of 15 differ, layer ", "gradient norm: relative "],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_is_found(
    ranks: Ranks, recipe: Path, words: list[str], fault: str, problems: list[str]
) -> None:
    code, answer = probe(ranks(2), recipe, words, fault)
    assert code == 1 and not answer["passed"] and answer["verdict"].startswith(f"{words[0]}: FAIL: ")
    for expected in problems:
        assert any(expected.format(folder=recipe.parent) in problem for problem in answer["problems"]), answer[
            "problems"
        ]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probing.prepare_trees(tmp_path_factory.mktemp("trees"))


@pytest.mark.parametrize(
    "words", [["leak", CP, "--document", "0"], ["leak", CP, *KINDS, "--document", "2"], ["data", CP]], ids=" ".join
)
def test_trees_pass(ranks: Ranks, trees: Path, words: list[str]) -> None:
    """Document 0 has branches, and document 2 is one."""
    code, answer = probe(ranks(2), trees, [*words, probing.TREES])
    assert (code, answer["problems"]) == (0, []), answer


def test_a_branch_that_sees_its_sibling_is_found(ranks: Ranks, trees: Path) -> None:
    words = ["leak", CP, probing.TREES, "--document", "1"]
    code, answer = probe(ranks(2), trees, words, "a branch sees its sibling")
    assert code == 1 and "a branch" in answer["packs"]["0"]
    problems = [problem for problem in answer["problems"] if "document 2 changes with another document" in problem]
    assert problems, answer["problems"]
    assert any("document 1 has a gradient of losses of other documents" in problem for problem in answer["problems"])


def test_ranks_with_different_plans_end_before_they_wait_for_each_other(ranks: Ranks, recipe: Path) -> None:
    """The CP sizes of a pipeline stage, or of any rank, differ.  Training reads its batches in the same way."""
    assert probe(ranks(2), recipe, ["data", CP, DYNAMIC], "other plan on a rank") == (2, {})


def test_what_parity_compares(ranks: Ranks, recipe: Path) -> None:
    _, answer = probe(ranks(2), recipe, CP_AGAINST_TP)
    assert [layout["cp"] for layout in answer["layouts"]] == [2, 1]
    assert 5.4 < answer["loss"][0] < 5.7  # ln 259 = 5.56: the loss of uniform predictions
    names = [parameter["name"] for parameter in answer["parameters"]]
    assert len(set(names)) == 15 and "layer 2 mlp.linear_fc1.weight" in names and len(answer["hidden"]) == 3
    for parameter in answer["parameters"]:
        assert parameter["cosine"] == pytest.approx(1, abs=1e-9) and min(parameter["norms"]) > 0
    squares = sum(parameter["norms"][0] ** 2 for parameter in answer["parameters"])
    assert squares**0.5 == pytest.approx(answer["grad_norm"][0], rel=1e-6)  # whole gradients, each counted exactly once


def test_what_data_shows(ranks: Ranks, recipe: Path) -> None:
    """A single process without torchrun: every document has one supervised run of tokens, and the answers are this
    text."""
    command = ["probe", "data", str(recipe), "parallel.cp=1", "--full"]
    result = sft(ranks(2), *command, alone=True)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "dp rank 0, cp rank 0, microbatch 1: CP size 1, 224 of 224 tokens, 3 documents"
    assert lines[1].startswith(f"  document 0 ({recipe.parent}/chat.jsonl:")
    assert lines[1].endswith(" tokens, padded to 96), positions 0 to 95")
    assert lines[2].startswith("    tokens  <|im_start|>user⏎") and "<|im_start|>assistant⏎abab" in lines[2]
    assert " not supervised) [[abab" in lines[3] and "ab<|im_end|>]] (" in lines[3]
    assert lines[-1].startswith("data: PASS: 3 samples, each exactly once, ")


def test_a_pack_of_one_document_proves_less(ranks: Ranks, recipe: Path) -> None:
    short = "data.seq_length=96"
    assert main(["data", "prepare", str(recipe), short]) == 0
    code, answer = probe(ranks(2), recipe, ["leak", short, CP])
    assert (code, answer["verdict"]) == (
        0,
        "leak: PASS: no token depends on a later token (2 layers, 1 pipeline stages)",
    )


def test_weights_come_from_a_checkpoint(ranks: Ranks, recipe: Path, tmp_path: Path) -> None:
    ranks(2).run(probing.save_weights, recipe, str(tmp_path))
    code, answer = probe(ranks(2), recipe, ["leak", f"model.init_from={tmp_path}"])
    assert code == 0 and answer["weights"].startswith(f"the weights of {tmp_path} (not verified: ")
    _, without = probe(ranks(2), recipe, ["leak"])
    assert without["weights"] == "random weights (seed 1234)"


@pytest.mark.parametrize(
    "words",
    [
        ["leak", "--document", "9"],
        ["leak", "run.fp8=delayed", "run.precision=bf16"],
        ["parity", "--against", "data.pad_to_seq_length=true,run.seed=1"],
        ["parity", "--against", "model.qk_norm=true"],
    ],
    ids=" ".join,
)
def test_a_mistake_ends_with_exit_code_2(ranks: Ranks, recipe: Path, words: list[str]) -> None:
    assert probe(ranks(2), recipe, words) == (2, {})
