"""Restores the FP8 scales of `run.fp8 = delayed` from a checkpoint.

With delayed scaling, scales depend on the values of earlier steps; the other FP8 recipes store no scales.  Transformer
Engine stores a layer's scales and its amax history as a pickle.  A pickle can run any code, so newer releases of
Transformer Engine refuse to read one.  This module extracts the tensors from the stored pickle without running code
from it, checks them, and gives them to Transformer Engine in a new pickle.

Layers of experts are not restored and begin with new scales: megatron-core stores one entry per expert, but the layer
keeps one entry for all experts.
"""

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io import safe_reader
from sft.mcore.checkpoint_io.metadata_index import InertRecord, first_line
from sft.mcore.lora.adapted import Adapted

# Modules that define classes of FP8 recipes.  A run uses its own recipe and ignores the stored one.
_RECIPES = ("transformer_engine.common.recipe", "megatron.core.extensions.transformer_engine")
_SUFFIX = "._extra_state"
_ALLOW_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"  # read by Transformer Engine since 2.18
# Number of scales of one GEMM.  Forward: input, weight, output.  Backward: gradients of output and input.
_WIDTHS = {"fwd": 3, "bwd": 2}


def _storage(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)


_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _storage,  # core's replacement of torch's
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _RECIPES:
            return InertRecord
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which FP8 scales never contain") from None


def restore(
    chunks: Sequence[torch.nn.Module],
    state: Mapping[str, Mapping[str, Any]],
    core: TransformerConfig,
    reader: safe_reader.SafeReader,
) -> int:
    """Load the scales of this rank's layers from the checkpoint; return the number of layers restored.  Not collective.

    state   sharded state dict of each model chunk, in the order of `chunks`
    Raises CheckpointError if an entry does not have the form that Transformer Engine writes.
    """
    owners = dict(_owners(chunks, state))
    wanted: dict[str, Any] = {key: None for key in owners if key in safe_reader.objects(reader)}
    safe_reader.load(wanted, reader, safe_reader.SafeLoadPlanner(extra_states=True))
    scales = {key: tensors for key, stored in wanted.items() if (tensors := _scales(stored, key, reader)) is not None}
    with _pickles_allowed():
        for key, tensors in scales.items():
            owners[key].set_extra_state(_payload(tensors, core))
    return len(scales)


def _owners(
    chunks: Sequence[torch.nn.Module], state: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each key of an extra state in the checkpoint, and the layer that the key belongs to."""
    for chunk, entries in zip(chunks, state.values(), strict=True):
        # With adapters, the module of this name is an `Adapted`, which holds the layer.
        modules = {name: m.base if isinstance(m, Adapted) else m for name, m in chunk.named_modules()}
        for name, entry in entries.items():
            if isinstance(entry, ShardedObject) and (owner := modules.get(name.removesuffix(_SUFFIX))) is not None:
                yield entry.unique_key, owner


def _scales(stored: Any, key: str, reader: safe_reader.SafeReader) -> dict[str, Tensor] | None:
    """A layer's scales and amax histories under Transformer Engine's names; None if the entry holds no scales.

    Raises CheckpointError if the entry is damaged, or would run code.
    """
    payload = stored[0] if isinstance(stored, list) and len(stored) == 1 else stored
    if payload is None or (isinstance(payload, Tensor) and payload.numel() == 0):
        return None
    try:
        values = _Unpickler(io.BytesIO(payload.numpy().tobytes())).load()
        return _checked(values) if "amax_history_fwd" in values else None
    except Exception as error:  # a broken or hostile file can raise any error
        raise CheckpointError(
            f"{key} of {reader.folder} does not hold FP8 scales: {first_line(error)}.  No code of the pickle was "
            f"run.  model.init_from={reader.folder} loads only the weights."
        ) from error


def _checked(values: dict[str, Any]) -> dict[str, Tensor]:
    checked: dict[str, Tensor] = {}
    for way, width in _WIDTHS.items():
        scale, history = values[f"scale_{way}"], values[f"amax_history_{way}"]
        for tensor, shape in ((scale, (width,)), (history, (history.shape[0], width))):
            if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.isfinite().all():
                raise ValueError(f"{way} scales are {tensor.dtype} {tuple(tensor.shape)}, or not finite")
        checked |= {f"scale_{way}": scale, f"amax_history_{way}": history}
    return checked


def _payload(scales: dict[str, Tensor], core: TransformerConfig) -> Tensor:
    """A layer's state as Transformer Engine's `get_extra_state` returns it: a pickle as a uint8 tensor.

    The amax history is cut, or padded with zeros, to this run's length.
    """
    steps, sized = core.fp8_amax_history_len, dict(scales)
    for way, width in _WIDTHS.items():
        history = scales[f"amax_history_{way}"][:steps]
        sized[f"amax_history_{way}"] = torch.cat([history, history.new_zeros(steps - len(history), width)])
    extra = {"num_gemms": 1, "fp8_checkpoint": True}
    payload = pickle.dumps({"recipe": get_fp8_recipe(core), **sized, "extra_fp8_variables": extra})
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@contextmanager
def _pickles_allowed() -> Iterator[None]:
    """A context in which Transformer Engine loads pickles.  Load only pickles that `_payload` has made."""
    before = os.environ.get(_ALLOW_PICKLE)
    os.environ[_ALLOW_PICKLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW_PICKLE]
        else:
            os.environ[_ALLOW_PICKLE] = before
