"""Opens the data and the weights that are scored, on one rank, and writes the file of --json."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sft.checkpoint.train_state import installed
from sft.console import Console
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.pipeline import HeldOutData
from sft.errors import StorageError
from sft.evaluation.weights import load_engine
from sft.files.atomic_files import replace_text
from sft.mcore import process_groups
from sft.mcore.engine import Engine
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe
from sft.recipe.tokenizer import tokenizer_of
from sft.run.signals import leave_with_parent

FORMAT = "sft eval 1"
Data = TypeVar("Data", bound=HeldOutData)


@dataclass(frozen=True, kw_only=True)
class OpenedWeights(Generic[Data]):
    """Weights and data on one rank, for forward passes.

    out      the console for results, on stdout
    console  the console for progress, on stderr
    weights  the name of the weights, for messages; step: their step
    """

    recipe: Recipe
    layout: Layout
    groups: ProcessGroups
    out: Console
    console: Console
    tokenizer: ChatTokenizer
    data: Data
    engine: Engine
    weights: str
    step: int

    def write(self, file: Path | None, **results: Any) -> None:
        """Write `results`, and what was scored, as JSON.  Collective.  Raises StorageError.

        file: that of --json; None: nothing is written
        """
        if file is None:
            return
        content = {
            "format": FORMAT,
            "recipe": self.recipe.arguments,
            "weights": self.weights,
            "step": self.step,
            "layout": self.layout.sizes,
            "versions": installed(),
            **results,
        }
        broadcast_from_rank0(lambda: _write(file, json.dumps(content, indent=1) + "\n"), self.groups.control)


@contextmanager
def opened(
    recipe: Recipe,
    layout: Layout,
    source: str | None,
    kind: type[Data],
    *,
    check: Callable[[Data], None] = lambda data: None,
    is_quiet: bool = False,
) -> Iterator[OpenedWeights[Data]]:
    """A context of the ranks of `layout`, with the data of `recipe` as `kind`, and the weights.  Collective.

    source    names the weights: a checkpoint, run, Hugging Face model or PEFT folder; None: the newest checkpoint of
              the run, or the weights from which the run would start
    check     raises ConfigError if these data cannot be scored, before the weights are loaded
    is_quiet  print no progress
    Raises SftError if the data or the weights cannot be opened.
    """
    config = recipe.config
    leave_with_parent()
    with process_groups.left_at_end(layout.world_size):
        groups = join_ranks(config, layout)
        console, out = Console(groups.rank, sys.stderr, is_quiet=is_quiet), Console(groups.rank, sys.stdout)
        tokenizer = tokenizer_of(config)
        data = kind(config, tokenizer, recipe.arguments, layout, groups, console)
        check(data)
        engine, weights, step = load_engine(config, source, tokenizer, layout, groups, data.vocab_size, console)
        console.say(f"scoring {weights}")
        yield OpenedWeights(
            recipe=recipe,
            layout=layout,
            groups=groups,
            out=out,
            console=console,
            tokenizer=tokenizer,
            data=data,
            engine=engine,
            weights=weights,
            step=step,
        )


def _write(file: Path, text: str) -> None:
    try:
        replace_text(file, text)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error}.") from error
