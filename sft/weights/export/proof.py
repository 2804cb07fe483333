"""Checks that a folder has exactly the tensors that an export must have.

Names, types and shapes are read from the headers of the written files.  Tensors that are not trained are read again,
and their digests are compared.  If something differs, the export fails.
"""

from collections.abc import Mapping
from pathlib import Path

from sft.errors import CheckpointError, first_few
from sft.hf.safetensors_files import SafetensorsFolder
from sft.hf.source import Expected
from sft.hf.tensor_check import check_tensors, fold_by_layer
from sft.weights import kept


def check_export(folder: Path, expected: Mapping[str, Expected], digests: Mapping[str, str], subject: str) -> None:
    """Raise CheckpointError if the tensors in `folder` differ from `expected` or `digests`.

    digests: SHA-256 of the tensors that are not trained, by name; subject: first words of the error message
    """
    written = SafetensorsFolder(folder)
    tensors = written.tensors
    lines = _other_types(
        {name: (tensors[name].dtype, wanted.dtype) for name, wanted in expected.items() if name in tensors}
    )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(shapes, {name: wanted.shape for name, wanted in expected.items()}, subject, other=lines)
    files = {name: tensors[name].file for name in digests}
    changed = [name for name, tensor in kept.read_tensors(files) if kept.digest_of(tensor) != digests[name]]
    if changed:
        names = ", ".join(first_few(fold_by_layer(changed)))
        raise CheckpointError(f"{subject}: tensors that are not trained differ from those of the original: {names}.")


def _other_types(types: Mapping[str, tuple[str, str]]) -> list[str]:
    """Lines that name the tensors of a wrong type.  types: (written, expected) by the name of the tensor"""
    by_pair: dict[tuple[str, str], list[str]] = {}
    for name, pair in types.items():
        if pair[0] != pair[1]:
            by_pair.setdefault(pair, []).append(name)
    return [
        f"type {written} instead of {wanted}: {line}"
        for (written, wanted), names in by_pair.items()
        for line in fold_by_layer(names)
    ]
