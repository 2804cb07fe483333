"""The matrix products of a rank in one microbatch: their sizes, and how often each runs.  Arithmetic only.

`step_time.py` makes seconds of this list.  Attention is no product of this list, and neither is the state of linear
attention.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sft.config import Config, ModelConfig
from sft.layers.kinds import layer_groups
from sft.layers.matrices import LayerWeights, ModelProducts
from sft.layers.mixer import Mixer
from sft.layers.mixers import MIXERS
from sft.layers.mixers.latent import DUPLICATED, EXPANDED
from sft.parallel.layout import Layout, padded_vocab_size

# Parts of a layer that train.recompute = selective recomputes.
_RECOMPUTED = {"mlp", "experts", "shared", "shared gate"}
_RECOMPUTED |= {
    weight.part for mixer in MIXERS.values() if mixer.is_recomputed for weight in mixer.weights if weight.part
}


class Product(NamedTuple):
    """[rows, inner] x [inner, columns], `copies` times; also backward, where two products have the same FLOPs.

    part      "attention", "linear attention", "mlp", "shared", "experts" (whose products are grouped), "router", "head"
              of latent attention also DUPLICATED and EXPANDED
    forward   runs forward, in each of which a token counts once; 1 without recompute
    repeated  runs of recompute
    inputs    runs for the gradient of the input
    weights   runs for the gradient of the weight; a share, if only some layers train it
    """

    part: str
    rows: float
    columns: float
    inner: float
    copies: float = 1.0
    forward: float = 1.0
    repeated: float = 0.0
    inputs: float = 1.0
    weights: float = 1.0

    @property
    def flops(self) -> float:
        """Of one run.  [2, 3] x [3, 4] -> 48"""
        return 2.0 * self.rows * self.columns * self.inner * self.copies

    @property
    def num_runs(self) -> float:
        return self.forward + self.repeated + self.inputs + self.weights

    @property
    def smallest(self) -> float:
        """The smallest of its three sizes, which decides how fast the product runs."""
        return min(self.rows, self.columns, self.inner)


def layer_products(config: Config, layout: Layout, of_model: ModelProducts, tokens: float) -> list[Product]:
    """The products of all layers of one pipeline stage in one microbatch.  tokens: of a pack on one rank of cp

    `copies` counts layers, with experts also the experts of the rank.
    """
    keeps_graph = _keeps_graph(config, layout)
    return [
        product
        for weights in of_model.weights
        for product in _of_weights(config, layout, weights, of_model.rank, tokens, keeps_graph)
    ]


def _keeps_graph(config: Config, layout: Layout) -> bool:
    """Whether backward reaches the embedding even if nothing below some layer is trained (sft/mcore/lora/freeze.py)."""
    return config.train.recompute == "full" or layout.pp > 1 or config.run.fp8 is not None


def attention_reached(config: Config, layout: Layout, of_model: ModelProducts) -> float:
    """Share of the layers with attention in which backward computes attention's gradients: 1 if all is trained."""
    if _keeps_graph(config, layout):
        return 1.0
    outputs = [weights for weights in of_model.weights if weights.matrix.key == "self_attention.linear_proj."]
    num_layers = sum(weights.num_layers for weights in outputs)
    return sum(weights.reached * weights.num_layers for weights in outputs) / num_layers if outputs else 1.0


def _of_weights(
    config: Config, layout: Layout, weights: LayerWeights, rank: int, tokens: float, keeps_graph: bool
) -> Iterator[Product]:
    matrix, part = weights.matrix, weights.matrix.part
    rows, copies, size = tokens, weights.num_layers / layout.pp, layout.tp
    if part == "experts":
        rows, copies, size = _of_experts(config.model, layout, tokens, copies)
    elif part in ("router", "shared gate", DUPLICATED) and layout.sequence_parallel:
        rows = tokens / layout.tp
    columns = matrix.rows / (size if matrix.split == "rows" else 1)
    inner = matrix.columns / (size if matrix.split == "columns" else 1)
    repeated = _repeated(config, part)
    if part == EXPANDED and config.shares_latents:
        rows, repeated = tokens * layout.cp, repeated + 1.0  # every rank expands the latents of the pack, twice
    passes = {
        "repeated": repeated * (1.0 if keeps_graph else weights.revisited),
        "inputs": 1.0 if keeps_graph else weights.reached,
    }
    yield Product(part, rows, columns, inner, copies, **passes, weights=weights.trained)
    if weights.factor_a:
        # With sequence parallelism, the factor that every rank holds multiplies the rank's own tokens.
        own = rows / (layout.tp if layout.sequence_parallel and part != "experts" else 1)
        a, b = weights.factor_a / rank, weights.factor_b / rank
        rows_a, rows_b = rows, rows
        if matrix.split == "rows":
            rows_a, b = own, b / size
        elif matrix.split == "columns":
            rows_b, a = own, a / size
        yield Product(part, rows_a, rank, a, copies, **passes)
        yield Product(part, rows_b, b, rank, copies, repeated=passes["repeated"])


def _of_experts(model: ModelConfig, layout: Layout, tokens: float, layers: float) -> tuple[float, float, int]:
    """Rows of one expert, number of experts of the rank in all layers, and etp.  All experts get as many tokens."""
    num_experts, top_k = model.moe.num_experts or 1, model.moe.top_k or 1
    own = num_experts / layout.ep
    sent = tokens * layout.etp * top_k / (layout.tp if layout.sequence_parallel else 1)
    return sent / own, layers * own, layout.etp


def _repeated(config: Config, part: str) -> float:
    """Forward passes of backward."""
    recompute, is_tiled = config.train.recompute, config.train.mlp_tile is not None
    repeated = 1.0 if recompute == "full" or (recompute == "selective" and part in _RECOMPUTED) else 0.0
    if part == "mlp" and is_tiled:
        return 2.0 if recompute == "full" else 1.0
    return repeated


def attention_flops(model: ModelConfig, length: float) -> Iterator[tuple[Mixer, float, float]]:
    """The FLOPs of causal attention over one document, forward, of all layers of each kind.

    Each with the mixer of its layers and the number of keys of the last query.  Backward has twice the FLOPs; kernels
    that compute the scores again execute 5 products there instead of 4.

    1 layer, 2 heads of 3, 10 tokens: a query sees 5 keys on average, 10 x 5 x 2 x 2 x 6 -> full attention, 10, 1200
    """
    for group in layer_groups(model):
        if width := len(group.numbers) * group.mixer.pair_width:
            keys = min(length, group.mixer.window or length)
            yield group.mixer, keys, 2.0 * width * keys * (2 * length - keys)


def head_product(config: Config, layout: Layout, of_model: ModelProducts, vocab_size: int, labels: float) -> Product:
    """The output layer.  labels: supervised tokens of a rank of cp for the fused head, all tokens for the others"""
    return Product(
        "head",
        rows=labels,
        columns=padded_vocab_size(vocab_size, layout.tp) / layout.tp,
        inner=config.model.hidden_size,
        weights=1.0 if of_model.trains_head else 0.0,
    )
