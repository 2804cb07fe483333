"""Says which kinds of layers a model has, for `sft check`."""

from collections import Counter

from sft.config import ModelConfig
from sft.layers.kinds import of_kind

PLAIN = "full attention"


def describe(model: ModelConfig) -> str | None:
    """`layers 12 with windows of 128 tokens, 12 with full attention; attention sinks`; None: all have full attention"""
    kinds = Counter(_kind(model, number + 1) for number in range(model.num_layers))
    marks = _marks(model)
    if list(kinds) == [PLAIN] and not marks:
        return None
    return "layers " + "; ".join([", ".join(f"{count} with {kind}" for kind, count in kinds.items()), *marks])


def _kind(model: ModelConfig, number: int) -> str:
    window = model.window_of(number)
    if number in model.linear_attention.layers:
        return "linear attention"
    kind = PLAIN if window is None else f"windows of {window:,} tokens"
    if window is None and model.full_attention.is_used:
        own = of_kind(model, "full attention")
        values = ", which are also values" if own.full_attention.keys_as_values else ""
        return f"{kind} of {own.resolved_query_groups} keys of {own.resolved_head_dim}{values}"
    if window is not None and model.rope.window_base is not None:
        return f"{kind} and rope.base {model.rope.window_base:g}"
    return f"{kind} without rotary positions" if number in model.rope.skip_layers else kind


def _marks(model: ModelConfig) -> list[str]:
    marks = {
        f"the first {model.moe.dense_layers} without experts": bool(model.moe.dense_layers),
        "experts added to an MLP, with norms of their own": model.moe.own_norms,
        "a scalar for each layer": model.layer_scalar,
        "attention sinks": model.attention_sinks,
        f"attention scores capped at {model.attention_softcap}": model.attention_softcap is not None,
        f"logits capped at {model.logits_softcap}": model.logits_softcap is not None,
        "a block for multi-token prediction": model.has_mtp,
    }
    return [mark for mark, is_used in marks.items() if is_used]
