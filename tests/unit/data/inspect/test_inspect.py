"""`sft data inspect`: every number about eight chats, computed by hand."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sft.batch import Sample
from sft.console import QUIET
from sft.data.cache.prepare import prepare
from sft.data.cache.row_report import LINE
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.inspect.counts import histogram, quantiles, retention
from sft.data.inspect.findings import Finding, Scan, copies, other_answers, scan
from sft.data.inspect.survey import Survey, tokenizer_facts, whole_rows
from tests.builders import sample
from tests.unit.fixtures.folder import config, load_folder, make_folder, template
from tests.unit.surveys import chat, lay_out, printed, survey, write


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return lay_out(tmp_path, monkeypatch)


def found(taken: Survey, what: str) -> Finding:
    return next(finding for finding in taken.findings if finding.what == what)


def test_files_and_their_sum() -> None:
    """The parts of the report that test_inspect_text.py does not test."""
    taken = survey()
    counts = [(one.path, one.supervised, one.full_tokens) for one in (*taken.files, taken.total)]
    assert counts == [("a.jsonl", 122, 285), ("b.jsonl", 8, 270), (None, 130, 555)]
    assert taken.total.supervised_share == 130 / 339 and taken.sources == ()
    assert (taken.total.rows_dropped, taken.total.rows_cut, taken.total.rows_skipped, taken.refused) == (1, 0, 0, None)


def test_retention_is_of_whole_rows_whatever_becomes_of_them() -> None:
    points = survey(over_long="windows").retention
    assert [(p.seq_length, p.rows, p.tokens, p.supervised) for p in points] == [
        (32, 4, 104, 18),
        (48, 4, 104, 18),
        (64, 6, 213, 29),
        (96, 6, 213, 29),
        (128, 7, 339, 130),
        (192, 7, 339, 130),
        (256, 8, 555, 134),
    ]
    assert [p.seq_length for p in points if p.is_recipe] == [128]
    assert (points[2].rows_share, points[2].tokens_share, points[2].supervised_share) == (6 / 8, 213 / 555, 29 / 134)


def test_retention_has_the_recipes_own_length_wherever_it_lies() -> None:
    rows = np.zeros(3, dtype=LINE)
    rows["full_tokens"] = [30, 40, 90]
    points = retention(rows, doc_multiple=32, seq_length=1000)
    assert [(p.seq_length, p.rows) for p in points] == [(32, 1), (48, 1), (64, 2), (96, 3), (1000, 3)]
    assert (points[-1].is_recipe, points[-1].tokens, points[-1].supervised_share) == (True, 160, 0.0)
    assert [p.seq_length for p in retention(rows, doc_multiple=1, seq_length=8)] == [8, 32, 48, 64, 96]


def test_quantiles_are_lengths_that_occur() -> None:
    assert quantiles(np.arange(1, 11)) == (5, 9, 10)
    assert quantiles(np.array([7])) == (7, 7, 7)


def test_histogram_keeps_empty_buckets() -> None:
    buckets = histogram(np.array([5, 6, 17]))
    assert [(b.at_least, b.rows, b.tokens) for b in buckets] == [(4, 2, 11), (8, 0, 0), (16, 1, 17)]
    assert [b.at_least for b in histogram(np.array([2**20 - 1, 2**20]))] == [2**19, 2**20]


def test_messages_that_weigh_nothing_are_not_supervised() -> None:
    row = chat("a", "bbb", "c", "d")
    row["messages"][1]["weight"] = 0
    row["messages"][3]["weight"] = 2
    write("w", row)
    assert [role.supervised_share for role in survey(train=["w.jsonl"]).roles] == [0.0, 0.25]


def test_what_data_supervise_makes_of_roles() -> None:
    write("w", chat("a", "bbb", "c", "d"))
    for supervise, shares in {
        "assistant": (0.0, 1.0),
        "last": (0.0, 0.25),
        "all": (1.0, 1.0),
        "after_last_user": (0.0, 0.25),
    }.items():
        taken = survey(train=["w.jsonl"], supervise=supervise)
        assert tuple(role.supervised_share for role in taken.roles) == shares
        unfinished = [finding.count for finding in taken.findings if finding.what == "unfinished_turns"]
        assert unfinished == ([] if supervise == "all" else [0])


def test_a_file_that_is_listed_twice_counts_twice() -> None:
    taken = survey(train=["b.jsonl", "b.jsonl"], seq_length=256)
    assert [(one.name, one.samples) for one in taken.files] == [("b.jsonl", 2), ("b.jsonl", 2)]
    assert taken.total.samples == 4
    assert found(taken, "copies").examples == ("b.jsonl:1 = b.jsonl:1", "b.jsonl:2 = b.jsonl:2")


def test_named_sources_are_sums_of_their_files() -> None:
    taken = survey(train={"small": {"files": ["h.jsonl"]}, "big": {"files": ["a.jsonl", "b.jsonl"]}}, eval=["h.jsonl"])
    names = ("name", "part", "source", "rows", "samples", "tokens", "longest")
    assert [tuple(getattr(one, name) for name in names) for one in (*taken.files, *taken.sources, taken.total)] == [
        ("h", "train", "small", 3, 3, 84, 30),  # 28 + 26 + 30
        ("a", "train", "big", 6, 6, 285, 126),
        ("b", "train", "big", 2, 1, 54, 216),
        ("h", "eval", None, 3, 3, 84, 30),
        ("all", "train", "small", 3, 3, 84, 30),
        ("all", "train", "big", 8, 7, 339, 216),
        ("all", "train", None, 11, 10, 423, 216),
    ]
    assert taken.sources[1].rows_dropped == 1 and taken.sources[1].histogram[0].rows == 4
    lines = printed(taken).split("files\n")[1].splitlines()
    assert lines[6] == "  h     eval            3        3      84       19.0%   28   30   30       30"
    assert lines[7] == "  b: data.over_long drops 216 tokens (80.0% of all, 4 supervised) of 1 row"


WINDOWS: dict[str, Any] = {"train": ["l.jsonl"], "over_long": "windows", "doc_multiple": 1, "seq_length": 40}


def test_windows_are_samples_and_their_row_has_one_length() -> None:
    # Rows of 10 + 18 + 12 + 16 = 56 and of 28 tokens.  Window 1 ends with the first answer: 10 + 17.  Window 2 repeats
    # 18 tokens of the prompt, and has 18 of the 24 tokens between the answers and the 4 tokens of the answer: 6 and the
    # last newline are lost.
    write("l", chat("hi", "hello", "more", "two"), chat("hi", "hello"))
    taken = survey(2, **WINDOWS)
    total = taken.total
    assert (total.rows, total.samples, total.rows_windowed, total.samples_windowed) == (2, 3, 1, 2)
    assert (total.full_tokens, total.p50, total.longest, total.supervised) == (84, 28, 56, 16)
    assert (total.tokens, total.tokens_repeated, total.tokens_cut, total.supervised_cut) == (95, 18, 7, 0)
    assert [(b.at_least, b.rows, b.tokens) for b in total.histogram] == [(16, 1, 28), (32, 1, 56)]
    assert [(p.seq_length, p.rows, p.supervised) for p in taken.retention][2:] == [(48, 1, 6), (64, 2, 16)]
    assert [(shown.name, shown.tokens, shown.supervised) for shown in taken.previews] == [
        ("l.jsonl:1 window 1 of 2", 27, 6),
        ("l.jsonl:1 window 2 of 2", 40, 4),
    ]
    assert [(role.role, role.messages) for role in taken.roles] == [("user", 3), ("assistant", 3)]
    text = printed(taken)
    assert (
        "\n  l: data.over_long makes 2 windows of 1 row, which repeat 18 tokens (18.9% of the training tokens)\n"
        in text
    )
    assert found(taken, "too_long").examples == ("l.jsonl:1",)


def test_the_end_of_an_answer_in_a_window_of_its_own_is_not_a_short_answer() -> None:
    # A window holds 20 tokens and supervises 19, 15, 15, ... tokens of the answer: 51 = 19 + 15 + 15 + 2.
    write("l", chat("hi", "abcdefghijkl" * 4 + "xy"), chat("hi", "hello"))
    corpus = prepare(["l.jsonl"], config(**WINDOWS), ByteTokenizer(), Path("cache"), QUIET)
    assert corpus.num_supervised.tolist() == [19, 15, 15, 2, 6]
    assert found(survey(**WINDOWS), "short_answers").count == 0


def test_skipped_rows_are_counted_and_their_reasons_told(folder: Path) -> None:
    rows = [chat("hi", "hello")] * 20
    rows[2] = {"messages": [{"role": "robot", "content": "hi"}]}
    rows[6] = {"tokens": [1, 2, 999], "loss_mask": [0, 0, 1]}  # only the tokenizer lacks the id 999
    write("s", *rows)
    # a blank line counts in the numbers of lines
    (folder / "s.jsonl").write_text("\n" + (folder / "s.jsonl").read_text())
    taken = survey(train=["s.jsonl"], on_bad_row="skip")
    total = taken.total
    assert (total.rows, total.samples, total.rows_skipped, total.full_tokens) == (20, 18, 2, 18 * 28)
    assert found(taken, "too_long").total == found(taken, "unanswered_ends").total == 18
    assert (taken.roles[0].messages, taken.rows_of_tokens) == (18, 0)
    text = printed(taken)
    assert (
        '  s: data.on_bad_row skips 2 rows: 1 x message N has role "..."; expected one of system, user, assistant, '
        "tool.; 1 x token N is N but the tokenizer has only ids N to N\n"
    ) in text
    assert "! 2 of 20 rows (10.0%) are unusable: data.on_bad_row leaves them out\n      s.jsonl:4, s.jsonl:8\n" in text


def test_texts(folder: Path) -> None:
    """A text has no roles.  It ends with EOS, so it does not count as an unfinished answer."""
    write("t", {"text": "one"}, {"text": "another one"})
    taken = survey(1, train=["t.jsonl"], tokenizer=str(make_folder(folder / "texts", None)))
    assert (taken.rows_of_text, taken.rows_of_tokens, taken.roles, taken.total.chats) == (2, 0, (), 0)
    assert (found(taken, "unfinished_turns").count, found(taken, "unfinished_turns").total) == (0, 2)
    assert taken.previews[0].pieces[-1].text.endswith("<|endoftext|>")
    text = printed(taken)
    assert "  2 rows of plain text, without roles\n" in text
    assert "masks are not made from chats" in text and "the tokenizer's eos is <|endoftext|> (id 0)\n" in text


def test_rows_of_tokens_have_no_roles() -> None:
    tokens = {"tokens": [104, 105, 33, 257], "loss_mask": [1, 0, 0.5, 1]}  # "hi!" and the end of turn
    labels = {"input_ids": [104, 105, 33], "labels": [-100, -100, 33]}
    write("k", tokens, labels, chat("hi", "hello"))
    taken = survey(1, train=["k.jsonl"])
    assert (taken.total.rows, taken.total.tokens, taken.total.supervised) == (3, 4 + 3 + 28, 2 + 1 + 6)
    assert ([role.messages for role in taken.roles], taken.rows_of_tokens) == ([1, 1], 2)
    assert found(taken, "unanswered_ends").total == 1
    assert found(taken, "unfinished_turns").examples == ("k.jsonl:2",)
    # The first token has a weight, but is not supervised: nothing predicts it.
    assert [(piece.text, piece.is_supervised) for piece in taken.previews[0].pieces] == [
        ("hi", False),
        ("!<|im_end|>", True),
    ]


def test_a_row_has_one_length() -> None:
    table = np.zeros(6, dtype=LINE)
    table["row"], table["window"] = [1, 2, 2, 2, 3, 4], [1, 1, 2, 3, 0, 1]
    assert whole_rows(table)["row"].tolist() == [1, 2, 3, 4]


def test_findings() -> None:
    findings = survey(eval={"held": "h.jsonl"}).findings
    assert [(one.what, one.part, one.count, one.total, *one.examples) for one in findings] == [
        ("unusable", "train", 0, 8),
        ("too_long", "train", 1, 8, "b.jsonl:2"),
        ("omitted", "train", 0, 8),
        ("nothing_supervised", "train", 0, 7),
        ("short_answers", "train", 1, 7, "a.jsonl:4"),
        ("unfinished_turns", "train", 0, 8),
        ("copies", "train", 1, 7, "a.jsonl:2 = a.jsonl:1"),
        ("same_prompts", "train", 2, 7, "a.jsonl:3 = a.jsonl:1", "b.jsonl:1 = a.jsonl:1"),
        ("empty_user_turns", "train", 1, 10, "a.jsonl:4"),
        ("unanswered_ends", "train", 1, 8, "a.jsonl:5"),
        ("held_out_copies", "held", 1, 3, "h.jsonl:1 = a.jsonl:1"),
        ("held_out_prompts", "held", 1, 3, "h.jsonl:2 = a.jsonl:1"),
    ]


def test_copies_name_the_first_of_them() -> None:
    digests = np.array([b"a", b"b", b"a", b"c", b"a"], dtype="S16")
    assert copies(digests).tolist() == [[2, 0], [4, 0]]
    differ_in_a_zero_byte = np.frombuffer(b"a" + b"\0" * 15 + b"a\0b" + b"\0" * 13, dtype="S16")
    assert copies(differ_in_a_zero_byte).tolist() == []


class Samples(NamedTuple):
    """Replaces a corpus: tokens and weights of each sample; each sample is a row of its own unless `windows` says
    otherwise."""

    given: list[tuple[list[int], list[float]]]
    windows: list[tuple[int, int]] | None = None

    @property
    def tables(self) -> list[np.ndarray]:
        lines = np.zeros(len(self.given), dtype=LINE)
        lines["tokens"] = 1
        lines["window"], lines["windows"] = zip(*(self.windows or [(1, 1)] * len(self.given)), strict=True)
        return [lines]

    def __len__(self) -> int:
        return len(self.given)

    def sample(self, sample_id: int) -> Sample:
        return sample(*self.given[sample_id])


def scanned(given: list[tuple[list[int], list[float]]], windows: list[tuple[int, int]] | None = None) -> Scan:
    """The scan of these samples; token 9 ends a turn."""
    return scan(Samples(given, windows), [9], QUIET)  # type: ignore[arg-type]


def test_answers_without_an_end_of_turn_are_counted() -> None:
    read = scanned([([1, 2, 9, 3, 4], [0, 1, 0.5, 0, 1]), ([1, 9], [0, 1]), ([7, 8], [0, 0])])
    assert (read.num_runs, read.unfinished_runs, read.unfinished) == (3, 1, [0])
    assert (read.longest_run, read.longest_sample) == (2, 0)


def test_a_turn_that_goes_on_in_the_next_window_is_counted_there() -> None:
    begun = [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 4, 5, 6], [0, 0, 1, 1])]
    windows = [(1, 3), (2, 3), (3, 3)]
    whole = scanned([*begun, ([1, 6, 9], [0, 0, 1])], windows)
    assert (whole.num_runs, whole.unfinished_runs, whole.unfinished) == (1, 0, [])
    cut = scanned([*begun, ([1, 6, 8], [0, 0, 1])], windows)
    assert (cut.num_runs, cut.unfinished_runs, cut.unfinished) == (1, 1, [2])


def test_other_answers_are_new_ones() -> None:
    prompts = np.array([b"p", b"p", b"q", b"p"], dtype="S16")
    openings = np.array([b"pa", b"pb", b"qa", b"pa"], dtype="S16")
    assert other_answers(prompts, openings).tolist() == [[1, 0]]
    # Only the first window of a row answers its prompt.
    given = [([1, 2, 3, 9], [0, 0, 0, 1]), ([1, 2, 3, 8], [0, 0, 0, 1]), ([1, 2, 3, 7], [0, 0, 0, 1])]
    read = scanned(given, [(1, 2), (2, 2), (1, 1)])
    assert other_answers(read.prompts, read.openings).tolist() == [[2, 0]]
    # Samples without a prompt have no common prompt.
    read = scanned([([1, 2], [1, 1]), ([1, 3], [1, 1]), ([1, 2], [0, 1]), ([4, 4], [0, 0])])
    assert other_answers(read.prompts, read.openings).tolist() == []
    assert copies(read.wholes).tolist() == [[2, 0]]


def test_tokenizer_of_a_folder(folder: Path) -> None:
    plain = tokenizer_facts(load_folder(folder / "plain", template("chatml")))
    assert (plain.end_of_turn, plain.eos, plain.masks) == ("<|im_end|>", "<|endoftext|>", "sources of characters")
    assert plain.eos_id == plain.pad_id != plain.end_of_turn_id
    text = printed(survey(over_long="drop", tokenizer=str(folder / "plain")))
    assert f"but the tokenizer's eos is <|endoftext|> (id {plain.eos_id}): when generating, stop at both" in text
    assert f"padding is id {plain.pad_id}, the same as eos; padding is not supervised" in text
    assert "masks are known for each character: each comes from a message or from the template" in text
    assert "roles: tokens of message texts, estimated" in text and "~" in text


def test_data_that_are_too_long_are_surveyed_whole() -> None:
    taken = survey(over_long="error")
    assert (taken.total.samples, taken.total.tokens, taken.total.supervised) == (8, 555, 134)
    assert taken.refused is not None and taken.refused.startswith("b.jsonl:2: 216 tokens (224 when padded")
    assert "sft train would refuse these data" in printed(taken)
    taken = survey(train=["b.jsonl"], seq_length=32)
    assert taken.total.samples == 2
    assert taken.refused is not None and taken.refused.startswith("no samples remain from b.jsonl")


def test_tool_calls_are_text() -> None:
    # The schema is read as {"type": "function", "function": {"name": "f", "arguments": {}}}: 64 bytes and a newline.
    call = {"name": "f"}
    row = {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "x", "tool_calls": [call]}]}
    write("t", row)
    assert [(role.role, role.tokens) for role in survey(train=["t.jsonl"]).roles] == [("user", 2), ("assistant", 66)]
