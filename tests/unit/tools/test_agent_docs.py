"""What an assistant reads: `sft check` accepts the examples of the skill, and its commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from sft.cli import main
from sft.config import yaml
from tests.docs.blocks import check_sft
from tools import agent_docs

ROOT = Path(__file__).resolve().parents[3]
SKILL = (ROOT / "skills/sft/SKILL.md").read_text()
EXAMPLES = re.findall(r"### ([^\n]+)\n\n([^\n]+)\n\n```yaml\n(.*?)```", SKILL, re.DOTALL)


@pytest.mark.parametrize("number", range(len(agent_docs.EXAMPLES)), ids=[e.title for e in agent_docs.EXAMPLES])
@pytest.mark.usefixtures("released_models")
def test_the_check_accepts_the_example(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A part is merged into the recipe that the line above it names, as the skill says."""
    example, (title, line, text) = agent_docs.EXAMPLES[number], EXAMPLES[number]
    assert title == example.title
    keys: Any = yaml.plain(yaml.read(text, "SKILL.md"))
    if line.startswith("Merge"):
        (base,) = re.findall(r"recipes/\S+\.yaml", line)
        whole: Any = yaml.plain(yaml.read((ROOT / base).read_text(), base))
        keys = {group: {**whole.get(group, {}), **keys.get(group, {})} for group in (whole | keys)}
    Path("example.yaml").write_text("".join(f"{group}: {yaml.write(value)}\n" for group, value in keys.items()))
    words = ["check", "example.yaml", "--world-size", str(example.gpus), "--no-data"]
    assert main(words if "device: cpu" in text else [*words, "--gpu", "h100"]) == 0, capsys.readouterr().err


def test_every_command_of_the_skill_exists() -> None:
    commands = re.findall(r"`sft ([^`]*)`", SKILL)
    assert len(commands) >= 7
    for command in commands:
        check_sft(command.split())


def test_the_index_has_every_page_once() -> None:
    pages = re.findall(r"\]\((.+?\.md)\): (.*)", (ROOT / "docs/llms.txt").read_text())
    docs = ROOT / "docs"
    named = [page for page, _ in pages if page != "../skills/sft/SKILL.md"]
    all_pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    of_families = {page for page in all_pages if page.startswith("cards/")} - {"cards/index.md"}
    assert sorted(["index.md", *named]) == sorted(all_pages - of_families)
    assert [page for page, about in pages if len(about) < 10] == []
