"""Makes the table of docs/numbers/performance.md of bytes that GPUs send in the two-node recipes; nothing is measured.

`python -m tools.traffic_table` prints the table, and `python -m tools.pages` writes it into the page.

The table counts the messages of layers and of gradients as a ring algorithm sends them: in an all-gather or
reduce-scatter of N bytes over n ranks, each rank sends N (n - 1) / n bytes.  A pack is one document, so a sliding
window has one halo for each chunk of the pack, and linear attention has two maps for each rank.  The table leaves out
the embedding, the loss head and small messages.  Sizes of models come from the released config.json files in tests/.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.config import Config
from sft.estimate.attention_kernels import uses_portable
from sft.estimate.parameters import stage_parameters
from sft.estimate.stage import Stage
from sft.layers.adapters import Trained
from sft.layers.kinds import layer_groups
from sft.parallel.cp_bytes import passes
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe
from tools import page_text
from tools.plan_recipes import released_models

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by tools/traffic_table.py -->\n", "<!-- end of traffic -->\n"
GPUS_PER_MACHINE = 8
RECIPES = {  # recipe -> number of GPUs
    "llama31_8b_128k": 16,
    "qwen3_30b_a3b_64k": 16,
    "gpt_oss_20b_128k": 16,
}
RING = ["parallel.cp_comm=p2p", "parallel.cp_a2a=null"]
BF16, FP32 = 2, 4
MESSAGES = {  # kind of layer -> the name of its messages in the table
    "full attention": "cp, all-gather of keys and values",
    "latent attention": "cp, all-gather of keys and values",
    "window attention": "cp, halos of windows",
    "linear attention": "cp, states of linear attention",
    "Mamba-2": "cp, states of Mamba-2",
}


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends to its group in a step.

    size, stride  the group of rank 0 has the global ranks 0, stride, ..., (size - 1) * stride
    """

    group: str
    num_bytes: float
    size: int
    stride: int

    @property
    def link(self) -> str:
        """The slowest link that the group uses.  Rank 0 is the first GPU of the first machine."""
        return "NVLink" if (self.size - 1) * self.stride < GPUS_PER_MACHINE else "InfiniBand"


def of(config: Config, layout: Layout) -> Iterator[Traffic]:
    """The traffic of every group of more than one rank, with full packs.

    Attention runs on Transformer Engine if it can compute the model, otherwise on `portable`.
    """
    tp, cp, model = layout.tp, layout.cp, config.model
    tokens = config.data.seq_length / cp * layout.num_microbatches
    layers = model.num_layers / layout.pp
    queries = BF16 * tokens * model.num_attention_heads * model.resolved_head_dim / tp
    # Bytes of the keys and values, or of the latents, of this rank's tokens.
    pairs = BF16 * tokens * max(group.mixer.sent(config) for group in layer_groups(model))
    is_portable = uses_portable(config)
    heads = 1 if is_portable else layout.cp_a2a or 1
    ring = 1 if is_portable else cp // heads
    if tp > 1:
        yield Traffic("tp", layers * tensor_parallel(config) * BF16 * tokens * model.hidden_size * _share(tp), tp, 1)
    if heads > 1:  # forward: queries, keys, values and output; backward: their gradients
        yield Traffic("cp, all-to-all of heads", layers * 2 * (2 * queries + pairs) * _share(heads), heads, tp)
    if ring > 1:  # forward: keys and values; backward: keys and values again, and their gradients
        yield Traffic("cp, ring of keys and values", layers * 3 * (ring - 1) * pairs, ring, tp * heads)
    if cp > 1:
        yield from _context_parallel(config, layout)
    if layout.ep > 1:
        yield Traffic(
            "ep, tokens to experts and back", layers * experts(config, tokens) * _share(layout.ep), layout.ep, 1
        )
    yield from gradients(config, layout)


