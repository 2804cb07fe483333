"""What a pack costs on each rank of its group, by CP size."""

from dataclasses import dataclass

from sft.config import Config
from sft.flops import AttentionCost


@dataclass(frozen=True, kw_only=True)
class CpCost:
    """attention: cost of attention by the length of a document, in tokens"""

    attention: AttentionCost

    @staticmethod
    def of(config: Config) -> "CpCost":
        return CpCost(attention=AttentionCost.of(config.model))
