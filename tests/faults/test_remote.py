"""Rows R of the fault matrix: checkpoints in an object store (checkpoint.remote) that fails, or of runs that die."""

import hashlib
import json
import random
import re
import shutil
import signal

import pytest

from tests.faults.runs import STEP, Case, Hit, MakeCase
from tests.object_store import SECRET, Server

URL, PREFIX = "s3://bucket/runs/a", "runs/a/"
REMOTE = f"checkpoint.remote={URL}"
MANIFEST = re.compile(r"(iter_\d{7})/manifest\.json")


def complete(s3: Server) -> list[int]:
    """The steps of the complete checkpoints in the store, whose bytes all agree with their manifests."""
    content = s3.content(PREFIX)
    steps = [match[1] for match in map(MANIFEST.fullmatch, content) if match]
    for step in steps:
        files = json.loads(content[f"{step}/manifest.json"])["files"]
        names = {name.removeprefix(f"{step}/") for name in content if name.startswith(f"{step}/")}
        assert names - {"manifest.given-up.json"} == {*files, "manifest.json"}
        for name, told in files.items():
            of_file = content[f"{step}/{name}"]
            assert len(of_file) == told["bytes"] and hashlib.sha256(of_file).hexdigest() == told["sha256"], name
    return sorted(int(step[5:]) for step in steps)


def kill_at(s3: Server, case: Case, request: int) -> None:
    """Start the run, and kill all its ranks before the server sees the request of this number."""
    first = s3.number()
    start = case.start()

    def kill(number: int, method: str, path: str) -> None:
        if number == first + request:
            start.signal(signal.SIGKILL)

    s3.before = kill
    start.wait()
    s3.before = lambda number, method, path: None


@pytest.mark.quick
@pytest.mark.row("R1", "R2")
def test_a_run_without_its_folder_continues_from_the_store(s3: Server, case: MakeCase, hit: Hit) -> None:
    """The first node is lost after step 5, the second after step 7; the store is slow, and refuses and cuts."""
    one = case(REMOTE, "checkpoint.async_save=true", "checkpoint.keep_last=3")
    faults = {1: "503", 2: "cut", 0: "429"}
    s3.latency_s = 0.01
    s3.before = lambda number, method, path: faults[number // 7 % 3] if number % 7 == 0 else None
    for step in (5, 7):
        one.start({"at": STEP, "step": step + 1, "when": "after", "rank": 1, "do": "kill-all"}).ends(-9)
        steps = complete(s3)
        assert step - 1 <= max(steps) <= step and len(steps) <= 4, steps  # the kill may precede the removal
        shutil.rmtree(one.checkpoints)
        hit("R1"), hit("R2")
    start = one.finish_the_same()
    start.says(f"fetched {URL}/iter_", f"copied step 12 to {URL}/iter_0000012")
    assert complete(s3) == [10, 11, 12] and s3.content(PREFIX)["latest_checkpointed_iteration.txt"] == b"12"
    assert s3.content(PREFIX)["run.lock"] == b""
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in one.folder.rglob("*") if path.is_file())


def check_kills(s3: Server, case: MakeCase, hit: Hit, count: int, seed: int) -> None:
    draw = random.Random(seed)
    one = case(REMOTE)
    for _ in range(count):
        kill_at(s3, one, draw.randrange(1, 60))
        found = complete(s3)
        if one.checkpoints.exists() and draw.random() < 0.4 and found:
            shutil.rmtree(one.checkpoints)  # the next start is on another node
        hit("R3")
        if one.checkpoints.exists() and one.steps()[-1:] == [12]:
            one.finish_the_same()
            assert max(complete(s3)) == 12
            for name in list(s3.content(PREFIX)):
                _remove(name)
            one = case(REMOTE)
    one.finish_the_same()
    assert max(complete(s3)) == 12


def _remove(name: str) -> None:
    from sft.files.object_store import ObjectStore

    ObjectStore(URL).remove([name])


@pytest.mark.quick
@pytest.mark.row("R3")
def test_killed_at_three_requests(s3: Server, case: MakeCase, hit: Hit) -> None:
    check_kills(s3, case, hit, 3, seed=0)


@pytest.mark.row("R3")
def test_killed_at_fifty_requests(s3: Server, case: MakeCase, hit: Hit) -> None:
    check_kills(s3, case, hit, 50, seed=1)


@pytest.mark.row("R4")
def test_two_runs_on_one_place(s3: Server, case: MakeCase, hit: Hit) -> None:
    one, two = case(REMOTE), case(REMOTE)
    first = one.start({"at": STEP, "step": 3, "rank": 0, "do": "sleep", "s": 600})
    first.until(lambda: 2 in complete(s3))
    two.start().ends(2).says(f"checkpoint.remote = {URL} is in use by another run", "choose another checkpoint.remote")
    assert not two.checkpoints.exists() and complete(s3) == [1, 2]
    first.end()
    hit("R4")
    one.finish_the_same()


@pytest.mark.row("R5")
def test_a_copy_replaces_a_checkpoint_that_is_damaged_here(s3: Server, case: MakeCase, hit: Hit) -> None:
    one = case(REMOTE)
    one.start({"at": STEP, "step": 5, "when": "after", "rank": 1, "do": "kill-all"}).ends(-9)
    file = next(one.checkpoint(4).glob("__*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    hit("R5")
    start = one.finish_the_same(beside=r"iter_0000004\.corrupt-.*")
    start.says("its SHA-256 is another", f"fetched {URL}/iter_0000004", "resumed step 4")


@pytest.mark.row("R6")
def test_a_store_that_is_away_stops_no_training_until_the_end(s3: Server, case: MakeCase, hit: Hit) -> None:
    """Copies of three steps are lost; the next copy goes on, and the run ends as if nothing had happened."""
    one = case(REMOTE)
    away = re.compile(r"/bucket/runs/a/iter_000000[56]/.*")
    s3.before = lambda number, method, path: (
        "403 Forbidden|AccessDenied" if method == "PUT" and away.fullmatch(path) else None
    )
    start = one.finish_the_same()
    start.says("iter_0000005 is complete, but was not copied", "these credentials have no permission for it")
    assert complete(s3) == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    hit("R6")
