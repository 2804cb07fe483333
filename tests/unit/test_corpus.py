"""Files to samples: every fault named, every loss counted, every cache either right or rebuilt."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count as counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.console import Console
from sft.data.corpus import Corpus, prepare
from sft.data.ledger import Ledger
from sft.data.tokenizer import load_tokenizer
from sft.errors import DataError
from tests.unit.fixtures.folder import config, make_folder, template

# In bytes: 1 + "user\n" + 14 + 2 = 22 and 1 + "assistant\n" + 4 + 2 = 17, together 39 tokens,
# 5 of them supervised.  LONG adds 1 + 5 + 53 + 2 = 61 and 1 + 10 + 3 + 2 = 16: 116 tokens, 9 supervised.
ROW = {"messages": [{"role": "user", "content": "Hello, friend!"}, {"role": "assistant", "content": "Fine"}]}
LONG = {"messages": ROW["messages"] + [{"role": "user", "content": "x" * 53}, {"role": "assistant", "content": "Yes"}]}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def corpus_of(
    *paths: str,
    cache: Path | None = None,
    log: list[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **overrides: Any,
) -> Corpus:
    data, said = config(**overrides), io.StringIO()
    cache_dir = cache or Path(paths[0]).parent / "cache"
    corpus = prepare(paths, data, load_tokenizer(data), cache_dir, Console(0, said, clock=clock))
    if log is not None:
        log.extend(said.getvalue().splitlines())
    return corpus


def texts(corpus: Corpus) -> list[str]:
    byte = load_tokenizer(config())
    return [byte.decode(corpus.sample(i).tokens) for i in range(len(corpus))]


def test_samples(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", ROW, "", LONG), write(tmp_path / "b.jsonl", ROW)
    corpus = corpus_of(first, second)
    assert len(corpus) == 3
    assert corpus.lengths.tolist() == [39, 116, 39] and corpus.lengths.dtype == np.int64
    assert corpus.num_supervised.tolist() == [5, 9, 5] and corpus.num_supervised.dtype == np.int64
    sample = corpus.sample(2)
    assert sample.sample_id == 2 and sample.num_supervised == 5
    assert sample.tokens.dtype == np.int32 and sample.weights.dtype == np.float32
    assert bytes(sample.tokens[sample.weights > 0][:4].tolist()) == b"Fine"
    assert [corpus.name(i).removeprefix(f"{tmp_path}/") for i in range(3)] == [
        "a.jsonl:1",
        "a.jsonl:3",
        "b.jsonl:1",
    ]
    assert corpus.summary().splitlines()[1].endswith("b.jsonl: 1 samples, 39 tokens (12.8% supervised), longest 39")


def test_processes_do_not_change_the_result(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW, LONG] * 150)
    one = corpus_of(path, cache=tmp_path / "one")
    two = corpus_of(path, cache=tmp_path / "two", num_workers=2)
    assert one.digest == two.digest and len(two) == 300


def test_the_first_bad_row_is_named_with_any_number_of_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[ROW] * 99, "{", *[ROW] * 100, "[]")
    for num_workers in (1, 2):
        with pytest.raises(DataError, match="a.jsonl:100: not JSON: "):
            corpus_of(path, num_workers=num_workers)


def test_over_long_is_an_error_by_default(tmp_path: Path) -> None:
    """P97: a sample of twice the limit."""
    path = write(tmp_path / "a.jsonl", ROW, LONG)
    with pytest.raises(DataError) as error:
        corpus_of(path, seq_length=64, doc_multiple=16)
    assert str(error.value) == (
        f"{path}:2: 116 tokens (128 when padded to a multiple of 16) do not fit data.seq_length = 64.  Raise "
        "it to 128, or set data.over_long to drop or truncate (dropped and cut tokens are counted)."
    )
    assert len(corpus_of(path, seq_length=128, doc_multiple=16)) == 2


def test_over_long_counts_padded_length(tmp_path: Path) -> None:
    """P07: 39 tokens fit 40, but not once they are padded to a multiple of 16."""
    path = write(tmp_path / "a.jsonl", ROW)
    assert len(corpus_of(path, seq_length=40, doc_multiple=8)) == 1
    with pytest.raises(DataError, match=r"39 tokens \(48 when padded to a multiple of 16\) do not fit"):
        corpus_of(path, seq_length=40, doc_multiple=16)


def ledger(**counts: Any) -> Ledger:
    return Ledger(**{name: () if name.endswith("rows") else 0 for name in Ledger.__annotations__} | counts)


def test_over_long_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, LONG, ROW)
    corpus = corpus_of(path, seq_length=64, over_long="drop")
    assert corpus.lengths.tolist() == [39, 39] and corpus.name(1).endswith("a.jsonl:3")
    assert corpus.ledgers == {
        Path(path): ledger(
            samples_kept=2, tokens_kept=78, supervised_kept=10, longest=39,
            samples_dropped=1, tokens_dropped=116, supervised_dropped=9, dropped_rows=(2,),
        )
    }  # fmt: skip
    assert "; dropped 1 samples of 116 tokens (9 supervised): row 2" in corpus.summary()


def test_over_long_truncated_at_a_turn(tmp_path: Path) -> None:
    hopeless = {"messages": [{"role": "user", "content": "x" * 99}, *ROW["messages"][1:], *ROW["messages"]]}
    asked = {"messages": [*ROW["messages"], {"role": "user", "content": "x" * 99}]}
    path = write(tmp_path / "a.jsonl", ROW, LONG, hopeless, asked)
    corpus = corpus_of(path, seq_length=64, over_long="truncate")
    whole = "<|im_start|>user\nHello, friend!<|im_end|>\n<|im_start|>assistant\nFine<|im_end|>\n"
    assert texts(corpus) == [whole] * 3
    assert corpus.num_supervised.tolist() == [5, 5, 5]
    assert corpus.ledgers == {
        Path(path): ledger(
            samples_kept=3, tokens_kept=117, supervised_kept=15, longest=39,
            samples_cut=2, tokens_cut=77 + 107, supervised_cut=4, cut_rows=(2, 4),
            samples_dropped=1, tokens_dropped=163, supervised_dropped=10, dropped_rows=(3,),
        )
    }  # fmt: skip


def test_truncation_keeps_as_many_turns_as_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": ROW["messages"] * 10})  # 39 tokens a turn pair
    for seq_length, pairs in ((39, 1), (77, 1), (78, 2), (351, 9), (389, 9), (390, 10)):
        corpus = corpus_of(path, seq_length=seq_length, doc_multiple=1, over_long="truncate")
        assert corpus.lengths.tolist() == [39 * pairs], seq_length


def test_no_sample_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW)
    with pytest.raises(DataError, match="no sample is left of .*over_long = drop and data.seq_length = 32"):
        corpus_of(path, seq_length=32, over_long="drop")
    both = corpus_of(write(tmp_path / "b.jsonl", LONG), path, seq_length=64, over_long="drop")
    assert both.name(0).endswith("a.jsonl:1") and len(both) == 1


def test_cache_is_used(tmp_path: Path) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW), []
    first = corpus_of(path, log=log)
    moved = Path(path).rename(tmp_path / "moved.jsonl")
    second = corpus_of(str(moved), log=log)
    assert log[0].endswith("s)") and "tokenised in" in log[0]
    assert log[1].endswith("moved.jsonl: 1 samples, 39 tokens (12.8% supervised), longest 39 (cached)")
    assert first.digest == second.digest and second.name(0).endswith("moved.jsonl:1")
    counts = json.loads(next((tmp_path / "cache").iterdir()).joinpath("ledger.json").read_text())["samples"]
    assert counts["samples_kept"] == 1 and counts["tokens_kept"] == 39


def test_cache_follows_all_that_samples_depend_on(tmp_path: Path) -> None:
    """P100: content, tokenizer, template, over_long, seq_length and doc_multiple each make a new store."""
    path = tmp_path / "a.jsonl"
    write(path, ROW)
    folder = make_folder(tmp_path / "tokenizer", template("chatml"))
    llama = tmp_path / "llama.jinja"
    llama.write_text(template("llama3"))
    tokenizer = str(folder)
    settings: list[dict[str, Any]] = [
        {}, {"seq_length": 2048}, {"doc_multiple": 16}, {"over_long": "drop"}, {"tokenizer": tokenizer},
        {"tokenizer": tokenizer, "chat_template": str(llama)},
    ]  # fmt: skip
    for count, overrides in enumerate(settings, start=1):
        for _ in range(2):
            corpus_of(str(path), **overrides)
            assert len(list((tmp_path / "cache").iterdir())) == count, overrides
    template_file = folder / "chat_template.jinja"
    template_file.write_text(template_file.read_text().replace("# Tools", "# Functions"))
    corpus_of(str(path), tokenizer=tokenizer)
    write(path, {"messages": [{"role": "user", "content": "hello, friend!"}, ROW["messages"][1]]})
    corpus_of(str(path))
    assert len(list((tmp_path / "cache").iterdir())) == 8


@pytest.mark.parametrize("name", ["tokens.npy", "mask.npy", "rows.npy", "ledger.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW, LONG), []
    digest = corpus_of(path).digest
    [store] = (tmp_path / "cache").iterdir()
    whole = (store / name).read_bytes()
    if damage == "remove":
        (store / name).unlink()
    else:
        flipped = whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]
        (store / name).write_bytes({"flip": flipped, "cut": whole[:-1], "empty": b""}[damage])
        if (name, damage) == ("ledger.json", "cut"):  # that was the newline at its end
            (store / name).write_bytes(whole[:-2])
    corpus = corpus_of(path, log=log)
    assert log[0].endswith(f"is not whole or was changed: tokenising {path} again")
    assert corpus.digest == digest and (store / name).read_bytes() == whole
    assert len(list((tmp_path / "cache").iterdir())) == 1


PREPARE = """
if __name__ == "__main__":
    import sys
    from pathlib import Path
    from sft.config import DataConfig
    from sft.console import QUIET
    from sft.data.corpus import prepare
    from sft.data.tokenizer import load_tokenizer

    data = DataConfig(train=[sys.argv[1]], seq_length=1024, num_workers=2)
    print(prepare(data.train, data, load_tokenizer(data), Path(sys.argv[2]), QUIET).digest)
