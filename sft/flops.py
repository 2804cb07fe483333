"""Counts the parameters of a model and its FLOPs per token.  Arithmetic only."""

from sft.config import ModelConfig


def num_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, with `vocab_size` rows in the embedding (no padding rows).

    hidden 4, ffn 8, 2 heads of 2, 1 layer, tied, 10 tokens:
    embedding 40, qkv 48, proj 16, fc1 64, fc2 32, two norms 8, last norm 4 -> 212
    """
    hidden, width = model.hidden_size, model.resolved_head_dim
    queries, keys = model.num_attention_heads * width, model.resolved_query_groups * width
    attention = hidden * (queries + 2 * keys) + queries * hidden
    attention += (queries + 2 * keys) * model.qkv_bias + 2 * width * model.qk_norm
    mlp, _ = _mlp(model)
    embeddings = vocab_size * hidden * (1 if model.tie_embeddings else 2)
    return embeddings + model.num_layers * (attention + mlp + 2 * hidden) + hidden


def active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters that multiply one token: all but those of experts that it does not choose.

    Qwen3-30B-A3B: 3,353,032,704 of 30,532,122,624
    """
    total, active = _mlp(model)
    return num_parameters(model, vocab_size) - model.num_layers * (total - active)


def describe_parameters(model: ModelConfig, vocab_size: int) -> str:
    """`30,532,122,624 (3,353,032,704 for a token)`"""
    total, active = num_parameters(model, vocab_size), active_parameters(model, vocab_size)
    return f"{total:,}" + (f" ({active:,} for a token)" if active < total else "")


def _mlp(model: ModelConfig) -> tuple[int, int]:
    """Parameters of a layer's MLP: all of them, and those that multiply one token.  Gate, up, down.

    hidden 4, 8 experts of width 2, top 2: router 32, an expert 24 -> (224, 80)
    """
    experts, top_k = model.moe.num_experts, model.moe.top_k
    if experts is None or top_k is None:
        mlp = 3 * model.hidden_size * model.ffn_hidden_size
        return mlp, mlp
    router, expert = model.hidden_size * experts, 3 * model.hidden_size * model.resolved_expert_ffn
    return router + experts * expert, router + top_k * expert


def train_flops(model: ModelConfig, vocab_size: int) -> tuple[float, float, float]:
    """FLOPs of forward and backward: per token of a document, per supervised token, per squared length of a document.

    Matrix products only, 6 per parameter that multiplies (of experts: those that a token goes to); causal attention
    costs half of the square, twice (scores and values), and backward twice of forward: 6 * layers * queries per
    squared token.

    the model above (`num_parameters`): (6 * 160, 6 * 40, 6 * 1 * 4)
    """
    width = model.resolved_head_dim
    queries, keys = model.num_attention_heads * width, model.resolved_query_groups * width
    per_layer = model.hidden_size * (2 * queries + 2 * keys) + _mlp(model)[1]
    head = vocab_size * model.hidden_size
    return 6.0 * model.num_layers * per_layer, 6.0 * head, 6.0 * model.num_layers * queries


def attention_crossover(model: ModelConfig) -> float:
    """Length of a document, in tokens, at which its attention takes as many FLOPs as everything else.

    Llama 8B: 53,248        the model above: 960 / 24 = 40
    """
    per_token, _, per_square = train_flops(model, vocab_size=0)
    return per_token / per_square
