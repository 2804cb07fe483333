"""Bytes of the calls in which branches attend to tokens of their parents (sft/mcore/attention/parent_keys.py)."""

from sft.layers.rank_share import FP32, RankShare


def parent_keys(rank: RankShare, *, queries: float, pairs: float, unsummed: float = 0.0) -> float:
    """Bytes that these calls need while backward computes attention of a pack's trees.

    There are fp32 sums of the gradients of branches' queries, and of keys and values before forks.  A call of all these
    queries has their gradients, which the kernel sums in fp32.  Calls of several rectangles have about half of the
    rows, with copies of queries, outputs and their gradients, of keys and values, and gradients in fp32.  Both need
    about as much.

    queries   elements of a token's queries in the heads of a call
    pairs     elements of its keys and values
    unsummed  elements of the gradients of keys and values for each query head, if the kernel has these
    """
    num_queries, num_keys, width = rank.trees.tokens / rank.cp, rank.trees.keys, rank.width
    return num_queries * (2 * FP32 + width) * queries + num_keys * ((FP32 + 1.5 * width) * pairs + width * unsummed)
