"""Time and memory of conversions to Megatron and back, compared with `shutil.copyfile` of the same bytes.

    python -m tools.bench convert                                   1 GiB of Llama-3.2-1B's layers
    python -m tools.bench convert --cases llama-3-8b --gib 2.9      two layers
    python -m tools.bench convert --folder /mnt/nfs                 on a given file system

A case is the shape of the layers of a random bf16 model, which has as many layers as fit --gib.  Rows take turns, each
in a new process.  Times are medians, and ratios are to the copy of the same turn.  Imports of libraries are not timed.
Writes are flushed before the clock stops; reads come from the page cache.  `peak` is the growth of the process after
its imports, `in all` includes the imports; neither counts the page cache.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sft.checkpoint import manifest
from sft.console import Console, size
from sft.files.atomic_files import flush
from sft.files.file_digest import entry_of
from sft.hf.architecture import architecture
from sft.hf.hub import CONFIG
from sft.hf.safetensors_writer import write_tensors
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tools.bench import fresh_process, machine
from tools.bench.fresh_process import ProcessTook
from tools.bench.harness import Option, Refused, Subject, one_of
from tools.bench.results import Bar, Column, Row

BEYOND = 2 << 30  # bytes that a conversion may allocate in addition to the largest tensor
TIMES = 3.0  # an export, in times of a copy of the same bytes
TIMED_BYTES = 1 << 28  # in a smaller model, starting threads and writing small files take most of the time
COPIES = 3.1  # largest use of the disk in sizes of the model: model, import, export, and a margin
COPY, IMPORT, FULL, SIZE = "copyfile", "import", "export, verify full", "export, verify size"
WAYS = (COPY, IMPORT, FULL, SIZE)
KEYS = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size tie_word_embeddings".split()
SHAPES = {
    "llama-3.2-1b": (2048, 8192, 32, 8, 128_256, True),
    "llama-3-8b": (4096, 14_336, 32, 8, 128_256, False),
    "llama-3-70b": (8192, 28_672, 64, 8, 128_256, False),
    "tiny": (64, 128, 4, 2, 512, False),
}
Turn = Mapping[str, ProcessTook]


def config_of(shape: str, num_layers: int) -> dict[str, Any]:
    """The content of the model's config.json."""
    sizes = dict(zip(KEYS, SHAPES[shape]), num_hidden_layers=num_layers)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **sizes}


