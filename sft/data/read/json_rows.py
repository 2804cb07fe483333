"""Decompresses JSON lines and JSON lists, and finds where their rows begin and end.

A compressed file counts as damaged if it ends early, does not decode, or has data after its end.  Only line ends,
strings and brackets decide where a row ends.  `strict_json.py` parses rows, so a broken row does not affect other rows.
A row with more than MAX_ROW_BYTES is not kept in memory.  The reader of `datasets` is not used, because it reports a
broken line by its position in a block, without file or line number.

A file may have a UTF-8 byte order mark at its start (editors add it), CRLF line ends, blank lines (they are counted as
lines), and a last line without a line end.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from sft.data.read.strict_json import Unreadable
from sft.errors import DataError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MAX_ROW_BYTES = 256 * 2**20  # a longer row means that the file lacks line ends or is not training data

_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_BLOCK = 2**20
_HEAD = 4096  # the opening bracket of a list of rows must be within these bytes
_STEP = np.zeros(256, dtype=np.int64)  # change of the nesting depth by a byte outside strings
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1
_IS_STRUCTURE = np.isin(np.arange(256), list(b'[]{},"'))


def find_first_row(path: Path, *, may_be_list: bool) -> tuple[bool, int]:
    """Whether the rows are elements of a JSON list, and the byte where the first row begins.

    Rows begin after a byte order mark, and after the opening bracket of a list.  may_be_list: False for .jsonl files;
    a .json file holds a list, or one object per line
    """
    head = b""
    for block in read_blocks(path, 0, _HEAD):
        head += block
        if len(head) >= _HEAD:
            break
    begin = len(_BOM) if head.startswith(_BOM) else 0
    if may_be_list and head[begin:].lstrip(_BLANK).startswith(b"["):
        return True, head.index(b"[") + 1
    return False, begin


def read_blocks(path: Path, offset: int, size: int = _BLOCK) -> Iterator[bytes]:
    """Yields the decompressed bytes of a file from `offset` on, in blocks of 1 to `size` bytes.

    Raises DataError if the file cannot be read or decompressed.
    """
    try:
        with path.open("rb") as file:
            if path.suffix not in COMPRESSED:
                file.seek(offset)
                yield from iter(lambda: file.read(size), b"")
                return
            for block in _decompressed(file, path.suffix, size):
                if len(block) > offset:
                    yield block[offset:]
                offset = max(0, offset - len(block))
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:  # pyarrow raises ValueError
        action = "decompressed" if path.suffix in COMPRESSED else "read"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
        raise DataError(f"data file {path} cannot be {action}: {reason}.") from error


def _decompressed(file: IO[bytes], suffix: str, size: int) -> Iterator[bytes]:
    if suffix == ".gz":
        with gzip.GzipFile(fileobj=file) as plain:
            yield from iter(lambda: plain.read(size), b"")
    elif suffix == ".zst":
        import pyarrow  # the standard library has no Zstandard before Python 3.14

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd") as plain:
            yield from iter(lambda: plain.read(size), b"")
    else:
        yield from _streams(file, bz2.BZ2Decompressor if suffix == ".bz2" else lzma.LZMADecompressor, size)


def _streams(
    file: IO[bytes], decoder_type: type[bz2.BZ2Decompressor | lzma.LZMADecompressor], size: int
) -> Iterator[bytes]:
    """Yields the bytes of concatenated streams.  bz2.open and lzma.open would ignore a damaged stream after the
    first."""
    decoder = decoder_type()
    while True:
        raw = b""
        if decoder.eof:
            raw = decoder.unused_data.lstrip(b"\0") or file.read(_BLOCK).lstrip(b"\0")  # xz may pad with zeros
            if not raw:
                return
            decoder = decoder_type()
        elif decoder.needs_input:
            raw = file.read(_BLOCK)
            if not raw:
                raise EOFError("compressed file ended before the end-of-stream marker was reached")
        block = decoder.decompress(raw, size)
        if block:
            yield block


def read_lines(blocks: Iterator[bytes], number: int) -> Iterator[tuple[int, bytes | Unreadable]]:
    """Yields line number and content of each line that is not blank; the first block begins with line `number`."""
    pieces: list[bytes] = []
    size = 0
    for block in chain(blocks, [b"\n"]):  # the added line end completes the last line
        *ended, rest = block.split(b"\n")
        for line in ended:
            size += len(line)
            content = _limited(b"".join([*pieces, line]).strip(_BLANK), size)
            pieces, size = [], 0
            if content:
                yield number, content
            number += 1
        size += len(rest)
        pieces = [*pieces, rest] if size <= MAX_ROW_BYTES else []


def _limited(content: bytes, size: int) -> bytes | Unreadable:
    if size <= MAX_ROW_BYTES:
        return content
    return Unreadable(
        f"{size:,} bytes long; a row may have at most {MAX_ROW_BYTES:,} bytes.  A line end may be missing."
    )


def scan_lines(blocks: Iterator[bytes], position: int) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets and line numbers of all lines that are not blank, int64 [rows] each.

    position: the byte of the file at which the first block, and line 1, begin
    """
    offsets, numbers = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    number, line_at, holds_row = 1, position, False  # state of the line that continues in the next block
    for block in blocks:
        codes = np.frombuffer(block, dtype=np.uint8)
        ends = np.append(np.flatnonzero(codes == ord("\n")), len(block))
        starts = np.concatenate([[0], ends[:-1] + 1])
        filled = _filled(block, codes, starts, ends)
        filled[0] |= holds_row
        at = starts + position
        at[0] = line_at
        whole = filled[:-1]
        offsets.append(at[:-1][whole])
        numbers.append(number + np.flatnonzero(whole))
        number, line_at, holds_row = number + len(whole), int(at[-1]), bool(filled[-1])
        position += len(block)
    if holds_row:
        offsets.append(np.array([line_at]))
        numbers.append(np.array([number]))
    return np.concatenate(offsets), np.concatenate(numbers)


