"""The bytes of a file in blocks, decompressed where its name says so.

Decides what a damaged compressed file is: one that ends early, does not decode, or has anything after its end.
Does not know what the bytes mean.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from sft.errors import DataError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

_BLOCK = 2**20

Decoder = Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]


def read_blocks(path: Path, offset: int, size: int = _BLOCK) -> Iterator[bytes]:
    """What the file holds from byte `offset` on, decompressed, in blocks of at most `size`; none is empty."""
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
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:  # ValueError: pyarrow's own
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


def _streams(file: IO[bytes], decoder_type: Decoder, size: int) -> Iterator[bytes]:
    """Compressed streams end to end.  bz2.open and lzma.open take a damaged later stream for the end of the file."""
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
