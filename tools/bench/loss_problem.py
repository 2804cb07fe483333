"""Makes the inputs of the loss head, and the functions that compute the loss by each implementation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.loss import Targets, VocabShard, lm_loss, token_statistics
from tools.bench import loss_ways
from tools.bench.loss_bars import BASELINE, CONCATENATE, RECOMPUTE
from tools.bench.problem import Problem

WAYS = ("fused", "frozen", "chunked", "full", "token_statistics", BASELINE, CONCATENATE, RECOMPUTE)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the inputs.  vocab: the vocabulary of all ranks; chunks: chunk sizes of fused"""

    tokens: int = 2048
    hidden: int = 1024
    vocab: int = 32_768
    fraction: float = 1.0
    chunks: tuple[int, ...] = (256, 512)
    dtype: str = "fp32"
    device: str = "cpu"

    @property
    def num_supervised(self) -> int:
        return round(self.fraction * self.tokens)


def make_problem(sizes: Sizes, only: Sequence[str] = WAYS) -> Problem:
    """Random inputs whose logits have about unit variance.  Ranks differ only in their part of the vocabulary."""
    group = dist.group.WORLD
    assert group is not None
    device, dtype = torch.device(sizes.device), DTYPES[sizes.dtype]
    generator = torch.Generator(device).manual_seed(0)
    t, h, v = sizes.tokens, sizes.hidden, sizes.vocab
    hidden = torch.randn(t, 1, h, dtype=dtype, device=device, generator=generator).requires_grad_()
    whole = torch.randn(v, h, dtype=dtype, device=device, generator=generator).mul_(h**-0.5)
    weight = (whole if group.size() == 1 else whole.chunk(group.size())[group.rank()].clone()).requires_grad_()
    order = torch.randperm(t, device=device, generator=generator)
    rows = order[: sizes.num_supervised].sort().values
    labels = torch.randint(v, (len(rows),), device=device, generator=generator)
    all_labels = torch.full((t,), loss_ways.IGNORED, device=device).index_copy_(0, rows, labels)
    targets = Targets(rows=rows, labels=labels, weights=torch.ones(len(rows), device=device))
    shard = VocabShard.of(weight, v, group, sequence_parallel=False)
    frozen = replace(shard, weight=weight.detach())
    largest = max(sizes.chunks)

    def ours(loss: LossConfig, of: VocabShard = shard) -> Tensor:
        return lm_loss(hidden, of, targets, loss)[0]

    def statistics() -> Tensor:
        return -token_statistics(hidden, shard, targets, LossConfig(impl="fused", chunk_size=largest)).logprob.sum()

    ways: dict[str, Callable[[], Tensor]] = {
        BASELINE: partial(loss_ways.plain, hidden, weight, all_labels),
        **{f"fused {chunk}": partial(ours, LossConfig(impl="fused", chunk_size=chunk)) for chunk in sizes.chunks},
        f"frozen {largest}": partial(ours, LossConfig(impl="fused", chunk_size=largest), frozen),
        "chunked": partial(ours, LossConfig(impl="chunked", chunk_size=largest)),
        "token_statistics": statistics,
        "full": partial(ours, LossConfig(impl="full")),
        CONCATENATE: partial(loss_ways.concatenate, hidden, weight, all_labels, largest),
        RECOMPUTE: partial(loss_ways.recompute, hidden, weight, all_labels, largest),
    }
    if group.size() > 1:  # the other implementations cannot split the vocabulary over ranks
        ways = {"full": ways["full"]} | {n: ways[n] for n in ways if n not in (BASELINE, CONCATENATE, RECOMPUTE)}
    reference = next(iter(ways))
    chosen = {
        name: way for name, way in ways.items() if name == reference or name.split(" ")[0] in only or name in only
    }
    return Problem(
        ways=chosen,
        leaves=(hidden, weight),
        constants=(all_labels, targets.rows, targets.labels, targets.weights),
        num_gradients={f"frozen {largest}": 1},
    )
