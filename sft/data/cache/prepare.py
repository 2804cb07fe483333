"""Makes stores of data files.  `prepare` continues where a killed preparation stopped.

Decides the order of writes, so that no incomplete store is ever visible, and the largest share of rows that
data.on_bad_row = skip may skip.  `encoder.py` makes samples, and `folders.py` names stores.

Any number of processes may prepare the same files at once.  Parts and stores get their names by renaming, and their
content does not depend on the process that makes them.  If a faster process removes the work folder of a file, the
slower process finds the store that the faster one has published.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from sft.config import Config, DataConfig, Input
from sft.console import Console
from sft.data.cache.corpus import Corpus, make_corpus
from sft.data.cache.encoder import EncodedRows, check_palette
from sft.data.cache.folders import Stale, Stamp, stamp, store_folder, sweep, work_folder
from sft.data.cache.loaded_datasets import open_inputs
from sft.data.cache.omissions import refusal
from sft.data.cache.remote_stores import RemoteStores
from sft.data.cache.row_report import Reject
from sft.data.cache.store import Store, open_store, publish, put_aside, write_store
from sft.data.cache.tokenizer_notes import say_notes
from sft.data.cache.vocabulary import check_ids
from sft.data.cache.workers import FileJob, PartResult, make_parts, part_path, part_ranges, read_part
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.read import remote_files
from sft.data.read.rows import DataFile, index_rows, row_name
from sft.data.work import Work
from sft.errors import DataError, SftError
from sft.files import open_files
from sft.files.atomic_files import unusable

# With on_bad_row = skip, a larger share of unusable rows is an error: the template or the format of the file is wrong.
LARGEST_SKIPPED_SHARE = 0.1
_ATTEMPTS = 5
_MOST_AUTO_WORKERS = 32  # each process needs several hundred MB for a tokenizer and a part


def prepare(
    inputs: Sequence[Input],
    data: DataConfig,
    tokenizer: ChatTokenizer,
    cache_dir: Path,
    console: Console,
    names: Sequence[str] | None = None,
    *,
    verify: bool = False,
) -> Corpus:
    """Makes the stores of `inputs` that `cache_dir` lacks, and returns the corpus of all stores.

    names   for each file, the name of its source; None: every file is a source
    verify  whether to check all bytes of existing stores
    Raises DataError if a file, row or chat cannot be used, if cache_dir cannot be written, or if no sample is left.  An
    error of a row begins with `file:line`.  Raises SftError if this process has too many open files or too little
    memory.
    """
    open_files.allow_most()  # each store is mapped
    files = open_inputs(inputs, cache_dir, console)
    stamps = [stamp(file) for file in files]  # before the digest, so every later change is detected
    folders = [store_folder(cache_dir, file, data, tokenizer) for file in files]
    remote = None if data.cache_remote is None else RemoteStores(data.cache_remote, console)
    stores: dict[Path, Store] = {}
    jobs: dict[Path, FileJob] = {}
    work: dict[Path, Work] = {}
    try:
        if remote is not None:
            remote.fetch(folders)
        for file, folder, stamp_before in zip(files, folders, stamps, strict=True):
            if folder in stores or folder in jobs:  # an earlier file has the same content
                continue
            store = _existing(file, folder, console, verify=verify)
            if store is None:
                jobs[folder] = _plan_job(file, folder, stamp_before, data, tokenizer)
            else:
                stores[folder] = store
        made = _tokenise(list(jobs.values()), num_processes(data), console, refuse=data.on_omitted == "error")
        for folder, (store, work[folder]) in made.items():
            stores[folder] = store
        if remote is not None:
            remote.send(folders)
    except OSError as error:
        raise _failure(cache_dir, error) from error
    chosen = [stores[folder] for folder in folders]
    corpus = make_corpus(files, chosen, data, names)
    num_untaught = sum(int((store.teacher.counts == 0).sum()) for store in chosen if store.teacher is not None)
    if num_untaught:
        console.say(f"{num_untaught:,} of {len(corpus):,} samples have no teacher: they are learnt from labels only")
    corpus.work = {file: work[folder] for file, folder in zip(files, folders) if folder in work}
    corpus.check_omitted(data, tokenizer)
    return corpus


def _failure(cache_dir: Path, error: OSError) -> SftError:
    """Converts an OSError to an error that names data.cache_dir, unless its cause is this process or another file."""
    is_of_process = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ECHILD)
    if is_of_process or (error.filename and not Path(os.fsdecode(error.filename)).is_relative_to(cache_dir)):
        return unusable("the data cannot be tokenised", cache_dir, error, DataError)
    doing = "read or written in" if error.errno == errno.EIO else "written to"
    return unusable(f"tokenised data cannot be {doing} data.cache_dir {cache_dir}", cache_dir, error, DataError)


def num_processes(data: DataConfig) -> int:
    """The number of tokenising processes: data.num_workers; with `auto`, the number of CPU cores that this process may
    use, at most 32."""
    if data.num_workers != "auto":
        return data.num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_AUTO_WORKERS, cores)


def prepare_recipe(
    config: Config, tokenizer: ChatTokenizer, console: Console, *, verify: bool = False
) -> dict[str, Corpus]:
    """The corpora of a recipe by name: `train`, then every held-out set.  Prints notes about the tokenizer.

    Raises the errors of `prepare`, and DataError for a token id that the model's embedding lacks.
    """
    train = prepare_train(config, tokenizer, console, verify=verify)
    say_notes(tokenizer, train.files, console)
    return {"train": train, **prepare_held_out(config, tokenizer, console, verify=verify)}


def prepare_train(config: Config, tokenizer: ChatTokenizer, console: Console, *, verify: bool = False) -> Corpus:
    """The corpus that a recipe trains on.  Raises the errors of `prepare_recipe`."""
    return _prepare_set(config, config.data.train_files, tokenizer, console, config.data.train_names, verify=verify)


def prepare_held_out(
    config: Config, tokenizer: ChatTokenizer, console: Console, *, verify: bool = False
) -> dict[str, Corpus]:
    """The corpora of the held-out sets by name.  Raises the errors of `prepare_recipe`."""
    return {
        name: _prepare_set(config, files, tokenizer, console, verify=verify)
        for name, files in config.data.eval_sets.items()
    }


def _prepare_set(
    config: Config,
    inputs: Sequence[Input],
    tokenizer: ChatTokenizer,
    console: Console,
    names: Sequence[str] | None = None,
    *,
    verify: bool,
) -> Corpus:
    """Prepares the training data or a held-out set, and checks its token ids against the model's embedding."""
    corpus = prepare(inputs, config.data, tokenizer, Path(config.cache_dir), console, names, verify=verify)
    check_ids(config, corpus, tokenizer)
    return corpus


