"""Scales of FP8 in a checkpoint: those of run.fp8 = delayed, which follow from the steps before.

The other recipes scale by what they multiply and keep nothing.  Transformer Engine stores a layer's scales, and the
largest values of its last steps, as a pickle; reading one can run anything, so its newer releases refuse to.  Here
the numbers are taken out of the stored pickle without running it, looked at, and handed over in a pickle made anew.

Layers of a mixture of experts begin with new scales: megatron-core stores one entry per expert of a layer that has
them all in one.
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
from sft.mcore.checkpoint_io.metadata_index import Record, first_line

# Whose objects say how scales were made, which this run's recipe decides anew; megatron-core's is a subclass.
_RECIPES = ("transformer_engine.common.recipe", "megatron.core.extensions.transformer_engine")
_SUFFIX = "._extra_state"
_ALLOW_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"  # Transformer Engine looks at it since 2.18
# Of one product: input, weight, output forward; gradients of output and input backward.
_WIDTHS = {"fwd": 3, "bwd": 2}


def _storage(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)


_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _storage,  # core puts it in the place of torch's
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _RECIPES:
            return Record
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no scales need") from None


def restore(
    chunks: Sequence[torch.nn.Module],
    state: Mapping[str, Mapping[str, Any]],
    core: TransformerConfig,
    reader: safe_reader.Reader,
) -> int:
    """Give the layers the scales that the checkpoint has for them; returns how many layers had some.  Not collective.

    state   sharded state dict of each chunk, in their order
    Raises CheckpointError where an entry is not what Transformer Engine writes.
    """
    owners = dict(_owners(chunks, state))
    wanted: dict[str, Any] = {key: None for key in owners if key in safe_reader.objects(reader)}
    safe_reader.load(wanted, reader, safe_reader.Planner(extra_states=True))
    found = {key: numbers for key, stored in wanted.items() if (numbers := _numbers(stored, key, reader)) is not None}
    with _pickles_allowed():
        for key, numbers in found.items():
            owners[key].set_extra_state(_payload(numbers, core))
    return len(found)


def _owners(
    chunks: Sequence[torch.nn.Module], state: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Key in the checkpoint, and the layer that it is of."""
    for chunk, entries in zip(chunks, state.values(), strict=True):
        modules = dict(chunk.named_modules())
        for name, entry in entries.items():
            if isinstance(entry, ShardedObject) and (owner := modules.get(name.removesuffix(_SUFFIX))) is not None:
                yield entry.unique_key, owner


def _numbers(stored: Any, key: str, reader: safe_reader.Reader) -> dict[str, Tensor] | None:
    """Tensors by Transformer Engine's names; None where there is nothing, as of a run without FP8."""
    one = stored[0] if isinstance(stored, list) and len(stored) == 1 else stored
    if one is None or (isinstance(one, Tensor) and one.numel() == 0):
        return None
    try:
        values = _Unpickler(io.BytesIO(one.numpy().tobytes())).load()
        return _checked(values) if "amax_history_fwd" in values else None
    except Exception as error:  # whatever a broken or hostile file can provoke
        raise CheckpointError(
            f"{key} of {reader.folder} does not hold scales of FP8: {first_line(error)}.  Nothing of it was run.  "
            f"model.init_from={reader.folder} takes the weights alone."
        ) from error


def _checked(values: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for way, width in _WIDTHS.items():
        scale, history = values[f"scale_{way}"], values[f"amax_history_{way}"]
        for tensor, shape in ((scale, (width,)), (history, (history.shape[0], width))):
            if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.isfinite().all():
                raise ValueError(f"{way} are {tensor.dtype} {tuple(tensor.shape)}, or no numbers")
        found |= {f"scale_{way}": scale, f"amax_history_{way}": history}
    return found


def _payload(numbers: dict[str, Tensor], core: TransformerConfig) -> Tensor:
    """uint8, as Transformer Engine's own `get_extra_state` makes it, for a history as long as this run's."""
    steps, sized = core.fp8_amax_history_len, dict(numbers)
    for way, width in _WIDTHS.items():
        history = numbers[f"amax_history_{way}"][:steps]
        sized[f"amax_history_{way}"] = torch.cat([history, history.new_zeros(steps - len(history), width)])
    extra = {"num_gemms": 1, "fp8_checkpoint": True}
    payload = pickle.dumps({"recipe": get_fp8_recipe(core), **sized, "extra_fp8_variables": extra})
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@contextmanager
def _pickles_allowed() -> Iterator[None]:
    """For those made here."""
    before = os.environ.get(_ALLOW_PICKLE)
    os.environ[_ALLOW_PICKLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW_PICKLE]
        else:
            os.environ[_ALLOW_PICKLE] = before
