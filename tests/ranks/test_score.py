"""`sft score` writes the log-probabilities of transformers on every layout, and continues after it was killed."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from sft.api.recipes import load
from sft.console import QUIET
from sft.data.cache.prepare import prepare_train
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.chat.tree import text_positions
from tests.builders import answer
from tests.launching import HF_RECIPE, Rank, environments, kill
from tests.ranks import commands, hf_models
from tests.ranks.commands import sft
from tests.ranks.layouts import EP, PP, SP
from tests.ranks.pool import RankPool, Ranks
from tests.unit.fixtures import hf

# Two fp32 implementations of log-probabilities of -2 to -12; one rounding is 1e-6.
TOLERANCE = 1e-5
K = 8
LENGTHS = (40, 97, 200, 33, 64, 12)  # tokens of six rows
ONE = "parallel.cp=1"
CP = ["parallel.cp=2"]
LAYOUTS = {
    "one": (1, [ONE]),
    "tp 2": (2, [ONE, *SP]),
    "cp 2": (2, CP),
    "pp 2": (2, [ONE, *PP]),
    "dp 2": (2, [ONE]),
    "tp 2, cp 2": (4, [*SP, *CP]),
    "dynamic cp": (2, [*CP, "parallel.dynamic_cp=true"]),
}


def made(folder: Path, family: str) -> Path:
    """The recipe of a small random model whose tokens 3 and 250 have equal scores, and data with a held-out set."""
    hf.save(folder / "source", family, tie_word_embeddings=False)
    model = hf.load(folder / "source")
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[3] *= 4  # among the most likely tokens at half of the positions
        head[250] = head[3]
    model.save_pretrained(folder / "source")
    samples = [answer(length, length // 2, seed=length, last=256) for length in LENGTHS]
    rows = [{"tokens": s.tokens.tolist(), "loss_mask": (s.weights > 0).astype(int).tolist()} for s in samples]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "chat.jsonl").write_text("".join(lines[:5]))
    (folder / "held_out.jsonl").write_text(lines[5])
    recipe = folder / "recipe.yaml"
    held_out = f"seq_length: 256, eval: {folder}/held_out.jsonl"
    text = HF_RECIPE.format(folder=folder).replace("seq_length: 256", held_out)
    recipe.write_text(text.replace("global_batch_size: 1", "global_batch_size: 2"))
    return recipe


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("dense"), "qwen3")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def scored(pool: RankPool, recipe: Path, out: Path, *words: str) -> Path:
    result = sft(pool, "score", str(recipe), *words, "--out", str(out), "--top-k", str(K))
    assert result.code == 0, result.err
    assert [line.split(":")[0] for line in result.out.splitlines()] == [f"{out}/train.parquet", f"{out}/eval.parquet"]
    assert sorted(path.name for path in out.iterdir()) == ["eval.parquet", "train.parquet"]
    return out


def records(out: Path) -> list[dict[str, Any]]:
    return [row for name in ("train", "eval") for row in pq.read_table(out / f"{name}.parquet").to_pylist()]


def reference(source: Path, tokens: list[int]) -> Iterator[np.ndarray]:
    """The log-probabilities of transformers in float64 of every token but the first."""
    model = hf_models.in_float64(hf.load(source))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return iter(torch.log_softmax(logits, -1).numpy()[:-1])


def check(recipe: Path, out: Path) -> None:
    rows, num_equal = records(out), 0
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5, 1] and {row["part"] for row in rows} == {0}
    assert [len(row["input_ids"]) for row in rows] == list(LENGTHS)
    for row in rows:
        teacher, tokens = row["teacher"], row["input_ids"]
        assert teacher["positions"] == [i for i, weight in enumerate(row["loss_mask"]) if weight > 0 and i > 0]
        exact = list(reference(recipe.parent / "source", tokens))
        for position, ids, logprobs, label in zip(
            teacher["positions"], teacher["ids"], teacher["logprobs"], teacher["label_logprobs"], strict=True
        ):
            expected = exact[position - 1]
            best = np.lexsort((np.arange(len(expected)), -expected))[:K]
            # Where ids differ, the log-probabilities of both are nearly equal.
            assert len(ids) == len(set(ids)) == K
            np.testing.assert_allclose(expected[ids], expected[best], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(logprobs, expected[ids], rtol=0, atol=TOLERANCE)
            assert label == pytest.approx(expected[tokens[position]], abs=TOLERANCE)
            if 250 in ids:  # equal to token 3, which has the smaller id
                assert ids.index(250) == ids.index(3) + 1
                num_equal += 1
    assert num_equal > 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_of_transformers(ranks: Ranks, dense: Path, tmp_path: Path, layout: str) -> None:
    size, words = LAYOUTS[layout]
    check(dense, scored(ranks(size), dense, tmp_path / "out", *words))


def test_of_experts_on_two_ranks(ranks: Ranks, experts: Path, tmp_path: Path) -> None:
    check(experts, scored(ranks(2), experts, tmp_path / "out", ONE, *EP))


def test_a_tree_and_its_texts_have_the_same_log_probabilities(ranks: Ranks, dense: Path, tmp_path: Path) -> None:
    """A record of a tree has each label once.  A student's store gets the same numbers."""
    turns = [part for i in range(3) for part in (("user", f"{i} + {i}?"), ("assistant", f"{2 * i}"))]
    messages = [{"role": role, "content": content} for role, content in turns]
    thinking = [{**m, "reasoning_content": "Hm."} if m["role"] == "assistant" else m for m in messages]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": thinking}) + "\n")
    words = [f"data.train={path}", "data.turns=each", "data.eval=null"]
    results = {}
    for name, layout in (("one", [ONE]), ("two", [*CP])):
        result = sft(
            ranks(1 if name == "one" else 2), "score", str(dense), *words, *layout, "--out", f"{tmp_path}/{name}"
        )
        assert result.code == 0, result.err
        results[name] = pq.read_table(tmp_path / name / "train.parquet").to_pylist()
    model = hf_models.in_float64(hf.load(dense.parent / "source"))
    config = load(str(dense), [*words, f"data.teacher={{k: 64, files: [{tmp_path}/two/train.parquet]}}"]).config
    corpus = prepare_train(config, ByteTokenizer(), QUIET)
    assert corpus.has_trees and [row["row"] for row in results["two"]] == [1, 2]
    for number, (one, two) in enumerate(zip(results["one"], results["two"], strict=True)):
        sample = corpus.sample(number)
        assert sample.tree is not None and sample.teacher is not None and two["input_ids"] is None
        np.testing.assert_array_equal(sample.teacher["ids"], two["teacher"]["ids"])
        np.testing.assert_array_equal(sample.teacher["logprobs"], np.float32(two["teacher"]["logprobs"]))
        np.testing.assert_allclose(one["teacher"]["logprobs"], two["teacher"]["logprobs"], rtol=0, atol=TOLERANCE)
        scores = dict(zip(two["teacher"]["positions"], zip(two["teacher"]["ids"], two["teacher"]["logprobs"])))
        assert len(scores) == len(sample.labels) > 5
        for text in range(len(sample.tree.ends)):
            stored = text_positions(sample.tree, text)
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(sample.tokens[stored].astype(np.int64))[None]).logits[0]
            exact = torch.log_softmax(logits, -1).numpy()
            for place, token in enumerate(stored.tolist()):
                if token in scores and place:
                    ids, logprobs = scores[token]
                    np.testing.assert_allclose(logprobs, exact[place - 1][ids], rtol=0, atol=TOLERANCE)


