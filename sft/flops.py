"""Counts the parameters of a model and its FLOPs per token.  Arithmetic only."""

from sft.config import ModelConfig


def num_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, with `vocab_size` rows in the embedding (no padding rows).

    hidden size 4, MLP width 8, 2 heads of width 2, 1 layer, tied embeddings, 10 tokens:
    embedding 40, qkv 48, proj 16, fc1 64, fc2 32, two norms 8, final norm 4 -> 212
    """
    hidden, width = model.hidden_size, model.resolved_head_dim
    queries, keys = model.num_attention_heads * width, model.resolved_query_groups * width
    attention = hidden * (queries + 2 * keys) + queries * hidden
    normed = queries + keys if model.qk_norm_across_heads else 2 * width
    attention += (queries + 2 * keys) * model.qkv_bias + normed * model.qk_norm
    mlp, _ = _mlp(model)
    embeddings = vocab_size * hidden * (1 if model.tie_embeddings else 2)
    return embeddings + model.num_layers * (attention + mlp + 2 * hidden) + hidden


def active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters that one token uses: all except those of experts that the token does not choose.

    Qwen3-30B-A3B: 3,353,032,704 of 30,532,122,624
    """
    total, active = _mlp(model)
    return num_parameters(model, vocab_size) - model.num_layers * (total - active)


def describe_parameters(model: ModelConfig, vocab_size: int) -> str:
    """`30,532,122,624 (3,353,032,704 for a token)`"""
    total, active = num_parameters(model, vocab_size), active_parameters(model, vocab_size)
    return f"{total:,}" + (f" ({active:,} for a token)" if active < total else "")


def _mlp(model: ModelConfig) -> tuple[int, int]:
    """Parameters of a layer's MLP (gate, up and down): all, and those that one token uses.

    hidden size 4, 8 experts of width 2, top 2: router 32, each expert 24 -> (224, 80)
    with a shared expert of width 6 and its gate: 72 + 4 more -> (300, 156)
    """
    experts, top_k = model.moe.num_experts, model.moe.top_k
    if experts is None or top_k is None:
        mlp = 3 * model.hidden_size * model.ffn_hidden_size
        return mlp, mlp
    router, expert = model.hidden_size * experts, 3 * model.hidden_size * model.resolved_expert_ffn
    always = router + shared_expert(model) + model.hidden_size * model.moe.shared_gate
    return always + experts * expert, always + top_k * expert


def shared_expert(model: ModelConfig) -> int:
    """Parameters of a layer's shared expert without its gate."""
    return 3 * model.hidden_size * (model.moe.shared_ffn_hidden_size or 0)


def train_flops(model: ModelConfig, vocab_size: int) -> tuple[float, float, float]:
    """FLOPs of forward and backward: per token of a document, per supervised token, per squared length of a document.

    Counts matrix products only.  Each parameter that a token uses costs 2 FLOPs in forward and 4 in backward.  Causal
    attention costs 2 * heads * head_dim FLOPs per layer and squared length in forward, and twice as many in backward.

    the example of `num_parameters` -> (6 * 160, 6 * 40, 6 * 1 * 4)
    """
    width = model.resolved_head_dim
    queries, keys = model.num_attention_heads * width, model.resolved_query_groups * width
    per_layer = model.hidden_size * (2 * queries + 2 * keys) + _mlp(model)[1]
    head = vocab_size * model.hidden_size
    return 6.0 * model.num_layers * per_layer, 6.0 * head, 6.0 * model.num_layers * queries


def attention_crossover(model: ModelConfig) -> float:
    """Length of a document, in tokens, at which attention takes as many FLOPs as all other computation of the layers.

    Llama 8B -> 53,248 tokens
    the model of the example of `num_parameters`: 960 FLOPs per token / 24 per pair of tokens -> 40 tokens
    """
    per_token, _, per_square = train_flops(model, vocab_size=0)
    return per_token / per_square
