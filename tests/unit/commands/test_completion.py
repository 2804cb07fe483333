"""Completions in a shell: a real bash asks the real command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sft.commands.completion import _settings

ROOT = Path(__file__).resolve().parents[3]
ASK = """\
eval "$("$PYTHON" -c 'import argcomplete; print(argcomplete.shellcode(["sft"]))')"
COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9
read -ra COMP_WORDS <<< "$LINE"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete sft "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    "line, completions",
    [
        ("sft sc", ["score", "schema"]),
        ("sft check a.yaml parallel.cp_comm=a2", ["a2a", "a2a+p2p"]),
        ("sft check a.yaml --explain run.fp", ["run.fp8 "]),
    ],
)
def test_bash_completes(line: str, completions: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    program = tmp_path / "sft"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sft "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": path}
    bash = shutil.which("bash") or "bash"
    done = subprocess.run(
        [bash, "-c", ASK], env={**os.environ, **own, "LINE": line, "PYTHON": sys.executable}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.stdout.split("\n")[:-1], done.stderr) == (completions, "")


def test_settings() -> None:
    assert _settings("lora.ra") == ["lora.rank="]
    assert _settings("run.deterministic=") == ["run.deterministic=true", "run.deterministic=false"]
    assert _settings("run.fp8=t") == ["run.fp8=tensorwise"]
    assert _settings("run.fp8=") == [
        f"run.fp8={kind}" for kind in ("delayed", "tensorwise", "blockwise", "mxfp8", "null")
    ]
    assert _settings("optim.lr=") == _settings("gone.key=") == []
