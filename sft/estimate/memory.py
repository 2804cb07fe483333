"""What a run takes of memory: bytes of a rank's device and of its host.  Arithmetic only: no torch, nothing measured.

    device = weights + gradients + optimizer + kept by layers + ends + the largest of (MLP, attention + gathered, head)

What is kept by layers waits between forward and backward; MLP and attention are those of the layer at work, what it
computes again and the gradients within; ends are what lies before the first layer and behind the last.  All as on
CUDA, where the gated activation is one kernel and attention torch's flash: a CPU keeps more.  CUDA itself, NCCL and
gaps between allocations are not in it: about 1 GiB, or more with many communicators.

Symbols: H hidden size, A = heads x head_dim, K = key heads x head_dim, F = width of the MLP, b = bytes of a number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from sft.config import Config, ModelConfig
from sft.console import size
from sft.parallel.layout import Layout, padded_vocab_size

MAIN_GRADIENT, MOMENTS, MAIN_WEIGHT = 4, 8, 4  # bytes of a parameter, all fp32
ON_HOST = 16  # bytes of an offloaded parameter there: main weight, moments, and the gradient on its way
CARD = 80e9  # what `told` asks for; cards of 80 GB have 85e9, the rest is CUDA's
LOTS = 4  # of heads at most, in which portable attention gathers keys and values
OF_MLP = (
    "MLP norm's scale",
    "MLP's normed input",
    "gate and up",
    "gated",
    "router",
    "sent to experts",
    "from experts",
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the rank that takes the most, a rank of pipeline stage `stage`."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    layers: float  # kept between forward and backward
    ends: float
    mlp: float  # of the layer whose backward is running, while it is at its second half
    attention: float  # the same, at its first
    gathered: float  # keys and values of the whole pack, where cp cuts it: beside attention
    head: float
    host_layers: float = 0.0
    host_optimizer: float = 0.0

    @property
    def static(self) -> float:
        """What does not grow with the context."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> float:
        return self.static + self.layers + self.ends + self.working

    @property
    def working(self) -> float:
        """One after the other: the second half of a layer, the first, the loss."""
        return max(self.mlp, self.attention + self.gathered, self.head)

    @property
    def host(self) -> float:
        return self.host_layers + self.host_optimizer


# --- the parts ---------------------------------------------------------------------------------------------------


def kept_per_token(
    model: ModelConfig,
    recompute: str,
    *,
    tp: int = 1,
    etp: int = 1,
    share: float = 1.0,
    te: bool = False,
    exchanged: bool = False,
    width: int = 2,
) -> dict[str, float]:
    """Bytes that one layer keeps of each local token between forward and backward, by name.

    share      of the tokens that a rank has between layers: 1 / tp with sequence parallelism
    te         Transformer Engine's layers, whose queries, keys and values keep what went into them
    exchanged  by them over cp (a2a): attention's output is kept as its kernel gave it, and as it came back
    width      b

    What `portable` keeps is exact (tests/ranks/test_saved_tensors.py counts it on a CPU, where the activation is not fused and
    keeps 2 F numbers more: the gate after silu, and up once more), of te as torch's allocator counts it in all
    (docs/performance.md).  Of experts an approximation: every token is sent top_k times, and every rank gets its share.

    Llama-8B: full 8 KiB; selective 36 KiB, none 136 KiB, and a few bytes a head
    """
    hidden = width * model.hidden_size * share
    queries = width * model.num_attention_heads * model.resolved_head_dim / tp
    keys = width * model.resolved_query_groups * model.resolved_head_dim / tp
    entry = {"layer's input": hidden}
    if recompute == "full":
        return entry
    attention = {
        "queries, keys, values": queries + 2 * keys,
        "attention's output": queries * (2 if exchanged else 1),
        "log-sum-exp": 4 * model.num_attention_heads / tp,
        "norms' scales": 4 * share + 4 * model.qk_norm * (model.num_attention_heads + model.resolved_query_groups) / tp,
        "MLP's norm input": hidden,
    }
    normed = {"normed input": hidden, **({"normed queries and keys": queries + keys} if model.qk_norm else {})}
    if recompute == "selective":
        return {**entry, **attention, **(normed if te else {})}
    mlp = {"MLP norm's scale": 4 * share, "MLP's normed input": hidden, **_mlp(model, tp, etp, share, width)}
    return {**entry, **attention, **normed, **mlp}


