"""Makes this process one rank of a layout: starts its device and process groups, and checks that all ranks read the
same commit of each hub name."""

from collections.abc import Sequence

import torch.distributed as dist

from sft.config import Config
from sft.errors import ConfigError
from sft.hf import hub
from sft.mcore import device, process_groups
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout


def join_ranks(config: Config, layout: Layout, store: dist.Store | None = None) -> ProcessGroups:
    """Join the other processes, on the device of the recipe.  Collective.

    store: as in `process_groups.start`
    Raises ConfigError if this machine lacks the device, or if ranks have looked up different commits of a hub name.
    """
    run = config.run
    torch_device = device.start(device.choose(run.device), deterministic=run.deterministic)
    groups = process_groups.start(layout, torch_device, seed=run.seed, timeout_s=run.timeout_s, store=store)
    check_commits(all_gather_objects(hub.commits, groups.control))
    return groups


def check_commits(of_ranks: Sequence[dict[str, str]]) -> None:
    """Raise ConfigError if ranks have looked up different commits.  of_ranks: `hub.commits()` of each rank"""
    for rank, of_rank in enumerate(of_ranks):
        for name in {**of_ranks[0], **of_rank}:
            first, other = of_ranks[0].get(name), of_rank.get(name)
            if first != other:
                raise ConfigError(
                    f"{name} is {_called(first)} on rank 0, but {_called(other)} on rank {rank}.  All ranks must "
                    "read the same files.  The repository may have changed while the run started: start again, or "
                    f"name the commit: {name.partition('@')[0]}@{first or other}."
                )


def _called(commit: str | None) -> str:
    return "a folder" if commit is None else f"commit {commit}"
