"""The work of the gated delta rule in one layer: how often FLA's kernels run, or the FLOPs and bytes of plain torch."""

from sft.config.linear_attention import LinearAttentionConfig
from sft.layers.mixer import StateWork
from sft.layers.mixers.recurrent import PLAIN_CHUNK

# The work of FLA's kernels, as multiples of a forward pass.  Published for FLA 0.5.1 on H200: backward takes 2.9 to 3.0
# times as long as forward, and over 8 ranks the maps of fragments add 1.1 to 2.1 forward passes, and the gradients of
# states 1.9 to 2.5 (QwenLM/FlashQLA, benchmark_results_H200.txt and benchmark_cp_results_H200x8.txt).  There a rank has
# one fragment, whose chunks are computed one after the other.  In this project a rank has two fragments of half the
# length, which run at the same time.  It is assumed that maps and gradients of states then take half as long.
_FLA_BACKWARD, _FLA_MAPS, _FLA_STATE_GRADIENTS = 3.0, 0.75, 1.0
# The same for plain torch, both for FLOPs and for bytes.  tests/unit/mcore/linear_attention/test_moved_bytes.py counts
# them.
PLAIN_BACKWARD, PLAIN_MAPS, PLAIN_STATE_GRADIENTS = 2.7, 1.15, 1.0
# With decays of channels, bytes take longer than FLOPs, and maps of fragments need no products of queries and keys.
CHANNEL_BACKWARD, CHANNEL_MAPS = 2.6, 0.63


def state_work(linear: LinearAttentionConfig, *, is_fla: bool, cp_size: int) -> StateWork:
    """The work of the gated delta rule for long documents on cp_size ranks."""
    if is_fla:
        backward, maps, gradients = _FLA_BACKWARD, _FLA_MAPS, _FLA_STATE_GRADIENTS
    elif linear.has_channel_decay:
        backward, maps, gradients = CHANNEL_BACKWARD, CHANNEL_MAPS, PLAIN_STATE_GRADIENTS
    else:
        backward, maps, gradients = PLAIN_BACKWARD, PLAIN_MAPS, PLAIN_STATE_GRADIENTS
    flops, num_bytes = (0.0, 0.0) if is_fla else plain_forward(linear)
    links = float(cp_size > 1)
    return StateWork(1.0 + links * maps, backward + links * gradients, flops, num_bytes)


def plain_forward(linear: LinearAttentionConfig) -> tuple[float, float]:
    """FLOPs of matrix products, and bytes that operators read and write, for a token in forward in plain torch.

    A value head takes three products with its state, [K, V], and products with matrices of a chunk.  A key head takes
    two products with matrices of a chunk.  The bytes are those of tensors as wide as keys or values, of matrices of a
    chunk, and of a state per chunk.  With decays of channels, each token forms 48 pairs with tokens in other parts of
    its chunk.  A pair takes one product as wide as keys for queries and one for keys.  The sums of decays in a chunk
    are also products as wide as keys.
    """
    keys, values, chunk = linear.key_head_dim, linear.value_head_dim, PLAIN_CHUNK
    key_heads, value_heads = linear.num_key_heads or 0, linear.num_value_heads or 0
    if linear.has_channel_decay:
        flops = 6 * keys * values + 4 * chunk * values + chunk * chunk + (2 * 48 + 2 * chunk) * keys
        return value_heads * flops, value_heads * (1693 * keys + 93 * values + 102 * chunk + 32 * keys * values / chunk)
    flops = value_heads * (6 * keys * values + 4 * chunk * values + chunk * chunk + 2 * chunk)
    flops += key_heads * 4 * chunk * keys
    num_bytes = value_heads * (7 * keys + 99 * values + 122 * chunk + 39 * keys * values / chunk)
    return flops, num_bytes + key_heads * 106 * keys
