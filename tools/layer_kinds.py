"""Makes the table of docs/concepts/layer-kinds.md: bytes over cp and saved bytes of a layer of each kind.

Nothing is measured: sft/parallel/cp_bytes.py and sft/estimate compute the bytes, and tests count them on real ranks.
`python -m tools.pages` writes the page.
"""

from collections.abc import Iterator

import numpy as np

from sft.config import Config
from sft.estimate.saved_by_layer import saving_layers
from sft.layers.kinds import layer_groups
from sft.parallel.cp_bytes import CpBytes
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tools import page_text

BEGIN, END = "<!-- made by tools/layer_kinds.py -->\n", "<!-- end of kinds -->\n"
CP, LONG, SHORT = 8, 65_536, 1_024
# (kind of layer, model) -> keys of `model` for one layer of this kind, from the released config.json.
MODELS = {
    ("full attention", "Llama-3.1-8B"): """\
        hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8""",
    ("window of 128, sinks", "gpt-oss-20b"): """\
        hidden_size: 2880, ffn_hidden_size: 2880, num_attention_heads: 64, num_query_groups: 8, head_dim: 64,
        sliding_window: 128, attention_sinks: true""",
    ("full attention, sinks", "gpt-oss-20b"): """\
        hidden_size: 2880, ffn_hidden_size: 2880, num_attention_heads: 64, num_query_groups: 8, head_dim: 64,
        attention_sinks: true""",
    ("linear attention", "Qwen3.6-27B"): """\
        hidden_size: 5120, ffn_hidden_size: 17408, num_attention_heads: 24, num_query_groups: 4, head_dim: 256,
        linear_attention: {layers: [1], num_key_heads: 16, num_value_heads: 48}""",
    ("Mamba-2", "Nemotron-3-Nano-30B-A3B"): """\
        hidden_size: 2688, ffn_hidden_size: 1856, num_attention_heads: 32, num_query_groups: 2, head_dim: 128,
        mamba: {layers: [1], num_heads: 64, num_groups: 8}""",
    ("latent attention", "DeepSeek-V3"): """\
        hidden_size: 7168, ffn_hidden_size: 18432, num_attention_heads: 128,
        latent_attention: {kv_lora_rank: 512, q_lora_rank: 1536}""",
}
MIB, KIB = 2**20, 2**10


def config(sizes: str, recompute: str) -> Config:
    text = f"""
run: {{dir: unused, device: cuda}}
model: {{num_layers: 1, init_from: random, {sizes}}}
data: {{train: unused, seq_length: {LONG}}}
parallel: {{cp: {CP}}}
attention: {{backend: portable}}
train: {{num_steps: 1, global_batch_size: 1, recompute: {recompute}}}
optim: {{lr: 1.0e-5}}
"""
    return parse_recipe(text, "layer_kinds", []).config


def received(sizes: str, length: int, number: int) -> float:
    """MiB that all ranks together receive for `number` documents of `length` tokens, in one layer."""
    cost, documents = CpBytes.of(config(sizes, "selective")), np.full(number, length)
    return float(cost.num_bytes(documents, 32, CP).sum()) / MIB


def saved(sizes: str, recompute: str) -> float:
    """KiB per token that the attention half of the layer saves for backward, including the input of the MLP half."""
    recipe = config(sizes, recompute)
    rank = Layout.resolve(recipe, CP).share(recipe)
    (kind,) = saving_layers(layer_groups(recipe.model), recipe, rank, LONG)
    return sum(kind.kept.attention.values()) / KIB


def table() -> str:
    return "\n".join([*_rows(), ""])


def _rows() -> Iterator[str]:
    documents = f"1 document of {LONG:,} | {LONG // SHORT} of {SHORT:,}"
    yield f"| one layer | of | {documents} | saved, `selective` | saved, `none` |"
    yield "|---|---|---:|---:|---:|---:|"
    for (kind, model), sizes in MODELS.items():
        moved = " | ".join(f"{received(sizes, length, LONG // length):,.1f} MiB" for length in (LONG, SHORT))
        kept = " | ".join(f"{saved(sizes, recompute):.1f} KiB" for recompute in ("selective", "none"))
        yield f"| {kind} | {model} | {moved} | {kept} |"


def page(text: str) -> str:
    """The page with a new table between its marks."""
    return page_text.replaced(text, BEGIN, END, f"\n{table()}\n")


if __name__ == "__main__":
    print(table(), end="")
