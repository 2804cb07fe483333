"""Finds names, paths and links in prose whose targets do not exist, because they were renamed, moved or removed.

The form of a word in backticks decides how it is checked:

    `sft/batch.py` `pack.py` `data/packing/`      a path: the file or folder must exist
    `batch.Microbatch` `data.seq_length`          a dotted name: the module or class `batch` must define `Microbatch`,
                                                  or a recipe must have the key
    `Microbatch` `_resolves` `check(files)`       a class, a private name, a call: our code must contain the name
    [text](page.md#heading)                       a link: the page and its heading must exist

Names of other packages count as existing if our code uses them, or if `names.FOREIGN` lists them.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from sft.config.keys import OPEN, RENAMED, in_schema, leaves, sections
from tools.lint.names import Names
from tools.lint.source import Fault, Source

THEIRS = "docs/how-to/move.md"  # first cells of its tables are keys of other trainers, which tests/docs checks
_ROOMS = ("sft", "tools", "tests", "docs", "recipes", "launch")
_TICKED = re.compile(r"`([^`\n]+)`")
_BARE_PATH = re.compile(rf"(?<![\w/.*-])(?:{'|'.join(_ROOMS)})/[\w./-]*\w\.(?:py|md|yaml|svg|png|json|sbatch|sh)\b")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"[\w.-]+(/[\w.*-]+)*(\.py|/)")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_CALL = re.compile(r"([A-Za-z_][\w.]*)\(.*\)", re.DOTALL)
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
_PRIVATE = re.compile(r"_[a-z]\w*")
_FILE_ENDINGS = "model json jsonl jinja yaml md png svg txt pt parquet gz lock log sbatch cfg html".split()


def check(root: Path, checked: list[Source], files: list[Source]) -> list[Fault]:
    """Faults in the prose of `checked`.  Names may be defined in any of `files`."""
    names = Names.of(files)
    faults = []
    for file in checked:
        for line, text in file.prose:
            stale = [*_stale_names(root, file, text, names), *_stale_paths(root, file, text)]
            stale += [] if file.is_python else _stale_links(root, file, text)
            faults += [Fault(file.path, line, "reference", f"{fault}; use the current name") for fault in stale]
    return [*faults, *_pages_outside_the_site(root, checked)]


def _pages_outside_the_site(root: Path, checked: list[Source]) -> Iterator[Fault]:
    """Faults of pages of docs/ that mkdocs.yml does not list.  `make docs` finds them, too, but needs more packages."""
    site = root / "mkdocs.yml"
    text = site.read_text(encoding="utf-8") if site.exists() else ""
    listed, beside = set(re.findall(r"[\w./-]+\.md\b", text)), re.findall(r"^not_in_nav: (\S+)", text, re.M)
    for file in checked:
        page = file.path.removeprefix("docs/")
        is_listed = page in listed or any(fnmatchcase(f"/{page}", pattern) for pattern in beside)
        if text and page != file.path and not is_listed:
            yield Fault(file.path, 1, "reference", "mkdocs.yml does not list this page; add it to nav")


def _stale_names(root: Path, file: Source, text: str, names: Names) -> Iterator[str]:
    for ticked in _TICKED.findall(text.partition(" | ")[2] if file.path == THEIRS and text[:1] == "|" else text):
        if ticked in names.uses:
            continue
        if call := _CALL.fullmatch(ticked):
            ticked = call[1]
            is_stale = not _resolves(ticked, names, file) if "." in ticked else ticked not in names.uses
        elif _PATH.fullmatch(ticked):
            is_stale = not _exists(root, file, ticked)
        elif _DOTTED.fullmatch(ticked):
            is_stale = not _resolves(ticked, names, file)
        else:
            is_stale = bool(_CLASS.fullmatch(ticked) and not ticked.isupper() or _PRIVATE.fullmatch(ticked))
            is_stale = is_stale and ticked not in names.uses
        if is_stale:
            yield f"`{ticked}` does not exist"


def _exists(root: Path, file: Source, path: str) -> bool:
    """Whether `path` exists in the repository, or looks like a path in a user's folder: `runs/a/`, `stacks/`."""
    first = path.split("/")[0]
    bases = (root, root / "sft", root / "tests", (root / file.path).parent)
    if any(next(base.glob(path.rstrip("/")), None) for base in bases):
        return True
    if "/" not in path:  # only a file name
        return "*" in path or any(next((root / top).rglob(path), None) for top in ("sft", "tools", "tests"))
    is_ours = first in _ROOMS or ((root / "sft" / first).is_dir() and path.count("/") + path.endswith(".py") > 1)
    return not is_ours


def _resolves(dotted: str, names: Names, file: Source) -> bool:
    """Whether `dotted` exists.

    A name that begins with a variable of the module always exists, unless its second part looks like a class.
    """
    first, second, *_ = parts = dotted.split(".")
    is_of_variable = first in names.local.get(file.path, ()) and not second.lstrip("_")[:1].isupper()
    if parts[-1] in _FILE_ENDINGS or dotted in names.uses or is_of_variable or first in names.foreign:
        return True
    is_key = in_schema(dotted) in leaves() or dotted in RENAMED or dotted in sections() or dotted.startswith(OPEN)
    if first in sections() and (is_key or parts[-1].isupper()):  # `train.SOURCE` stands for one key per source
        return True
    in_tests = file.path.startswith("tests/")
    if names.has_scope(first, in_tests=in_tests):
        return names.has(dotted, in_tests=in_tests)
    return first in (names.uses if file.is_python else names.imported)


def _stale_paths(root: Path, file: Source, text: str) -> Iterator[str]:
    for path in _BARE_PATH.findall(_TICKED.sub("", text)):
        if not _exists(root, file, path):
            yield f"{path} does not exist"


def _stale_links(root: Path, file: Source, text: str) -> Iterator[str]:
    for target in _LINK.findall(text):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        page = (root / file.path).parent / path if path else root / file.path
        if not page.exists():
            yield f"the file of link {target} does not exist"
        elif heading and heading not in _headings(page):
            yield f"the heading of link {target} does not exist"


def _headings(page: Path) -> set[str]:
    """The headings of a page in the form of GitHub's links: "What `sft check` says" -> what-sft-check-says"""
    titles = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
