"""`sft.prepare`: tokenises the data of a recipe."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sft.console import Console
from sft.data.work import Work
from sft.recipe.needs import check_paths
from sft.recipe.resolved import Recipe

if TYPE_CHECKING:
    from sft.data.cache.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class PreparedSet:
    """The training data, or one held-out set, as tokens.

    num_samples     number of samples, that is, rows and windows of rows
    num_tokens      tokens of all samples, without padding
    num_supervised  supervised labels of all samples; a label counts for each text of a tree
    num_repeated    labels of these that loss.shared = once leaves out
    longest         tokens of the longest text of a sample
    digest          SHA-256 of tokens, weights and order; it does not depend on file names, machine or cache folder
    work            seconds of the chat template and of the tokenizer, and characters that the template wrote, summed
                    over processes; None: an earlier call tokenised all files
    """

    num_samples: int
    num_tokens: int
    num_supervised: int
    num_repeated: int
    longest: int
    digest: str
    work: Work | None = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of `prepare`: token caches, made by this call or by an earlier one.

    cache_dir  folder of the tokens (data.cache_dir)
    train      the training data
    held_out   the sets of data.eval by name; a set without a name is called `eval`
    removed    bytes of each folder that `sweep` removed
    """

    cache_dir: Path
    train: PreparedSet
    held_out: Mapping[str, PreparedSet]
    removed: Mapping[Path, int]


def prepare(recipe: Recipe, *, verify: bool = False, sweep: bool = False, quiet: bool = False) -> Prepared:
    """Tokenise the data of the recipe once, in data.num_workers processes, without a model or a GPU.  Also make the
    long-context questions that the run asks (data.long.in_run).

    Data that are prepared already are not tokenised again.  If the process is killed, another call continues its work.

    verify: read all prepared data, and replace damaged data
    sweep: afterwards remove from the cache all data that belong to other files or settings
    quiet: print nothing

    Raises ConfigError if a file of the recipe does not exist, and DataError, whose message begins with file:line, if a
    row cannot be used, no sample is left or the cache cannot be written.
    """
    check_paths(recipe)

    from sft.data.cache.prepare import prepare_recipe, sweep_recipe
    from sft.recipe.long_questions import prepare_questions
    from sft.recipe.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(recipe.config)
    console = Console(0, sys.stdout, is_quiet=quiet)
    corpora = prepare_recipe(recipe.config, tokenizer, console, verify=verify)
    explained: set[str] = set()
    for corpus in corpora.values():
        for path, report in corpus.row_reports.items():
            if findings := "; ".join(report.findings(explained)):
                console.say(f"{path}: {findings}")
    prepare_questions(recipe, tokenizer, corpora["train"], console)
    stale = sweep_recipe(recipe.config, corpora.values(), tokenizer) if sweep else ()
    sets = {name: _facts(corpus) for name, corpus in corpora.items()}
    return Prepared(
        cache_dir=Path(recipe.config.cache_dir),
        train=sets.pop("train"),
        held_out=sets,
        removed={folder.folder: folder.num_bytes for folder in stale},
    )


def _facts(corpus: "Corpus") -> PreparedSet:
    return PreparedSet(
        num_samples=len(corpus),
        num_tokens=int(corpus.lengths.sum()),
        num_supervised=int(corpus.num_supervised.sum()),
        num_repeated=int(corpus.num_repeated.sum()),
        longest=corpus.longest,
        digest=corpus.digest,
        work=sum(corpus.work.values(), Work()) if corpus.work else None,
    )