def _context_parallel(config: Config, layout: Layout) -> Iterator[Traffic]:
    """The messages of layers over cp, forward and backward, as the mean over the ranks.  A pack is one document.

    With Transformer Engine, which sends keys and values itself, only the messages of linear attention are counted here.
    """
    length = np.array([config.data.seq_length])
    num_bytes: dict[str, float] = defaultdict(float)
    for group in layer_groups(config.model):
        traffic = group.mixer.traffic(config, passes(config, group.mixer))
        received = traffic.gathered * length * (layout.cp - 1) + traffic.others(length, layout.cp)
        num_bytes[MESSAGES[group.mixer.kind]] += len(group.numbers) * float(received.sum())
    names = list(dict.fromkeys(MESSAGES.values())) if uses_portable(config) else [MESSAGES["linear attention"]]
    for name in (name for name in names if num_bytes[name]):
        mean = num_bytes[name] * layout.num_microbatches / layout.cp / layout.pp
        yield Traffic(name, mean, layout.cp, layout.tp)


def _share(size: int) -> float:
    return (size - 1) / size


def tensor_parallel(config: Config) -> float:
    """The mean number of all-gathers and reduce-scatters of hidden states in a dense layer, with sequence parallelism.

    Forward has four, before and after attention and the MLP.  Backward has six: two gather the input of a Linear again
    for the gradient of its weight.  Recomputation repeats those of the MLP and of linear attention (selective) or all,
    but not the sum over ranks with which the recomputed part ends, if no norm follows it.
    """
    groups = layer_groups(config.model)
    share = sum(len(group.numbers) for group in groups if group.mixer.is_recomputed) / config.model.num_layers
    mlp = 1 if config.model.norm_placement == "pre" else 2
    return 10 + {"none": 0.0, "selective": mlp + share}.get(config.train.recompute, 2.0 + mlp)


def experts(config: Config, tokens: float) -> float:
    """The bytes of a layer's all-to-alls: hidden states with fp32 router weights to the experts, and outputs back.

    Backward sends the gradients of both.
    """
    model, repeated = config.model, 1 if config.train.repeats_layers else 0
    sent = tokens * (model.moe.top_k or 0)
    return (2 + repeated) * sent * (2 * BF16 * model.hidden_size + FP32)


def gradients(config: Config, layout: Layout) -> Iterator[Traffic]:
    """The traffic of the distributed optimizer in a step: it reduce-scatters fp32 gradients and gathers weights."""
    weights = stage_parameters(Stage.of(config, layout, config.model.vocab_size or 0, 0, Trained())).all
    copies = layout.cp * layout.dp
    if copies > 1:
        yield Traffic(
            "dp x cp, gradients and weights", (FP32 + BF16) * weights.dense * _share(copies), copies, layout.tp
        )
    copies = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    if weights.experts and copies > 1:
        sent = (FP32 + BF16) * weights.experts * _share(copies)
        yield Traffic("copies of experts, gradients and weights", sent, copies, layout.ep * layout.etp)


def table() -> str:
    with released_models():
        return "\n".join([*_rows(), ""])


def _rows() -> Iterator[str]:
    yield "| recipe | `cp_comm` | group of a rank | ranks | GB that a rank sends in a step | slowest link |"
    yield "|---|---|---|---:|---:|---|"
    for name, gpus in RECIPES.items():
        path = str(ROOT / "recipes" / f"{name}.yaml")
        config = load_recipe(path).config
        for overrides in (RING, []) if config.parallel.cp_a2a else ([],):
            config = load_recipe(path, overrides).config
            way = "portable" if uses_portable(config) else config.parallel.cp_comm
            for traffic in of(config, Layout.resolve(config, gpus)):
                moved = f"{traffic.group} | {traffic.size} | {traffic.num_bytes / 1e9:.1f} | {traffic.link}"
                yield f"| {name} | {way} | {moved} |"


def page(text: str) -> str:
    """The page with a new table between its marks."""
    return page_text.replaced(text, BEGIN, END, f"\n{table()}\n")


if __name__ == "__main__":
    print(table(), end="")
