"""Compiles the library of the stand-in, once for each torch, and makes the environment in which a process loads it.

Our C code implements the functions that tests need.  This module generates all other functions that torch or
Transformer Engine use of CUDA's runtime, cuBLAS and NCCL, and all other functions of the driver and of cuDNN.  A
generated function does nothing and returns success.
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

from sft.estimate.communicators import COLLECTIVE_BYTES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = Path(sysconfig.get_paths()["purelib"])
TORCH = PACKAGES / "torch"
TE = PACKAGES / "transformer_engine" / "wheel_lib"
NAME = "libcuda.so.1"  # torch and Triton open this name, and get our library, because it is already loaded
SOURCES = ("cuda.c", "driver.c", "nccl.c", "blas.c", "dnn.c", "nvml.c")
DECLARATIONS = HERE / "declarations"  # for our C code if CUDA's headers are absent
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")  # functions ignore most of their parameters
REPLACED = ("libcudart", "libcublas", "libcublasLt", "libnccl", "libcudnn", "libnvrtc")
NVML = "libnvidia-ml.so.1"  # torch and sft open this name, and look up functions
BY_NAME = ("libcudart", "libcudnn")  # Transformer Engine opens these by name, and looks up functions
WORLD = 8  # number of devices
H200_BYTES = 150_754_820_096
# A function without declared parameters accepts all arguments, and 0 means success in all these libraries.
NOTHING = '__attribute__((visibility("default"))) int {name}(void) {{ return 0; }}\n'


class NoStandin(RuntimeError):
    """The stand-in cannot be built here; the message gives the reason."""


def environment(library: Path) -> dict[str, str]:
    """The environment of a process on the stand-in.

    STANDIN_BYTES and STANDIN_DEVICES set memory and devices, STANDIN_NCCL_BYTES the buffers of a communicator.
    """
    return {
        **os.environ,
        "LD_PRELOAD": os.pathsep.join(map(str, [library, *_others(library)])),
        "LD_LIBRARY_PATH": os.pathsep.join(sorted({str(path.parent) for path in _replaced()})),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "STANDIN_BYTES": str(H200_BYTES),
        "STANDIN_DEVICES": str(WORLD),
        "STANDIN_NCCL_BYTES": str(int(COLLECTIVE_BYTES)),
    }


def has_cuda() -> bool:
    """Whether the installed torch is a CUDA build from the package index, with NVIDIA's libraries in wheels."""
    return (TORCH / "lib" / "libtorch_cuda.so").exists() and bool(_replaced())


def _replaced() -> list[Path]:
    return [path for name in REPLACED for path in sorted(PACKAGES.glob(f"nvidia/*/lib/{name}.so*"))]


def _others(library: Path) -> list[Path]:
    """Files beside the library that load it under other names."""
    return [library.with_name(name) for name in [p.name for p in _replaced() if p.name.startswith(BY_NAME)] + [NVML]]


def library() -> Path:
    """The library; compiles it into the Python environment if it is missing.  Raises NoStandin."""
    if not has_cuda():
        raise NoStandin("the installed torch is not built for CUDA: run make test-standin")
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
            f"{' and '.join(absent)} cannot be found, and the first use of the stand-in for CUDA compiles it.  On "
            "Debian and Ubuntu: apt install gcc binutils libc6-dev."
        )


def cuda_headers() -> list[Path]:
    """Folders of CUDA's headers, from wheels or from a toolkit.  Torch does not install two of the wheels."""
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
                f"The stand-in for CUDA needs CUDA's headers, and {header} is in none of "
                f"{', '.join(map(str, folders))}.  Run pip install {wheel} with the version of torch's CUDA, or "
                "install a CUDA toolkit and set CUDA_HOME to its folder."
            )
    return [folder for folder in folders if folder.exists()]


def _compile(library: Path, callers: list[Path], wheels: list[Path]) -> None:
    headers = cuda_headers()
    library.parent.mkdir(parents=True, exist_ok=True)
    mine = library.with_name(f"{os.getpid()}.so")  # several processes may compile at the same time
    rest = library.with_name(f"{os.getpid()}.c")
    try:
        compile_sources(mine, headers)
        wanted = {name for path in callers for name in _symbols(path, "--undefined-only")}
        offered = {name for path in wheels for name in _symbols(path, "--defined-only")}
        by_name = {name for name in offered if name.startswith("cudnn")}
        missing = (wanted & offered | by_name | set(_of_driver(headers))) - set(_symbols(mine, "--defined-only"))
        rest.write_text("".join(NOTHING.format(name=name) for name in sorted(missing)))
        compile_sources(mine, headers, str(rest))
        for other in _others(library):  # an empty library with this name that depends on ours
            made = other.with_name(f"{os.getpid()}{other.name}")
            soname = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{other.name}"]
            _run("gcc", "-shared", *soname, "-o", str(made), str(mine))
            made.replace(other)
        mine.replace(library)
    finally:
        mine.unlink(missing_ok=True)
        rest.unlink(missing_ok=True)


def compile_sources(library: Path, headers: Sequence[Path], *more: str) -> None:
    """Compiles our C code into `library`.  more: further sources and flags.  Raises NoStandin with gcc's output."""
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{NAME}"]
    flags += [f"-I{folder}" for folder in headers]
    _run("gcc", *flags, "-o", str(library), *(str(HERE / name) for name in SOURCES), *more)


def _symbols(path: Path, which: str) -> Iterator[str]:
    for line in _run("nm", "-D", which, str(path)).splitlines():
        yield line.split()[-1].partition("@")[0]


def _of_driver(headers: list[Path]) -> Iterator[str]:
    """Names of the driver's functions: declared names, and names that macros substitute for them."""
    text = next(folder / "cuda.h" for folder in headers if (folder / "cuda.h").exists()).read_text(errors="replace")
    yield from re.findall(r"\bCUDAAPI (cu[A-Z]\w*)\(", text)
    yield from re.findall(r"^\s*#\s*define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*)$", text, flags=re.MULTILINE)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        raise NoStandin(f"{command[0]} could not build the stand-in for CUDA: {done.stderr.strip()[-2000:]}")
    return done.stdout