def tensors_of(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a model with this config.json, on the meta device."""
    model = architecture(content, CONFIG)
    mappings = model.family.mappings(model.model, model.vocab_size)
    parts = [part for mapping in mappings for part in mapping.sources]
    return {part.name: torch.empty(part.shape, dtype=torch.bfloat16, device="meta") for part in parts}


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def num_layers_for(shape: str, limit: float) -> int:
    """The largest number of layers of a model of at most `limit` bytes; at least one."""
    first, second = (num_bytes(tensors_of(config_of(shape, layers))) for layers in (1, 2))
    return max(1, 1 + int((limit - first) // (second - first)))


def make(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a random model, one tensor at a time."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")
    tensors, generator = tensors_of(content), torch.Generator().manual_seed(0)

    def values(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Random bits of finite numbers; drawing normal numbers takes five times as long."""
        bits = torch.empty(tensor.shape, dtype=torch.int16).random_(0, 0x4000, generator=generator)
        return name, bits.view(tensor.dtype)

    write_tensors(folder, tensors, starmap(values, tensors.items()))


def copy() -> int:
    """A command that copies the weights of a folder to another folder and flushes them."""
    source, target = map(Path, sys.argv[1:])
    target.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        shutil.copyfile(file, target / file.name)
        flush(target / file.name)
    flush(target)
    return 0


def import_model() -> int:
    """A command that does what `sft import` does."""
    source, target = map(Path, sys.argv[1:])
    import_hf(source, target, Console(0))
    return 0


def export_model() -> int:
    """A command that does what `sft export` does."""
    source, target, verify = sys.argv[1:]
    export_hf(Path(source), Path(target), Console(0), verify="size" if verify == "size" else "full")
    return 0


def turn(folder: Path) -> Turn:
    """Measures every way once.  `folder` holds the model; all other files are removed at the end."""
    model, copied, megatron, exported = (folder / name for name in ("model", "copied", "megatron", "exported"))
    took = {COPY: fresh_process.measured(folder, f"{__name__}:copy", model, copied)}
    shutil.rmtree(copied)
    took[IMPORT] = fresh_process.measured(folder, f"{__name__}:import_model", model, megatron)
    for name, verify in ((FULL, "full"), (SIZE, "size")):
        took[name] = fresh_process.measured(folder, f"{__name__}:export_model", megatron, exported, verify)
        written = manifest.read(exported)
        for file in model.glob("*.safetensors"):  # the export has the same names in the same order
            if written is None or written.files.get(file.name) != entry_of(file):
                raise Refused("import and export changed the tensors")
        shutil.rmtree(exported)
    shutil.rmtree(megatron)
    return took


def measure(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    num_layers = num_layers_for(shape, options.gib * 2**30)
    tensors = tensors_of(content := config_of(shape, num_layers))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-convert-") as name:
        folder = Path(name).resolve()
        needed, free = int(COPIES * num_bytes(tensors)), shutil.disk_usage(folder).free
        if free < needed:
            raise Refused(f"{folder.parent} has {size(free)} free of {size(needed)}; change --gib or --folder")
        make(folder / "model", content)
        turns = [turn(folder) for _ in range(options.repeats)]
        facts = {"layers": num_layers, "bytes": num_bytes(tensors), "file_system": machine.file_system(folder)}
    for row in rows_of(turns, num_bytes(tensors)):
        yield {**facts, "largest": max(tensor.nbytes for tensor in tensors.values()), **row}


def rows_of(turns: Sequence[Turn], model_bytes: int) -> Iterator[Row]:
    for name in WAYS:
        seconds = median(took[name].seconds for took in turns)
        ratios = [took[name].seconds / took[COPY].seconds for took in turns]
        times = {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)} if name != COPY else {}
        peak, total = (max(took[name][i] for took in turns) for i in (1, 2))
        speed = model_bytes / seconds
        yield {"way": name, "seconds": seconds, "bytes_per_s": speed, "peak": peak, "total": total, **times}


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if row["way"] != COPY:
            name = f"{row['case']}, {row['way']}, bytes beyond the libraries: the largest tensor and {size(BEYOND)}"
            yield Bar(name=name, value=row["peak"], bound=row["largest"] + BEYOND)
        if row["way"] in (FULL, SIZE) and row["bytes"] >= TIMED_BYTES:
            yield Bar(name=f"{row['case']}, {row['way']}, times a copy of the files", value=row["ratio"], bound=TIMES)


def validate(options: argparse.Namespace) -> None:
    if options.repeats < 1 or not options.gib > 0:
        raise ValueError(f"--repeats {options.repeats} must be at least 1, and --gib {options.gib} above 0")
    if options.folder and not options.folder.is_dir():
        raise ValueError(f"--folder {options.folder} is not a folder")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("seconds", "seconds", ".2f"),
        Column("bytes_per_s", "GiB/s", ".2f", 2**30),
        Column("ratio", "times copyfile", ".2f"),
        Column("ratio_min", "least", ".2f"),
        Column("ratio_max", "most", ".2f"),
        Column("peak", "peak MiB", ",.0f", 2**20),
        Column("total", "in all", ",.0f", 2**20),
    ],
    cases=["llama-3.2-1b"],
    tiny_cases=["tiny"],
    read=one_of(*SHAPES),
    options={
        "gib": Option(1.0, 0.001, "size limit of the model; it has at least one layer"),
        "repeats": Option(3, 1, "number of times that all rows are measured"),
        "folder": Option(None, help="folder in which a temporary folder is made", read=Path),
    },
    validate=validate,
    bars=bars,
)
