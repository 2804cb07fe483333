"""data.turns = each: what a trace of an agent saves, what its store holds, and trees that are too large for a pack."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.console import Console
from sft.data import work
from sft.data.cache.corpus import Corpus
from sft.data.cache.encoder import encode_rows
from sft.data.cache.prepare import prepare
from sft.data.cache.row_report import LINE, RowCounts, count_rows
from sft.data.cache.store import Store
from sft.data.cache.tree_samples import split_tree
from sft.data.cache.tree_tables import TreeCounts, Trees, to_tables
from sft.data.chat.encode_chat import encode_chat, encode_row, encode_turns
from sft.data.chat.tokenizer import FolderTokenizer, load_tokenizer
from sft.data.chat.tree import Grown, TreeText, grow, texts_of
from sft.data.inspect.findings import scan
from sft.data.inspect.preview import preview
from sft.data.inspect.report import preview_lines
from sft.data.rows.formats import Chat, read_row, unused_keys
from sft.errors import DataError
from sft.parallel.shapes import padded
from tests.unit.data.traces import DROPPING, as_row, synthetic
from tests.unit.fixtures.chats import CALLING, SYSTEM, TALK, THINKING, THINKING_INSIDE, assistant, user
from tests.unit.fixtures.folder import ENDS_OF_TEMPLATE, OF_TEMPLATE, config, load_folder, template
from tests.unit.fixtures.model_folder import Tokens, write_folder

TYPED = [user("Type <|im_end|> and <|eot_id|>, é"), assistant("<|im_end|>", reasoning_content="So <|im_start|> é")]
TYPED += [user("And <|im_end|>?"), assistant("No.", reasoning_content="検査"), user("Bye"), assistant("Bye.")]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    """A tokenizer whose tokens are bytes, with a template that drops thinking wherever another message follows."""
    tokens = Tokens(("<|im_start|>", "<|im_end|>"), (), "<|im_end|>")
    folder = write_folder(tmp_path_factory.mktemp("letters"), tokens, DROPPING)
    tokenizer = load_tokenizer(config(tokenizer=str(folder)))
    assert isinstance(tokenizer, FolderTokenizer)
    return tokenizer


# Tokens of 10, 30 and 60 turns by arithmetic, with 3,000 tokens of system message and 600 + 200 + 600 tokens a turn:
# separate samples n * 3,800 + n * (n - 1) / 2 * 800; a tree 3,000 + (n - 1) * 800 + n * 800
@pytest.mark.parametrize(
    ("num_turns", "separate", "once", "rendered", "stored"),
    [
        (10, 74_000, 18_200, 75_215, 18_551),
        (30, 462_000, 50_200, 471_345, 51_251),  # as README, CHANGELOG and docs say
        (60, 1_644_000, 98_200, 1_679_790, 100_301),
    ],
)
def test_a_synthetic_trace_saves_what_arithmetic_promises(
    letters: FolderTokenizer, num_turns: int, separate: int, once: int, rendered: int, stored: int
) -> None:
    chat = read_row({"messages": synthetic(num_turns)})
    assert isinstance(chat, Chat)
    encoding = encode_turns(chat, letters)
    tree = encoding.tree
    assert tree is not None and len(tree.branches) == num_turns
    assert separate <= tree.num_rendered == rendered
    padded = int((-(-np.diff(tree.starts) // 32) * 32).sum())
    assert once <= len(encoding.tokens) == stored <= padded
    assert tree.num_rendered - padded >= 0.95 * (separate - once)
    assert padded / tree.num_rendered <= once / separate / 0.95


def test_the_work_of_template_and_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a clock that ticks when it is read, each of the calls takes a second."""
    ticks = count()
    monkeypatch.setattr(work.time, "process_time", lambda: next(ticks))
    tokenizer = load_folder(tmp_path, DROPPING)
    tokenizer.habits  # small chats are rendered first
    before = tokenizer.work
    chat = read_row(as_row(tiny(3, 5)))
    assert isinstance(chat, Chat)
    encoding = encode_turns(chat, tokenizer)
    # Three turns and one header are rendered, and the text of three turns is tokenised.
    added, text = tokenizer.work.since(before), tokenizer.decode(encoding.tokens)
    assert (added.template_s, added.tokenizer_s) == (4, 3)
    assert len(text) < added.characters < 1.6 * len(text)
    assert str(added).startswith("template 4.0 s for ") and str(added).endswith(
        "tokenizer 3.0 s, summed over processes"
    )
    assert added + before == tokenizer.work


