"""Calls our C code without torch, and prints the answers as JSON; tests/unit/repository checks them.

python -m tests.standin.calls LIBRARY memory
python -m tests.standin.calls LIBRARY collectives RANK FILE      FILE is shared by the two ranks
"""

import ctypes
import json
import resource
import sys
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_longlong, c_size_t, c_void_p
from dataclasses import astuple, dataclass
from typing import Any

Answers = dict[str, Any]
INT64, BFLOAT16, FLOAT32 = 4, 9, 7  # values of ncclDataType_t
SUM, PROD, MAX, MIN = range(4)  # values of ncclRedOp_t
TIMES, SIZES = 3, [1 + message % 3 for message in range(30)]  # groups, and the length of each message


@dataclass(frozen=True)
class Counts:
    """Counters of this process since its start.  Names and order are those of cuda.c."""

    waits: int = 0  # waits of the host for the device; a wait for finished work does not count
    kernels: int = 0  # a matrix product counts as one kernel, and so does an attention of cuDNN
    host_bytes: int = 0  # page-locked memory
    most_host_bytes: int = 0  # its peak
    deep_blocks: int = 0  # thread blocks of kernels whose grid has a third axis, such as those of flash attention

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before))))


def counted() -> Counts:
    numbers = (ctypes.c_long * len(astuple(Counts())))()
    ctypes.CDLL(None).standin_counts(numbers)
    return Counts(*numbers)


class Dim3(ctypes.Structure):
    _fields_ = [("x", c_int), ("y", c_int), ("z", c_int)]


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def _malloc(cuda: Any, n: int) -> tuple[int, c_void_p]:
    memory = c_void_p()
    return cuda.cudaMalloc(byref(memory), c_size_t(n)), memory


def _left(cuda: Any) -> int:
    left, total = c_size_t(), c_size_t()
    cuda.cudaMemGetInfo(byref(left), byref(total))
    return left.value


def memory(cuda: Any) -> Answers:
    (_, first), (refused, nothing) = _malloc(cuda, 600), _malloc(cuda, 401)
    errors = [cuda.cudaPeekAtLastError(), cuda.cudaGetLastError(), cuda.cudaGetLastError()]
    (exact, _), full = _malloc(cuda, 400), _left(cuda)
    cuda.cudaFree(first)
    freed = _left(cuda)
    huge, again = _malloc(cuda, 2**64 - 1)[0], _malloc(cuda, 600)[0]
    return {
        "401 of 400": refused, "address of the refused block": nothing.value, "errors": errors, "400 of 400": exact,
        "left": full, "left after free": freed, "2**64 - 1": huge, "600 after the refusals": again,
    }  # fmt: skip


def pinned(cuda: Any) -> Answers:
    most, memory = [], [c_void_p(), c_void_p(), c_void_p()]
    for pointer, n in zip(memory, (300, 500, 100)):
        if n == 100:
            cuda.cudaFreeHost(memory[0])
        cuda.cudaHostAlloc(byref(pointer), c_size_t(n), 0)
        most.append(counted().most_host_bytes)
    return {"most": most, "left": _left(cuda)}


def locked(cuda: Any) -> Answers:
    ours = ctypes.create_string_buffer(8192)
    register = cuda.cudaHostRegister
    answers = {
        "8192": register(ours, c_size_t(8192), 0),
        "1 more": cuda.cudaHostAlloc(byref(c_void_p()), c_size_t(1), 0),
    }
    return {**answers, "left": cuda.cudaHostUnregister(ours), "after": counted().host_bytes}


def _kernel(cuda: Any, stream: c_void_p, blocks: int = 1, heads: int = 1) -> int:
    return cuda.cudaLaunchKernel(None, Dim3(blocks, 5, heads), Dim3(32, 1, 1), None, c_size_t(0), stream)


def waits(cuda: Any) -> Answers:
    """The number of waits of the host for the device, after each of these operations."""
    one, two, event, ms = c_void_p(), c_void_p(), c_void_p(), c_float()
    cuda.cudaStreamCreate(byref(one))
    cuda.cudaStreamCreate(byref(two))
    cuda.cudaEventCreate(byref(event))
    finish, finish_event, follow = cuda.cudaStreamSynchronize, cuda.cudaEventSynchronize, cuda.cudaStreamWaitEvent

    def after(*errors: int) -> int:
        assert not any(errors)
        return counted().waits

    return {
        "kernels": after(_kernel(cuda, one), cuda.cudaEventRecord(event, one), _kernel(cuda, one)),
        "wait for an event": after(finish_event(event)),
        "second wait for the event": after(finish_event(event)),
        "wait for its stream with a later kernel": after(finish(one)),
        "second wait for the stream": after(finish(one)),
        "wait for an idle stream": after(finish(two)),
        "stream that follows a finished event": after(follow(two, event, 0), finish(two)),
        "stream that follows an unfinished event": after(
            _kernel(cuda, one), cuda.cudaEventRecord(event, one), follow(two, event, 0), finish(two)
        ),
        "wait for the device": after(_kernel(cuda, one), cuda.cudaDeviceSynchronize()),
        "stream after the device": after(finish(one)),
        "elapsed time is above 0": not cuda.cudaEventElapsedTime(byref(ms), event, event) and ms.value > 0,
    }


