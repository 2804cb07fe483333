"""Prints how the texts of a chat become a tree, and keeps docs/concepts/trees.md equal to it.

python -m tools.tree_of_turns            print every part
python -m tools.tree_of_turns --write    write the parts into the page
python -m tools.tree_of_turns --check    exit status 1 if the page shows anything else

One process prepares, packs and computes with the code of `sft train`.  The picture of attention is measured: each
token is replaced once, and a mark stands where the hidden state of another token changes.
"""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from sft.batch import Microbatch, Pack, Sample
from sft.data.chat.tree import Grown, texts_of
from sft.data.packing.pack import Collator
from sft.data.packing.tree_packs import supervision
from sft.mcore.engine import Engine
from sft.parallel.fragments import FragmentPlan
from sft.parallel.layout import Layout
from sft.probe.session import Session, model, session
from sft.recipe.load import load_recipe
from sft.recipe.tokenizer import tokenizer_of
from tools import life_of_a_batch as life
from tools.life_of_a_batch import letters, numbers, row
from tools.printed_page import DOCS, PrintedPage

FILES = {
    "chats.jsonl": """\
{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "reasoning_content": "sum", "content": "4"}, \
{"role": "user", "content": "?"}, {"role": "assistant", "reasoning_content": "no", "content": "!"}]}
{"prompt": "ok?", "completions": ["no", "now"]}
""",
    "last.jinja": """\
{% for m in messages %}{{ '<|im_start|>' + m.role[0] }}
{%- if loop.last and m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}
{{- m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}
""",
    "recipe.yaml": """\
run: {dir: run, device: cpu, precision: fp32}
model: {hf: tiny}
data: {train: chats.jsonl, turns: each, chat_template: last.jinja, seq_length: 64, doc_multiple: 4, shuffle: false}
train: {num_steps: 1, global_batch_size: 1}
optim: {lr: 1.0e-3, schedule: constant}
""",
}


def texts(sample: Sample) -> list[Sample]:
    """The texts of a sample as separate samples."""
    assert sample.tree is not None
    grown = Grown(sample.tokens, sample.weights, sample.tree)
    return [Sample(sample_id=sample.sample_id, tokens=t.tokens, weights=t.weights) for t in texts_of(grown)]


def of_trees(session: Session, read: Sequence[Sample]) -> Iterator[str]:
    for sample in read:
        tree = sample.tree
        assert tree is not None
        yield f"row {sample.sample_id}: {tree.num_rendered} tokens of texts, {len(sample.tokens)} stored"
        for number, (start, stop) in enumerate(zip(tree.starts, tree.starts[1:])):
            parent, fork = tree.branches.parents[number], tree.branches.forks[number]
            relation = "no parent" if parent < 0 else f"parent {parent}, fork {fork}"
            yield f"document {number}: {relation}, depth {tree.branches.depths[number]}"
            yield row("text", letters(session, sample.tokens[start:stop]))
            yield row("weights", numbers(supervision(sample, "token", "each").weights[start:stop]))
        yield f"texts end at (document, tokens) {[(int(d), int(n)) for d, n in tree.ends]}"


def of_pack(session: Session, pack: Pack) -> Iterator[str]:
    assert pack.branches is not None and pack.label_counts is not None and pack.further is not None
    for number, (start, stop) in enumerate(zip(pack.cu_seqlens, pack.cu_seqlens[1:])):
        part = slice(start, stop)
        parent, fork = pack.branches.parents[number], pack.branches.forks[number]
        yield f"document {number} at {start}: parent {parent}, fork {fork}"
        yield row("text", letters(session, pack.tokens[part]))
        yield row("position_ids", pack.position_ids[part])
        yield row("labels", letters(session, pack.labels[part]))
        yield row("loss_weights", numbers(pack.loss_weights[part]))
        yield row("label_counts", numbers(pack.label_counts[part]))
    further = zip(pack.further.rows, letters(session, pack.further.labels), pack.further.weights, pack.further.counts)
    for index, label, weight, count in further:
        yield f"further target: row {index}, label {label}, weight {weight:g}, count {count}"
    yield f"cu_seqlens {pack.cu_seqlens.tolist()}, lengths {pack.lengths.tolist()}, max_seqlen {pack.max_seqlen}"


def hidden_states(engine: Engine, mb: Microbatch) -> torch.Tensor:
    """The output of the last layer, [t, hidden]."""
    outputs: list[torch.Tensor] = []
    layer = engine.chunks[0].module.decoder.layers[-1]
    hook = layer.register_forward_hook(lambda _, __, out: outputs.append(out[0].detach().squeeze(1).clone()))
    engine.measure([mb], forward_only=True)
    hook.remove()
    return outputs[0]


