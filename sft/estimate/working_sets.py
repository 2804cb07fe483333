"""Computes what a rank holds for a time while it computes the loss or backward, beside what layers have saved.

Backward goes through the layers from the last to the first, and frees what each has saved.  So a layer's working set
counts with what is still saved by then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sft.config import Config
from sft.estimate.parameters import trains_layers
from sft.layers import model_bytes
from sft.layers.adapters import EMBEDDING, Trained
from sft.layers.saved_by_layer import LayerKind
from sft.parallel.layout import Layout

MLP, ATTENTION, HEAD = "MLP in backward", "attention in backward", "loss head"
GATHERED = "gathered keys and values"


@dataclass(frozen=True)
class WorkingSet:
    """by_name: bytes held; freed: bytes of what layers had saved that are free by then"""

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

    chunks   numbers of the layers of its model chunks, from 1
    kinds    of layers of the whole model; first that of its last layer, which the block of multi-token prediction has
    pack     tokens of a pack; tokens: those of this rank
    hidden   bytes of the hidden states of the rank's tokens between layers
    rows     of the output weight on this rank
    """

    config: Config
    layout: Layout
    chunks: list[range]
    kinds: list[LayerKind]
    pack: float
    hidden: float
    rows: float
    trained: Trained
    is_last: bool

    @property
    def tokens(self) -> float:
        return self.pack / self.layout.cp

    @property
    def has_mtp(self) -> bool:
        return self.is_last and self.config.model.has_mtp

    def all(self) -> Iterator[WorkingSet]:
        """The sets of the loss head, of the block for multi-token prediction, and of each kind of layer."""
        if self.is_last:
            # The last layer's output, the input of the final norm, counts as saved by layers.
            yield WorkingSet({HEAD: self._head()}, freed=-self.hidden)
        block = self.saved_by_mtp()
        if self.has_mtp:
            # The gradient of the first head waits, and with pp that of a tied table, for that of the block's embedding.
            # With `full`, what comes before the layer is recomputed: two normed inputs, both as one, their product.
            table = self._table() if self.layout.pp == 1 or self.config.train.mtp == "joint" else 0.0
            yield from self._layer(self.kinds[0], 0.0, (6 if self._is_full else 1) * self.hidden + table)
        # On one stage, autograd adds the table's gradient by the input to that by the output at the end.
        table = self._table() if self.layout.pp == 1 else 0.0
        last_chunk = self.chunks[-1]
        for kind in self.kinds:
            if kind.number_in(*self.chunks):
                last = max((number for number in kind.layers if number in last_chunk), default=last_chunk.start - 1)
                yield from self._layer(kind, block + self._saved_by_layers(range(last + 1, last_chunk.stop)), table)

    def saved_by_mtp(self) -> float:
        """Bytes that the block for multi-token prediction saves for a pack; 0 without one on this stage.

        Its layer, the embedding, the projection's input of twice the width, and the input of the last norm; with
        train.recompute = full, the layer's input stands for all but the last.
        """
        if not self.has_mtp:
            return 0.0
        return self.kinds[0].kept.total * self.tokens + (2 if self._is_full else 4) * self.hidden

    def saved_by_layer(self) -> float:
        """Bytes that a layer of this stage saves for a pack: the mean."""
        total = sum(kind.number_in(*self.chunks) * kind.kept.total for kind in self.kinds)
        return total * self.tokens / sum(map(len, self.chunks))

    @property
    def _is_full(self) -> bool:
        return self.config.train.recompute == "full"

    def _saved_by_layers(self, layers: range) -> float:
        """Bytes on the device.  With offload, layers that follow have made room for those that come back: 0."""
        if self.config.train.offload_fraction:
            return 0.0
        return sum(kind.number_in(layers) * kind.kept.total for kind in self.kinds) * self.tokens

    def _layer(self, kind: LayerKind, freed: float, more: float) -> Iterator[WorkingSet]:
        """freed: by backward of what follows the layer; more: bytes held"""
        # The gradient of a dense MLP's gated activation takes the place of the activation, if that was saved.
        gated = 0.0 if kind.has_experts else kind.kept.mlp.get("gated", 0.0) * self.tokens
        yield WorkingSet({MLP: self._mlp(kind) + gated + more}, freed + gated)
        # The gradient of the residual stream; with `full`, also the layer's output that was computed again.
        waits = kind.recomputed_attention * self.tokens + (2 if self._is_full else 1) * self.hidden
        local = kind.backend.local(self.tokens) + waits + self._widest_gradient() + more
        gathered = kind.backend.gathered(self.pack)
        held = {ATTENTION: local, GATHERED: gathered} if gathered else {ATTENTION: local}
        yield WorkingSet(held, freed + kind.freed_before_attention * self.tokens)

    def _mlp(self, kind: LayerKind) -> float:
        """Bytes while backward computes the MLP of a layer: recomputed activations, and gradients.

        A token in experts counts top_k times.  With `full`, three tensors as wide as what was sent are in memory when
        recomputation of experts ends, and so is the recomputed attention.  An adapter's output has the width of gate
        and up, and is in memory together with the weight's output and the sum.  train.mlp_tile limits the number of
        tokens.
        """
        mlp, recompute = kind.everything.mlp, self.config.train.recompute
        if kind.has_experts and recompute != "full":
            return (self._recomputed_experts(kind) if recompute == "selective" else self._experts(kind)) + self.hidden
        recomputed = sum(value for name, value in mlp.items() if name not in kind.kept.mlp)
        sent, gate_up = mlp.get("sent to experts", 0.0), mlp["gate and up"]
        inside = recomputed + max(gate_up + sent, 3 * sent)
        adapts_gate_and_up = any(weight.module.endswith("linear_fc1") for weight in self.trained.adapted)
        if adapts_gate_and_up and recompute != "none":
            inside = max(inside, mlp[model_bytes.MLP_NORM] + 3 * gate_up)
        waits = kind.recomputed_attention if self._is_full else 0.0
        of_tile = inside * min(self.tokens, self.config.train.mlp_tile or self.tokens)
        around = (1 if recompute == "none" else 2) * self.hidden  # gradients of the output, and of a recomputed input
        return of_tile + waits * self.tokens + around + self._widest_gradient()

    def _recomputed_experts(self, kind: LayerKind) -> float:
        """Bytes while backward computes experts that alone are recomputed.

        Their output, its gradient and that of their input are in memory all the time.  When recomputation ends, the
        output is there in one piece and by expert; when backward ends, so is the gradient of the input, with those of
        all weights.  Kernels for all experts at once hold the gradient of gate and up for all of them.
        """
        mlp, trained = kind.everything.mlp, self.trained
        sent, gate_up = mlp["sent to experts"], mlp["gate and up"]
        gated = mlp["gated"] + mlp.get(model_bytes.UNFUSED, 0.0)
        end = gate_up + gated + 4 * sent
        if self._computes_experts_at_once:
            end = max(end, 2 * gate_up + gated + 3 * sent)
        weights = model_bytes.gradients_of_experts(self.config.model, self._rank) if trains_layers(trained) else 0.0
        return max(end * self.tokens, 5 * sent * self.tokens + weights)

    def _experts(self, kind: LayerKind) -> float:
        """Bytes while backward computes experts without recomputation: at first the gradient of their output, in one
        piece and by expert; then, with kernels for all experts at once, gradients inside."""
        mlp = kind.everything.mlp
        sent, inside = mlp["sent to experts"], mlp["gate and up"] + mlp["gated"]
        return (max(2 * sent, inside + sent) if self._computes_experts_at_once else 2 * sent) * self.tokens

    @property
    def _computes_experts_at_once(self) -> bool:
        """False: one expert after the other."""
        is_portable = self.config.attention.backend == "portable" or self.config.run.device == "cpu"
        return not is_portable or self.config.model.activation != "swiglu" or bool(self.trained.adapted)

    @property
    def _rank(self) -> model_bytes.RankShare:
        return model_bytes.RankShare.of(self.config, self.layout)

    def _widest_gradient(self) -> float:
        return model_bytes.widest_gradient(self.config.model, self._rank) if trains_layers(self.trained) else 0.0

    def _table(self) -> float:
        """Bytes of the gradient of tied embeddings that the output makes; 0 if they are not tied, or are frozen."""
        model, trained = self.config.model, self.trained
        is_trained = trained.whole is None or any(weight.key == EMBEDDING for weight in trained.whole)
        return self._rank.width * self.rows * model.hidden_size if model.tie_embeddings and is_trained else 0.0

    def _head(self) -> float:
        """The loss head, with the hidden states after the final norm.  While the second head of multi-token prediction
        computes, the first one's gradient and hidden states wait."""
        model = self.config.model
        head = model_bytes.loss_head(self.config.loss, model, self._rank, vocab_rows=self.rows, tokens=self.tokens)
        return head + (3 if self.has_mtp else 1) * self.hidden
