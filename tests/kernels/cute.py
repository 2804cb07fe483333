"""Reads the dynamic shared memory of a kernel in CuTe DSL, which its binary does not name.

The compiler lowers the code that launches a kernel, too.  There, the last constant that is stored as a 64-bit number
of a possible size is the dynamic shared memory of the launch.
"""

import re
from typing import Any

from tests.kernels.cubins import SHARED_BYTES

_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)")
_STORED = re.compile(r"llvm\.store (%\w+), %\w+ : i64, ")
_UNIT = 16  # bytes; sizes of shared memory are multiples, other numbers of a launch rarely


def dynamic_shared(module: str) -> int:
    """Bytes of the largest launch of a lowered module; 0 if it has none."""
    sizes = [0]
    for body in re.split(r"^  llvm\.func ", module, flags=re.MULTILINE):
        numbers = dict(_CONSTANT.findall(body))
        stored = [int(numbers[name]) for name in _STORED.findall(body) if name in numbers]
        sizes += [size for size in stored if size <= SHARED_BYTES and size % _UNIT == 0][-1:]
    return max(sizes)


def record_launches() -> list[int]:
    """A list that gets the dynamic shared memory of every module that this process compiles from now on."""
    from cutlass.base_dsl.compiler import Compiler

    compiled, sizes = Compiler.compile, list[int]()

    def compile_and_read(self: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        result = compiled(self, module, *arguments, **options)
        sizes.append(dynamic_shared(str(module)))
        return result

    Compiler.compile = compile_and_read
    return sizes
