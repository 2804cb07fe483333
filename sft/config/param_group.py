"""Keys of a group of parameters (optim.groups), which have a learning rate or a weight decay of their own."""

from typing import Annotated

from pydantic import Field

from sft.config.section import Section


class ParamGroup(Section):
    params: Annotated[list[str], Field(min_length=1)]
    """Names or patterns of tensors, as in train.freeze; with LoRA, the name of a Linear means its adapter."""
    lr_ratio: Annotated[float, Field(gt=0.0)] = 1.0
    """Learning rate of the group / learning rate without the group."""
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None
    """Weight decay of the group, except of biases and norms; null: optim.weight_decay."""
