"""From rows to blocks of tokens, in one process or several, in the order of the file.

Decides what happens to a sample that is too long, and that the first bad row in file order ends the work with
its name.  Does not read files (`rows.py`) or write them (`store.py`).  Importable without torch, since every
tokenising process imports it.

Processes are spawned, not forked: a process started by torchrun may hold threads and CUDA contexts.
"""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from sft.data.align import aligned
from sft.data.chat import Supervise, encode_chat
from sft.data.formats import Chat, check_row
from sft.data.rows import Row, parse, row_name
from sft.data.tokenizer import ChatTokenizer
from sft.errors import DataError

ROWS_PER_BLOCK = 64


class Block(NamedTuple):
    """Some consecutive rows, tokenised; a row that was dropped has kept_tokens 0.

    tokens int32 [sum of kept_tokens] · mask bool, same · table int64 [rows, 5], its columns:
    row number, tokens kept, supervised labels kept, tokens of the whole chat, supervised labels of it
    """

    tokens: np.ndarray
    mask: np.ndarray
    table: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """All that turns the rows of one file into blocks."""

    path: Path
    tokenizer: ChatTokenizer
    seq_length: int
    doc_multiple: int
    over_long: Literal["error", "drop", "truncate"]
    supervise: Supervise = "assistant"

    def fits(self, num_tokens: int) -> bool:
        """A pack holds padded documents, so that is what is measured."""
        return aligned(num_tokens, self.doc_multiple) <= self.seq_length

    def block(self, rows: list[Row]) -> Block:
        """Tokenises rows.  Raises DataError beginning with the row's name."""
        tokens, masks, table = [], [], []
        for number, content in rows:
            try:
                sample_tokens, sample_mask, full, full_supervised = self._sample(content)
            except DataError as error:
                raise DataError(f"{row_name(self.path, number)}: {error}") from error
            tokens.append(sample_tokens)
            masks.append(sample_mask)
            table.append((number, len(sample_tokens), _supervised(sample_mask), full, full_supervised))
        return Block(np.concatenate(tokens), np.concatenate(masks), np.array(table, dtype=np.int64))

    def _sample(self, content: object) -> tuple[np.ndarray, np.ndarray, int, int]:
        chat = check_row(parse(content))
        tokens, weights = encode_chat(chat, self.tokenizer, self.supervise)
        mask = weights > 0
        full, full_supervised = len(tokens), _supervised(mask)
        if not self.fits(full):
            tokens, mask = self._shorten(chat, full)
        return tokens, mask, full, full_supervised

    def _shorten(self, chat: Chat, full: int) -> tuple[np.ndarray, np.ndarray]:
        if self.over_long == "error":
            need = aligned(full, self.doc_multiple)
            raise DataError(
                f"{full:,} tokens ({need:,} when padded to a multiple of {self.doc_multiple}) do not fit "
                f"data.seq_length = {self.seq_length}.  Raise it to {need}, or set data.over_long to drop or "
                "truncate (dropped and cut tokens are counted)."
            )
        cut = _truncate(chat, self) if self.over_long == "truncate" else None
        return cut if cut is not None else (np.empty(0, dtype=np.int32), np.empty(0, dtype=bool))


def encode_blocks(rows: Iterable[Row], encoder: Encoder, num_workers: int) -> Iterator[Block]:
    """Blocks in the order of the rows, by any number of processes; at most two for each are under way."""
    rows = iter(rows)
    batches = iter(lambda: list(islice(rows, ROWS_PER_BLOCK)), [])
    if num_workers == 1:
        yield from map(encoder.block, batches)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=(encoder,))
    pending: deque[Future[Block]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) >= 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that tokenised {encoder.path} was killed, most likely for want of memory.  "
            f"Lower data.num_workers = {num_workers}."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _truncate(chat: Chat, encoder: Encoder) -> tuple[np.ndarray, np.ndarray] | None:
    """The longest beginning of the chat that ends with an assistant's turn and fits; None if none does.

    user assistant user assistant, the whole too long  ->  user assistant
    """
    ends = [i for i, message in enumerate(chat.messages, start=1) if message["role"] == "assistant"]
    best: tuple[np.ndarray, np.ndarray] | None = None
    low, high = 0, len(ends) - (ends[-1] == len(chat.messages))
    while low < high:  # more messages are more tokens, so bisect
        middle = (low + high) // 2
        end = ends[middle]
        shorter = Chat(chat.messages[:end], chat.tools, chat.weights and chat.weights[:end])
        tokens, weights = encode_chat(shorter, encoder.tokenizer, encoder.supervise)
        if encoder.fits(len(tokens)):
            best, low = (tokens, weights > 0), middle + 1
        else:
            high = middle
    return best


def _supervised(mask: np.ndarray) -> int:
    return int(mask[1:].sum())


# Set once in each tokenising process: sending the tokenizer with every block would cost more than the work.
_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode_in_worker(rows: list[Row]) -> Block:
    assert _encoder is not None
    return _encoder.block(rows)