def sweep_recipe(config: Config, corpora: Iterable[Corpus], tokenizer: ChatTokenizer) -> list[Stale]:
    """Removes all stores and all copies of files at URLs from the recipe's cache, except those that the recipe now uses
    for the files of `corpora`."""
    cache_dir = Path(config.cache_dir)
    files = [file for corpus in corpora for file in corpus.files]
    copies = cache_dir / remote_files.FOLDER
    used = {store_folder(cache_dir, file, config.data, tokenizer) for file in files}
    used |= {
        copies / file.relative_to(copies).parts[0]
        for file in files
        if isinstance(file, Path) and file.is_relative_to(copies)
    }
    return sweep(cache_dir, copies, used)


def _existing(file: DataFile, folder: Path, console: Console, *, verify: bool) -> Store | None:
    store = open_store(folder, verify=verify)
    if store is not None:
        console.say(f"{file}: {store.row_report.sizes} ({'verified' if verify else 'cached'})")
        shutil.rmtree(work_folder(folder), ignore_errors=True)  # left by a preparation that was killed
    elif folder.exists():
        console.say(f"{folder} is incomplete or was changed: tokenising {file} again")
        put_aside(folder, work_folder(folder))
    return store


def _plan_job(file: DataFile, folder: Path, stamp_before: Stamp, data: DataConfig, tokenizer: ChatTokenizer) -> FileJob:
    try:
        index = index_rows(file)
    except OSError as error:
        raise DataError(f"data file {file} cannot be read: {error}.") from error
    if index.num_rows == 0:
        raise DataError(f"data file {file} has no rows.")
    return FileJob(
        file=file,
        data=data,
        tokenizer=tokenizer,
        index=index,
        ranges=part_ranges(index, data.teacher.width),
        store=folder,
        stamp=stamp_before,
    )


