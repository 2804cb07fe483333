"""`sft data inspect`: its printed text, its previews, and the command."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from sft.cli import main
from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.inspect.preview import Preview, preview
from sft.data.inspect.report import percent, preview_lines, visible
from sft.data.rows.formats import Chat
from tests.builders import sample
from tests.unit.surveys import chat, lay_out, printed, survey


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return lay_out(tmp_path, monkeypatch)


def test_text() -> None:
    assert printed(survey(num_previews=1)) == """\
data of r.yaml
  data.seq_length 128, data.doc_multiple 32, data.over_long drop, data.on_bad_row error

files
  file  set    rows  samples  tokens  supervised  p50  p90  p99  longest
  a     train     6        6     285       42.8%   28  126  126      126
  b     train     2        1      54       14.8%   54  216  216      216
  all   train     8        7     339       38.3%   28  216  216      216
  b: data.over_long drops 216 tokens (80.0% of all, 4 supervised) of 1 row

lengths: tokens of whole rows
  from   to  rows                                            tokens
    16   31     4  ########################################   18.7%
    32   63     2  ####################                       19.6%
    64  127     1  ##########                                 22.7%
   128  255     1  ##########                                 38.9%

retention: samples that fit uncut, padded to a multiple of 32
  seq_length   rows  tokens  supervised tokens
          32  50.0%   18.7%              13.4%
          64  75.0%   38.4%              21.6%
         128  87.5%   61.1%              97.0%   <- this recipe
         256   100%    100%               100%

roles: tokens of message texts
  role       messages  tokens  mean  supervised
  system            1       8   8.0          0%
  user             10     215  21.5          0%
  assistant         9     125  13.9        100%

tokenizer
  byte, 259 ids
  masks are written by the built-in ChatML template, which marks the assistant's text
  turns end with <|im_end|> (id 257); the tokenizer names no end of sequence (eos)
  padding is id 258

findings
  ! 1 of 8 rows (12.5%) are longer than data.seq_length: trees are split, data.over_long decides about other rows
      b.jsonl:2
  ! 1 of 7 samples (14.3%) have only 1 or 2 supervised tokens: is an answer cut off?
      a.jsonl:4
  ! 1 of 7 samples (14.3%) are copies of an earlier one: training uses every copy
      a.jsonl:2 = a.jsonl:1
  ! 2 of 7 samples (28.6%) give a new answer to the prompt of an earlier one: alternatives, or contradictions?
      a.jsonl:3 = a.jsonl:1, b.jsonl:1 = a.jsonl:1
  ! 1 of 10 user turns (10.0%) are empty: the model learns to answer without a question
      a.jsonl:4
  ! 1 of 8 chats (12.5%) end without an answer: text after the last answer is never supervised
      a.jsonl:5
  - no rows are unusable
  - no chats lose texts to the chat template
  - no samples lack a supervised token
  - no answers lack the end-of-turn token at their end

previews: supervised text is in [[ ]], all other text is only context; ⏎ is a newline
  a.jsonl:1 (first): 28 tokens, 6 supervised
    <|im_start|>user⏎
    hi<|im_end|>⏎
    <|im_start|>assistant⏎
    [[hello<|im_end|>]]⏎

  a.jsonl:6 (longest answer): 126 tokens, 101 supervised
    <|im_start|>user⏎
    count<|im_end|>⏎
    <|im_start|>assistant⏎
    [[1111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111<|im_end|>]]⏎