"""


def test_processes_that_prepare_at_once_do_no_harm(tmp_path: Path) -> None:
    """Two processes build one store at once, each with tokenising processes of its own."""
    path = write(tmp_path / "a.jsonl", *[ROW, LONG] * 500)
    script = tmp_path / "prepare.py"
    script.write_text(PREPARE)
    command = [sys.executable, str(script), path, str(tmp_path / "cache")]
    root = str(Path(__file__).parents[2])
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    digests = [process.communicate(timeout=120)[0].strip() for process in running]
    assert digests == [corpus_of(path, cache=tmp_path / "alone").digest] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written to data.cache_dir .*file"):
        corpus_of(write(tmp_path / "a.jsonl", ROW), cache=tmp_path / "file")


@pytest.mark.parametrize("name", ["a.jsonl", "list.json"])
def test_progress_is_told(tmp_path: Path, name: str) -> None:
    """Two blocks of rows, 8 seconds each; blank lines are no rows."""
    write(tmp_path / "a.jsonl", *[ROW] * 50, "", *[ROW] * 50)
    (tmp_path / "list.json").write_text(json.dumps([ROW] * 100))
    path, log, seconds = str(tmp_path / name), [], counter(0, 8)
    corpus_of(path, log=log, clock=lambda: next(seconds))
    assert log[:2] == [
        f"tokenising {path}: 64 of 100 rows (64%), 2,496 tokens, 8 rows/s, left 0:00:05",
        f"tokenising {path}: 100 of 100 rows (100%), 3,900 tokens, 6.2 rows/s, left 0:00:00",
    ]
