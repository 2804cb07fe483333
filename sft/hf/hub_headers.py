"""Reads the headers of safetensors files on the hub, so that `sft check` knows every tensor before a download.

Only the bytes of the headers are requested.  They are written to sparse files of the same names.  Such a file has the
size that its header gives, and can be opened like the real file, but contains no values and takes no disk space for
them.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft.config.pretrained import HubSnapshot
from sft.files.folder_files import LIST_BYTES, copy, regular_file
from sft.hf import hub_errors
from sft.hf.hub import CONFIG, INDEX
from sft.hf.safetensors_files import header_of

_REQUESTS_AT_ONCE = 8


@contextmanager
def header_folder(snapshot: HubSnapshot, files: Sequence[str]) -> Iterator[Path]:
    """A context with a temporary folder: config.json, the index, and the headers of all safetensors files of a model.

    files: the safetensors files that are not downloaded yet
    Raises ConfigError if the headers cannot be read from the hub.
    """
    with tempfile.TemporaryDirectory(prefix="sft-headers-") as folder:
        for name in sorted({path.name for path in snapshot.folder.iterdir()}.difference(files)):
            if name.endswith(".safetensors"):  # already downloaded
                _write(Path(folder) / name, header_of(regular_file(snapshot.folder, name))[1])
            elif name in (CONFIG, INDEX):
                copy(snapshot.folder, name, Path(folder), LIST_BYTES)
        with hub_errors.translated(snapshot.name, snapshot.repo, snapshot.commit):
            with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
                for file, header in zip(files, pool.map(lambda file: _header(snapshot, file), files)):
                    _write(Path(folder) / file, header)
        yield Path(folder)


def _header(snapshot: HubSnapshot, file: str) -> dict[str, Any]:
    """The header of a file on the hub: {"lm_head.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": ...}}"""
    from huggingface_hub import HfApi

    described = HfApi().parse_safetensors_file_metadata(snapshot.repo, file, revision=snapshot.commit)
    return {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
        for name, tensor in described.tensors.items()
    }


def _write(path: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max((tensor["data_offsets"][1] for tensor in header.values()), default=0))
