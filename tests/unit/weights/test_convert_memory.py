"""The memory of a conversion does not grow with the model; the system measures it, in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from tests.unit.fixtures import hf

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "num_hidden_layers": 4,
}
MODEL = 76 * MIB  # 17 MiB per layer, 8 MiB for embedding and output together; the largest tensor has 4 MiB
BLOCK = 2 * MIB  # replaces import_hf.BLOCK_BYTES, 256 MiB, and safetensors_files.MAPPED_BYTES, 64 MiB
# An import holds a block; an export holds one of our tensors (linear_fc1: 8 MiB) and the part of it that it reads; the
# allocator keeps a few of each.  A process that held the whole model would take MODEL.
# A merged export holds two weights with their sums (4 MiB each), and blocks of them in fp32.
IMPORT_BOUND, EXPORT_BOUND, MERGED_BOUND = 32 * MIB, 48 * MIB, 48 * MIB

# The small first model makes the process import all modules and allocate all buffers of the interpreter.
CHILD = """
import io, json, sys
from pathlib import Path
from sft.console import Console
from sft.hf import safetensors_files
from sft.weights import kept
from sft.weights import import_hf
from sft.weights.export import export_hf, merged_weights
from tests.unit.fixtures.adapters import trained

def told(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def grown(work):
    Path("/proc/self/clear_refs").write_text("5")  # the most from now on
    before = told("VmRSS")
    work()
    return told("VmHWM") - before

small, large, folder, block = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
import_hf.BLOCK_BYTES = safetensors_files.MAPPED_BYTES = kept._BLOCK_BYTES = merged_weights.BLOCK_BYTES = block
console = Console(0, io.StringIO())
for source in (small, large):
    there, back, run = (folder / f"{source.name}.{kind}" for kind in ("there", "back", "run"))
    trained(run, source)
    took = {
        "import": grown(lambda: import_hf.import_hf(source, there, console)),
        "export": grown(lambda: export_hf.export_hf(there, back, console)),
        "merged": grown(lambda: export_hf.export_hf(run, run / "merged", console)),
    }
print(json.dumps(took))
"""


def test_an_import_holds_a_block_and_an_export_a_tensor(tmp_path: Path) -> None:
    save = partial(hf.save, family="llama", dtype=torch.bfloat16, shard="20MB")
    paths = save(tmp_path / "small"), save(tmp_path / "large", **SIZES)
    assert MODEL - MIB < sum(file.stat().st_size for file in paths[1].glob("*.safetensors")) < MODEL + MIB
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths), str(tmp_path), str(BLOCK)],
        # The allocator returns memory of large tensors at once; here, tensors of 4 MiB must behave like large ones.
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": str(MIB)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    for path in tmp_path.iterdir():
        shutil.rmtree(path)  # pytest would keep 230 MiB for a while
    assert done.returncode == 0, done.stderr
    grown: dict[str, int] = json.loads(done.stdout)
    assert grown["import"] < IMPORT_BOUND and grown["export"] < EXPORT_BOUND, grown
    assert grown["merged"] < MERGED_BOUND, grown
