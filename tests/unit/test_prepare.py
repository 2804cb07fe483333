"""Preparation: whatever interrupts it, the store is the one of an undisturbed run, and nothing is made twice."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sft.cli import main
from sft.data.cache import encoder, workers
from sft.data.cache.corpus import Corpus, find_prepared, map_prepared
from sft.data.cache.folders import store_folder
from sft.data.cache.store import open_store
from sft.data.chat.encode_chat import Encoding
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.read.rows import index_rows, read_rows
from sft.errors import DataError
from tests.builders import RECIPE
from tests.unit.corpora import LONG, ROW, corpus_of, write
from tests.unit.fixtures.folder import config

ROOT = str(Path(__file__).parents[2])
HOW = "sft data prepare a.yaml"
BAD = {"messages": [{"role": "user", "content": "a"}]}  # no assistant turn


def files_of(cache: Path) -> dict[str, bytes]:
    """Every file below `cache`, by its path in it."""
    return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*")) if path.is_file()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ROWS_PER_PART", 8)


# --- parts ---


def test_parts_are_of_rows_and_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n[1]\r\n" + b"[%s]\n" % (b" " * 50) + b"1\n2\n3")
    index = index_rows(path)
    assert index.num_rows == 6 and index.numbers is not None and index.numbers.tolist() == [1, 3, 4, 5, 6, 7]
    assert index.offsets is not None and index.offsets.tolist() == [3, 7, 12, 65, 67, 69]
    assert list(read_rows(path, index, 0, 2)) == [(1, b"{}"), (3, b"[1]")]
    assert list(read_rows(path, index, 4, 6)) == [(6, b"2"), (7, b"3")]
    assert workers.part_ranges(index) == ((0, 6),)
    monkeypatch.setattr(workers, "ROWS_PER_PART", 4)
    assert workers.part_ranges(index) == ((0, 4), (4, 6))
    monkeypatch.setattr(workers, "BYTES_PER_PART", 12)  # a longer row is a part of its own
    assert workers.part_ranges(index) == ((0, 2), (2, 3), (3, 6))


@pytest.mark.usefixtures("small_parts")
def test_processes_and_parts_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = write(tmp_path / "a.jsonl", *[ROW, LONG] * 20), write(tmp_path / "b.jsonl", *[LONG] * 9)
    one = corpus_of(path, other, path, cache=tmp_path / "one", num_workers=1, over_long="windows", seq_length=64)
    two = corpus_of(path, other, path, cache=tmp_path / "two", num_workers=2, over_long="windows", seq_length=64)
    monkeypatch.setattr(workers, "ROWS_PER_PART", 1000)
    big = corpus_of(path, other, path, cache=tmp_path / "big", over_long="windows", seq_length=64)
    assert one.digest == two.digest == big.digest and len(two) == 60 + 18 + 60
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "big")
    assert len(files_of(tmp_path / "one")) == 2 * 4  # two stores, and nothing beside them


@pytest.mark.usefixtures("small_parts")
def test_the_first_bad_row_is_named_with_any_number_of_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 19, "{", *[ROW] * 20, "[]")
    for num_workers in (1, 2):
        with pytest.raises(DataError, match="a.jsonl:20: not JSON: "):
            corpus_of(path, num_workers=num_workers)
        assert files_of(tmp_path / "cache") == {}  # what was made is of no use for the mended file


@pytest.mark.usefixtures("small_parts")
def test_finished_parts_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of five parts fails; one of the first three is damaged then.  Two are left to make, and that one."""
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
    [work] = (tmp_path / "cache").iterdir()
    assert sorted(part.name for part in work.iterdir()) == [
        "part-000000000-000000008",
        "part-000000008-000000016",
        "part-000000016-000000024",
    ]
    second = work / "part-000000008-000000016"
    damaged = second.read_bytes()
    second.write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    assert corpus_of(path, log=log, num_workers=1).digest == expected.digest
    assert len(made) == 4 + 3
    assert log[-1].endswith("s, 2 of 5 parts were there)")
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


# --- killed, disturbed and refused ---

PREPARE = """
if __name__ == "__main__":
    import sys, time
    from pathlib import Path
    from sft.config import DataConfig
    from sft.console import QUIET
    from sft.data.cache import workers
    from sft.data.cache.prepare import prepare
    from sft.data.chat.tokenizer import load_tokenizer

    workers.ROWS_PER_PART = int(sys.argv[3])
    data = DataConfig(train=[sys.argv[1]], seq_length=64, over_long="windows", num_workers=int(sys.argv[4]))
    print("started", flush=True)
    print(prepare(data.train, data, load_tokenizer(data), Path(sys.argv[2]), QUIET).digest)
"""


