"""The table of families: one `Family` for each supported `model_type`.

`rules.py` holds what families share, and `sft/hf/tensor_view.py` explains the letters of a shape.  The other files
declare the families: `llama.py`; `variants.py`, `gemma.py` and `gemma4.py` for those whose layers compute more,
`routed.py` for those whose routers have sigmoid scores, `linear.py` for those with linear attention, `latent.py` for
those with latent attention, and `vision.py` for those with a vision tower.
"""

from collections.abc import Mapping
from typing import Any

from sft.hf.families.gemma import GEMMA
from sft.hf.families.gemma4 import GEMMA4
from sft.hf.families.latent import LATENT
from sft.hf.families.linear import LINEAR_FAMILIES
from sft.hf.families.llama import LLAMA_LIKE
from sft.hf.families.routed import ROUTED
from sft.hf.families.variants import GPT_OSS, VARIANTS
from sft.hf.families.vision import VISION
from sft.hf.family import Family

FAMILIES = {
    family.name: family
    for family in (*LLAMA_LIKE, *VARIANTS, *GEMMA, *GEMMA4, *GPT_OSS, *ROUTED, *LINEAR_FAMILIES, *LATENT, *VISION)
}


def family_of(content: Mapping[str, Any]) -> Family | None:
    """The family that config.json names.  Some families hold models of several families in their text_config."""
    inner = content.get("text_config")
    text_type = inner.get("model_type") if isinstance(inner, dict) else None
    name = str(content.get("model_type"))
    return FAMILIES.get(f"{name}/{text_type}") or FAMILIES.get(name)
