"""Failed saves: every rank gets the same error, no partial checkpoint stays, and earlier checkpoints are untouched."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from sft.checkpoint import folders, manifest
from sft.checkpoint import saver as saving
from sft.files.file_digest import HashingFile
from sft.mcore.checkpoint_io import engine_state, torch_dist_files
from sft.mcore.optimizer.inner import chained_optimizers
from tests.ranks.pool import Ranks
from tests.ranks.saving import ASYNC, Run, listing, refusal, run_of

NO_SPACE = "the disk is full (OSError: [Errno 28] No space left on device)"
WRITTEN = f"was not written: rank 1: {NO_SPACE}"
GOES_ON = "  Training goes on; the next save tries again."
WHOLE = "  The previous checkpoint is complete."


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk(run: Run) -> Iterator[None]:
    """Simulates a full disk on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if run.engine.groups.rank == 1:
            patch.setattr(HashingFile, "_put", full)
        yield


def is_whole(path: Path) -> bool:
    found = manifest.read(path)
    return found is not None and manifest.damage(path, found, verify="full") == []


def fits(text: str, *parts: str) -> bool:
    """Compares without the name of the temporary folder, which is random."""
    return text.startswith(parts[0]) and text.endswith("".join(parts[1:]))


def save_and_drain(run: Run, step: int) -> None:
    run.save(step)
    run.saver.drain()


@pytest.mark.parametrize("overrides", [[], [ASYNC]], ids=str)
def test_a_disk_full_on_one_rank_is_told_and_the_third_time_the_end(
    ranks: Ranks, tmp_path: Path, overrides: list[str]
) -> None:
    told = ranks(2).run(fail_three_times, overrides, str(tmp_path))
    begins = "the checkpoint of step {0} was not saved: iter_000000{0}.tmp-"
    for step, line in zip((2, 3, 6), told[0]["warnings"], strict=True):
        assert fits(line, f"WARNING: {begins.format(step)}", WRITTEN, GOES_ON), line
    for one in told:
        assert fits(one["must"], begins.format(7), WRITTEN, "  Failed saves in a row: 2.", WHOLE), one["must"]
        assert fits(one["third"], begins.format(4), WRITTEN, "  Failed saves in a row: 3.", WHOLE), one["third"]
        assert one["is unchanged"]
    assert listing(tmp_path) == ["iter_0000001", "iter_0000005", folders.POINTER]
    assert is_whole(tmp_path / "iter_0000001") and is_whole(tmp_path / "iter_0000005")
    assert (tmp_path / folders.POINTER).read_text() == "5"


def fail_three_times(overrides: list[str], folder: str) -> dict[str, Any]:
    with run_of(overrides, folder) as run:
        run.train(1)
        save_and_drain(run, 1)
        was = run.hash()
        with full_disk(run):
            for step in (2, 3):
                save_and_drain(run, step)
                assert run.says_published(1)
            third = refusal(lambda: save_and_drain(run, 4))
        save_and_drain(run, 5)  # a save that succeeds ends the row of failures
        with full_disk(run):
            run.save(6)
            must = refusal(lambda: run.save(7, wait=True))
        warnings = [line for line in run.lines() if line.startswith("WARNING")]
        unchanged = run.hash() == was and run.loaded(1) == was
        return {"warnings": warnings, "third": third, "must": must, "is unchanged": unchanged}


def test_a_save_that_failed_in_the_background_is_the_last_one_s_failure(ranks: Ranks, tmp_path: Path) -> None:
    """The last step was already being saved in the background when the run was asked to stop."""
    for one in ranks(2).run(fail_at_the_end, str(tmp_path)):
        assert all(fits(text, "the checkpoint of step 1 was not saved: ", WRITTEN, WHOLE) for text in one), one
    assert listing(tmp_path) == ["iter_0000001", folders.POINTER]


def fail_at_the_end(folder: str) -> list[str]:
    with run_of([ASYNC], folder) as run:
        told = []
        for end in (lambda: run.saver.drain(must_succeed=True), lambda: run.save(1, wait=True)):
            again = Run(run.engine, folder)
            run.saver = again.saver
            with full_disk(run):
                run.save(1)
                told.append(refusal(end))
        run.save(1, wait=True)  # once there is room, the step is saved
        return told


class Case(NamedTuple):
    """A fault: `patch` is applied on rank `rank`, and the error contains `said`."""

    rank: int
    patch: Callable[[pytest.MonkeyPatch, Run], Any]
    said: str


