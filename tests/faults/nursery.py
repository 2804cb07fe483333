"""Ranks without the wait for their imports: python -m tests.faults.nursery

A process that has imported what a rank imports, has one thread, and forks a rank for every line on its stdin.  The
rank is then in the state in which `python -m sft` is once its imports are done: own session, own environment, its
output in files.

    {"argv": [...], "env": {...}, "out": "...", "err": "..."}  ->  pid
    {"of": pid}  ->  its exit code (-9 where it was killed), or null while it runs
"""

import gc
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    """Until the end of stdin."""
    import torch.utils.tensorboard  # noqa: F401

    import sft.trainer  # noqa: F401
    from tests.faults import inject

    assert os.listdir("/proc/self/task") == [str(os.getpid())], "a fork has none of the other threads"
    gc.freeze()  # not to be written to by each fork
    codes: dict[int, int] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "argv" in asked:
            answer: Any = os.fork()
            if answer == 0:
                _become(asked, inject)
            codes.pop(answer, None)  # numbers come again
        else:
            answer = _code(asked["of"], codes)
        print(json.dumps(answer), flush=True)


def _become(asked: dict[str, Any], inject: Any) -> None:
    try:
        os.setsid()
        for number, path in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(path, flags, 0o644), number)
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = ["sft", *asked["argv"]]
        inject.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def _code(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == 0:
            return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]


if __name__ == "__main__":
    main()
