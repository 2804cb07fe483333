"""One process of a node compiles the kernels of linear attention, and all then have them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft.console import Console
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.run.compilation import compile_first
from tests.launching import environments

# Stands in for FLA: the first process writes an entry of the cache, which the other one must find.
RANK = """
import os, time
from pathlib import Path
from types import SimpleNamespace

from sft.console import Console
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.run import compilation

folder = Path(os.environ["TRITON_CACHE_DIR"])

def compile_kernels(self, config, device):
    print("had", len(list(folder.iterdir())), flush=True)
    time.sleep(0.2)  # the other process comes meanwhile
    (folder / "entry").touch()

FlaKernel.compile = compile_kernels
backend = SimpleNamespace(kernels={"linear attention": FlaKernel(None)}, config=None)
compilation.compile_first(backend, None, Console(int(os.environ["LOCAL_RANK"])))
"""


def test_one_process_of_a_node_compiles_first(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    own = {"TRITON_CACHE_DIR": str(folder), "TMPDIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK], env={**rank, **own}, stdout=-1, text=True)
        for rank in reversed(environments(2))  # rank 1 comes first, and must wait
    ]
    second, first = (process.communicate()[0] for process in processes)
    assert second == "had 1\n"
    begin, had, end = first.splitlines()
    assert begin == (
        "compiling kernels of linear attention: minutes on the first run with these sizes; later runs find them in "
        f"{folder}"
    )
    assert had == "had 0" and end.endswith(f" s: 1 new entries in {folder}")


def test_runs_without_fla_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    backend: Any = SimpleNamespace(kernels={"linear attention": TorchDeltaKernel()})
    compile_first(backend, torch.device("cpu"), Console(0))
    assert capsys.readouterr().out == ""
