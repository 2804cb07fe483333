"""Suites are made once, equally by any number of processes, and read from the cache."""

import hashlib
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.console import Console
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer, FolderTokenizer
from sft.data.long import asking, compose
from sft.data.long.asking import Asked
from sft.data.long.suite import (
    TEXTS,
    Suite,
    SuiteSettings,
    digest_of,
    fetch_suites,
    make_suites,
    open_suites,
    suite_folder,
)
from sft.data.long.tasks import TASKS
from sft.errors import DataError
from tests.object_store import Server

BYTE = ByteTokenizer()
SMALL = SuiteSettings(tasks=("needle", "counting"), lengths=(1024, 2048), depths=(0.0, 1.0), questions=2, seed=0)
# Bytes of all questions of DIGESTED.  If texts change on purpose, change TEXTS and this digest.
DIGESTED = SuiteSettings(tasks=TASKS, lengths=(3072,), depths=(0.5,), questions=1, seed=0)
DIGEST = ("1", "46e0fed1354eb222")


def suites(folder: Path, settings: SuiteSettings = SMALL, tokenizer: ChatTokenizer = BYTE, processes: int = 1):
    said = io.StringIO()
    return make_suites(settings, tokenizer, folder, Console(0, said), processes), said.getvalue()


def tokens(made: list[Suite]) -> list[list[int]]:
    return [suite.corpus.sample(i).tokens.tolist() for suite in made for i in range(len(suite.corpus))]


def test_a_sample_for_each_question_in_the_order_of_its_facts(tmp_path: Path) -> None:
    (short, long), _ = suites(tmp_path)
    assert (short.length, long.length) == (1024, 2048)
    assert [(fact.task, fact.depth, fact.number) for fact in short.facts] == [
        (task, depth, number) for task in ("needle", "counting") for depth in (0.0, 1.0) for number in (0, 1)
    ]
    for suite in (short, long):
        assert len(suite.corpus) == len(suite.facts) == 8
        for i, fact in enumerate(suite.facts):
            sample = suite.corpus.sample(i)
            assert BYTE.decode(sample.tokens[fact.start :]) == fact.answer
            assert sample.weights.tolist() == [0] * fact.start + [1] * len(fact.answer)
            evidence = {"needle": "The password of", "counting": "A bell rings"}[fact.task]
            assert all(BYTE.decode(sample.tokens[at:]).startswith(evidence) for at in fact.evidence)
            assert (fact.token_depth < 0.1) if fact.depth == 0 else (fact.token_depth > 0.5)
        assert suite.corpus.longest <= suite.length


def test_suites_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call tokenises: some texts for each question, until its length is right."""
    tokenised: list[str] = []

    def ask(question: str, *words: Any) -> Asked:
        tokenised.append(question)
        return asking.ask(question, *words)

    monkeypatch.setattr(compose, "ask", ask)
    first, _ = suites(tmp_path)
    assert 16 * 2 <= len(tokenised) <= 16 * 6  # 16 questions; the first two texts of each are 0 and 32 passages
    tokenised.clear()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again, said = suites(tmp_path)
    assert said == "" and {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert tokens(again) == tokens(first) and again[0].facts == first[0].facts
    assert tokens(open_suites(SMALL, BYTE, tmp_path)) == tokens(first)
    assert tokenised == []


def test_the_folder_depends_on_settings_and_tokenizer(
    tmp_path: Path, tokenizers: Callable[[str], FolderTokenizer]
) -> None:
    def name(settings: SuiteSettings = SMALL, length: int = 1024, tokenizer: ChatTokenizer = BYTE) -> str:
        return suite_folder(settings, length, tokenizer, tmp_path).name

    others = [
        name(replace(SMALL, tasks=("needle",))),
        name(replace(SMALL, depths=(0.0,))),
        name(replace(SMALL, questions=3)),
        name(replace(SMALL, seed=1)),
        name(length=2048),
        name(tokenizer=tokenizers("llama31")),
        name(tokenizer=tokenizers("qwen25")),
    ]
    assert len({name(), *others}) == 8
    assert name(replace(SMALL, lengths=(1024,))) == name()  # a suite is reused if further lengths are asked


def test_processes_make_the_same_questions(tmp_path: Path, tokenizers: Callable[[str], FolderTokenizer]) -> None:
    settings = replace(SMALL, lengths=(512,))
    one, _ = suites(tmp_path / "a", settings, tokenizers("qwen25"))
    two, _ = suites(tmp_path / "b", settings, tokenizers("qwen25"), processes=2)
    assert tokens(one) == tokens(two) and one[0].facts == two[0].facts and len(tokens(one)) == 8


def test_a_damaged_or_missing_suite(tmp_path: Path) -> None:
    suites(tmp_path)
    folder = suite_folder(SMALL, 1024, BYTE, tmp_path)
    (folder / "tokens.npy").write_bytes(b"")
    with pytest.raises(DataError, match="not in .*Give each node the same data.cache_dir"):
        open_suites(SMALL, BYTE, tmp_path)
    again, _ = suites(tmp_path)
    shutil.rmtree(folder)
    assert tokens(suites(tmp_path)[0]) == tokens(again)


def test_tasks_that_do_not_fit(tmp_path: Path) -> None:
    made, said = suites(tmp_path, replace(SMALL, tasks=("needle", "documents"), lengths=(128, 400)))
    assert [suite.length for suite in made] == [400] and {fact.task for fact in made[0].facts} == {"needle"}
    assert "128 tokens are too few for the evidence of documents, needle, which is left out" in said
    with pytest.raises(DataError, match="no question of needle fits into 128 tokens with the tokenizer byte"):
        suites(tmp_path, replace(SMALL, tasks=("needle",), lengths=(128,)))


def test_the_version_of_the_texts(tmp_path: Path) -> None:
    """A change of any text makes other questions, which must not be compared with those of older versions."""
    (suite,), _ = suites(tmp_path, DIGESTED)
    content = np.concatenate([suite.corpus.sample(i).tokens for i in range(len(TASKS))])
    assert (TEXTS, hashlib.sha256(content.astype("<i4").tobytes()).hexdigest()[:16]) == DIGEST


def test_another_node_fetches_the_questions(s3: Server, tmp_path: Path) -> None:
    remote, said = "s3://bucket/cache", Console(0, io.StringIO())
    made = make_suites(SMALL, BYTE, tmp_path / "a", said, 1, remote)
    with pytest.raises(DataError, match="set data.cache_remote, and run sft data prepare"):
        open_suites(SMALL, BYTE, tmp_path / "b")
    fetch_suites(SMALL, BYTE, tmp_path / "b", said, remote)
    fetched = open_suites(SMALL, BYTE, tmp_path / "b")
    assert digest_of(fetched) == digest_of(made) and [suite.facts for suite in fetched] == [
        suite.facts for suite in made
    ]