def attention(session: Session, engine: Engine, mb: Microbatch, pack: Pack) -> Iterator[str]:
    """One line for each real token of the first tree, with the tokens that change its hidden state when replaced."""
    assert pack.firsts is not None
    documents, before = pack.documents, hidden_states(engine, mb)
    ends = pack.cu_seqlens[:-1] + pack.lengths
    shown = [i for i in range(len(documents)) if pack.firsts[documents[i]] == 0 and i < ends[documents[i]]]
    columns = []
    for token in shown:
        tokens = mb.tokens.clone()
        tokens[0, token] = (tokens[0, token] + 1) % 256
        columns.append((hidden_states(engine, replace(mb, tokens=tokens)) != before).any(1)[shown].tolist())
    names = letters(session, pack.tokens[shown])
    begins = {i for i, token in enumerate(shown) if i and documents[token] != documents[shown[i - 1]]}

    def line(head: str, cells: Sequence[str]) -> str:
        return head + "".join((" | " if i in begins else "") + cell for i, cell in enumerate(cells))

    yield line(f"{'':<8}", names)
    for query, token in enumerate(shown):
        if query in begins:
            yield ""
        cells = ["#" if column[query] else "." for column in columns]
        yield line(f"{names[query]:<3}{pack.position_ids[token]:>3}  ", cells)


def fragments(pack: Pack) -> Iterator[str]:
    plan = FragmentPlan.of(pack.cu_seqlens, cp_size=1, cp_rank=0, max_short=0, branches=pack.branches)
    assert plan.relayout is None  # the fragments follow each other in the pack
    for number, (start, stop) in enumerate(zip(plan.boundaries, plan.boundaries[1:])):
        after = plan.links.predecessors[number] if number < plan.num_linked else -1
        of = pack.documents[start]
        begins = "the state zero" if after < 0 else f"the state after fragment {after}"
        first = start - pack.cu_seqlens[of]
        yield f"fragment {number}: document {of}, tokens {first} to {first + stop - start - 1}, starts with {begins}"


def losses(engine: Engine, read: Sequence[Sample], collator: Collator) -> Iterator[str]:
    """Two lines with the sum of losses: of the trees, and of their texts as separate samples."""
    alone = [text for sample in read for text in texts(sample)]
    for name, samples in (("2 trees", read), (f"{len(alone)} separate samples", alone)):
        mb = collator.microbatch(samples)
        ((objective, _),) = engine.measure([mb], forward_only=True)
        weights, tokens = mb.denominator("weights"), len(mb.tokens[0])
        yield f"{name:<19} sum of losses {float(objective):.4f}, sum of weights {weights:g}, padded tokens {tokens}"


def pairs(pack: Pack, read: Sequence[Sample]) -> Iterator[str]:
    """Lines with the numbers of tokens and of (query, key) pairs, for full attention on separate samples and trees."""
    assert pack.branches is not None

    def before(length: np.ndarray) -> np.ndarray:
        return length * (length + 1) // 2

    depths = pack.branches.depths
    alone = np.array([len(text.tokens) for sample in read for text in texts(sample)])
    stored = before(depths + pack.lengths) - before(depths)
    yield f"tokens             {alone.sum():>4} of separate samples, {pack.lengths.sum():>4} stored"
    yield f"(query, key) pairs {before(alone).sum():>4} of separate samples, {stored.sum():>4} of the trees"


def step(recipe_path: str) -> list[dict[str, str]]:
    """The parts of the page by name, as the only element of a list."""
    recipe = load_recipe(recipe_path)
    layout = Layout.resolve(recipe.config, 1)
    with session(recipe, layout) as s, model(s) as (engine, _):
        (mb,) = s.data.batch(0).microbatches
        read = s.data.train.samples(0)[0]
        collator = Collator(doc_multiple=layout.doc_multiple, pad_id=tokenizer_of(s.config).pad_id)
        pack = collator.pack(read)
        return [
            {
                "files": life.shown(FILES),
                "trees": "\n".join(of_trees(s, read)),
                "pack": "\n".join(of_pack(s, pack)),
                "attention": "\n".join(attention(s, engine, mb, pack)),
                "fragments": "\n".join(fragments(pack)),
                "losses": "\n".join(losses(engine, read, collator)),
                "pairs": "\n".join(pairs(pack, read)),
            }
        ]


def printed() -> dict[str, str]:
    """All parts of the page, with lines of at most 118 columns."""
    parts = life.run(FILES, step, num_ranks=1)
    lines = [textwrap.wrap(line, 118, subsequent_indent="    ") or [""] for line in parts["files"].split("\n")]
    return {**parts, "files": "\n".join(chain.from_iterable(lines))}


PAGE = PrintedPage(DOCS / "concepts/trees.md", "tools.tree_of_turns", printed)

if __name__ == "__main__":
    sys.exit(PAGE.main())
