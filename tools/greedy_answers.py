"""Compares the scores of `sft eval --long` with answers that transformers generates greedily from the same weights.

    python -m tools.context_extension --runs build/extension    trains the model
    python -m tools.greedy_answers --runs build/extension       exports it, asks 600 questions twice, and compares

`sft eval --long` reads each answer with its prompt and compares argmax with the next token (teacher forcing).
transformers gets the prompt alone, and writes one token after the other.  What is done in the folder is not repeated.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MinistralConfig

from sft.data.long.suite import open_suites
from sft.metrics.long import read_scores
from sft.recipe.load import load_recipe
from sft.recipe.long import suite_settings
from sft.recipe.tokenizer import tokenizer_of
from tools.context_extension import SHORT, VOCABULARY, sft

ASKED = [  # 2 tasks, 6 lengths, 5 depths
    "data.long.tasks=[needle, keys]",
    "data.long.lengths=[0.25, 0.5, 1, 2, 4, 8]",
    "data.long.questions=10",
]
MORE = 8  # tokens that may be generated beyond the number of the answer's tokens
# Kinds of results, in the order of the table.
RIGHT, WRONG, GOES_ON, SAME_TEXT, DIFFERS = (
    "right in both",
    "wrong in both",
    "the same tokens, and then more text in place of the end of the turn",
    "other tokens of the same text",
    "other tokens: the implementations differ",
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question's answer.

    is_right   by teacher forcing
    tokens     of the right answer
    generated  tokens up to the end of the turn, without it; is_ended: whether the turn ended
    text       the right answer; written: the text of `generated`
    """

    is_right: bool
    tokens: tuple[int, ...]
    generated: tuple[int, ...]
    is_ended: bool
    text: str
    written: str

    @property
    def kind(self) -> str:
        """One of the kinds of results."""
        is_begun = self.generated[: len(self.tokens)] == self.tokens
        if is_begun != self.is_right:
            return DIFFERS
        if self.is_right:
            return RIGHT if self.is_ended and self.generated == self.tokens else GOES_ON
        return SAME_TEXT if self.is_ended and self.written.strip() == self.text else WRONG


def report(answers: Sequence[Answer], questions: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Lines of a table: the number of answers of each kind, and the control.

    questions: task and length of each answer.  The control gives each question the answer of the next question of the
    same task and length
    """
    counts = Counter(answer.kind for answer in answers)
    yield f"{len(answers):,} answers, {sum(answer.is_right for answer in answers):,} of them right by teacher forcing"
    yield from (f"{counts[kind]:5}  {kind}" for kind in (RIGHT, WRONG, GOES_ON, SAME_TEXT, DIFFERS))
    groups: dict[tuple[str, int], list[Answer]] = {}
    for question, answer in zip(questions, answers, strict=True):
        groups.setdefault(question, []).append(answer)
    shuffled = sum(
        answer.written.strip() == other.text
        for group in groups.values()
        for answer, other in zip(group, group[1:] + group[:1], strict=True)
    )
    yield f"{shuffled:5}  right with the answers of other questions"


def generated(model: Any, prompt: Sequence[int], most: int, end: int) -> tuple[tuple[int, ...], bool]:
    """At most `most` tokens that the model writes greedily after the prompt, and whether it then wrote `end`."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, eos_token_id=end
        )
    written = output[0, len(prompt) :].tolist()
    return tuple(written[: written.index(end)] if end in written else written), end in written


def export(folder: Path, weights: str) -> Path:
    """The weights as a Hugging Face folder.  A GPT of the tool is a Ministral, whose layers choose their attention."""
    original, exported = folder / "original", folder / "exported"
    if not exported.exists():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        tokenizer.save_pretrained(original)
        MinistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=True,
            architectures=["MinistralForCausalLM"],
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(original)
        sft(folder, "export", weights, exported.name, "--hf", original.name, "--dtype", "float32")
    return exported


def compared(folder: Path) -> tuple[list[Answer], list[tuple[str, int]]]:
    """The answers to the questions of ASKED, and their tasks and lengths."""
    weights, scores = SHORT.weights(), folder / "greedy.json"
    exported = export(folder, weights)
    if not scores.exists():
        sft(folder, "eval", f"{SHORT.name}.yaml", *ASKED, "--long", "--from", weights, "--json", scores.name)
    with chdir(folder):
        recipe = load_recipe(f"{SHORT.name}.yaml", ASKED)
        suites = open_suites(suite_settings(recipe), tokenizer_of(recipe.config), Path(recipe.config.cache_dir))
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    samples = [(fact, suite.corpus.sample(i).tokens) for suite in suites for i, fact in enumerate(suite.facts)]
    questions = read_scores("", scores).questions
    answers = []
    for question, (fact, tokens) in zip(questions, samples, strict=True):
        right = tuple(tokens[fact.start :].tolist())
        prompt = tokens[: fact.start].tolist()
        written, is_ended = generated(model, prompt, len(right) + MORE, tokenizer.eos_token_id)
        text = tokenizer.decode(written)
        answers.append(
            Answer(
                is_right=question.right,
                tokens=right,
                generated=written,
                is_ended=is_ended,
                text=fact.answer,
                written=text,
            )
        )
    return answers, [(question.task, question.length) for question in questions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of tools.context_extension")
    print(*report(*compared(parser.parse_args().runs)), sep="\n")


if __name__ == "__main__":
    main()
