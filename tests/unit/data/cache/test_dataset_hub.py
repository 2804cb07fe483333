"""Datasets on the hub: the commit that is loaded, a branch that moves, no network, and refusals.

A server on this machine replaces the hub.  Each session is a process with its own environment, because huggingface_hub
and datasets read the environment when they are imported.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.corpora import ROW, write
from tests.unit.fixtures import hub as fake
from tests.unit.fixtures.hub import Hub

pytest.importorskip("datasets")

# Opens, one after another, the datasets that argv[1] lists, each in the cache folder that the list gives.
SESSION = """
import io, json, sys
from dataclasses import replace
from pathlib import Path
import datasets, huggingface_hub
from sft.config import NamedDataset
from sft.console import Console
from sft.data.cache.loaded_datasets import find_inputs, open_inputs
from sft.data.read.rows import read_rows
from sft.errors import DataError

datasets.disable_progress_bars()
datasets.utils.logging.set_verbosity_error()
answers = []
for step in json.loads(sys.argv[1]):
    cache, how, said = Path(step.pop("cache")), step.pop("how", "open"), io.StringIO()
    wanted = NamedDataset(**step)
    try:
        if how == "find":
            (loaded,) = find_inputs([wanted], cache, command="sft data prepare")
        else:
            (loaded,) = open_inputs([wanted], cache, Console(0, said))
        rows = sum(1 for _ in read_rows(loaded)) if how == "open" else None
        answers.append({"commit": loaded.commit, "rows": rows, "digest": loaded.digest, "said": said.getvalue()})
    except DataError as error:
        answers.append({"error": str(error)})
print(json.dumps(answers))
"""
NAME = "org/chats"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Two repositories: org/chats with two commits, whose train split has 3 and then 4 rows; and org/code, a
    program."""
    home = tmp_path_factory.mktemp("hub")
    with fake.serving() as hub:
        for number, rows in enumerate((3, 4)):
            folder = home / f"chats-{number}"
            folder.mkdir()
            (folder / "README.md").write_text("# Chats\n")
            write(folder / "train.jsonl", *[ROW] * rows)
            hub.add(f"datasets/{NAME}", folder)
        program = home / "program"
        program.mkdir()
        (program / "code.py").write_text("raise SystemExit('the code of a dataset ran')")
        hub.add("datasets/org/code", program)
        yield hub


def session(hub: Hub, home: Path, *steps: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """The answers of one process, whose HF_HOME is `home`."""
    steps_with_cache = [{"name": NAME, "cache": str(home / "cache"), **step} for step in steps]
    done = subprocess.run(
        [sys.executable, "-c", SESSION, json.dumps(steps_with_cache)],
        env={**fake.environment(hub, home), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_datasets_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Four processes: main is the first commit; main has moved; there is no network; the hub does not answer."""
    repo = hub.commits[f"datasets/{NAME}"]
    (first, _), newest = repo[0], repo.pop()
    fixed, elsewhere = {"revision": first}, {"cache": str(tmp_path / "other")}
    (old,) = session(hub, tmp_path, {})
    assert (old["commit"], old["rows"], old["said"]) == (first, 3, f"{NAME} train: commit {first}, 3 rows\n")

    repo.append(newest)
    second = newest[0]
    for start in ("api/datasets/org/gated", "datasets/org/gated"):
        hub.refuse[start] = (403, "GatedRepo", "Access to dataset org/gated is restricted")
    steps = [{"how": "find"}, {}, fixed, fixed, *REFUSED.values()]
    found, moved, pinned, again, *refused = session(hub, tmp_path, *steps)
    assert found["commit"] == first and found["digest"] == old["digest"]  # a run keeps the commit that it loaded first
    assert (moved["commit"], moved["rows"]) == (second, 4) and moved["digest"] != old["digest"]
    assert f"{NAME} train: main moved from commit {first} to {second}.  A run that began" in moved["said"]
    assert (pinned["commit"], pinned["rows"], pinned["digest"]) == (first, 3, old["digest"])
    assert again == {**pinned, "said": ""}  # a commit cannot change
    for complaint, answer in zip(REFUSED, refused, strict=True):
        assert complaint in answer["error"] and "\n" not in answer["error"]

    # Offline: a cache_dir has the commit that was loaded into it; a new one gets the last copy that datasets made.
    num_asked = len(hub.asked)
    steps = [{}, fixed, elsewhere, {**elsewhere, **fixed}, {**elsewhere, "revision": "v1"}, {"name": "a/b"}]
    same, pinned, copy, older, tag, absent = session(hub, tmp_path, *steps, HF_HUB_OFFLINE="1")
    assert len(hub.asked) == num_asked
    assert same["commit"] == second and "using commit" in same["said"] and "HF_HUB_OFFLINE" in same["said"]
    assert (pinned["commit"], pinned["said"], copy["commit"]) == (first, "", second)
    newest_copy = f", but the newest copy in the cache of datasets is commit {second}, and HF_HUB_OFFLINE is set."
    assert f"revision {first} is commit {first}{newest_copy}" in older["error"]
    assert f"revision v1 is unknown without a network{newest_copy}" in tag["error"]
    assert "a/b is not in the cache of datasets" in absent["error"] and "sft data prepare once" in absent["error"]

    dead = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    same, none = session(hub, tmp_path, {}, {"cache": str(tmp_path / "third"), "revision": second}, **dead)
    assert same["commit"] == second and "the Hugging Face hub cannot be reached" in same["said"]
    assert "the Hugging Face hub cannot be reached" in none["error"] and "HF_HUB_OFFLINE=1" in none["error"]


REFUSED: dict[str, dict[str, Any]] = {
    "is neither a folder nor a dataset on the Hugging Face hub that this user may read": {"name": "org/nothing"},
    "has no revision v9.  Give a commit, a tag or a branch.": {"revision": "v9"},
    "is gated: its owner grants access.  Ask for it on https://huggingface.co/datasets/org": {"name": "org/gated"},
    "is a program (code.py), and code of a dataset is not run.": {"name": "org/code"},
    "has no split test.  Its splits are train;": {"split": "test"},
    "is not loaded into": {"how": "find", "split": "train[:1]"},
}