"""


def test_percent_says_nothing_and_everything_only_where_that_is_exact() -> None:
    assert [percent(part, 3000) for part in (0, 1, 1500, 2999, 3000)] == ["0%", "<0.1%", "50.0%", "99.9%", "100%"]
    assert percent(0, 0) == "0%"


def test_control_characters_are_visible() -> None:
    assert visible("a\tb\x1b[31m\r\n\u202eü\x00\U000e0001 😀") == "a⇥b\\x1b[31m\\x0d⏎\n\\u202eü\\x00\\U000e0001 😀"


def preview_of(*texts: str) -> Preview:
    tokens, weights, *_ = encode_chat(Chat(chat(*texts)["messages"], None), ByteTokenizer())
    return preview(sample(tokens, weights), "a.jsonl:1", "first", ByteTokenizer())


def test_preview_in_colour() -> None:
    assert list(preview_lines(preview_of("a", "b\nc"), color=True)) == [
        "  a.jsonl:1 (first): 25 tokens, 4 supervised",
        "    \x1b[2m<|im_start|>user⏎\x1b[0m",
        "    \x1b[2ma<|im_end|>⏎\x1b[0m",
        "    \x1b[2m<|im_start|>assistant⏎\x1b[0m",
        "    \x1b[32mb⏎\x1b[0m",
        "    \x1b[32mc<|im_end|>\x1b[0m\x1b[2m⏎\x1b[0m",
    ]


def test_preview_of_a_long_sample_shows_what_is_around_boundaries() -> None:
    shown = preview_of("u" * 1000, "é" * 300)
    # "<|im_start|>user
    # " has 6 tokens and 17 characters, "<|im_end|>
    # <|im_start|>assistant
    # " 13 and 33.  So 200 tokens would exceed 200 characters there, and 150 tokens do not.  The preview omits the half
    # of an é at the cut.
    assert [(len(piece.text), piece.is_supervised, piece.tokens, piece.is_gap) for piece in shown.pieces] == [
        (17 + 144, False, 150, False),
        (0, False, 719, True),
        (137 + 33, False, 150, False),
        (100, True, 200, False),
        (0, True, 201, True),
        (99 + 10, True, 200, False),
        (1, False, 1, False),
    ]
    assert sum(piece.tokens for piece in shown.pieces) == 1008 + 613
    lines = list(preview_lines(shown, color=False))
    assert [line for line in lines if "..." in line] == ["    [... 719 tokens ...]", "    [... 201 tokens ...]"]


def test_preview_of_many_turns_shows_the_first_and_the_last() -> None:
    shown = preview_of(*"abcdefghijklmnopqrstuvwx")
    # 24 messages make 25 pieces: 12 contexts, 12 answers and the last newline.
    assert [piece.text[0] for piece in shown.pieces[1:8:2]] == ["b", "d", "f", "h"]
    assert shown.pieces[8].is_gap and len(shown.pieces) == 13
    assert [piece.text[0] for piece in shown.pieces[9:]] == ["v", "\n", "x", "\n"]
    assert sum(piece.tokens for piece in shown.pieces) == 12 * (9 + 14)


def test_the_longest_answer_is_shown_once() -> None:
    assert [(shown.name, shown.why) for shown in survey(num_previews=6).previews][-2:] == [
        ("a.jsonl:5", "first"),
        ("a.jsonl:6", "first, longest answer"),
    ]
    assert survey(num_previews=0).previews == ()


def test_neighbouring_pieces_of_one_kind_are_marked_once() -> None:
    text = "\n".join(preview_lines(preview_of("a", "b" * 500), color=False))
    assert text.count("[[") == text.count("]]") == 1


SETTINGS = "data.train=[a.jsonl,b.jsonl] data.seq_length=128 data.over_long=drop data.num_workers=1"
RUN = ["data", "inspect", "r.yaml", *SETTINGS.split()]


def test_json_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--json", "--samples", "1", "data.eval=h.jsonl"]) == 0
    taken = json.loads(capsys.readouterr().out)
    assert taken == json.loads(json.dumps(asdict(survey(num_previews=1, eval=["h.jsonl"]))))
    assert taken["schema"] == 1 and [counts["part"] for counts in taken["files"]] == ["train", "train", "eval"]
    answer = {"text": "hello<|im_end|>", "is_supervised": True, "tokens": 6, "is_gap": False}
    assert taken["previews"][0]["pieces"][1] == answer


def test_text_has_colour_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(RUN) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and "[[hello<|im_end|>]]" in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(RUN) == 0
    assert "\x1b[32mhello<|im_end|>\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(RUN) == 0
    assert capsys.readouterr().out == plain


def test_a_picture_needs_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert main([*RUN, "--png", "pictures/data.png", "data.eval=h.jsonl", "--samples", "0"]) == 0
    assert "picture pictures/data.png" in capsys.readouterr().err
    picture = Path("pictures/data.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*RUN, "--png", "data.png"]) == 2
    assert "ConfigError: --png needs matplotlib, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--samples", "-1"], "ConfigError: --samples -1 is not a number of samples.  Give 0 or more."),
        (["--png", "data.jpg"], "ConfigError: --png data.jpg does not end in .png"),
        (["--jsno"], "ConfigError: unknown option --jsno"),
        (["data.train=c.jsonl"], "DataError: c.jsonl:1: messages must be a list"),
    ],
)
def test_mistakes_end_in_one_paragraph(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.jsonl").write_text('{"messages": []}\n')
    assert main([*RUN, *words]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.out == ""
