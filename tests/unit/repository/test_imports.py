"""Allowed imports: the contracts of setup.cfg hold, and the linter finds breaches of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ["torch", "megatron", "transformer_engine", "transformers", "datasets", "pandas", "tensorboard"]
HEAVY += ["huggingface_hub"]  # only names on the hub need it


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """The import linter on `root`/sft with `root`/setup.cfg."""
    program = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", program, "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)


def test_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


BREACHES = {  # module: lines added to it
    "sft/parallel/context_parallel.py": "import sft.data",
    "sft/batch.py": "from megatron.core import parallel_state",
    "sft/data/chat/encode_chat.py": "import transformer_engine.pytorch",
    "sft/mcore/engine.py": "import sft.data",
    "sft/layers/kinds.py": "import torch",
    "sft/weights/kept.py": "import sft.weights.export.export_hf",
    "sft/mcore/modules/norm.py": "import sft.mcore.model.layer",
    "sft/errors.py": "import tools.bench.harness\ndef late():\n    import tests.conftest",
    "sft/somewhere_new.py": "",
}
REPORTED = [
    "sft.parallel.context_parallel -> sft.data ",
    "sft.batch -> megatron ",
    "sft.data.chat.encode_chat -> transformer_engine ",
    "sft.mcore.engine -> sft.data ",
    "sft.mcore and sft.data meet only at sft.batch BROKEN",
    "sft.layers is not allowed to import torch:",
    "sft.weights.kept -> sft.weights.export.export_hf ",
    "sft.mcore.modules.norm -> sft.mcore.model.layer ",
    "sft.errors -> tools ",
    "sft.errors -> tests ",
    "The following modules are not listed as layers:\n\n- sft.somewhere_new\n",
]


def test_contracts_notice(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    shutil.copytree(ROOT / "sft", tmp_path / "sft", ignore=shutil.ignore_patterns("__pycache__"))
    for module, lines in BREACHES.items():
        with open(tmp_path / module, "a") as source:
            source.write(f"\n{lines}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for breach in REPORTED:
        assert breach in done.stdout, breach


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    """Help, and errors about recipes and data, must appear at once: without imports of torch, megatron or
    transformers."""
    modules = (
        "sft.cli, sft.recipe.load, sft.config, sft.parallel.layout, sft.parallel.context_parallel, "
        "sft.estimate.memory, "
        "sft.data.cache.prepare, sft.data.inspect.forecast, sft.data.inspect.survey, sft.recipe.run_checks, sft.hf.hub"
    )
    program = f"import sys, {modules}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


LARGE = (
    "model.num_layers=80 model.hidden_size=8192 model.ffn_hidden_size=28672 data.train={model}/config.json data.eval={}"
)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["check", "recipes/demo.yaml", "--no-data", "--world-size", "2"], 0),
        (["check", "recipes/demo.yaml", "--world-size", "2", "--gpu", "h100", *LARGE.split()], 2),
        (["plan", "--model", "{model}", "--gpus", "8", "--seq-length", "65536"], 0),
    ],
    ids=["check", "check refuses what does not fit", "plan"],
)
def test_predictions_need_no_torch(command: list[str], code: int, tmp_path: Path) -> None:
    """A laptop without torch can check a recipe and plan a layout."""
    shutil.copy(ROOT / "tests/unit/fixtures/released/qwen3_8b.json", tmp_path / "config.json")
    words = [word.replace("{model}", str(tmp_path)) for word in command]
    program = f"import sys; sys.modules['torch'] = None; from sft.cli import main; code = main({words!r}); "
    program += "print('imported', code, [name for name in sys.modules if name.startswith('sft.mcore')])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1:] == [f"imported {code} []"], done.stdout + done.stderr
