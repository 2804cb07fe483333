"""`sft check` and `sft train` give the same exit code and the same error, on fresh folders, on runs and on branches."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COSINE = ["optim.schedule=cosine", "optim.min_lr=1e-5"]
# Starts of a run's command: where each would continue, and the checkpoint that an error names.
STARTS = {
    "a run": (["run.dir=full"], "full/checkpoints/iter_0000004"),
    "an older checkpoint": (["run.dir=damaged"], "damaged/checkpoints/iter_0000002"),
    "a branch": (["checkpoint.resume=full/checkpoints/iter_0000004"], "full/checkpoints/iter_0000004"),
}
# Changes that no checkpoint allows, and the part of the error that names them.
CHANGES = {
    "run.seed=7": "run.seed was 1234, is 7",
    "train.global_batch_size=4": "train.global_batch_size was 2, is 4",
    "data.seq_length=128": "data.seq_length was 64, is 128",
    "data.shuffle=false": "data.shuffle was True, is False",
    "data.doc_multiple=2": "data.doc_multiple was 32, is 2",
    "data.train=other.jsonl": "data has other samples (digest was 5734bfca85f4..., is df198860a89f...)",
    "train.freeze=[embed_tokens]": "train.freeze was [], is ['embed_tokens']",
    "model.rope.base=5e5": "model.rope.base was 10000.0, is 500000.0",
    "model.hf=deep": "model.num_layers was 2, is 3",
}
ADAPTERS = "trains all weights, but this recipe trains adapters.  Give model.hf"
WHOLE = "trains adapters, but this recipe trains all weights.  Give model.hf"
UNKNOWN = "checkpoint.allow_changes names optim.lr, which is never refused.  It may name: data, data.doc_multiple"
# Overrides, and a part of the error.  The other cases are products of STARTS and CHANGES.
OTHERS = {
    "a file": (["run.dir=file"], "run.dir = file (command line: run.dir=file) is not a folder."),
    "below a file": (["run.dir=file/x"], "file, which is not a folder.  Choose another run.dir."),
    "far below a file": (["run.dir=file/x/y/z"], "file, which is not a folder.  Choose another run.dir."),
    "a state that is none": (["run.dir=stateless"], "stateless/run_state.json is not the state of a run"),
    "nothing undamaged": (["run.dir=ruined"], "ruined/checkpoints holds no undamaged checkpoint, and a run that has"),
    "never": (
        ["run.dir=full", "checkpoint.resume=never"],
        "checkpoint.resume = never, but full/checkpoints holds checkpoints of an earlier run.  A new run would mix its "
        "checkpoints with them.  Choose another run.dir, or resume with checkpoint.resume=auto.",
    ),
    "must": (
        ["checkpoint.resume=must"],
        "checkpoint.resume = must, but new/checkpoints has no checkpoint; expected a folder iter_XXXXXXX with "
        "metadata.json, or a folder of such folders.",
    ),
    "no path": (["checkpoint.resume=gone"], "checkpoint.resume = gone names no checkpoint: the path does not exist"),
    "a path without any": (
        ["checkpoint.resume=notes"],
        "checkpoint.resume = notes: the path has no checkpoint; expected ",
    ),
    "a damaged path": (
        ["checkpoint.resume=damaged/checkpoints"],
        "damaged/checkpoints/iter_0000004 is damaged: damaged/checkpoints/iter_0000004/__0_0.distcp has ",
    ),
    "lora into a run": (["run.dir=full", "lora.rank=4"], f"full/checkpoints/iter_0000004 {ADAPTERS}"),
    "lora from a run": (["lora.rank=4", "checkpoint.resume=full/checkpoints"], ADAPTERS),
    "no lora into lora": (["run.dir=lora"], f"lora/checkpoints/iter_0000004 {WHOLE}"),
    "no lora from lora": (["checkpoint.resume=lora/checkpoints"], WHOLE),
    "another rank": (["run.dir=lora", "lora.rank=8"], "lora.rank was 4, is 8"),
    "another scale": (["run.dir=lora", "lora.rank=4", "lora.alpha=64"], "lora.alpha was "),
    "other targets": (["run.dir=lora", "lora.rank=4", "lora.targets=[q_proj]"], "lora.targets was "),
    "another seed beside a base": (["run.dir=lora", "lora.rank=4", "run.seed=7"], "run.seed was 1234, is 7"),
    "another model of lora": (
        ["lora.rank=4", "checkpoint.resume=lora/checkpoints", "model.hf=deep"],
        "model.num_layers was 2, is 3",
    ),
    "a frozen run": (["run.dir=frozen"], "train.freeze was ['embed_tokens'], is []"),
    "a deep run": (["run.dir=deep"], "model.num_layers was 3, is 2"),
    "a deep branch": (["checkpoint.resume=deep/checkpoints"], "model.num_layers was 3, is 2"),
    "never refused": (["run.dir=full", "checkpoint.allow_changes=[optim.lr]"], UNKNOWN),
    "never refused, on a branch": (["checkpoint.resume=full", "checkpoint.allow_changes=[optim.lr]"], "resume = full"),
    "one of two allowed": (
        ["run.dir=full", "run.seed=7", "data.shuffle=false", "checkpoint.allow_changes=[run.seed]"],
        "data.shuffle was True, is False.  Also changed: run.seed was 1234, is 7, as allowed.",
    ),
    "allowed, but of other shapes": (
        ["run.dir=full", "model.hf=wide", "checkpoint.allow_changes=[model.ffn_hidden_size]"],
        "full/checkpoints/iter_0000004 does not hold the expected tensors",
    ),
    "allowed on a branch, but of other layers": (
        ["checkpoint.resume=full/checkpoints", "model.hf=deep", "checkpoint.allow_changes=[model.num_layers]"],
        "full/checkpoints/iter_0000004 does not hold the expected tensors",
    ),
    "allowed, but frozen until now": (
        ["run.dir=frozen", "checkpoint.allow_changes=[train.freeze]"],
        "frozen/checkpoints/iter_0000004 has no optimizer state that fits embedding.word_embeddings.weight: the run "
        "that wrote it did not train them.  Give train.freeze",
    ),
    "allowed, but a part frozen until now": (
        ["run.dir=frozen", "train.freeze=[norm]", "checkpoint.allow_changes=[train.freeze]"],
        "has no optimizer state that fits embedding.word_embeddings.weight: ",
    ),
    "allowed, but adapters of another rank": (
        ["run.dir=lora", "lora.rank=8", "checkpoint.allow_changes=[lora.rank]"],
        "lora/checkpoints/iter_0000004 has no optimizer state that fits its adapters: lora.rank was 4, is 8.",
    ),
    "allowed, but the embedding beside adapters": (
        [
            "run.dir=lora",
            "lora.rank=4",
            "lora.train_embeddings=true",
            "checkpoint.allow_changes=[lora.train_embeddings]",
        ],
        "has no optimizer state that fits embedding.word_embeddings.weight: ",
    ),
    "weights of another model": (["model.init_from=deep/checkpoints"], "deep/checkpoints/iter_0000004"),
    "weights that are not there": (["model.init_from=gone"], "model.init_from = gone: the path has no checkpoint"),
    "weights of a damaged one": (["model.init_from=damaged/checkpoints"], "__0_0.distcp has "),
    "no adapter folder": (["lora.rank=4", "lora.init_from=gone"], "lora.init_from = gone is no folder"),
    "a warm-up too long": (["optim.warmup_steps=9"], "must be below train.num_steps = 4"),
    "more tokens than rows": (["model.vocab_size=300"], "model.vocab_size = 300"),
    "no data": (["data.train=gone.jsonl"], "data.train = gone.jsonl"),
    "no plan": (["data.plan=gone.jsonl"], "data.plan = gone.jsonl"),
}
NO_ERROR = {
    "the same again": ["run.dir=full"],
    "shorter": ["run.dir=full", "train.num_steps=4", "optim.lr=2e-2"],
    "more is frozen": [
        *("run.dir=full_frozen", "checkpoint.resume=full/checkpoints", "train.num_steps=8"),
        *("train.freeze=[embed_tokens]", "checkpoint.allow_changes=[train.freeze]"),
    ],
    "fewer adapters": [
        *("run.dir=q_proj", "checkpoint.resume=lora/checkpoints", "train.num_steps=8", "lora.rank=4"),
        *("lora.targets=[q_proj]", "checkpoint.allow_changes=[lora.targets]"),
    ],
    "lora again": ["run.dir=lora", "lora.rank=4"],
    "a new run": ["run.dir=fresh", "train.num_steps=1"],
    "a new run that never resumes": ["run.dir=fresh_too", "train.num_steps=1", "checkpoint.resume=never"],
}


def products() -> dict[str, tuple[list[str], str]]:
    return {
        f"{change} into {name}": ([*start, change], f"{path} cannot be resumed with this recipe: {text}")
        for (name, (start, path)), (change, text) in product(STARTS.items(), CHANGES.items())
    }


REFUSED = {**products(), **OTHERS}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """The exit code, the error and the output of `sft check` and of `sft train`, by the name of the case."""
    cases = {name: overrides for name, (overrides, _) in REFUSED.items()} | NO_ERROR
    cases["another base"] = ["run.dir=lora", "lora.rank=4", "model.hf=again"]
    cases["extended"] = ["run.dir=cosine", "train.num_steps=8", *COSINE]
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranks.check_and_train", str(tmp_path_factory.mktemp("runs"))],
        input=json.dumps(cases),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    of_case: dict[str, list[list[str]]] = json.loads(done.stdout)
    return of_case


def test_there_are_enough_mistakes() -> None:
    assert len(REFUSED) >= 60


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_refusal(answers: dict[str, list[list[str]]], name: str) -> None:
    check, train = answers[name]
    assert check[:2] == train[:2] and check[0] == 2
    assert REFUSED[name][1] in check[1]


@pytest.mark.parametrize("name", NO_ERROR)
def test_no_refusal(answers: dict[str, list[list[str]]], name: str) -> None:
    check, train = answers[name]
    assert check[:2] == train[:2] == [0, ""]


def test_a_learning_rate_that_jumps(answers: dict[str, list[list[str]]]) -> None:
    """The last step of the shorter schedule had the learning rate 1e-5."""
    check, train = answers["extended"]
    warning = (
        "the learning rate jumps where the run continues: 1e-05 at step 4 of 4 by the recipe of "
        "cosine/checkpoints/iter_0000004, which ended with 1e-05; 0.00309 at step 5 of 8 by this recipe, which ends "
        "with 1e-05."
    )
    assert f"WARNING {warning}" in check[2] and f"WARNING: {warning}" in train[2]
    assert "resume  continues after step 4 of 8, from cosine/checkpoints/iter_0000004\n" in check[2]
    assert "        changed: train.num_steps was 4, is 8\n" in check[2]


def test_base_weights_that_were_never_hashed(answers: dict[str, list[list[str]]]) -> None:
    """`sft check` hashes no weights, and says so; `sft train` hashes them."""
    check, train = answers["another base"]
    assert check[:2] == [0, ""] and "base weights not compared: they were not hashed on this machine" in check[2]
    assert train[0] == 2 and "trains adapters of the weights " in train[1]


def test_a_step_past_the_end(answers: dict[str, list[list[str]]]) -> None:
    check, _ = answers["the same again"]
    assert "resume  continues after step 4 of 4, from full/checkpoints/iter_0000004; no step is left" in check[2]
