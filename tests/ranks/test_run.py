"""Whole runs, as a user starts them: two processes, cp 2, files on disk."""

import json
import re
from pathlib import Path

import pytest

from tests.builders import chats
from tests.launching import records, start
from tests.unit.metric_values import check


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 6 steps with evaluation that is not interrupted, and its output."""
    folder = tmp_path_factory.mktemp("finished")
    chats(folder, 60)
    chats(folder, 7, "held_out.jsonl")
    chats(folder, 3, "more.jsonl")
    (code, out, told), _ = start(folder, RUN + [held_out(folder)])
    assert code == 0, told
    return folder, out


def held_out(folder: Path) -> str:
    """Overrides for two held-out sets, one of two files; the other is named `eval`, the name of a set without a
    name."""
    return f"data.eval={{eval: {folder}/held_out.jsonl, both: [{folder}/more.jsonl, {folder}/held_out.jsonl]}}"


RUN = ["train.num_steps=6", "checkpoint.save_every=2", "train.eval_every=4", "train.global_batch_size=2"]


def test_what_a_run_writes(finished: tuple[Path, str]) -> None:
    folder, out = finished
    train, everything = records(folder, "train"), records(folder, "eval")
    evaluation, both = ([r for r in everything if r["set"] == name] for name in ("eval", "both"))
    assert [r["step"] for r in train] == [1, 2, 3, 4, 5, 6]
    assert [(r["step"], r["set"]) for r in everything] == [(n, name) for n in (0, 4, 6) for name in ("eval", "both")]
    assert records(folder, "start")[0]["schema"] == 10
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        check(json.loads(line))
    assert all(r["tokens/supervised"] <= r["tokens/real"] <= r["tokens/aligned"] <= r["tokens/padded"] for r in train)
    assert all(r["tokens/padded"] <= r["tokens/capacity"] == 512 for r in train)
    # Held-out answers have 1, 2, 3, ... characters, plus the end of each turn: "0", "22", "444", ..., "12" * 7.
    assert [r["tokens/supervised"] for r in evaluation] == [1 + 2 + 3 + 4 + 5 + 2 * 6 + 2 * 7 + 7] * 3
    assert [r["documents"] for r in evaluation] == [7] * 3 and [r["documents"] for r in both] == [10] * 3
    for alone, together in zip(evaluation, both, strict=True):  # the same samples have the same losses in any pack
        of_file = together["loss by source"]["held_out"]
        assert of_file["tokens"] == alone["tokens/supervised"]
        assert of_file["loss"] == pytest.approx(alone["lm loss"], rel=1e-5)  # fp32
        assert together["loss by source"]["more"]["tokens"] == 1 + 2 + 3 + 3
    assert evaluation[2]["lm loss"] < evaluation[0]["lm loss"]
    assert out.startswith("# Set in ") and "\n  cp: 2  # " in out and "\nworld_size 2 = tp 1 x cp 2 " in out
    assert "# default" not in out and "# default" in (folder / "run/recipe.yaml").read_text()
    assert out.count("packed epoch 0: ") == 1 and re.search(r"^saved .*/iter_0000006 \(.* KiB in .* s\)$", out, re.M)
    assert "lm loss, train: " in out and "lm loss, held-out: " in out and "done: " in out
    assert (folder / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "6"
    kept = sorted(p.name for p in (folder / "run/checkpoints").iterdir() if p.is_dir())
    assert kept == ["iter_0000002", "iter_0000004", "iter_0000006"]
    told = {"metrics.jsonl", "recipe.yaml", "run_state.json", "seen.jsonl", "tensorboard"}
    assert {path.name for path in (folder / "run").iterdir()} == {"cache", "checkpoints", "data.json"} | told
    state = json.loads((folder / "run/run_state.json").read_text())
    assert (state["status"], state["saved_step"]) == ("done", 6) and min(state["step_s"], state["save_s"]) > 0


def test_a_finished_run_says_so_and_does_nothing(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    (code, out, told), _ = start(folder, RUN + [held_out(folder)])
    assert (code, told) == (0, "")
    assert f"nothing to do: the run in {folder}/run has done all its 6 steps" in out
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before


def test_a_dataset_by_name_is_trained_on_like_its_rows_in_a_file(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    reference, _ = finished
    (tmp_path / "rows").mkdir()
    chats(tmp_path / "rows", 60, "train.jsonl")
    chats(tmp_path, 7, "held_out.jsonl")
    chats(tmp_path, 3, "more.jsonl")
    dataset = f"data.train={{chat: {{dataset: {tmp_path}/rows, split: train}}}}"
    (code, _, told), _ = start(tmp_path, [*RUN, held_out(tmp_path), dataset])
    assert code == 0, told
    assert records(tmp_path, "train") == records(reference, "train")
    assert records(tmp_path, "eval") == records(reference, "eval")
