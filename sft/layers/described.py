"""Says which kinds of layers a model has, for `sft check`."""

from collections import Counter

from sft.config import ModelConfig
from sft.layers.mixers import MIXERS

PLAIN = "full attention"


def describe(model: ModelConfig) -> str | None:
    """`layers 12 with windows of 128 tokens, 12 with full attention; attention sinks`; None: all have full attention"""
    kinds = Counter(_kind(model, number + 1) for number in range(model.num_layers))
    marks = _marks(model)
    if list(kinds) == [PLAIN] and not marks:
        return None
    return "layers " + "; ".join([", ".join(f"{count} with {kind}" for kind, count in kinds.items()), *marks])


def _kind(model: ModelConfig, number: int) -> str:
    mixer = MIXERS[model.kind_of(number)]
    skips = mixer.has_positions and number in model.rope.skip_layers
    return mixer.described(model) + (" without rotary positions" if skips else "")


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
