"""Computes the temporary memory of the loss head and of backward, in addition to the tensors that layers saved.

Backward goes through the layers from the last to the first, and frees the tensors that each has saved.  So the peak is
a layer's working set plus the tensors that are still saved at that time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sft.config import Config
from sft.estimate.parameters import trains_layers
from sft.estimate.saved_by_layer import SavingLayers
from sft.layers import mtp
from sft.layers.adapters import EMBEDDING, Trained
from sft.layers.rank_share import FP32, RankShare
from sft.layers.second_half import MlpBackward
from sft.parallel.layout import Layout

MLP, ATTENTION, HEAD = "MLP in backward", "attention in backward", "loss head"
GATHERED = "gathered keys and values"


@dataclass(frozen=True)
class WorkingSet:
    """The memory of one moment of the loss head or of backward.

    by_name  bytes of temporary tensors, by name
    freed    bytes of the layers' saved tensors that backward has freed by this moment
    """

    by_name: Mapping[str, float]
    freed: float = 0.0

    @property
    def held(self) -> float:
        return sum(self.by_name.values())

    @property
    def net(self) -> float:
        return self.held - self.freed


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """A pipeline stage.  Backward of its last model chunk comes first.

    chunks   numbers of the layers of each of its model chunks, from 1
    kinds    kinds of layers of the whole model
    block    the layer of the block for multi-token prediction; None: this stage has no block
    pack     tokens of a pack; tokens: tokens of a pack on this rank
    hidden   bytes of the hidden states of the rank's tokens between layers
    rows     number of rows of the output weight on this rank
    """

    config: Config
    layout: Layout
    chunks: list[range]
    kinds: list[SavingLayers]
    block: SavingLayers | None
    pack: float
    hidden: float
    rows: float
    trained: Trained
    is_last: bool

    @property
    def tokens(self) -> float:
        return self.pack / self.layout.cp

    def all(self) -> Iterator[WorkingSet]:
        """The working sets of the loss head, of the block for multi-token prediction, and of each kind of layer."""
        if self.is_last:
            # The last layer's output, which is the input of the final norm, counts as saved by layers.
            yield WorkingSet({HEAD: self._head()}, freed=-self.hidden)
        block = self.saved_by_mtp()
        if self.block is not None:
            # With pp, the tied table's gradient stays until the gradient of the block's embedding.
            table = self._table() if self.layout.pp == 1 or self.config.train.mtp == "joint" else 0.0
            more = mtp.recomputed_vectors(self._is_full) * self.hidden + table
            yield from self._layer(self.block, 0.0, more)
        # On one stage, autograd adds the tied table's gradient from the input to the one from the output at the end.
        table = self._table() if self.layout.pp == 1 else 0.0
        last_chunk = self.chunks[-1]
        for kind in self.kinds:
            if kind.number_in(*self.chunks):
                last = max((number for number in kind.layers if number in last_chunk), default=last_chunk.start - 1)
                yield from self._layer(kind, block + self._saved_by_layers(range(last + 1, last_chunk.stop)), table)

    def saved_by_mtp(self) -> float:
        """Bytes that the block for multi-token prediction saves for a pack; 0 if this stage has no block."""
        if self.block is None:
            return 0.0
        return self.block.kept.total * self.tokens + mtp.saved_vectors(self._is_full) * self.hidden

    def saved_by_layer(self) -> float:
        """Bytes that a layer of this stage saves for a pack, on average."""
        total = sum(kind.number_in(*self.chunks) * kind.kept.total for kind in self.kinds)
        return total * self.tokens / sum(map(len, self.chunks))

    @property
    def _is_full(self) -> bool:
        return self.config.train.recompute == "full"

    def _saved_by_layers(self, layers: range) -> float:
        """Bytes that these layers have saved on the device.  0 with offload, where later layers' memory is reused."""
        if self.config.train.offload_fraction:
            return 0.0
        return sum(kind.number_in(layers) * kind.kept.total for kind in self.kinds) * self.tokens

    def _layer(self, kind: SavingLayers, freed: float, more: float) -> Iterator[WorkingSet]:
        """The working sets of a layer.

        freed: bytes that backward of later layers has freed; more: bytes of other temporary tensors
        """
        work = self._mlp_backward(kind)
        replaced = kind.mlp.replaced(work)
        yield WorkingSet({MLP: kind.mlp.in_backward(work) + replaced + more}, freed + replaced)
        # The gradient of the residual stream, and with `full` also the recomputed output of the layer.
        waits = kind.recomputed_attention * self.tokens + (2 if self._is_full else 1) * self.hidden
        local = kind.mixer.local(self.tokens) + waits + self._widest_gradient() + more
        gathered = kind.mixer.gathered(self.pack)
        held = {ATTENTION: local, GATHERED: gathered} if gathered else {ATTENTION: local}
        yield WorkingSet(held, freed + kind.freed_before_attention * self.tokens)

    def _mlp_backward(self, kind: SavingLayers) -> MlpBackward:
        return MlpBackward(
            tokens=self.tokens,
            hidden=self.hidden,
            saved=kind.everything.mlp,
            kept=frozenset(kind.kept.mlp),
            recompute=self.config.train.recompute,
            tile=self.config.train.mlp_tile,
            recomputed_attention=kind.recomputed_attention,
            widest_gradient=self._widest_gradient(),
            adapts_gate_and_up=any(weight.module.endswith("linear_fc1") for weight in self.trained.adapted),
            computes_at_once=self._computes_experts_at_once,
            weight_gradients=self._gradients_of_experts(),
        )

    @property
    def _computes_experts_at_once(self) -> bool:
        """Whether kernels compute all experts at once; False: one expert after the other."""
        is_portable = self.config.attention.backend == "portable" or self.config.run.device == "cpu"
        return not is_portable or self.config.model.activation != "swiglu" or bool(self.trained.adapted)

    @property
    def _rank(self) -> RankShare:
        return self.layout.share(self.config)

    def _gradients_of_experts(self) -> float:
        """Bytes of the weight gradients of all experts of a layer on this rank; 0 if no matrix is trained."""
        model, rank = self.config.model, self._rank
        numbers = 3 * model.hidden_size * model.resolved_expert_ffn * (model.moe.num_experts or 0)
        return rank.width * numbers / (rank.ep * rank.etp) if trains_layers(self.trained) else 0.0

    def _widest_gradient(self) -> float:
        """Bytes of the weight gradient of gate and up before it is added to the fp32 sum; 0 if no matrix is trained."""
        model, rank = self.config.model, self._rank
        dense = model.ffn_hidden_size if model.moe.dense_layers else 0
        widest = max(model.resolved_expert_ffn, model.moe.shared_ffn_hidden_size or 0, dense)
        return rank.width * model.hidden_size * 2 * widest / rank.tp if trains_layers(self.trained) else 0.0

    def _table(self) -> float:
        """Bytes of the output's gradient of tied embeddings; 0 if the embeddings are not tied, or are frozen."""
        model, trained = self.config.model, self.trained
        is_trained = trained.whole is None or any(weight.key == EMBEDDING for weight in trained.whole)
        return self._rank.width * self.rows * model.hidden_size if model.tie_embeddings and is_trained else 0.0

    def _head(self) -> float:
        """Bytes of the loss head, with the hidden states after the final norm.

        While the second head of multi-token prediction computes, the gradient and hidden states of the first one stay.
        """
        return self._loss() + (1 if self.block is None else 3) * self.hidden

    def _loss(self) -> float:
        """Bytes that the loss head allocates, without its inputs (docs/concepts/loss.md)."""
        loss, model, rank = self.config.loss, self.config.model, self._rank
        if loss.impl == "chunked":
            return 2 * rank.width * self.tokens * self.rows
        if loss.impl == "full":
            return (2 * rank.width + 2 * FP32) * self.tokens * self.rows
        # With sequence parallelism, the head also holds the gathered hidden states.
        gradient = rank.width * model.hidden_size * self.tokens * (2 if rank.sequence < 1 else 1)
        return max(loss.chunk(math.ceil(self.tokens)), model.hidden_size) * self.rows * rank.width + gradient
