"""Predicts the seconds that the layers of a pipeline stage compute in a microbatch: forward, backward, recomputation.

matrix products   FLOPs / the rate for the smallest of their three sizes
attention         causal FLOPs of each document / the kernel's rate for the document's tokens on a rank
recurrences       FLOPs / FLA's rate; in plain torch, FLOPs / the rate of fp32 products + bytes / bandwidth
elementwise       bytes that norms, rotary positions, activations and residual sums read and write / bandwidth
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sft.config import Config
from sft.estimate.attention_kernels import Kernels, attention_kernels, relative, uses_portable
from sft.estimate.constants import FP8_PRODUCTS, Constants
from sft.estimate.lengths import Lengths
from sft.estimate.products import Product, attention_flops
from sft.estimate.saved_by_layer import saving_layers
from sft.layers.kernel_rates import BACKWARD
from sft.layers.kinds import layer_groups
from sft.layers.mixer import Mixer
from sft.layers.mixers import delta, latent
from sft.layers.mlps import experts
from sft.layers.moved import Moved, total
from sft.parallel.layout import Layout, padded_vocab_size

# Parts whose products no module of Transformer Engine computes.  DuplicatedLinear computes the duplicated parts.
NOT_IN_FP8 = ("head", "router", "shared gate", delta.DUPLICATED, latent.DUPLICATED, experts.LATENT)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one pass of a microbatch through a stage's layers, by kind of work."""

    linear: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.elementwise


