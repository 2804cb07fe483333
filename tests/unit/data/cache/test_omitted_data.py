"""Texts that a chat template leaves out: prepare, inspect and training report them, and refuse them if the recipe says
so."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.cli import main
from sft.config import DataConfig
from sft.data.cache import workers
from sft.data.cache.corpus import find_prepared
from sft.data.chat.tokenizer import load_tokenizer
from sft.errors import DataError
from tests.builders import RECIPE
from tests.unit.corpora import corpus_of, write
from tests.unit.fixtures.folder import config, make_folder, template

SYSTEM = {"role": "system", "content": "You are an expert in the law of the sea."}
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
THOUGHT = {"role": "assistant", "content": "42", "reasoning_content": "six times seven"}
PLAIN, LAW = {"messages": HI}, {"messages": [SYSTEM, *HI]}
THINKING = {"messages": [HI[0], THOUGHT, *HI, HI[0], {**THOUGHT, "reasoning_content": "again"}, *HI]}
TOKENS = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}
NEMO = (
    "The template writes this text in a prompt without an answer, and leaves it out if the answer follows: the model "
    "is trained without the text, but used with it.  Give a template that keeps the text (data.chat_template)"
)
KEEPS = "data.chat_template_kwargs: {preserve_thinking: true} keeps it"


@pytest.fixture(autouse=True)
def nemo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokenizers and a recipe in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    make_folder(Path("nemo"), template("mistral_nemo"))
    Path("switches.jinja").write_text(template("switches"))
    Path("r.yaml").write_text(RECIPE)


def corpus(path: str, **overrides: Any) -> Any:
    return corpus_of(path, tokenizer="nemo", num_workers=1, cache=Path("cache"), **overrides)


def test_counts_and_rows_are_in_the_ledger_and_in_the_list() -> None:
    path = write(Path("a.jsonl"), PLAIN, LAW, TOKENS, THINKING, LAW)
    log: list[str] = []
    ledger = corpus(path, log=log).row_reports[Path(path)]
    assert ledger.chats == 4 and ledger.rows == 5
    system, reasoning = ledger.omitted
    assert (system.role, system.kind, system.count, system.chats, system.rows) == ("system", "content", 2, 2, (2, 5))
    assert (reasoning.kind, reasoning.count, reasoning.chats, reasoning.rows) == ("reasoning", 2, 1, (4,))
    assert (system.message, system.said, system.why) == (1, SYSTEM["content"], f"{NEMO}.")
    told = (
        f"; the chat template leaves out the system content of 2 of 4 chats: rows 2, 5 ({NEMO}); the chat template "
        "leaves out the assistant reasoning of 1 of 4 chats (2 messages): row 4 (The template never reads "
        "reasoning_content: give a template that does (data.chat_template))"
    )
    assert told in corpus(path).summary() and "leaves out" not in log[-1]
    [listed] = Path("cache").glob("*/omitted.jsonl")
    assert listed.read_text().splitlines() == [
        '{"row": 2, "message": 1, "role": "system", "kind": "content", "num": 1}',
        '{"row": 4, "message": 2, "role": "assistant", "kind": "reasoning", "num": 2}',
        '{"row": 5, "message": 1, "role": "system", "kind": "content", "num": 1}',
    ]


def test_reasoning_of_turns_that_are_not_learnt_is_no_loss() -> None:
    """Nor does the model see it when it is used; the reasoning of the learnt turn counts."""
    path = write(Path("a.jsonl"), {"messages": [HI[0], THOUGHT, HI[0], THOUGHT]})
    for supervise, count in (("assistant", 2), ("last", 1), ("after_last_user", 1)):
        [reasoning] = corpus(path, supervise=supervise).row_reports[Path(path)].omitted
        assert (reasoning.kind, reasoning.count) == ("reasoning", count)


def test_every_reason_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("a.jsonl"), PLAIN, LAW)
    write(Path("b.jsonl"), LAW)
    data = "data.train=[a.jsonl,b.jsonl] data.eval=a.jsonl data.tokenizer=nemo data.num_workers=1 data.cache_dir=cache"
    for command in ("data prepare", "check", "data inspect"):
        assert main([*command.split(), "r.yaml", *data.split()]) == 0
        told = "".join(capsys.readouterr())
        assert told.replace("\n", "").count(NEMO[:40]) == 1 and told.count("leaves out the system content") == 3


def test_parts_and_processes_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(Path("a.jsonl"), *[PLAIN, LAW, THINKING, PLAIN] * 8)
    one = corpus(path)
    monkeypatch.setattr(workers, "ROWS_PER_PART", 3)
    assert corpus_of(path, tokenizer="nemo", num_workers=2, cache=Path("other")).row_reports == one.row_reports
    [first], [second] = Path("cache").glob("*/*.jsonl"), Path("other").glob("*/*.jsonl")
    assert first.read_bytes() == second.read_bytes()


def test_nothing_left_out_is_no_list_and_no_error() -> None:
    path = write(Path("a.jsonl"), PLAIN, TOKENS)
    assert corpus(path, on_omitted="error").row_reports[Path(path)].omitted == ()
    assert not list(Path("cache").glob("*/omitted.jsonl"))


REFUSED = (
    'a.jsonl:3: message 1: chat template of nemo leaves out the system content "You are an expert in the law of the '
    f'sea.", and data.on_omitted is error.  {NEMO}.  With data.on_omitted = report, '
    "the trainer counts omitted texts and continues."
)


def test_an_error_names_row_message_text_and_what_would_work(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("a.jsonl"), PLAIN, PLAIN, LAW, THINKING)
    run = "data prepare r.yaml data.train=a.jsonl data.tokenizer=nemo data.num_workers=1 data.cache_dir=cache".split()
    assert main([*run, "data.on_omitted=error"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"DataError: {REFUSED}"
    # The prepared store is used, because it does not depend on the texts that are refused.
    assert main(run) == 0
    assert "1 of 1 parts reused" in capsys.readouterr().out


def test_an_error_where_the_data_were_prepared_before() -> None:
    """Training opens a store and tokenises nothing."""
    path = write(Path("a.jsonl"), PLAIN, PLAIN, LAW)
    data = config(tokenizer="nemo", on_omitted="error")
    tokenizer = load_tokenizer(data)
    corpus(path)
    with pytest.raises(DataError) as refused:
        find_prepared([path], data, tokenizer, Path("cache"), command="so")
    assert str(refused.value) == REFUSED
    assert find_prepared([path], config(tokenizer="nemo"), tokenizer, Path("cache"), command="so")


def test_inspect_lists_it_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("a.jsonl"), PLAIN, PLAIN, LAW, THINKING, TOKENS)
    run = "data inspect r.yaml data.train=a.jsonl data.tokenizer=nemo data.eval=a.jsonl data.num_workers=1".split()
    assert main(run) == 0
    out = capsys.readouterr().out
    assert f"\n  a: the chat template leaves out the system content of 1 of 4 chats; {NEMO}.\n" in out
    assert "\n  ! 1 of 4 chats (25.0%) lose system content to the chat template: " in out
    assert "! 1 of 4 held-out chats (eval) (25.0%) lose assistant reasoning to the chat template" in out
    assert main([*run, "data.on_omitted=error"]) == 0
    out = capsys.readouterr().out
    assert "sft train would refuse these data" in out and REFUSED in out and "\n  ! 1 of 4 chats" in out
    assert main([*run, "--json"]) == 0
    taken = json.loads(capsys.readouterr().out)
    assert taken["files"][0]["chats"] == 4 and taken["files"][0]["omitted"][1]["rows"] == [3]
    assert taken["files"][0]["work"] is None  # it is in the cache
    assert main([*run, "--json", "data.supervise=last"]) == 0
    captured = capsys.readouterr()
    work = json.loads(captured.out)["files"][0]["work"]
    assert set(work) == {"template_s", "tokenizer_s", "characters"} and work["characters"] > 0
    said = f"; template {work['template_s']:.1f} s for {work['characters']:,} characters, tokenizer "
    assert said in captured.err and "summed over processes)" in captured.err


def switched(**kwargs: Any) -> DataConfig:
    return config(tokenizer="nemo", chat_template="switches.jinja", chat_template_kwargs=kwargs)


def test_a_switch_is_named_and_works() -> None:
    path = write(Path("a.jsonl"), THINKING)
    overrides = {"chat_template": "switches.jinja"}
    [omitted] = corpus(path, **overrides).row_reports[Path(path)].omitted
    assert omitted.count == 2 and omitted.why == f"{KEEPS}."
    kept = corpus(path, **overrides, chat_template_kwargs={"preserve_thinking": True}, on_omitted="error")
    assert kept.row_reports[Path(path)].omitted == () and kept.lengths[0] > corpus(path, **overrides).lengths[0]
    assert len(list(Path("cache").glob("?" * 32))) == 2  # the setting is part of the store's name
    on, off = switched(preserve_thinking=True), switched(preserve_thinking=False)
    assert load_tokenizer(on).digest != load_tokenizer(off).digest


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("{tools: 1}", "sets tools, but a template gets this from the chat or the tokenizer; remove it."),
        ("{a-b: 1}", "; expected a mapping of names to values."),
        ("{a: [1]}", "; expected a mapping of names to values."),
    ],
)
def test_what_cannot_be_a_switch(given: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "r.yaml", "--no-data", f"data.chat_template_kwargs={given}"]) == 2
    assert complaint in capsys.readouterr().err


def test_a_switch_that_no_template_reads_is_refused() -> None:
    with pytest.raises(DataError, match="gives preserve_thinkin, .* switches.jinja reads: preserve_thinking, quiet."):
        load_tokenizer(switched(preserve_thinkin=True))
    with pytest.raises(DataError, match="has no effect with data.tokenizer = byte"):
        load_tokenizer(config(chat_template_kwargs={"preserve_thinking": True}))
