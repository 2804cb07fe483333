"""Reads the resources of a compiled kernel with cuobjdump: registers, spilled bytes and shared memory.

The program comes with Triton.  Triton's own fields for registers and spills stay empty without a GPU.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

SHARED_BYTES = 232_448  # of shared memory that one block may use, on Hopper and on Blackwell
_FUNCTION = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Usage(NamedTuple):
    """The resources of one kernel.

    registers  of a thread when the kernel starts
    spilled    bytes of a thread's stack and local memory, which hold registers that did not fit
    shared     bytes of a block's shared memory whose size the binary fixes; a launch may add more
    """

    registers: int
    spilled: int
    shared: int


class Compiled(NamedTuple):
    """One kernel of a pass, as the compiler left it.

    variants  how many variants an autotuner would try; `usage` is that of the one with the fewest spilled bytes
    """

    step: str
    kernel: str
    usage: Usage
    variants: int
    seconds: float


def parse(text: str) -> dict[str, Usage]:
    """The output of `cuobjdump --dump-resource-usage` -> the resources of each kernel, by the kernel's name."""
    return {
        name: Usage(int(registers), int(stack) + int(local), int(shared))
        for name, registers, stack, shared, local in _FUNCTION.findall(text)
    }


def usage(cubin: Path) -> dict[str, Usage]:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run(
        [str(program), "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True
    )
    return parse(done.stdout)
