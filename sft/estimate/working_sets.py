"""Computes the temporary memory of the loss head and of backward, in addition to the tensors that layers saved.

Backward goes through the layers from the last to the first, and frees the tensors that each has saved.  So the peak is
a layer's working set plus the tensors that are still saved at that time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sft.estimate import model_bytes
from sft.estimate.low_bits import LowBitBase
from sft.estimate.saved_by_layer import SavingLayers, saving_layers
from sft.estimate.stage import Stage
from sft.estimate.units_in_use import UnitsInUse
from sft.layers import mtp
from sft.layers.adapters import EMBEDDING
from sft.layers.mlps.limits import has_plain_swiglu
from sft.layers.offload import SLAB_BYTES, num_offloaded_layers, num_resident_layers
from sft.layers.rank_share import FP32
from sft.layers.second_half import MlpBackward

MLP, ATTENTION, HEAD = "MLP in backward", "attention in backward", "loss head"
EMBEDDING_BACKWARD = "embedding in backward"
DEQUANTISED = "dequantised weights"
GATHERED, UPDATE = "gathered keys and values", "fp32 gradients in the update"
MATRICES = "matrices in the update"


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
    """The work of a pipeline stage on a pack.

    kinds    kinds of layers of the whole model
    block    the layer of the block for multi-token prediction; None: the stage has no block
    pack     tokens of a pack
    in_use   units of sharded gradients or weights that are whole; None: a rank has whole gradients
    base     frozen weights in low bits; None: there are none
    """

    stage: Stage
    kinds: list[SavingLayers]
    block: SavingLayers | None
    pack: float
    in_use: UnitsInUse | None
    base: LowBitBase | None = None

    @staticmethod
    def of(stage: Stage, pack: float) -> "StageWork":
        config, rank = stage.config, stage.rank
        return StageWork(
            stage=stage,
            kinds=saving_layers(stage.groups, config, rank, pack),
            block=next(iter(saving_layers([stage.block], config, rank, pack)), None) if stage.block else None,
            pack=pack,
            in_use=UnitsInUse.of(stage) if config.parallel.shards_gradients else None,
            base=LowBitBase.of(stage),
        )

    @property
    def tokens(self) -> float:
        """Tokens of a pack on this rank."""
        return self.pack / self.stage.layout.cp

    @property
    def hidden(self) -> float:
        """Bytes of the hidden states of the rank's tokens between layers."""
        return self.stage.rank.hidden(self.stage.config.model) * self.pack / self.stage.layout.cp

    def all(self) -> Iterator[WorkingSet]:
        """The working sets of the loss head, of the block for multi-token prediction, and of each kind of layer."""
        if self.stage.is_last:
            # The last layer's output, which is the input of the final norm, counts as saved by layers.
            yield WorkingSet({HEAD: self._head(), **(self.in_use.at_head() if self.in_use else {})}, freed=-self.hidden)
        block = self.saved_by_mtp()
        if self.block is not None:
            # On several stages with train.mtp = joint, the tied table's gradient from the output stays in memory until
            # the gradient from the block's embedding is added to it.
            is_kept = self.stage.layout.pp == 1 or self.stage.config.train.mtp == "joint"
            table = self._table() if is_kept else 0.0
            more = mtp.recomputed_vectors(self._repeats_layers) * self.hidden + table
            yield from self._layer(self.block, 0.0, more, self.in_use.at_block() if self.in_use else {})
        # On one stage, autograd adds the tied table's gradient from the input to the one from the output at the end.
        table = self._table() if self.stage.layout.pp == 1 else 0.0
        last_chunk = self.stage.chunks[-1]
        for kind in self.kinds:
            if self.stage.num_on(kind.layers):
                last = max((number for number in kind.layers if number in last_chunk), default=last_chunk.start - 1)
                freed = block + self._saved_by_layers(range(last + 1, last_chunk.stop))
                whole = self.in_use.at_layers(kind.layers) if self.in_use else {}
                yield from self._layer(kind, freed, table, whole)
        if self.in_use and self.stage.is_first:
            yield self._embedding(self.in_use, block)

    def saved_by_mtp(self) -> float:
        """Bytes that the block for multi-token prediction saves for a pack; 0 if this stage has no block."""
        if self.block is None:
            return 0.0
        return self.block.kept.total * self.tokens + mtp.saved_vectors(self._repeats_layers) * self.hidden

    def saved_by_layers(self) -> tuple[float, float]:
        """Bytes that the layers of all model chunks save: (on the device, on the host).

        On the host, each forward pass whose backward has not run has slabs of its own.
        """
        stage, train = self.stage, self.stage.config.train
        total = sum(stage.num_on(kind.layers) * kind.kept.total for kind in self.kinds)
        of_layer = total * self.tokens / sum(map(len, stage.chunks))
        num_layers = len(stage.chunks[0])
        num_offloaded = num_offloaded_layers(
            train.offload_fraction,
            num_layers,
            backward_is_next=stage.is_last and stage.layout.virtual_stages == 1,
        )
        resident, slabs = num_resident_layers(num_offloaded, num_layers), math.ceil(
            of_layer * num_offloaded / SLAB_BYTES
        )
        on_device = of_layer * resident + self._saved_by_embedding_norm
        return stage.num_waiting * on_device, float(stage.num_waiting * slabs * SLAB_BYTES)

    @property
    def _saved_by_embedding_norm(self) -> float:
        """Bytes that the norm on embeddings saves: an fp32 number per token, and the input of the norm.

        With train.recompute = selective, the norm's output is recomputed, and the norm's input replaces the input of
        the first layer, which counts already.
        """
        stage = self.stage
        if not (stage.is_first and stage.config.model.embedding_norm):
            return 0.0
        return FP32 * stage.rank.sequence * self.tokens + self.hidden * (stage.config.train.recompute != "selective")

    @property
    def _repeats_layers(self) -> bool:
        return self.stage.config.train.repeats_layers

    def _saved_by_layers(self, layers: range) -> float:
        """Bytes that these layers have saved on the device.  0 with activation offload, which reuses their memory."""
        if self.stage.config.train.offload_fraction:
            return 0.0
        return sum(sum(map(layers.__contains__, kind.layers)) * kind.kept.total for kind in self.kinds) * self.tokens

    def _layer(self, kind: SavingLayers, freed: float, more: float, whole: Mapping[str, float]) -> Iterator[WorkingSet]:
        """The working sets of a layer.

        freed: bytes that backward of later layers has freed; more: bytes of other temporary tensors; whole: bytes of
        units by name
        """
        work = self._mlp_backward(kind)
        replaced = kind.mlp.replaced(work)
        mlp = {MLP: kind.mlp.in_backward(work) + replaced + more}
        yield WorkingSet({**mlp, **whole, **_dequantised(self.base, has_experts=True)}, freed + replaced)
        # The gradient of the residual stream.  What is repeated, a layer or a mixer, keeps the gradient of its output,
        # and a tiled MLP uses that of a layer again (sft/mcore/activations/recompute.py).
        train = self.stage.config.train
        repeats_mixer = train.recompute == "selective" and kind.mixer.is_recomputed
        gradients = 2 if repeats_mixer or (self._repeats_layers and train.mlp_tile is None) else 1
        waits = kind.waits_for_attention * self.tokens + gradients * self.hidden
        local = kind.mixer.local(self.tokens) + waits + self._widest_gradient() + more
        gathered = kind.mixer.gathered(self.pack)
        held = {ATTENTION: local, GATHERED: gathered} if gathered else {ATTENTION: local}
        whole = {**whole, **_dequantised(self.base, has_experts=False)}
        yield WorkingSet({**held, **whole}, freed + kind.freed_before_attention * self.tokens)

    def _mlp_backward(self, kind: SavingLayers) -> MlpBackward:
        stage, train = self.stage, self.stage.config.train
        gradients = model_bytes.gradients_of_experts(stage.config.model, stage.rank)
        return MlpBackward(
            tokens=self.tokens,
            hidden=self.hidden,
            saved=kind.everything.mlp,
            kept=frozenset(kind.kept.mlp),
            recompute=train.recompute,
            tile=train.mlp_tile,
            recomputed_attention=kind.recomputed_attention,
            widest_gradient=self._widest_gradient() + model_bytes.tile_sum(stage),
            computes_at_once=self._computes_experts_at_once,
            weight_gradients=gradients if stage.trains_layers else 0.0,
        )

    @property
    def _computes_experts_at_once(self) -> bool:
        """Whether kernels compute all experts at once; False: one expert after the other."""
        config = self.stage.config
        is_swiglu = has_plain_swiglu(config.model)
        return config.run.device != "cpu" or not is_swiglu or bool(self.stage.trained.adapted)

    def _widest_gradient(self) -> float:
        stage = self.stage
        return model_bytes.widest_gradient(stage.config.model, stage.rank) if stage.trains_layers else 0.0

    def _table(self) -> float:
        """Bytes of the head's gradient of tied embeddings; 0 if the embeddings are not tied, or are frozen."""
        stage, model = self.stage, self.stage.config.model
        is_summed = model.tie_embeddings and stage.trained.has(EMBEDDING, ())
        return stage.rank.width * stage.rows * model.hidden_size if is_summed else 0.0

    def _head(self) -> float:
        """Bytes of the loss head, with the hidden states after the final norm.

        While the second head of multi-token prediction computes, the gradient and hidden states of the first head stay
        in memory.
        """
        loss, model, rank = self.stage.config.loss, self.stage.config.model, self.stage.rank
        listed = self.stage.config.data.teacher.width
        head = model_bytes.loss_head(loss, model, rank, vocab_rows=self.stage.rows, tokens=self.tokens, listed=listed)
        heads = 2 if self.block is not None and self.stage.config.train.mtp == "joint" else 1
        sums = heads * model_bytes.head_sum(self.stage)
        return head + sums + (1 if self.block is None else 3) * self.hidden

    def _embedding(self, in_use: UnitsInUse, block: float) -> WorkingSet:
        """The working set of the embedding's backward.  block: bytes that the block for multi-token prediction saved"""
        gradient = self.stage.rank.width * in_use.embedding.trained.total
        freed = block + self._saved_by_layers(range(1, self.stage.config.model.num_layers + 1))
        return WorkingSet({EMBEDDING_BACKWARD: self.hidden + gradient, **in_use.at_embedding()}, freed)


