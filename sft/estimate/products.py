"""Lists the matrix products of a rank in one microbatch: their sizes, and how often each runs.  Arithmetic only.

`step_time.py` computes seconds from this list.  The list does not contain the products of attention and of the states
of linear attention.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sft.config import Config, ModelConfig
from sft.layers.kinds import layer_groups
from sft.layers.matrices import LayerWeights, ModelProducts
from sft.layers.mixer import Mixer
from sft.layers.mixers import MIXERS
from sft.layers.mixers.latent import EXPANDED
from sft.parallel.layout import Layout, padded_vocab_size

# The parts of a layer that train.recompute = selective recomputes.
_RECOMPUTED = {"mlp", "experts", "shared", "shared gate"}
_RECOMPUTED |= {
    weight.part for mixer in MIXERS.values() if mixer.is_recomputed for weight in mixer.weights if weight.part
}


class Product(NamedTuple):
    """A product [rows, inner] x [inner, columns] of `copies` matrices, and its products in backward, of equal FLOPs.

    part      "attention", "linear attention", "mlp", "shared", "experts" (grouped products), "router", "head", ...:
              `LayerWeight.part`
    forward   number of runs in forward
    repeated  number of runs in recomputation
    inputs    number of runs for the gradient of the input; a fraction if backward reaches only some layers
    weights   number of runs for the gradient of the weight; a fraction if only some layers train it
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
        """The FLOPs of one run.  [2, 3] x [3, 4] -> 48"""
        return 2.0 * self.rows * self.columns * self.inner * self.copies

    @property
    def num_runs(self) -> float:
        return self.forward + self.repeated + self.inputs + self.weights

    @property
    def smallest(self) -> float:
        """The smallest of rows, columns and inner, which decides how fast the product runs."""
        return min(self.rows, self.columns, self.inner)


def layer_products(config: Config, layout: Layout, model_products: ModelProducts, tokens: float) -> list[Product]:
    """The products of all layers of one pipeline stage in one microbatch.

    `copies` counts layers, and for experts also the experts of the rank.
    tokens: number of tokens of a pack on one rank of cp
    """
    keeps_graph = _keeps_graph(config, layout)
    return [
        product
        for weights in model_products.weights
        for product in _weight_products(config, layout, weights, model_products.rank, tokens, keeps_graph)
    ]


def _keeps_graph(config: Config, layout: Layout) -> bool:
    """Whether backward reaches the embedding even if the lowest layers are frozen (sft/mcore/lora/freeze.py)."""
    return config.train.repeats_layers or layout.pp > 1 or config.run.fp8 is not None


def attention_reached(config: Config, layout: Layout, model_products: ModelProducts) -> float:
    """Share of the attention layers whose attention has a backward pass: 1 if all weights are trained."""
    if _keeps_graph(config, layout):
        return 1.0
    outputs = [weights for weights in model_products.weights if weights.matrix.key == "self_attention.linear_proj."]
    num_layers = sum(weights.num_layers for weights in outputs)
    return sum(weights.reached * weights.num_layers for weights in outputs) / num_layers if outputs else 1.0


def _weight_products(
    config: Config, layout: Layout, weights: LayerWeights, rank: int, tokens: float, keeps_graph: bool
) -> Iterator[Product]:
    matrix, part = weights.matrix, weights.matrix.part
    rows, copies, size = tokens, weights.num_layers / layout.pp, layout.tp
    if part == "experts":
        rows, copies, size = _expert_sizes(config.model, layout, tokens, copies)
    elif not matrix.split and layout.sequence_parallel:
        rows = tokens / layout.tp  # a matrix that every rank holds multiplies the rank's own tokens
    columns = matrix.rows / (size if matrix.split == "rows" else 1)
    inner = matrix.columns / (size if matrix.split == "columns" else 1)
    repeated = num_repeats(config, part)
    is_left_out = matrix.unread.leaves_out(config, part)
    if part == EXPANDED and config.shares_latents:
        rows, repeated = tokens * layout.cp, repeated + 1.0  # every rank expands the latents of the pack, twice
    passes = {
        "repeated": repeated * (1.0 if keeps_graph else weights.revisited),
        "inputs": 1.0 if keeps_graph else weights.reached,
    }
    by_chunk = config.train.head_chunks is not None and matrix.key == "self_attention.linear_qkv."
    recomputed = passes["inputs"] if by_chunk else 0.0  # backward projects each chunk of heads again
    whole = Product(part, rows, columns, inner, copies, **passes, weights=weights.trained)
    yield whole._replace(repeated=0.0 if is_left_out else whole.repeated + recomputed)
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
        repeated_b = 0.0 if is_left_out else passes["repeated"] + recomputed
        yield Product(part, rows_b, b, rank, copies, repeated=repeated_b)


def _expert_sizes(model: ModelConfig, layout: Layout, tokens: float, layers: float) -> tuple[float, float, int]:
    """(rows of one expert, number of the rank's experts in these layers, etp), if all experts get equal shares."""
    num_experts, top_k = model.moe.num_experts or 1, model.moe.top_k or 1
    own = num_experts / layout.ep
    sent = tokens * layout.etp * top_k / (layout.tp if layout.sequence_parallel else 1)
    return sent / own, layers * own, layout.etp


def num_repeats(config: Config, part: str) -> float:
    """How often backward computes the part's forward products again, but for those that it leaves out (`Unread`)."""
    train = config.train
    if part == "mlp" and train.mlp_tile is not None:
        return 1.0
    return float(train.repeats_layers or (train.recompute == "selective" and part in _RECOMPUTED))


def attention_flops(model: ModelConfig, length: float) -> Iterator[tuple[Mixer, float, float]]:
    """The forward FLOPs of causal attention over one document, for all layers of each kind together.

    Yields the mixer of the layers, the number of keys of the last query, and the FLOPs.  Kernels compute the scores
    again in backward, and then execute 5 products instead of 2 (`kernel_rates.BACKWARD`).
    1 layer, 2 heads of 3, 10 tokens: a query sees 5 keys on average, 10 x 5 x 2 x 2 x 6 -> full attention, 10, 1200
    """
    for group in layer_groups(model):
        if width := len(group.numbers) * group.mixer.pair_width:
            keys = min(length, group.mixer.window or length)
            yield group.mixer, keys, 2.0 * width * keys * (2 * length - keys)


def head_product(
    config: Config, layout: Layout, model_products: ModelProducts, vocab_size: int, labels: float
) -> Product:
    """The product of the output layer.

    labels: on a rank of cp, the number of supervised tokens for the fused loss head, and of all tokens for other heads
    """
    return Product(
        "head",
        rows=labels,
        columns=padded_vocab_size(vocab_size, layout.tp) / layout.tp,
        inner=config.model.hidden_size,
        weights=1.0 if model_products.trains_head else 0.0,
    )
