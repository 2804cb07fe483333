"""Work that the counts of the sandbox do not see is ended by limits of the kernel, and loses no row."""

import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sft.data import limited
from sft.data.cache import workers
from sft.data.chat.tokenizer import FolderTokenizer, load_tokenizer
from sft.data.template.chat_template import ChatTemplate
from sft.errors import DataError
from tests.unit.corpora import corpus_of, write
from tests.unit.fixtures.folder import config, make_folder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Compares two lists of 2**200 items, nested lists that share their parts.
COMPARES = (
    "{% macro f(n, x, y) %}{% if n %}{{ f(n - 1, [x, x], [y, y]) }}{% elif x == y %}{% endif %}{% endmacro %}"
    "{{ f(100, [1], [1]) }}"
)
ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
EVIL = {"messages": [{"role": "user", "content": "evil"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture
def few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of this process has one second of processor time per row, and 256 MiB."""
    run = limited.run

    def with_small_limits(function: Any, tasks: Any, num_children: int, start: tuple[Any, ...] = ()) -> Any:
        return run(function, tasks, num_children, (_small_limits, *start))

    monkeypatch.setattr(limited, "run", with_small_limits)


def _small_limits(function: Callable[..., Any] | None = None, *arguments: Any) -> None:
    limited.ROW_SECONDS, limited.MEMORY = 1, 1 << 28
    if function is not None:
        function(*arguments)


def prepared(tmp_path: Path, folder: Path, template: str, *rows: Any, **settings: Any) -> Any:
    file = tmp_path / "t.jinja"
    file.write_text(template)
    path = write(tmp_path / "a.jsonl", *rows)
    return corpus_of(path, cache=tmp_path / "cache", tokenizer=str(folder), chat_template=str(file), **settings)


@pytest.mark.usefixtures("few_seconds")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_processor_time(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    """The preparation ends; no row is skipped."""
    monkeypatch.setattr(workers, "ROWS_PER_PART", 4)
    template = "{% if messages[0].content == 'evil' %}" + COMPARES + "{% endif %}" + CHATML
    rows = [ROW] * 5 + [EVIL] + [ROW] * 20
    with pytest.raises(DataError) as error:
        prepared(tmp_path, folder, template, *rows, on_bad_row="skip", num_workers=num_workers)
    said = str(error.value)
    assert f"rows from {tmp_path}/a.jsonl:5 to {tmp_path}/a.jsonl:8 with chat template {tmp_path}/t.jinja" in said
    assert "of processor time.  Finished parts are kept, and no row was left out." in said
    assert said.endswith("give another template with data.chat_template.")


@pytest.mark.usefixtures("few_seconds")
def test_memory(tmp_path: Path, folder: Path) -> None:
    template = "{% if messages[0].content == 'evil' %}{% set x = ('é' * 90000000) ~ '→' %}{% endif %}" + CHATML
    with pytest.raises(DataError, match="of memory.  Finished parts are kept, and no row was left out"):
        prepared(tmp_path, folder, template, *[ROW] * 5, EVIL, on_bad_row="skip")


@pytest.mark.usefixtures("few_seconds")
def test_what_is_learnt_of_a_template(folder: Path, tmp_path: Path) -> None:
    """In this process, which loads templates for a report or an export."""
    (tmp_path / "t.jinja").write_text(COMPARES + CHATML)
    tokenizer = load_tokenizer(config(tokenizer=str(folder), chat_template=str(tmp_path / "t.jinja")))
    assert isinstance(tokenizer, FolderTokenizer)
    with pytest.raises(DataError, match="t.jinja cannot be used: the process that tried it took more than "):
        tokenizer.habits  # noqa: B018
    assert "messages" in ChatTemplate(CHATML, "t", {}).variables


def changed(folder: Path, to: Path, **parts: Any) -> Path:
    """The tokenizer of the folder, with other parts of tokenizer.json."""
    shutil.copytree(folder, to)
    content = json.loads((to / "tokenizer.json").read_text())
    (to / "tokenizer.json").write_text(json.dumps({**content, **parts}))
    return to


@pytest.mark.usefixtures("few_seconds")
def test_a_tokenizer_whose_native_code_ends_its_process(folder: Path, tmp_path: Path) -> None:
    """The header of the file asks for a table of 8 GiB."""
    table = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    name = str(changed(folder, tmp_path / "t", normalizer=table))
    with pytest.raises(DataError) as error:
        load_tokenizer(config(tokenizer=name))
    said = str(error.value)
    assert said.startswith(f"tokenizer.json of {name} cannot be used: the process that tried it ")
    # With RUST_BACKTRACE, the last lines of the child are frames.
    assert "needed more than 8 GiB of memory (memory allocation of 8589934584 " in said or "ended by SIGABRT" in said
    assert "Its normalizer, pre-tokenizer or vocabulary asks for too much" in said


def test_a_tokenizer_is_tried_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child reads the tokenizer before this process does, and again if a file has changed."""
    tried: list[str] = []
    monkeypatch.setattr(limited, "call", lambda subject, *_, **__: tried.append(subject))
    other = changed(folder, tmp_path / "t", normalizer={"type": "NFC"})
    for _ in range(3):
        load_tokenizer(config(tokenizer=str(other)))
    assert tried == [f"tokenizer.json of {other}"]
    (other / "added_tokens.json").write_text("{}")
    load_tokenizer(config(tokenizer=str(other)))
    assert len(tried) == 2


def test_an_id_is_no_reason_for_a_huge_table(folder: Path, tmp_path: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"]["zz"] = 1 << 24
    with pytest.raises(DataError, match="has the token id 16,777,216; the largest usable id is 16,777,215"):
        load_tokenizer(config(tokenizer=str(changed(folder, tmp_path / "t", model=model))))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_text_at_which_native_code_panics_is_a_bad_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """A regex that tries every division of the letters."""
    monkeypatch.setattr(workers, "ROWS_PER_PART", 10)
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    name = str(changed(folder, tmp_path / "t", pre_tokenizer=split))
    evil = {"messages": [{"role": "user", "content": "a" * 60 + "b"}, ROW["messages"][1]]}
    path, settings = write(tmp_path / "a.jsonl", *[ROW] * 19, evil), {"tokenizer": name, "num_workers": num_workers}
    with pytest.raises(
        DataError, match=r"a\.jsonl:20: the tokenizer fails at a text of 1\d\d characters, .*retry-limit"
    ):
        corpus_of(path, **settings)
    assert corpus_of(path, on_bad_row="skip", **settings).row_reports[Path(path)].skipped == (20,)


def _twice(value: Any) -> Any:
    return value * 2


def test_a_result_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limited.call("x", _twice, 21) == 42
    with pytest.raises(
        DataError, match="x cannot be used: the process that tried it gave a result of more than 64 MiB"
    ):
        limited.call("x", _twice, b"x" * (40 << 20))


def _seconds_of_rows(num_texts: int, num_bytes: int) -> float:
    """The processor time that a row gets, beyond that of an empty row."""
    seconds = []
    for content in (b"", b"x" * num_bytes):
        for _ in limited.rows([(1, content)], lambda content: num_texts):
            seconds.append(resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time())
    return seconds[1] - seconds[0]


@pytest.mark.parametrize(("num_texts", "seconds"), [(1, 2), (119, 120), (10**9, 1001)])
def test_the_time_of_a_row_grows_with_its_texts(num_texts: int, seconds: int) -> None:
    """A row of 1,000,000 bytes.  A text has half of them on average, and 1,000 texts count at most."""
    assert abs(limited.call("x", _seconds_of_rows, num_texts, 1_000_000) - seconds) <= 1.1  # whole seconds are set


def _stands_still(seconds: float) -> int:
    """Stops itself; another process continues it."""
    limited.ROW_SECONDS = 1
    for _ in limited.rows([(1, b"")]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return 7


def test_a_process_that_stands_still() -> None:
    """Only processor time counts."""
    over = threading.Event()

    def let_go() -> None:
        while not over.wait(2.5):  # longer than the second that a row may take
            for child in psutil.Process().children(recursive=True):
                if child.status() == psutil.STATUS_STOPPED:
                    child.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        assert list(limited.run(_stands_still, [(1.0,)], 1)) == [7]
    finally:
        over.set()
        thread.join()


def _fails(number: int) -> int:
    if number == 2:
        raise DataError("two")
    time.sleep(0.05 * (3 - number))
    return number


def test_results_are_in_order_until_an_error() -> None:
    results = limited.run(_fails, [(i,) for i in range(5)], 3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(DataError, match="two"):
        next(results)


def test_same_bytes_with_any_number_of_processes(tmp_path: Path, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(workers, "ROWS_PER_PART", 4)
    one = prepared(tmp_path, folder, CHATML, *[ROW] * 9, num_workers=1).digest
    (tmp_path / "cache").rename(tmp_path / "first")
    assert prepared(tmp_path, folder, CHATML, *[ROW] * 9, num_workers=2).digest == one