@dataclass(frozen=True)
class LayerWork:
    """The work of the layers of an average pipeline stage on one rank, for one microbatch."""

    config: Config
    layout: Layout
    constants: Constants
    lengths: Lengths
    kernels: Kernels | None = None  # None: the kernels that `attention_kernels` assumes

    def passes(self, products: Iterable[Product], reached: float = 1.0) -> tuple[Seconds, Seconds, Seconds]:
        """Seconds of forward, of backward without recomputation, and of recomputation.

        reached: share of the attention layers whose attention has a backward pass (`attention_reached`)
        """
        train = self.config.train
        repeats_states = train.recompute in ("selective", "full")  # selective repeats recurrences as a whole
        attention, gradients = self.attention()
        states, state_gradients = self._states()
        element = self._elementwise()
        linear = self.seconds(products)
        repeated = Seconds(
            linear=linear[1],
            attention=attention * train.repeats_attention + states * repeats_states,
            elementwise=element.repeated,
        )
        return (
            Seconds(linear=linear[0], attention=attention + states, elementwise=element.forward),
            Seconds(linear=linear[2], attention=reached * gradients + state_gradients, elementwise=element.backward),
            repeated,
        )

    def seconds(self, products: Iterable[Product]) -> tuple[float, float, float]:
        """Seconds of these products: (forward, recomputation, backward)."""
        times = [sum(times) for times in zip(*map(self._runs, products))]
        return times[0], times[1], times[2]

    def _runs(self, product: Product) -> tuple[float, float, float]:
        tflops = self.constants.gemm_tflops.at(product.smallest)
        if product.part == "experts":
            tflops *= self.constants.grouped_gemm.value
        if self.config.run.fp8 is not None and product.part not in NOT_IN_FP8:
            tflops *= FP8_PRODUCTS
        run = product.flops / (tflops * 1e12)
        return product.forward * run, product.repeated * run, (product.inputs + product.weights) * run

    def attention(self) -> tuple[float, float]:
        """Seconds of softmax attention on a rank, forward and backward.

        The rate depends on the length of documents.  A layer in which a query has k keys on average has the rate of
        documents of 2 k tokens, because an average query of such a document has k keys.
        """
        layout, constants = self.layout, self.constants
        tokens, counts = self.lengths.of_pack(self.config.data.seq_length)
        share = 1 / (layout.pp * layout.tp * layout.cp)
        kernels = self.kernels or attention_kernels(self.config, constants.gpu)
        faster = {kind: relative(kernel, constants) for kind, kernel in kernels.items()}
        total = [0.0, 0.0]
        for length, count, cp_size in zip(tokens.tolist(), counts.tolist(), cp_sizes(layout, tokens, self.config)):
            for mixer, keys, flops in attention_flops(self.config.model, length):
                size, work = min(length / cp_size, 2 * keys), flops * share * count
                forward, backward = faster[mixer.kind]
                total[0] += work / (forward * constants.attention_forward.at(size) * 1e12)
                total[1] += BACKWARD * work / (backward * constants.attention_backward.at(size) * 1e12)
        return total[0], total[1]

    def _states(self) -> tuple[float, float]:
        """Seconds of recurrences, forward and backward."""
        layout, constants, total = self.layout, self.constants, [0.0, 0.0]
        tokens = self.config.data.seq_length / layout.cp
        for group in layer_groups(self.config.model):
            if not group.mixer.state_products:
                continue
            work = group.mixer.state_work(self.config, layout.cp)
            if work.flops:
                run = work.flops / (constants.plain_tflops * 1e12)
                run += work.num_bytes / (constants.elementwise_gb_s.value * 1e9)
            else:
                run = 2.0 * group.mixer.state_products
                run /= constants.linear_attention.at(self._sequences(group.mixer)) * 1e12
            run *= len(group.numbers) * tokens / (layout.pp * layout.tp)
            total = [before + passes * run for before, passes in zip(total, (work.forward, work.backward))]
        return total[0], total[1]

    def _sequences(self, mixer: Mixer) -> float:
        """Number of independent sequences on a rank: heads x fragments of documents.

        With cp, a rank has two fragments of a document.
        """
        heads = mixer.num_states(self.layout.tp)
        documents = float(self.lengths.of_pack(self.config.data.seq_length)[1].sum())
        return heads * max(1.0, documents if self.layout.cp == 1 else 2 * documents)

    def _elementwise(self) -> Moved:
        """Seconds of norms, rotary positions, activations, copies and residual sums."""
        scale = self.config.data.seq_length / self.layout.cp / (self.constants.elementwise_gb_s.value * 1e9)
        return Moved(*(scale * num_bytes for num_bytes in elementwise_bytes(self.config, self.layout)))

    def divergence(self, vocab_size: int, width: int) -> float:
        """Seconds in which the loss head reads its scores once more, for the divergence from a teacher; 0 without
        one.  width: bytes of a score"""
        if not self.config.data.teacher.width:
            return 0.0
        rows = padded_vocab_size(vocab_size, self.layout.tp) / self.layout.tp
        num_bytes = width * rows * self.config.data.seq_length / self.layout.cp
        return num_bytes / (self.constants.elementwise_gb_s.value * 1e9)

    def gradient_sums(self, num_trained: float) -> float:
        """Seconds in which the bf16 gradients of a microbatch are added to their sums.  num_trained: parameters"""
        num_bytes = 2 + 2 * self.config.optim.gradient_bytes  # a gradient is read, its sum read and written
        return num_trained * num_bytes / (self.constants.elementwise_gb_s.value * 1e9)

    def offload(self, forward_s: float, backward_s: float) -> float:
        """Seconds of copies of activations to host memory and back that the two passes do not hide.

        forward_s, backward_s: seconds of the passes
        """
        fraction = self.config.train.offload_fraction
        if fraction == 0.0:
            return 0.0
        pack = self.config.data.seq_length
        kinds = saving_layers(layer_groups(self.config.model), self.config, self.layout.share(self.config), pack)
        saved = sum(len(kind.layers) * kind.kept.total for kind in kinds)
        num_bytes = fraction * saved * pack / self.layout.cp / self.layout.pp
        copied = num_bytes / (self.constants.pcie_gb_s.value * 1e9)
        return max(0.0, copied - forward_s) + max(0.0, copied - backward_s)


def elementwise_bytes(config: Config, layout: Layout) -> Moved:
    """Bytes per token that elementwise operations of a stage's layers move: forward, backward and recomputation."""
    rank, is_portable, layers = layout.share(config), uses_portable(config), []
    for group in layer_groups(config.model):
        parts = total(
            group.mixer.frame(rank, is_portable=is_portable),
            group.mixer.moved(config, rank, is_portable=is_portable),
            group.mlp.frame(rank, is_portable=is_portable),
            group.mlp.moved(rank),
        )
        repeated = {"none": 0.0, "selective": parts.repeated}.get(config.train.recompute, parts.forward)
        layers.append(Moved(*(len(group.numbers) / layout.pp * x for x in parts._replace(repeated=repeated))))
    return total(*layers)


def cp_sizes(layout: Layout, tokens: np.ndarray, config: Config) -> list[int]:
    """The cp size for documents of each length: cp, or with dynamic CP the smallest size whose ranks can hold the pack.

    packs of 1024, dynamic CP up to 4, lengths 100, 300, 1000 -> cp sizes 1, 2, 4
    """
    if not layout.cp_sizes:
        return [layout.cp] * len(tokens)
    limit = config.data.seq_length / layout.cp  # tokens that a rank holds
    return [next((size for size in layout.cp_sizes if length <= size * limit), layout.cp) for length in tokens]
