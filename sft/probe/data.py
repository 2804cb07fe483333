"""Shows what every rank receives, as text, and compares it with the samples.

No model is built.  Ranks that differ only in tp or pp receive the same microbatch, which is shown once.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from sft.batch import Microbatch
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.inspect.report import visible
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from sft.probe import inputs
from sft.probe.report import ProbeReport
from sft.probe.session import Session, session
from sft.recipe.resolved import Recipe
from sft.recipe.tokenizer import tokenizer_of

_CHARACTERS = 60  # number of characters shown at each end of a text without --full
_RUNS = 6  # number of runs shown at each end of a microbatch without --full


def run(recipe: Recipe, layout: Layout, *, step: int, full: bool) -> ProbeReport:
    """Show and check the microbatches of step `step`, counted from 1.  Collective."""
    with session(recipe, layout) as s:
        batch, samples = s.data.batch(step - 1), s.data.train.samples(step - 1)
        problems = inputs.problems_of(batch.microbatches, samples, s.groups, s.data.row_name)
        problems += _missing(s, batch.samples, batch.microbatches)
        tokenizer = tokenizer_of(recipe.config)
        shows = s.groups.tp_rank == s.groups.pp_rank == 0
        parts = [_described(s, tokenizer, *numbered) for numbered in enumerate(batch.microbatches) if shows]
        gathered = [part for of_rank in all_gather_objects(lambda: parts, s.groups.control) for part in of_rank]
    gathered.sort(key=lambda part: (part["dp_rank"], part["microbatch"], part["cp_rank"]))
    return ProbeReport(
        probe="data",
        problems=problems,
        checked=f"{len(batch.samples)} samples, each exactly once, with the right tokens, labels, masks and positions",
        lines=[line for part in gathered for line in _lines(part, full=full)],
        facts={"step": step, "layout": layout.sizes, "microbatches": gathered},
    )


def _missing(s: Session, expected: list[int], microbatches: list[Microbatch]) -> list[str]:
    """The problem if the packs of all ranks do not hold each sample of the global batch exactly once.  Collective."""
    is_first = [s.groups.cp_group(mb.cp_size).rank == 0 for mb in microbatches]  # so each pack counts once
    own = [sample for mb, counts in zip(microbatches, is_first) if counts for sample in mb.sample_ids]
    position = s.groups.dp_rank, s.groups.cp_rank
    by_position = dict(all_gather_objects(lambda: (position, own), s.groups.control))
    packed = sorted(sample for samples in by_position.values() for sample in samples)
    if packed == sorted(expected):
        return []
    return [f"the packs of all ranks hold {len(packed)} samples, which are not the {len(expected)} samples of the step"]


def _described(s: Session, tokenizer: ChatTokenizer, index: int, mb: Microbatch) -> dict[str, Any]:
    """One microbatch on this rank as values for JSON, with one entry for each run of consecutive positions."""
    tokens, labels, weights = (x[0].numpy() for x in (mb.tokens, mb.labels, mb.loss_weights))
    described, at = [], 0
    for document, start, stop in inputs.runs(mb):
        part = slice(at, at := at + stop - start)
        sample = int(mb.samples_of_documents[document])
        depth = 0 if mb.branches is None else mb.branches.depths[document]
        is_filler = sample >= len(mb.sample_ids)
        num_real = max(0, min(stop, int(mb.lengths[document])) - start)
        described.append(
            {
                "document": document,
                "row": "filler" if is_filler else s.data.row_name(mb.sample_ids[sample]),
                "positions": [int(start + depth), int(stop - 1 + depth)],
                "text": tokenizer.decode(tokens[part][:num_real]),
                "padding": stop - start - num_real,
                "label_text": _label_text(tokenizer, labels[part], weights[part] > 0),
                "tokens": tokens[part].tolist(),
                "labels": labels[part].tolist(),
                "loss_weights": weights[part].tolist(),
            }
        )
    return {
        "dp_rank": s.groups.dp_rank,
        "cp_rank": s.groups.cp_rank,
        "microbatch": index + 1,
        "cp_size": mb.cp_size,
        "cu_seqlens": mb.cu_seqlens.tolist(),
        "lengths": mb.lengths.tolist(),
        "runs": described,
    }


def _label_text(tokenizer: ChatTokenizer, labels: np.ndarray, mask: np.ndarray) -> list[str | int]:
    """The text of each run of supervised labels, and the number of labels in each other run: [20, "4<|im_end|>", 1]"""
    indices = groupby(range(len(labels)), key=mask.__getitem__)
    pieces = ((is_supervised, list(index)) for is_supervised, index in indices)
    return [tokenizer.decode(labels[index]) if is_supervised else len(index) for is_supervised, index in pieces]


def _lines(part: dict[str, Any], *, full: bool) -> Iterator[str]:
    """Yield the lines that show one microbatch, a value of `_described`.

    dp rank 0, cp rank 1, microbatch 1: CP size 2, 32 of 64 tokens, 1 documents
      document 0 (chat.jsonl:3, 61 tokens, padded to 64), positions 16 to 47
        tokens  ser⏎2 + 2?<|im_end|>
        labels  (20 not supervised) [[4<|im_end|>]]
    """
    bounds, runs = part["cu_seqlens"], part["runs"]
    yield (
        f"dp rank {part['dp_rank']}, cp rank {part['cp_rank']}, microbatch {part['microbatch']}: "
        f"CP size {part['cp_size']}, {sum(len(run['tokens']) for run in runs):,} of {bounds[-1]:,} tokens, "
        f"{len(bounds) - 1} documents"
    )
    hidden = [] if full else runs[_RUNS:-_RUNS]
    for run in runs if not hidden else [*runs[:_RUNS], None, *runs[-_RUNS:]]:
        if run is None:
            yield f"  ... {len(hidden)} more; --full shows them"
            continue
        number, (first, last) = run["document"], run["positions"]
        sizes = f"{part['lengths'][number]:,} tokens, padded to {bounds[number + 1] - bounds[number]:,}"
        yield f"  document {number} ({run['row']}, {sizes}), positions {first:,} to {last:,}"
        padding = f"({run['padding']:,} padding)" if run["padding"] else ""
        yield f"    tokens  {_shortened(run['text'], full=full)}{padding}"
        pieces = (
            f"({piece} not supervised)" if isinstance(piece, int) else f"[[{_shortened(piece, full=full)}]]"
            for piece in run["label_text"]
        )
        yield f"    labels  {' '.join(pieces)}"


def _shortened(text: str, *, full: bool) -> str:
    if not full and len(text) > 2 * _CHARACTERS:
        text = f"{text[:_CHARACTERS]} ... {text[-_CHARACTERS:]}"
    return visible(text).replace("\n", "")