def _mlp(model: ModelConfig, tp: int, etp: int, share: float, width: int) -> dict[str, float]:
    experts, top_k = model.moe.num_experts, model.moe.top_k
    if experts is None or top_k is None:
        ffn = width * model.ffn_hidden_size / tp
        return {"gate and up": 2 * ffn, "gated": ffn}
    sent, ffn = share * top_k * width * model.hidden_size, share * top_k * width * model.resolved_expert_ffn
    return {
        "router": 8 * share * experts,  # scores and probabilities, fp32
        "sent to experts": sent * etp,  # whose ranks each see all of their tokens, and a part of the width
        "gate and up": 2 * ffn,
        "gated": ffn,
        "from experts": sent,
    }


def parameters(model: ModelConfig, layout: Layout, vocab_size: int, stage: int) -> tuple[float, float]:
    """On a rank of that pipeline stage: all but experts, experts.

    hidden 4, ffn 8, 2 heads of 2, 1 layer, tied, 128 tokens, one rank: (512 + 172, 0)
    """
    hidden, width = model.hidden_size, model.resolved_head_dim
    queries, keys = model.num_attention_heads * width, model.resolved_query_groups * width
    split = hidden * (2 * queries + 2 * keys) + (queries + 2 * keys) * model.qkv_bias
    whole, experts = 2 * hidden + 2 * width * model.qk_norm, 0.0
    if model.moe.num_experts is None:
        split += 3 * hidden * model.ffn_hidden_size
    else:
        whole += hidden * model.moe.num_experts
        experts = 3 * hidden * model.resolved_expert_ffn * model.moe.num_experts / (layout.ep * layout.etp)
    layers, first, last = model.num_layers / layout.pp, stage == 0, stage == layout.pp - 1
    tables = first + (last and not (first and model.tie_embeddings))
    dense = layers * (split / layout.tp + whole) + tables * _rows(vocab_size, layout.tp) * hidden + hidden * last
    return dense, layers * experts


def _rows(vocab_size: int, tp: int) -> float:
    """Of the embedding on one rank, those that only pad it among them."""
    return padded_vocab_size(vocab_size, tp) / tp


def _at_once(layout: Layout, stage: int) -> float:
    """Microbatches of which all layers of a rank wait for backward at the same time.

    pp 4: 4 on the first stage, 1 on the last; with 2 virtual stages 11 halves and 5 halves
    """
    pp, virtual, packs = layout.pp, layout.virtual_stages, layout.num_microbatches
    if virtual == 1:
        return min(pp - stage, packs)
    return min(2 * (pp - stage - 1) + (virtual - 1) * pp + 1, packs * virtual) / virtual


def _offloaded(fraction: float, num_layers: float, at_once: bool) -> tuple[float, float]:
    """Of the layers of a chunk: how many wait on the host, and what most are on the device at a time.

    The first ones go, whole.  One comes or goes while another is worked on, before and behind those that stay: the last
    two do where backward follows each forward pass at once.

    4 layers: a share of 0.3 sends 2, and 2 are here; 0.1 sends 1, and 3 are here; 1 sends 4, or 2 at once; 2 are here
    """
    away = min(math.ceil(fraction * num_layers), max(0.0, num_layers - 2) if at_once else num_layers)
    return away, max(num_layers - away, min(2.0, num_layers))


