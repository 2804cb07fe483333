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
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe, summary
from sft.run import environment
from sft.run.lifecycle import Lifecycle
from sft.run.outcome import Outcome
from sft.run.profiler import Profiler
from sft.run.signals import leave_with_parent
from sft.trainer import Trainer


def main(recipe: Recipe, layout: Layout, from_user: Collection[str] = ()) -> Outcome:
    """Train the recipe as one rank of the run.  Collective.  Raises SftError if the run cannot start or continue.

    from_user  the environment variables that the user had set, as `environment.prepare` returns them
    """
    config = recipe.config
    leave_with_parent()
    groups = join_ranks(config, layout)
    console = Console(groups.rank, sys.stdout)
    variables = environment.describe(from_user, groups.device.type)
    lines = [summary(recipe), *layout.equations(config.data.seq_length), variables]
    console.say("\n".join(filter(None, lines)))
    folder = Path(config.run.dir)
    next_step = partial(resume.next_step, config.checkpoint, folder / "checkpoints")
    try:
        with (
            Lifecycle(config, folder, groups, console, next_step) as lifecycle,
            Profiler(config.profile, folder, groups, console) as profiler,
            explained(),  # inside `lifecycle`, so that run_state.json gets the explanation, too
        ):
            outcome = Trainer(recipe, layout, groups, console, lifecycle, profiler).train()
    except BaseException:
        if layout.world_size == 1:  # this process may train again; with other ranks, it might wait for them here
            process_groups.stop()
        raise
    process_groups.stop()
    return outcome
