"""Makes the cards of docs/cards: what tests showed about each family of models, and what is predicted for its recipes.

python -m tools.cards RESULTS.xml ...        writes cards from results of pytest (--junit-xml); `make cards` does both
python -m tools.cards --add RESULTS.xml ...  writes only the lines of which there are results

A card's JSON has the results of the tests of one commit.  `python -m tools.pages` adds the recipes of today to it, and
makes its page, the table of all cards, and the table of the README.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from sft.console import short_count
from sft.hf.families import FAMILIES, family_of
from sft.recipe.load import load_recipe
from tools import compiled_kernels, page_text, recipes_docs
from tools.plan_recipes import released_models

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "cards"
BEGIN, END = "<!-- made by tools/cards.py -->\n", "<!-- end of cards -->\n"
# Lines of a card -> what their tests show.  `@pytest.mark.card` of a test names a line.
CHECKS: Mapping[str, str] = {
    "conversion": "every tensor goes to Megatron and back, bit for bit",
    "token losses": "the loss of every token is that of transformers in float64, in nats",
    "gradients": "every gradient is that of transformers in float64, relative to its norm",
    "isolation": "replacing a document changes no bit of its neighbours' losses",
    "layouts": "two training steps have the losses of one process, relative",
    "resume": "a resumed run is equal to an uninterrupted one, bit for bit",
    "export": "transformers computes the trained losses with an export",
    "LoRA": "adapters of Linears have the gradients of merged weights, relative to their norm",
    "probes": "`sft probe leak` and `parity` find no problem",
    "memory": "counted bytes of a step are those predicted, relative",
}
PASSED, FAILED, PARTLY = "passed", "FAILED", "partly tested"
_PACKAGES = ("torch", "transformers", "megatron-core", "peft")
ESTIMATES = ROOT / "docs" / "numbers" / "estimates.md"
_LINK = "../numbers/estimates.md#compared-with-published-measurements"
_SHORT = {"meta-llama/Llama-3.1-8B-Instruct": "Llama-8B"}  # models by the names of ESTIMATES
_PREDICTED = {"gib": r"measured: (\d+) of", "step_s": r"a step ([\d.,]+) s", "mfu": r"(\d+%) MFU"}  # of a header
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| [^|]+ \| [\d.]+ \|$", re.M)  # source, case, published
_SHOWN = 2  # passed layouts of a line that a page names, the shortest; the JSON has all
Card = dict[str, Any]


def file_of(family: str) -> str:
    """The name of a family's files in docs/cards, without suffix: `mistral3-ministral3`"""
    return family.replace("/", "-")


def results(paths: Iterable[Path]) -> dict[str, dict[str, Card]]:
    """Family -> line of its card -> layouts that passed and failed, and the worst difference, from files of pytest.  A
    later file replaces results of the same test.

    Raises ValueError if a file has no test of a card.
    """
    cases: dict[str, tuple[dict[str, list[str]], bool]] = {}
    for path in paths:
        of_file = dict(_cases(path))
        if not of_file:
            raise ValueError(f"{path} has no result of a test that is marked with a line of a card")
        cases |= of_file
    of_family: dict[str, dict[str, Card]] = defaultdict(dict)
    for named, is_passed in cases.values():
        line = of_family[named["family"][-1]].setdefault(named["card"][-1], {"passed": [], "failed": []})
        line["passed" if is_passed else "failed"].append(named["layout"][-1])
        for worst, bar in zip(named.get("worst", ()), named.get("bar", ())):
            if float(worst) / float(bar) >= line.get("worst", -1.0) / line.get("bar", 1.0):
                line |= {"worst": float(worst), "bar": float(bar)}
    return {
        family: {name: _sorted(lines[name]) for name in CHECKS if name in lines} for family, lines in of_family.items()
    }


def _cases(path: Path) -> Iterator[tuple[str, tuple[dict[str, list[str]], bool]]]:
    """Each test of a card that ran: its name, its properties by name, and whether it passed."""
    for case in ElementTree.parse(path).iter("testcase"):
        named: dict[str, list[str]] = defaultdict(list)
        for item in case.iter("property"):
            named[item.get("name", "")].append(item.get("value", ""))
        if "card" in named and case.find("skipped") is None:
            is_passed = case.find("failure") is None and case.find("error") is None
            yield f"{case.get('classname')}::{case.get('name')}", (named, is_passed)


def _sorted(line: Card) -> Card:
    """Each layout once; a layout of which one test failed has failed."""
    failed = sorted({*line["failed"]})
    return line | {"passed": sorted({*line["passed"]} - {*failed}), "failed": failed, "tests": _count(line)}


def _count(line: Card) -> int:
    return len(line["passed"]) + len(line["failed"])


def write(checks: Mapping[str, Mapping[str, Card]], about: Mapping[str, Any]) -> None:
    """Writes the JSON of every family.  about: date, commit and versions of the tests"""
    FOLDER.mkdir(exist_ok=True)
    for family in FAMILIES:
        _write_one({"family": family, "verdict": PARTLY, **about, "checks": checks.get(family, {})})