def test_refusals(ranks: Ranks, dense: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        result = sft(ranks(2), "score", str(dense), ONE, *words, alone=True)
        assert (result.code, result.out) == (2, ""), result.err
        (error,) = [line for line in result.err.splitlines() if "Error: " in line]
        return error

    out = ["--out", str(tmp_path / "out")]
    assert "--top-k 302 is more than the 301 tokens of the vocabulary" in refused(*out, "--top-k", "302")
    assert "--top-k 0 is no number of tokens" in refused(*out, "--top-k", "0")
    (tmp_path / "file").write_text("")
    assert f"--out {tmp_path}/file is not a folder" in refused("--out", str(tmp_path / "file"))
    scored(ranks(1), dense, tmp_path / "done", ONE)
    before = (tmp_path / "done/train.parquet").read_bytes()
    other = refused("--out", str(tmp_path / "done"), "--top-k", "9")
    assert f"--out has {tmp_path}/done/train.parquet, which is of another scoring or damaged" in other
    again = sft(ranks(1), "score", str(dense), ONE, "--out", str(tmp_path / "done"), "--top-k", str(K))
    assert again.code == 0 and again.out.count("was finished before") == 2
    assert (tmp_path / "done/train.parquet").read_bytes() == before


def test_killed_at_random_points_and_continued(ranks: Ranks, dense: Path, tmp_path: Path) -> None:
    """Then other settings are refused, and a damaged part is scored again."""
    words = [*CP, "train.global_batch_size=1", "data.seq_length=64", "data.over_long=windows"]
    whole = scored(ranks(2), dense, tmp_path / "whole", *words)
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert max(row["part"] for row in records(whole)) > 1
    out = tmp_path / "out"
    command = ["score", str(dense), *words, "--out", str(out), "--top-k", str(K)]
    for num_parts in np.random.default_rng(50).integers(1, 7, size=2).cumsum():
        processes = [Rank(command, {**os.environ, **environ}) for environ in environments(2)]
        while len(parts := [*out.rglob("rank-*.npy")]) < num_parts and None in [rank.poll() for rank in processes]:
            time.sleep(0.002)
        kill(processes)
        assert not (out / "train.parquet").exists() and len(parts) >= num_parts
    result = sft(ranks(2), *command[:-1], "9")
    assert result.code == 2 and "train.work has parts of another scoring: k was 8, and is now 9" in result.err
    parts[0].write_bytes(parts[0].read_bytes()[:-5])
    result = sft(ranks(2), *command)
    assert result.code == 2 and f"{parts[0]} is damaged (" in result.err and not parts[0].exists()
    scored(ranks(2), dense, out, *words)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected


@pytest.mark.parametrize("turns", ["chat", "each"])
def test_a_model_is_no_different_from_itself_as_teacher(ranks: Ranks, dense: Path, tmp_path: Path, turns: str) -> None:
    """The loss head, the store and packs of other sizes and CP sizes place each distribution where it belongs."""
    talk = [part for i in range(4) for part in (("user", "Say " * i), ("assistant", f"{i}, {i * i}"))]
    rows = [[{"role": role, "content": text + str(n)} for role, text in talk] for n in range(5)]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    data = [f"data.eval={path}", f"data.turns={turns}", "data.seq_length=512"]
    words = [*data, f"data.train={dense.parent}/held_out.jsonl"]
    result = sft(ranks(2), "score", str(dense), *words, ONE, "--out", str(tmp_path / "out"), "--top-k", str(K))
    assert result.code == 0, result.err
    teacher = f"data.teacher={{k: {K}, files: [{tmp_path}/out/eval.parquet, {tmp_path}/out/train.parquet]}}"
    layout = [*CP, "parallel.dynamic_cp=true", "train.global_batch_size=4"]
    record = commands.scored(ranks(2), dense, *words, *layout, teacher, "loss.distill.weight=1.0")["sets"]["eval"]
    assert record["teacher/tokens"] == record["tokens/supervised"] > 60
    assert abs(record["teacher/divergence"]) < 1e-6 and record["teacher/agreement"] == 1
    other = hf.save(tmp_path / "other", "qwen3", tie_word_embeddings=False, seed=9)
    words += [*layout, teacher, "loss.distill.weight=1.0", "--from", str(other)]
    record = commands.scored(ranks(2), dense, *words)["sets"]["eval"]
    assert record["teacher/divergence"] > 0.01 and record["teacher/agreement"] < 0.5
