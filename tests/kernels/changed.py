"""Which kinds of kernels a change can break, by the files that it touches.  Needs nothing but git.

python -m tests.kernels.changed      prints the kinds; nothing if the change touches no kernel
"""

import os
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FLASH4, _FFPA = "FlashAttention-4", "ffpa-attn"
_CALLS = ("sft/mcore/attention/flash_kernel.py", "sft/mcore/attention/package.py")
# Kind of compile_one.py -> files and folders.  A recipe or a family can add a configuration, but not break a kernel.
FILES: Mapping[str, tuple[str, ...]] = {
    _FLASH4: ("sft/mcore/attention/flash4.py", *_CALLS),
    _FFPA: ("sft/mcore/attention/ffpa.py", *_CALLS),
    "loss head": ("sft/mcore/loss/softmax_triton.py",),
    "linear attention": ("sft/mcore/linear_attention/fla_",),
}
# Configurations that represent a kind, by their text; the other kinds have few.
SAMPLE: Mapping[str, Collection[str]] = {
    _FLASH4: ("128/128, 4 heads a key", "64/64, 8 heads a key, window"),
    "linear attention": ("128/128, 3 heads a key, 4 taps",),
}
_EVERYTHING = ("tests/kernels/",)


def kinds() -> list[str]:
    """The kinds whose files differ from those of the commit $BASE, by default the one before this."""
    base = os.environ.get("BASE") or "HEAD~1"
    if _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}") is None:  # a clone without history
        return [*FILES]
    different = _git("diff", "--name-only", base) or ""
    new = _git("ls-files", "--others", "--exclude-standard") or ""
    return touched([*different.splitlines(), *new.splitlines()])


def touched(files: Collection[str]) -> list[str]:
    if any(file.startswith(_EVERYTHING) for file in files):
        return [*FILES]
    return [kind for kind, own in FILES.items() if any(file.startswith(own) for file in files)]


def is_in_sample(kind: str, text: str, of_kinds: Collection[str]) -> bool:
    """Whether a change of these kinds compiles this configuration."""
    return kind in of_kinds and (kind not in SAMPLE or text in SAMPLE[kind])


def _git(*arguments: str) -> str | None:
    """The output of git; None if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return None if done.returncode else done.stdout


if __name__ == "__main__":
    print(", ".join(kinds()))