def start(tmp_path: Path, path: str, cache: str, *, rows_per_part: int, num_workers: int) -> subprocess.Popen[str]:
    script = tmp_path / "prepare.py"
    script.write_text(PREPARE)
    return subprocess.Popen(
        [sys.executable, str(script), path, str(tmp_path / cache), str(rows_per_part), str(num_workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_killed_at_any_moment(tmp_path: Path, num_workers: int) -> None:
    """kill -9 of the process alone: those it started must find out by themselves."""
    path = write(tmp_path / "a.jsonl", *[LONG, ROW, LONG] * 1000)
    corpus_of(path, cache=tmp_path / "whole", seq_length=64, over_long="windows")
    random.seed(num_workers)
    kills = parts_there = 0
    for attempt in range(8):
        process = start(tmp_path, path, "cache", rows_per_part=20, num_workers=num_workers)
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        deadline = time.monotonic() + random.uniform(0.0, 0.1 + 0.1 * attempt)
        if attempt == 7:
            deadline = float("inf")
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()  # returns once nobody holds the pipe any more: no process is left behind
        work = [folder for folder in (tmp_path / "cache").glob("*.work")]
        parts_now = sum(len(list(folder.glob("part-*-?????????"))) for folder in work)
        assert parts_now >= parts_there or not work, "what is finished stays"
        parts_there = parts_now
        if process.returncode == 0:
            break
    assert kills >= 1 and process.returncode == 0
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_a_tokenising_process_that_is_killed(tmp_path: Path) -> None:
    """As the system does when memory runs out."""
    path = write(tmp_path / "a.jsonl", *[LONG, ROW, LONG] * 1000)
    process = start(tmp_path, path, "cache", rows_per_part=20, num_workers=2)
    while not list((tmp_path / "cache").glob("*.work/part-*-?????????")):
        time.sleep(0.005)
    workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    workers[0].kill()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "most likely for want of memory.  What it had finished is kept" in output
    assert list((tmp_path / "cache").glob("*.work/part-*-?????????"))


def test_processes_that_prepare_at_once_do_no_harm(tmp_path: Path) -> None:
    """Two processes build one store at once, each with tokenising processes of its own."""
    path = write(tmp_path / "a.jsonl", *[ROW, LONG] * 500)
    running = [start(tmp_path, path, "cache", rows_per_part=20, num_workers=n) for n in (1, 2)]
    digests = [process.communicate(timeout=120)[0].split()[-1] for process in running]
    alone = corpus_of(path, cache=tmp_path / "alone", seq_length=64, over_long="windows")
    assert digests == [alone.digest] * 2
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "alone")


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("moment", [0, 2, 5, 6])
def test_a_faster_process_takes_the_work_folder_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Before a part, or before parts are put together: made again, or found done."""
    path = write(tmp_path / "a.jsonl", *[ROW] * 40)
    expected = corpus_of(path, cache=tmp_path / "whole").digest
    read, calls = workers.read_part, []

    def read_part(part: Path) -> Any:
        calls.append(part)
        if len(calls) - 1 == moment:
            shutil.rmtree(part.parent, ignore_errors=True)
        return read(part)

    monkeypatch.setattr("sft.data.cache.workers.read_part", read_part)
    monkeypatch.setattr("sft.data.cache.prepare.read_part", read_part)
    assert corpus_of(path, num_workers=1).digest == expected
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 4)
    make = workers.encode_rows

    def block(*args: Any) -> Any:
        with open(path, "a") as file:
            file.write(json.dumps(ROW) + "\n")
        return make(*args)

    monkeypatch.setattr(workers, "encode_rows", block)
    with pytest.raises(DataError, match="a.jsonl changed while it was tokenised.  Start again once it is complete"):
        corpus_of(path)
    assert files_of(tmp_path / "cache") == {}


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written to data.cache_dir .*file: "):
        corpus_of(write(tmp_path / "a.jsonl", ROW), cache=tmp_path / "file")


FULL = """
if __name__ == "__main__":
    import resource, signal, sys
    from pathlib import Path
    from sft.config import DataConfig
    from sft.console import QUIET
    from sft.data.cache import workers
    from sft.data.cache.prepare import prepare
    from sft.data.chat.tokenizer import load_tokenizer
    from sft.errors import DataError

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
    data = DataConfig(train=[sys.argv[1]], seq_length=1024, num_workers=int(sys.argv[4]))
    workers.ROWS_PER_PART = 64
    try:
        print(len(prepare(data.train, data, load_tokenizer(data), Path(sys.argv[2]), QUIET)))
    except DataError as error:
        print(error)
"""


@pytest.mark.parametrize(("limit", "num_workers"), [(1000, 1), (1000, 2), (40_000, 1)])
def test_a_disk_that_is_full(tmp_path: Path, limit: int, num_workers: int) -> None:
    """No file may grow beyond a limit: that of a part, of 20 kB, or that of the store's tokens, of 60 kB."""
    path, script = write(tmp_path / "a.jsonl", *[ROW] * 384), tmp_path / "full.py"
    script.write_text(FULL)
    command = [sys.executable, str(script), path, str(tmp_path / "cache")]
    env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [*command, str(limit), str(num_workers)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    )
    assert output.stdout.startswith(f"tokenised data cannot be written to data.cache_dir {tmp_path / 'cache'}: ")
    assert "File too large" in output.stdout
    assert corpus_of(path).digest == corpus_of(path, cache=tmp_path / "whole").digest
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


# --- stores that are there ---


@pytest.mark.parametrize("name", ["tokens.npy", "mask.npy", "rows.npy", "ledger.json"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_store_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW, LONG), []
    digest = corpus_of(path).digest
    whole = files_of(tmp_path / "cache")
    [store] = (tmp_path / "cache").iterdir()
    content = (store / name).read_bytes()
    flipped = content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]
    (store / name).write_bytes({"flip": flipped, "cut": content[:-2]}[damage])
    corpus = corpus_of(path, log=log, verify=True)
    assert log[0].endswith(f"is not whole or was changed: tokenising {path} again")
    assert corpus.digest == digest and files_of(tmp_path / "cache") == whole


def test_what_a_killed_preparation_left_beside_a_whole_store_is_removed(tmp_path: Path) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW), []
    corpus_of(path)
    whole = files_of(tmp_path / "cache")
    [store] = (tmp_path / "cache").iterdir()
    store.with_name(f"{store.name}.work").mkdir()
    (store.with_name(f"{store.name}.work") / "part-000000").write_text("x")
    corpus_of(path, log=log, verify=True)
    assert log[0].endswith("longest 39 (verified)") and files_of(tmp_path / "cache") == whole


def test_training_only_opens_what_is_prepared(tmp_path: Path) -> None:
    path, data = write(tmp_path / "a.jsonl", ROW, LONG), config()
    other = write(tmp_path / "b.jsonl", LONG)
    tokenizer, cache = load_tokenizer(data), tmp_path / "cache"
    with pytest.raises(DataError) as error:
        find_prepared([path, other], data, tokenizer, cache, command=HOW)
    assert str(error.value) == (
        f"{path}, {other} are not tokenised for these settings in {cache}.  Run this first, on any machine that sees "
        "the same folders: sft data prepare a.yaml"
    )
    assert not cache.exists()
    prepared = corpus_of(path)
    with pytest.raises(DataError, match="b.jsonl is not tokenised for these settings in "):
        find_prepared([path, other], data, tokenizer, cache, command=HOW)
    folders = find_prepared([path], data, tokenizer, cache, command=HOW)
    opened = map_prepared([path], folders, data, command=HOW)
    assert opened.digest == prepared.digest and opened.summary() == prepared.summary()
    assert opened.sample(1).tokens.tolist() == prepared.sample(1).tokens.tolist()
    for attempt in (
        lambda: corpus_of(path, seq_length=32, over_long="drop"),
        lambda: find_prepared([path], config(seq_length=32, over_long="drop"), tokenizer, cache, command=HOW),
    ):
        with pytest.raises(DataError, match="no sample is left"):
            attempt()


# --- rows that cannot be used ---


@pytest.mark.usefixtures("small_parts")
def test_bad_rows_are_skipped_and_listed(tmp_path: Path) -> None:
    path, log = write(tmp_path / "a.jsonl", *[ROW] * 18, "{", BAD, "", *[ROW] * 5, BAD, *[ROW] * 14), []
    for num_workers in (1, 2):
        corpus = corpus_of(path, log=log, on_bad_row="skip", num_workers=num_workers, cache=tmp_path / str(num_workers))
        assert len(corpus) == 37 and corpus.name(18) == f"{path}:22"
        ledger = corpus.row_reports[Path(path)]
        assert (ledger.rows, ledger.samples, ledger.rows_skipped, ledger.skipped) == (40, 37, 3, (19, 20, 27))
        assert ledger.reasons == (
            ("no assistant turn, so there is nothing to learn from.", 2),
            ("not JSON: Expecting property name enclosed in double quotes at column N of N characters.", 1),
        )
        assert "; skipped 3 bad rows: rows 19, 20, 27 (2 x no assistant turn, so there is noth" in log[-1]
        [store] = (tmp_path / str(num_workers)).iterdir()
        assert [json.loads(line) for line in (store / "rejects.jsonl").read_text().splitlines()] == [
            {
                "row": 19,
                "reason": "not JSON: Expecting property name enclosed in double quotes at column 2 of 1 characters.",
            },
            {"row": 20, "reason": "no assistant turn, so there is nothing to learn from."},
            {"row": 27, "reason": "no assistant turn, so there is nothing to learn from."},
        ]


def test_more_bad_rows_than_a_tenth_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 9, BAD)
    assert len(corpus_of(path, on_bad_row="skip")) == 9
    path = write(tmp_path / "b.jsonl", *[ROW] * 8, BAD, *[ROW] * 9, BAD)
    with pytest.raises(DataError) as error:
        corpus_of(path, on_bad_row="skip")
    assert str(error.value) == (
        f"2 rows or more of the 19 of {path} cannot be used.  data.on_bad_row = skip leaves out a tenth at most.  The "
        f"first of them:\n  {path}:9: no assistant turn, so there is nothing to learn from."
        f"\n  {path}:19: no assistant turn, so there is nothing to learn from."
    )


