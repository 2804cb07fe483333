"""Who may import whom: the contracts of setup.cfg hold, and they notice when they do not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ["torch", "megatron", "transformer_engine", "transformers", "datasets", "pandas", "tensorboard"]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """The import linter on `root`/sft with `root`/setup.cfg."""
    program = "from importlinter.cli import lint_imports_command as lint; lint()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    "module, line, contract",
    [
        ("sft/parallel/context_parallel.py", "import sft.data", "Imports point one way"),
        ("sft/config/__init__.py", "import sft.parallel.layout", "Imports point one way"),
        ("sft/somewhere_new.py", "", "Imports point one way"),
        ("sft/batch.py", "from megatron.core import parallel_state", "Only sft.mcore imports megatron"),
        ("sft/data/chat/encode_chat.py", "import transformer_engine.pytorch", "Only sft.mcore imports megatron"),
        ("sft/mcore/engine.py", "import sft.data", "sft.mcore and sft.data meet only at sft.batch"),
        ("sft/errors.py", "import tools.bench.cp_index", "sft imports neither tools nor tests"),
        ("sft/errors.py", "def late():\n    import tests.conftest", "sft imports neither tools nor tests"),
    ],
)
def test_contracts_notice(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    shutil.copytree(ROOT / "sft", tmp_path / "sft", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / module, "a") as source:
        source.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [text for text in done.stdout.splitlines() if "BROKEN" in text]
    assert any(text.startswith(contract) for text in broken), done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "sft.cli",
        "sft.recipe.load",
        "sft.parallel.layout",
        "sft.config",
        "sft.parallel.context_parallel",
        "sft.estimate.memory",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(module: str) -> None:
    """`sft --help` and a wrong recipe must be answered at once: no torch, no megatron, no transformers."""
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
