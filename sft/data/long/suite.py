"""Makes the questions of a long-context evaluation once, and keeps their tokens in the cache.

    cache_dir/long-3f9a.../   the questions of one length, as a store (`cache/store.py`)
        questions.jsonl       {"task": "needle", "depth": 0.5, "number": 0, "start": 1013, "evidence": [508], ...}

The name of a folder is a hash of everything on which its questions depend: the settings, the tokenizer and template,
and the version of the texts.  Neither the layout nor the number of processes changes a question.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from sft.console import Console
from sft.data import limited
from sft.data.cache.corpus import Corpus
from sft.data.cache.encoder import EncodedRows
from sft.data.cache.remote_stores import RemoteStores
from sft.data.cache.row_report import LINE
from sft.data.cache.store import QUESTIONS, open_store, publish, write_store
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.data.long.asking import without_thinking
from sft.data.long.compose import Bin, Question, compose
from sft.errors import DataError
from sft.files.atomic_files import unusable

# Version of the texts.  A change that gives any question other tokens must change this text;
# tests/unit/data/long/test_suite.py fails if the tokens of its questions change and this text does not.
TEXTS = "1"
_BYTES_PER_TOKEN = 16  # of the text of a question, for the limits of the process that makes it


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """The questions of a long-context evaluation.

    lengths    largest number of tokens of a question with its answer, rising
    depths     places of the first evidence, 0 (beginning of the text) to 1 (end)
    questions  number of questions for each task, length and depth
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    questions: int
    seed: int

    def bins(self, length: int) -> list[Bin]:
        """The bins of one length, in the order of its questions."""
        return [Bin(task, length, depth) for task in self.tasks for depth in self.depths]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A question's bin, the positions of its evidence, and its answer.

    number    index of the question in its bin
    start     number of tokens of the prompt, which is the index of the answer's first token
    evidence  index of the first token of each line of evidence, rising
    """

    task: str
    depth: float
    number: int
    start: int
    evidence: tuple[int, ...]
    answer: str

    @property
    def token_depth(self) -> float:
        """The share of the prompt's tokens that come before the first evidence."""
        return self.evidence[0] / self.start


@dataclass(frozen=True, eq=False)
class Suite:
    """The questions of one length.  facts[i] describes sample i of the corpus."""

    length: int
    corpus: Corpus
    facts: tuple[Fact, ...]


def make_suites(
    settings: SuiteSettings,
    tokenizer: ChatTokenizer,
    cache_dir: Path,
    console: Console,
    num_processes: int,
    remote: str | None = None,
) -> list[Suite]:
    """Makes the suites that `cache_dir` lacks, and returns the suites of all lengths at which a question fits.

    remote: data.cache_remote, from which suites are fetched, and to which they are sent
    A task is left out at a length at which the evidence of one of its questions does not fit.
    Raises DataError if the template cannot ask the questions, if no question fits, or if `cache_dir` cannot be written.
    """
    asking = without_thinking(tokenizer)
    fetch_suites(settings, tokenizer, cache_dir, console, remote)
    try:
        for length in settings.lengths:
            if _open(settings, length, tokenizer, cache_dir) is None:
                _make(
                    settings,
                    length,
                    asking,
                    suite_folder(settings, length, tokenizer, cache_dir),
                    console,
                    num_processes,
                )
    except OSError as error:
        raise unusable(
            "the questions of the long-context suites cannot be written", cache_dir, error, DataError
        ) from error
    if remote is not None:
        RemoteStores(remote, console).send(_folders(settings, tokenizer, cache_dir))
    return open_suites(settings, tokenizer, cache_dir)


def fetch_suites(
    settings: SuiteSettings, tokenizer: ChatTokenizer, cache_dir: Path, console: Console, remote: str | None
) -> None:
    """Fetches the suites that this machine lacks from data.cache_remote.  Called by one process of each node."""
    if remote is not None:
        RemoteStores(remote, console).fetch(_folders(settings, tokenizer, cache_dir))


def _folders(settings: SuiteSettings, tokenizer: ChatTokenizer, cache_dir: Path) -> list[Path]:
    return [suite_folder(settings, length, tokenizer, cache_dir) for length in settings.lengths]


def open_suites(settings: SuiteSettings, tokenizer: ChatTokenizer, cache_dir: Path) -> list[Suite]:
    """The suites that `make_suites` has made.  Raises DataError if one is missing, or if no question fits."""
    opened = [_open(settings, length, tokenizer, cache_dir) for length in settings.lengths]
    suites = [suite for suite in opened if suite is not None]
    if len(suites) < len(opened):
        raise DataError(
            f"the long-context suites are not in {cache_dir}.  Give each node the same data.cache_dir, or set "
            "data.cache_remote, and run sft data prepare."
        )
    if not (fitting := [suite for suite in suites if suite.facts]):
        raise DataError(
            f"no question of {', '.join(settings.tasks)} fits into {max(settings.lengths):,} tokens with the tokenizer "
            f"{tokenizer.name}.  Ask longer questions, or fewer tasks: a needle needs some hundred tokens."
        )
    return fitting


