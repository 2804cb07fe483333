"""Scores weights on the questions of long-context suites.  It changes nothing but the cache, as `held_out.py`."""

from pathlib import Path

from sft.data.long.suite import SuiteSettings, digest_of
from sft.data.pipeline import HeldOutData
from sft.evaluation.opened import opened
from sft.metrics.long import LongScores, falls, table
from sft.parallel.layout import Layout
from sft.recipe.long_questions import open_on_ranks
from sft.recipe.resolved import Recipe
from sft.run.long_evaluation import score_suite


def main(
    recipe: Recipe,
    layout: Layout,
    source: str | None,
    json_file: Path | None,
    settings: SuiteSettings,
    before: LongScores | None,
    *,
    is_quiet: bool = False,
) -> LongScores:
    """Score weights on questions, as one rank.  Prints tables on stdout, progress on stderr.  Collective.

    recipe    as returned by `sft.recipe.long.asking`
    settings  the questions, which rank 0 has made
    before    earlier scores of the same questions, for comparison; None: no comparison
    The other arguments and the errors are those of `held_out.main`.
    """
    with opened(recipe, layout, source, HeldOutData, is_quiet=is_quiet) as run:
        suites = open_on_ranks(settings, run.tokenizer, recipe.config, run.engine.groups.control, run.out)
        scored = [score_suite(run.engine, suite, run.data.pad_id) for suite in suites]
        questions = tuple(question for scores in scored if scores is not None for question in scores.questions)
        scores = LongScores(digest=digest_of(suites), questions=questions)
        earlier = None if before is None else before.answers
        run.out.say("\n".join([f"long-context questions after step {run.step}", *table(scores.answers, earlier)]))
        for fall in falls(earlier or {}, scores.answers):
            run.out.say(f"WARNING: {fall}")
        run.write(json_file, sets={}, long=scores.to_json())
    return scores
