"""Calibrates, then takes steps of many layouts and settings in turns on two ranks; the measurement of `plan_ranking`.

It is a process of its own, because a network namespace begins with a process:

    python -m tools.bench.plan_ranking_rank WORK FILE

WORK is `Work` as JSON.  Each rank is pinned to a core of its own.  A layout needs process groups of its own, so in each
round the ranks leave all groups and join again for each layout; settings of one layout share its groups.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sft.batch import Sample
from sft.calibration.session import calibrate
from sft.calibration.sizes import SIZES, TINY
from sft.data.loader import make_loader
from sft.estimate.constants import write
from sft.mcore import device, process_groups
from sft.mcore.engine import Engine, release
from sft.mcore.initial_weights import initialise
from tools.bench import ranks
from tools.bench.cp_traffic import slowest_rank
from tools.bench.harness import Refused
from tools.bench.plan_ranking_settings import NUM_RANKS, Setting, Work
from tools.bench.results import Row
from tools.bench.steps.trainer import RandomCorpus

NUM_STEPS, WARM = 1000, 1  # of the schedule, of which fewer are taken; first steps that do not count


class SupervisedCorpus(RandomCorpus):
    """Predictions suppose that all tokens are supervised."""

    def sample(self, sample_id: int) -> Sample:
        sample = super().sample(sample_id)
        return replace(sample, weights=np.ones_like(sample.weights))


class Steps:
    """The steps of one setting on this rank."""

    def __init__(self, work: Work, setting: Setting, groups: process_groups.ProcessGroups) -> None:
        config, layout = work.config(setting), work.layout(setting)
        vocab = config.model.vocab_size or 0
        packs = (WARM + work.steps + 1) * layout.global_batch_size
        lengths = np.full(packs * (setting.seq_length // setting.document), setting.document)
        corpus: Any = SupervisedCorpus(lengths, vocab)
        loader = make_loader(config, layout, corpus, pad_id=0, dp_rank=groups.dp_rank, cp_rank=groups.cp_rank)
        self._batches = [loader.microbatches(step) for step in range(WARM + work.steps)]
        self.engine = Engine(config, layout, groups, vocab_size=vocab, num_steps=NUM_STEPS)
        initialise(self.engine)

    def seconds(self) -> list[float]:
        """Of each step but the first ones, until the slowest rank has taken it."""
        taken = []
        for batch in self._batches:
            dist.barrier()
            start = time.perf_counter()
            self.engine.train_step(batch)
            taken.append(slowest_rank(time.perf_counter() - start))
        release(self.engine)
        return taken[WARM:]


def turns(work: Work, folder: str) -> list[Row]:
    """Runs on every rank.  One row: the constants, and seconds of all timed steps by setting."""
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < NUM_RANKS:
        raise Refused(f"{NUM_RANKS} ranks need a core each; this process may use {len(cores)}")
    os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/calibration", NUM_RANKS)
    calibration = calibrate("cpu", TINY if work.tiny else SIZES["cpu"], store)
    settings = [Setting.read(text) for text in work.settings]
    seconds: dict[str, list[float]] = {str(setting): [] for setting in settings}
    joined = 0
    for turn in range(work.rounds):
        for _, group in groupby(settings if turn % 2 == 0 else settings[::-1], key=lambda setting: setting.layout):
            of_layout, joined = list(group), joined + 1
            store = dist.FileStore(f"{folder}/joined-{joined}", NUM_RANKS)
            layout = work.layout(of_layout[0])
            groups = process_groups.start(layout, device.start("cpu"), seed=0, timeout_s=600, store=store)
            for setting in of_layout:
                seconds[str(setting)] += Steps(work, setting, groups).seconds()
            process_groups.stop()
    own = Path(folder) / f"constants-{rank}.json"
    write(calibration.constants, own)
    constants = json.loads(own.read_text(encoding="utf-8"))
    return [{"seconds": seconds, "constants": constants, "errors": calibration.errors}]


def main(work: str, result: str) -> int:
    settings = Work(**json.loads(work))
    try:
        with tempfile.TemporaryDirectory(prefix="bench-ranking-") as folder:
            rows = ranks.rows_of_rank0(NUM_RANKS, turns, settings, folder)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    Path(result).write_text(json.dumps(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
