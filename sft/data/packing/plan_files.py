"""Writes, reads and compares plan files, and gives a run the plans of a file.

A plan file holds JSON lines: a header with everything that determines the plan, then one line per global batch with the
sample ids of its packs.

    {"format": "sft plan 1", "data": "9f2c...", "data.seq_length": 1024, ...}
    {"epoch": 0, "batch": 0, "packs": [[3, 17], [4, 9, 1]]}

A run that follows a file needs the file's data, seq_length, doc_multiple and global_batch_size; the file replaces the
run's seed, shuffle and mixture.  `plan.py` makes plans.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sft.config import Config
from sft.data.cache.corpus import Corpus
from sft.data.packing.plan import VERSION, PackingPlan, plan_of
from sft.errors import ConfigError, DataError
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, open_file
from sft.parallel.shapes import SampleSizes, padded

FORMAT = "sft plan 1"
_MUST_MATCH = ("data", "data.seq_length", "data.doc_multiple", "train.global_batch_size")
READ = ("data", "data.plan")  # keys of `follows_from` whose values are digests of files


def follows_from(config: Config, corpus: Corpus) -> dict[str, Any]:
    """Everything that determines the order of the data: {"data": digest of the corpus, "run.seed": 1234, ...}"""
    file = Path(config.data.plan) if config.data.plan else None
    return {"data": corpus.digest, **settings(config), "data.plan": _digest(file) if file else None}


def settings(config: Config) -> dict[str, Any]:
    """The entries of `follows_from` that need no files: all except `READ`."""
    shares = {
        name: {"weight": source.weight, "epochs": source.epochs, "files": len(source.inputs)}
        for name, source in config.data.sources.items()
        if source.weight is not None or source.epochs is not None
    }
    return {
        "run.seed": config.run.seed,
        "data.seq_length": config.data.seq_length,
        "data.doc_multiple": config.data.doc_multiple,
        "data.shuffle": config.data.shuffle,
        "train.global_batch_size": config.train.global_batch_size,
        "data.train": shares or None,
        "planner": VERSION,
    }


def _digest(file: Path) -> str:
    try:
        with open_file(file) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except (OSError, UnsafeFileError) as error:
        raise DataError(f"data.plan = {file} cannot be read: {_reason(error)}.") from error


def write_plans(path: Path, header: Mapping[str, Any], plans: Sequence[PackingPlan], global_batch_size: int) -> None:
    """Writes the plans of epochs 0, 1, ... to `path`.  Raises ConfigError if this fails."""
    lines: list[Any] = [{"format": FORMAT, **header}]
    for epoch, plan in enumerate(plans):
        for batch in range(plan.num_batches(global_batch_size)):
            packs = [pack for pack in plan.batch(batch, global_batch_size) if pack]
            lines.append({"epoch": epoch, "batch": batch, "packs": packs})
    try:
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the plan cannot be written to {path}: {error.strerror}.") from error


def replayed_plans(config: Config, corpus: Corpus) -> list[PackingPlan] | None:
    """The plans of the file that data.plan names; None if the recipe names no file.  Raises DataError
    (`read_plans`)."""
    if config.data.plan is None:
        return None
    return read_plans(Path(config.data.plan), follows_from(config, corpus), corpus.shapes)


def read_plans(path: Path, header: Mapping[str, Any], lengths: SampleSizes) -> list[PackingPlan]:
    """The plans of a file, one for each epoch.

    header   the result of `follows_from` for the run that follows the file
    lengths  sizes of all samples, by sample id
    Raises DataError if the file cannot be read, was written for other data or sizes, or is not a valid plan.
    """
    written, batches = _read(path)
    other = [
        f"{key} was {written.get(key)}, is {header[key]}" for key in _MUST_MATCH if written.get(key) != header[key]
    ]
    if other:
        raise DataError(
            f"the plan {path} was made for other data or sizes: {'; '.join(other)}.  Write a new plan: sft data plan "
            f"RECIPE --write {path}"
        )
    capacity, multiple = header["data.seq_length"], header["data.doc_multiple"]
    epochs: list[list[list[int]]] = []
    for line, epoch, packs in batches:
        if epoch not in (len(epochs) - 1, len(epochs)):
            raise DataError(f"{line}: epoch {epoch} follows {len(epochs)} epochs; epochs must be in order, from 0.")
        if epoch == len(epochs):
            epochs.append([])
        elif len(epochs[epoch]) % header["train.global_batch_size"]:
            raise DataError(
                f"{line}: the previous global batch is not full; only the last global batch of an epoch may have "
                "fewer packs."
            )
        for pack in packs:
            _check(line, pack, lengths, capacity, multiple)
        if len(packs) > header["train.global_batch_size"]:
            raise DataError(
                f"{line}: {len(packs)} packs; a global batch must have {header['train.global_batch_size']} packs."
            )
        epochs[epoch] += packs
    plans = []
    for packs in epochs:
        samples = np.fromiter(chain.from_iterable(packs), dtype=np.int64)
        plans.append(plan_of(samples, np.array([len(pack) for pack in packs]), lengths, capacity, multiple))
    return plans


def compare_plans(first: Path, second: Path) -> list[str]:
    """Lines that describe the differences of two plan files; empty if all global batches have the same samples.

    Packs of a global batch are not compared, because they change only the speed of a run.  Raises DataError if a file
    cannot be read or is no plan.
    """
    (header, batches), (other_header, other_batches) = _read(first), _read(second)
    members, other_members = _members(batches), _members(other_batches)
    none: Counter[int] = Counter()
    keys = sorted({*members, *other_members})
    differ = [key for key in keys if members.get(key, none) != other_members.get(key, none)]
    if header.get("data") != other_header.get("data"):  # then equal ids mean different samples
        return [f"made from other data: {header.get('data')} and {other_header.get('data')}"]
    if not differ:
        return []
    moved = sum((members.get(key, none) - other_members.get(key, none)).total() for key in differ)
    epoch, batch = differ[0]
    return [
        f"first difference: epoch {epoch}, global batch {batch}, both counted from 0",
        f"{len(differ):,} of {len(keys):,} batches differ; {moved:,} samples of {first} are in another batch of "
        f"{second}",
        *(
            f"made from {key} {header.get(key)} and {other_header.get(key)}"
            for key in dict.fromkeys([*header, *other_header])
            if header.get(key) != other_header.get(key)
        ),
    ]


def _members(batches: Sequence[tuple[str, int, list[list[int]]]]) -> dict[tuple[int, int], Counter[int]]:
    """For each pair (epoch, batch), how often each sample id occurs in the batch."""
    members: dict[tuple[int, int], Counter[int]] = {}
    num_batches: Counter[int] = Counter()
    for _, epoch, packs in batches:
        members[epoch, num_batches[epoch]] = Counter(chain.from_iterable(packs))
        num_batches[epoch] += 1
    return members


def _read(path: Path) -> tuple[dict[str, Any], list[tuple[str, int, list[list[int]]]]]:
    """The header of a plan file, and for each global batch its line (PATH:NUMBER), epoch and packs."""
    rows = _rows(path)
    _, header = next(rows, ("", {}))
    if header.get("format") != FORMAT:
        raise DataError(f"{path} is not a plan: its first line does not name the format {FORMAT}.")
    batches: list[tuple[str, int, list[list[int]]]] = []
    for line, row in rows:
        epoch: Any = row.get("epoch")
        packs: Any = row.get("packs")
        lists = isinstance(packs, list) and packs and all(isinstance(pack, list) for pack in packs)
        if type(epoch) is not int or epoch < 0 or not lists or not all(type(i) is int for i in chain(*packs)):
            raise DataError(
                f'{line}: expected a global batch, as in {{"epoch": 0, "batch": 0, "packs": [[0, 1], [2]]}}.'
            )
        batches.append((line, epoch, packs))
    if not batches:
        raise DataError(f"{path} contains no global batch.")
    return {key: value for key, value in header.items() if key != "format"}, batches


def _reason(error: OSError | UnsafeFileError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LIST_BYTES), b""), start=1):
                row = json.loads(line.decode())
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}")
                yield f"{path}:{number}", row
    except (OSError, UnsafeFileError) as error:
        raise DataError(f"the plan {path} cannot be read: {_reason(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a plan: a line is not a JSON object ({error}).") from error


def _check(line: str, pack: list[int], lengths: SampleSizes, capacity: int, multiple: int) -> None:
    if not pack or min(pack) < 0 or max(pack) >= len(lengths):
        raise DataError(f"{line}: expected packs of sample numbers from 0 to {len(lengths) - 1}, none empty.")
    if (size := int(padded(lengths[pack], multiple).sum())) > capacity:
        raise DataError(f"{line}: a pack of {size} padded tokens; data.seq_length is {capacity}.")
