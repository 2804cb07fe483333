"""Loads a dataset by name, from the Hugging Face hub or a local folder, and lists the Arrow files that hold its rows.

`datasets` downloads the files and converts them to Arrow files in its own cache (HF_HOME, HF_DATASETS_CACHE).  This
module decides the commit of a dataset, its split, and which errors end the preparation.  `tables.py` reads the rows,
without `datasets`.  No code of a dataset runs: only data formats are read, and no loading scripts.

If the hub fails, `datasets` uses any cached copy.  This module accepts a copy only if it is the commit that was asked
for, or if HF_HUB_OFFLINE is set, the recipe names no revision, and no other commit is known.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.config import NamedDataset
from sft.data.read.tables import TableSlice, column_names, count_table
from sft.errors import DataError, first_few
from sft.parallel.messages import message

_FORMATS = {"parquet", "json", "csv", "text", "arrow", "cache"}  # formats of `datasets`; cache: loaded before
_SAVED = ("state.json", "dataset_dict.json")  # files of save_to_disk
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubUnreachable(DataError):
    """The error if the hub does not answer, or must not be asked (HF_HUB_OFFLINE), and no cached copy can be used."""


@message
@dataclass(frozen=True, kw_only=True)
class LoadedDataset:
    """The rows of a dataset: rows of Arrow files.

    commit   the commit of a dataset on the hub; None for a folder
    slices   the Arrow files in order, each with its first row and the row after its last one, counted from 0
    columns  pairs (key of a row, column of the dataset); None: all columns under their own names
    digest   a hash of the bytes of the files, the slices and the columns; "" until sft/data/cache/ computes it
    """

    name: str  # HuggingFaceH4/ultrachat_200k train_sft
    commit: str | None
    slices: tuple[TableSlice, ...]
    columns: tuple[tuple[str, str], ...] | None
    digest: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def files(self) -> list[Path]:
        """The Arrow files, each once."""
        return list(dict.fromkeys(part.file for part in self.slices))

    @property
    def num_rows(self) -> int:
        return sum(part.stop - part.first for part in self.slices)


def load_dataset(wanted: NamedDataset) -> LoadedDataset:
    """The rows of a dataset, downloaded if the cache of `datasets` lacks them.

    Raises DataError if the dataset is not found or gated, if its configuration, split or column does not exist, or if
    its format is not read.  Raises HubUnreachable if the hub cannot be asked.
    """
    folder = Path(wanted.name)
    is_local = folder.exists()
    if is_local:
        _check_folder(wanted, folder)
    elif wanted.name.startswith((".", "/", "~")) or wanted.name.count("/") > 1:
        raise DataError(f"dataset {wanted.name} does not exist (folder {Path.cwd()}), and is no name of a dataset.")
    commit = None if is_local else commit_of(wanted)
    splits, made_of = _prepared(wanted, commit)
    if not is_local:
        commit = _checked_commit(wanted, commit, made_of)
    slices = tuple(_slices(wanted, splits))
    if wanted.columns is not None and slices:
        known = column_names(slices[0].file)
        if missing := [column for _, column in wanted.columns if column not in known]:
            raise DataError(
                f"dataset {wanted} has no column {', '.join(first_few(missing))}, which columns names.  Its columns "
                f"are {', '.join(first_few(known, 50))}."
            )
    return LoadedDataset(name=str(wanted), commit=commit, slices=slices, columns=wanted.columns)


def _check_folder(wanted: NamedDataset, folder: Path) -> None:
    if wanted.revision is not None:
        raise DataError(
            f"dataset {wanted.name} is a folder, which has no revision {wanted.revision}.  Remove revision."
        )
    if folder.is_file():
        raise DataError(f"dataset {wanted.name} is a file.  Name it with files: {wanted.name} instead of dataset.")
    if any((folder / name).exists() for name in _SAVED):
        raise DataError(
            f"dataset {wanted.name} was written by save_to_disk.  Name the folder of one split with files: PATH "
            "instead of dataset; it is read as it is."
        )


def commit_of(wanted: NamedDataset) -> str | None:
    """The commit of a dataset on the hub; None if HF_HUB_OFFLINE is set."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return str(HfApi().dataset_info(wanted.name, revision=wanted.revision, timeout=60).sha)
    except OfflineModeIsEnabled:
        return None
    except Exception as error:  # errors of huggingface_hub and of the network
        raise hub_refusal(wanted, error) from error


def hub_refusal(wanted: NamedDataset, error: Exception) -> DataError:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name = wanted.name
    match error:
        case GatedRepoError():
            return _gated(name)
        case RevisionNotFoundError():
            return DataError(f"dataset {name} has no revision {wanted.revision}.  Give a commit, a tag or a branch.")
        case RepositoryNotFoundError() | HFValidationError():
            return DataError(
                f"dataset {name} is neither a folder nor a dataset on the Hugging Face hub that this user may read.  "
                "Check the name (OWNER/NAME).  A private dataset needs a token: HF_TOKEN=... or hf auth login."
            )
    return HubUnreachable(
        f"dataset {name}: the Hugging Face hub cannot be reached: {_reason(error)}.  With HF_HUB_OFFLINE=1, a copy in "
        "the cache of datasets is used."
    )


