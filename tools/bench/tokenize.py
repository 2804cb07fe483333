"""Time to convert chats to tokens and masks, compared with a plain script that makes tokens only.

    python -m tools.bench tokenize                               the small tokenizer of the tests, four templates
    python -m tools.bench tokenize --cases path/to/folder        any folder with a chat template

The trainer calls `encode_chat` for each row.  The baseline is `datasets.map` with `apply_chat_template(tokenize=True)`
for each row, which gives the same ids and no mask.  Both run in turns, in one process, on the same chats.  The ratio is
that of their median CPU times, which other processes do not affect; 0.9 means that the trainer takes 10% less time.
"""

import argparse
import importlib
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.bench.clock import cpu_time, medians
from tools.bench.harness import Option, Refused, Subject
from tools.bench.results import Bar, Column, Row

TEMPLATES = ("chatml", "qwen25", "qwen3", "chatml_marked")
WORDS = """the answer is what you get if six and seven are multiplied by hand on paper: forty-two, as everyone knows.
def function(value): return value + 1  # Überprüfung 検査 in 2024, a "quoted" word; {'key': [1, 2, 3]}""".split(" ")


def read(name: str) -> str:
    if name not in TEMPLATES and not Path(name).is_dir():
        raise ValueError(f"{name} is neither a folder nor one of {', '.join(TEMPLATES)}")
    return name


def prepare(options: argparse.Namespace) -> Iterator[Row]:
    """Turns off the tokenizer's threads: with threads, times would depend on other processes of the machine."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    yield from ()


def random_chat(rng: random.Random, num_words: int) -> list[dict[str, str]]:
    """A chat of 1 to 5 questions with answers, about `num_words` words in total."""
    turns = rng.randint(1, 5)
    sizes = [("user", num_words // (4 * turns)), ("assistant", 3 * num_words // (4 * turns))] * turns
    return [{"role": role, "content": " ".join(rng.choices(WORDS, k=size))} for role, size in sizes]


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        yield from measure_folder(Path(name) if name not in TEMPLATES else make_folder(Path(scratch), name), options)


def make_folder(scratch: Path, template: str) -> Path:
    """A folder with the tokenizer of the tests and one of its templates."""
    fixture = importlib.import_module("tests.unit.fixtures.folder")
    folder: Path = fixture.make_folder(scratch / template, fixture.template(template))
    return folder


def measure_folder(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    import datasets
    from transformers import AutoTokenizer

    from sft.config import DataConfig
    from sft.data.chat.encode_chat import encode_chat
    from sft.data.chat.omitted import find_omitted
    from sft.data.chat.tokenizer import load_tokenizer
    from sft.data.rows.formats import Chat

    datasets.disable_caching()
    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(DataConfig(train=["unused.jsonl"], seq_length=1, tokenizer=str(folder)))
    hf = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    chats = [random_chat(rng, options.words) for _ in range(options.chats)]
    table = datasets.Dataset.from_list([{"messages": chat} for chat in chats])

    def ours() -> list[int]:
        lengths = []
        for chat in chats:
            tokens, _, rendered, *_ = encode_chat(Chat(chat, None), tokenizer)
            assert rendered is not None
            find_omitted(rendered)
            lengths.append(len(tokens))
        return lengths

    def baseline() -> datasets.Dataset:
        return table.map(lambda row: {"ids": hf.apply_chat_template(row["messages"], return_dict=False)})

    num_tokens = ours()
    if num_tokens != [len(ids) for ids in baseline()["ids"]]:
        raise Refused(f"{folder.name}: encode_chat and apply_chat_template give different tokens. Nothing was timed.")
    calls = {"encode_chat": ours, "datasets.map": baseline}
    seconds = medians(calls, repeats=options.repeats, clock=cpu_time)
    for way, reference in (("encode_chat", "datasets.map"), ("datasets.map", None)):
        yield {
            "way": way, "chats_per_s": len(chats) / seconds[way], "tokens_per_chat": sum(num_tokens) / len(chats),
            "ratio": seconds[way] / seconds[reference] if reference else None,
        }  # fmt: skip


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    mean = statistics.geometric_mean(ratios) if ratios else None
    yield Bar(name="time of encode_chat / time of datasets.map, geometric mean of all cases", value=mean, bound=1.0)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("chats_per_s", "chats/s", ",.0f"),
        Column("tokens_per_chat", "tokens/chat", ",.0f"),
        Column("ratio", "ratio", ".2f"),
    ],
    cases=TEMPLATES,
    tiny_cases=["chatml"],
    read=read,
    prepare=prepare,
    options={
        "chats": Option(2000, 20, "number of chats"),
        "words": Option(145, 40, "words per chat; 145 words are about 600 tokens of the tests' tokenizer"),
        "repeats": Option(5, 1, "timed repetitions"),
    },
    bars=bars,
)
