"""Keys of Muon, the optimizer of weight matrices (optim.name = muon)."""

from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Section

BATCH = 1 << 26  # the most elements of the weights that a rank gathers at once, unless one weight has more


class MuonConfig(Section):
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Nesterov momentum: orthogonalise the momentum after one more gradient."""
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Steps of the Newton-Schulz iteration, which orthogonalises the momentum of a matrix."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the Newton-Schulz iteration, and of matrices that ranks exchange for it."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the update of a matrix [A, B].  match_rms_adamw: 0.2 sqrt(max(A, B)), the size of AdamW's updates, so
    AdamW's learning rates fit.  original: sqrt(max(1, A / B))."""
    lr_ratio: Annotated[float, Field(gt=0.0)] = 1.0
    """Learning rate of Muon / optim.lr, which is that of AdamW for the other parameters."""

    def flops(self, rows: int, columns: int) -> int:
        """The FLOPs of the Newton-Schulz iteration of a matrix: three products in each step."""
        short, long = sorted((rows, columns))
        return self.ns_steps * (4 * short * short * long + 2 * short**3)