def _prepared(wanted: NamedDataset, commit: str | None) -> tuple[Mapping[str, Any], str]:
    """Downloads and converts a dataset with `datasets`.  Returns {name of a split: `datasets.Dataset`}, and the commit,
    or for a folder the hash, of the files that were converted."""
    import datasets  # imported late: the import takes seconds, and most runs read files

    try:
        builder = datasets.load_dataset_builder(wanted.name, wanted.config, revision=commit)
        format_ = type(builder).__module__.rpartition(".")[2]
        if format_ not in _FORMATS:
            raise DataError(
                f"dataset {wanted.name} holds files of format {format_}, which may be more than data.  Datasets of "
                "parquet, JSON, CSV, text or Arrow files can be read."
            )
        builder.download_and_prepare()
        return builder.as_dataset(), str(builder.hash)
    except DataError:
        raise
    except Exception as error:  # datasets raises any error
        raise _load_refusal(wanted, error) from error


def _load_refusal(wanted: NamedDataset, error: Exception) -> DataError:
    reason = _reason(error.__cause__ if isinstance(error.__cause__, Exception) else error)
    if "ataset scripts are no longer supported" in str(error):
        return DataError(
            f"dataset {wanted.name} is a program ({str(error).rpartition(' ')[2]}), and code of a dataset is not run.  "
            "Many such datasets also exist as parquet files: try revision: refs/convert/parquet."
        )
    if isinstance(error, ConnectionError):
        return HubUnreachable(
            f"dataset {wanted.name} is not in the cache of datasets, and the Hugging Face hub cannot be asked: "
            f"{reason}.  Run sft data prepare once on a machine with a network, with the same HF_HOME."
        )
    if "gated" in reason:
        return _gated(wanted.name)
    return DataError(f"dataset {wanted.name} cannot be loaded: {reason}.")


def _gated(name: str) -> DataError:
    return DataError(
        f"dataset {name} is gated: its owner grants access.  Ask for it on https://huggingface.co/datasets/{name}, and "
        "give your token: HF_TOKEN=... or hf auth login."
    )


def _reason(error: BaseException) -> str:
    """The message of an error in one line, without examples of use."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines[:2] if not line.startswith("Example")]
    return " ".join(kept).rstrip(".") or type(error).__name__


def _checked_commit(wanted: NamedDataset, commit: str | None, made_of: str) -> str | None:
    """The commit that was loaded.  Raises DataError if it is not, or may not be, the commit that was asked for.

    commit   the commit that the hub names for the wanted revision; None: the hub was not asked (offline)
    made_of  the commit of the copy that `datasets` loaded
    """
    if commit is None:  # offline: datasets took the copy that it made last
        known = wanted.revision if COMMIT.fullmatch(wanted.revision or "") else _known_commit(wanted)
        if known != made_of and not (known is None and wanted.revision is None):
            raise DataError(
                f"dataset {wanted.name}: revision {wanted.revision or 'main'} is "
                f"{f'commit {known}' if known else 'unknown without a network'}, but the newest copy in the cache of "
                f"datasets is commit {made_of}, and HF_HUB_OFFLINE is set.  To train on this copy, set revision: "
                f"{made_of}."
            )
        return made_of
    if made_of != commit:
        raise HubUnreachable(
            f"dataset {wanted.name}: commit {commit} could not be downloaded, and the cache of datasets has only "
            f"commit {made_of}.  Check the access to the dataset, or set revision: {made_of}."
        )
    return commit


def _known_commit(wanted: NamedDataset) -> str | None:
    """The commit that the wanted branch or tag had when the hub was last asked; None if it is unknown."""
    from huggingface_hub import try_to_load_from_cache

    readme = try_to_load_from_cache(wanted.name, "README.md", revision=wanted.revision, repo_type="dataset")
    return Path(readme).parent.name if isinstance(readme, str) else None


def _slices(wanted: NamedDataset, splits: Mapping[str, Any]) -> Iterator[TableSlice]:
    """Yields the slices of the Arrow files that hold the wanted split: train[:10%] of 23 rows -> rows 0 to 2.

    Raises DataError if there is no such split.
    """
    from datasets import ReadInstruction

    try:
        wanted_rows = ReadInstruction.from_spec(wanted.split).to_absolute({k: len(v) for k, v in splits.items()})
    except ValueError as error:
        raise DataError(
            f"dataset {wanted.name} has no split {wanted.split}.  Its splits are "
            f"{', '.join(first_few(splits, 50))}; a part of one is "
            f'written "{next(iter(splits))}[:10%]" ({_reason(error)}).'
        ) from error
    for rows in wanted_rows:
        split = splits[rows.splitname]
        begin, covered = 0, 0
        for cached in split.cache_files:
            file = Path(cached["filename"])
            end = begin + count_table([file])
            first, stop = max(rows.from_, begin), min(rows.to, end)
            if first < stop:
                yield TableSlice(file, first - begin, stop - begin)
                covered += stop - first
            begin = end
        assert covered == rows.to - rows.from_ and split._indices is None, f"{rows} of {split.cache_files}"
