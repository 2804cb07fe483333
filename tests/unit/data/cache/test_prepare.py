"""Preparation: after any interruption, the store equals that of an undisturbed preparation, and finished work is not
repeated."""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sft.cli import main
from sft.data.cache import workers
from sft.data.cache.corpus import find_prepared, map_prepared
from sft.data.cache.folders import store_folder
from sft.data.cache.store import open_store
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.read.rows import index_rows
from sft.errors import DataError
from tests.builders import RECIPE
from tests.unit.corpora import LONG, ROW, corpus_of, write
from tests.unit.fixtures.folder import config

HOW = "sft data prepare a.yaml"
BAD = {"messages": [{"role": "user", "content": "a"}]}
NO_ANSWER = "no assistant turn, only user, so the row has no answer to learn."


def files_of(cache: Path) -> dict[str, bytes]:
    """Every file of the stores and of the work folders below `cache`, by its path in `cache`."""
    paths = (path for folder in sorted(cache.glob("?" * 32 + "*")) for path in sorted(folder.rglob("*")))
    return {str(path.relative_to(cache)): path.read_bytes() for path in paths if path.is_file()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ROWS_PER_PART", 8)


def test_parts_are_of_rows_and_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n[1]\r\n" + b"[%s]\n" % (b" " * 50) + b"1\n2\n3")
    index = index_rows(path)
    assert workers.part_ranges(index) == ((0, 6),)
    monkeypatch.setattr(workers, "ROWS_PER_PART", 4)
    assert workers.part_ranges(index) == ((0, 4), (4, 6))
    monkeypatch.setattr(workers, "BYTES_PER_PART", 12)  # a longer row is a part of its own
    assert workers.part_ranges(index) == ((0, 2), (2, 3), (3, 6))


def test_more_files_than_a_process_may_open_by_default(tmp_path: Path) -> None:
    """Each store takes three file descriptors.  The limit of a shell is soft, and the system allows more."""
    rows = [{"messages": [*LONG["messages"][:3], {"role": "assistant", "content": str(i)}]} for i in range(40)]
    files = [write(tmp_path / f"a{i}.jsonl", row) for i, row in enumerate(rows)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (is_open + 40, hard))
    try:
        corpus = corpus_of(*files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(corpus) == 40


@pytest.mark.usefixtures("small_parts")
def test_processes_and_parts_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = write(tmp_path / "a.jsonl", *[ROW, LONG] * 20), write(tmp_path / "b.jsonl", *[LONG] * 9)
    one = corpus_of(path, other, path, cache=tmp_path / "one", num_workers=1, over_long="windows", seq_length=64)
    two = corpus_of(path, other, path, cache=tmp_path / "two", num_workers=2, over_long="windows", seq_length=64)
    monkeypatch.setattr(workers, "ROWS_PER_PART", 1000)
    big = corpus_of(path, other, path, cache=tmp_path / "big", over_long="windows", seq_length=64)
    assert one.digest == two.digest == big.digest and len(two) == 60 + 18 + 60
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "big")
    assert len(files_of(tmp_path / "one")) == 2 * 4  # two stores, and no other file


@pytest.mark.usefixtures("small_parts")
def test_the_first_bad_row_is_named_with_any_number_of_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 19, "{", *[ROW] * 20, "[]")
    for num_workers in (1, 2):
        with pytest.raises(DataError, match="a.jsonl:20: not JSON: "):
            corpus_of(path, num_workers=num_workers)
        assert files_of(tmp_path / "cache") == {}  # parts of the old file cannot be used for the corrected one


