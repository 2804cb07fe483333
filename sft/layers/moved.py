"""The bytes that elementwise operations of a layer read and write, per token on one rank.

A function that torch compiles, or for which a library has a kernel, counts as one operation.  Each tensor that an
operation reads or writes counts once: a norm moves 2 hidden states of a token in forward, and 3 in backward.  The files
of mixers and MLPs count their own bytes in `moved`, and the norms and residual sums around them in `frame`.
tests/ranks/test_counted_bytes.py counts the bytes of whole layers.
"""

from typing import NamedTuple

from sft.config import ModelConfig
from sft.layers.rank_share import RankShare
from sft.layers.weight import has_gate


class Moved(NamedTuple):
    """Bytes per token.  repeated: bytes of the operations that backward repeats with train.recompute = selective"""

    forward: float = 0.0
    backward: float = 0.0
    repeated: float = 0.0


def total(*parts: Moved) -> Moved:
    """The sum of several operations."""
    return Moved(*map(sum, zip(*parts)))


def activation(model: ModelConfig, ffn: float) -> Moved:
    """The bytes of an activation function, which is one operation.  ffn: bytes of its output"""
    projections = 1 + has_gate(model)
    return Moved((projections + 1) * ffn, (2 * projections + 1) * ffn, (projections + 1) * ffn)


def around(model: ModelConfig, rank: RankShare, *, repeated: float) -> Moved:
    """The bytes of the norms and the residual sum of a half of a layer.

    repeated: number of hidden states that the operations which backward repeats read and write
    """
    norms, hidden = model.num_layer_norms / 2, rank.hidden(model)
    return Moved((2 * norms + 3) * hidden, (3 * norms + 3) * hidden, repeated * hidden)
