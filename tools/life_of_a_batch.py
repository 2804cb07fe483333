"""Prints what two chats become at cp 2, and keeps docs/concepts/life-of-a-batch.md equal to it.

python -m tools.life_of_a_batch            print every part
python -m tools.life_of_a_batch --write    write the parts into the page
python -m tools.life_of_a_batch --check    exit status 1 if the page shows anything else

Two processes train one step with the code of `sft train`: they tokenise, plan, pack, shard, compute and reduce as a run
does.  This file holds the chats and the recipe, and formats tensors.  It computes no tensor itself.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sft.batch import Microbatch, Pack, Sample
from sft.cli import main as sft
from sft.data.packing.pack import Collator
from sft.metrics.records import train_record
from sft.metrics.run_facts import RunFacts
from sft.parallel.alignment import aligned
from sft.parallel.collectives import all_gather_objects
from sft.parallel.context_parallel import local_indices
from sft.parallel.layout import Layout
from sft.probe.session import Session, model, session
from sft.recipe.load import load_recipe
from sft.recipe.tokenizer import tokenizer_of
from tools.bench import ranks
from tools.make_tiny_model import make
from tools.printed_page import DOCS, PrintedPage

CP = 2
FILES = {
    "chats.jsonl": """\
{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "is 4"}]}
{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
""",
    "short.jinja": """\
{% for m in messages %}{{ '<|im_start|>' + m.role[0] + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}
""",
    "recipe.yaml": """\
run: {dir: run, device: cpu, precision: fp32}
model: {hf: tiny}  # 2 layers, 64 wide, 4 query heads and 2 key heads of 16 numbers, random weights
data: {train: chats.jsonl, chat_template: short.jinja, seq_length: 32, doc_multiple: 8, shuffle: false}
parallel: {cp: 2}
train: {num_steps: 1, global_batch_size: 1}
optim: {lr: 1.0e-3, schedule: constant}
""",
}
NAMES = {"<|im_start|>": "S", "<|im_end|>": "E", "<|endoftext|>": "."}  # control token -> the letter that stands for it
LOGGED = ("lm loss", "grad-norm", "tokens/supervised", "tokens/real", "tokens/padded", "padding/tail", "documents")
_COLLECTIVES = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}


class Recorder(TorchDispatchMode):
    """Records collectives, hidden states and their gradients of a step on this rank, in order, with their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in _COLLECTIVES:
            shapes = [list(x.shape) for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            shapes = shapes[::-1] if name != "allreduce_" else shapes * 2  # the output is the first argument
            self.lines.append(f"  {_COLLECTIVES[name]} {shapes[0]} -> {shapes[-1]}")
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> Any:
        """A forward hook that records the output of a module, and its gradient, under this name."""

        def hook(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self.lines.append(f"output of {name} {list(hidden.shape)}")
            hidden.register_hook(lambda grad: self.lines.append(f"gradient of the output of {name} {list(grad.shape)}"))

        return hook

    def until(self, name: str) -> list[str]:
        """The lines up to the first one that begins with `name`.  Later collectives are about weights and metrics."""
        return self.lines[: 1 + next(i for i, line in enumerate(self.lines) if line.startswith(name))]


def shown(files: Mapping[str, str]) -> str:
    return "\n\n".join(f"{name}\n{text.rstrip()}" for name, text in files.items())


def row(name: str, values: Iterable[Any], width: int = 4) -> str:
    return f"{name:<13}" + "".join(f"{value!s:>{width}}" for value in values)


def letters(session: Session, tokens: np.ndarray) -> list[str]:
    """One letter for each token."""
    tokenizer = tokenizer_of(session.config)
    texts = [tokenizer.decode([token]) for token in tokens.tolist()]
    return [NAMES.get(text, text.replace(" ", "_")) for text in texts]


def numbers(values: Any) -> list[str]:
    """The values as text.  1.0 becomes 1, and 0.0 becomes a point."""
    return ["." if value == 0 else f"{value:g}" for value in values]


def samples(session: Session, read: Sequence[Sample]) -> str:
    lines = []
    for sample in read:
        tokens = sample.tokens
        lines += [f"sample {sample.sample_id}, tokens int32 [{len(tokens)}], weights float32 [{len(tokens)}]"]
        lines += [row("text", letters(session, tokens)), row("tokens", tokens), row("weights", numbers(sample.weights))]
    return "\n".join(lines)


def plan(session: Session, read: Sequence[Sample]) -> str:
    data, packs = session.config.data, session.data.train.plans.plan(0)
    lengths = np.array([len(sample.tokens) for sample in read])
    return "\n".join(
        [
            row("lengths", lengths),
            row("padded", aligned(lengths, data.doc_multiple)),
            *(
                f"pack {k}: samples {list(packs.pack(k))} of at most {data.seq_length} tokens"
                for k in range(len(packs))
            ),
        ]
    )


def whole(session: Session, pack: Pack) -> str:
    return "\n".join(
        [
            row("text", letters(session, pack.tokens)),
            row("tokens", pack.tokens),
            row("labels", pack.labels),
            row("loss_weights", numbers(pack.loss_weights)),
            row("position_ids", pack.position_ids),
            row("documents", pack.documents),
            f"cu_seqlens {pack.cu_seqlens.tolist()}, lengths {pack.lengths.tolist()}, max_seqlen {pack.max_seqlen}",
        ]
    )


def part(session: Session, mb: Microbatch, cp_rank: int) -> str:
    """The part of the pack that a rank holds."""
    return "\n".join(
        [
            f"rank {cp_rank}",
            row("indices", local_indices(mb.cu_seqlens.numpy(), mb.cp_size, cp_rank)),
            row("text", letters(session, mb.tokens[0].numpy())),
            row("tokens", mb.tokens[0].tolist()),
            row("labels", mb.labels[0].tolist()),
            row("loss_weights", numbers(mb.loss_weights[0].tolist())),
            row("position_ids", mb.position_ids[0].tolist()),
        ]
    )


def types(mb: Microbatch) -> str:
    shown = ("tokens", "labels", "position_ids", "loss_weights", "documents", "cu_seqlens")
    tensors = {name: getattr(mb, name) for name in shown}
    lines = [f"{name:<13}{str(x.dtype).removeprefix('torch.'):<8} {list(x.shape)}" for name, x in tensors.items()]
    counts = ("cp_size", "max_seqlen", "num_documents", "num_real_tokens", "num_aligned_tokens", "num_tokens")
    return "\n".join([*lines, ", ".join(f"{name} {getattr(mb, name)}" for name in counts)])


def losses(session: Session, mb: Microbatch, logprobs: torch.Tensor, objective: float) -> str:
    """The loss of each supervised token that this rank holds, and their sum."""
    mask, values = mb.loss_mask[0], [f"{-x:.3f}" for x in logprobs.tolist()]
    weights = float(mb.loss_weights.sum())
    return "\n".join(
        [
            f"rank {session.groups.cp_rank}",
            row("label", letters(session, mb.labels[0][mask].numpy()), 8),
            row("-log p", values, 8),
            f"sum of losses {objective:.4f}, sum of weights {weights:g}",
        ]
    )


def step(recipe_path: str) -> list[dict[str, str]]:
    """Trains one step, on every rank, and returns the parts of the page by name, as the only element of a list."""
    recipe = load_recipe(recipe_path)
    layout = Layout.resolve(recipe.config, CP)
    with session(recipe, layout) as s, model(s) as (engine, _):
        (mb,) = microbatches = s.data.batch(0).microbatches
        (read,) = s.data.train.samples(0)
        pack = Collator(doc_multiple=layout.doc_multiple, pad_id=tokenizer_of(s.config).pad_id).pack(read)
        ((objective, rows),) = engine.measure(microbatches, forward_only=True)
        own = losses(s, mb, rows.logprob, float(objective))
        module = engine.chunks[0].module
        with Recorder() as recorder:
            module.embedding.register_forward_hook(recorder.note("the embedding"))
            for number, layer in enumerate(module.decoder.layers, 1):
                layer.register_forward_hook(recorder.note(f"layer {number}"))
            result = engine.train_step(microbatches)
        record = train_record(1, result, RunFacts.of(s.config, layout, s.data.vocab_size), seconds=1.0)
        by_rank = all_gather_objects(lambda: (part(s, mb, s.groups.cp_rank), own), s.groups.control)
        return [
            {
                "files": shown(FILES),
                "samples": samples(s, read),
                "plan": plan(s, read),
                "pack": whole(s, pack),
                "ranks": "\n\n".join(parts for parts, _ in by_rank),
                "microbatch": types(mb),
                "model": "\n".join(_counted(recorder.until("gradient of the output of the embedding"))),
                "losses": "\n\n".join(of_rank for _, of_rank in by_rank),
                "step": f"objective    {result.objective:.4f}\ndenominator  {result.denominator:g}",
                "log": "\n".join(f"{name:<20}{_rounded(record[name])}" for name in LOGGED),
            }
        ]


def _counted(lines: Sequence[str]) -> Iterator[str]:
    """Replaces equal successive lines by one line with their number: a a b -> "a    2 times", "b"."""
    for line, equal in groupby(lines):
        number = len(list(equal))
        yield line if number == 1 else f"{line}    {number} times"


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def run(files: Mapping[str, str], step: Callable[[str], list[dict[str, str]]], num_ranks: int = CP) -> dict[str, str]:
    """Prepares the data of `files` in a temporary folder with a tiny model, and calls `step(recipe)` on each rank.

    Returns the parts of the page that rank 0 returns.
    """
    torch.set_num_threads(1)  # a process with more threads must not fork
    with tempfile.TemporaryDirectory(prefix="life-") as folder, contextlib.chdir(folder):
        make(Path("tiny"))
        for name, text in files.items():
            Path(name).write_text(text, encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()):
            if sft(["data", "prepare", "recipe.yaml"]):
                raise RuntimeError("sft data prepare failed")
        (parts,) = ranks.rows_of_rank0(num_ranks, step, "recipe.yaml", start_method="fork")
        return parts


def printed() -> dict[str, str]:
    """All parts of the page."""
    return run(FILES, step)


PAGE = PrintedPage(DOCS / "concepts/life-of-a-batch.md", "tools.life_of_a_batch", printed)

if __name__ == "__main__":
    sys.exit(PAGE.main())
