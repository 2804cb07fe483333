"""launch/install.sh with an interpreter that records its calls; and the settings that launch/Dockerfile and make share
with it."""

import json
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORD = """
import json, os, shutil, sys
with open(os.environ["CALLS"], "a") as calls:
    kept = {name: os.environ.get(name) for name in ("CPATH", "NVTE_FRAMEWORK")}
    calls.write(json.dumps({"args": sys.argv[1:], "folder": os.getcwd(), "env": kept}) + "\\n")
if sys.argv[1:3] == ["-m", "venv"]:
    os.makedirs(sys.argv[3] + "/bin")
    shutil.copy(sys.argv[0], sys.argv[3] + "/bin/python")
elif sys.argv[1] == "-c" and "sysconfig" in sys.argv[2]:
    print("/env/packages")
elif os.environ.get("FAILS", "nothing") in sys.argv:
    sys.exit("it cannot be installed")
"""
PIP = ["-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--constraint", "constraints.txt"]


def install(tmp_path: Path, *args: str, **env: str) -> tuple[int, str, list[dict]]:
    """The exit code, the output, and the calls of Python in order."""
    calls, python = tmp_path / "calls.jsonl", tmp_path / "python"
    python.write_text(f"#!{sys.executable} -IS\n{RECORD}")
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in ("CPATH", "NVTE_FRAMEWORK")}
    clean |= {"PYTHON": str(python), "CALLS": str(calls)} | env
    command = [str(ROOT / "launch/install.sh"), *args]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=240)
    made = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    return done.returncode, done.stderr, made


def test_the_environment_has_the_versions_of_the_constraints(tmp_path: Path) -> None:
    code, _, calls = install(tmp_path, "--extras", "fla", "--extras", "dev,plot", "my env")
    assert code == 0
    assert [call["args"] for call in calls] == [
        ["-m", "venv", str(tmp_path / "my env")],
        [*PIP, "--editable", ".[fla,dev,plot]"],
    ]
    assert {call["folder"] for call in calls} == {str(ROOT)}  # VENV is in the caller's folder, the package in ours


def test_transformer_engine_is_compiled_for_the_torch_that_is_there(tmp_path: Path) -> None:
    code, _, calls = install(tmp_path, "--te", "env", CPATH="/mine")
    assert code == 0
    assert [call["args"] for call in calls][1:2] == [[*PIP, "--editable", "."]]
    assert [call["args"] for call in calls][3:5] == [
        [*PIP, "setuptools", "wheel", "ninja"],
        [*PIP, "--no-build-isolation", "transformer-engine[core_cu13,pytorch]"],
    ]
    headers = "/env/packages/nvidia/cudnn/include:/env/packages/nvidia/nccl/include:/mine"
    assert calls[4]["env"] == {"CPATH": headers, "NVTE_FRAMEWORK": "pytorch"}
    assert "import torch, transformer_engine.pytorch" in calls[5]["args"][1] and len(calls) == 6


def test_without_an_index_packages_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    code, _, calls = install(tmp_path, "--wheels", "wheels", "--te", "env")
    assert code == 0
    installs = [call["args"] for call in calls if "pip" in call["args"]]
    assert len(installs) == 3
    for args in installs:
        assert args[len(PIP) : len(PIP) + 3] == ["--no-index", "--find-links", str(tmp_path / "wheels")]


@pytest.mark.parametrize("failing, num_calls", [(".", 2), ("ninja", 4)])
def test_nothing_follows_a_failure(tmp_path: Path, failing: str, num_calls: int) -> None:
    code, said, calls = install(tmp_path, "--te", "env", FAILS=failing)
    assert code != 0 and "it cannot be installed" in said and len(calls) == num_calls


@pytest.mark.parametrize("args", ["", "--extras", "--wheels", "env other", "--tee env", "--te"])
def test_other_arguments_are_answered_with_the_usage(tmp_path: Path, args: str) -> None:
    code, said, calls = install(tmp_path, *args.split())
    assert code == 2 and said.startswith("usage: ") and calls == []


def test_the_image_and_make_install_by_the_same_script() -> None:
    dockerfile, makefile = (ROOT / "launch/Dockerfile").read_text(), (ROOT / "Makefile").read_text()
    assert re.search(r"^RUN .*\blaunch/install\.sh --te .*/opt/venv$", dockerfile, re.MULTILINE)
    assert "launch/install.sh $(INSTALL) --extras dev,plot $(VENV)" in makefile
    assert "pip install" not in dockerfile
    (image,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-cudnn-devel-", dockerfile, re.MULTILINE)
    (cuda,) = re.findall(r"^cuda-toolkit==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert image == cuda  # one of them compiles Transformer Engine, which then runs with the other


def test_constraints_name_every_package_that_is_asked_for() -> None:
    """Otherwise pip would install whatever version is the newest on that day."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = [setup["options.extras_require"][name] for name in ("te", "fla", "kernels", "plot", "dev")]
    wanted = re.findall(r"^([\w-]+)", "\n".join([setup["options"]["install_requires"], *extras]), re.MULTILINE)
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {*map(str.lower, wanted), "setuptools", "wheel", "ninja"} - {*pinned} == set()


def test_make_lets_python_keep_bytecode() -> None:
    """Without bytecode, each process that a test starts would compile torch and megatron-core again."""
    show = "include Makefile\nshow:\n\t@printenv PYTHONDONTWRITEBYTECODE || echo unset\n"
    command = ["make", "--silent", "--file=-", "show"]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, input=show, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "unset\n"
