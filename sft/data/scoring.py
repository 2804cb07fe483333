"""Keeps what ranks have scored in parts on disk, and makes the files of `sft score` of them.

    FOLDER/train.parquet              a finished file (`teacher/records.py`); its name is that of the set
    FOLDER/train.work/conditions.json everything that determines the parts
    FOLDER/train.work/batch-0000003/rank-00001.npy
                                      the scores of one rank of the dp x cp grid in one global batch (`part_dtype`)

A global batch has consecutive samples, so the parts of one batch after the other are in the order of the data.  Parts
and files get their names when they are complete.  So a killed command continues with the first global batch that lacks
a part, and the finished file does not depend on where the command was killed.

This module decides where a score belongs.  `sft/evaluation/distributions.py` computes scores.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sft.batch import Sample
from sft.config import Config
from sft.console import Console
from sft.data.cache.corpus import Corpus
from sft.data.loader import Loader
from sft.data.packing.in_order import plan_in_order
from sft.data.packing.plan import EpochPlans
from sft.data.packing.tree_packs import predicting_rows, tree_of
from sft.data.pipeline import HeldOutData
from sft.data.teacher import records
from sft.data.teacher.inline import token_digest
from sft.errors import ConfigError, DataError
from sft.files.atomic_files import replace_text, replacing
from sft.parallel.alignment import aligned

ROW_GROUP_BYTES = 32 << 20  # a row group of a file has one sample, or at most so many bytes


class ScoringData(HeldOutData):
    """The loaders of all data of a recipe, in order.  The constructor is collective.

    sets  the loader of the training data, `train`, and of each held-out set, by name.  Step n of a loader is global
          batch n
    """

    def __post_init__(self, tokenizer: Any) -> None:
        super().__post_init__(tokenizer)
        data = self.config.data
        train = self._loader(data.train_files, tokenizer, data.train_names, is_held_out=True)
        self.sets = {name: in_order(self.config, loader) for name, loader in {"train": train, **self.held_out}.items()}


def in_order(config: Config, loader: Loader) -> Loader:
    """A loader of the same samples in order, all of them once."""
    size, shapes = loader.plans.global_batch_size, loader.corpus.shapes
    plan = plan_in_order(
        shapes, capacity=config.data.seq_length, doc_multiple=config.data.doc_multiple, global_batch_size=size
    )
    plans = EpochPlans(shapes, config.data, seed=0, global_batch_size=size, replayed=[plan])
    return replace(loader, plans=plans)


def part_dtype(k: int) -> np.dtype:
    """The type of a part: one element for each target of a rank's tokens.

    row is the index in the pack of the token that predicts the target; the pack is that of the rank's `microbatch`
    """
    scalars = [("microbatch", np.int32), ("row", np.int64), ("label", np.int32), ("label_logprob", np.float32)]
    return np.dtype([*scalars, ("ids", np.int32, (k,)), ("logprobs", np.float32, (k,))])


class ScoredSet:
    """The parts and the file of one set of data.

    facts  determine the file, and are written into its metadata
    """

    def __init__(self, folder: Path, name: str, loader: Loader, k: int, facts: dict[str, Any]) -> None:
        self.file, self._work = folder / f"{name}.parquet", folder / f"{name}.work"
        self.loader, self.k, self._facts = loader, k, facts
        self.num_batches = loader.plans.plan(0).num_batches(loader.plans.global_batch_size)
        self.num_ranks = loader.layout.dp * loader.layout.cp

    def begin(self, conditions: dict[str, Any]) -> list[int] | None:
        """The global batches that lack parts; None: the file is finished.  Called on one rank.

        conditions: everything that determines the parts, in JSON's types
        Raises ConfigError if the folder has a file or parts of other conditions.
        """
        if self.file.exists():
            self._check_file()
            return None
        known = self._work / "conditions.json"
        try:
            before = json.loads(known.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._work.mkdir(parents=True, exist_ok=True)
            replace_text(known, json.dumps(conditions, indent=1, sort_keys=True) + "\n")
            return list(range(self.num_batches))
        except ValueError:
            before = {}
        if changed := sorted(key for key in {**before, **conditions} if before.get(key) != conditions.get(key)):
            raise ConfigError(
                f"{self._work} has parts of another scoring: {changed[0]} was {before.get(changed[0])}, and is now "
                f"{conditions.get(changed[0])}.  Continue with the same recipe, layout and --top-k, or give another "
                "folder with --out, or remove the parts."
            )
        return [batch for batch in range(self.num_batches) if not self._is_complete(batch)]

    def write_part(self, batch: int, grid_rank: int, part: np.ndarray) -> None:
        """Writes the part of this rank; `part` has the type `part_dtype`."""
        with replacing(self._path(batch, grid_rank)) as temporary, temporary.open("wb") as stream:
            np.save(stream, part)

    def assemble(self, tokenizer: str, console: Console) -> None:
        """Makes the file of all parts, and removes them.  Holds one row group in memory.  Called on one rank.

        tokenizer: digest of everything that determines the ids of a text
        """
        from pyarrow import parquet

        corpus = self.loader.corpus
        kind = records.schema({**self._facts, "tokenizer": tokenizer})
        with (
            replacing(self.file) as temporary,
            parquet.ParquetWriter(temporary, kind, compression="zstd") as writer,
            console.track(f"writing {self.file}", len(corpus), "samples") as progress,
        ):
            for group in self._groups(corpus):
                writer.write_batch(records.to_batch(group, tokenizer, kind), row_group_size=len(group))
                progress.advance(len(group))
        shutil.rmtree(self._work, ignore_errors=True)

    def _groups(self, corpus: Corpus) -> Iterator[list[records.ScoredSample]]:
        """Yields the samples of each row group."""
        group: list[records.ScoredSample] = []
        num_bytes = 0
        for batch in range(self.num_batches):
            for scored in self._samples(batch, corpus):
                if group and num_bytes + scored.num_bytes > ROW_GROUP_BYTES:
                    yield group
                    group, num_bytes = [], 0
                group.append(scored)
                num_bytes += scored.num_bytes
        yield group

    def _samples(self, batch: int, corpus: Corpus) -> Iterator[records.ScoredSample]:
        """Yields the samples of a global batch in order."""
        parts = [self._read(batch, rank) for rank in range(self.num_ranks)]
        located: dict[int, tuple[_PackScores, np.ndarray]] = {}  # {sample id: (scores of its pack, rows of its labels)}
        for rank, slots in enumerate(self.loader.grid(batch)):
            for microbatch, slot in enumerate(slots):
                if rank % slot.cp_size == 0:
                    samples = self.loader.samples_of(slot)
                    scores = _PackScores(parts[rank : rank + slot.cp_size], microbatch)
                    of_samples = _rows_of_labels(samples, self.loader.layout.doc_multiple)
                    located |= {sample.sample_id: (scores, rows) for sample, rows in zip(samples, of_samples)}
        for sample_id in sorted(located):
            scores, rows = located[sample_id]
            sample = corpus.sample(sample_id)
            scored = scores.at(rows, sample.tokens[sample.labels])
            if scored is None:
                raise DataError(
                    f"the parts in {self._work} lack scores of {corpus.name(sample_id)}.  Remove this folder, and "
                    "score the data again."
                )
            file, row, part = corpus.location(sample_id)
            yield records.ScoredSample(
                file=str(file),
                row=row,
                part=part,
                tokens=None if sample.tree else sample.tokens,
                weights=None if sample.tree else sample.weights,
                digest=token_digest(sample.tokens, sample.tree),
                positions=sample.labels.astype(np.int32),
                ids=scored["ids"],
                logprobs=scored["logprobs"],
                label_logprobs=scored["label_logprob"],
            )

    def _check_file(self) -> None:
        from pyarrow import ArrowException, parquet

        try:
            metadata = parquet.read_schema(self.file).metadata or {}
            there = json.loads(metadata.get(records.METADATA, b"{}"))
        except (ArrowException, OSError, ValueError):
            there = {}
        if any(there.get(key) != value for key, value in self._facts.items()):
            raise ConfigError(
                f"--out has {self.file}, which is of another scoring or damaged.  Give another folder, or remove the "
                "file."
            )

    def _is_complete(self, batch: int) -> bool:
        return all(self._path(batch, rank).exists() for rank in range(self.num_ranks))

    def _read(self, batch: int, grid_rank: int) -> np.ndarray:
        path = self._path(batch, grid_rank)
        try:
            part = np.load(path, mmap_mode="r")
            if part.dtype != part_dtype(self.k):
                raise ValueError(f"it holds {part.dtype}")
        except (OSError, ValueError, EOFError) as error:
            path.unlink(missing_ok=True)
            raise DataError(
                f"{path} is damaged ({error}) and was removed.  Start the command again, which scores its global "
                "batch again."
            ) from error
        return np.asarray(part)

    def _path(self, batch: int, grid_rank: int) -> Path:
        return self._work / f"batch-{batch:07}" / f"rank-{grid_rank:05}.npy"


def _rows_of_labels(samples: list[Sample], doc_multiple: int) -> list[np.ndarray]:
    """For each sample of a pack, the tokens of the pack that predict its labels, int64 [labels]."""
    rows, first = [], 0
    for sample in samples:
        tree = tree_of(sample)
        ends = first + np.cumsum([0, *aligned(np.diff(tree.starts), doc_multiple)])
        rows.append(predicting_rows(tree, ends[:-1])[sample.labels])
        first = int(ends[-1])
    return rows


class _PackScores:
    """The scores of one pack.  parts: those of the ranks that share the pack"""

    def __init__(self, parts: list[np.ndarray], microbatch: int) -> None:
        bounds = [np.searchsorted(part["microbatch"], [microbatch, microbatch + 1]) for part in parts]
        self._parts = [part[first:stop] for part, (first, stop) in zip(parts, bounds, strict=True)]  # not read yet
        keys = np.concatenate([_keys(part["row"], part["label"]) for part in self._parts])
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def at(self, rows: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        """The scores of targets, of the type `part_dtype`; None if one is missing."""
        wanted = _keys(rows, labels)
        index = np.searchsorted(self._keys, wanted)
        if len(wanted) and (index.max() == len(self._keys) or (self._keys[index] != wanted).any()):
            return None
        scores, start = np.empty(len(wanted), dtype=self._parts[0].dtype), 0
        for part in self._parts:
            of_part = self._order[index] - start
            is_in_part = (of_part >= 0) & (of_part < len(part))
            scores[is_in_part] = part[of_part[is_in_part]]
            start += len(part)
        return scores


def _keys(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """int64 [n]: one number for each pair of a token of a pack and a label."""
    return (rows.astype(np.int64) << 32) + labels
