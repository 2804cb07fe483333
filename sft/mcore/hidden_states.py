"""Shows the hidden states of a model, and their gradients, to an observer outside the model.

Layer 0 is the output of the embedding, and layer n is the output of the n-th transformer layer of the whole model.
Hooks on the modules of this rank call the observer; the model itself is unchanged.

A hidden state has thousands of elements, so observers keep a sketch of it: 8 random projections (Johnson and
Lindenstrauss, 1984).  Equal hidden states have equal sketches.  Sketches are float64, so that different hidden states
have different sketches.  The norm of a sketch estimates the norm of the hidden state, with a relative standard
deviation of about 1/4.  The difference of two sketches estimates the difference of two hidden states in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sft.mcore.engine import Engine

SKETCH_SIZE = 8
_BLOCK = 4096  # rows that are converted to float64 at a time

Observer = Callable[[int, Tensor], None]  # (layer, hidden states or gradients [rows, h] of one microbatch)


@contextmanager
def observed(
    engine: Engine, *, on_hidden: Observer | None = None, on_gradient: Observer | None = None
) -> Iterator[None]:
    """A context in which `engine` calls the observers for every layer of this rank and every microbatch.

    Use `on_hidden` only without full recomputation, which would call it twice.
    """

    def hook(layer: int, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [rows, 1, h]
        if on_hidden is not None:
            on_hidden(layer, hidden.detach().flatten(0, 1))
        if on_gradient is not None and hidden.requires_grad:  # with full recompute, only the second forward has a graph
            hidden.register_hook(lambda gradient: on_gradient(layer, gradient.detach().flatten(0, 1)))

    with ExitStack() as hooks:
        for layer, module in _layers(engine):
            handle = module.register_forward_hook(lambda *call, layer=layer: hook(layer, *call))
            hooks.callback(handle.remove)
        yield


def rows_of(engine: Engine, num_tokens: int) -> slice:
    """The tokens whose hidden states this rank holds between layers, as a slice of its `num_tokens` tokens."""
    if not engine.layout.sequence_parallel:
        return slice(0, num_tokens)
    size = num_tokens // engine.layout.tp
    return slice(engine.groups.tp_rank * size, (engine.groups.tp_rank + 1) * size)


def sketch(hidden: Tensor) -> Tensor:
    """Hidden states [rows, h] -> float64 [rows, SKETCH_SIZE] on the CPU.  Every process uses the same projection."""
    projection = _projection(hidden.shape[1]).to(hidden.device)
    return torch.cat([block.double() @ projection for block in hidden.split(_BLOCK)]).cpu()


@lru_cache(maxsize=2)
def _projection(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(width, SKETCH_SIZE, generator=generator, dtype=torch.float64) / SKETCH_SIZE**0.5


def _layers(engine: Engine) -> Iterator[tuple[int, Any]]:
    for chunk in engine.chunks:
        if chunk.module.pre_process:
            yield 0, chunk.module.embedding
        for layer in chunk.module.decoder.layers:
            yield layer.layer_number, layer
