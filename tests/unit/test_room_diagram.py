"""docs/architecture.md shows the rooms and arrows of the import contract."""

from pathlib import Path

from tools.room_diagram import END, START, diagram, layers, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_the_contract_of_today() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert page(text) == text


def test_every_room_is_in_the_contract_once() -> None:
    rooms = sorted(room for layer in layers() for room in layer)
    entries = {
        path.stem for path in (ROOT / "sft").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms == sorted(entries - {"__init__"})


def test_a_small_house(tmp_path: Path) -> None:
    (tmp_path / "sft" / "data").mkdir(parents=True)
    (tmp_path / "sft" / "data" / "__init__.py").write_text('"""Rows\nto packs.  And more.\n\nDetails."""\n')
    (tmp_path / "sft" / "cli.py").write_text('"""Arguments."""\n')
    (tmp_path / "sft" / "errors.py").write_text('"""What users cause: mistakes."""\n')
    contract = "[importlinter:contract:layers]\nlayers =\n    (cli)\n    (data) | (errors)\n"
    (tmp_path / "setup.cfg").write_text(contract)
    drawn = (
        "  cli           Arguments\n      |\n      v\n  data          Rows to packs\n  errors        What users cause\n"
    )
    assert diagram(tmp_path) == drawn
    assert page(f"# A\n{START}old\n{END}after\n", tmp_path) == f"# A\n{START}{drawn}{END}after\n"
