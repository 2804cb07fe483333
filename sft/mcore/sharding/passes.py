"""Makes the weights of each unit whole before they are used, and sums its gradients over ranks afterwards.

A unit's weights are gathered from other ranks (units.py), or dequantised (low_bits/frozen_base.py).

Forward: before a unit runs, its weights are gathered, and the gather of the next unit starts.  After the unit has run,
its weights are freed.

Backward: when the gradient of a unit's output arrives, the unit is opened: its weights are gathered again, and a buffer
for its gradients is made.  Opening a unit closes the previously opened unit: that unit's weights are freed, its
gradients are summed over ranks, and each rank adds its part of the sum to its shard.  With recomputation, the repeated
forward pass opens the unit, and backward uses the same weights.

    forward     embedding   layer 1   layer 2   final norm   output and loss
    backward    output and loss   final norm   layer 2   layer 1   embedding

So at most two units have whole weights at a time.  The embedding may be a third, if it is also the output weight or if
multi-token prediction reads it.  One buffer of gradients exists, or two with `overlap`, because the gradients of one
unit are then summed while the next unit computes.  All ranks open units in the same order, which depends only on model
and recipe.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from sft.mcore.sharding.flat import FlatWeights
from sft.mcore.sharding.units import EMBEDDING, Reduction


class PassUnit(Protocol):
    """Weights that are whole at the same time.  `sharding.units.Unit` describes the fields and functions.

    flats: the weights that are sharded; empty if the unit has only weights that other code holds
    """

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> torch.nn.Module | None: ...
    @property
    def flats(self) -> Sequence[FlatWeights]: ...
    @property
    def is_trained(self) -> bool: ...
    def gather(self) -> None: ...
    def make_whole(self) -> None: ...
    def free(self) -> None: ...
    def open_gradients(self) -> None: ...
    def reduce(self) -> Reduction: ...


class UnitPasses:
    """The passes of one model chunk over its `units`, which are in the order of the forward pass.

    overlap  whether sums of gradients run while the next unit computes
    """

    def __init__(self, units: Sequence[PassUnit], *, overlap: bool) -> None:
        self._units, self._overlap = units, overlap
        self._number = {unit: number for number, unit in enumerate(units)}
        self._unit_of = {id(param): unit for unit in units for flat in unit.flats for param in flat.params}
        self._opened: PassUnit | None = None  # the unit that backward or the loss head uses
        self._has_gradients = False  # whether the opened unit has a buffer for gradients
        self._reduction: Reduction | None = None  # a sum that has started and not been added to a shard
        self._in_backward = False
        self._last_used = -1  # number of the unit that the forward pass has reached
        # Python's garbage collector does not see that a weight refers to its hooks.  If a hook referred to the weight,
        # neither would be freed.
        add_gradient = weakref.WeakMethod(self._add_gradient)
        for number, unit in enumerate(units):
            if unit.module is not None:
                unit.module.register_forward_pre_hook(partial(self._before, unit))
                unit.module.register_forward_hook(partial(self._after, unit))
            for param in (param for flat in unit.flats if flat.is_trained for param in flat.params):
                param.register_post_accumulate_grad_hook(partial(_call, add_gradient, number))

    def begin_forward(self) -> None:
        assert not self._in_backward, "the last backward pass ended with an error, after which no pass may follow"
        self._last_used = -1

    def end_forward(self, output: Any) -> None:
        """Prepare the backward pass, which begins with the gradients of the chunk's `output`."""
        for tensor in _with_gradient(output):
            tensor.register_hook(self._begin_backward)

    def finish(self) -> None:
        """Wait for the last sum of gradients, after the last backward pass of a step."""
        assert self._opened is None, "a backward pass has not ended"
        self._finish_reduction()

    @contextmanager
    def weight_in_use(self, weight: torch.nn.Parameter, *, until_backward: bool) -> Iterator[None]:
        """A context in which the output weight `weight` is whole.

        until_backward: whether the loss head computes the gradient of the weight in backward.  If so, the weight stays
            whole until the next unit is opened.  If not, the loss head computes the gradient in this context
        """
        unit = self._unit_of[id(weight)]
        if torch.is_grad_enabled():
            self._finish_reduction()  # frees the gradients of the embedding, which are as large as the output weight's
            self._open(unit, makes_gradients=not until_backward)
            yield
            if not until_backward:
                self._close()
        else:
            unit.make_whole()
            yield
            unit.free()

    def _before(self, unit: PassUnit, module: torch.nn.Module, args: Any) -> None:
        if self._in_backward:  # backward repeats this forward pass
            self._open(unit)
            return
        unit.make_whole()
        number = self._number[unit]
        if self._last_used < number < len(self._units) - 1:  # False when multi-token prediction reads the embedding
            self._last_used = number
            self._units[number + 1].gather()

    def _after(self, unit: PassUnit, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._in_backward:
            unit.free()
        if unit.name != EMBEDDING:  # its backward reads no weight, and `_add_gradient` opens it for the gradient
            for tensor in _with_gradient(output):
                tensor.register_hook(partial(self._on_gradient, unit))

    def _begin_backward(self, grad: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)

    def _on_gradient(self, unit: PassUnit, grad: Tensor) -> None:
        self._begin_backward(grad)
        self._open(unit)

    def _open(self, unit: PassUnit, *, reads_weights: bool = True, makes_gradients: bool = True) -> None:
        if self._opened is not unit:
            self._close()
            self._opened = unit
            if reads_weights:
                unit.make_whole()
                before = self._units[max(0, self._number[unit] - 1)]
                if self._in_backward and before.name != EMBEDDING:
                    before.gather()
        if makes_gradients and unit.is_trained and not self._has_gradients:
            if self._reduction is not None and self._reduction.unit is unit:
                self._finish_reduction()  # it reads the buffer
            unit.open_gradients()
            self._has_gradients = True

    def _close(self) -> None:
        if self._opened is not None:
            unit, self._opened = self._opened, None
            unit.free()
            if self._has_gradients:
                self._has_gradients = False
                self._finish_reduction()
                self._reduction = unit.reduce()
        if not self._overlap:
            self._finish_reduction()

    def _add_gradient(self, number: int, param: Any) -> None:
        """Add the gradient that autograd computed; a kernel or the loss head may have added it already."""
        self._begin_backward(param.grad)
        if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
            self._open(self._units[number], reads_weights=False)
            param.main_grad.add_(param.grad)
        param.grad = None

    def _end_backward(self) -> None:
        self._close()
        self._in_backward = False
        for unit in self._units:
            unit.free()

    def _finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.finish()
            self._reduction = None


def _call(method: "weakref.WeakMethod[Any]", number: int, param: Any) -> None:
    function = method()
    if function is not None:
        function(number, param)


def _with_gradient(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output that require a gradient."""
    for value in output if isinstance(output, tuple) else (output,):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value
