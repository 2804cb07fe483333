"""Draws docs/pictures/extension.png: right answers by length and depth, before and after a context is extended.

    python -m tools.context_extension --runs build/extension    trains three times (minutes), scores, and draws

A GPT of 0.1M parameters learns to find a number in texts of at most 512 tokens, and then of at most 2,048.  It is then
trained for 60 steps on texts of up to 8,192 tokens, with YaRN.  The recipes stand below; `sft train` and `sft eval
--long` do the work.  What is done in the folder is not repeated.  Training and held-out questions have other texts,
because their streams of random numbers have other names.  Needs matplotlib.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sft.data.long.draws import Draws
from sft.data.long.tasks import puzzle
from sft.metrics.long import LongScores, read_scores
from tools.make_tiny_model import CONTROL, TEMPLATE

PICTURE = Path(__file__).resolve().parents[1] / "docs/pictures/extension.png"
VOCABULARY = 768


class Run(NamedTuple):
    """A run of the tool.  name: of its folder and its recipe; last: its last step"""

    name: str
    last: int
    recipe: str

    def weights(self, step: int | None = None) -> str:
        """The checkpoint after a step; None: the last one."""
        return f"{self.name}/checkpoints/iter_{step or self.last:07}"


MODEL = """\
model:
  {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 2, init_std: 0.1, tie_embeddings: true,
   sliding_window: 8, sliding_window_layers: [1], """
SHORT = Run(
    "short",
    600,
    f"""\
run: {{dir: short, device: cpu, precision: fp32}}
{MODEL}init_from: random}}
data:
  train: short.jsonl
  tokenizer: tokenizer
  cache_dir: cache
  seq_length: 512
  long: {{tasks: [needle], lengths: [0.5, 1, 2, 4, 8, 16], questions: 8}}
train: {{num_steps: 600, global_batch_size: 16}}
optim: {{lr: 2e-3, schedule: constant, warmup_steps: 20, weight_decay: 0.1}}
checkpoint: {{save_every: 150, keep_last: 4}}
""",
)
BASE = Run(
    "base",
    120,
    f"""\
run: {{dir: base, device: cpu, precision: fp32}}
{MODEL}init_from: {SHORT.weights()}}}
data:
  train: base.jsonl
  tokenizer: tokenizer
  cache_dir: cache
  seq_length: 2048
  long: {{tasks: [needle], lengths: [0.125, 0.25, 0.5, 1, 2, 4], questions: 8}}
train: {{num_steps: 120, global_batch_size: 4}}
optim: {{lr: 1e-3, schedule: constant, warmup_steps: 5, weight_decay: 0.1}}
checkpoint: {{save_every: 60}}
""",
)
YARN = Run(
    "yarn",
    60,
    f"""\
run: {{dir: yarn, device: cpu, precision: fp32}}
{MODEL}init_from: {BASE.weights()},
   rope: {{scaling: yarn, factor: 4, original_max_position: 2048}}}}
data:
  train: yarn.jsonl
  tokenizer: tokenizer
  cache_dir: cache
  seq_length: 8192
  long: {{tasks: [needle], lengths: [0.03125, 0.0625, 0.125, 0.25, 0.5, 1], questions: 8}}
