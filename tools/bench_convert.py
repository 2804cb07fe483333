"""How fast models go to Megatron and back, beside `shutil.copyfile` of the same bytes, and the memory that takes.

    python tools/bench_convert.py                               1 GiB of Llama-3.2-1B's layers
    python tools/bench_convert.py --shape llama-3-8b --gib 2.9  two layers
    python tools/bench_convert.py --dir /mnt/nfs                on the file system that matters
    python tools/bench_convert.py --check                       and exit 1 where memory goes beyond its bound

A random model in bf16, of as many layers as fit.  Rows take turns, each in a fresh process; medians, ratios to the
copy of the same turn.  Importing libraries is not timed; that the disk has everything is.  What is read was just
written, and comes from memory.  `peak` is by how much a process grew at most once its libraries were there, `in all`
what it had then; the page cache counts for neither.
"""

import argparse
import json
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from sft.atomic_files import flush
from sft.checkpoint import folders, manifest
from sft.checkpoint.train_state import installed
from sft.console import size
from sft.errors import SftError
from sft.hf.architecture import CONFIG, architecture
from sft.hf.convert.safetensors_writer import Planned, TensorWriter

ROOT = Path(__file__).resolve().parents[1]
BEYOND = 2 << 30  # bytes above the largest tensor that a conversion may take
COPIES = 3.1  # of the model, that the disk holds at a time: it, its import, the way back, a little more
COPY, IMPORT, FULL, SIZE = "copyfile", "import", "export, verify full", "export, verify size"
START = "import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])['child'](*sys.argv[2:]))"
ROWS = (COPY, IMPORT, FULL, SIZE)
SIZES = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size tie_word_embeddings".split()
SHAPES = {
    "llama-3.2-1b": (2048, 8192, 32, 8, 128_256, True),
    "llama-3-8b": (4096, 14_336, 32, 8, 128_256, False),
    "llama-3-70b": (8192, 28_672, 64, 8, 128_256, False),
}


class Took(NamedTuple):
    """seconds; peak: bytes beyond the libraries; total: bytes with them"""

    seconds: float
    peak: int
    total: int


class Failed(Exception):
    """What was to be measured did not work."""


def config_of(shape: str, num_layers: int) -> dict[str, Any]:
    """config.json of such a model."""
    sizes = dict(zip(SIZES, SHAPES[shape]), num_hidden_layers=num_layers)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **sizes}


def planned(content: Mapping[str, Any]) -> list[Planned]:
    """Its tensors."""
    found = architecture(content, CONFIG)
    items = found.family.items(found.model, found.vocab_size)
    return [Planned(part.name, torch.bfloat16, part.shape) for item in items for part in item.parts]


def num_bytes(tensors: Sequence[Planned]) -> int:
    return sum(one.num_bytes for one in tensors)