def test_a_long_sample_is_not_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 20, LONG)
    with pytest.raises(DataError, match="a.jsonl:21: 116 tokens"):
        corpus_of(path, on_bad_row="skip", seq_length=64)


# --- the command ---


def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ROW, LONG)
    write(tmp_path / "b.jsonl", ROW)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path / "r.yaml"


def test_sft_data_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recipe(tmp_path, monkeypatch))
    settings = ["data.train=a.jsonl", "data.eval=b.jsonl", "data.tokenizer=byte", "data.cache_dir=c"]
    settings += ["data.seq_length=1024", "data.chat_template=null"]
    assert main(["data", "prepare", path, *settings]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("a.jsonl: 2 samples, 155 tokens") and out[1].startswith("b.jsonl: 1 samples")
    assert len(list((tmp_path / "c").iterdir())) == 2
    assert main(["data", "prepare", path, "--workers", "2", *settings, "data.seq_length=2048", "--verify"]) == 0
    assert len(list((tmp_path / "c").iterdir())) == 4
    (tmp_path / "c" / "mine").mkdir()
    capsys.readouterr()
    assert main(["data", "prepare", path, *settings, "--sweep"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len([line for line in out if "removed c/" in line]) == 2 and out[-1].endswith("c: 4.1 KiB freed")
    data = config(train=["a.jsonl"])
    assert sorted(folder.name for folder in (tmp_path / "c").iterdir()) == sorted(
        ["mine", *(store_folder(Path("c"), Path(f), data, load_tokenizer(data)).name for f in ("a.jsonl", "b.jsonl"))]
    )
    assert main(["data", "prepare", path, "--workers", "none", *settings]) == 2
    assert 'data.num_workers = "none"' in capsys.readouterr().err
    assert main(["data", "prepare", path, "--nothing"]) == 2
    assert "unknown option --nothing" in capsys.readouterr().err
    assert main(["data"]) == 2


def test_the_old_name_of_a_policy_is_refused_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(recipe(tmp_path, monkeypatch)), "data.over_long=truncate"]) == 2
    assert "Did you mean cut_turns?" in capsys.readouterr().err


def test_weights_reach_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the weight in every second row."""
    encoded = encoder.encode_row
    calls: list[int] = []

    def weighed(*args: Any) -> Encoding:
        whole = encoded(*args)
        calls.append(1)
        return whole._replace(weights=whole.weights * np.float32(0.5 if len(calls) % 2 else 1.0))

    monkeypatch.setattr(encoder, "encode_row", weighed)
    corpus: Corpus = corpus_of(write(tmp_path / "a.jsonl", ROW, LONG))
    assert corpus.sample(0).weights.tolist() == [0.0] * 33 + [0.5] * 5 + [0.0]
    assert corpus.sample(1).weights.dtype == np.float32 and corpus.sample(1).weights.max() == 1
    assert corpus.num_supervised.tolist() == [5, 9]
    [store] = (tmp_path / "cache").iterdir()
    opened = open_store(store, verify=True)
    assert opened is not None and opened.weights.tolist() == [0, 0.5, 1]
