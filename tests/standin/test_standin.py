"""The stand-in itself, and what starts processes on it."""

import subprocess

import pytest

from tests.standin import launch


def test_messages_of_one_rank_to_another_keep_their_order() -> None:
    process = launch.start("tests.standin.messages", ranks=2)
    said = launch.finish(process)
    assert process.returncode == 0 and "300 of 300 came in order" in said, said[-6000:]


def test_what_hangs_says_what_it_said_and_is_gone() -> None:
    """Ranks of torchrun are in sessions of their own."""
    process = launch.start("tests.standin.hangs", ranks=2)
    with pytest.raises(AssertionError, match="rank 1 sleeps as "):
        launch.finish(process, 30)
    assert not subprocess.run(["pgrep", "-f", "tests.standin.hang[s]"], stdout=subprocess.PIPE, text=True).stdout