@pytest.mark.usefixtures("small_parts")
def test_finished_parts_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of five parts fails; then one of the first three is damaged.  The next preparation makes this part and
    the last two."""
    path, log = write(tmp_path / "a.jsonl", *[ROW] * 40), []
    expected = corpus_of(path, cache=tmp_path / "whole")
    made = []
    make = workers.encode_rows

    def block(*args: Any) -> Any:
        made.append(len(made))
        if len(made) == 4:
            raise KeyboardInterrupt
        return make(*args)

    monkeypatch.setattr(workers, "encode_rows", block)
    with pytest.raises(KeyboardInterrupt):
        corpus_of(path, num_workers=1)
    [work] = (tmp_path / "cache").glob("*.work")
    assert len(list(work.iterdir())) == 3
    second = work / "part-000000008-000000016"
    damaged = second.read_bytes()
    second.write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    assert corpus_of(path, log=log, num_workers=1).digest == expected.digest
    assert len(made) == 4 + 3
    assert log[-1].endswith("s, 2 of 5 parts reused)")
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def started(action: Callable[[], object]) -> tuple[int, Callable[[], str]]:
    """A forked process, and a function that waits for it and for its child processes.  The function returns the output
    of `action`, or the error that ends it; nothing if the process is killed."""
    reading, writing = os.pipe()
    if not (process := os.fork()):
        os.dup2(writing, 1)  # child processes also hold this end of the pipe
        try:
            os.write(writing, str(action()).encode())
        except DataError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)

    def said() -> str:
        with open(reading) as file:
            text = file.read()
        os.waitpid(process, 0)
        return text

    return process, said


CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")


def ends_before(number: int, folder: Path) -> None:
    """Ends this process just before its change `number`, from 0, of the content of a folder."""
    numbers = count()

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in CHANGES and str(folder) in str(arguments[0])
        if is_change and (event != "open" or "r" not in str(arguments[1])) and next(numbers) == number:
            os._exit(9)

    sys.addaudithook(look)


@pytest.mark.usefixtures("small_parts")
def test_killed_before_any_change_of_the_disk(tmp_path: Path) -> None:
    """The kill leaves no store or a whole one, and the next preparation ends as an undisturbed one does."""
    path = write(tmp_path / "a.jsonl", *[LONG, ROW] * 12)
    settings: dict[str, Any] = {"seq_length": 64, "over_long": "windows"}
    expected = corpus_of(path, cache=tmp_path / "whole", **settings).digest

    def killed(number: int) -> str:
        cache = tmp_path / str(number)
        ends_before(number, cache)
        return corpus_of(path, cache=cache, **settings).digest

    for number in count():
        _, said = started(lambda: killed(number))
        ended = said() == expected
        stores = (tmp_path / str(number)).glob("?" * 32)
        assert all(open_store(store, verify=True) for store in stores)
        assert corpus_of(path, cache=tmp_path / str(number), **settings).digest == expected
        assert files_of(tmp_path / str(number)) == files_of(tmp_path / "whole"), number
        if ended:
            break
    assert number > 10  # three parts, and a store of five files


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("whole", [True, False])
def test_a_process_that_is_killed(tmp_path: Path, whole: bool) -> None:
    """kill -9 of the main process: its child processes notice it and end.  kill -9 of a child process: the main process
    reports it, and does not blame memory.  Finished parts are kept."""
    path = write(tmp_path / "a.jsonl", *[LONG, ROW, LONG] * 1000)
    process, said = started(lambda: corpus_of(path, num_workers=2).digest)
    while not list((tmp_path / "cache").glob("*.work/part-*-?????????")):
        time.sleep(0.005)
    if whole:
        os.kill(process, signal.SIGKILL)
    else:
        ours = psutil.Process(process).children(recursive=True)
        others = [child for child in ours if "resource_tracker import" not in " ".join(child.cmdline())]
        next(child for child in others if not child.children()).kill()
    output = said()  # returns once no process holds the pipe, that is, once all processes have ended
    assert whole or "was ended by SIGKILL.  Finished parts are kept" in output
    assert whole or "the process that tokenised the rows from " in output
    assert list((tmp_path / "cache").glob("*.work/part-*-?????????"))


@pytest.mark.usefixtures("small_parts")
def test_processes_that_prepare_at_once_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW, LONG] * 200)
    alone = corpus_of(path, cache=tmp_path / "alone").digest
    running = [started(lambda: corpus_of(path).digest) for _ in range(2)]
    assert [said() for _, said in running] == [alone, alone]
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "alone")


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("moment", [2, 5])
def test_a_faster_process_takes_the_work_folder_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """This happens before a part, or before parts are joined: the preparation makes the parts again, or finds the
    store."""
    path = write(tmp_path / "a.jsonl", *[ROW] * 40)
    expected = corpus_of(path, cache=tmp_path / "whole").digest
    read, calls = workers.read_part, []

    def read_part(part: Path, data: Any) -> Any:
        calls.append(part)
        if len(calls) - 1 == moment:
            shutil.rmtree(part.parent, ignore_errors=True)
        return read(part, data)

    monkeypatch.setattr("sft.data.cache.workers.read_part", read_part)
    monkeypatch.setattr("sft.data.cache.prepare.read_part", read_part)
    assert corpus_of(path, num_workers=1).digest == expected
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("is_read", [False, True])
def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool) -> None:
    """The file changes before or after its rows are read."""
    path = write(tmp_path / "a.jsonl", *[ROW] * 4)
    make = workers.encode_rows

    def block(*args: Any) -> Any:
        made = make(*args) if is_read else None
        with open(path, "a") as file:
            file.write(json.dumps(ROW) + "\n")
        return made or make(*args)

    monkeypatch.setattr(workers, "encode_rows", block)
    with pytest.raises(
        DataError, match="a.jsonl changed while it was tokenised.  Start the command again when the " "file is complete"
    ):
        corpus_of(path)
    assert not list((tmp_path / "cache").glob("*/part-*"))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("limit", "num_workers"), [(1000, 2), (20_000, 1)])
def test_a_disk_that_is_full(tmp_path: Path, limit: int, num_workers: int) -> None:
    """No file may exceed a limit: that of a part, 2 kB, or that of the store's tokens, 60 kB."""
    path = write(tmp_path / "a.jsonl", *[ROW] * 384)

    def limited() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return corpus_of(path, num_workers=num_workers).digest

    _, said = started(limited)
    told = said()
    assert told.startswith(f"tokenised data cannot be written to data.cache_dir {tmp_path / 'cache'}: ")
    assert "File too large" in told
    assert corpus_of(path).digest == corpus_of(path, cache=tmp_path / "whole").digest
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_a_damaged_store_is_made_again(tmp_path: Path) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW, LONG), []
    digest = corpus_of(path).digest
    whole = files_of(tmp_path / "cache")
    [store] = (tmp_path / "cache").glob("?" * 32)
    tokens = (store / "tokens.npy").read_bytes()
    (store / "tokens.npy").write_bytes(tokens[:-20] + bytes([tokens[-20] ^ 1]) + tokens[-19:])
    assert corpus_of(path, log=log, verify=True).digest == digest
    assert log[0].endswith(f"is incomplete or was changed: tokenising {path} again")
    assert files_of(tmp_path / "cache") == whole
    # Files that a killed preparation left beside a whole store are removed.
    left = store.with_name(f"{store.name}.work")
    left.mkdir()
    write(left / "part-000000", "x")
    corpus_of(path)
    assert files_of(tmp_path / "cache") == whole