def add(checks: Mapping[str, Mapping[str, Card]], commit: str) -> None:
    """Replaces lines of cards by these results, which have a commit of their own."""
    for family, lines in checks.items():
        card = load(family)
        card["checks"] |= {name: line | {"commit": commit} for name, line in lines.items()}
        _write_one(card)


def _write_one(card: Card) -> None:
    """The verdict follows from the lines; lines are in the order of CHECKS."""
    lines = {name: card["checks"][name] for name in CHECKS if name in card["checks"]}
    text = json.dumps(card | {"verdict": verdict(lines), "checks": lines})
    path = FOLDER / f"{file_of(card['family'])}.json"
    path.write_text(with_recipes(card["family"], text), encoding="utf-8")


def verdict(checks: Mapping[str, Card]) -> str:
    if any(line["failed"] for line in checks.values()):
        return FAILED
    return PASSED if checks.keys() == CHECKS.keys() else PARTLY


def with_recipes(family: str, before: str) -> str:
    """The JSON of a card with the recipes of today."""
    card = json.loads(before) | {"recipes": _recipes().get(family, [])}
    return json.dumps(card, indent=1, ensure_ascii=False) + "\n"


@cache
def _recipes() -> dict[str, list[Card]]:
    """Family -> its recipes: what their headers say, and which kernels of their attention compile."""
    of_family: dict[str, list[Card]] = defaultdict(list)
    with released_models():
        for path in sorted((ROOT / "recipes").rglob("*.yaml")):
            model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"].get("hf")
            family = _family_of(model) if model else None
            if family:
                config, header = load_recipe(str(path)).config, recipes_docs.header(path)
                row = {
                    "recipe": path.relative_to(ROOT).as_posix(),
                    "model": model,
                    "tokens": config.data.seq_length,
                    "hardware": header["Hardware"].rstrip("."),
                    **{name: _number(pattern, header["Expected"]) for name, pattern in _PREDICTED.items()},
                    "published": [] if config.lora.is_used else _published(model, config.data.seq_length),
                    "attention": compiled_kernels.lines(config),
                }
                of_family[family].append(row)
    return of_family


