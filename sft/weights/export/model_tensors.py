"""The tensors of a model by the names of its files, and a check that a checkpoint holds all of them."""

from collections.abc import Iterable
from pathlib import Path

from sft.config import ModelConfig
from sft.hf.architecture import Architecture
from sft.hf.family import TensorMapping, views_by_tensor
from sft.hf.safetensors_files import DTYPES
from sft.hf.tensor_check import check_tensors
from sft.weights.export.original import Original
from sft.weights.export.trained_tensors import TrainedTensor
from sft.weights.torch_dist import TorchDistReader

# Keys of a checkpoint that do not belong to the model: moments, fp32 weights, random generators, plain values.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "common_state", "rerun_state")


def model_tensors(
    imported: Architecture, model: ModelConfig, original: Original, path: Path
) -> dict[str, TrainedTensor]:
    """All tensors but those that are passed through, by name.  path: the checkpoint, for messages

    Raises CheckpointError if the original has other tensors.
    """
    family, vocab_size = imported.family, model.vocab_size or imported.vocab_size
    expected = original.tensors or {}
    family = family.stored_as({name: tensor.shape for name, tensor in expected.items()}, model, vocab_size)
    views = views_by_tensor(family.mappings(model, vocab_size))
    tensors = {tensor.name: TrainedTensor(tensor.shape, parts) for tensor, parts in views.items()}
    copies = family.copies(model)
    tensors |= {name: tensors[copies[name]] for name in expected if expected[name].role == "tied copy"}
    if original.tensors is not None:
        wanted = {name: tensor.shape for name, tensor in expected.items() if tensor.role != "passed through"}
        check_tensors({name: tensor.shape for name, tensor in tensors.items()}, wanted, f"the model of {path}")
    return tensors


def check_stored(reader: TorchDistReader, tensors: Iterable[TrainedTensor], path: Path) -> None:
    """Raise CheckpointError if the checkpoint `path` does not hold exactly these tensors."""
    stored = {key: shape for key, shape in reader.shapes.items() if not key.startswith(_NOT_MODEL)}
    mappings = [mapping for tensor in tensors for mapping, _ in tensor.parts]
    wanted = {mapping.key: _padded_like(stored.get(mapping.key), mapping) for mapping in mappings}
    other = [
        f"of type {reader.dtype(key)}: {key}"
        for key in wanted
        if key in stored and reader.dtype(key) not in DTYPES.values()
    ]
    check_tensors(stored, wanted, str(path), other=other)


def _padded_like(stored: tuple[int, ...] | None, mapping: TensorMapping) -> tuple[int, ...]:
    """The expected shape of our tensor.  A vocabulary may have as many rows of padding as the stored one."""
    shape = mapping.shape()
    is_padded = stored is not None and stored[0] > shape[0] and stored[1:] == shape[1:]
    return stored if mapping.form == "vocabulary" and is_padded and stored else shape
