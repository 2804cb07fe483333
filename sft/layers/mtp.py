"""The block for multi-token prediction: one more layer, the projection of its two inputs, and three norms.

The layer has the kind that one more layer of the model would have.  `sft/mcore/model/mtp.py` has the equation.
"""

from sft.layers.weight import LayerWeight

WEIGHTS = (
    LayerWeight("enorm.weight", "h", "norm"),
    LayerWeight("hnorm.weight", "h", "norm"),
    LayerWeight("eh_proj.weight", "h h+h", "matrix"),
    LayerWeight("final_layernorm.weight", "h", "norm"),
)


def saved_vectors(repeats_layers: bool) -> int:
    """Number of vectors of the hidden size that the block saves per token, in addition to its layer's saved tensors.

    If backward does not recompute whole layers, these are the embedding, the projection's input (2 vectors), and the
    input of the last norm.  If it does, they are one of the block's two inputs (the layer counts the other one) and the
    input of the last norm.
    repeats_layers: whether backward recomputes whole layers
    """
    return 2 if repeats_layers else 4


def recomputed_vectors(repeats_layers: bool) -> int:
    """Number of vectors of the hidden size per token that stay in memory while backward computes the block's layer.

    One is the gradient of the first head.  If backward recomputes whole layers, there are also the tensors recomputed
    before the layer: two normed inputs, their concatenation (2 vectors) and its projection.
    """
    return 6 if repeats_layers else 1
