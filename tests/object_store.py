"""An S3 server (moto) in this process that can delay, refuse, cut or report requests."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

BUCKET = "bucket"
SECRET = "wJalrXUtnFEMI0K7MDENGbPxRfiCYEXAMPLEKEY"
ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"


@dataclass
class Server:
    """The server.

    environment  what a process needs to reach it
    before       called with (number, method, path) of each request; its answer is a fault: "503", "cut",
                 "403 Forbidden|AccessDenied"
    latency_s    seconds that each request takes longer
    requests     (method, path, bytes of the answer) of the requests that were answered
    """

    port: int
    before: Callable[[int, str, str], str | None] = lambda number, method, path: None
    latency_s: float = 0.0
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    _count: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    def bucket(self, name: str = BUCKET) -> None:
        from moto.s3.models import s3_backends

        backend = s3_backends["123456789012"]["aws"]
        if name not in backend.buckets:
            backend.create_bucket(name, "us-east-1")

    def content(self, prefix: str = "", bucket: str = BUCKET) -> dict[str, bytes]:
        """The objects whose keys begin with the prefix, without it.  Reads the server's memory, not the network."""
        from moto.s3.models import s3_backends

        keys = s3_backends["123456789012"]["aws"].buckets[bucket].keys
        return {name.removeprefix(prefix): keys[name].value for name in list(keys) if name.startswith(prefix)}

    def number(self) -> int:
        with self._lock:
            self._count += 1
            return self._count


@contextmanager
def serving() -> Iterator[Server]:
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    inner = DomainDispatcherApplication(create_backend_app)
    server = Server(0)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        fault = server.before(server.number(), method, path)
        time.sleep(server.latency_s)
        if fault not in (None, "cut"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, _, code = fault.partition("|")
            text = f"<Error><Code>{code or 'SlowDown'}</Code><Message>No.</Message></Error>".encode()
            start_response(status if " " in status else f"{status} Slow Down", [("Content-Length", str(len(text)))])
            return [text]
        body = b"".join(inner(environ, start_response))
        server.requests.append((method, path, len(body)))
        if fault == "cut":  # after the work is done, so that only the answer is lost
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        return [body]

    http = make_server("127.0.0.1", 0, application, threaded=True)
    server.port = http.server_port
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        s3_backends.reset()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with an empty bucket, which this process and its children reach by their environment.  It takes parts of
    any size."""
    from moto.s3 import models

    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    with serving() as server:
        server.bucket()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
