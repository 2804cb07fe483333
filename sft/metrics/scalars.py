"""The numbers of a record as services draw them, with the names of Megatron-LM."""

from sft.metrics.long_records import LONG
from sft.metrics.records import Record
from sft.metrics.results.records import flat
from sft.metrics.rows import ROWS

_NOT_DRAWN = {row.name for row in ROWS if not row.drawn}


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record that TensorBoard and the services draw over steps; {} for a `start` record.

    step -> `lm loss`        held-out set `eval` -> `lm loss validation`        other set -> `lm loss validation/NAME`
    questions of 4096 tokens -> `answers by task/needle/right/4096`
    """
    if record["kind"] == "start":
        return {}
    suffix = ""
    if record["kind"] == "eval":
        suffix = " validation" if record["set"] == "eval" else f" validation/{record['set']}"
    elif record["kind"] == LONG:
        suffix = f"/{record['length']}"
    return {
        name + suffix: float(value)
        for name, value in flat(record)
        if name not in _NOT_DRAWN and isinstance(value, int | float)
    }
