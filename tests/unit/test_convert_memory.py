"""What a conversion holds in memory does not grow with the model; measured by the system, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
WIDTH, FFN, LAYERS, VOCAB = 1024, 2048, 7, 2048
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
}
MODEL = 127 * MIB  # 17 MiB a layer, 8 MiB the embedding and the output together; the largest tensor has 4 MiB
BLOCK = 2 * MIB  # in the place of import_hf.BLOCK_BYTES, 256 MiB, and of safetensors_files.MAPPED_BYTES, 64 MiB
# An import holds a block, an export one of our tensors (linear_fc1: 8 MiB) and the part of it that is being read; the
# allocator keeps a few of each.  A process that held the model would take MODEL.
IMPORT_BOUND, EXPORT_BOUND = 32 * MIB, 48 * MIB

# The first, small model has everything imported and every buffer of the interpreter made.
CHILD = """
import io, json, sys
from pathlib import Path
from sft.console import Console
from sft.hf.convert import export_hf, import_hf, safetensors_files

def told(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def grown(work):
    Path("/proc/self/clear_refs").write_text("5")  # the most from now on
    before = told("VmRSS")
    work()
    return told("VmHWM") - before

small, large, folder, block = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
import_hf.BLOCK_BYTES = safetensors_files.MAPPED_BYTES = block
console = Console(0, io.StringIO())
for source in (small, large):
    there, back = folder / f"{source.name}.there", folder / f"{source.name}.back"
    took = {
        "import": grown(lambda: import_hf.import_hf(source, there, console)),
        "export": grown(lambda: export_hf.export_hf(there, back, console)),
    }
print(json.dumps(took))
"""


def model(folder: Path, sizes: dict[str, int]) -> Path:
    """A model of zeros, with a file for every layer; the folder."""
    width, ffn, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    outer = {"model.embed_tokens": (vocab, width), "model.norm": (width,), "lm_head": (vocab, width)}
    inner = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    layers = [f"model.layers.{layer}." for layer in range(sizes["num_hidden_layers"])]
    files = [outer, *({prefix + name: shape for name, shape in inner.items()} for prefix in layers)]
    folder.mkdir()
    index = {}
    for i, shapes in enumerate(files):
        tensors = {f"{name}.weight": torch.zeros(*shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / f"part{i}.safetensors")
        index |= {name: f"part{i}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def grown() -> Iterator[dict[str, int]]:
    """By how many bytes a process grew at most, by what it did."""
    with tempfile.TemporaryDirectory(prefix="test_convert_memory-") as folder:  # pytest would keep 400 MiB for a while
        yield measured(Path(folder))


def measured(folder: Path) -> dict[str, int]:
    small = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 1}
    paths = model(folder / "small", small), model(folder / "large", SIZES)
    assert MODEL - MIB < sum(file.stat().st_size for file in paths[1].glob("*.safetensors")) < MODEL + MIB
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths), str(folder), str(BLOCK)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_an_import_holds_a_block(grown: dict[str, int]) -> None:
    assert grown["import"] < IMPORT_BOUND, f"{grown['import'] / MIB:.1f} MiB"


def test_an_export_holds_a_tensor(grown: dict[str, int]) -> None:
    assert grown["export"] < EXPORT_BOUND, f"{grown['export'] / MIB:.1f} MiB"
