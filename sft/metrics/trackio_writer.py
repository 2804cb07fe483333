"""Logs the records of a run to trackio, which keeps them on this machine or on a Hugging Face Space."""

from collections.abc import Mapping
from typing import Any

from sft.errors import ConfigError, in_one_line
from sft.metrics.records import Record
from sft.metrics.scalars import scalars

# No dashboard in a notebook, and no threads that measure the machine.
_QUIET: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


class Trackio:
    """Logs to trackio.  A resumed run continues the run of the same name.

    TRACKIO_DIR and TRACKIO_SPACE_ID say where trackio keeps the numbers.  Raises ConfigError if it does not start.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        import trackio  # optional, and slow to import

        try:
            self._run: Any = trackio.init(project=project, name=name, config=dict(config), resume="allow", **_QUIET)
        except Exception as error:  # any error of its service, of files and of the network
            raise ConfigError(
                f"log.trackio = {project}: trackio did not start: {type(error).__name__}: {in_one_line(str(error))}.  "
                "Set TRACKIO_DIR to a folder that can be written, or switch trackio off with log.trackio=null."
            ) from error

    def write(self, record: Record) -> None:
        if numbers := scalars(record):
            self._run.log(numbers, step=record["step"])

    def close(self, exit_code: int = 0) -> None:
        self._run.finish()