TEMPLATES = "chatml qwen3 llama31 phi3 gemma glm4_moe harmony deepseek_r1 mistral_tools minimax".split()
CHATS = [TALK, [SYSTEM, *TALK, *TALK], [*THINKING, *THINKING], [*THINKING_INSIDE, *TALK], TYPED, CALLING]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_of_a_rest_are_those_of_the_whole(tmp_path: Path, name: str) -> None:
    """Tokenizers with merges, with tokens that take the spaces after them, and chats with control strings."""
    more, ends = OF_TEMPLATE.get(name, ()), ENDS_OF_TEMPLATE.get(name, ())
    tokenizer = load_folder(tmp_path, template(name), more=more, ends=ends)
    num_texts = 0
    for messages in CHATS:
        chat = read_row({"messages": messages})
        assert isinstance(chat, Chat)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [chat._replace(messages=chat.messages[: turn + 1]) for turn in turns]
        try:
            whole = [encode_chat(part, tokenizer, "last") for part in parts]
        except DataError as error:
            with pytest.raises(DataError) as again:
                encode_turns(chat, tokenizer)
            assert str(again.value) == str(error)
            continue
        encoding = encode_turns(chat, tokenizer)
        if encoding.tree is None:
            assert encoding.tokens.tolist() == whole[0].tokens.tolist() and len(whole) == 1
            continue
        texts = texts_of(Grown(encoding.tokens, encoding.weights, encoding.tree))
        for text, alone in zip(texts, whole, strict=True):
            num_texts += 1
            assert text.tokens.tolist() == alone.tokens.tolist()
            assert text.weights.tolist() == alone.weights.tolist()
        assert set(encoding.spelled) == {token for alone in whole for token in alone.spelled}
    assert num_texts >= 2


