"""Cards of families: what results of tests become, and which card a failure turns red."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sft.hf.families import FAMILIES
from tests import cards as noted
from tools import cards

ROOT = Path(__file__).resolve().parents[3]
ABOUT = {"date": "2026-11-28", "commit": "0123abcd", "versions": {"torch": "2.13.0"}}


def case(family: str, line: str, layout: str = "one", outcome: str = "", **measured: str) -> str:
    """A test in a file of pytest's results.  outcome: `failure`, `error` or `skipped`; "": it passed"""
    noted = dict(card=line, family=family, layout=layout) | measured
    properties = "".join(f'<property name="{name}" value="{value}"/>' for name, value in noted.items())
    ending = f"<{outcome}/>" if outcome else ""
    return f'<testcase name="{line}[{family}-{layout}]"><properties>{properties}</properties>{ending}</testcase>'


def results(folder: Path, *cases: str) -> Path:
    path = folder / "results.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}<testcase/></testsuite></testsuites>")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cards, "FOLDER", tmp_path / "cards")
    return tmp_path


ALL = [case("llama", line) for line in cards.CHECKS]


def test_a_card_has_layouts_and_the_worst_difference_in_terms_of_its_bar(folder: Path) -> None:
    some = [
        case("qwen3", "gradients", "tp", worst="2e-06", bar="1e-05"),
        case("qwen3", "gradients", "cp", worst="6e-06", bar="2e-05"),  # larger, but further below its bar
        case("qwen3", "gradients", "ep", "skipped"),
    ]
    found = cards.results([results(folder, *some)])
    gradients = {"passed": ["cp", "tp"], "failed": [], "worst": 6e-06, "bar": 2e-05, "tests": 2}
    assert found == {"qwen3": {"gradients": gradients}}
    cards.write(found, ABOUT)
    assert json.loads((folder / "cards" / "qwen3.json").read_text())["verdict"] == "partly tested"
    page = cards.page("qwen3", "")
    assert "\n- gradients: worst 6.0e-06 of 2.0e-05; 2 tests: cp, tp\n" in page and "\n- LoRA: not tested\n" in page
    assert "on commit 0123abcd" in page
    assert "\n- qwen3_8b_1m_1n: predicted 271 s/step on 8 GPUs; published 364 to" in page


@pytest.mark.parametrize("outcome", ["failure", "error"])
def test_a_failed_test_turns_exactly_its_card_red(folder: Path, outcome: str) -> None:
    failed = case("mistral3/ministral3", "layouts", "cp", outcome)
    found = cards.results([results(folder, *ALL, case("mistral3/ministral3", "layouts", "pp"), failed)])
    cards.write(found, ABOUT)
    verdicts = {family: cards.load(family)["verdict"] for family in FAMILIES}
    partly = dict.fromkeys(FAMILIES, "partly tested")
    assert verdicts == partly | {"llama": "passed", "mistral3/ministral3": "FAILED"}
    assert "\n- layouts: 2 tests: **cp FAILED**, pp\n" in cards.page("mistral3/ministral3", "")
    marks = cards.BEGIN + cards.END
    assert "| [mistral3/ministral3](mistral3-ministral3.md) | **FAILED**: layouts |" in cards.index(marks)
    told = " ".join(cards.summary(marks).split())
    assert f"**1 of {len(FAMILIES)} families pass the 10 checks of their [card](docs/cards/index.md), as" in told
    assert "1 failed: mistral3/ministral3" in told


def test_a_later_file_replaces_results_of_the_same_test(folder: Path) -> None:
    (folder / "later").mkdir()
    files = [
        results(folder, case("llama", "LoRA", outcome="failure")),
        results(folder / "later", case("llama", "LoRA")),
    ]
    assert cards.verdict(cards.results(files)["llama"]) == "partly tested"
    assert cards.verdict(cards.results(files[::-1])["llama"]) == "FAILED"


def test_added_results_replace_their_lines_only(folder: Path) -> None:
    """The other lines keep date and commit of the card."""
    cards.write(cards.results([results(folder, *ALL)]), ABOUT)
    new = [case("llama", "memory", worst="0.012", bar="0.1"), case("llama", "LoRA", "cp", "failure")]
    cards.add(cards.results([results(folder, *new)]), "abcd0123")
    card = cards.load("llama")
    assert card["verdict"] == "FAILED" and card["commit"] == ABOUT["commit"] and [*card["checks"]] == [*cards.CHECKS]
    page = cards.page("llama", "")
    assert "\n- LoRA: 1 test on commit abcd0123: **cp FAILED**\n" in page and "\n- probes: 1 test: one\n" in page
    assert "\n- memory: worst 1.2e-02 of 1.0e-01; 1 test on commit abcd0123: one\n" in page
    assert cards.load("qwen2")["verdict"] == "partly tested"


def test_results_without_a_test_of_a_card_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="has no result of a test that is marked with a line of a card"):
        cards.results([results(folder)])


def test_what_other_trainers_published_is_for_the_same_model_and_length() -> None:
    assert cards._published("Qwen/Qwen3-32B", 2**20) == ["1,295 s/step (TRL #6845, #6846)"]
    assert cards._published("Qwen/Qwen3-8B", 2**21) == ["697 s/step (TRL #6845, #6846; 16 GPUs)"]
    of_8b = ["364 to 380 s/step (TRL #6845, #6846; 8 H100)", "606 s/step (TRL #6845, #6846; FA2)"]
    assert cards._published("Qwen/Qwen3-8B", 2**20) == of_8b
    assert cards._published("Qwen/Qwen3-8B", 2**15) == []


def test_every_mark_names_a_line_and_every_line_has_a_test() -> None:
    marks = re.compile(r'@pytest\.mark\.card\("([^"]+)"\)')
    named = {line for path in (ROOT / "tests").rglob("test_*.py") for line in marks.findall(path.read_text())}
    assert named == {*cards.CHECKS}


@pytest.mark.parametrize(
    "given,family",
    [
        ("olmo3 windows", "olmo3"),
        ({"family": "qwen2"}, "qwen2"),
        ("mistral3", "mistral3/mistral"),
        ("gemma3", "gemma3"),
    ],
    ids=str,
)
def test_the_family_of_a_parameter(given: object, family: str) -> None:
    assert noted.family_of(given) == family


FAULT = ("sft/hf/families/granite.py", '"residual_multiplier"', '"attention_multiplier"')


@pytest.mark.grid
def test_a_fault_in_the_code_turns_exactly_its_card_red(tmp_path: Path) -> None:
    """In a copy of the repository, of which Granite reads the factor of the residual stream from another key."""
    for name in ("sft", "tests", "tools", "recipes", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    path, line, changed = FAULT
    text = (tmp_path / path).read_text()
    assert line in text
    (tmp_path / path).write_text(text.replace(line, changed, 1))
    families = "(granite-one or llama-one or qwen2-one)"
    command = [*("-m", "pytest", "-q", "-p", "no:cacheprovider", "--cards", "--junit-xml=results.xml")]
    command += ["tests/ranks/test_hf_variants.py", "-k", f"{families} and every_token"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    found = cards.results([tmp_path / "results.xml"])
    assert {family: cards.verdict(checks) for family, checks in found.items()} == {
        "llama": "partly tested",
        "qwen2": "partly tested",
        "granite": "FAILED",
    }
