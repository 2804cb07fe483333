"""Finds the family of a model: that of model.hf, or for a recipe without model.hf a family with the same tensors."""

from operator import attrgetter

from sft.config import ModelConfig
from sft.hf.families import FAMILIES
from sft.hf.family import Family
from sft.hf.model_keys import PLAIN
from sft.layers.weight import has_gate

# Keys below `model` that add or move tensors -> their values in families that do not list them in keys or computed.
_USUAL = {"full_attention.is_used": False} | {
    key: PLAIN[key]
    for key in (
        *("norm_placement", "norm_zero_centered", "value_norm", "layer_scalar", "qk_norm_across_heads"),
        *("moe.shared_ffn_hidden_size", "moe.shared_gate", "moe.own_norms", "moe.correction_bias", "moe.dense_layers"),
        *("attention_output_gate", "moe.layers", "moe.latent_size", "halves.without_mixer", "halves.without_mlp"),
        *("attention_head_gate", "value_head_dim", "qk_norm_weights", "linear_attention.norm_placement"),
    )
}


def model_family(model: ModelConfig) -> Family | None:
    """The family of model.hf, or without model.hf the first family that has the tensors of `model`.

    None if no family has these tensors.
    """
    if model.pretrained is not None:
        return FAMILIES[model.pretrained.family]

    def has_same_tensors(family: Family) -> bool:
        may_have_experts = "moe.num_experts" in family.computed  # models of the family have experts or have none
        has_experts = (model.moe.num_experts is not None) == ("moe.num_experts" in family.keys)
        named = {*family.keys, *family.computed}
        has_mixers = all(
            bool(getattr(section, section.switch)) == (f"{name}.{section.switch}" in named)
            for name, section in model.mixer_sections.items()
        )
        named |= {"full_attention.is_used"} if any(key.startswith("full_attention.") for key in named) else set()
        usual = {key: value for key, value in _USUAL.items() if key not in named}
        return (
            (has_experts or may_have_experts)
            and has_mixers
            and has_gate(model) == (family.implied.get("activation") != "relu2")
            and all(attrgetter(key)(model) == value for key, value in (usual | dict(family.implied)).items())
        )

    return next(filter(has_same_tensors, FAMILIES.values()), None)