def _mlp_turn(config: Config, again: Mapping[str, float], gate_and_up: float, tokens: float) -> float:
    """Its half of the layer whose backward is running: what is computed again, and the gradient of gate and up.

    train.mlp_tile cuts that down to as many tokens.  Where whole layers are computed again, attention's half waits
    meanwhile.
    """
    inside = sum(x for name, x in again.items() if name in OF_MLP) + gate_and_up
    waits = sum(x for name, x in again.items() if name not in OF_MLP) if config.train.recompute == "full" else 0.0
    return inside * min(tokens, config.train.mlp_tile or tokens) + waits * tokens


def _attention_turn(config: Config, layout: Layout, pack: float, width: int) -> tuple[float, float]:
    """Its half of the same: for local tokens; and keys and values of the whole pack, which cp brings together.

    local     queries and keys rotated, the gradients of output and queries; of the heads at work, all or one lot, the
              gradient of queries in both precisions; the gradients of keys and values
    portable  a lot of keys and values, and the next on its way; laid out for the kernel: they, their gradients, those
              of the lot before; that one's fp32 sum on its way to its ranks; and of every head what the kernel sums
              to the gradients of its group, or after that the same in fp32
    te        two chunks are on their way (p2p), or the rank's own share of heads (a2a); all_gather has those of the
              pack, as they came and in order, and their gradients, several times (counted: 6.5 at cp 2, 7.8 at cp 4, no
              more at cp 8)
    """
    model, tokens = config.model, pack / layout.cp
    heads, groups = model.num_attention_heads, model.resolved_query_groups
    queries, pairs = (n * model.resolved_head_dim / layout.tp for n in (heads, 2 * groups))  # numbers of a token
    of_heads = 2 * queries if heads > groups else 0.0
    whole = width * (3 * queries + pairs / 2)
    if layout.cp == 1 or config.attention.backend == "te":
        share = 8.0 if config.parallel.cp_comm == "all_gather" else 4 / layout.cp
        gathered = width * pairs * share * pack if layout.cp > 1 else 0.0
        return tokens * (whole + (width + 4) * queries + width * (pairs + of_heads)), gathered
    lots = max(n for n in range(1, LOTS + 1) if groups // layout.tp % n == 0)
    laid_out = 1 + 1 / (2 * layout.cp)  # keys early in a document are there for both of a rank's chunks
    of_lot = (2 * width + 4) * pairs + laid_out * (3 * width * pairs + max(width * of_heads, 4 * pairs))
    return tokens * (whole + (width + 4) * queries / lots + 4 * pairs), pack * of_lot / lots


def _head(config: Config, layout: Layout, vocab_size: int, tokens: float, width: int) -> float:
    """What the loss holds beside its inputs; docs/loss.md."""
    rows, hidden = _rows(vocab_size, layout.tp), config.model.hidden_size
    if config.loss.impl == "chunked":
        return 2 * width * tokens * rows
    if config.loss.impl == "full":
        return (2 * width + 8) * tokens * rows
    gradient = width * hidden * tokens * (2 if layout.sequence_parallel else 1)  # and the gathered hidden states
    return max(config.loss.chunk(math.ceil(tokens)), hidden) * rows * width + gradient


# --- the whole ---------------------------------------------------------------------------------------------------


def estimate(config: Config, layout: Layout, vocab_size: int, tokens: int | None = None) -> Memory:
    """What the fullest rank takes.  tokens: of a pack; None: data.seq_length."""
    pack = config.data.seq_length if tokens is None else tokens
    stages = sorted({0, layout.pp - 1})
    return max((_stage(config, layout, vocab_size, pack, s) for s in stages), key=lambda found: found.device)


def _stage(config: Config, layout: Layout, vocab_size: int, pack: int, stage: int) -> Memory:
    model, train, width = config.model, config.train, 2 if config.run.precision == "bf16" else 4
    local = pack / layout.cp
    share = 1 / layout.tp if layout.sequence_parallel else 1.0
    te = config.attention.backend == "te"
    exchanged = te and layout.cp > 1 and config.parallel.cp_comm.startswith("a2a")
    items = partial(
        kept_per_token, model, tp=layout.tp, etp=layout.etp, share=share, te=te, exchanged=exchanged, width=width
    )
    kept, everything = items(train.recompute), items("none")
    if train.mlp_tile is not None:
        kept = {name: x for name, x in kept.items() if name not in OF_MLP}
    hidden = share * width * model.hidden_size * local
    of_layer = sum(kept.values()) * local
    chunk = model.num_layers / layout.pp / layout.virtual_stages
    last = stage == layout.pp - 1
    away, here = _offloaded(train.offload_fraction, chunk, at_once=last and layout.virtual_stages == 1)
    of_chunk_layer = of_layer * layout.virtual_stages * _at_once(layout, stage)
    angles = 4.0 * pack if te else 2.0 * width * local  # fp32 of the longest document, or cosine and sine
    again = {name: x for name, x in everything.items() if name not in kept}
    first_half = sum(x for name, x in again.items() if name not in OF_MLP) * local
    attention, gathered = _attention_turn(config, layout, pack, width)
    matrix = width * model.hidden_size * 2 * model.resolved_expert_ffn / layout.tp  # the widest weight's own gradient
    weights, gradients, optimizer, host = _static(config, layout, parameters(model, layout, vocab_size, stage), width)
    return Memory(
        stage=stage,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        layers=of_chunk_layer * here,
        ends=(2 * hidden if last else 0.0) + angles * model.resolved_head_dim,  # around the last norm
        mlp=_mlp_turn(config, again, everything["gate and up"], local) + 2 * hidden + matrix,
        attention=attention + first_half + 2 * hidden + matrix,
        gathered=gathered,
        head=_head(config, layout, vocab_size, local, width) if last else 0.0,
        host_layers=of_chunk_layer * away,
        host_optimizer=host,
    )


def _static(
    config: Config, layout: Layout, counts: tuple[float, float], width: int
) -> tuple[float, float, float, float]:
    """Weights, gradients, optimizer, and what of it is on the host.

    bf16, 18 bytes a parameter; with the distributed optimizer 6 + 12 / (dp x cp), of experts 6 + 12 / their copies
    """
    dense, experts = counts
    sharded = config.parallel.distributed_optimizer
    copies = layout.tp * layout.cp * layout.dp / (layout.ep * layout.etp)
    owned = dense / (layout.dp * layout.cp) + experts / copies if sharded else dense + experts
    away = config.optim.offload_fraction
    state = MOMENTS + (MAIN_WEIGHT if width < MAIN_WEIGHT else 0)
    total = dense + experts
    return width * total, MAIN_GRADIENT * total, (1 - away) * state * owned, away * ON_HOST * owned


def longest_context(config: Config, layout: Layout, vocab_size: int, bytes_available: float) -> int:
    """The most tokens of a pack, a multiple of the layout's, with which no rank's device takes more; 0 where none."""

    def fits(multiples: int) -> bool:
        return estimate(config, layout, vocab_size, multiples * layout.pack_multiple).device <= bytes_available

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * layout.pack_multiple


def told(config: Config, layout: Layout, vocab_size: int) -> list[str]:
    """The estimate for people, in a few lines."""
    found = estimate(config, layout, vocab_size)
    parts = {
        "weights": found.weights,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "kept by layers": found.layers,
        "at both ends": found.ends,
        "working set": found.working,
    }
    lines = [
        f"per rank, estimated and not measured: {size(found.device)}, of which",
        ", ".join(f"{name} {size(taken)}" for name, taken in parts.items()),
    ]
    if found.host:
        lines.append(f"and of the host: layers {size(found.host_layers)}, optimizer {size(found.host_optimizer)}")
    longest = longest_context(config, layout, vocab_size, CARD)
    most = f"{longest:,} tokens" if longest else "none; weights, gradients and optimizer take too much"
    return [*lines, f"longest context in 80 GB, by the same estimate: {most}"]
