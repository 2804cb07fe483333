"""Keys of distillation: how far the student's distribution of the next token is from a teacher's, as a term of the
objective.  `docs/concepts/distill.md` has the formulas."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sft.config.data import DataConfig
from sft.config.section import Positive, Section, Word

Share = Annotated[float, Field(ge=0.0)]


class DistillConfig(Section):
    weight: Share = 0.0
    """Weight of the divergence from the teacher in the objective, with the factor temperature^2; 0: no
    distillation."""
    start_weight: Share | None = None
    """Weight in the first step, from which the weight changes linearly to `weight`; null: `weight` in all steps."""
    ramp_steps: Positive | None = None
    """Step after which the weight is `weight`; with start_weight."""
    by_source: dict[Word, Share] = {}
    """Factors of the weight for tokens of named sources of data.train, such as {code: 0.5}; other sources have 1."""
    label_weight: Share = 1.0
    """Weight of -log p(label) in the objective; 0: learn from the teacher alone."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Temperature of the outcomes of teacher and student; above 1 flattens both."""
    direction: Literal["forward", "reverse", "jsd"] = "forward"
    """forward: KL(teacher, student).  reverse: KL(student, teacher).  jsd: Jensen-Shannon divergence, with equal
    halves."""
    tail: Literal["bucket", "renormalise"] = "bucket"
    """Tokens that the teacher's list does not have.  bucket: one more outcome.  renormalise: left out, and the other
    outcomes sum to 1."""

    def weight_at(self, step: int) -> float:
        """The weight in the step after `step` steps: start_weight 0, weight 1, ramp_steps 4 -> 0, 0.25, 0.5, 0.75, 1"""
        if self.start_weight is None or self.ramp_steps is None:
            return self.weight
        return self.start_weight + (self.weight - self.start_weight) * min(1.0, step / self.ramp_steps)

    @property
    def is_on(self) -> bool:
        """Whether the objective has a divergence, in some step."""
        return bool(self.weight or self.start_weight)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.start_weight is not None and self.ramp_steps is None:
            yield "start_weight", "needs ramp_steps, the step after which the weight is `weight`, such as 100"
        if self.ramp_steps is not None and self.start_weight is None:
            yield "ramp_steps", "needs start_weight, the weight in the first step, such as 0.0"
        if not self.is_on:
            for name in ("by_source", "label_weight"):
                if name in self.changed:
                    yield name, "has no effect with loss.distill.weight = 0; set weight, such as 1.0, or leave it out"

    def conflicts_with(self, data: DataConfig) -> Iterator[tuple[str, str]]:
        """Yields (key, reason) of each conflict with the data; the key is that of the whole recipe."""
        if self.is_on and data.teacher.k is None:
            yield "loss.distill.weight", (
                "needs the distributions of a teacher, which data.teacher.k = null does not read; set data.teacher.k, "
                "such as 64, or loss.distill.weight = 0"
            )
        names = data.train if isinstance(data.train, dict) else ()
        if unknown := [name for name in self.by_source if name not in names]:
            yield "loss.distill.by_source", (
                f"names {unknown[0]}, but data.train has {', '.join(names) or 'no named sources'}; name a source of "
                "data.train"
            )
