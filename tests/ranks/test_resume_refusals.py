"""The checkpoint from which a run resumes, the checkpoints that it refuses, and its messages; a Saver wrote the
checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.checkpoint import folders, manifest, resume
from sft.checkpoint.origin import RunOrigin
from sft.checkpoint.train_state import Conditions, TrainState
from sft.config.keys import values
from sft.console import QUIET, Console
from sft.errors import CheckpointError, ConfigError
from sft.mcore.checkpoint_io import optimizer_shards
from sft.mcore.engine import Engine
from sft.weights.initial import load_initial
from tests.ranks import scenarios
from tests.ranks.pool import Ranks
from tests.ranks.saving import SMALL, Run, listing, run_of

DAMAGED = "iter_0000003.corrupt-"


def conditions(engine: Engine) -> Conditions:
    plan = {"data": "9f2c", "run.seed": engine.config.run.seed}
    layout = {"tp": engine.layout.tp, "dp": engine.layout.dp}
    return Conditions(plan=plan, recipe=values(engine.config), layout=layout, versions={"torch": "2.13.0"})


def write_three(folder: str) -> list[Any]:
    """Two data-parallel ranks write checkpoints after steps 1, 2 and 3.  Returns the hash of each."""
    with scenarios.running(SMALL) as engine:
        run, hashes = Run(engine, folder, conditions(engine)), []
        for step in (1, 2, 3):
            run.train(step)
            run.save(step, wait=True, num_tokens=1000 * step, epoch=0, batch=step - 1, chain="c")
            hashes.append(run.hash())
        return hashes


@pytest.fixture(scope="module")
def original(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("original") / "checkpoints"
    return folder, ranks(2).run(write_three, str(folder))[0]


@pytest.fixture
def saved(original: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(original[0], tmp_path / "checkpoints"))


def go_on(overrides: list[str], folder: str, starts: int = 1) -> list[dict[str, Any]]:
    """The path, state and hash that each of `starts` consecutive starts finds and loads; or its refusal."""
    told: list[dict[str, Any]] = []
    with run_of(overrides, folder) as run:
        config, now = run.engine.config.checkpoint, conditions(run.engine)
        console = Console(run.engine.groups.rank, run.said)
        for _ in range(starts):
            before, known = run.hash(), len(run.said.getvalue())
            one: dict[str, Any] = {"path": None, "state": None, "refused": None}
            try:
                found = resume.find(config, run.folder, run.engine.groups, console)
                if found:
                    one["path"], one["state"] = found.path.name, resume.load(run.engine, found, config, now, console)
            except (CheckpointError, ConfigError) as error:
                one["refused"] = str(error)
            now_it_is = run.hash()
            told.append(
                {**one, "said": run.said.getvalue()[known:], "hash": now_it_is if now_it_is != before else None}
            )
    return told


def starts(ranks: Ranks, folder: Path, *overrides: str, count: int = 1) -> list[dict[str, Any]]:
    """The results, which agree on both ranks except for the local state and the printed lines."""
    first, second = ranks(2).run(go_on, list(overrides), str(folder), count)
    for one, other in zip(first, second, strict=True):
        assert all(one[key] == other[key] for key in ("path", "state", "refused")) and other["said"] == ""
        assert (one["hash"] is None) == (other["hash"] is None)
    return first


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_is_taken_and_what_is_restored_is_said(ranks: Ranks, saved: Path, original: Any) -> None:
    (one,) = starts(ranks, saved)
    assert one["path"] == "iter_0000003" and one["hash"] == original[1][2]
    assert one["state"] == TrainState(step=3, num_tokens=3000, epoch=0, batch=2, chain="c")
    files = sum(path.stat().st_size for path in (saved / "iter_0000003").iterdir() if path.name != "manifest.json")
    assert one["said"] == (
        f"resumed step 3 from {saved}/iter_0000003\n"
        f"  files      SHA-256 verified: 5 files, {round(files / 1024)} KiB\n"
        "  restored   weights, moments, Adam's step, schedule, random generators\n"
        "  position   after global batch 2 of epoch 0, 3,000 supervised tokens\n"
    )


def test_another_layout_and_what_changed_are_said(ranks: Ranks, saved: Path) -> None:
    (one,) = starts(ranks, saved, "parallel.tp=2", "optim.clip_grad=2.0", "checkpoint.verify=size")
    head, files, *rest = one["said"].splitlines()
    assert files.startswith("  files      sizes verified: 5 files, ")
    assert rest == [
        "  restored   weights, moments, Adam's step, schedule",
        "  skipped    random generators: the layout differs, and a step draws none",
        "  position   after global batch 2 of epoch 0, 3,000 supervised tokens",
        "  changed    parallel.tp was 1, is 2",
        "  changed    optim.clip_grad was 1.0, is 2.0",
        "  changed    dp was 2, is 1",
    ]


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "common.pt"])
def test_one_bit_anywhere_and_the_next_older_one_is_taken(ranks: Ranks, saved: Path, original: Any, name: str) -> None:
    """The same happens whichever rank reads the damaged file."""
    flip(saved / "iter_0000003" / name)
    (one,) = starts(ranks, saved)
    assert one["path"] == "iter_0000002" and one["state"].step == 2 and one["hash"] == original[1][1]
    (away,) = [found for found in listing(saved) if found.startswith(DAMAGED)]
    assert listing(saved) == ["iter_0000001", "iter_0000002", away, folders.POINTER]
    assert (saved / folders.POINTER).read_text() == "2"
    assert one["said"].startswith(
        f"WARNING: {saved}/iter_0000003 is damaged: {saved}/iter_0000003/{name} differs from the file that was saved: "
        f"its SHA-256 is another.\n  The folder is renamed to {saved}/{away}; the run continues from "
        f"{saved}/iter_0000002.\nresumed step 2 from "
    )


def test_a_node_that_sees_files_late_is_waited_for_but_not_for_ever(ranks: Ranks, saved: Path) -> None:
    for patience, found in ((1e9, "iter_0000003"), (0.0, "iter_0000003/.metadata is missing")):
        assert all(found in one for one in ranks(2).run(look_late, str(saved), patience))


def look_late(folder: str, patience_s: float) -> str:
    """Rank 1 does not see .metadata the first three times that it looks."""
    with run_of([], folder) as run, pytest.MonkeyPatch.context() as patch:
        damage, looks = manifest.damage, []

        def late(path: Path, written: Any, **how: Any) -> list[str]:
            looks.append(path)
            return damage(path, written, **how) if len(looks) > 3 else [f"{path}/.metadata is missing"]

        if run.engine.groups.rank == 1:
            patch.setattr(resume.manifest, "damage", late)
        patch.setattr(resume, "_NFS_DELAY_S", patience_s)
        patch.setattr(resume.time, "sleep", lambda seconds: None)
        try:
            return resume.verified(run.folder / "iter_0000003", "full", run.engine.groups).path.name
        except OSError as error:  # a fault of this node, not of the checkpoint, so no rank puts the checkpoint aside
            return str(error)


def test_a_manifest_that_is_gone_or_damaged_is_damage(ranks: Ranks, saved: Path) -> None:
    (saved / "iter_0000003" / "manifest.json").unlink()
    (saved / "iter_0000002" / "manifest.json").write_text('{"format": "sft checkp')
    (one,) = starts(ranks, saved, "checkpoint.verify=off")  # with verification off, the damage is not found
    assert one["path"] == "iter_0000003" and "  files      not verified: checkpoint.verify = off" in one["said"]
    (one,) = starts(ranks, saved, "checkpoint.verify=size")
    assert one["path"] == "iter_0000001"
    assert (
        f"{saved}/iter_0000003/manifest.json is missing; this trainer writes it into every checkpoint." in one["said"]
    )
    assert f"{saved}/iter_0000002/manifest.json is damaged (JSONDecodeError: " in one["said"]


@pytest.mark.parametrize("wanted", ["auto", "must"])
def test_where_all_are_damaged_no_start_begins_anew(ranks: Ranks, saved: Path, wanted: str) -> None:
    """A second start, by a user or a scheduler, also refuses."""
    for step in (1, 2, 3):
        flip(saved / folders.name_of(step) / ".metadata")
    first, second = starts(ranks, saved, f"checkpoint.resume={wanted}", count=2)
    assert first["refused"].startswith(
        f"{saved} holds no undamaged checkpoint, and a run that has saved is not started over."
    )
    assert all(
        f"iter_000000{step}/.metadata differs from the file that was saved" in first["refused"] for step in (1, 2, 3)
    )
    assert first["hash"] is None and len(listing(saved)) == 4
    assert second["refused"] is not None and second["hash"] is None


def test_a_path_names_one_or_a_folder_of_them_and_is_never_moved(ranks: Ranks, saved: Path, original: Any) -> None:
    elsewhere = saved.parent / "empty"
    for path, step in ((saved / "iter_0000001", 1), (saved, 3)):
        (one,) = starts(ranks, elsewhere, f"checkpoint.resume={path}")
        assert one["path"] == f"iter_000000{step}" and one["hash"] == original[1][step - 1]
    before = listing(saved)
    flip(saved / "iter_0000003" / ".metadata")
    (one,) = starts(ranks, elsewhere, f"checkpoint.resume={saved}")
    assert one["refused"].startswith(f"{saved}/iter_0000003 is damaged: ") and one["hash"] is None
    assert listing(saved) == before


def test_the_same_command_goes_on_from_what_the_run_has_saved_since_it_began_elsewhere(
    ranks: Ranks, saved: Path
) -> None:
    """If its newest checkpoint is damaged, the run resumes from the next older one of its own, not from its origin."""
    folder, named = saved.parent / "own", f"checkpoint.resume={saved / 'iter_0000003'}"
    assert ranks(2).run(go_on_and_save, [named], str(folder)) == ["iter_0000003"] * 2
    (one,) = starts(ranks, folder, named)
    assert one["path"] == "iter_0000005" and one["state"].origin.path == f"{saved}/iter_0000003"
    flip(folder / "iter_0000005" / "common.pt")
    (one,) = starts(ranks, folder, named)
    assert one["path"] == "iter_0000004"
    assert f"{folder}/iter_0000005 is damaged" in one["said"]


def go_on_and_save(overrides: list[str], folder: str) -> str:
    """Loads, trains two more steps, and saves."""
    with scenarios.running([*SMALL, *overrides]) as engine:
        config, now = engine.config.checkpoint, conditions(engine)
        run = Run(engine, folder, now)
        found = resume.find(config, run.folder, engine.groups, Console(1))
        assert found
        state = resume.load(engine, found, config, now, Console(1))
        for step in (4, 5):
            run.train(step)
            run.saver.save(engine, replace(state, step=step), wait=True)
        return found.path.name


def test_a_foreign_one_is_said_to_be_unverified(ranks: Ranks, saved: Path, original: Any) -> None:
    """A checkpoint as Megatron-LM writes it: without our manifest."""
    path = saved / "iter_0000003"
    (path / "manifest.json").unlink()
    common = torch.load(path / "common.pt", weights_only=False)
    del common["sft"]
    torch.save(common, path / "common.pt")
    (one,) = starts(ranks, saved)
    assert one["hash"] is None and one["refused"] == (
        f"{path} was not written by this trainer and does not say which samples were used.  Start from its weights "
        f"with model.init_from={path}, or resume weights, moments, schedule and step with checkpoint.resume={path}."
    )
    (one,) = starts(ranks, saved, f"checkpoint.resume={path}")
    assert (
        one["state"] == TrainState(step=3, origin=RunOrigin(path=str(path), written=str(path), step=3, manifest=None))
        and one["hash"] == original[1][2]
    )
    assert one["said"] == (
        f"resumed step 3 from {path}\n"
        "  files      not verified: the checkpoint has no manifest\n"
        "  restored   weights, moments, Adam's step, schedule, random generators\n"
        "  position   step 3 of this recipe's plan; the checkpoint does not say which samples were used\n"
    )


def test_another_run_of_it_is_refused_unless_allowed(ranks: Ranks, saved: Path) -> None:
    changed = ("model.rope.base=5e5", "run.seed=8")
    (one,) = starts(ranks, saved, *changed, "checkpoint.allow_changes=[run.seed]")
    assert one["hash"] is None and listing(saved)[2] == "iter_0000003"
    assert one["refused"] == (
        f"{saved}/iter_0000003 cannot be resumed with this recipe: "
        "model.rope.base was 10000.0, is 500000.0.  Also changed: run.seed was 7, is 8, as allowed.  Undo the change; "
        "or accept it, if the tensors keep their shapes: 'checkpoint.allow_changes=[run.seed, model.rope.base]'; or "
        f"start a new run from the weights of the checkpoint: model.init_from={saved}/iter_0000003 with another "
        "run.dir."
    )
    (one,) = starts(ranks, saved, *changed, "checkpoint.allow_changes=[run.seed, model.rope.base]")
    assert one["state"].step == 3
    assert one["said"].splitlines()[-2:] == [
        "  changed    run.seed was 7, is 8, as allowed",
        "  changed    model.rope.base was 10000.0, is 500000.0, as allowed",
    ]
    (one,) = starts(ranks, saved, "checkpoint.allow_changes=[optim.lr]")
    assert one["refused"].startswith("checkpoint.allow_changes names optim.lr, which is never refused.")


def test_weights_to_start_from_are_verified_and_nothing_else_is_taken(ranks: Ranks, saved: Path, original: Any) -> None:
    for told in ranks(2).run(start_from, str(saved)):
        assert told["weights"] == original[1][2][0]
        assert told["moments"] == 0.0 and told["step"] == 0
    said = ranks(2).run(start_from, str(saved / "iter_0000002"))[0]["said"]
    assert said.startswith(f"the weights of {saved}/iter_0000002 (SHA-256 verified: 5 files, ")
    flip(saved / "iter_0000003" / "__1_0.distcp")
    for told in ranks(2).run(start_from, str(saved)):
        assert told["refused"].startswith(f"{saved}/iter_0000003 is damaged: ") and told["weights"] == told["before"]
    assert "iter_0000003" in listing(saved)


def start_from(source: str) -> dict[str, Any]:
    with run_of([f"model.init_from={source}", "checkpoint.verify=full"], "unused") as run:
        before, refused, said = scenarios.parameter_hash(run.engine), None, ""
        try:
            said = load_initial(run.engine, run.engine.config, QUIET)
        except CheckpointError as error:
            refused = str(error)
        held = [one for one in optimizer_shards.optimizer_slices(run.engine.optimizer)]
        moved = max(float(one.tensors[name].abs().max()) for one in held for name in ("exp_avg", "exp_avg_sq"))
        told = {"moments": moved, "step": optimizer_shards.step_of(run.engine.optimizer), "said": said}
        return {**told, "before": before, "weights": scenarios.parameter_hash(run.engine), "refused": refused}
