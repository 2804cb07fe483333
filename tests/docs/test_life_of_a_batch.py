"""The pages life-of-a-batch and trees show exactly the output of the code."""

import os
from pathlib import Path

import pytest

from tests.launching import Rank, ended
from tools import life_of_a_batch, tree_of_turns
from tools.printed_page import PrintedPage

SHOWN = "# A page\n\n<!-- printed: pack -->\n```text\nold\n```\n\nText.\n"


@pytest.mark.parametrize("page", [life_of_a_batch.PAGE, tree_of_turns.PAGE], ids=lambda page: page.path.stem)
def test_the_page_shows_what_the_tool_prints(page: PrintedPage) -> None:
    """In a process of its own, because a tool forks ranks: a fork of a process with threads may wait for ever."""
    ((code, _, told),) = ended([Rank(["--check"], {**os.environ}, page.tool)])
    assert code == 0, told


def test_a_part_replaces_the_block_after_its_mark() -> None:
    assert life_of_a_batch.PAGE.shown(SHOWN, {"pack": "new\nlines"}) == SHOWN.replace("old", "new\nlines")


def test_a_part_without_a_block_and_a_block_without_a_part() -> None:
    with pytest.raises(ValueError, match="no block for step"):
        life_of_a_batch.PAGE.shown(SHOWN, {"pack": "", "step": ""})
    with pytest.raises(KeyError, match="pack"):
        life_of_a_batch.PAGE.shown(SHOWN, {})


def test_a_page_with_another_number_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PrintedPage(tmp_path / "page.md", "tools.mine", lambda: {"pack": "new"})
    page.path.write_text(SHOWN)
    assert page.main(["--check"]) == 1
    assert "page.md is out of date; run: python -m tools.mine --write" in capsys.readouterr().err
    assert page.path.read_text() == SHOWN
    assert page.main(["--write"]) == 0 == page.main(["--check"])


def test_the_loss_of_the_page_by_hand() -> None:
    """Reads the sums of both ranks, their quotient and the log line from the page, and computes the loss from them
    here."""
    text = life_of_a_batch.PAGE.path.read_text(encoding="utf-8")
    sums = [line.split() for line in text.splitlines() if line.startswith("sum of losses")]
    losses, weights = ([float(words[k].rstrip(",")) for words in sums] for k in (3, -1))
    assert weights == [1.0, 6.0]
    (logged,) = (float(line.split()[-1]) for line in text.splitlines() if line.startswith("lm loss  "))
    assert abs(logged - sum(losses) / 7) < 1e-4  # all three numbers on the page are rounded to four digits
