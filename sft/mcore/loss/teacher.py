"""Defines a teacher's distributions of the supervised tokens of a microbatch, and what each counts in the objective."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sft.batch import Microbatch, TeacherTargets
from sft.config import Config
from sft.mcore.device import send


class Teacher(NamedTuple):
    """The teacher's k most probable outcomes of n tokens (`sft.batch.TeacherTargets`).

    ids       int32 [n, k], -1 where a token has fewer outcomes, or no teacher
    logprobs  float32 [n, k], at temperature 1
    weights   float32 [n], factor of the divergence in the objective, with temperature^2; 0 without a teacher
    """

    ids: Tensor
    logprobs: Tensor
    weights: Tensor

    @staticmethod
    def of(targets: TeacherTargets, weights: Tensor, device: torch.device) -> "Teacher":
        """The targets of supervised tokens, on the device.  weights: float32 [n] on the CPU"""
        weights = weights * targets.has_teacher
        return Teacher(*(send(column, device) for column in (targets.ids, targets.logprobs, weights)))

    @property
    def is_known(self) -> Tensor:
        """bool [n]: whether the token has a teacher."""
        return self.ids[:, 0] >= 0

    def spread(self, rows: Tensor, num_tokens: int) -> "Teacher":
        """The targets of `num_tokens` tokens, of which `rows` are these n; the others have no teacher."""
        ids = self.ids.new_full((num_tokens, self.ids.shape[1]), -1).index_copy_(0, rows, self.ids)
        logprobs = self.logprobs.new_zeros(ids.shape).index_copy_(0, rows, self.logprobs)
        return Teacher(ids, logprobs, self.weights.new_zeros(num_tokens).index_copy_(0, rows, self.weights))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Teacher":
        return Teacher._make(map(change, self))


class TeacherWeights:
    """The factor of the divergence in the objective, by step and by source: `loss.distill`."""

    def __init__(self, config: Config) -> None:
        self._distill = config.loss.distill
        names = config.data.train if isinstance(config.data.train, dict) else {}
        self._by_source = np.array([self._distill.by_source.get(name, 1.0) for name in names], dtype=np.float32)
        self._weight = self._distill.weight

    def begin(self, step: int) -> None:
        """Set the weight for the step after `step` steps."""
        self._weight = self._distill.weight_at(step)

    def of_tokens(self, microbatch: Microbatch, *, training: bool) -> Tensor | None:
        """The factor of each token of this rank, float32 [t], with temperature^2; None without a teacher.

        An evaluation has the weight after the ramp, for all sources, so that evaluations of a run can be compared.
        """
        if microbatch.teacher is None:
            return None
        weight = (self._weight if training else self._distill.weight) * self._distill.temperature**2
        factors = torch.full((microbatch.tokens.numel(),), weight, dtype=torch.float32)
        if training and self._distill.by_source:
            sources = microbatch.sources[microbatch.documents.numpy().ravel()]
            factors *= torch.from_numpy(self._by_source[sources])
        return factors
