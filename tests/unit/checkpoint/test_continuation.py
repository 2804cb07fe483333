"""The checkpoint from which a run would continue, known from the facts in a manifest alone."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from sft.checkpoint import continuation, manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.train_state import BASE, Conditions, TrainState, recipe_values
from sft.cli import main
from sft.errors import CheckpointError
from tests.builders import RECIPE, parsed

ROOT = Path(__file__).resolve().parents[3]
PLAN = {
    "data": "9f2c",
    "run.seed": 1234,
    "data.seq_length": 1024,
    "data.doc_multiple": 32,
    "data.shuffle": True,
    "train.global_batch_size": 4,
    "data.train": None,
    "data.plan": None,
    "planner": 2,
}


def conditions(*overrides: str, base: str | None = None, **plan: object) -> Conditions:
    recipe = recipe_values(parsed(*overrides).config)
    return Conditions(plan={**PLAN, **plan}, recipe=recipe, layout={"tp": 1}, versions={}, base=base)


def saved(folder: Path, step: int, facts: Conditions) -> Path:
    """A checkpoint that has only a manifest, so a test fails if the code reads another file."""
    path = folder / f"iter_{step:07d}"
    path.mkdir(parents=True)
    (path / "metadata.json").write_text("{}")
    manifest.write(
        path, Manifest(files={}, facts={"step": step, "state": asdict(TrainState(step=step)), **asdict(facts)})
    )
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return path


def test_the_manifest_alone_answers(tmp_path: Path) -> None:
    path = saved(tmp_path, 7, conditions())
    resumed = continuation.check(parsed().config, tmp_path, conditions("optim.lr=2e-5"))
    assert resumed is not None and (resumed.path, resumed.step, resumed.is_named) == (path, 7, False)
    assert resumed.reported == ("optim.lr was 1e-05, is 2e-05",)
    assert continuation.lines(resumed, 10) == [
        f"continues after step 7 of 10, from {path}",
        "changed: optim.lr was 1e-05, is 2e-05",
    ]
    assert continuation.lines(resumed, 6)[0] == (
        f"continues after step 7 of 6, from {path}; no step is left, so the run only evaluates and ends"
    )


def test_what_is_unknown_is_not_compared(tmp_path: Path) -> None:
    saved(tmp_path, 7, conditions(base="a" * 64))
    config = parsed().config
    unknown = conditions(base="", data="other")
    resumed = continuation.check(config, tmp_path, unknown, {"data", BASE})
    assert resumed is not None and resumed.reported == ()
    with pytest.raises(CheckpointError, match="data has other samples .digest was 9f2c, is other."):
        continuation.check(config, tmp_path, unknown, {BASE})
    with pytest.raises(CheckpointError, match="trains adapters, but this recipe trains all weights"):
        continuation.check(config, tmp_path, conditions(), {BASE})
    with pytest.raises(CheckpointError, match="of the weights aaaaaaaaaaaa, but .* of the weights bbbbbbbbbbbb"):
        continuation.check(config, tmp_path, conditions(base="b" * 64))


def test_a_damaged_checkpoint_is_passed_over_and_stays(tmp_path: Path) -> None:
    saved(tmp_path, 6, conditions())
    newest = saved(tmp_path, 7, conditions())
    (newest / "manifest.json").write_text("{")
    resumed = continuation.check(parsed().config, tmp_path, conditions())
    assert resumed is not None and resumed.step == 6
    assert continuation.lines(resumed)[0].startswith(f"passed over: {newest}/manifest.json is damaged")
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000006", "iter_0000007"]


def test_status_names_the_next_start_or_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(RECIPE)
    saved(Path("runs/a/checkpoints"), 7, conditions())
    assert main(["status", "a.yaml"]) == 75
    assert "the next start continues after step 7, from runs/a/checkpoints/iter_0000007\n" in capsys.readouterr().out
    assert main(["status", "a.yaml", "run.seed=7"]) == 2
    assert "cannot be resumed with this recipe: run.seed was 1234, is 7." in capsys.readouterr().err


def test_no_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(RECIPE)
    saved(tmp_path / "runs/a/checkpoints", 7, conditions())
    program = (
        "import sys; from sft.cli import main\n"
        "print(main(['check', 'a.yaml', '--no-data']), main(['status', 'a.yaml']))\n"
        "print({'torch', 'megatron'} & sys.modules.keys())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.endswith("\n0 75\nset()\n"), done.stderr
    assert "resume  continues after step 7 of 10, from runs/a/checkpoints/iter_0000007\n" in done.stdout