def _filled(block: bytes, codes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """bool [lines]: whether block[start:end] has a byte that is not white space."""
    filled = ends > starts
    first = codes[np.minimum(starts, len(codes) - 1)]
    for i in np.flatnonzero(filled & np.isin(first, list(_BLANK))):
        filled[i] = bool(block[starts[i] : ends[i]].strip(_BLANK))
    return filled


def read_elements(blocks: Iterator[bytes], path: Path, number: int) -> Iterator[tuple[int, bytes | Unreadable]]:
    """Yields (byte where an element begins, element) for a JSON list.  The first block begins with element `number`.

        {"a": [1, 2]}, 7]  ->  (0, b'{"a": [1, 2]}'), (14, b'7')

    Bytes are counted from the start of the first block, which follows the opening bracket.  The function reads only
    strings, brackets and commas; `strict_json.parse` parses an element.  Raises DataError if the list is not closed, or
    if text follows it.
    """
    depth, in_string, held = 1, 0, b""
    pieces: list[bytes] = []
    position = begin = size = 0  # positions of block and element, and bytes of the element so far
    for block in blocks:
        block = held + block
        odd = (len(block) - len(block.rstrip(b"\\"))) % 2
        held, block = block[len(block) - odd :], block[: len(block) - odd]  # a last \ escapes a byte of the next block
        # Replace escapes by other bytes of the same length; every remaining quote begins or ends a string.
        codes = np.frombuffer(block.replace(b"\\\\", b"__").replace(b'\\"', b"__"), dtype=np.uint8)
        at = np.flatnonzero(_IS_STRUCTURE[codes])
        quotes = codes[at] == ord('"')
        inside = (np.cumsum(quotes) + in_string) % 2
        in_string = int(inside[-1]) if len(inside) else in_string
        at = at[(inside == 0) & ~quotes]
        levels = depth + np.cumsum(_STEP[codes[at]])
        depth = int(levels[-1]) if len(levels) else depth
        cuts = ((codes[at] == ord(",")) & (levels == 1)) | (levels == 0)
        start = 0
        for end, level in zip(at[cuts].tolist(), levels[cuts].tolist()):
            size += end - start
            content = _limited(b"".join([*pieces, block[start:end]]).strip(_BLANK), size)
            if content or level > 0 or number > 1:  # [] has no element; [7,] has a second one, which is not JSON
                yield begin, content
                number += 1
            start, begin, pieces, size = end + 1, position + end + 1, [], 0
            if level == 0:
                if any(rest.strip(_BLANK) for rest in chain([block[start:] + held], blocks)):
                    raise DataError(f"{path} is not JSON: there is text after the list of rows.")
                return
        size += len(block) - start
        pieces = [*pieces, block[start:]] if size <= MAX_ROW_BYTES else []
        position += len(block)
    raise DataError(f"{path} is not JSON: the file ends in row {number}, and the list of rows is not closed.")