def no_room(patch: pytest.MonkeyPatch, run: Run) -> None:
    left = saving.shutil.disk_usage("/")._replace(free=(1 << 20) + 100_000)
    patch.setattr(saving.shutil, "disk_usage", lambda path: left)


def no_number(patch: pytest.MonkeyPatch, run: Run) -> None:
    *_, last = run.engine.chunks[0].parameters()
    spoilt = last.data.clone()
    spoilt.view(-1)[-1] = float("nan")
    patch.setattr(last, "data", spoilt)


def no_moment(patch: pytest.MonkeyPatch, run: Run) -> None:
    for part in chained_optimizers(run.engine.optimizer):
        for state in part.optimizer.state.values():
            patch.setitem(state, "exp_avg_sq", torch.full_like(state["exp_avg_sq"], float("inf")))


def cut_files(patch: pytest.MonkeyPatch, run: Run) -> None:
    """Limits files after the tensors to 1,000 bytes; the kernel enforces the limit as it would enforce a quota."""
    write = torch_dist_files.write

    def then_cut(*given: Any) -> Any:
        files = write(*given)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return files

    patch.setattr(torch_dist_files, "write", then_cut)


CASES = {
    "too little disk": Case(0, no_room, " MiB, and the disk has 1.1 MiB left."),
    "a weight": Case(1, no_number, "a weight is not finite; such a state is never saved."),
    "a moment": Case(
        1,
        no_moment,
        "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight holds a value that is not finite; such "
        "a state is never saved.",
    ),
    "the lock": Case(
        0,
        lambda patch, run: patch.setattr(run.saver, "_is_ours", lambda: False),
        "another run took over {folder} while this run hung, so this run saves no more checkpoints there.",
    ),
    "digests": Case(0, lambda patch, _: patch.setattr(manifest, "entry_of", full), NO_SPACE),
    "the manifest": Case(0, lambda patch, _: patch.setattr(manifest, "replace_text", full), NO_SPACE),
    "the rename": Case(
        0, lambda patch, _: patch.setattr(folders, "os", SimpleNamespace(rename=full, path=os.path)), NO_SPACE
    ),
    "plain values": Case(0, cut_files, "OSError: [Errno 27] File too large"),
    "the folder": Case(0, lambda patch, _: patch.setattr(folders, "temporary_of", full), NO_SPACE),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_whatever_fails_all_ranks_hear_it_and_nothing_is_left(ranks: Ranks, tmp_path: Path, name: str) -> None:
    said = CASES[name].said.format(folder=tmp_path)
    told = ranks(2).run(fail_once, name, str(tmp_path))
    (line,) = told[0]["warnings"]
    begins = "the checkpoint of step 2 was not saved: " + ("it needs " if name == "too little disk" else said)
    assert fits(line, f"WARNING: {begins}", said, GOES_ON), line
    for one in told:
        assert fits(one["must"], begins, said, "  Failed saves in a row: 2.", WHOLE), one
        assert bool(one["at work"]) == (name not in BEFORE)
    # rank 0 has removed the partial checkpoint before it goes on
    assert told[0]["left"] == ["iter_0000001", folders.POINTER]
    assert listing(tmp_path) == ["iter_0000001", "iter_0000003", folders.POINTER]
    assert is_whole(tmp_path / "iter_0000001") and (tmp_path / folders.POINTER).read_text() == "3"


# faults that are found before anything is written
BEFORE = ("too little disk", "a weight", "a moment", "the lock", "the folder")


def fail_once(name: str, folder: str) -> dict[str, Any]:
    case = CASES[name]
    with run_of([], folder) as run:
        run.train(1)
        run.save(1)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        at_work: list[list[str]] = []
        with pytest.MonkeyPatch.context() as patch:
            write = engine_state.write
            patch.setattr(saving.engine_state, "write", lambda *given: at_work.append(listing(folder)) or write(*given))
            if run.engine.groups.rank == case.rank:
                case.patch(patch, run)
            try:
                run.save(2)
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
                dist.barrier(run.engine.groups.control)  # the test write of the other rank may still exist
                left = listing(folder)
                must = refusal(lambda: run.save(2, wait=True))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert run.says_published(1)
        run.train(2)
        run.save(3, wait=True)
        warnings = [line for line in run.lines() if line.startswith("WARNING")]
        return {"warnings": warnings, "must": must, "left": left, "at work": at_work}
