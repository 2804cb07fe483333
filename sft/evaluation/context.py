"""Scores the last tokens of held-out documents twice: after the whole document, and after its last quarter only."""

import math
from pathlib import Path

from sft.data.cache.corpus import Corpus
from sft.data.loader import make_loader
from sft.data.long.context import LEAST, compared, pairs
from sft.data.pipeline import HeldOutData
from sft.errors import ConfigError, TrainingError
from sft.evaluation.opened import opened
from sft.mcore.engine import Engine
from sft.metrics.context import DocumentScore, table, to_json
from sft.parallel.layout import Layout
from sft.recipe.resolved import Recipe
from sft.run.long_evaluation import score


def main(
    recipe: Recipe, layout: Layout, source: str | None, json_file: Path | None, *, is_quiet: bool = False
) -> list[DocumentScore]:
    """Score all documents of data.eval, as one rank.  Prints a table on stdout, progress on stderr.  Collective.

    The arguments and the errors are those of `held_out.main`.
    """
    chosen: dict[str, list[int]] = {}

    def check(data: HeldOutData) -> None:
        for name, loader in data.held_out.items():
            chosen[name] = [] if loader.corpus.has_trees else compared(loader.corpus)
        if not any(chosen.values()):
            raise ConfigError(
                "no document of data.eval can be compared with its last quarter: a document must have at least "
                f"{LEAST} tokens and a supervised token in its last eighth, and must not be a tree "
                "(data.turns = each).  Give longer documents, or supervise more of them."
            )

    documents: list[DocumentScore] = []
    with opened(recipe, layout, source, HeldOutData, check=check, is_quiet=is_quiet) as run:
        for name, loader in run.data.held_out.items():
            if chosen[name]:
                documents += score_documents(run.engine, name, loader.corpus, chosen[name], run.data.pad_id)
            if left := len(loader.corpus) - len(chosen[name]):
                run.console.say(
                    f"{name}: {left:,} of {len(loader.corpus):,} documents are left out; they are too short"
                )
        run.out.say("\n".join([f"far context after step {run.step}", *table(documents)]))
        run.write(json_file, sets={}, context=to_json(documents))
    return documents


def score_documents(engine: Engine, name: str, corpus: Corpus, ids: list[int], pad_id: int) -> list[DocumentScore]:
    """The losses of the documents `ids` of a held-out set, in their order; the same on every rank.  Collective.

    pad_id: id of padding tokens
    Raises TrainingError if a loss is not finite.
    """
    both = pairs(corpus, ids)
    loader = make_loader(
        engine.config,
        engine.layout.with_short_batches(),
        both,
        pad_id=pad_id,
        dp_rank=engine.groups.dp_rank,
        cp_rank=engine.groups.cp_rank,
        is_held_out=True,
    )
    sums = score(engine, loader, len(both), lambda: True)
    assert sums is not None
    nll, _, counts = sums
    if not math.isfinite(nll.sum()):
        raise TrainingError(f"the loss of a document of {name} is not finite.")
    tokens = counts[: len(ids)].astype(int).tolist()
    assert tokens == both.num_supervised[: len(ids)].tolist() == counts[len(ids) :].astype(int).tolist()
    sources = [corpus.sources[number] for number in corpus.source_ids[ids]]
    return [
        DocumentScore(
            source=f"{name}/{source}" if len(corpus.sources) > 1 else name,
            row=corpus.name(i),
            length=int(corpus.lengths[i]),
            tokens=count,
            whole=whole,
            nearest=nearest,
        )
        for i, source, count, whole, nearest in zip(
            ids, sources, tokens, nll[: len(ids)].tolist(), nll[len(ids) :].tolist(), strict=True
        )
    ]
