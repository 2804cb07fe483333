"""From data files to samples that any process can map: `prepare` once, then `Corpus.sample`.

Decides what a cached result depends on: the bytes of the file, the tokenizer and template, over_long,
seq_length, doc_multiple, and the code that made it.  Does not know about packs or layouts, so a change of the
parallel layout never tokenises anew.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from sft.batch import Sample
from sft.config import DataConfig
from sft.data.encode import Block, Encoder, encode_blocks
from sft.data.ledger import Ledger, count_rows
from sft.data.rows import check_file, read_rows, row_name
from sft.data.store import Store, open_store, write_store
from sft.data.tokenizer import ByteTokenizer, ChatTokenizer
from sft.errors import DataError

Log = Callable[[str], None]

_SECONDS_BETWEEN_LINES = 5.0
# What a tokenised sample is made by.  A change in any of these files makes caches of the older code unused.
_CODE = """align.py chat.py cover.py encode.py formats.py rows.py said.py sandbox.py store.py template.py
tokenizer.py turns.py typed.py""".split()


class Corpus:
    """Samples of one or more files, memory-mapped, in the order of the files and their rows.

    lengths         int64 [n], tokens of each sample
    num_supervised  int64 [n], supervised labels of each sample
    digest          changes when any token, mask or order changes; not with file names or the cache's place
    """

    def __init__(self, paths: Sequence[Path], stores: Sequence[Store]) -> None:
        kept = [store.rows[store.rows[:, 1] > 0] for store in stores]
        self.lengths: np.ndarray = np.concatenate([rows[:, 1] for rows in kept])
        self.num_supervised: np.ndarray = np.concatenate([rows[:, 2] for rows in kept])
        self.digest = hashlib.sha256("".join(store.digest for store in stores).encode()).hexdigest()
        self.ledgers: dict[Path, Ledger] = {
            path: count_rows(store.rows) for path, store in zip(paths, stores, strict=True)
        }
        self._paths = list(paths)
        self._stores = list(stores)
        self._kept = kept
        self._starts = [np.concatenate([[0], np.cumsum(rows[:, 1])]) for rows in kept]  # tokens, per file
        self._first_ids = np.cumsum([0] + [len(rows) for rows in kept])

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, sample_id: int) -> Sample:
        """Sample `sample_id`; its arrays are views of the mapped files and read-only."""
        file, index = self._find(sample_id)
        start, stop = self._starts[file][index], self._starts[file][index + 1]
        store = self._stores[file]
        tokens, mask = store.tokens[start:stop], store.mask[start:stop]
        return Sample(sample_id=sample_id, tokens=tokens, weights=mask.astype(np.float32), source=file)

    def name(self, sample_id: int) -> str:
        """Where a sample comes from, as a user would look it up: `chat.jsonl:1841`."""
        file, index = self._find(sample_id)
        return row_name(self._paths[file], int(self._kept[file][index, 0]))

    @property
    def sources(self) -> tuple[str, ...]:
        """A name for each file, in their order: its name without the ending, or its path where two share that."""
        stems = [path.name.split(".")[0] for path in self._paths]
        return tuple(
            stem if stems.count(stem) == 1 else str(path) for stem, path in zip(stems, self._paths, strict=True)
        )

    def summary(self) -> str:
        """One line per file: samples and tokens kept, cut and dropped."""
        return "\n".join(f"{path}: {ledger}" for path, ledger in self.ledgers.items())

    def _find(self, sample_id: int) -> tuple[int, int]:
        assert 0 <= sample_id < len(self), f"sample {sample_id} of {len(self)}"
        file = int(np.searchsorted(self._first_ids, sample_id, side="right")) - 1
        return file, sample_id - int(self._first_ids[file])


def prepare(paths: Sequence[str], data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, log: Log) -> Corpus:
    """The corpus of `paths`, tokenised now or mapped from `cache_dir`.

    Any number of processes may prepare the same corpus at once: each gets a whole one.  Raises DataError for
    files, rows and chats that cannot be used, beginning with `file:line` for a row; and when no sample is
    left.
    """
    files = [Path(path) for path in paths]
    for file in files:
        check_file(file)
    corpus = Corpus(files, [_prepare_file(file, data, tokenizer, cache_dir, log) for file in files])
    if len(corpus) == 0:
        raise DataError(
            f"no sample is left of {', '.join(paths)} with data.over_long = {data.over_long} and "
            f"data.seq_length = {data.seq_length}.\n{corpus.summary()}"
        )
    return corpus


def _prepare_file(file: Path, data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, log: Log) -> Store:
    started = time.monotonic()
    folder = cache_dir / cache_key(file, data, tokenizer)
    store = open_store(folder)
    if store is not None:
        log(f"{file}: {count_rows(store.rows)} (cached)")
        return store
    if folder.exists():
        log(f"{folder} is not whole or was changed: tokenising {file} again")
    encoder = Encoder(
        path=file,
        tokenizer=tokenizer,
        seq_length=data.seq_length,
        doc_multiple=data.doc_multiple,
        over_long=data.over_long,
        supervise=data.supervise,
    )
    blocks = encode_blocks(read_rows(file), encoder, data.num_workers)
    try:
        write_store(folder, _with_progress(_at_least_one(blocks, file), file, log))
    except OSError as error:
        raise DataError(f"tokenised data of {file} cannot be written to data.cache_dir {cache_dir}: {error}") from error
    store = open_store(folder)
    assert store is not None, f"{folder} was just written"
    log(f"{file}: {count_rows(store.rows)} (tokenised in {time.monotonic() - started:.1f} s)")
    return store


def cache_key(file: Path, data: DataConfig, tokenizer: ChatTokenizer) -> str:
    """Name of the store: 32 hex digits over everything that the tokenised samples depend on."""
    code = hashlib.sha256()
    for name in _CODE:
        code.update((Path(__file__).parent / name).read_bytes())
    libraries = [] if isinstance(tokenizer, ByteTokenizer) else [version("transformers"), version("tokenizers")]
    with file.open("rb") as content:
        content_digest = hashlib.file_digest(content, "sha256").hexdigest()
    parts = {
        "content": content_digest,
        "kind": file.suffix,
        "tokenizer": tokenizer.digest,
        "seq_length": data.seq_length,
        "doc_multiple": data.doc_multiple,
        "over_long": data.over_long,
        "supervise": data.supervise,
        "code": code.hexdigest(),
        "libraries": libraries,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _at_least_one(blocks: Iterable[Block], file: Path) -> Iterator[Block]:
    count = 0
    for count, block in enumerate(blocks, start=1):
        yield block
    if count == 0:
        raise DataError(f"data file {file} has no rows.")


def _with_progress(blocks: Iterable[Block], file: Path, log: Log) -> Iterator[Block]:
    """Passes blocks on, and says every few seconds how far it is."""
    started = last = time.monotonic()
    rows = tokens = 0
    for block in blocks:
        rows += len(block.table)
        tokens += len(block.tokens)
        yield block
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            rate = rows / (now - started)
            log(f"tokenising {file}: {rows:,} rows, {tokens:,} tokens, {rate:,.0f} rows/s")
            last = now
