"""Reads metrics.jsonl of a run, for the tools that compare and draw runs; needs nothing but Python.

Schema 1 to 5 are read.  A resumed run may repeat steps, and its reader decides which record counts.  A last line that a
killed run left half written is left out.
"""

import json
from pathlib import Path
from typing import Any

SCHEMAS = (1, 2, 3, 4, 5)
TRAIN, EVAL = "train", "eval"


class RunError(Exception):
    """A run that cannot be read: one paragraph for the user, exit code 2."""


def read_records(run: Path) -> list[dict[str, Any]]:
    """Every record of a run folder, or of its metrics.jsonl; at least one is of a step or an evaluation."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise RunError(
            f"{path} does not exist. Give the folder of a run (run.dir of its recipe, like runs/demo) "
            "or its metrics.jsonl."
        ) from None
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}. Give the folder of a run that you may read."
        ) from error
    records = [_record(path, number, line) for number, line in enumerate(lines, 1)]
    if _is_whole(tail):
        records.append(_record(path, len(lines) + 1, tail))
    for record in records[:1] + [record for record in records if "schema" in record]:
        if record.get("schema") not in SCHEMAS:
            raise RunError(
                f"{path} has schema {record.get('schema')}; this tool reads {SCHEMAS[0]} to {SCHEMAS[-1]}. "
                "Use the tool of the version that made the run."
            )
    if not any(record["kind"] in (TRAIN, EVAL) for record in records):
        raise RunError(f"{path} has no step and no evaluation: the run has only begun, or ended before its first.")
    return records


def held_out_set(record: dict[str, Any]) -> str:
    """Which held-out set an evaluation is of; before schema 3 there was one, without a name."""
    name: str = record.get("set", EVAL)
    return name


def _is_whole(tail: bytes) -> bool:
    """Whether what follows the last line break is a record; else a killed run left it half written."""
    try:
        return isinstance(json.loads(tail), dict)
    except ValueError:
        return False


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # not JSON, or not even UTF-8
        reason = getattr(error, "msg", "not UTF-8")
        raise RunError(
            f"{path}:{number} is not JSON ({reason}): the file is damaged, or is not the metrics of a run. "
            "Remove that line, or give the folder of a run."
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or type(record.get("step")) is not int:
        raise RunError(
            f"{path}:{number} is not a record with a kind and a whole step: not the metrics of a run of sft. "
            "Give the folder of a run."
        )
    return record
