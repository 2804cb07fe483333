"""Writes a chat corpus from the documentation and sources of the installed Python.

    python -m tools.make_demo_corpus --out demo

train.jsonl and heldout.jsonl hold questions about the standard library.  Most are short ("What does json.dumps do?").
Others are documents of up to --max-tokens ("Here is the source of module json: ...  What does function dumps do?"), in
which the answer is far from the question.  The tool reads modules and does not import them.  The same Python and
arguments always give the same files.  Questions of heldout.jsonl are about modules that train.jsonl does not contain.
"""

import argparse
import ast
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from sft.data.chat.encode_chat import Chat, encode_chat
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.rows.messages import Message

HELD_OUT = 0.1  # share of modules, topics and samples that is held out
LONG_SHARE = 0.06  # share of samples that are long documents
TOPIC_SHARE = 0.1
MIN_TOKENS = 6000  # smallest --max-tokens; the longest short chats have about this length


@dataclass(frozen=True)
class Function:
    """A function or class with a docstring; lines count from 1."""

    name: str
    doc: str
    first_line: int
    last_line: int


@dataclass(frozen=True)
class Module:
    name: str
    lines: list[str]
    functions: list[Function]


def modules() -> Iterator[Module]:
    """Modules of the standard library with at least two documented functions, by name."""
    for name in sorted(sys.stdlib_module_names):
        spec = None if name.startswith("_") else importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        source = Path(spec.origin).read_text(encoding="utf-8")
        functions = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                doc = ast.get_docstring(node) or ""
                if 20 <= len(doc) <= 700:
                    functions.append(Function(node.name, doc, node.lineno, node.end_lineno or node.lineno))
        if len(functions) >= 2:
            yield Module(name, source.splitlines(), functions)


def num_tokens(messages: list[Message]) -> int:
    """The length of a chat in tokens of the byte tokenizer."""
    return len(encode_chat(Chat(messages, None), ByteTokenizer())[0])


def chat(*turns: tuple[str, str]) -> list[Message]:
    """The messages of a chat from pairs of question and answer."""
    return [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]


def short_sample(module: Module, rng: random.Random) -> list[Message]:
    """A chat of one to three questions about functions of a module; some contain the function's source."""
    turns = []
    for function in rng.sample(module.functions, min(rng.choice((1, 1, 2, 3)), len(module.functions))):
        question = f"What does {module.name}.{function.name} do?"
        source = "\n".join(module.lines[function.first_line - 1 : function.last_line])
        if len(source) < 1200 and rng.random() < 0.4:
            question = f"Here is {function.name} of module {module.name}:\n\n{source}\n\nWhat does it do?"
        turns.append((question, function.doc))
    return chat(*turns)


def long_sample(pool: list[Module], target: int, rng: random.Random) -> list[Message]:
    """A chat of at most `target` tokens: sources of modules, then a question about one function in them."""
    budget = target - 1000  # leaves room for the question, the answer (at most 700 characters) and the template
    text: list[str] = []
    asked: list[tuple[str, Function]] = []
    while budget > 0:
        module = rng.choice(pool)
        text.append(f"Here is the source of module {module.name}:\n")
        last = 0
        for last, line in enumerate(module.lines, start=1):
            budget -= len(line.encode()) + 1
            if budget <= 0:
                last -= 1
                break
            text.append(line)
        asked += [(module.name, function) for function in module.functions if function.last_line <= last]
        budget -= 60
    name, function = rng.choice(asked or [(module.name, module.functions[0])])
    question = "\n".join([*text, f"\nWhat does function {function.name} of module {name} do?"])
    return chat((question, function.doc))


def topic_sample(name: str, limit: int) -> list[Message]:
    """A chat about a topic of Python's help, with as many paragraphs of the topic as fit into `limit` tokens."""
    text = topics[name].strip()
    while len(text.encode()) > limit - 200:
        text = text[: len(text) // 2].rpartition("\n\n")[0] or text[: limit // 2]
    return chat((f"Explain the Python topic {name}.", text))


def samples(count: int, pool: list[Module], names: list[str], limits: list[int], seed: str) -> list[list[Message]]:
    """`count` chats in random order.

    limits  tokens.  For each limit, the first long chat has nearly this length; further long chats are shorter, by a
            factor of up to 4
    """
    rng = random.Random(seed)
    num_long, num_topics = max(1, round(LONG_SHARE * count)), min(round(TOPIC_SHARE * count), len(names))
    made = []
    for i in range(num_long):
        limit = limits[i % len(limits)]
        made.append(long_sample(pool, limit if i < len(limits) else int(limit * 4 ** -rng.random()), rng))
    made += [topic_sample(name, limits[0] // 3) for name in rng.sample(names, num_topics)]
    while len(made) < count:
        made.append(short_sample(rng.choice(pool), rng))
    rng.shuffle(made)
    return made


def write(path: Path, rows: list[list[Message]]) -> None:
    """Writes chats as JSON lines and prints their number and lengths."""
    text = "".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in rows)
    path.write_text(text, encoding="utf-8")
    lengths = sorted(num_tokens(messages) for messages in rows)
    print(
        f"{path}: {len(rows):,} chats, {sum(lengths):,} tokens with the byte tokenizer, "
        f"median {lengths[len(lengths) // 2]:,}, longest {lengths[-1]:,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a chat corpus from Python's documentation and sources.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    parser.add_argument("--samples", type=int, default=600, help="number of chats; a tenth of them are held out")
    parser.add_argument("--max-tokens", type=int, default=12_000, help="longest chat in byte tokens")
    parser.add_argument("--long", type=int, help="also make chats of nearly this many tokens, for example 65536")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    options = parser.parse_args()
    if options.samples < 2 or min(options.max_tokens, options.long or options.max_tokens) < MIN_TOKENS:
        parser.error(f"--samples must be at least 2, --max-tokens and --long at least {MIN_TOKENS}")
    rng = random.Random(options.seed)
    pool, names = list(modules()), sorted(topics)
    rng.shuffle(pool)
    rng.shuffle(names)
    held = (int(HELD_OUT * len(pool)), int(HELD_OUT * len(names)))
    limits = [options.max_tokens] + ([options.long] if options.long else [])
    num_held = max(1, round(HELD_OUT * options.samples))
    options.out.mkdir(parents=True, exist_ok=True)
    train = samples(options.samples - num_held, pool[held[0] :], names[held[1] :], limits, f"train {options.seed}")
    write(options.out / "train.jsonl", train)
    held_out = samples(num_held, pool[: held[0]], names[: held[1]], limits, f"heldout {options.seed}")
    write(options.out / "heldout.jsonl", held_out)


if __name__ == "__main__":
    main()