def kernels(cuda: Any) -> Answers:
    answers, handle = {"refused": _kernel(cuda, c_void_p(), blocks=0), "then": counted().kernels}, c_void_p()
    _kernel(cuda, c_void_p())
    cuda.cublasCreate_v2(byref(handle))
    cuda.cublasSgemm_v2(handle, *[None] * 13)
    cuda.cuLaunchKernel(*[None] * 11)
    cuda.cudnnCreate(byref(handle))
    cuda.cudnnBackendExecute(handle, None, None)
    answers["four"] = counted().kernels
    return {**answers, "three axes": _kernel(cuda, c_void_p(), 7, heads=2), "blocks": counted().deep_blocks}


def _join(cuda: Any, rank: int, file: str, size: int = 2) -> c_void_p:
    comm = c_void_p()
    assert cuda.ncclCommInitRank(byref(comm), size, UniqueId(file.encode()), rank) == 0
    return comm


def buffers(cuda: Any, rank: int, file: str) -> Answers:
    """Bytes that are left after two ranks have made a communicator, after its first all-to-all, and at its end."""
    comm = _join(cuda, rank, file)
    left = [_left(cuda)]
    cuda.standin_open_all_to_all(c_size_t(500))
    left.append(_left(cuda))
    cuda.ncclCommDestroy(comm)
    return {"left": [*left, _left(cuda)], "refused": cuda.standin_open_all_to_all(c_size_t(501))}


def collectives(cuda: Any, rank: int, file: str) -> Answers:
    comm, answers = _join(cuda, rank, file), {}
    mine = (c_longlong * 2)(*((2, 30), (5, 4))[rank])
    for name, how in {"sum": SUM, "product": PROD, "most": MAX, "least": MIN}.items():
        got = (c_longlong * 2)()
        cuda.ncclAllReduce(mine, got, c_size_t(2), INT64, how, comm, None)
        answers[name] = list(got)
    gathered, ours, scattered, reduced = (c_longlong * 4)(), (c_longlong * 2)(), (c_longlong * 1)(), (c_longlong * 2)()
    cuda.ncclAllGather(mine, gathered, c_size_t(2), INT64, comm, None)
    cuda.ncclBroadcast(mine, ours, c_size_t(2), INT64, 1, comm, None)
    cuda.ncclReduceScatter(mine, scattered, c_size_t(1), INT64, SUM, comm, None)
    cuda.ncclReduce(mine, reduced, c_size_t(2), INT64, SUM, 1, comm, None)
    halves, fractions = (ctypes.c_uint16 * 1)(rank + 7), (c_float * 1)(rank + 0.5)
    cuda.ncclAllReduce(halves, halves, c_size_t(1), BFLOAT16, SUM, comm, None)
    cuda.ncclAllReduce(fractions, fractions, c_size_t(1), FLOAT32, SUM, comm, None)
    return {
        **answers, "gathered": list(gathered), "of rank 1": list(ours), "scattered": list(scattered),
        "at rank 1": list(reduced), "half precision": list(halves), "single precision": list(fractions),
    }  # fmt: skip


def _groups_in_order(cuda: Any, comm: c_void_p, peer: int) -> int:
    """In each group, exchanges messages of 1, 2, 3, 1, ... numbers with `peer`; number i of message m is 1000 m + i.

    Returns the number of groups whose messages arrived in order.
    """
    in_order = 0
    for _ in range(TIMES):
        sent = [(c_longlong * n)(*(1000 * m + i for i in range(n))) for m, n in enumerate(SIZES)]
        got = [(c_longlong * n)() for n in SIZES]
        cuda.ncclGroupStart()
        for ours, theirs, n in zip(sent, got, SIZES):
            assert cuda.ncclRecv(theirs, c_size_t(n), INT64, peer, comm, None) == 0
            assert cuda.ncclSend(ours, c_size_t(n), INT64, peer, comm, None) == 0
        assert cuda.ncclGroupEnd() == 0
        in_order += [list(message) for message in sent] == [list(message) for message in got]
    return in_order


def messages(cuda: Any, rank: int, file: str) -> Answers:
    return {"groups in order": _groups_in_order(cuda, _join(cuda, rank, file), 1 - rank)}


def own_messages(cuda: Any, rank: int, file: str) -> Answers:
    """Sends messages to the same rank, in a communicator of one rank, so the order of ranks does not matter."""
    return {"groups in order": _groups_in_order(cuda, _join(cuda, rank, file, size=1), rank)}


def sizes_differ(cuda: Any, rank: int, file: str) -> Answers:
    comm, numbers = _join(cuda, rank, file), (c_float * 4)()
    return {"error": cuda.ncclAllReduce(numbers, numbers, c_size_t(2 + rank), FLOAT32, SUM, comm, None)}


def main(library: str, name: str, words: Sequence[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # ranks that differ abort on purpose, so no core dump is needed
    cuda = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    answers = globals()[name](cuda, *(int(word) if word.isdigit() else word for word in words))
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
