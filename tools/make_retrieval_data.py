"""Writes documents with questions that can be answered only from statements earlier in the document.

    python -m tools.make_retrieval_data --out runs/demo-data --farthest 2048

A statement is a line of a letter and a digit, a key and its value.  A document has up to KEYS statements, then filler
(text of Python's documentation), and then questions: the line of a question repeats a key, and its value is the answer.
Only answers are supervised.  Keys and values of a document are drawn at random, so other documents say nothing about
them.

    \\nq7 \\nb4 ...  filler ...  \\nq7 \\nb4      statements of q and b, and their questions, with the answers 7 and 4

The values of a held-out document are all different.  So a model that knows the values of the document, but not which
value belongs to which key, gives one of KEYS answers right.  This is the accuracy by chance.

retrieval-train.jsonl has documents of many lengths, most of them short, which ask for every key many times.  With
--noise, some of its answers are random digits.
retrieval-512.jsonl asks for every key once, in the order of the statements, so that each answer is exactly 512 tokens
after its statement.  There is one such file for each of DISTANCES up to --farthest.  A row holds
tokens of the byte tokenizer and a loss mask.
The same Python and arguments always give the same files.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from string import ascii_lowercase, digits
from typing import NamedTuple

KEYS = 8  # statements of a held-out document
TRAIN_KEYS = (2, 3, 4, 6, KEYS)  # possible numbers of statements of a training document
STATEMENT = re.compile(rb"[a-z][0-9]")
LINE = 3  # tokens of a statement or a question: newline, key, value
TRAIN_QUESTIONS = 72  # questions of a training document, a multiple of each number of keys
DISTANCES = (128, 512, 2048, 8192)  # tokens from a statement to its answer, in held-out documents
MARGIN = 192  # --farthest less the largest number of tokens between statements and questions of a training document
SHORT_SHARE = 0.7  # share of the training tokens that are in documents without filler after the statements


class Document(NamedTuple):
    """A document as tokens of the byte tokenizer.  answers: the positions of the supervised tokens"""

    tokens: bytes
    answers: list[int]


def filler() -> bytes:
    """The text of Python's help topics as ASCII, without lines that begin like a statement."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    return b"\n" + b"\n".join(line for line in text.split(b"\n") if not STATEMENT.match(line))


def document(
    rng: random.Random, text: bytes, values: list[str], *, before: int, between: int, rounds: int, noise: float = 0.0
) -> Document:
    """A document with `before` tokens of filler before the statements, and `between` tokens after them.

    values  the value of each statement; the keys are random
    rounds  how often each key is asked for; the first round has the order of the statements, and the others a random
            order
    noise   share of the answers that are a random digit in place of the value
    """
    keys = rng.sample(ascii_lowercase, len(values))
    lines = [f"\n{key}{value}".encode() for key, value in zip(keys, values, strict=True)]
    order = range(len(lines))
    asked = [i for number in range(rounds) for i in (rng.sample(order, len(order)) if number else order)]
    tokens = excerpt(rng, text, before) + b"".join(lines) + excerpt(rng, text, between)
    first = len(tokens)
    answered = [
        lines[i][:-1] + rng.choice(digits).encode() if noise and rng.random() < noise else lines[i] for i in asked
    ]
    return Document(
        tokens + b"".join(answered),
        [first + LINE * i + LINE - 1 for i in range(len(asked))],
    )


def excerpt(rng: random.Random, text: bytes, size: int) -> bytes:
    """`size` tokens of the filler `text`, from a random line on.  The first token is the newline before this line."""
    start = text.rindex(b"\n", 0, rng.randrange(1, len(text) - size))
    return text[start : start + size]


def train_documents(
    rng: random.Random, text: bytes, num_tokens: int, noise: float, farthest: int
) -> Iterator[Document]:
    """Training documents with about `num_tokens` tokens in all, in random order.

    farthest  of the distances of held-out documents; a training document has at most MARGIN tokens less between its
              statements and questions
    """
    short, made = int(SHORT_SHARE * num_tokens), 0
    documents = []
    while made < num_tokens:
        values = rng.choices(digits, k=rng.choice(TRAIN_KEYS))
        between = 0 if made < short else round((farthest - MARGIN) ** rng.uniform(0.4, 1.0))
        rounds = TRAIN_QUESTIONS // len(values)
        new = document(rng, text, values, before=rng.randrange(64), between=between, rounds=rounds, noise=noise)
        made += len(new.tokens)
        documents.append(new)
    rng.shuffle(documents)
    yield from documents


def held_out_documents(rng: random.Random, text: bytes, distance: int, count: int) -> Iterator[Document]:
    for _ in range(count):
        values, between = rng.sample(digits, KEYS), distance - KEYS * LINE
        yield document(rng, text, values, before=rng.randrange(64), between=between, rounds=1)


def write(path: Path, documents: Iterable[Document]) -> None:
    """Writes documents as JSON lines of tokens and loss masks, and prints their number and their tokens."""
    rows = []
    for made in documents:
        mask = [0] * len(made.tokens)
        for position in made.answers:
            mask[position] = 1
        rows.append({"tokens": list(made.tokens), "loss_mask": mask})
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows), encoding="utf-8")
    num_tokens, num_answers = sum(len(row["tokens"]) for row in rows), sum(sum(row["loss_mask"]) for row in rows)
    print(f"{path}: {len(rows):,} documents, {num_tokens:,} tokens, {num_answers:,} answers")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write documents whose answers repeat statements far back in them.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="number of tokens for training")
    parser.add_argument("--held-out", type=int, default=6, help="number of held-out documents of each distance")
    about = "the largest distance (default: %(default)s)"
    parser.add_argument("--farthest", type=int, choices=DISTANCES, default=DISTANCES[-1], help=about)
    about = "share of the training answers that are a random digit (default: %(default)s)"
    parser.add_argument("--noise", type=float, default=0.0, help=about)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    options = parser.parse_args()
    text = filler()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"train {options.seed}")
    write(
        options.out / "retrieval-train.jsonl",
        train_documents(rng, text, options.tokens, options.noise, options.farthest),
    )
    for distance in DISTANCES[: DISTANCES.index(options.farthest) + 1]:
        rng = random.Random(f"held out {distance} {options.seed}")
        made = held_out_documents(rng, text, distance, options.held_out)
        write(options.out / f"retrieval-{distance}.jsonl", made)


if __name__ == "__main__":
    main()
