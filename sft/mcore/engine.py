"""Runs optimizer steps and forward-only passes over the microbatches of this rank.

Normalisation: the loss function returns a sum over the tokens of this rank.  Before the first microbatch runs, the
engine computes the denominator of the global batch: the sum of the batch's loss weights, or its number of supervised
tokens (`loss.denominator`).  `_finalize` divides the gradients once by this denominator.  No other code divides
gradients.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from sft.batch import Microbatch
from sft.config import Config
from sft.layers.adapters import Trained
from sft.layers.flops import TrainFlops
from sft.mcore import device, pipeline
from sft.mcore.activations.kept_calls import KeptCalls
from sft.mcore.activations.offload import PinnedMemory
from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.backend import PackedDocuments
from sft.mcore.backends.selection import choose_alike
from sft.mcore.experts import router
from sft.mcore.experts.documents import numbered
from sft.mcore.loss import RowStatistics, Targets, VocabShard, lm_loss
from sft.mcore.loss.measured import supervised_tokens
from sft.mcore.loss.mtp import MtpLoss, next_tokens
from sft.mcore.loss.teacher import TeacherWeights
from sft.mcore.model import chunks as model
from sft.mcore.model.core_config import transformer_config
from sft.mcore.model.gpt import Hidden, reduce_shared_embedding
from sft.mcore.model.mixers import packed_documents
from sft.mcore.optimizer import build, host_threads
from sft.mcore.process_groups import ProcessGroups
from sft.mcore.progress import PassProgress, named
from sft.mcore.sharding.model import leave_groups, output_weight_in_use
from sft.metrics.accumulator import Accumulator
from sft.metrics.totals import ExpertLoad, StepResult, Totals
from sft.parallel.cp_bytes import CpBytes
from sft.parallel.layout import Layout


class Engine:
    """Model, optimizer and schedule of one rank; `num_steps` is the length of the whole run.

    trained       which weights are trained, and which have adapters
    trains        False: only forward passes are possible; there are no gradients, no optimizer and no schedule
    has_weights   whether weights were loaded or drawn.  As long as it is False, no pass is possible
    local_losses  objective of each microbatch of the last step or evaluation, summed over this rank's tokens
    progress      called with the name of each part of a step when the part begins
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        groups: ProcessGroups,
        *,
        vocab_size: int,
        num_steps: int,
        trained: Trained = Trained(),
        trains: bool = True,
        progress: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.config, self.layout, self.groups, self._progress = config, layout, groups, progress
        self.vocab_size, self.trained, self.has_weights = vocab_size, trained, False
        self.backend = choose_alike(config, groups)
        self.core_config = core = transformer_config(config, layout, groups.device.type, self.backend)
        self.chunks = model.build(config, layout, groups, core, vocab_size, self.backend, trained, trains=trains)
        self._save_policy = self._make_save_policy()
        self.optimizer: Any = None
        if trains:
            self.optimizer = build.build_optimizer(config, self.chunks, trained, groups)
            if config.optim.offload_fraction:
                host_threads.use(self.optimizer, groups.control)
            self.scheduler = build.build_scheduler(config.optim, self.optimizer, num_steps)
            self.core_config.grad_scale_func = self.optimizer.scale_loss
            self.core_config.finalize_model_grads_func = self._finalize
        is_cuda = groups.device.type == "cuda"
        self._passes = PassProgress(progress, partial(torch.cuda.Event, enable_timing=True) if is_cuda else None)
        self._denominator = 0.0  # denominator of the global batch of this step
        self._mtp_loss, self._teacher_weights = MtpLoss(config), TeacherWeights(config)
        self.local_losses: list[float] = []

    def train_step(
        self, microbatches: Sequence[Microbatch], *, sources: Sequence[str] = (), data_wait_s: float = 0.0
    ) -> StepResult:
        """Make one optimizer step.  Collective.

        microbatches: those of this data-parallel rank; sources: names of the sources, for the loss of each source
        data_wait_s: seconds that this rank waited for data
        """
        self._teacher_weights.begin(self.scheduler.num_steps)
        totals = self._run(microbatches, sources, data_wait_s=data_wait_s, forward_only=False)
        self._progress("update of the weights")
        self.scheduler.step(1)
        if totals.num_tokens == 0:
            grad_norm = 0.0
        else:
            finite = math.isfinite(totals.objective)
            grad_norm = build.update(self.optimizer, self.chunks, self.groups.device) if finite else math.nan
        skipped = totals.num_tokens == 0 or not math.isfinite(grad_norm)
        experts, rate = self._expert_load(), self.config.model.moe.bias_update_rate
        if experts is not None and rate and not skipped:
            router.update_biases(self.chunks, experts, rate)
        return StepResult(
            **vars(totals),
            grad_norm=grad_norm,
            learning_rate=float(self.scheduler.get_lr({})),
            skipped=skipped,
            experts=experts,
        )

    def evaluate(self, microbatches: Sequence[Microbatch], *, sources: Sequence[str] = ()) -> Totals:
        """The loss over the microbatches of all ranks, without gradients.  Arguments: see `train_step`.  Collective."""
        return self._run(microbatches, sources, forward_only=True)

    def measure(self, microbatches: Sequence[Microbatch], *, forward_only: bool, loss: Any = None) -> list[Any]:
        """Run this rank's microbatches forward and, unless `forward_only`, backward; update nothing.

        Returns, for each microbatch, the objective and the statistics of its supervised tokens on this rank, on the
        device, or what `loss`, which replaces `_loss`, returns third.  Only the last pipeline stage has them; others
        return an empty list.  With backward, gradients are set to zero first.  Afterwards `main_grad` has the
        gradients, reduced over ranks and divided by the denominator of the global batch.
        """
        assert self.has_weights, "no weights were loaded or drawn"
        self._mtp_loss.begin()
        for chunk in self.chunks:
            chunk.train(not forward_only)
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._set_denominator(microbatches)
        with torch.set_grad_enabled(not forward_only):
            measured = self._schedule(microbatches, loss or self._loss, forward_only=forward_only)
        self._passes.finish()
        return measured

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        sources: Sequence[str] = (),
        *,
        forward_only: bool,
        data_wait_s: float = 0.0,
    ) -> Totals:
        # The tensors stay on the device until all microbatches are done, so that the host does not wait for the GPU
        # between them.
        measured = self.measure(microbatches, forward_only=forward_only)
        accumulator = self._accumulator(sources)
        denominator = self.config.loss.denominator
        tokens = [
            supervised_tokens(
                mb, objective, rows, denominator, buckets=accumulator.buckets(mb), **self._mtp_loss.measured(i, mb)
            )
            for i, (mb, (objective, rows)) in enumerate(zip(microbatches, measured))
        ]
        self.local_losses = [part.objective for part in tokens]
        times = {"data_wait_s": data_wait_s, "passes_s": self._passes.seconds}
        peaks = {**times, **device.peak_memory(self.groups.device)}
        return accumulator.totals(microbatches, tokens, peaks)

    def _set_denominator(self, microbatches: Sequence[Microbatch]) -> None:
        """Sum the denominator of the objective over ranks.  Collective over dp x cp.

        The balancing losses of routers are means over real tokens.  Routers add sums over tokens to the objective,
        which is divided by the denominator later, so they get the factor denominator / real tokens.
        """
        self._progress("sum of the loss weights over ranks")
        denominator = sum(mb.denominator(self.config.loss.denominator) for mb in microbatches)
        # Real tokens of whole packs.  The first rank of a pack's group counts them.
        real = sum(mb.num_rendered_tokens for mb in microbatches if self.groups.cp_group(mb.cp_size).rank == 0)
        second = sum(int(mb.second_mask.sum()) for mb in microbatches)
        total = torch.tensor([denominator, real, second], dtype=torch.float64, device=self.groups.device)
        dist.all_reduce(total, group=self.groups.collection.dp_cp)
        self._denominator, num_real_tokens, num_second = total.tolist()
        self._mtp_loss.set_scale(self._denominator, num_second)
        router.begin(self.chunks, loss_scale=self._denominator / max(1.0, num_real_tokens))

    def _expert_load(self) -> ExpertLoad | None:
        """Statistics of experts; None for a dense model.  Collective."""
        model = self.config.model
        return None if model.moe.num_experts is None else router.load(self.chunks, model, self.groups.device)

    def _accumulator(self, sources: Sequence[str]) -> Accumulator:
        return Accumulator(
            position_edges=self.config.log.position_edges,
            sources=sources,
            cp_sizes=self.layout.cp_sizes,
            flops=TrainFlops.of(self.config.model, self.vocab_size),
            cp_bytes=CpBytes.of(self.config),
            reports=self.groups.reports,
            cp_group=self.groups.cp_group,
            device=self.groups.device,
        )

    def _schedule(self, microbatches: Sequence[Microbatch], loss: Any, *, forward_only: bool) -> list[Any]:
        assert len(microbatches) > 0
        iterators = [named(microbatches, chunk, len(self.chunks)) for chunk in range(len(self.chunks))]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(self.chunks),
            num_microbatches=len(microbatches),
            seq_length=self.config.data.seq_length,  # unused: packs differ in length
            micro_batch_size=1,
            forward_only=forward_only,
            **pipeline.schedule_arguments(microbatches, self.layout, self.groups, self.core_config),
        )
        return results

    def _forward_step(
        self, loss: Any, microbatches: Iterator[tuple[str, Microbatch]], chunk: Any
    ) -> tuple[Tensor, Any]:
        name, mb = next(microbatches)
        self._passes.begin(f"forward of {name}")
        tokens, positions = (device.send(x, self.groups.device) for x in (mb.tokens, mb.position_ids))
        cp = self.groups.cp_group(mb.cp_size)
        documents = packed_documents(self.backend, mb.cu_seqlens, mb.max_seqlen, positions, cp, mb.branches)
        has_experts = self.config.model.moe.num_experts is not None
        document_of_token = self._document_of_token(mb, chunk, documents) if has_experts else None
        with self._save_policy.forward_pass(len(chunk.module.decoder.layers)):
            if self.config.train.repeats_parts and chunk.training:
                documents.kept = KeptCalls(self._save_policy, self.config.train.recompute == "attention_kept")
            block = {} if chunk.module.multi_token is None else {"labels": next_tokens(mb, self.layout, self.groups)}
            pack = dict(packed_seq_params=documents, padding_mask=document_of_token)
            output = chunk(tokens, positions, None, **pack, **block)
        hidden = output.first if isinstance(output, Hidden) else output
        loss = partial(loss, second=output.second) if isinstance(output, Hidden) else loss
        if hidden.requires_grad:  # autograd calls the hook when backward of this microbatch reaches this stage
            hidden.register_hook(lambda grad: self._passes.begin(f"backward of {name}"))
        return hidden, partial(loss, chunk, mb)

    def _make_save_policy(self) -> SavePolicy:
        train = self.config.train
        policy = SavePolicy(
            recompute=train.recompute == "selective" and self.backend.library.marks_norms,
            memory=PinnedMemory(self.groups.device) if train.offload_fraction else None,
            offload_fraction=train.offload_fraction,
            backward_is_next=self.layout.virtual_stages == 1 and self.groups.is_last_stage,
            resident=[weight for chunk in self.chunks for weight in chunk.module.parameters()],
        )
        # A kernel that adds a weight's gradient itself marks the weight, and the policy's hooks would lose the mark.
        assert not (self.chunks[0].config.gradient_accumulation_fusion and (policy.recompute or policy.memory))
        for chunk in self.chunks:
            policy.attach(chunk)
        return policy

    def _document_of_token(self, mb: Microbatch, chunk: Any, packed: PackedDocuments) -> Tensor:
        """The number of each token's document, -1 for padding: int32 [1, t].  See `Layer.forward`.

        `packed` gets the other inputs of routers.  Under sequence parallelism, core selects this rank's tokens only on
        the first stage.  On other stages this function selects them.
        """
        documents, packed.num_parts, packed.in_text = numbered(mb, self.groups.device)
        if self.layout.sequence_parallel and not chunk.module.pre_process:
            documents = documents.chunk(self.layout.tp, dim=1)[self.groups.tp_rank]
        return documents

    def _loss(
        self, chunk: Any, mb: Microbatch, hidden: Tensor, *, second: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, RowStatistics]]:
        """The objective, the token count that core requires, and values that `_run` sums after all microbatches.

        second: hidden states of multi-token prediction.  Their loss is added to the first returned value only
        """
        factors = self._teacher_weights.of_tokens(mb, training=chunk.training)
        targets, shard = Targets.of(mb, hidden.device, factors), self.vocab_shard(chunk)
        with output_weight_in_use(chunk, until_backward=not self.config.sums_head_in_forward):
            objective, rows = lm_loss(hidden, shard, targets, self.config.loss)
            whole = objective if second is None else objective + self._mtp_loss.term(second, shard, mb)
        count = torch.full((), len(targets), dtype=torch.int32, device=hidden.device)  # no copy, no wait
        return whole, count, (objective.detach().clone(), rows)

    def _finalize(self, chunks: list[Any], num_tokens: Tensor, **core: Any) -> None:
        """Reduce all gradients, and divide them by the denominator of the global batch.

        Core would divide by a token count, an int32 of at least 1.  The denominator may be fractional and below 1.
        """
        self._passes.begin("sum of the gradients over ranks")
        finalize_model_grads(chunks, None, **core)
        reduce_shared_embedding(chunks, self.groups.collection.embd)
        scale = 1.0 / (self._denominator or 1.0)  # without a supervised token all gradients are 0
        for chunk in chunks:
            chunk.scale_gradients(scale)

    def vocab_shard(self, chunk: Any) -> VocabShard:
        return VocabShard.of(
            chunk.module.output_weight(),
            self.vocab_size,
            self.groups.tp,
            sequence_parallel=self.layout.sequence_parallel,
            softcap=self.config.model.logits_softcap,
        )


def weights_changed(engine: Engine) -> None:
    """Copy the model's weights to the optimizer's main parameters.  Call this after weights were loaded or drawn."""
    if engine.optimizer is not None:
        engine.optimizer.reload_model_params()
    engine.has_weights = True


def release(engine: Engine) -> None:
    """Free the model, its optimizer and the process groups that both hold.  Collective.

    Gradient hooks of parameters make reference cycles through C++, which Python's garbage collector cannot find.
    """
    leave_groups(engine.chunks)
    for held in (*engine.chunks, engine):
        vars(held).clear()
