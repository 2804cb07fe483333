"""The weights of our model that LoRA adapts, and the adapters of each: the contract between `hf` and `mcore`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of one Linear of the Hugging Face model.

    name: of the Linear, "model.layers.3.self_attn.q_proj"
    parts: the parts of our weight that are its rows, in the order of its rows
    """

    name: str
    parts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """One of our weights, which consists of the rows of one or several Linears, and the adapters of these.

    module      "self_attention.linear_qkv", within its layer
    layer       0 is the first layer
    expert      the number of the expert in the layer, out of num_experts; None outside of experts
    part_rows   rows of each part of the weight: of gate and up, or of q, k and v
    num_groups  in each of so many groups of rows, rows of all parts follow each other; 1: parts are contiguous
    """

    module: str
    layer: int
    expert: int | None
    num_experts: int
    part_rows: tuple[int, ...]
    num_columns: int
    num_groups: int
    adapters: tuple[Adapter, ...]

    def rows_of(self, adapter: Adapter) -> int:
        """Rows of the Linear."""
        return sum(self.part_rows[part] for part in adapter.parts)
