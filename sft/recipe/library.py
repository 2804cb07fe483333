"""Lists the recipes that come with sft, in a repository or installed from a wheel."""

import difflib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from sft.errors import ConfigError

_HEADER = re.compile(r"# (\w+): *(.*)")
_LINES_OF_HEADER = 5


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A recipe of the library, with the lines of its header: {"Purpose": "trains ...", "Hardware": ..., ...}."""

    path: Path
    header: dict[str, str]

    @property
    def name(self) -> str:
        return self.path.stem


def folder() -> Path | None:
    """The folder of the recipes: recipes/ of the repository, or share/sft/recipes of the environment."""
    beside = Path(__file__).resolve().parents[2] / "recipes"
    installed = Path(sysconfig.get_path("data")) / "share" / "sft" / "recipes"
    return next((path for path in (beside, installed) if (path / "demo.yaml").is_file()), None)


def recipes() -> list[Listed]:
    """All recipes: those written by hand, and then those of the planner, each in the order of names.

    Raises ConfigError if they are not installed.
    """
    library = folder()
    if library is None:
        raise ConfigError(
            "the recipes of sft are not beside the package and not in share/sft/recipes of this environment.  Install "
            "the wheel again, or write a recipe with sft init --model NAME."
        )
    files = [*sorted(library.glob("*.yaml")), *sorted((library / "planned").glob("*.yaml"))]
    return [Listed(path=file, header=_header(file)) for file in files]


def find(name: str) -> Listed:
    """The recipe of this name, with or without .yaml.  Raises ConfigError with similar names."""
    known = {recipe.name: recipe for recipe in recipes()}
    stem = Path(name).name.removesuffix(".yaml")
    if stem not in known:
        close = difflib.get_close_matches(stem, known, n=3, cutoff=0.5)
        advice = f"Did you mean {' or '.join(close)}?" if close else "`sft init` lists all names."
        raise ConfigError(f"there is no recipe {name}.  {advice}  For a model, use sft init --model NAME.")
    return known[stem]


def _header(file: Path) -> dict[str, str]:
    lines = file.read_text(encoding="utf-8").splitlines()[:_LINES_OF_HEADER]
    return {match[1]: match[2] for line in lines if (match := _HEADER.fullmatch(line))}
