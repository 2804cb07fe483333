"""The library of the stand-in: compiled once for each torch, and what to set so that a process loads it.

Our own C knows the functions that matter.  Every other one that torch or Transformer Engine asks of CUDA's runtime,
cuBLAS or NCCL, and every other one of the driver and of cuDNN, is made here: it does nothing and succeeds.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = Path(sysconfig.get_paths()["purelib"])
TORCH = PACKAGES / "torch"
TE = PACKAGES / "transformer_engine" / "wheel_lib"
NAME = "libcuda.so.1"  # which torch and Triton look for; as it is loaded already, they get this one
SOURCES = ("cuda.c", "driver.c", "nccl.c", "blas.c", "dnn.c")
DECLARATIONS = HERE / "declarations"  # instead of CUDA's headers where they are absent: for our C alone, not for torch
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")  # most of what is asked of a function is ignored
REPLACED = ("libcudart", "libcublas", "libcublasLt", "libnccl", "libcudnn", "libnvrtc")
BY_NAME = ("libcudart", "libcudnn")  # which Transformer Engine opens by their names, and asks for functions of any
WORLD = 8  # devices that are shown
H200_BYTES = 150_754_820_096
# An int takes any arguments that are passed in registers or by the caller's stack, and 0 is success for all of them.
NOTHING = '__attribute__((visibility("default"))) int {name}(void) {{ return 0; }}\n'


class NoStandin(RuntimeError):
    """It cannot be had here; says why."""


def environment(library: Path) -> dict[str, str]:
    """Of a process that runs on the stand-in; STANDIN_BYTES and STANDIN_DEVICES are its size."""
    return {
        **os.environ,
        "LD_PRELOAD": os.pathsep.join(map(str, [library, *_others(library)])),
        "LD_LIBRARY_PATH": os.pathsep.join(sorted({str(path.parent) for path in _replaced()})),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "STANDIN_BYTES": str(H200_BYTES),
        "STANDIN_DEVICES": str(WORLD),
    }


def has_cuda() -> bool:
    """Whether torch here is a build for CUDA, from the package index: with NVIDIA's libraries in wheels."""
    return (TORCH / "lib" / "libtorch_cuda.so").exists() and bool(_replaced())


def _replaced() -> list[Path]:
    return [path for name in REPLACED for path in sorted(PACKAGES.glob(f"nvidia/*/lib/{name}.so*"))]


def _others(library: Path) -> list[Path]:
    """Beside it: what it is by the other names."""
    return [library.with_name(path.name) for path in _replaced() if path.name.startswith(BY_NAME)]


def library() -> Path:
    """Compiled if it is not there, within the environment.  Raises NoStandin."""
    if not has_cuda():
        raise NoStandin("torch here is no build for CUDA: run make test-standin")
    callers, wheels = [*sorted((TORCH / "lib").glob("lib*.so")), *sorted(TE.glob("*.so"))], _replaced()
    known = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in (*callers, *wheels)]
    digest = hashlib.sha256(str(known).encode())
    for path in (*(HERE / name for name in (*SOURCES, "standin.h")), Path(__file__), TORCH / "version.py"):
        digest.update(path.read_bytes())
    found = Path(sys.prefix) / "standin" / digest.hexdigest()[:16] / NAME
    if not found.exists():
        _check_tools()
        _compile(found, callers, wheels)
    return found


def _check_tools() -> None:
    if absent := [tool for tool in ("gcc", "nm") if not shutil.which(tool)]:
        raise NoStandin(
            f"The stand-in for CUDA is compiled when it is first used, and {' and '.join(absent)} "
            "cannot be found.  On Debian and Ubuntu: apt install gcc binutils libc6-dev."
        )


def cuda_headers() -> list[Path]:
    """Folders of CUDA's headers: of the wheels, of which two do not come with torch, or of a toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    folders = [*sorted(PACKAGES.glob("nvidia/*/include")), toolkit]
    for header, wheel in (
        ("cuda.h", "nvidia-cuda-runtime"),
        ("crt/host_defines.h", "nvidia-cuda-crt"),
        ("nv/target", "nvidia-cuda-cccl"),
        ("cublasLt.h", "nvidia-cublas"),
        ("nccl.h", "nvidia-nccl-cu13"),
        ("cudnn.h", "nvidia-cudnn-cu13"),
        ("nvrtc.h", "nvidia-cuda-nvrtc"),
    ):
        if not any((folder / header).exists() for folder in folders):
            raise NoStandin(
                f"The stand-in for CUDA is compiled with CUDA's own headers, and {header} is in none of "
                f"{', '.join(map(str, folders))}.  It comes with pip install {wheel}, of the version of torch's CUDA, "
                "or with a CUDA toolkit, whose folder CUDA_HOME names."
            )
    return [folder for folder in folders if folder.exists()]


def _compile(library: Path, callers: list[Path], wheels: list[Path]) -> None:
    headers = cuda_headers()
    library.parent.mkdir(parents=True, exist_ok=True)
    mine = library.with_name(f"{os.getpid()}.so")  # several may compile at once
    rest = library.with_name(f"{os.getpid()}.c")
    try:
        compile_sources(mine, headers)
        wanted = {name for path in callers for name in _symbols(path, "--undefined-only")}
        offered = {name for path in wheels for name in _symbols(path, "--defined-only")}
        by_name = {name for name in offered if name.startswith("cudnn")}
        missing = (wanted & offered | by_name | set(_of_driver(headers))) - set(_symbols(mine, "--defined-only"))
        rest.write_text("".join(NOTHING.format(name=name) for name in sorted(missing)))
        compile_sources(mine, headers, str(rest))
        for other in _others(library):  # empty, but for that name and for needing ours
            made = other.with_name(f"{os.getpid()}{other.name}")
            soname = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{other.name}"]
            _run("gcc", "-shared", *soname, "-o", str(made), str(mine))
            made.replace(other)
        mine.replace(library)
    finally:
        mine.unlink(missing_ok=True)
        rest.unlink(missing_ok=True)


def compile_sources(library: Path, headers: Sequence[Path], *more: str) -> None:
    """Our own C into `library`.  more: sources and flags besides.  Raises NoStandin with what gcc says."""
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{NAME}"]
    flags += [f"-I{folder}" for folder in headers]
    _run("gcc", *flags, "-o", str(library), *(str(HERE / name) for name in SOURCES), *more)


def _symbols(path: Path, which: str) -> Iterator[str]:
    for line in _run("nm", "-D", which, str(path)).splitlines():
        yield line.split()[-1].partition("@")[0]


def _of_driver(headers: list[Path]) -> Iterator[str]:
    """Names of the driver's functions: those declared, and those that a macro makes of them."""
    text = next(folder / "cuda.h" for folder in headers if (folder / "cuda.h").exists()).read_text(errors="replace")
    yield from re.findall(r"\bCUDAAPI (cu[A-Z]\w*)\(", text)
    yield from re.findall(r"^\s*#\s*define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*)$", text, flags=re.MULTILINE)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        raise NoStandin(f"{command[0]} could not make the stand-in for CUDA: {done.stderr.strip()[-2000:]}")
    return done.stdout
