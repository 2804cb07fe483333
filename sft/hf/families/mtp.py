"""The block for multi-token prediction, as the files of two kinds of models name it.

    DeepSeek-V3, GLM-4.5 and later    one layer more than the model has; files may store embedding and output again
    Qwen3-Next, Qwen3.5 and later     `mtp.*`

The names, and that the norm of the last layer is applied to hidden states before they enter the block, are those of
vLLM (deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py).
"""

from sft.hf.family import MtpBlock, Rule
from sft.hf.tensor_view import LAYER, View

_OURS = "mtp.layers.0"


def _around(embedding_norm: str, hidden_norm: str, projection: str, norm: str) -> tuple[Rule, ...]:
    """Rules for the tensors around the layer, by their names in files."""
    return (
        Rule(f"{_OURS}.enorm.weight", (View(f"{embedding_norm}.weight", "h"),)),
        Rule(f"{_OURS}.hnorm.weight", (View(f"{hidden_norm}.weight", "h"),)),
        Rule(f"{_OURS}.eh_proj.weight", (View(f"{projection}.weight", "h h+h"),)),
        Rule(f"{_OURS}.final_layernorm.weight", (View(f"{norm}.weight", "h"),)),
    )


_NEXT = f"model.layers.{LAYER}"
NEXT_LAYER = MtpBlock(
    layer=_NEXT,
    own=_around(f"{_NEXT}.enorm", f"{_NEXT}.hnorm", f"{_NEXT}.eh_proj", f"{_NEXT}.shared_head.norm"),
    copies={f"{_NEXT}.embed_tokens.weight": "embedding", f"{_NEXT}.shared_head.head.weight": "head"},
)
APART = MtpBlock(
    layer="mtp.layers.0",
    own=_around("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
)
