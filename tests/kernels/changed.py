"""Prints which kinds of kernels a change can break, by the files that it touches.  Needs only git.

python -m tests.kernels.changed      prints the kinds; nothing if the change touches no kernel
"""

import os
import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLASH4, FFPA, LOSS, LINEAR = "FlashAttention-4", "ffpa-attn", "loss head", "linear attention"
REFUSED = "refused"  # what both packages of attention must still refuse
_CALLS = (
    "sft/mcore/attention/flash_kernel.py",
    "sft/mcore/attention/flash_call.py",
    "sft/mcore/attention/parent_keys.py",
    "sft/mcore/attention/package.py",
)
_FLASH4, _FFPA = "sft/mcore/attention/flash4.py", "sft/mcore/attention/ffpa.py"
# Kind of compile_one.py -> files and folders.  A recipe or a family can add a configuration, but not break a kernel.
FILES: Mapping[str, tuple[str, ...]] = {
    FLASH4: (_FLASH4, *_CALLS),
    FFPA: (_FFPA, *_CALLS),
    REFUSED: (_FLASH4, _FFPA, *_CALLS),
    LOSS: ("sft/mcore/loss/softmax_triton.py",),
    LINEAR: ("sft/mcore/linear_attention/fla_", "sft/mcore/linear_attention/ssd_fla.py"),
}
_EVERYTHING = ("tests/kernels/",)
_PINS = "constraints.txt"
_ATTENTION = (FLASH4, FFPA, REFUSED)
# Start of a package's name in _PINS -> the kinds that it compiles
PACKAGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi"), _ATTENTION),
    "ffpa-attn": (FFPA, REFUSED),
    "triton": (LOSS, LINEAR),
    "fla-core": (LINEAR,),
}


def kinds() -> list[str]:
    """The kinds whose files or packages differ from those of the commit $BASE, by default the one before this."""
    found = files()
    return [*FILES] if found is None else touched(found, _git("diff", "--unified=0", _base(), "--", _PINS) or "")


def files() -> list[str] | None:
    """The files that differ from those of the commit $BASE; None in a clone without that commit."""
    if _git("rev-parse", "--verify", "--quiet", f"{_base()}^{{commit}}") is None:
        return None
    different = _git("diff", "--name-only", _base()) or ""
    new = _git("ls-files", "--others", "--exclude-standard") or ""
    return [*different.splitlines(), *new.splitlines()]


def _base() -> str:
    return os.environ.get("BASE") or "HEAD~1"


def touched(files: Collection[str], pins: str = "") -> list[str]:
    """The kinds that need one of the files, or a package on a changed line.  pins: the diff of _PINS"""
    if any(file.startswith(_EVERYTHING) for file in files):
        return [*FILES]
    packages = re.findall(r"^[+-](\w[\w-]*)==", pins, flags=re.MULTILINE)
    by_package = {kind for name, of in PACKAGES.items() if any(x.startswith(name) for x in packages) for kind in of}
    by_file = {kind for kind, own in FILES.items() if any(file.startswith(own) for file in files)}
    return [kind for kind in FILES if kind in by_package | by_file]


def commit() -> str:
    return (_git("rev-parse", "HEAD") or "").strip()


def _git(*arguments: str) -> str | None:
    """The output of git; None if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return None if done.returncode else done.stdout


if __name__ == "__main__":
    print(", ".join(kinds()))
