"""The programs `sft`, `torchrun` and `python` for shells that tests start, without waiting for imports.

`sft WORDS`, `torchrun WORDS`, and `python -m` with `sft`, a module of tools or `torch.distributed.run` run as processes
that the rank server forks after its imports.  The programs of a folder are small clients: they send the words, the
environment and the working folder to a socket of this test process, and end with the exit code.  The forked process
writes to the client's stdout and stderr, and its `sys.executable` is the client, so that ranks of `torchrun` and of
`sft train --processes` are forked, too.  `python` with any other words runs as usual.
"""

import contextlib
import functools
import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.rank_server import rank_server

_CLIENT = """#!{python} -IS
import json, os, socket, sys
words = {words} + sys.argv[1:]
words = words[words[:1] == ["-u"]:]  # torchrun asks for streams without buffers
if words[:1] != ["-m"] or not (words[1] in ("sft", "torch.distributed.run") or words[1].startswith("tools.")):
    os.execv({python!r}, [{python!r}, *words])
asks = {{"module": words[1], "words": words[2:], "environ": dict(os.environ)}}
asks |= {{"folder": os.getcwd(), "python": {shim!r}}}
asks |= {{"out": f"/proc/{{os.getpid()}}/fd/1", "err": f"/proc/{{os.getpid()}}/fd/2"}}
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendall(json.dumps(asks).encode() + b"\\n")
    code = int(server.makefile().readline())
sys.exit(code if code >= 0 else 128 - code)
"""


def commands(folder: Path) -> None:
    """Makes a new `folder` with the programs.  They work until this test process ends."""
    folder.mkdir()
    shim = str(folder / "python")
    for name, words in (("sft", ["-m", "sft"]), ("torchrun", ["-m", "torch.distributed.run"]), ("python", [])):
        client = _CLIENT.format(python=sys.executable, words=words, shim=shim, address=_address())
        (folder / name).write_text(client)
        (folder / name).chmod(0o755)


@functools.cache
def _address() -> str:
    """The socket of this test process, at which a thread accepts clients."""
    folder = tempfile.mkdtemp(prefix="commands-")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_answer, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"{folder}/socket"


def _answer(client: socket.socket) -> None:
    with client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        asks = json.loads(client.makefile().readline())
        pid = rank_server().fork(**asks)
        while (code := rank_server().code(pid)) is None:
            time.sleep(0.01)
        client.sendall(f"{code}\n".encode())
