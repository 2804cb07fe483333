"""Extends mkdocs: a link to a file of the repository outside docs/ leads to a copy of that file in the site.

    docs/start/install.md   [launch/install.sh](../../launch/install.sh)
    in the site             [launch/install.sh](../repository/launch/install.sh.txt)

A link to a folder is replaced by its text, because the site cannot list folders.  A page that loads anything from
another host is an error.  The theme loads one script from another host, for search without a server; our copy replaces
it.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
_INLINE = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_REFERENCE = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
_SHIM = "https://unpkg.com/iframe-worker/shim"
_LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"' >]+)""")


def on_post_page(output: str, page: Any, config: Any) -> str:
    output = output.replace(_SHIM, get_relative_url("javascripts/iframe-worker.js", page.url))
    if outside := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {outside[1]}; the site must work without a network.")
    return output


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Replaces the script in templates such as the page for missing addresses, which a server sends under any path."""
    return output.replace(_SHIM, "/javascripts/iframe-worker.js")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    def inline(match: re.Match[str]) -> str:
        outside = _outside(match[2], page.file.src_uri)
        if outside is None:
            return match[0]
        return f"[{match[1]}]({_copied(outside, page.file.src_uri, config, files)})" if outside.is_file() else match[1]

    def reference(match: re.Match[str]) -> str:
        outside = _outside(match[2], page.file.src_uri)
        return f"[{match[1]}]: {_copied(outside, page.file.src_uri, config, files)}" if outside else match[0]

    return _REFERENCE.sub(reference, _INLINE.sub(inline, markdown))


def on_post_build(config: Any) -> None:
    """Copies the text of all pages and the skill beside the site, for llms.txt, which links to them."""
    site = Path(config.site_dir)
    for page in (ROOT / "docs").rglob("*.md"):
        shutil.copy(page, site / page.relative_to(ROOT / "docs"))
    shutil.copytree(ROOT / "skills", site / "skills", dirs_exist_ok=True)
    index = site / "llms.txt"
    index.write_text(index.read_text(encoding="utf-8").replace("](../skills/", "](skills/"), encoding="utf-8")


def _outside(target: str, page: str) -> Path | None:
    """The file or folder of the repository that `target` names, if it exists and is not in docs/."""
    if "://" in target or target.startswith("#"):
        return None
    path = ROOT / os.path.normpath(Path("docs", page).parent / target.partition("#")[0])
    return path if path.exists() and not path.is_relative_to(ROOT / "docs") else None


def _copied(path: Path, page: str, config: Any, files: Any) -> str:
    """Adds a copy of `path` to the site, and returns the link to it from `page`."""
    uri = f"repository/{path.relative_to(ROOT)}.txt"
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return os.path.relpath(uri, Path(page).parent)