def test_training_only_opens_what_is_prepared(tmp_path: Path) -> None:
    path, data = write(tmp_path / "a.jsonl", ROW, LONG), config()
    other = write(tmp_path / "b.jsonl", LONG)
    tokenizer, cache = load_tokenizer(data), tmp_path / "cache"
    with pytest.raises(DataError) as error:
        find_prepared([path, other], data, tokenizer, cache, command=HOW)
    assert str(error.value) == (
        f"{path}, {other} are not tokenised with these settings in {cache}.  First run this command on a machine that "
        "sees these folders: sft data prepare a.yaml"
    )
    assert not cache.exists()
    prepared = corpus_of(path)
    with pytest.raises(DataError, match="b.jsonl is not tokenised with these settings in "):
        find_prepared([path, other], data, tokenizer, cache, command=HOW)
    found = find_prepared([path], data, tokenizer, cache, command=HOW)
    opened = map_prepared(found, data, command=HOW)
    assert opened.digest == prepared.digest and opened.summary() == prepared.summary()
    assert opened.sample(1).tokens.tolist() == prepared.sample(1).tokens.tolist()
    short = {"seq_length": 32, "over_long": "drop"}
    with pytest.raises(DataError, match="no samples remain"):
        corpus_of(path, **short)
    with pytest.raises(DataError, match="no samples remain"):
        find_prepared([path], config(**short), tokenizer, cache, command=HOW)