def in_forward(work: StageWork) -> float:
    """An upper bound of the bytes of temporary tensors in a forward pass without gradients.

    A half of a layer holds what it would save for backward, the residual stream, its input and its output.  Of the loss
    heads, only `fused` computes no logits of tokens that are not supervised.
    """
    needs = [work._head()] if work.stage.is_last and work.stage.config.loss.impl != "fused" else [0.0]
    kinds = [(kind, kind.layers) for kind in work.kinds if work.stage.num_on(kind.layers)]
    for kind, layers in [*kinds, *([] if work.block is None else [(work.block, ())])]:
        whole = 0.0
        if work.in_use is not None:
            whole = sum((work.in_use.at_layers(layers) if layers else work.in_use.at_block()).values())
        attention, mlp = (sum(saved.values()) for saved in (kind.everything.attention, kind.everything.mlp))
        for half, gathered, has_experts in ((attention, kind.mixer.gathered(work.pack), False), (mlp, 0.0, True)):
            dequantised = sum(_dequantised(work.base, has_experts=has_experts).values())
            needs.append(half * work.tokens + gathered + whole + dequantised)
    return max(needs) + 3 * work.hidden


def _dequantised(base: LowBitBase | None, *, has_experts: bool) -> dict[str, float]:
    """Bytes of a layer's dequantised weights, and with `has_experts` of a group of its experts, by name."""
    return {} if base is None else {DEQUANTISED: base.layer + base.temporary + has_experts * base.experts}
