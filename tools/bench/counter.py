"""Counts allocated bytes and sent bytes of operations that pass torch's dispatcher.

It counts the bytes of storages, on a CPU.  It does not count memory that a kernel allocates internally while it runs.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_c10d = torch.ops.c10d
_SENT = {_c10d.allreduce_: 0, _c10d._allgather_base_: 1, _c10d._reduce_scatter_base_: 1}


@dataclass(kw_only=True)
class _Lifetime:
    """The lifetime of a storage: it exists at the operations `born` to `died` - 1."""

    reference: StorageWeakRef
    num_bytes: int
    born: int
    died: int = sys.maxsize


class Counter(TorchDispatchMode):
    """Counts while this mode is active, including backward.

    with Counter() as counter:
        a = torch.empty(100); b = torch.empty(50); del a; c = torch.empty(75)
    counter.peak_bytes() -> 600
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_sent = 0
        self._clock = 0  # number of operations so far
        self._alive: dict[int, _Lifetime] = {}  # by address; the weak reference prevents its reuse
        self._ended: list[_Lifetime] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._clock += 1
        self._end_expired()
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.bytes_sent += sum(x.nbytes for x in tree_leaves(args[_SENT[func.overloadpacket]]))
        self._observe(x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        return result

    def peak_bytes(self, *, beyond: Iterable[Tensor] = ()) -> int:
        """The largest number of bytes alive after an operation.

        beyond: tensors whose storages do not count; they must still be alive
        """
        self._clock += 1
        self._end_expired()
        excluded = {x.untyped_storage()._cdata for x in beyond}
        lifetimes = [life for address, life in self._alive.items() if address not in excluded] + self._ended
        changes = [(life.born, life.num_bytes) for life in lifetimes]
        changes += [(life.died, -life.num_bytes) for life in lifetimes]
        peak = alive = 0
        for _, change in sorted(changes):  # at the same operation, subtract freed bytes first
            alive += change
            peak = max(peak, alive)
        return peak

    def _observe(self, tensors: Iterator[Tensor]) -> None:
        for x in tensors:
            storage = x.untyped_storage()
            life = self._alive.get(storage._cdata)
            if life is not None and life.num_bytes == storage.nbytes():
                continue
            if life is not None:  # the storage was resized
                self._end(storage._cdata)
            reference = StorageWeakRef(storage)
            self._alive[reference.cdata] = _Lifetime(reference=reference, num_bytes=storage.nbytes(), born=self._clock)

    def _end_expired(self) -> None:
        for address in [address for address, life in self._alive.items() if life.reference.expired()]:
            self._end(address)

    def _end(self, address: int) -> None:
        life = self._alive.pop(address)
        life.died = self._clock
        self._ended.append(life)
