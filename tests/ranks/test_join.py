"""A run, an evaluation and a probe begin with `join_ranks`, which refuses ranks that would read different files."""

from pathlib import Path
from unittest import mock

import torch.distributed as dist

from sft.config.pretrained import HubSnapshot
from sft.errors import ConfigError
from sft.hf import hub
from sft.mcore import process_groups
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from tests.builders import parsed
from tests.ranks import pool


def joined(commits: list[str]) -> str:
    """The error message of this rank, which has looked up one commit of `commits`."""
    pool.join()
    commit = commits[dist.get_rank()]
    known = HubSnapshot(name="org/m", repo="org/m", commit=commit, folder=Path(commit))
    config = parsed("run.device=cpu").config
    try:
        with mock.patch.object(hub, "_snapshots", {"org/m": known}):
            assert join_ranks(config, Layout.resolve(config, 2)).device.type == "cpu"
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        process_groups.stop()


def test_ranks_with_different_commits_of_a_name_do_not_begin(ranks: pool.Ranks) -> None:
    one, other = "1" * 40, "2" * 40
    assert ranks(2).run(joined, [one, one]) == ["", ""]
    assert ranks(2).run(joined, [one, other]) == 2 * [
        f"org/m is commit {one} on rank 0, but commit {other} on rank 1.  All ranks must read the same files.  The "
        "repository may have changed while the run started: start again, or name the commit: "
        f"org/m@{one}."
    ]
