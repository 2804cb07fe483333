"""Saves of real ranks: a checkpoint holds the whole state of one step, once, or nothing is written."""

import os
import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sft.checkpoint import folders, manifest
from sft.checkpoint import saver as saving
from sft.checkpoint.best import Best
from sft.estimate import memory
from sft.mcore.checkpoint_io import (
    copy_buffers,
    engine_state,
    optimizer_shards,
    safe_reader,
    save_plans,
    shard_owners,
)
from sft.mcore.page_locked import Arena
from tests.ranks import scenarios
from tests.ranks.pool import Ranks
from tests.ranks.saving import ASYNC, Run, listing, run_of

END_OF_TEST = 240.0  # seconds; only a broken test waits that long
LAYOUTS: list[tuple[int, list[str]]] = [
    (1, []),
    (2, ["parallel.distributed_optimizer=true"]),
    (2, ["parallel.tp=2", "run.precision=bf16"]),
]


@pytest.mark.parametrize("world_size,overrides", LAYOUTS, ids=str)
def test_saved_in_the_background_or_not_it_is_the_state_of_the_step(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    for wait_here, folder in ((True, tmp_path / "sync"), (False, tmp_path / "async")):
        given = [*overrides, f"checkpoint.async_save={str(not wait_here).lower()}"]
        told = ranks(world_size).run(train_on_while_saving, given, str(folder))
        assert all(one["loaded"] == one["was"] for one in told)
        assert told[0]["later"] != told[0]["was"]  # otherwise, further training would prove nothing
        assert listing(folder) == ["iter_0000001", folders.POINTER]
        assert list(told[0]["published"]) == [1] and told[0]["published"][1] > 0
        first, last = told[0]["said"][0], told[0]["said"][-1]
        assert last.startswith(f"saved {folder}/iter_0000001 (") and last.endswith(" s)")
        assert wait_here or (re.fullmatch(r"saving step 1 in the background; training waited \d+\.\d s", first))
        assert not any(one["said"] for one in told[1:])


def train_on_while_saving(overrides: list[str], folder: str) -> dict[str, Any]:
    """The background save is held back until two more steps are done, so it cannot end before them."""
    with run_of(overrides, folder) as run, pytest.MonkeyPatch.context() as patch:
        trained, write = threading.Event(), engine_state.write
        if ASYNC in overrides:
            held_back = lambda *given: trained.wait(END_OF_TEST) and write(*given)  # noqa: E731
            patch.setattr(saving.engine_state, "write", held_back)
        run.train(1)
        was = run.hash()
        run.save(1)
        assert run.says_published() if ASYNC in overrides else run.says_published(1)
        run.train(2, 3)
        later = run.hash()
        trained.set()
        run.saver.drain(must_succeed=True)
        told = dict(was=was, later=later, published=run.published)
        return {**told, "said": run.lines(), "loaded": run.loaded(1)}


def test_memory_for_copies_is_used_again_and_holds_what_is_new(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks(2).run(save_every_step_in_the_background, str(tmp_path)))
    assert listing(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000003", folders.POINTER]


def save_every_step_in_the_background(folder: str) -> bool:
    """A save begins only after the previous one is published."""
    with run_of([ASYNC], folder) as run, pytest.MonkeyPatch.context() as patch:
        before, write, hashes = [], engine_state.write, []

        def note(*given: Any) -> Any:
            before.append([folders.step_of(path) for path in folders.published(Path(folder))])
            threading.Event().wait(0.2)
            return write(*given)

        patch.setattr(saving.engine_state, "write", note)
        for step in (1, 2, 3):
            run.train(step)
            hashes.append(run.hash())
            run.save(step)
        run.saver.drain(must_succeed=True)
        assert before == [[], [1], [1, 2]]
        return [run.loaded(step) for step in (1, 2, 3)] == hashes


def test_a_prepared_save_allocates_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """With the distributed optimizer in bf16, before its first step: a copy has 14 bytes for half of the parameters.
    If only the last step is saved, no copy is prepared."""
    overrides = [ASYNC, "parallel.distributed_optimizer=true", "run.precision=bf16"]
    for one in ranks(2).run(save_prepared, overrides, str(tmp_path)):
        assert one["before"] == [] and one["at the save"] == 0 and one["loaded"] == one["was"]
        (allocated,) = one["prepared"]
        assert 0 <= allocated - one["estimate"] < 64 * one["parts"]


def save_prepared(overrides: list[str], folder: str) -> dict[str, Any]:
    sizes: list[int] = []

    def arena(num_bytes: int, device: torch.device) -> Arena:
        sizes.append(num_bytes)
        return Arena(num_bytes, device)

    with mock.patch.object(copy_buffers, "Arena", arena), run_of(overrides, folder) as run:
        run.saver.prepare(run.engine, 0, 3)  # no save is due
        run.saver._config = run.saver._config.model_copy(update={"save_every": 1})
        run.saver.prepare(run.engine, 0, 1)  # the only one is the last, which is not copied
        before = list(sizes)
        run.saver.prepare(run.engine, 0, 3)
        buffers = run.saver._buffers
        assert buffers is not None and buffers._prepared is not None
        buffers._prepared.result()
        prepared = list(sizes)
        run.train(1)
        was = run.hash()
        run.save(1)
        run.saver.drain(must_succeed=True)
        config = run.engine.config.model_copy(update={"checkpoint": run.saver._config})
        return {
            "before": before,
            "prepared": prepared,
            "at the save": len(sizes) - len(prepared),
            "parts": len(buffers._buffers),
            "estimate": memory.estimate(config, run.engine.layout, scenarios.VOCAB).host_copy,
            "was": was,
            "loaded": run.loaded(1),
        }


def test_without_memory_for_a_copy_training_waits_for_saves(ranks: Ranks, tmp_path: Path) -> None:
    """On rank 1, the copy for the second save fails: the state of each step is saved nevertheless."""
    told = ranks(2).run(save_without_memory, str(tmp_path))
    assert all(one["loaded"] == one["was"] for one in told)
    background = "saving step {} in the background"
    (warning,) = [line for line in told[0]["said"] if line.startswith("WARNING")]
    assert warning.startswith(
        "WARNING: rank 1 has too little memory for a copy of its tensors: no memory.  From now on "
    )
    assert [step for step in (1, 2, 3) if any(background.format(step) in line for line in told[0]["said"])] == [1]


def save_without_memory(folder: str) -> dict[str, Any]:
    def full(*_: Any) -> Any:
        raise MemoryError("no memory")

    with run_of([ASYNC], folder) as run, pytest.MonkeyPatch.context() as patch:
        was = []
        for step in (1, 2, 3):
            run.train(step)
            was.append(run.hash())
            run.save(step)
            if run.engine.groups.rank == 1:
                patch.setattr(copy_buffers.CopyBuffers, "copy", full)
        return {"was": was, "said": run.lines(), "loaded": [run.loaded(step) for step in (1, 2, 3)]}


@pytest.mark.parametrize("overrides", [[ASYNC], ["model.moe.num_experts=4", "model.moe.top_k=2", "parallel.ep=2"]])
def test_later_saves_reuse_the_plans_of_the_first(ranks: Ranks, tmp_path: Path, overrides: list[str]) -> None:
    """Each checkpoint holds its own state, rank 0 plans once, and no rank reads the files that it has just written."""
    given = [*overrides, "parallel.distributed_optimizer=true"]
    told = ranks(2).run(save_three_times, given, str(tmp_path))
    assert [one["planned"] for one in told] == [1, 0] and [one["distributed"] for one in told] == [1, 1]
    assert [one["read"] for one in told] == [3 * [".metadata", "common.pt", "metadata.json"], []]
    assert all(one["loaded"] == one["was"] and len(set(one["was"])) == 3 for one in told)


def save_three_times(overrides: list[str], folder: str) -> dict[str, Any]:
    plan, share = save_plans.create_default_global_save_plan, shard_owners.writers
    with (
        mock.patch.object(save_plans, "create_default_global_save_plan", wraps=plan) as planned,
        mock.patch.object(shard_owners, "writers", wraps=share) as distributed,
        mock.patch.object(manifest, "entry_of", wraps=manifest.entry_of) as read,
        run_of(overrides, folder) as run,
    ):
        was = []
        for step in (1, 2, 3):
            run.train(step)
            was.append(run.hash())
            run.save(step)
        run.saver.drain(must_succeed=True)
        loaded = [run.loaded(step) for step in (1, 2, 3)]
        counts = {"planned": planned.call_count, "distributed": distributed.call_count}
        return {**counts, "was": was, "loaded": loaded, "read": [call.args[0].name for call in read.call_args_list]}


def test_the_same_step_twice_is_one_save(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_twice, str(tmp_path))
    assert listing(tmp_path) == ["iter_0000001", folders.POINTER]


def save_twice(folder: str) -> None:
    with run_of([ASYNC], folder) as run:
        run.train(1)
        run.save(1)
        run.save(1, wait=True)  # waits for the background save
        written = os.stat(f"{folder}/iter_0000001/{manifest.NAME}")
        run.save(1), run.save(1, wait=True)
        again = os.stat(f"{folder}/iter_0000001/{manifest.NAME}")
        assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
        resumed = Run(run.engine, folder)
        resumed.saver.resumed(1, is_ours=True)
        resumed.save(1, wait=True)
        assert os.stat(f"{folder}/iter_0000001/{manifest.NAME}").st_ino == written.st_ino


@pytest.mark.parametrize("world_size,overrides", LAYOUTS, ids=str)
def test_a_checkpoint_is_its_manifest(ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]) -> None:
    ranks(world_size).run(save_one, overrides, str(tmp_path))
    folder = tmp_path / "iter_0000001"
    found = manifest.read(folder)
    assert found is not None and sorted(found.files) == manifest.names_in(folder)
    assert manifest.damage(folder, found, verify="full") == []
    assert {".metadata", "common.pt", "metadata.json"} < found.files.keys()
    assert {name.split("_")[2] for name in found.files if name.startswith("__")} == {str(i) for i in range(world_size)}
    assert {key: found.facts[key] for key in ("step", "versions")} == {"step": 1, "versions": {"sft": "0"}}
    assert safe_reader.common_state(folder)["sft"]["plan"] == {"data": "9f2c"}


def save_one(overrides: list[str], folder: str) -> None:
    with run_of(overrides, folder) as run:
        run.train(1)
        run.save(1, wait=True)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_ranks_share_is_shared_out_evenly_and_in_place(ranks: Ranks, sharded: bool, precision: str) -> None:
    overrides = [f"parallel.distributed_optimizer={str(sharded).lower()}", f"run.precision={precision}"]
    overrides += [ASYNC, "checkpoint.save_every=1"]
    told = ranks(2).run(bytes_to_write, overrides)
    for kind in ("model", "optimizer"):
        mine, others = (one[kind] for one in told)
        assert 0.4 <= mine / (mine + others) <= 0.6, (kind, mine, others)
    # Two fp32 moments of 2 x 384 x 16 + 2 x 2,372 + 16 elements; if the optimizer has main parameters, those too.
    tensors = 3 if sharded or precision == "bf16" else 2
    assert sum(one["optimizer"] for one in told) == 4 * tensors * 17_048
    assert sum(one["model"] for one in told) == 17_048 * (2 if precision == "bf16" else 4)
    assert all(one["in place"] for one in told)
    # The number of bytes that `sft check` reports for the copy of a background save.
    assert 2 * told[0]["estimate"] == pytest.approx(sum(one["model"] + one["optimizer"] for one in told), rel=1e-6)


def bytes_to_write(overrides: list[str]) -> dict[str, Any]:
    with run_of(overrides, "unused") as run:
        run.train(1)
        part = engine_state.snapshot(run.engine, {"iteration": 1})
        is_moment = [shard.key.startswith("optimizer.") for shard in part.shards]
        flats = [
            flat for one in optimizer_shards.optimizer_slices(run.engine.optimizer) for flat in one.tensors.values()
        ]
        held = {flat.untyped_storage().data_ptr() for flat in flats}
        found = {True: 0, False: 0}
        for its, shard in zip(is_moment, part.shards):
            found[its] += shard.data.nbytes
        in_place = all(s.data.untyped_storage().data_ptr() in held for s, its in zip(part.shards, is_moment) if its)
        copy = memory.estimate(run.engine.config, run.engine.layout, scenarios.VOCAB).host_copy
        return {"model": found[False], "optimizer": found[True], "in place": in_place, "estimate": copy}


def test_retention_keeps_the_last_the_multiples_the_best_and_those_in_use(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_many, str(tmp_path))
    assert listing(tmp_path) == [*(f"iter_000000{step}" for step in (2, 3, 5, 6, 7, 8)), folders.POINTER]


def save_many(folder: str) -> None:
    with run_of(["checkpoint.keep_last=2", "checkpoint.keep_every=3"], folder, in_use=lambda: {5}) as run:
        for step in range(1, 9):
            best = Best(
                metric="eval/lm loss", lower_is_better=True, data="9f", documents=1, step=min(step, 2), value=1.0
            )
            run.save(step, best=best)
