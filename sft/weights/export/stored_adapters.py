"""The adapters in a Megatron checkpoint, by the names of their Linears.

A checkpoint holds the factors of the experts of a layer as one tensor [experts, ...], whose name has * for the expert's
number.
"""

import torch

from sft.errors import CheckpointError
from sft.layers.adapters import names_of
from sft.mcore.lora.adapted import PREFIX
from sft.weights.torch_dist import TorchDistReader

A, B = ".lora_A.weight", ".lora_B.weight"


class StoredAdapters:
    """shapes: (out, in) of each Linear with an adapter, by name; sorted

    dtype: of the factors; None without adapters
    """

    def __init__(self, reader: TorchDistReader) -> None:
        self._reader, self._stored = reader, {k: v for k, v in reader.shapes.items() if k.startswith(PREFIX)}
        self._sources: dict[str, tuple[str, int | None]] = {}  # name of the stored adapter, and its expert
        shapes: dict[str, tuple[int, int]] = {}
        for key in (key for key in self._stored if key.endswith(A)):
            stored = key.removesuffix(A)
            if f"{stored}{B}" not in self._stored:
                raise CheckpointError(
                    f"A checkpoint holds {key}, but not {stored}{B}.  It is damaged: use another one."
                )
            *stack, num_rows, _ = self._stored[f"{stored}{B}"]
            for i, name in enumerate(names_of(stored.removeprefix(PREFIX), range(stack[0] if stack else 1))):
                self._sources[name] = stored, i if stack else None
                shapes[name] = num_rows, self._stored[key][-1]
        self.shapes = dict(sorted(shapes.items()))
        self.dtype = next((reader.dtype(f"{stored}{A}") for stored, _ in self._sources.values()), None)

    def read(self, name: str, factor: str) -> torch.Tensor:
        """A or B of the Linear's adapter, [rank, in] or [out, rank].  factor: the end of the name, A or B"""
        stored, expert = self._sources[name]
        key = f"{stored}{factor}"
        shape = self._stored[key]
        if expert is None:
            return self._reader.read(key, [0, 0], shape)
        return self._reader.read(key, [expert, 0, 0], (1, *shape[1:]))[0]
