"""Reads the adapters in a Megatron checkpoint by the names of their Linears.

A checkpoint stores one tensor [experts, ...] for a factor of all experts of a layer.  The name of this tensor has * in
place of the expert's number.
"""

import torch

from sft.errors import CheckpointError
from sft.layers.adapters import Adapter, names_of
from sft.mcore.lora.factors import PREFIX
from sft.weights.torch_dist import TorchDistReader

A, B = ".lora_A.weight", ".lora_B.weight"


class StoredAdapters:
    """The adapters in the checkpoint that `reader` reads.

    shapes: (out, in) of each Linear with an adapter, sorted by name
    stacks: (experts, out, in) of each tensor of all experts with adapters, by its name in files
    dtype: the type of the factors; None without adapters
    """

    def __init__(self, reader: TorchDistReader) -> None:
        self._reader, self._stored = reader, {k: v for k, v in reader.shapes.items() if k.startswith(PREFIX)}
        self._sources: dict[str, tuple[str, int | None]] = {}  # name of the stored adapter, and its expert
        shapes, self.stacks = dict[str, tuple[int, int]](), dict[str, tuple[int, int, int]]()
        for key in (key for key in self._stored if key.endswith(A)):
            stored = key.removesuffix(A)
            if f"{stored}{B}" not in self._stored:
                raise CheckpointError(
                    f"A checkpoint holds {key}, but not {stored}{B}.  It is damaged: use another one."
                )
            *stack, num_rows, _ = self._stored[f"{stored}{B}"]
            if tensor := Adapter(name=stored.removeprefix(PREFIX), parts=()).tensor:
                self._sources[tensor] = stored, None
                self.stacks[tensor] = stack[0], num_rows, self._stored[key][-1]
                continue
            for i, name in enumerate(names_of(stored.removeprefix(PREFIX), range(stack[0] if stack else 1))):
                self._sources[name] = stored, i if stack else None
                shapes[name] = num_rows, self._stored[key][-1]
        self.shapes = dict(sorted(shapes.items()))
        self.dtype = next((reader.dtype(f"{stored}{A}") for stored, _ in self._sources.values()), None)

    def read(self, name: str, factor: str) -> torch.Tensor:
        """Factor A [rank, in] or B [out, rank] of the Linear's adapter; for stacked experts [experts, ...].

        factor: the constant A or B of this module
        """
        stored, expert = self._sources[name]
        key = f"{stored}{factor}"
        shape = self._stored[key]
        if expert is None:
            return self._reader.read(key, [0] * len(shape), shape)
        return self._reader.read(key, [expert, 0, 0], (1, *shape[1:]))[0]
