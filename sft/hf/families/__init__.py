"""The table of families: one `Family` for each supported `model_type`.

`rules.py` defines the rules, keys and options that families share, and `windows.py` reads the layers with a window.
`sft/layers/weights.py` explains the letters of a shape.  These files declare families:

    llama.py                             layers like those of Llama, Mixtral and Qwen
    granite.py, variants.py, gemma.py, gemma4.py    layers that compute more
    routed.py                            routers with sigmoid scores
    own_windows.py, step.py              layers with a window whose heads differ from those of other layers
    rotated.py                           other rotations, and norms on rotated heads
    gated.py                             an output gate of attention with a projection of its own
    linear.py, olmo_hybrid.py            linear attention
    latent.py                            latent attention
    kimi_linear.py                       Kimi Delta Attention beside latent attention
    ungated.py                           MLPs without a gate
    mamba.py                             Mamba-2, and an MLP in each layer
    nemotron.py                          layers that are only a mixer or only an MLP
    vision.py                            a vision tower beside a language model of another family

`unsupported.py` lists what our model lacks for other families.
"""

from collections.abc import Mapping
from typing import Any

from sft.hf.families.gated import GATED
from sft.hf.families.gemma import GEMMA
from sft.hf.families.gemma4 import GEMMA4
from sft.hf.families.granite import GRANITE
from sft.hf.families.kimi_linear import KIMI_LINEAR
from sft.hf.families.latent import LATENT
from sft.hf.families.linear import LINEAR_FAMILIES
from sft.hf.families.llama import LLAMA_LIKE
from sft.hf.families.mamba import GRANITE_HYBRID
from sft.hf.families.nemotron import NEMOTRON
from sft.hf.families.olmo_hybrid import OLMO_HYBRID
from sft.hf.families.own_windows import OWN_WINDOWS
from sft.hf.families.rotated import ROTATED
from sft.hf.families.routed import ROUTED
from sft.hf.families.step import STEP
from sft.hf.families.ungated import UNGATED
from sft.hf.families.variants import GPT_OSS, VARIANTS
from sft.hf.families.vision import VISION
from sft.hf.family import Family

FAMILIES = {
    family.name: family
    for family in (
        *LLAMA_LIKE,
        *GRANITE,
        *VARIANTS,
        *GEMMA,
        *GEMMA4,
        *GPT_OSS,
        *ROUTED,
        *OWN_WINDOWS,
        *STEP,
        *ROTATED,
        *GATED,
        *LINEAR_FAMILIES,
        *LATENT,
        *KIMI_LINEAR,
        *OLMO_HYBRID,
        *UNGATED,
        *NEMOTRON,
        *GRANITE_HYBRID,
        *VISION,
    )
}


def family_of(content: Mapping[str, Any]) -> Family | None:
    """The family that `content`, the content of config.json, names; None if the family is not supported.

    A model_type with a vision tower may have several families, one for each model_type in text_config.
    """
    inner = content.get("text_config")
    text_type = inner.get("model_type") if isinstance(inner, dict) else None
    name = str(content.get("model_type"))
    return FAMILIES.get(f"{name}/{text_type}") or FAMILIES.get(name)