def _number(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _published(model: str, tokens: int) -> list[str]:
    """What other trainers published for a model and a length: `564 s/step (ALST; 8 H100)`"""
    name, length, publisher, texts = _SHORT.get(model, model.rpartition("/")[2]), short_count(tokens), "", []
    for source, case, published in _ROW.findall(ESTIMATES.read_text(encoding="utf-8")):
        setting = source.removeprefix("the same").lstrip(", ")
        if not source.startswith("the same"):
            publisher, _, setting = source.partition("; ")
        words, _, unit = case.rpartition(", ")
        if words.removesuffix(", FA2") == f"{name}, {length}":
            details = ", ".join(filter(None, (setting.partition(",")[0], words.partition(f"{length}, ")[2])))
            texts.append(f"{published} {unit} ({publisher}{'; ' if details else ''}{details})")
    return texts


def _family_of(model: str) -> str | None:
    """The entry of a model on the hub; None if tests have no config.json of it."""
    path = Path(model, "config.json")  # in the folder of `released_models`
    family = family_of(json.loads(path.read_text())) if path.exists() else None
    return None if family is None else next(name for name, entry in FAMILIES.items() if entry is family)


def page(family: str, before: str) -> str:
    """The page of a card, from its JSON; `before` is not read."""
    card = load(family)
    lines = [
        f"# Card of {family}",
        "",
        *page_text.folded(f"**{card['verdict'][0].upper()}{card['verdict'][1:]}.** {_about(card)}"),
        "",
        *(_row(name, card["checks"].get(name)) for name in CHECKS),
        *_recipe_lines(card["recipes"]),
    ]
    return "\n".join([*lines, ""])


def _about(card: Card) -> str:
    if not card["checks"]:
        return "No test has run."
    versions = ", ".join(f"{name} {number}" for name, number in card["versions"].items())
    return (
        f"Tests of {card['date']} on commit {card['commit']}: {versions}. Small random models, on CPUs, in fp32. "
        "[What the lines mean](index.md)."
    )


def _row(name: str, line: Card | None) -> str:
    """`- gradients: worst 3.3e-06 of 1.0e-05; 5 tests: cp, one, 3 more`"""
    if line is None:
        return f"- {name}: not tested"
    failed = (f"**{layout} FAILED**" if layout else "**FAILED**" for layout in line["failed"])
    shorter = (layout.replace("=true", "").replace("train.recompute=", "") for layout in line["passed"])
    passed = sorted(filter(None, shorter), key=len)
    layouts = [*failed, *passed[:_SHOWN], *[f"{len(passed) - _SHOWN} more"] * (len(passed) > _SHOWN)]
    worst = f"worst {line['worst']:.1e} of {line['bar']:.1e}; " if "worst" in line else ""
    tests = f"{line['tests']} test{'s' * (line['tests'] != 1)}"
    tests += f" on commit {line['commit']}" if "commit" in line else ""
    return f"- {name}: {worst}{tests}{': ' if layouts else ''}{', '.join(layouts)}"


def _recipe_lines(recipes: Sequence[Card]) -> Iterator[str]:
    if not recipes:
        return
    names = ", ".join(f"[{_stem(row)}](../../{row['recipe']})" for row in recipes)
    yield from ("", "## Recipes", "")
    yield from page_text.folded(f"{names}. [Predicted speeds and memory](../reference/recipes.md) are unverified.")
    if any(row["published"] for row in recipes):
        link = f"[Published]({_LINK}) by other trainers for the same length, on other layouts:"
        yield from ("", *page_text.folded(link), "")
    for row in recipes:
        if row["published"] and row["step_s"]:
            own = f"- {_stem(row)}: predicted {row['step_s']} s/step on {row['hardware'].split()[0]} GPUs; published "
            yield from page_text.folded(own + "; ".join(row["published"]))
    kernels = "; ".join(dict.fromkeys(line for row in recipes for line in row["attention"]))
    yield from ("", *page_text.folded(f"Attention, by widths of heads: {kernels} ([how](../numbers/kernels.md))."))


def _stem(row: Card) -> str:
    return Path(row["recipe"]).stem


def load(family: str) -> Card:
    return dict(json.loads((FOLDER / f"{file_of(family)}.json").read_text(encoding="utf-8")))


def index(before: str) -> str:
    """The page of all cards, with a new table between its marks."""
    columns = ("family", "card", "token losses", "gradients")
    rows = ["", f"| {' | '.join(columns)} |", "|---|---|---:|---:|"]
    for family in FAMILIES:
        card = load(family)
        checks = card["checks"]
        worst = [f"{checks[name]['worst']:.1e}" if "worst" in checks.get(name, {}) else "" for name in CHECKS]
        losses, gradients = (worst[[*CHECKS].index(name)] for name in ("token losses", "gradients"))
        name = f"[{family}]({file_of(family)}.md)"
        rows.append(f"| {name} | {_badge(card)} | {losses} | {gradients} |")
    return page_text.replaced(before, BEGIN, END, "\n".join([*rows, "", ""]))


def _badge(card: Card) -> str:
    failed = ", ".join(name for name, line in card["checks"].items() if line["failed"])
    return f"**FAILED**: {failed}" if failed else str(card["verdict"])


def summary(before: str) -> str:
    """The README with the numbers of cards between its marks."""
    cards = [load(family) for family in FAMILIES]
    count = {name: sum(card["verdict"] == name for card in cards) for name in (PASSED, PARTLY, FAILED)}
    failed = [card["family"] for card in cards if card["verdict"] == FAILED]
    tests = sum(line["tests"] for card in cards for line in card["checks"].values())
    dates = sorted({card["date"] for card in cards})
    passed = "All" if count[PASSED] == len(cards) else f"{count[PASSED]} of"
    others = [f"{count[PARTLY]} are partly tested", f"{count[FAILED]} failed: {', '.join(failed)}"]
    others = [other for other, name in zip(others, (PARTLY, FAILED)) if count[name]]
    text = (
        f"**{passed} {len(cards)} families pass the {len(CHECKS)} checks of their [card](docs/cards/index.md), as "
        f"small random models on CPUs**: {', '.join(CHECKS)}. {'; '.join([*others, ''])}{tests:,} tests, {dates[-1]}."
    )
    return page_text.replaced(before, BEGIN, END, "\n".join(["", *page_text.folded(text), "", ""]))


def about(commit: str | None) -> dict[str, Any]:
    """Date and versions of what runs now, and the commit of the tests.  None: the current commit"""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = commit or subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    versions = {name: version(name) for name in _PACKAGES} | {"Python": platform.python_version()}
    return {"date": datetime.date.today().isoformat(), "commit": commit.strip() or "unknown", "versions": versions}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.xml")
    parser.add_argument("--add", action="store_true", help="leave the other lines of cards as they are")
    parser.add_argument("--commit", help="on which the tests ran (default: the current one)")
    arguments = parser.parse_args(argv)
    of_family = results(arguments.results)
    now = about(arguments.commit)
    if arguments.add:
        add(of_family, now["commit"])
    else:
        write(of_family, now)
    for family, checks in of_family.items():
        if verdict(checks) == FAILED:
            names = ", ".join(name for name, line in checks.items() if line["failed"])
            print(f"the card of {family} has FAILED: {names}", file=sys.stderr)
    print(f"{len(of_family)} families have results; write the pages: python -m tools.pages")
    return int(any(verdict(checks) == FAILED for checks in of_family.values()))


if __name__ == "__main__":
    sys.exit(main())
