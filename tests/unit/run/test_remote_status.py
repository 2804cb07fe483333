"""The copy of run_state.json in an object store: starts count over nodes that lose their disks."""

from pathlib import Path

from sft.run import remote_status, status
from sft.run.lifecycle import _begin
from tests.object_store import Server

URL = "s3://bucket/runs/a"


def begun(folder: Path, step: int) -> int:
    """The number of starts in a row from `step`, after a start in `folder`."""
    folder.mkdir(exist_ok=True)
    return _begin(folder, lambda: step, URL)[0].starts


def test_a_new_node_goes_on_counting_starts(s3: Server, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert [begun(a, 4), begun(a, 4), begun(b, 4)] == [1, 2, 3]
    assert begun(a, 4) == 4  # the status on this disk is older
    assert begun(b, 5) == 1  # a new checkpoint
    newest = remote_status.newest(a, URL)
    assert newest == status.read(b) and newest != status.read(a)
