"""The block for multi-token prediction: one more layer, the projection of its two inputs, and three norms.

The layer is like those after the model's last one.  `sft/mcore/model/mtp.py` has the equation.
"""

from sft.layers.weight import LayerWeight

WEIGHTS = (
    LayerWeight("enorm.weight", "h", "norm"),
    LayerWeight("hnorm.weight", "h", "norm"),
    LayerWeight("eh_proj.weight", "h h+h", "matrix"),
    LayerWeight("final_layernorm.weight", "h", "norm"),
)


def saved_vectors(is_full: bool) -> int:
    """Vectors of the hidden size that the block saves for a token, without those of its layer.

    The embedding, the projection's input of twice the width, and the input of the last norm.  With train.recompute =
    full, the block's two inputs, one of which counts as its layer's, and the input of the last norm.
    """
    return 2 if is_full else 4


def recomputed_vectors(is_full: bool) -> int:
    """Vectors of the hidden size for a token that wait while backward computes the block's layer.

    The gradient of the first head.  With train.recompute = full also what is recomputed before the layer: two normed
    inputs, their concatenation and its projection.
    """
    return 6 if is_full else 1
