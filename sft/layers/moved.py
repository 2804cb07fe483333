"""The bytes that elementwise operations of a layer read and write, per token on one rank.

A function that torch compiles, or for which a library has a kernel, counts as one operation.  The files of mixers and
MLPs have their own bytes; `frame` has the norms and the residual sums around them.  A token's numbers are counted as
they are read and written: a norm reads and writes 2 hidden states, and its backward pass 3.
tests/ranks/test_counted_bytes.py counts the bytes of whole layers.
"""

from typing import NamedTuple

from sft.config import ModelConfig
from sft.layers.rank_share import RankShare


class Moved(NamedTuple):
    """Bytes per token.  repeated: what backward computes again with train.recompute = selective"""

    forward: float = 0.0
    backward: float = 0.0
    repeated: float = 0.0


def total(*parts: Moved) -> Moved:
    return Moved(*map(sum, zip(*parts)))


def activation(model: ModelConfig, ffn: float) -> Moved:
    """The bytes of an activation function, which is one operation.  ffn: bytes of its output"""
    projections = 1 + model.has_gate
    return Moved((projections + 1) * ffn, (2 * projections + 1) * ffn, (projections + 1) * ffn)


def frame(model: ModelConfig, rank: RankShare, *, is_portable: bool, repeats_mixer: bool) -> Moved:
    """The bytes of norms and residual sums.

    With selective, the second half of a dense layer is computed again, and the gradient of its input is copied.  The
    portable backend also computes outputs of norms again, Transformer Engine saves them.

    is_portable: whether attention runs on the portable backend
    repeats_mixer: whether selective computes the mixer again, which saves the output of the norm before it
    """
    has_experts, norms = model.moe.num_experts is not None, model.num_layer_norms
    repeated = 2.0 * (is_portable and not repeats_mixer) + (2 * is_portable if has_experts else 7)
    if model.norm_placement == "both" and not has_experts:
        repeated += 2
    hidden = rank.hidden(model)
    return Moved((2 * norms + 6) * hidden, (3 * norms + 6) * hidden, repeated * hidden)