def write(path: Path, *rows: dict[str, Any]) -> list[Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def corpus_of(tmp_path: Path, files: list[Any], tokenizer: Any, **data: Any) -> Corpus:
    return prepare(files, config(**data), tokenizer, tmp_path / "cache", Console(0))


def tiny(num_turns: int, thinking: int) -> list[dict[str, Any]]:
    """A question, and turns with `thinking` letters of thinking and an action of two letters, each observed."""
    messages = [user("q")]
    for turn in range(num_turns):
        messages += [assistant(f"a{turn}", reasoning_content=str(turn) * thinking), user(f"o{turn}")]
    return messages[:-1]


def test_a_store_with_trees(tmp_path: Path, letters: FolderTokenizer) -> None:
    weighted = tiny(3, 5)
    weighted[3]["weight"], weighted[5]["train"] = 0.5, False
    rows = [as_row(tiny(2, 5)), as_row(TALK[:2]), {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}, as_row(weighted)]
    files = write(tmp_path / "a.jsonl", *rows)
    corpus = corpus_of(tmp_path, files, letters, turns="each", doc_multiple=8)
    # <|im_start|>user\nq<|im_end|> has 8 tokens; the header of an answer 11; <think>00000</think>a0<|im_end|> 23
    assert corpus.lengths.tolist() == [88, 42, 3, 88]
    documents = corpus.shapes
    assert documents.starts.tolist() == [0, 2, 3, 4, 6]
    assert documents.lengths.tolist() == [65, 23, 42, 3, 65, 23] and documents.depths.tolist() == [0, 19, 0, 0, 0, 19]
    assert padded(corpus.shapes, 8).tolist() == [96, 48, 8, 96] and corpus.has_trees
    first, plain, last = corpus.sample(0), corpus.sample(1), corpus.sample(3)
    assert plain.tree is None and first.tree is not None and last.tree is not None
    assert first.tree.branches.parents.tolist() == [-1, 0] and first.tree.branches.forks.tolist() == [0, 19]
    assert first.tree.ends.tolist() == [[1, 23], [0, 65]] and first.tree.spans.tolist() == [[0, 65, 88], [1, 42, 65]]
    assert last.tree.span_weights.tolist() == [1, 0.5]
    assert np.unique(last.weights).tolist() == [0, 0.5, 1]
    assert corpus.num_supervised.tolist() == [46, 13, 2, 46]
    report = corpus.row_reports[Path(files[0])]
    assert (report.trees, report.texts, report.tokens_rendered, report.tokens_of_trees) == (2, 4, 214, 176)
    assert "stores 4 texts of 214 tokens as 2 trees of 176 tokens (1.2 times fewer)" in str(report)
    # The same tokens, weights and trees from the cache, and other stores without trees.
    again = corpus_of(tmp_path, files, letters, turns="each", doc_multiple=8)
    assert again.digest == corpus.digest and again.row_reports == corpus.row_reports
    chats = corpus_of(tmp_path, files, letters, doc_multiple=8)
    assert not chats.has_trees and chats.digest != corpus.digest
    assert padded(chats.shapes, 8).tolist() == [72, 48, 8, 88]
    stores = [{path.name for path in folder.iterdir()} for folder in (tmp_path / "cache").glob("?" * 32)]
    arrays = {"tokens.npy", "mask.npy", "rows.npy", "ledger.json"}
    trees = {"trees.npy", "documents.npy", "texts.npy", "spans.npy"}
    assert sorted(names - {"omitted.jsonl"} == arrays for names in stores) == [False, True]
    assert arrays | trees in stores


def parts_of(messages: list[dict[str, Any]], tokenizer: Any, **data: Any) -> Any:
    rows = [(1, json.dumps(as_row(messages)).encode())]
    return encode_rows(rows, Path("a.jsonl"), config(turns="each", **data), tokenizer)


def test_a_tree_that_does_not_fit_repeats_its_trunk(letters: FolderTokenizer) -> None:
    """Four texts; a pack of 128 has the trunk of the first two texts and one branch."""
    made = parts_of(tiny(4, 5), letters, doc_multiple=8, seq_length=128)
    whole = parts_of(tiny(4, 5), letters, doc_multiple=8, seq_length=4096)
    assert whole.lines.tolist() == [(1, 1, 1, 180, 92, 180, 180, 92)]
    assert made.lines["tokens"].sum() - made.lines["new"].sum() == 42 + 65
    assert made.lines["supervised"].tolist() == [46, 23, 23] and made.lines["new"].sum() == 180
    assert made.trees.trees.tolist() == [(2, 2, 2), (1, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("seq_length", [96, 128, 160, 256])
def test_samples_of_a_split_tree_are_its_texts(letters: FolderTokenizer, seq_length: int) -> None:
    """Every text is in one sample, whole, and no pack is too small for it."""
    messages = tiny(6, 3)
    made = parts_of(messages, letters, doc_multiple=8, seq_length=seq_length, over_long="drop")
    chat = read_row(as_row(messages))
    assert isinstance(chat, Chat)
    expected = []
    for turn in range(1, len(messages), 2):
        alone = encode_chat(chat._replace(messages=chat.messages[: turn + 1]), letters, "last")
        if -(-len(alone.tokens) // 8) * 8 <= seq_length:
            expected.append((alone.tokens.tolist(), alone.weights.tolist()))
    got, first, trees = [], 0, Trees(made.trees)
    for number, num_tokens in enumerate(made.lines["tokens"].tolist()):
        tokens, mask = made.tokens[first : first + num_tokens], made.mask[first : first + num_tokens]
        tree, weights = trees.tree(number), made.weights[mask]
        assert tree is None or len(tree.ends) > 1
        lengths = [num_tokens] if tree is None else np.diff(tree.starts).tolist()
        assert sum(-(-length // 8) * 8 for length in lengths) <= seq_length
        got += [TreeText(tokens, weights)] if tree is None else texts_of(Grown(tokens, weights, tree))
        first += num_tokens
    assert [(tokens.tolist(), weights.tolist()) for tokens, weights in got] == expected
    labels = sum(int(np.count_nonzero(weights)) for _, weights in expected)
    assert made.lines["supervised"].sum() == labels and made.lines["full_supervised"][0] == 6 * 21
    assert made.lines["new"].sum() <= made.lines["full_tokens"][0]


def test_a_text_that_is_too_long_by_itself_follows_over_long(letters: FolderTokenizer) -> None:
    messages = tiny(3, 40)
    for seq_length in (88, 112):  # too small for two texts, and for the longest one, which the error is about
        with pytest.raises(
            DataError, match=f"a.jsonl:1: 123 tokens .128 when padded .* do not fit .*{seq_length}.  Raise"
        ):
            parts_of(messages, letters, doc_multiple=8, seq_length=seq_length)
    dropped = parts_of(messages, letters, doc_multiple=8, seq_length=112, over_long="drop")
    assert dropped.lines["supervised"].tolist() == [58, 58] and dropped.lines["full_supervised"].tolist() == [174, 174]
    windows = parts_of(messages, letters, doc_multiple=8, seq_length=112, over_long="windows")
    assert windows.lines["supervised"].sum() == 174
    nothing = parts_of(messages, letters, doc_multiple=8, seq_length=40, over_long="cut_turns")
    assert nothing.lines.tolist() == [(1, 0, 0, 0, 0, 0, 239, 174)]


def test_a_split_by_hand() -> None:
    """A trunk of 4 tokens with three branches of 2: two texts need 4 + 2 tokens."""
    texts = [
        TreeText(np.array([1, 2, 3, 4, a, 9], np.int32), np.array([0, 0, 0, 0, 1, 1], np.float32)) for a in (5, 6, 7)
    ]
    parts = list(split_tree(grow(texts), config(seq_length=8, doc_multiple=2)))
    assert [part.tokens.tolist() for part in parts] == [[1, 2, 3, 4, 5, 9, 6, 9], [1, 2, 3, 4, 7, 9]]
    assert [None if part.tree is None else part.tree.branches.forks.tolist() for part in parts] == [[0, 4], None]
    assert [part.labels for part in parts] == [4, 2]


def test_the_byte_tokenizer_makes_a_path() -> None:
    chat = read_row(as_row([*TALK, *TALK]))
    assert isinstance(chat, Chat)
    whole, encoding = encode_chat(chat, load_tokenizer(config())), encode_turns(chat, load_tokenizer(config()))
    assert encoding.tree is not None and len(encoding.tree.branches) == 1
    assert encoding.tokens.tolist() == whole.tokens.tolist() and encoding.weights.tolist() == whole.weights.tolist()


def test_the_picture_of_a_tree(tmp_path: Path, letters: FolderTokenizer) -> None:
    """65 tokens take 33 characters of two tokens each, a branch of 23 tokens after 19 begins at the tenth."""
    corpus = corpus_of(tmp_path, write(tmp_path / "a.jsonl", as_row(tiny(2, 5))), letters, turns="each")
    shown = preview(corpus.sample(0), "a.jsonl:1", "first", letters)
    assert shown.tree == (
        "-" * 21 + "#" * 12 + " " * 27 + "  65 tokens",
        " " * 9 + "#" * 12 + " " * 39 + "  23 tokens",
    )
    assert [(piece.text, piece.is_supervised) for piece in shown.pieces] == [
        (
            "<|im_start|>user\nq<|im_end|><|im_start|>assistant\na0<|im_end|><|im_start|>user\no0<|im_end|>"
            "<|im_start|>assistant\n",
            False,
        ),
        ("<think>11111</think>a1<|im_end|>", True),
        ("branch after 19 tokens", False),
        ("<think>00000</think>a0<|im_end|>", True),
    ]
    lines = list(preview_lines(shown, color=False))
    assert lines[1] == f"    {shown.tree[0]}" and "    [branch after 19 tokens]" in lines


def test_tables_of_trees() -> None:
    """Texts of 3 + 2 and of 5 + 4 tokens, and between them a sample without a tree."""
    first, last = (
        grow([TreeText(np.array(tokens, np.int32), np.ones(len(tokens), np.float32)) for tokens in texts])
        for texts in ([[1, 2, 3], [1, 4]], [[1, 2, 3, 4, 5], [1, 2, 3, 9]])
    )
    trees = Trees(to_tables([first.tree, None, last.tree], [4, 7, 6]))
    assert trees.counts() == (2, 4, 14, 10, 4)  # both texts supervise 1, and 1 2 3
    assert trees.repeated.tolist() == [1, 0, 3]
    assert trees.tables.documents["length"].tolist() == [3, 1, 7, 5, 1]
    assert trees.tables.documents["depth"].tolist() == [0, 1, 0, 0, 3]
    read = trees.tree(2)
    assert trees.tree(1) is None and read is not None
    for name in ("starts", "ends", "spans", "span_weights"):
        assert getattr(read, name).tolist() == getattr(last.tree, name).tolist()
    assert read.branches.forks.tolist() == [0, 3] and read.branches.parents.tolist() == [-1, 0]


@pytest.mark.parametrize("folder", [False, True])
def test_several_completions_of_a_prompt(letters: FolderTokenizer, folder: bool) -> None:
    """The prompt is stored once, and each completion is a branch or the trunk."""
    row = read_row({"prompt": "Six?", "completions": ["6", [assistant("six"), user("So?"), assistant("6")]]})
    assert isinstance(row, Chat)
    tokenizer = letters if folder else load_tokenizer(config())
    encoding = encode_row(row, tokenizer, config(turns="each"))
    assert encoding.tree is not None
    texts = texts_of(Grown(encoding.tokens, encoding.weights, encoding.tree))
    prompt, answer = [user("Six?")], [assistant("six"), user("So?")]
    chats = [[*prompt, assistant("6")], [*prompt, answer[0]], [*prompt, *answer, assistant("6")]]
    for text, messages in zip(texts, chats, strict=True):
        alone = encode_chat(Chat(messages, None), tokenizer, "last")
        assert text.tokens.tolist() == alone.tokens.tolist() and text.weights.tolist() == alone.weights.tolist()
    assert len(encoding.tree.branches) == 2
    assert len(encoding.tokens) == len(texts[2].tokens) + (2 if folder else 3)  # 6 <|im_end|>, with bytes a newline
    with pytest.raises(DataError, match="the row has 2 completions, but data.turns = chat renders one chat"):
        encode_row(row, tokenizer, config())


def test_a_row_of_another_format_may_have_completions() -> None:
    row = {"prompt": "Six?", "completion": "6", "completions": ["7", "8"]}
    assert read_row(row) == read_row({"prompt": "Six?", "completion": "6"})
    assert unused_keys(row) == ["completions"]


@pytest.mark.parametrize(
    ("completions", "why"),
    [
        ("6", "completions must be a list"),
        ([], "completions must be a list"),
        (["6", ""], "completion 2 of 2: .*empty"),
    ],
)
def test_completions_that_cannot_be_read(completions: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        read_row({"prompt": "Six?", "completions": completions})


def test_labels_of_texts_may_outnumber_tokens(tmp_path: Path, letters: FolderTokenizer) -> None:
    """Three completions have 42 labels each, of which 40 are the same in all: 46 of 65 stored tokens."""
    row = {"prompt": "?", "completions": ["a" * 40 + end for end in "xyz"]}
    corpus = corpus_of(tmp_path, write(tmp_path / "a.jsonl", row), letters, turns="each")
    said = corpus.summary().splitlines()[-1].split("; stores")[0]
    assert said.endswith("1 samples, 65 tokens (70.8% supervised; 46 tokens have 126 labels), longest 65")
    assert (corpus.num_supervised.tolist(), corpus.num_repeated.tolist()) == ([126], [80])


def test_a_chat_without_a_supervised_turn(letters: FolderTokenizer) -> None:
    row = Chat([user("q"), assistant("a")], None)._replace(weights=(1.0, 0.0))
    with pytest.raises(DataError, match="every token has weight 0 with data.turns = each, so the chat has no loss"):
        encode_turns(row, letters)


def test_a_turn_in_two_documents_ends_where_its_text_ends(tmp_path: Path) -> None:
    """The first text supervises 2 3 of the trunk and the end 7 of a branch, the second one 9 7."""
    texts = [([1, 2, 3, 7], [0, 1, 1, 1]), ([1, 2, 3, 8, 9, 7], [0, 0, 0, 0, 1, 1])]
    grown = grow([TreeText(np.array(ids, np.int32), np.array(weights, np.float32)) for ids, weights in texts])
    line = np.array([(1, 1, 1, 7, 5, 7, 7, 5)], dtype=LINE)
    store = Store(
        tokens=grown.tokens,
        mask=grown.weights.astype(np.uint8),
        rows=line,
        weights=np.array([0, 1], np.float32),
        row_report=count_rows(line, RowCounts(trees=TreeCounts(1, 2, 10, 7))),
        digest="0",
        trees=Trees(to_tables([grown.tree], [7])),
    )
    scanned = scan(Corpus([tmp_path / "a.jsonl"], [store]), [7], Console(0))
    assert (scanned.num_runs, scanned.unfinished_runs, scanned.longest_run) == (2, 0, 3)
