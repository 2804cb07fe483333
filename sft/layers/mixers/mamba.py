"""Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060), as in Nemotron-H: a state with one decay per head.

A token's projections are a gate z, the values x of its heads, B and C of its groups, and a time step dt of each head.
A fragment's map is one number and one state per head, so ranks send about half as many bytes as for the delta rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.config.mamba import MambaConfig
from sft.layers.mixer import StateWork
from sft.layers.mixers.recurrent import (
    BLOCK_NUMBERS,
    BLOCKS,
    FLA_CHUNK,
    FUSED_CONVOLUTION,
    PLAIN_CHUNK,
    PLAIN_CONVOLUTION,
    STATE_INTERVAL,
    RecurrentBytes,
    RecurrentMixer,
    RecurrentSizes,
    uses_fla,
)
from sft.layers.moved import Moved
from sft.layers.rank_share import FP32, RankShare
from sft.layers.weight import LayerWeight, has_input_norms

# (forward, backward): bytes per element, in bf16, that operators read and write, as
# tests/unit/mcore/linear_attention/test_moved_bytes.py counts them in plain torch.  They are the norm by groups, in
# plain torch and as a fused kernel, the skip (plain torch on all devices), the bias of the convolution, and the time
# step of a head.
PLAIN_NORM, FUSED_NORM, SKIP, PLAIN_BIAS, TIME_STEP = (99, 189), (6, 10), (6, 32), (8, 12), (58, 118)
# (backward, maps of fragments, gradients of states) as multiples of a forward pass.  FLA_WORK is assumed: the work of
# the delta rule without its triangular system.  PLAIN_WORK counts bytes, which take most of the time in plain torch.
FLA_WORK, PLAIN_WORK = (3.0, 0.5, 0.5), (2.4, 0.62, 0.63)
_A = "self_attention"
_WEIGHTS = (
    LayerWeight(f"{_A}.in_proj.layer_norm_weight", "h", "norm", step=0, has=has_input_norms),
    LayerWeight(f"{_A}.in_proj.weight", "I+I+S+S+H h", "matrix", "rows", "Mamba-2", 1),
    LayerWeight(f"{_A}.conv1d.weight", "I+S+S 1 w", "kernel", "rows", step=2),
    LayerWeight(f"{_A}.conv1d.bias", "I+S+S", "bias", "rows", step=2),
    LayerWeight(f"{_A}.A_log", "H", "decay", "rows", step=2),
    LayerWeight(f"{_A}.D", "H", "ones", "rows", step=2),
    LayerWeight(f"{_A}.dt_bias", "H", "ones", "rows", step=2),
    LayerWeight(f"{_A}.norm.weight", "I", "ones", "rows", step=2),
    LayerWeight(f"{_A}.out_proj.weight", "h I", "matrix", "columns", "Mamba-2", 3),
)


@dataclass(frozen=True, kw_only=True)
class MambaSizes(RecurrentSizes):
    """Sizes of the heads that a tensor-parallel rank holds.

    head_dim, state_dim  P and N: the width of a value, and of B and C; the state of a head is [N, P]
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int

    @staticmethod
    def of(mamba: MambaConfig, tp: int, width: int) -> "MambaSizes":
        """The sizes on a tensor-parallel rank.  tp: must divide the groups; width: bytes of an element"""
        assert mamba.num_heads is not None and mamba.num_groups is not None
        return MambaSizes(
            heads=mamba.num_heads // tp,
            groups=mamba.num_groups // tp,
            head_dim=mamba.head_dim,
            state_dim=mamba.state_dim,
            width=width,
        )

    @property
    def num_heads(self) -> int:
        return self.heads

    @property
    def inner(self) -> int:
        """Elements per token of the values, of the gate and of the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: elements per token of x, B and C together."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state_bytes(self) -> int:
        return FP32 * self.inner * self.state_dim

    @property
    def token_bytes(self) -> int:
        """Bytes per token that travel to another rank (x, B, C, time steps, decays) and back (output)."""
        return self.width * (self.channels + self.inner) + 2 * FP32 * self.heads

    @property
    def factor_bytes(self) -> int:
        return FP32 * self.heads


@dataclass(frozen=True, kw_only=True)
class MambaBytes(RecurrentBytes):
    """Bytes of Mamba-2."""

    results = frozenset({"states", "recurrence's output", "maps"})
    heads: MambaSizes

    @property
    def saved(self) -> dict[str, float]:
        width, heads = self.rank.width, self.heads
        return {
            "projections": width * (heads.inner + heads.channels + heads.heads),
            "x, B, C": width * heads.channels,
            "time steps and decays": 2 * FP32 * heads.heads,
            "states": 0.0 if self.is_fla else heads.state_bytes / STATE_INTERVAL,
            "recurrence's output": width * heads.inner,
            "gated norm's scale": FP32 * heads.groups,
            **self._saved_maps,
        }

    @property
    def norm_outputs(self) -> dict[str, float]:
        return {"gated norm's output": self.rank.width * self.heads.inner}

    def local(self, tokens: float) -> float:
        """Bytes of gradients while backward computes the recurrence, and of fp32 blocks or of FLA's own tensors.

        The recurrence holds the gradients of its output, of the gate and of x through the skip, and computes those of
        x, B and C.  Backward has freed the input and the output of the gated norm, which are as wide as two of them.
        """
        heads = self.heads
        blocks = BLOCKS * FP32 * min(self.block_numbers, tokens * heads.channels)
        work = tokens * self.fla_work if self.is_fla else blocks
        return tokens * self.rank.width * (heads.inner + heads.channels) + work + self._passing

    @property
    def fla_work(self) -> float:
        """Bytes per token of the tensors that FLA's kernels pass to each other, when they are largest in backward.

        For each head these are the gradients of C and B, three tensors as wide as values (dt x, and its gradients from
        two steps), and for each chunk the state before it and the gradient of this state; and for each group the
        gradient of C, summed over heads.  tests/unit/mcore/linear_attention/test_ssd_triton.py counts the bytes.
        """
        heads = self.heads
        of_head = 2 * heads.state_dim + 3 * heads.head_dim + 2 * heads.state_dim * heads.head_dim / FLA_CHUNK
        return self.rank.width * (heads.heads * of_head + heads.groups * heads.state_dim)


@dataclass(frozen=True)
class Mamba(RecurrentMixer):
    """Mamba-2.

    Letters: I heads * head width    S groups * state width    H heads    w kernel of the convolution
    """

    kind = "Mamba-2"
    weights = _WEIGHTS
    is_recomputed = MambaBytes.is_recomputed

    @staticmethod
    def sizes(model: ModelConfig) -> Mapping[str, int]:
        mamba = model.mamba
        return {"I": mamba.inner_width, "S": mamba.group_width, "H": mamba.num_heads or 0, "w": mamba.conv_kernel}

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        groups = model.mamba.num_groups
        return {"model.mamba.num_groups": groups} if groups else {}

    def te_widths(self, tp: int) -> dict[str, int]:
        mamba = self.model.mamba
        rows = 2 * (mamba.inner_width + mamba.group_width) + (mamba.num_heads or 0)
        return {
            "(2 x (num_heads x head_dim + num_groups x state_dim) + num_heads) / tp of mamba": rows // tp,
            "num_heads x head_dim / tp of mamba": mamba.inner_width // tp,
        }

    def bytes(self, config: Config, rank: RankShare, pack: float) -> MambaBytes:
        return MambaBytes(
            model=self.model,
            rank=rank,
            heads=MambaSizes.of(self.model.mamba, rank.tp, rank.width),
            tokens=pack / rank.cp,
            block_numbers=BLOCK_NUMBERS["cuda" if rank.is_fused else "cpu"],
            is_fla=uses_fla(config),
        )

    @property
    def conv_kernel(self) -> int:
        return self.model.mamba.conv_kernel

    def head_sizes(self, tp: int, width: int) -> MambaSizes:
        return MambaSizes.of(self.model.mamba, tp, width)

    def moved(self, config: Config, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of the convolution (x, B, C) and its bias, of the norm, the skip and the time steps, of the copies of
        x, B and C and of the gradient of the projection's output, and of the sum of two gradients of x."""
        heads, is_fused = MambaSizes.of(self.model.mamba, rank.tp, rank.width), uses_fla(config)
        convolution, norm = (FUSED_CONVOLUTION, FUSED_NORM) if is_fused else (PLAIN_CONVOLUTION, PLAIN_NORM)
        bias = (0, 0) if is_fused else PLAIN_BIAS
        forward, backward = (
            rank.width / 2 * (heads.channels * (conv + of_bias) + heads.inner * (of_norm + of_skip) + heads.heads * dt)
            for conv, of_bias, of_norm, of_skip, dt in zip(convolution, bias, norm, SKIP, TIME_STEP)
        )
        copied, joined = (rank.width * 2 * numbers for numbers in (heads.channels, heads.channels + heads.inner))
        return Moved(forward + copied, backward + joined + 3 * rank.width * heads.inner, forward + copied)

    def state_work(self, config: Config, cp_size: int) -> StateWork:
        is_fla, links = uses_fla(config), float(cp_size > 1)
        backward, maps, gradients = FLA_WORK if is_fla else PLAIN_WORK
        flops, num_bytes = (0.0, 0.0) if is_fla else plain_forward(self.model.mamba)
        return StateWork(1.0 + links * maps, backward + links * gradients, flops, num_bytes)

    @property
    def state_products(self) -> int:
        """Multiplications per token with states: B (dt x)^T and S^T C for the state S of each head."""
        return 2 * self.model.mamba.inner_width * self.model.mamba.state_dim


def plain_forward(mamba: MambaConfig) -> tuple[float, float]:
    """FLOPs of matrix products, and bytes that operators read and write, for a token in forward in plain torch.

    One head takes two products with its state, [N, P], and a product with the matrix of a chunk; a group takes one.
    """
    heads, groups, chunk = mamba.num_heads or 0, mamba.num_groups or 0, PLAIN_CHUNK
    states, values = mamba.state_dim, mamba.head_dim
    flops = heads * (4 * states * values + 2 * chunk * values + 2 * chunk) + groups * 2 * chunk * states
    num_bytes = heads * (21 * states + 78 * values + 64 * chunk + 40 * states * values / chunk)
    return float(flops), num_bytes + groups * 39 * states
