"""Computes the weights of a merged export: the frozen weights W of the run plus its adapters.

    W + scale * B A      in fp32, rounded once to the type of the export

A checkpoint of adapters contains a digest of the frozen weights, but not the weights.  They are read, tensor by tensor,
from the files of the original model, or from the Megatron checkpoint from which the run started.  `merged_adapters.py`
prevents that the same adapters are merged twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint import manifest
from sft.config import RANDOM
from sft.config.lora import LoraConfig
from sft.console import Console
from sft.errors import CheckpointError
from sft.hf.hub import INDEX, SINGLE, local_folder
from sft.hf.safetensors_writer import NAMES
from sft.hf.source import open_source
from sft.hf.tensor_check import fold_by_layer
from sft.weights import kept
from sft.weights.export.original import Original
from sft.weights.export.stored_adapters import A, B, StoredAdapters
from sft.weights.export.trained_tensors import TrainedTensor, put_together
from sft.weights.initial import find_checkpoint
from sft.weights.lora import merged_adapters
from sft.weights.lora.base_digest import digest_of
from sft.weights.lora.merged_adapters import Merged
from sft.weights.lora.peft.stacked import rows_in_file
from sft.weights.torch_dist import TorchDistReader

BLOCK_BYTES = 16 << 20  # largest size of the fp32 rows that are computed together
_WEIGHT = ".weight"
Read = Callable[[str, TrainedTensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class MergedWeights:
    """The adapters of a checkpoint, and the frozen weights beside which they were trained."""

    base: Path  # folder or checkpoint of the frozen weights
    read: Read  # returns the frozen weight of this name
    reader: TorchDistReader  # reads the checkpoint of adapters
    adapters: StoredAdapters
    scale: float
    holds: tuple[Merged, ...]  # all adapters that are merged into the export, oldest first
    # Type and SHA-256 of each frozen weight that `values` has yielded unchanged.
    digests: dict[str, tuple[torch.dtype, str]] = field(default_factory=dict)

    def values(
        self, tensors: Iterable[tuple[str, TrainedTensor]], planned: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and the merged value of each tensor.

        planned: tensors on the meta device with the types of the export, by name
        Raises CheckpointError if a merged value is not finite.
        """
        for name, tensor in tensors:
            if self._is_trained(tensor):
                yield from put_together(self.reader, [(name, tensor)])
                continue
            weight, linear = self.read(name, tensor), name.removesuffix(_WEIGHT)
            if linear in self.adapters.shapes:
                a, b = (self.adapters.read(linear, factor) for factor in (A, B))
                yield name, self._merged(weight, a, b, planned[name].dtype, linear)
            elif name in self.adapters.stacks:
                yield name, self._merged_stack(weight, tensor, planned[name].dtype, name)
            else:
                self.digests[name] = weight.dtype, kept.digest_of(weight)
                yield name, weight

    def _merged_stack(self, weight: torch.Tensor, tensor: TrainedTensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        """The result of `_merged` for each expert of a tensor [experts, ...], which may hold transposed matrices."""
        views = tensor.parts[0][0].sources
        a, b = (self.adapters.read(name, factor) for factor in (A, B))
        in_file = torch.empty_like(b)
        in_file[:, rows_in_file(views)] = b
        result = torch.empty(weight.shape, dtype=dtype)
        for number, matrix in enumerate(weight):
            matrix, target = (each.T if views[0].transposed else each for each in (matrix, result[number]))
            target.copy_(self._merged(matrix, a[number], in_file[number], dtype, f"{name}[{number}]"))
        return result

    def _merged(
        self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, linear: str
    ) -> torch.Tensor:
        """weight + scale * B A, computed in fp32 and rounded once to `dtype`.  linear: name, for errors

        Raises CheckpointError if a value is not finite in `dtype`.
        """
        result = torch.empty(weight.shape, dtype=dtype)
        num_rows = max(1, BLOCK_BYTES // (4 * weight.shape[1]))
        for first in range(0, len(weight), num_rows):
            rows = slice(first, first + num_rows)
            result[rows] = torch.addmm(weight[rows].float(), b[rows].float(), a.float(), alpha=self.scale)
            if not result[rows].isfinite().all():
                raise CheckpointError(
                    f"{linear} is not finite in {NAMES[dtype]} with its adapter.  Export with --dtype float32, or "
                    "export another checkpoint."
                )
        return result

    def _is_trained(self, tensor: TrainedTensor) -> bool:
        """Whether the run trained this weight whole, as it can train the embedding and the output weight."""
        return all(mapping.key in self.reader.shapes for mapping, _ in tensor.parts)


def open_merged(
    path: Path,
    common: Mapping[str, Any],
    recipe: Mapping[str, Any],
    tensors: Mapping[str, TrainedTensor],
    *,
    like: Path | None,
    original: Original,
    console: Console,
) -> MergedWeights:
    """The weights of the merged export of the checkpoint `path`.

    common: the values in the checkpoint's common.pt; recipe: the recipe of its run
    tensors: the tensors of the model, by name
    like: the folder that the user named with --hf; None: the recipe names the weights
    Raises CheckpointError if the frozen weights of the run are missing or have changed, or if an adapter fits none of
    them.
    """
    if recipe.get("model.base_dtype") == "nf4":
        raise CheckpointError(
            f"{path} has adapters that were trained beside weights in NF4 (model.base_dtype), and no file holds these "
            "weights.  Merged into other weights, the adapters would give another model.  --no-merged exports the "
            "adapters alone."
        )
    reader, lora = TorchDistReader(path), {key: recipe[f"lora.{key}"] for key in ("rank", "alpha", "rslora")}
    base, wanted = _find(path, recipe, like, original), common["sft"]["base"]
    merged_adapters.refuse(base, wanted, str(path))
    console.say(f"comparing {base} with the weights beside which {path} was trained")
    digest = digest_of(base, path.parent.parent)
    if digest != wanted:
        raise CheckpointError(
            f"{path} has adapters of the weights {wanted[:12]}, but {base} holds {digest[:12]}.  Name the folder of "
            "the weights with which the run trained: --hf FOLDER.  --no-merged exports the adapters alone."
        )
    if original.tensors is None:
        raise CheckpointError(
            f"{original.folder} does not say which tensors a model of these weights has.  Name the Hugging Face folder "
            "with its safetensors files: --hf FOLDER."
        )
    adapters, shapes = StoredAdapters(reader), {name: tensor.shape for name, tensor in tensors.items()}
    wrong = [linear for linear, shape in adapters.shapes.items() if shapes.get(f"{linear}{_WEIGHT}") != shape]
    wrong += [name for name, stack in adapters.stacks.items() if not _fits(tensors.get(name), stack)]
    if wrong:
        raise CheckpointError(f"{path} has adapters that fit no weight of {base}: {fold_by_layer(wrong)[0]}.")
    sha256 = manifest.entry_of(path / manifest.NAME).sha256 if (path / manifest.NAME).exists() else None
    entry = Merged(checkpoint=str(path), step=int(common["iteration"]), base=wanted, sha256=sha256)
    return MergedWeights(
        base=base,
        read=_reads(base),
        reader=reader,
        adapters=adapters,
        scale=LoraConfig(**lora).scale,
        holds=(*merged_adapters.read(base), entry),
    )


def _fits(tensor: TrainedTensor | None, stack: tuple[int, int, int]) -> bool:
    """Whether adapters of `stack`, (experts, out, in), are those of a tensor of all experts."""
    if tensor is None:
        return False
    views = tensor.parts[0][0].sources
    num_rows, num_columns = sum(view.num_rows for view in views), views[0].shape[1]
    return len(tensor.shape) == 3 and stack == (tensor.shape[0], num_rows, num_columns)


def _find(path: Path, recipe: Mapping[str, Any], like: Path | None, original: Original) -> Path:
    """The folder or checkpoint of the frozen weights beside which the adapters of `path` were trained."""
    init_from = recipe.get("model.init_from")
    if init_from == RANDOM:
        raise CheckpointError(
            f"{path} has adapters of random weights, which no file holds, so they cannot be merged.  --no-merged "
            "exports the adapters alone."
        )
    if init_from is not None:
        return find_checkpoint(init_from)
    folders = [like] if like else [original.origin or original.folder]
    if not like and recipe.get("model.hf") and not _has_weights(folders[0]):
        folders.append(local_folder(recipe["model.hf"]))
    for folder in folders:
        if _has_weights(folder):
            return folder
    raise CheckpointError(
        f"{path} has adapters only, and {' and '.join(map(str, folders))} has no {SINGLE} or {INDEX}.  Name the folder "
        "of the weights with which the run trained: --hf FOLDER.  --no-merged exports the adapters alone."
    )


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def _reads(base: Path) -> Read:
    if _has_weights(base):
        source = open_source(base, compare=False)
        return lambda name, tensor: kept.read_tensor(source, name)
    reader = TorchDistReader(base)
    return lambda name, tensor: next(put_together(reader, [(name, tensor)]))[1]
