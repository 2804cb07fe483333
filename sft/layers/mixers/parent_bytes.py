"""Bytes of the calls in which branches attend to tokens of their parents (sft/mcore/attention/parent_keys.py)."""

from sft.layers.rank_share import FP32, RankShare


def parent_keys(rank: RankShare, *, queries: float, pairs: float, unsummed: float = 0.0) -> float:
    """Bytes that these calls need while backward computes attention of a pack's trees.

    The gradients of the branches' queries, and of the keys and values before forks, are summed in fp32 over the calls.
    A call with all queries of branches also holds their gradients, in fp32 and in the dtype of activations.  A call
    with several rectangles has about half of the queries, but copies its queries, outputs, keys, values and gradients.
    Both kinds of calls need about the same memory.

    queries   elements of the queries of a token, in the heads of a call
    pairs     elements of the keys and values of a token, in the heads of a call
    unsummed  elements per token of the gradients of keys and values for each query head; 0: the kernel has none
    """
    num_queries, num_keys, width = rank.trees.tokens / rank.cp, rank.trees.keys, rank.width
    return num_queries * (2 * FP32 + width) * queries + num_keys * ((FP32 + 1.5 * width) * pairs + width * unsummed)
