"""Saves a model with plain modules, loads it into one with Transformer Engine's modules, saves that, and goes back.

python -m tests.standin.te_checkpoints '["parallel.tp=2", "parallel.sequence_parallel=true"]' gpt-oss qwen3.6

Prints as JSON, for each model, what this rank stores with one library and not, or in another shape, with the other; and
on one rank, the tensors whose bytes changed on the way.  Copies put numbers into the weights and states, because
kernels of the stand-in compute none.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sft.mcore.checkpoint_io import engine_state, optimizer_shards, safe_reader
from sft.mcore.engine import Engine
from sft.mcore.modules.stored import sharded_tensors
from tests.ranks.scenarios import save
from tests.standin.te_modules import running

# The modules, and the attention of models whose attention is else Transformer Engine's, which comes with its modules.
WAYS = {"local": ["run.modules=local", "attention.backend=portable"], "te": ["run.modules=te"]}
LIBRARIES = ("local", "te", "local")


def main(name: str, also: list[str]) -> None:
    described: list[dict[str, tuple[Any, ...]]] = []
    contents: list[dict[str, Tensor]] = []
    modules = []
    with tempfile.TemporaryDirectory() as folder:
        for number, library in enumerate(LIBRARIES):
            with running(name, [*also, *WAYS[library]], has_steps=False) as (_, layout, engine):
                modules.append(str(engine.backend.library))
                described.append(descriptions(engine))
                if layout.world_size > 1:  # the other ranks are not here, and neither are their shards
                    continue
                if number:
                    engine_state.load(engine, Path(folder, str(number - 1)))
                else:
                    fill(engine)
                saved = Path(folder, str(number))
                saved.mkdir()
                save(engine, saved, {"iteration": 0})
                contents.append(stored(saved))
            torch._dynamo.reset()
    first, second, third = described
    differences = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    found = {"model": name, "modules": modules, "tensors": len(first), "described otherwise": differences}
    found["back"] = first == third
    if contents:
        found["numbers"] = sum(bool(tensor.any()) for tensor in contents[0].values())
        found["changed"] = sorted(
            key
            for key in contents[0].keys() | contents[1].keys() | contents[2].keys()
            if not all(key in one and torch.equal(one[key], contents[0].get(key)) for one in contents)
        )
    print("> " + json.dumps(found), flush=True)


def descriptions(engine: Engine) -> dict[str, tuple[Any, ...]]:
    """Type, shape, part and copy of each tensor that this rank stores, by key and place."""
    return {
        f"{tensor.key} {tensor.global_offset}": (
            str(tensor.dtype), tuple(tensor.local_shape), tuple(tensor.global_shape), str(tensor.replica_id),
        )
        for tensor in sharded_tensors(engine_state.model_state(engine))
    }  # fmt: skip


def fill(engine: Engine) -> None:
    """Writes other numbers into each weight and each state of the optimizer."""
    states = [t for part in optimizer_shards.optimizer_slices(engine.optimizer) for t in part.tensors.values()]
    weights = [weight.detach() for chunk in engine.chunks for weight in chunk.parameters()]
    for number, tensor in enumerate([*states, *weights]):
        numbers = (torch.arange(tensor.numel(), dtype=torch.float32) + number) % 251 - 125
        tensor.copy_(numbers.to(tensor.dtype).view_as(tensor))


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    reader = safe_reader.SafeReader(folder)
    found = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in safe_reader.tensors(reader).items()}
    safe_reader.load(found, reader)
    return found


if __name__ == "__main__":
    for model in sys.argv[2:]:
        main(model, json.loads(sys.argv[1]))
