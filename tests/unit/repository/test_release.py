"""A release: sdist and wheel have what they need, the installed command runs, and all files name one version."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import sft

ROOT = Path(__file__).resolve().parents[3]
SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def run(*command: str, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(pattern: str, folder: str) -> set[str]:
    """Files of a folder of the repository, relative to the repository."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the sdist, without a package index."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("sft", "recipes"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree" / name)
    sdist = run(sys.executable, "-c", SDIST, str(folder), cwd=folder / "tree").splitlines()[-1]
    with tarfile.open(folder / sdist) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.glob("sft_megatron-*/")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--wheel-dir", str(folder / "wheels"), str(source), cwd=folder)
    [built] = (folder / "wheels").iterdir()
    return built


def test_a_wheel_has_every_module_and_recipe(wheel: Path) -> None:
    """It would lack a folder of the package without __init__.py, or of recipes that setup.cfg does not name."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    packed = {re.sub(r"^sft_megatron-[^/]*\.data/data/share/sft/", "", name) for name in names}
    assert packed == files("*.py", "sft") | files("*.yaml", "recipes") | {"sft/py.typed"}
    assert {path.suffix for path in (ROOT / "sft").rglob("*") if path.is_file()} - {".pyc"} == {".py", ".typed"}


def test_an_installed_wheel_runs_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    """The environment sees the dependencies of this one, but not its sft."""
    venv.create(tmp_path / "env", symlinks=True)
    python, command = tmp_path / "env/bin/python", str(tmp_path / "env/bin/sft")
    packages = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel), cwd=tmp_path)
    where = run(str(python), "-c", "import sft; print(sft.__file__, sft.__version__)", cwd=tmp_path)
    assert where == f"{packages}/sft/__init__.py {sft.__version__}\n"
    assert run(command, "init", cwd=tmp_path).split()[0] == "demo"
    run(command, "init", "demo", "--out", "demo.yaml", cwd=tmp_path)
    assert "layout" in run(command, "check", "demo.yaml", "--world-size", "2", "--no-data", cwd=tmp_path)


def test_all_files_name_one_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## ([0-9.]+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert (cited["version"], str(cited["date-released"])) == released.groups()
    assert cited["version"] == sft.__version__