def made_lengths(settings: SuiteSettings, tokenizer: ChatTokenizer, cache_dir: Path) -> list[int]:
    """The lengths whose suites `make_suites` has made, also if no question fits."""
    return [length for length in settings.lengths if _open(settings, length, tokenizer, cache_dir) is not None]


def digest_of(suites: Sequence[Suite]) -> str:
    """A digest of all tokens of the suites: suites with equal digests ask the same questions."""
    lines = [f"{suite.length} {suite.corpus.digest}\n" for suite in suites]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def suite_folder(settings: SuiteSettings, length: int, tokenizer: ChatTokenizer, cache_dir: Path) -> Path:
    """The folder of the questions of one length."""
    libraries = () if isinstance(tokenizer, ByteTokenizer) else ("transformers", "tokenizers", "jinja2")
    parts = {
        "texts": TEXTS,
        "tokenizer": tokenizer.digest,
        "libraries": [version(name) for name in libraries],
        "bins": [[*of[:2], f"{of.depth:g}"] for of in settings.bins(length)],
        "questions": settings.questions,
        "seed": settings.seed,
    }
    return cache_dir / f"long-{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}"


def _open(settings: SuiteSettings, length: int, tokenizer: ChatTokenizer, cache_dir: Path) -> Suite | None:
    """The suite of one length; None if it is missing or damaged."""
    folder = suite_folder(settings, length, tokenizer, cache_dir)
    store = open_store(folder)
    if store is None or not (folder / QUESTIONS).exists():
        return None
    lines = (folder / QUESTIONS).read_text(encoding="utf-8").splitlines()
    facts = [Fact(**{**fact, "evidence": tuple(fact["evidence"])}) for fact in map(json.loads, lines)]
    return Suite(length, Corpus([folder], [store], ["long"]), tuple(facts))


def _make(
    settings: SuiteSettings, length: int, tokenizer: ChatTokenizer, folder: Path, console: Console, num_processes: int
) -> None:
    """Makes the suite of one length.  tokenizer: as returned by `without_thinking`.  Raises OSError."""
    tasks = [(of, number, settings.seed) for of in settings.bins(length) for number in range(settings.questions)]
    temp = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:12]}.work")
    questions: list[Question] = []
    with console.track(f"making questions of {length:,} tokens", len(tasks), "questions") as progress:
        with closing(_questions(tasks, tokenizer, num_processes)) as made:
            unfit = set[str]()
            for (of, _, _), question in zip(tasks, made, strict=True):
                progress.advance(1)
                if question is None:
                    unfit.add(of.task)
                else:
                    questions.append(question)
    if unfit:
        console.say(f"{length:,} tokens are too few for the evidence of {', '.join(sorted(unfit))}, which is left out")
    questions = [question for question in questions if question.bin.task not in unfit]
    try:
        facts = "".join(json.dumps(_fact(question)) + "\n" for question in questions)
        encoded = map(_encoded, range(len(questions)), questions)
        write_store(temp, encoded, np.array([0, 1], np.float32), facts)
        publish(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _questions(
    tasks: Sequence[tuple[Bin, int, int]], tokenizer: ChatTokenizer, num_processes: int
) -> Generator[Question | None, None, None]:
    """The question of each task, in order.  Tokenizers of folders run in processes with limits only."""
    if isinstance(tokenizer, ByteTokenizer):
        return (compose(*task, tokenizer) for task in tasks)
    return limited.run(_compose_in_child, tasks, num_processes, (_keep_tokenizer, tokenizer))


# Each child receives the tokenizer once.
_tokenizer: list[ChatTokenizer] = []


def _keep_tokenizer(tokenizer: ChatTokenizer) -> None:
    _tokenizer[:] = [tokenizer]


def _compose_in_child(of: Bin, number: int, seed: int) -> Question | None:
    text = b" " * (_BYTES_PER_TOKEN * of.length)
    return next(compose(of, number, seed, _tokenizer[0]) for _ in limited.rows([(number, text)]))


def _encoded(row: int, question: Question) -> EncodedRows:
    num_tokens, supervised = len(question.tokens), len(question.tokens) - question.start
    mask = (np.arange(num_tokens) >= question.start).astype(np.uint8)
    line = (row, 1, 1, num_tokens, supervised, num_tokens, num_tokens, supervised)
    return EncodedRows(question.tokens, mask, np.array([0, 1], np.float32), np.array([line], dtype=LINE), ())


def _fact(question: Question) -> dict[str, object]:
    return {
        "task": question.bin.task,
        "depth": question.bin.depth,
        "number": question.number,
        "start": question.start,
        "evidence": question.evidence,
        "answer": question.answer,
    }
