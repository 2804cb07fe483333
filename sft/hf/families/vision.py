"""Declares families with a vision tower.  Only the language model is trained, on text.

The names of tensors are those in the released files.  transformers uses other names in memory and converts them.
"""

from dataclasses import replace
from typing import Any

from sft.hf.families.latent import MISTRAL4, mistral4_rules
from sft.hf.families.llama import LLAMA_LIKE
from sft.hf.families.rules import DEFAULTS, attention, mlp, outer, output_norms, qk_norm, qkv_bias, stacked_experts
from sft.hf.families.variants import VARIANTS
from sft.hf.family import Family

_TEXT = {family.model_type: family for family in (*LLAMA_LIKE, *VARIANTS)}
_INNER = "model.language_model"  # in files of Qwen3-VL, and in files that some versions of transformers wrote
_OUTER, _OUTER_HEAD = "language_model.model", "language_model.lm_head.weight"  # in files of Mistral 3

_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}
_QWEN2_VL: dict[str, Any] = {
    "rules": (*outer(), *attention(), *mlp(), *qkv_bias()),
    "other_rules": ((*outer(_INNER), *attention(_INNER), *mlp(_INNER), *qkv_bias(_INNER)),),
    "keys": {key: hf_key for key, hf_key in _TEXT["qwen2"].keys.items() if key != "head_dim"},
    "computed": {},
    "options": {**_TEXT["qwen2"].options, **_NO_WINDOW, "head_dim": (None,)},
    "defaults": {**_TEXT["qwen2"].defaults, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "text_config": "optional",
    "has_mrope": True,
    "passed_through": ("visual.*", "model.visual.*"),
}
_QWEN3_VL: dict[str, Any] = {
    "computed": {},
    "text_config": "required",
    "has_mrope": True,
    "passed_through": ("model.visual.*",),
}
_MISTRAL3: dict[str, Any] = {
    "model_type": "mistral3",
    "class_name": "Mistral3ForConditionalGeneration",
    "rules": (*outer(_OUTER, _OUTER_HEAD), *attention(_OUTER), *mlp(_OUTER)),
    "other_rules": ((*outer(_INNER), *attention(_INNER), *mlp(_INNER)),),
    "text_config": "required",
    "passed_through": (
        "vision_tower.*",
        "multi_modal_projector.*",
        "model.vision_tower.*",
        "model.multi_modal_projector.*",
    ),
}


def _qwen3_vl_moe(*, transposed: bool) -> tuple[Any, ...]:
    return (*outer(_INNER), *attention(_INNER), *stacked_experts(_INNER, transposed=transposed), *qk_norm(_INNER))


VISION: tuple[Family, ...] = (
    replace(_TEXT["qwen2"], model_type="qwen2_vl", class_name="Qwen2VLForConditionalGeneration", **_QWEN2_VL),
    replace(_TEXT["qwen2"], model_type="qwen2_5_vl", class_name="Qwen2_5_VLForConditionalGeneration", **_QWEN2_VL),
    replace(
        _TEXT["qwen3"],
        model_type="qwen3_vl",
        class_name="Qwen3VLForConditionalGeneration",
        rules=(*outer(_INNER), *attention(_INNER), *mlp(_INNER), *qk_norm(_INNER)),
        options={**_TEXT["qwen3"].options, **_NO_WINDOW},
        defaults={**_TEXT["qwen3"].defaults, "rope_theta": 5e5},
        **_QWEN3_VL,
    ),
    replace(
        _TEXT["qwen3_moe"],
        model_type="qwen3_vl_moe",
        class_name="Qwen3VLMoeForConditionalGeneration",
        rules=_qwen3_vl_moe(transposed=True),
        other_rules=(_qwen3_vl_moe(transposed=False),),  # the shapes that transformers 5 saves
        implied={**_TEXT["qwen3_moe"].implied, "moe.normalize_top_k": True},
        keys={key: hf_key for key, hf_key in _TEXT["qwen3_moe"].keys.items() if key != "moe.normalize_top_k"},
        options={**_TEXT["qwen3_moe"].options, **_NO_WINDOW, "norm_topk_prob": (True,)},
        defaults={
            **DEFAULTS,
            "rope_theta": 5e5,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        **_QWEN3_VL,
    ),
    replace(
        _TEXT["exaone4"],
        model_type="exaone4_5",
        class_name="Exaone4_5_ForConditionalGeneration",
        rules=(
            *(*outer(_INNER), *attention(_INNER, norm=None), *mlp(_INNER, norm=None)),
            *(*output_norms(_INNER), *qk_norm(_INNER)),
        ),
        text_config="required",
        passed_through=("model.visual.*", "mtp.*"),
    ),
    replace(_TEXT["mistral"], text_type="mistral", **_MISTRAL3),
    replace(_TEXT["ministral3"], text_type="ministral3", **_MISTRAL3),
    replace(
        MISTRAL4,
        text_type="mistral4",
        **{
            **_MISTRAL3,
            "rules": mistral4_rules(_OUTER, _OUTER_HEAD),
            "other_rules": (mistral4_rules(_INNER),),
        },
    ),
)
