"""Finds the k most likely tokens of each supervised position, with their log-probabilities.

Decides the order of tokens with equal scores: the smaller id comes first.  So the result does not depend on how tp
splits the vocabulary.  Scores of one chunk of positions exist at a time, as in `fused.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.objective import Targets
from sft.mcore.loss.softmax import blocks, slices, statistics
from sft.mcore.loss.vocab_parallel import VocabShard

_LOW = (1 << 32) - 1  # the lower half of a key holds _LOW - id, so that the smaller id has the larger key
_NOTHING = torch.iinfo(torch.int64).min  # the key of a place that no token takes


class TopK(NamedTuple):
    """The most likely tokens of n supervised positions with m further targets, on the CPU.

    ids             int32 [n, k], most likely first
    logprobs        float32 [n, k], the log-probabilities of these tokens over the whole vocabulary
    label_logprobs  float32 [n + m], the log-probabilities of the targets, in the order of `Targets.all_weights`
    """

    ids: Tensor
    logprobs: Tensor
    label_logprobs: Tensor


def top_k(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig, k: int) -> TopK:
    """The k most likely tokens of each supervised position.  Collective over tp; without gradients.

    hidden  [t, 1, h], or [t / tp, 1, h] under sequence parallelism
    k       at most the number of tokens of the vocabulary
    """
    whole, num_targets = shard.gather(hidden), len(targets.all_weights)
    ids = torch.empty((len(targets), k), dtype=torch.int32)
    logprobs, labels = torch.empty((len(targets), k)), torch.empty(num_targets)
    for part in slices(len(targets), loss.chunk(len(targets))):
        scores = whole[targets.rows[part]] @ shard.weight.detach().t()  # [m, rows of this shard]
        rows = statistics(scores, targets.labels[part], shard, entropy=False)
        assert rows.lse is not None
        keys = _largest_keys(scores, k, shard)
        ids[part] = (_LOW - (keys & _LOW)).to(torch.int32).cpu()
        logprobs[part] = (_value_of(keys) - rows.lse[:, None]).float().cpu()
        labels[part] = rows.logprob.float().cpu()
        if (further := targets.further) is not None:
            numbers = further.within(part)
            index, others, _ = (column[numbers] for column in further)
            more = statistics(scores[send(index - part.start, scores.device)], others, shard, entropy=False)
            labels[len(targets) + numbers.start : len(targets) + numbers.stop] = more.logprob.float().cpu()
    return TopK(ids, logprobs, labels)


def _largest_keys(scores: Tensor, k: int, shard: VocabShard) -> Tensor:
    """int64 [n, k]: the keys of the k largest scores of each row over all shards, falling.  scores: [n, columns]"""
    keys = scores.new_full((scores.shape[0], k), _NOTHING, dtype=torch.int64)
    count = min(k, shard.num_real)
    columns = torch.arange(shard.first, shard.first + shard.num_real, device=scores.device)
    for block in blocks(scores) if count else ():
        keys[block, :count] = _keys(scores[block, : shard.num_real], columns, shard.softcap).topk(count, dim=1).values
    if shard.group.size() == 1:
        return keys
    gathered = shard.all_gather(keys)  # [tp, n, k]
    return gathered.transpose(0, 1).flatten(1).topk(k, dim=1).values


def _keys(scores: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """int64 [n, columns]: integers that order tokens by score, and tokens with equal scores by falling id.

    The upper half of a key has the bits of the score as float32.  Bits of negative floats have the reverse order of the
    floats, so all of these bits but the sign are flipped.
    """
    wider = scores.float() + 0.0  # + 0.0 makes 0 of -0
    if softcap is not None:
        wider = torch.tanh(wider / softcap).mul_(softcap)
    bits = wider.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) + (_LOW - ids)


def _value_of(keys: Tensor) -> Tensor:
    """float32 [...]: the scores of keys."""
    ordered = keys >> 32
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(torch.int32).view(torch.float32)
