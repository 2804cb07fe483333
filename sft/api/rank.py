"""One rank of a run, from the start of its process groups to their end.

It joins the other ranks, says what they train, and takes the folder of the run.  `trainer.py` trains.
"""

import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path

from sft.checkpoint import resume
from sft.console import Console
from sft.files.atomic_files import explained
from sft.mcore import process_groups
from sft.metrics.callbacks import Callbacks
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe, summary
from sft.run import environment
from sft.run.lifecycle import Lifecycle
from sft.run.outcome import Outcome
from sft.run.profiler import Profiler
from sft.run.signals import leave_with_parent
from sft.trainer import Trainer


def main(
    recipe: Recipe,
    layout: Layout,
    from_user: Collection[str] = (),
    callbacks: Callbacks | None = None,
    *,
    is_quiet: bool = False,
) -> Outcome:
    """Train the recipe as one rank of the run.  Collective.  Raises SftError if the run cannot start or continue.

    from_user  the environment variables that the user had set, as `environment.prepare` returns them
    callbacks  functions of the user, which rank 0 calls; afterwards it has their first exception
    is_quiet   print only warnings and the summary at the end
    """
    config = recipe.config
    leave_with_parent()
    with process_groups.left_at_end(layout.world_size):  # this process may train again
        groups = join_ranks(config, layout)
        console = Console(groups.rank, sys.stdout, is_quiet=is_quiet)
        return _train(recipe, layout, groups, from_user, console, callbacks or Callbacks())


def _train(
    recipe: Recipe,
    layout: Layout,
    groups: process_groups.ProcessGroups,
    from_user: Collection[str],
    console: Console,
    callbacks: Callbacks,
) -> Outcome:
    config = recipe.config
    variables = environment.describe(from_user, groups.device.type)
    lines = [summary(recipe), *layout.equations(config.data.seq_length), variables]
    console.say("\n".join(filter(None, lines)))
    folder = Path(config.run.dir)
    next_step = partial(resume.next_step, config.checkpoint, folder / "checkpoints")
    with (
        Lifecycle(config, folder, groups, console, next_step) as lifecycle,
        Profiler(config.profile, folder, groups, console) as profiler,
        explained(),  # inside `lifecycle`, so that run_state.json gets the explanation, too
    ):
        callbacks.stop = lifecycle.ask_to_stop
        return Trainer(recipe, layout, groups, console, lifecycle, profiler, callbacks).train()
