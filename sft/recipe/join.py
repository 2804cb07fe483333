"""Makes a process one rank of a layout: its device, its process groups, and one commit of each hub name for all."""

import torch.distributed as dist

from sft.config import Config
from sft.hf import hub
from sft.mcore import device, process_groups
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout


def join(config: Config, layout: Layout, store: dist.Store | None = None) -> ProcessGroups:
    """Join the other processes, on the device of the recipe.  Collective.

    store: as in `process_groups.start`
    Raises ConfigError if this machine lacks the device, or if ranks have looked up different commits of a hub name.
    """
    run = config.run
    torch_device = device.start(device.choose(run.device), deterministic=run.deterministic)
    groups = process_groups.start(layout, torch_device, seed=run.seed, timeout_s=run.timeout_s, store=store)
    hub.check_commits(all_gather_objects(hub.commits, groups.control))
    return groups