def fit(shape: str, limit: float) -> int:
    """The most layers of a model of at most `limit` bytes; at least one."""
    one, two = (num_bytes(planned(config_of(shape, layers))) for layers in (1, 2))
    return max(1, 1 + int((limit - one) // (two - one)))


def make(folder: Path, content: Mapping[str, Any]) -> None:
    """A random model, tensor by tensor."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")
    tensors, generator = planned(content), torch.Generator().manual_seed(0)
    writer = TensorWriter(folder, tensors)
    for one in tensors:  # bits of finite numbers; normal ones take five times as long
        bits = torch.empty(one.shape, dtype=torch.int16).random_(0, 0x4000, generator=generator)
        writer.write(one.name, bits.view(one.dtype))
    writer.finish()


def memory() -> tuple[int, int]:
    """(now, at most) of this process, bytes.  getrusage has what the parent had in it."""
    told = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if "Vm" in line)
    return int(told["VmRSS"].split()[0]) << 10, int(told["VmHWM"].split()[0]) << 10


def copy(source: str, target: str) -> int:
    """The weights of a folder, on the disk."""
    Path(target).mkdir()
    for file in sorted(Path(source).glob("*.safetensors")):
        shutil.copyfile(file, Path(target) / file.name)
        flush(Path(target) / file.name)
    flush(Path(target))
    return 0


def child(result: str, tool: str, *words: str) -> int:
    """In a fresh process: run the tool, or `copy`, and write what it took to the file `result`; its exit status."""
    main: Callable[[], int] = (lambda: copy(*words)) if tool == COPY else runpy.run_path(tool)["main"]
    sys.argv = [tool, *words]
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # what was used at most is from now on
    before, start = memory()[0], time.perf_counter()
    status = main()
    seconds, total = time.perf_counter() - start, memory()[1]
    Path(result).write_text(json.dumps(Took(seconds, total - before, total)), encoding="utf-8")
    return status


def measured(folder: Path, tool: str, *words: object) -> Took:
    """What a tool takes.  Raises Failed with what it said where it does not end well."""
    result, paths = folder / "took.json", [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-Pc", START, __file__, str(result), tool, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(f"{Path(tool).name} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return Took(*json.loads(result.read_text(encoding="utf-8")))


def turn(folder: Path) -> dict[str, Took]:
    """Every row once.  `folder` holds the model, and nothing more afterwards."""
    model, copied, there, back = (folder / name for name in ("model", "copied", "there", "back"))
    found = {COPY: measured(folder, COPY, model, copied)}
    shutil.rmtree(copied)
    found[IMPORT] = measured(folder, str(ROOT / "tools" / "import_hf.py"), model, there)
    for name, verify in ((FULL, "full"), (SIZE, "size")):
        found[name] = measured(folder, str(ROOT / "tools" / "export_hf.py"), there, back, "--verify", verify)
        before, after = (manifest.read(path) for path in (there / folders.name_of(0), back))
        if before is None or after is None or before.facts["tensors"] != after.facts["tensors"]:
            raise Failed("the way there and back gave other numbers")
        shutil.rmtree(back)
    shutil.rmtree(there)
    return found


def table(turns: Sequence[Mapping[str, Took]], model_bytes: int) -> list[str]:
    """One line a row."""
    lines = [f"{'':<22}{'seconds':>9}{'GiB/s':>8}{'times copyfile':>24}{'peak MiB':>11}{'in all':>9}"]
    for name in ROWS:
        seconds = median(one[name].seconds for one in turns)
        ratios = [one[name].seconds / one[COPY].seconds for one in turns]
        told = f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})" if name != COPY else ""
        peak, total = (max(one[name][i] for one in turns) / 2**20 for i in (1, 2))
        speed = model_bytes / 2**30 / seconds
        lines.append(f"{name:<22}{seconds:>9.2f}{speed:>8.2f}{told:>24}{peak:>11,.0f}{total:>9,.0f}")
    return lines


def report(turns: Sequence[Mapping[str, Took]], tensors: Sequence[Planned], *, check: bool) -> int:
    """The exit status."""
    print("\n".join(table(turns, num_bytes(tensors))))
    largest = max(one.num_bytes for one in tensors)
    peak, total = (max(one[name][i] for one in turns for name in ROWS if name != COPY) for i in (1, 2))
    bound, met = size(largest + BEYOND), "met" if peak <= largest + BEYOND else "MISSED"
    told = f"memory {size(peak)} beyond the libraries ({size(total)} in all), bound {bound}"
    print(f"bench_convert: {told}, the largest tensor and {size(BEYOND)}: {met}", flush=True)
    return 1 if check and met == "MISSED" else 0


def about(folder: Path) -> str:
    """Machine, versions, date, command."""
    disk = " ".join(subprocess.check_output(["df", "--output=fstype,source", folder], text=True).split()[-2:])
    ram = size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    versions = [f"{name} {version}" for name, version in {"python": platform.python_version(), **installed()}.items()]
    return (
        f"{time.strftime('%Y-%m-%d %H:%MZ', time.gmtime())}  {shlex.join(sys.orig_argv)}\n{', '.join(versions)}\n"
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, memory {ram}, disk {disk}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.2-1b", help="whose layers and vocabulary")
    parser.add_argument("--gib", type=float, default=1.0, metavar="N", help="of at most so much, but one layer")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns of all rows")
    parser.add_argument("--dir", type=Path, help="where to make a temporary folder to write into")
    parser.add_argument("--check", action="store_true", help="exit 1 where memory goes beyond its bound")
    options = parser.parse_args(argv)
    if options.repeats < 1 or not options.gib > 0:
        parser.error(f"--repeats {options.repeats} --gib {options.gib}: nothing to measure")
    if options.dir and not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is not a folder")
    return options


def bench(options: argparse.Namespace, folder: Path) -> int:
    """The exit status.  Raises Failed."""
    num_layers = fit(options.shape, options.gib * 2**30)
    tensors = planned(content := config_of(options.shape, num_layers))
    needed, free = int(COPIES * num_bytes(tensors)), shutil.disk_usage(folder).free
    if free < needed:
        raise Failed(f"this takes {size(needed)} of disk, and {folder.parent} has {size(free)}; see --gib, --dir")
    print(about(folder))
    print(
        f"{options.shape}, {num_layers} layers, {size(num_bytes(tensors))}, median of {options.repeats} turns",
        flush=True,
    )
    make(folder / "model", content)
    return report([turn(folder) for _ in range(options.repeats)], tensors, check=options.check)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_convert-") as folder:
        try:
            return bench(options, Path(os.path.realpath(folder)))
        except (Failed, SftError) as error:
            print(f"bench_convert: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
