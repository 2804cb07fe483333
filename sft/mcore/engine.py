"""One optimizer step over the microbatches of this rank, and one forward-only pass.

The normalisation rule, in one place: the loss function returns a local sum and notes its local denominator;
`_finalize` reduces that over dp x cp and divides the gradients by it, once.  Nothing else divides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from sft.batch import Microbatch
from sft.config import Config
from sft.layout import Layout
from sft.mcore import attention, model, optim
from sft.mcore.groups import Groups
from sft.mcore.loss import Targets, VocabShard, lm_loss, token_statistics


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over all ranks and microbatches of one step or evaluation batch; exact integers, float64 loss."""

    loss: float  # the objective
    denominator: float  # what it is divided by: the sum of weights, or the supervised tokens
    nll: float  # sum over supervised tokens of -log p(label), nats
    entropy: float  # sum over supervised tokens, nats; 0 where it is not measured
    num_tokens: int  # supervised
    num_real_tokens: int  # of samples
    num_aligned_tokens: int  # with padding of documents
    num_padded_tokens: int  # with filler: what was computed
    num_documents: int

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    totals: Totals
    grad_norm: float  # before clipping, of the mean loss
    learning_rate: float
    skipped: bool  # no supervised token in the whole global batch: nothing was updated


class Engine:
    """Model, optimizer and schedule of one rank; `num_steps` is the length of the whole run."""

    def __init__(self, config: Config, layout: Layout, groups: Groups, *, vocab_size: int, num_steps: int) -> None:
        self.config, self.layout, self.groups, self.vocab_size = config, layout, groups, vocab_size
        self.backend = model.attention_backend(config, groups.device.type)
        self.chunks = model.build(config, layout, groups, vocab_size, self.backend)
        self.optimizer = optim.build_optimizer(config, self.chunks)
        self.scheduler = optim.build_scheduler(config.optim, self.optimizer, num_steps)
        self.core_config = self.chunks[0].config
        self.core_config.grad_scale_func = self.optimizer.scale_loss
        self.core_config.finalize_model_grads_func = self._finalize
        self._denominator = torch.zeros((), dtype=torch.float64, device=groups.device)  # of this rank and step

    def train_step(self, microbatches: Sequence[Microbatch]) -> StepResult:
        """One update over the `num_microbatches` microbatches of this data-parallel rank."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        totals = self._run(microbatches, forward_only=False)
        self.scheduler.step(1)
        skipped = totals.num_tokens == 0
        grad_norm = 0.0 if skipped else float(self.optimizer.step()[1])
        return StepResult(totals=totals, grad_norm=grad_norm, learning_rate=self._learning_rate(), skipped=skipped)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Totals:
        """Loss over microbatches, without gradients."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            return self._run(microbatches, forward_only=True)

    def token_losses(self, microbatch: Microbatch) -> Tensor | None:
        """-log p(label) of every local token, float32 [t], on the last pipeline stage; None elsewhere."""
        found: list[Tensor] = []

        def keep(chunk: Any, mb: Microbatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            labels = mb.labels.to(hidden.device).flatten()
            rows = torch.arange(labels.numel(), device=hidden.device)
            targets = Targets(rows=rows, labels=labels, weights=torch.ones_like(labels, dtype=torch.float32))
            losses = -token_statistics(hidden, self._vocab_shard(chunk), targets, self.config.loss).logprob
            found.append(losses)
            return losses.sum(), torch.zeros((), dtype=torch.int), None

        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            self._schedule([microbatch], keep, forward_only=True)
        return found[0] if found else None

    def _run(self, microbatches: Sequence[Microbatch], *, forward_only: bool) -> Totals:
        self._denominator.zero_()
        local = self._schedule(microbatches, self._loss, forward_only=forward_only)
        sums = torch.stack(local).sum(0) if local else torch.zeros(5, dtype=torch.float64, device=self.groups.device)
        return self._reduce(sums, microbatches)

    def _schedule(self, microbatches: Sequence[Microbatch], loss: Any, *, forward_only: bool) -> list[Any]:
        assert len(microbatches) > 0
        iterators = [iter(microbatches) for _ in self.chunks]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(self.chunks),
            num_microbatches=len(microbatches),
            seq_length=self.config.data.seq_length,  # unused: stages tell each other the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def _forward_step(self, loss: Any, microbatches: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Any]:
        mb = next(microbatches)
        device = self.groups.device
        documents = attention.describe(
            mb.cu_seqlens, mb.max_seqlen, cp_size=self.layout.cp, cp_rank=self.groups.cp_rank, device=device
        )
        hidden = chunk(mb.tokens.to(device), mb.position_ids.to(device), None, packed_seq_params=documents)
        return hidden, partial(loss, chunk, mb)

    def _loss(self, chunk: Any, mb: Microbatch, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The objective; the count core wants; and the sums that `_reduce` takes over all ranks."""
        targets = Targets.of(mb, hidden.device)
        terms = lm_loss(hidden, self._vocab_shard(chunk), targets, self.config.loss)
        wide = torch.float64
        count = torch.tensor(len(targets), dtype=wide, device=hidden.device)
        denominator = targets.weights.sum(dtype=wide) if self.config.loss.denominator == "weights" else count
        self._denominator += denominator
        nll = -terms.rows.logprob.sum(dtype=wide)
        entropy = torch.zeros_like(nll) if terms.rows.entropy is None else terms.rows.entropy.sum(dtype=wide)
        return terms.objective, count.int(), torch.stack((terms.objective.detach(), denominator, nll, entropy, count))

    def _finalize(self, chunks: list[Any], num_tokens: Tensor, **core: Any) -> None:
        """Reduce all gradients, and divide them by the denominator of the global batch.

        Core would divide by its own count: an int32, and taken for at least 1, which a sum of weights need not be.
        """
        finalize_model_grads(chunks, None, **core)
        total = self._denominator if self.groups.reports else torch.zeros_like(self._denominator)
        dist.all_reduce(total)
        scale = torch.where(total > 0, 1.0 / total, 1.0)  # without a supervised token all gradients are 0
        for chunk in chunks:
            chunk.scale_gradients(scale)

    def _vocab_shard(self, chunk: Any) -> VocabShard:
        return VocabShard.of(
            chunk.module.output_weight(),
            self.vocab_size,
            self.groups.tp,
            sequence_parallel=self.layout.sequence_parallel,
        )

    def _reduce(self, sums: Tensor, microbatches: Sequence[Microbatch]) -> Totals:
        """One collective over the world.  Each (dp, cp) position speaks once; facts about whole packs are told by
        the first context-parallel rank only.  float64 holds integers exactly up to 2**53."""
        packs = [
            (mb.num_real_tokens, mb.num_aligned_tokens, int(mb.cu_seqlens[-1]), mb.num_documents) for mb in microbatches
        ]
        facts = torch.tensor(packs, dtype=torch.float64, device=self.groups.device).sum(0)
        if self.groups.cp_rank != 0:
            facts.zero_()
        sums = torch.cat((sums, facts))
        if not self.groups.reports:
            sums.zero_()
        dist.all_reduce(sums)
        loss, denominator, nll, entropy, *counts = sums.tolist()
        tokens, real, aligned, padded, documents = (int(c) for c in counts)
        return Totals(
            loss=loss,
            denominator=denominator,
            nll=nll,
            entropy=entropy,
            num_tokens=tokens,
            num_real_tokens=real,
            num_aligned_tokens=aligned,
            num_padded_tokens=padded,
            num_documents=documents,
        )

    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])