train: {{num_steps: 60, global_batch_size: 2}}
optim: {{lr: 1e-3, schedule: cosine, warmup_steps: 5, weight_decay: 0.1}}
checkpoint: {{save_every: 30}}
""",
)
# `sft eval` of weights that were trained with other positions.
OTHER_ROPE = "checkpoint.allow_changes=[model.rope.scaling, model.rope.factor, model.rope.original_max_position]"
# Title of a panel -> run with the recipe, weights, further settings.
PANELS: dict[str, tuple[Run, str, list[str]]] = {
    "512 tokens, step 150": (SHORT, SHORT.weights(150), []),
    "trained to 2,048 tokens": (BASE, BASE.weights(), []),
    "the same weights with YaRN": (YARN, BASE.weights(), [OTHER_ROPE]),
    "and 60 steps at 8,192": (YARN, YARN.weights(), []),
}


def questions(
    count: int, passages: Callable[[random.Random], int], seed: int, task: str = "needle"
) -> Iterator[dict[str, Any]]:
    """Rows with a question of the task.  passages: returns the number of sentences around the evidence"""
    rng = random.Random(seed)
    for i in range(count):
        size = passages(rng)
        asked = puzzle(task, Draws(f"train {seed} {i}"))
        first = rng.randint(0, size)
        positions = sorted([first, *(rng.randint(first, size) for _ in asked.evidence[1:])])
        lines = [asked.filler(k) for k in range(size)]
        for position, line in reversed(list(zip(positions, asked.evidence, strict=True))):
            lines.insert(position, line)
        text = "\n".join([asked.opening, *lines, asked.question])
        yield {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": asked.answer}]}


def passages_of_short(rng: random.Random) -> int:
    """Up to 512 tokens: a third without other sentences, and few long texts."""
    return 0 if rng.random() < 0.35 else int(rng.random() ** 2 * 24)


def passages_of_base(rng: random.Random) -> int:
    """Up to 2,048 tokens."""
    return int(rng.random() * 112)


def passages_of_yarn(rng: random.Random) -> int:
    """Up to 8,192 tokens."""
    return int(rng.random() * 465)


# Run -> number of its texts, and of the sentences around the evidence.
DATA: dict[Run, tuple[int, Callable[[random.Random], int]]] = {
    SHORT: (24_000, passages_of_short),
    BASE: (1_200, passages_of_base),
    YARN: (360, passages_of_yarn),
}


def make_data(folder: Path, share: float = 1.0) -> None:
    """Write a tokenizer of VOCABULARY tokens, whose digits are single tokens, training data and the recipes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), letters])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL), initial_alphabet=sorted(letters.alphabet()), show_progress=False
    )
    rows = (row for task in ("needle", "values", "needles") for row in questions(400, lambda rng: 20, 7, task))
    backend.train_from_iterator((row["messages"][0]["content"] for row in rows), trainer)
    backend.add_special_tokens(CONTROL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    for seed, (run, (count, passages)) in enumerate(DATA.items(), start=1):
        lines = (json.dumps(row) + "\n" for row in questions(int(count * share), passages, seed))
        (folder / f"{run.name}.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / f"{run.name}.yaml").write_text(run.recipe, encoding="utf-8")


def sft(folder: Path, *words: str) -> None:
    """Run an `sft` command in the folder.  Raises CalledProcessError."""
    print("sft", *words, flush=True)
    subprocess.run([sys.executable, "-m", "sft", *words], cwd=folder, check=True)


def scores(folder: Path) -> dict[str, LongScores]:
    """The scores of each panel; trains and scores what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{YARN.name}.yaml").exists():
        make_data(folder)
    for run in DATA:
        if not (folder / run.weights()).exists():
            sft(folder, "data", "prepare", f"{run.name}.yaml")
            sft(folder, "train", f"{run.name}.yaml")
    files = [folder / f"panel{number}.json" for number in range(len(PANELS))]
    for file, (run, weights, settings) in zip(files, PANELS.values(), strict=True):
        if not file.exists():
            sft(folder, "eval", f"{run.name}.yaml", *settings, "--long", "--from", weights, "--json", file.name)
    results = [read_scores("", file) for file in files]
    assert len({result.digest for result in results}) == 1, "all panels have the same questions"
    return dict(zip(PANELS, results, strict=True))


def draw(panels: dict[str, LongScores], out: Path) -> None:
    """Write the picture: a heat map of length and depth for each panel."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from sft.metrics.results.long_plot import draw_heat_map

    figure = Figure(figsize=(3.1 * len(panels), 3.0), layout=ConstrainedLayoutEngine())
    for axes, (title, result) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        image = draw_heat_map(axes, result, "needle", title)
    figure.colorbar(image, ax=figure.axes, label="right answers", shrink=0.8)
    figure.supxlabel("length in tokens", fontsize=9)
    figure.supylabel("depth of the evidence", fontsize=9)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of data, runs and scores")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    draw(scores(options.runs), options.out)


if __name__ == "__main__":
    main()
