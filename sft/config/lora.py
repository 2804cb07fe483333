"""Keys of LoRA: which modules get adapters, their size and scale, and what an export writes."""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from sft.config.section import NonNegative, Path, Positive, Section

if TYPE_CHECKING:
    from sft.config import Config

ALL_LINEAR = "all-linear"
TrainedRows = bool | Literal["added"] | Annotated[list[NonNegative], Field(min_length=1)]  # of a weight with ids
_PATTERN = re.compile(r"[\w.*?\[\]!-]+")
_PARAMETER = re.compile(r"\w+(\.\w+)*")


class LoraConfig(Section):
    """y = x W^T + scale (x A^T) B^T; A [rank, in] and B [out, rank] are trained, W is not (arXiv:2106.09685)."""

    rank: Positive | None = None
    """Rank of every adapter, for example 16: A has rank rows, B has rank columns.  null: no adapters."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The product of B and A is multiplied by alpha / rank, or with rslora by alpha / sqrt(rank)."""
    dropout: float = 0.0
    """Must be 0: a random mask on the input of A would differ between layouts."""
    targets: list[str] = [ALL_LINEAR]
    """Modules with adapters, by Hugging Face's names: q_proj, patterns with * and ?, or all-linear (not experts)."""
    target_parameters: list[str] = []
    """Experts that files hold as one tensor, and their router, by PEFT's names: experts.gate_up_proj, router.weight."""
    exclude: list[str] = []
    """Modules without adapters, although targets names them; names or patterns."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rank-stabilised LoRA, arXiv:2312.03732)."""
    train_embeddings: TrainedRows = False
    """Also train the input embedding: true (whole, PEFT: modules_to_save), added (the rows of data.add_tokens), or the
    rows with these ids (PEFT: trainable_token_indices)."""
    train_head: TrainedRows = False
    """Also train the output weight: true, added, or ids, as train_embeddings."""
    init_from: Path | None = None
    """Folder of a PEFT adapter that a new run continues; null: A is random and B is zero."""
    lr_ratio: Annotated[float, Field(gt=0.0)] = 1.0
    """Learning rate of B / learning rate of A, which is optim.lr (LoRA+, arXiv:2402.12354)."""
    export: Literal["adapter", "merged"] = "adapter"
    """Exports are PEFT folders (adapter), or whole models with the adapters added to the weights (merged)."""

    @property
    def is_used(self) -> bool:
        return self.rank is not None

    @property
    def scale(self) -> float:
        """The factor on the product of B and A: rank 16, alpha 32 -> 2.0; with rslora 8.0"""
        assert self.rank is not None
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.rank is None and self.changed:  # a recipe may hold the defaults, as the recipe.yaml of a run does
            yield "rank", f"trains without adapters, but lora.{self.changed[0]} is set; set lora.rank, for example 16"
        if self.dropout != 0.0:
            yield "dropout", (
                "is not supported: the random mask of a token would depend on the layout, and so "
                "would the loss; use 0"
            )
        if not self.targets and not self.target_parameters:
            yield "targets", "is empty, and so is target_parameters; name modules with adapters, such as all-linear"
        for field in ("train_embeddings", "train_head"):
            ids = getattr(self, field)
            if isinstance(ids, list) and len({*ids}) < len(ids):
                yield field, "names an id more than once; name each id once"
        for field in ("targets", "target_parameters", "exclude"):
            names = getattr(self, field)
            for i, name in enumerate(names):
                if field == "target_parameters" and not _PARAMETER.fullmatch(name):
                    yield field, (
                        f'contains "{name}", which is no name of a parameter; write names or ends of names, such as '
                        "experts.gate_up_proj; PEFT has no patterns here"
                    )
                elif not _PATTERN.fullmatch(name):
                    yield field, (
                        f'contains "{name}", which is no name or pattern of modules; write names such as q_proj, or '
                        "patterns with * and ?, such as model.layers.1?.*; regular expressions are not supported"
                    )
                elif name in names[:i]:
                    yield field, f"contains {name} twice; remove one"
        if both := sorted({*self.targets} & {*self.exclude}):
            yield "exclude", f"names {', '.join(both)}, which targets name, too; remove it from one of them"
        elif ALL_LINEAR in self.exclude:
            yield "exclude", f"cannot be {ALL_LINEAR}; name the modules that shall have adapters in targets"


def conflicts_of_rows(config: "Config") -> Iterator[tuple[str, str]]:
    """Yields (key, reason) of each value that does not fit data.add_tokens, or that trains rows where none can be."""
    adds, lora = bool(config.data.new_tokens), config.lora
    tied = config.model.tie_embeddings
    if config.model.added_rows != "mean" and not adds:
        yield "model.added_rows", "has no effect without data.add_tokens; name the new tokens there, or remove it"
    for field in ("train_embeddings", "train_head"):
        value, is_needed = getattr(lora, field), lora.is_used and not (tied and field == "train_head")
        if value == "added" and not adds:
            yield f"lora.{field}", "is added, but no tokens are added; name them in data.add_tokens, or use true"
        elif adds and is_needed and value is False:
            yield f"lora.{field}", ("leaves the rows of data.add_tokens untrained; use added, or true for all rows")
        if not isinstance(value, bool) and config.parallel.shards_gradients:
            yield "parallel.shard", f"must be optimizer to train rows alone (lora.{field}); or train all rows: true"