class _UnusableRows(Exception):
    """Says why a file cannot be used because of its rows."""

    def __init__(self, job: FileJob, message: str) -> None:
        super().__init__(message)
        self.job = job


def _tokenise(
    jobs: Sequence[FileJob], num_workers: int, console: Console, *, refuse: bool
) -> dict[Path, tuple[Store, Work]]:
    """Makes the stores of the files, and adds up the work of their parts.

    Processes make parts; a store is written as soon as its last part is complete.

    refuse: whether texts that a chat template leaves out are an error
    """
    stores = {}
    started = time.monotonic()
    try:
        with closing(make_parts(jobs, num_workers)) as made:
            for job, parts in groupby(made, key=itemgetter(0)):
                stores[job.store] = _tokenise_file(
                    job, (result for _, result in parts), console, started, refuse=refuse
                )
                started = time.monotonic()
    except _UnusableRows as unusable:  # all tokenising processes have ended
        shutil.rmtree(unusable.job.folder, ignore_errors=True)  # the corrected file will have another folder
        raise DataError(str(unusable)) from None
    return stores


def _tokenise_file(
    job: FileJob, parts: Iterable[PartResult], console: Console, started: float, *, refuse: bool
) -> tuple[Store, Work]:
    results: list[PartResult] = []
    rejects: list[Reject] = []
    num_tokens = 0
    with console.track(f"tokenising {job.file}", job.index.num_rows, "rows") as progress:
        for result in parts:
            results.append(result)
            rejects += result.rejects
            _check_rows(job, result, rejects)
            if refuse and result.omitted is not None:  # parts stay valid for on_omitted = report
                raise refusal(job.file, result.omitted.row, result.omitted, job.tokenizer)
            num_tokens += result.num_tokens
            progress.advance(result.num_rows, f"{num_tokens:,} tokens")
    store = _assemble(job, results)
    num_kept = sum(result.was_there for result in results)
    continued = f", {num_kept:,} of {len(results):,} parts reused" if num_kept else ""
    work = sum((result.work for result in results), Work())
    spent = f"; {work}" if work != Work() else ""
    console.say(
        f"{job.file}: {store.row_report.sizes} (tokenised in {time.monotonic() - started:.1f} s{continued}{spent})"
    )
    return store, work


def _check_rows(job: FileJob, result: PartResult, rejects: Sequence[Reject]) -> None:
    if result.error is not None:
        raise _UnusableRows(job, result.error)
    if len(rejects) > LARGEST_SKIPPED_SHARE * job.index.num_rows:
        listed = "".join(f"\n  {row_name(job.file, reject.row)}: {reject.reason}" for reject in rejects[:5])
        raise _UnusableRows(
            job,
            f"{len(rejects):,} or more of the {job.index.num_rows:,} rows of {job.file} cannot be used.  "
            f"data.on_bad_row = skip skips at most a tenth of a file.  The first bad rows:{listed}",
        )


def _assemble(job: FileJob, results: Sequence[PartResult]) -> Store:
    weights = np.unique(np.array([w for result in results for w in result.weights], dtype=np.float32))
    check_palette(weights, job.file)
    for _ in range(_ATTEMPTS):
        temp = job.folder / f"store-{uuid.uuid4().hex[:12]}"
        try:
            write_store(temp, _parts(job), weights)
            publish(temp, job.store)
        except FileNotFoundError:  # a faster process published the store and removed the work folder
            pass
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        store = open_store(job.store)
        if store is not None:
            shutil.rmtree(job.folder, ignore_errors=True)
            return store
        with closing(make_parts([job], 1)) as made:
            for _ in made:
                pass
    raise DataError(
        f"{job.folder} was removed {_ATTEMPTS} times while its parts were merged.  Find the process that clears "
        "data.cache_dir."
    )


def _parts(job: FileJob) -> Iterator[EncodedRows]:
    for number in range(len(job.ranges)):
        part = read_part(part_path(job, number), job.data)
        if part is None:
            raise FileNotFoundError(part_path(job, number))
        yield part
