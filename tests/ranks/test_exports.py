"""Runs that export their checkpoints: on several ranks, into a folder that cannot be written, and killed during an
export."""

import json
import time
from pathlib import Path

from sft.console import QUIET
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests import launching
from tests.launching import start
from tests.unit.fixtures import hf

# with the sizes of the fixture, these are the sizes of the recipe
SIZES = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8)
DEADLINE_S = 240.0


def recipe_of(folder: Path) -> list[str]:
    """Overrides of a run that starts from an imported model, and saves every step."""
    (folder / "chat.jsonl").write_text((launching.GOOD + "\n") * 20)
    import_hf(hf.save(folder / "model", "llama", **SIZES), folder / "imported", QUIET)
    recipe = [f"model.hf={folder}/model", f"model.init_from={folder}/imported", "checkpoint.save_every=1"]
    return [*recipe, "optim.schedule=constant", "data.tokenizer=byte"]


def status(run: Path) -> str:
    return str(json.loads((run / "run_state.json").read_text())["status"])


def test_every_checkpoint_is_exported_after_a_failure_and_a_kill(tmp_path: Path) -> None:
    """Training reaches its end although exports fail; later starts make the exports, on another layout; a kill leaves
    no unfinished folder."""
    recipe = [*recipe_of(tmp_path), "checkpoint.export_hf=every", "parallel.cp=1"]
    run = tmp_path / "run"
    exports = run / "hf_exports"
    run.mkdir()
    exports.touch()  # a file instead of a folder, so that no export can be written
    tp, pp = [*recipe, "parallel.tp=2"], [*recipe, "parallel.pp=2"]

    codes_and_output = start(tmp_path, tp)
    assert [code for code, _, _ in codes_and_output] == [1, 1]
    _, output, errors = codes_and_output[0]
    assert "WARNING: the checkpoint of step 1 was not exported: FileExistsError" in output
    assert "StorageError: all steps are done and saved, but 2 of the exports" in errors
    assert status(run) == "failed-retryable" and len(launching.records(tmp_path, "train")) == 2

    exports.unlink()
    ranks = launching.launch(tmp_path, pp)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (exports / "iter_0000001.log").exists():
            assert time.monotonic() < deadline and ranks[0].poll() is None
            time.sleep(0.01)
    finally:
        launching.kill(ranks)
    assert not [path for path in exports.iterdir() if path.is_dir() and ".tmp-" not in path.name]

    codes_and_output = start(tmp_path, pp)
    assert [code for code, _, _ in codes_and_output] == [0, 0], codes_and_output
    assert status(run) == "done"
    assert {path.name for path in exports.iterdir() if path.is_dir()} == {"iter_0000001", "iter_0000002"}
    first, second = (hf.load(exports / f"iter_000000{step}").state_dict() for step in (1, 2))
    assert any((first[name] != second[name]).any() for name in first)


def test_the_best_and_the_last_checkpoint_have_one_export_each(tmp_path: Path) -> None:
    """A longer run with another export mode continues.  Each export holds the weights of its checkpoint, and no other
    export is left."""
    (tmp_path / "held_out.jsonl").write_text(launching.GOOD + "\n")
    recipe = [*recipe_of(tmp_path), f"data.eval={tmp_path}/held_out.jsonl", "train.eval_every=1"]
    best = ["checkpoint.keep_best=eval/lm loss", "checkpoint.export_hf=best"]
    for mode, number_of_steps in ((best, 2), (["checkpoint.export_hf=last"], 3)):
        codes_and_output = start(tmp_path, [*recipe, *mode, f"train.num_steps={number_of_steps}"])
        assert [code for code, _, _ in codes_and_output] == [0, 0], codes_and_output
    losses = [record["lm loss"] for record in launching.records(tmp_path, "eval")]
    assert losses == sorted(losses, reverse=True), "every step is the best one, in the rows of the training"
    exports = tmp_path / "run/hf_exports"
    assert {path.name for path in exports.iterdir() if path.is_dir()} == {"best_0000002", "last_0000003"}
    for name in ("best_0000002", "last_0000003"):
        step = name.partition("_")[2]
        export_hf(tmp_path / f"run/checkpoints/iter_{step}", tmp_path / step, QUIET)
        assert hf.same(hf.tensors(exports / name), hf.tensors(tmp_path / step))
    assert not hf.same(hf.tensors(tmp_path / "0000002"), hf.tensors(tmp_path / "0000003"))