@pytest.mark.usefixtures("small_parts")
def test_bad_rows_are_skipped_and_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 18, "{", BAD, "", *[ROW] * 5, BAD, *[ROW] * 14)
    corpus = corpus_of(path, on_bad_row="skip", num_workers=2)
    assert len(corpus) == 37 and corpus.name(18) == f"{path}:22"
    ledger = corpus.row_reports[Path(path)]
    assert (ledger.rows, ledger.samples, ledger.rows_skipped, ledger.skipped) == (40, 37, 3, (19, 20, 27))
    not_json = "not JSON: Expecting property name enclosed in double quotes at column"
    assert ledger.reasons == ((NO_ANSWER, 2), (f"{not_json} N of N characters.  If an o...", 1))
    several_lines = (
        "  If an object fills several lines, write it in one line, or put all objects into a list in a .json file."
    )
    [listed] = (tmp_path / "cache").glob("*/rejects.jsonl")
    assert [json.loads(line) for line in listed.read_text().splitlines()] == [
        {"row": 19, "reason": f"{not_json} 2 of 1 characters.{several_lines}"},
        {"row": 20, "reason": NO_ANSWER},
        {"row": 27, "reason": NO_ANSWER},
    ]


def test_more_bad_rows_than_a_tenth_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 9, BAD)
    assert len(corpus_of(path, on_bad_row="skip")) == 9
    path = write(tmp_path / "b.jsonl", *[ROW] * 8, BAD, *[ROW] * 9, BAD)
    with pytest.raises(DataError) as error:
        corpus_of(path, on_bad_row="skip")
    assert str(error.value) == (
        f"2 or more of the 19 rows of {path} cannot be used.  data.on_bad_row = skip skips at most a tenth of a "
        f"file.  The first bad rows:\n  {path}:9: {NO_ANSWER}\n  {path}:19: {NO_ANSWER}"
    )


def test_a_long_sample_is_not_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 20, LONG)
    with pytest.raises(DataError, match="a.jsonl:21: 116 tokens"):
        corpus_of(path, on_bad_row="skip", seq_length=64)


def test_sft_data_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ROW, LONG)
    write(tmp_path / "b.jsonl", ROW)
    path = write(tmp_path / "r.yaml", RECIPE)
    settings = ["data.eval=b.jsonl", "data.tokenizer=byte", "data.cache_dir=c"]
    assert main(["data", "prepare", path, *settings]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("a.jsonl: 2 samples, 155 tokens") and out[1].startswith("b.jsonl: 1 samples")
    assert len(list((tmp_path / "c").iterdir())) == 2
    assert main(["data", "prepare", path, "--workers", "2", *settings, "data.seq_length=2048", "--verify"]) == 0
    assert len(list((tmp_path / "c").iterdir())) == 4
    for store in list((tmp_path / "c").iterdir()):
        store.with_name(f"{store.name}.work").mkdir()
    (tmp_path / "c" / "mine").mkdir()
    capsys.readouterr()
    assert main(["data", "prepare", path, *settings, "--sweep"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len([line for line in out if "removed c/" in line]) == 4 and out[-2].endswith("c: 4.7 KiB freed")
    data = config(train=["a.jsonl"])
    assert sorted(folder.name for folder in (tmp_path / "c").iterdir()) == sorted(
        ["mine", *(store_folder(Path("c"), Path(f), data, load_tokenizer(data)).name for f in ("a.jsonl", "b.jsonl"))]
    )
    assert main(["data", "prepare", path, "--workers", "none", *settings]) == 2
    assert 'data.num_workers = "none"' in capsys.readouterr().err


def test_weights_reach_the_samples(tmp_path: Path) -> None:
    half = {"messages": [ROW["messages"][0], {**ROW["messages"][1], "weight": 0.5}]}
    corpus = corpus_of(write(tmp_path / "a.jsonl", half, LONG))
    assert corpus.sample(0).weights.tolist() == [0.0] * 33 + [0.5] * 5 + [0.0]
    assert corpus.sample(1).weights.dtype == np.float32 and corpus.sample(1).weights.max() == 1
