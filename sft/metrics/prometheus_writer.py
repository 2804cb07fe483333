"""Serves the newest numbers of a run as the text that Prometheus reads, at http://HOST:PORT/metrics of rank 0."""

import re
import time
from typing import Any

from sft.errors import ConfigError, in_one_line
from sft.metrics.records import Record
from sft.metrics.scalars import scalars


class Prometheus:
    """Serves gauges until `close`: sft_step, sft_last_record_time_seconds, and one for each number of the log.

    The port is open on all interfaces, and shows numbers only.  Raises ConfigError if it cannot be opened.
    """

    def __init__(self, port: int) -> None:
        import prometheus_client  # optional

        self._new_gauge = prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"log.prometheus_port = {port} cannot be opened: {in_one_line(error.strerror or str(error))}.  Choose "
                "a free port from 1024 on, or null."
            ) from error

    def write(self, record: Record) -> None:
        numbers = {"step": float(record["step"]), "last record time seconds": time.time(), **scalars(record)}
        for name, value in numbers.items():
            self._gauge(name).set(value)

    def close(self, exit_code: int = 0) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            metric = prometheus_name(name)
            taken = {gauge._name for gauge in self._gauges.values()}
            while metric in taken:  # two sources whose names differ only in letters that Prometheus refuses
                metric += "_"
            self._gauges[name] = self._new_gauge(metric, f"{name} (docs/reference/metrics.md)", registry=self._registry)
        return self._gauges[name]


def prometheus_name(name: str) -> str:
    """The name of a number at Prometheus: "loss by position/64K+/loss" -> sft_loss_by_position_64K_plus_loss"""
    return "sft_" + re.sub(r"[^A-Za-z0-9_]", "_", name.replace("+", "_plus"))
