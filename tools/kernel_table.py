"""Makes the tables of docs/reference/kernels.md: which kernel computes each kind of layer on each GPU, and why.

The code that chooses kernels makes the decisions, as if all packages were installed.  `python -m tools.pages` writes
the page.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sft.config import Config
from sft.layers import kernel_rates
from sft.layers.kernel_rates import TRANSFORMER_ENGINE
from sft.layers.kinds import all_layer_groups
from sft.mcore.attention.flash_kernel import Demand
from sft.mcore.backends import kernels
from sft.recipe.load import parse_recipe
from tools import page_text

BEGIN, END = "<!-- made by tools/kernel_table.py -->\n", "<!-- end of kernels -->\n"
GPUS = {
    "Hopper (H100, H200)": (9, 0),
    "Blackwell (B200, GB200)": (10, 0),
    "Ampere (A100)": (8, 0),
}
# (layers, a model that has them) -> keys of `model` for one such layer.
KINDS = {
    ("heads of 64", "Llama-3.2-1B"): "head_dim: 64",
    ("heads of 128", "Qwen3-8B"): "head_dim: 128",
    ("window, heads of 64, sinks", "gpt-oss-20b"): "head_dim: 64, sliding_window: 128, attention_sinks: true",
    ("heads of 64, sinks", "gpt-oss-20b"): "head_dim: 64, attention_sinks: true",
    ("window, heads of 128", "Gemma 3 27B"): "head_dim: 128, sliding_window: 1024",
    ("window, heads of 128, soft cap", "Gemma 2 27B"): "head_dim: 128, sliding_window: 4096, attention_softcap: 50.0",
    ("window, heads of 256", "Gemma 4 26B"): "head_dim: 256, sliding_window: 1024",
    ("window, heads of 256, soft cap", "Gemma 2 9B"): "head_dim: 256, sliding_window: 4096, attention_softcap: 50.0",
    ("heads of 256, gated", "Qwen3.6-27B"): "head_dim: 256, attention_output_gate: true",
    ("heads of 512", "Gemma 4 26B"): "head_dim: 512, value_norm: true",
    ("keys of 192, values of 128", "MiMo-V2-Flash"): "head_dim: 192, value_head_dim: 128",
    ("window, keys of 192, values of 128, sinks", "MiMo-V2-Flash"): (
        "head_dim: 192, value_head_dim: 128, sliding_window: 129, attention_sinks: true"
    ),
    ("latent, keys of 192, values of 128", "Moonlight-16B"): "latent_attention: {kv_lora_rank: 512}",
}


class Chosen(NamedTuple):
    """The kernel of a kind of layer on a GPU.

    rate      its rates in TFLOP/s; None: unknown
    refusals  name of another kernel -> why it does not run, for kernels that `_is_of_interest` selects
    """

    kernel: str
    rate: kernel_rates.Rate | None
    refusals: dict[str, str]

    @property
    def source(self) -> str:
        return self.rate.source if self.rate else "not known"

    @property
    def explanation(self) -> str:
        """The source of the rates, and why no other kernel runs."""
        names: dict[str, list[str]] = {}
        for name, reason in self.refusals.items():
            names.setdefault(reason, []).append(name)
        reasons = (f" Not {' or '.join(kernels)}: {reason}." for reason, kernels in names.items())
        return f"{self.kernel}, {self.source}.{''.join(reasons)}"


def config(sizes: str) -> Config:
    text = f"""
run: {{dir: unused, device: cuda}}
model: {{num_layers: 1, init_from: random, hidden_size: 2048, ffn_hidden_size: 2048, num_attention_heads: 16,
         {'' if 'latent' in sizes else 'num_query_groups: 2,'} {sizes}}}
data: {{train: unused, seq_length: 65536}}
train: {{num_steps: 1, global_batch_size: 1}}
optim: {{lr: 1.0e-5}}
"""
    return parse_recipe(text, "kernel_table", []).config


def row(sizes: str, capability: tuple[int, int]) -> Chosen:
    recipe = config(sizes)
    (group,) = all_layer_groups(recipe.model)
    demand = kernels.demand_of(recipe, group.mixer, "cuda")._replace(capability=capability)
    why_not = {name: kernels.FLASH[name].refused(demand) for name in kernels.by_rate(demand)}
    special = recipe.model.portable_only
    why_not[TRANSFORMER_ENGINE] = f"it does not have {special}" if special else recipe.auto_is_portable
    able = [name for name, reason in why_not.items() if reason is None] or [kernels.PLAIN]
    chosen = TRANSFORMER_ENGINE if why_not[TRANSFORMER_ENGINE] is None else able[0]
    refusals = {
        name: reason
        for name, reason in why_not.items()
        if reason and name != chosen and _is_of_interest(name, chosen, demand)
    }
    return Chosen(chosen, demand.rate(chosen), refusals)


def _is_of_interest(name: str, chosen: str, demand: Demand) -> bool:
    """Whether a user would ask why the kernel `name` does not run instead of `chosen`.

    This is so if it is faster, or if it runs on this GPU, but not for these layers.
    """
    own, other = demand.rate(chosen), demand.rate(name)
    if own is not None and other is not None:
        return other.together > own.together
    if name == kernel_rates.FFPA:
        return demand.key_width >= 512
    plain = demand._replace(key_width=128, value_width=128, has_window=False, softcap=None)
    return name != TRANSFORMER_ENGINE and chosen != TRANSFORMER_ENGINE and plain.rate(name) is not None


def tables() -> Iterator[str]:
    for gpu, capability in GPUS.items():
        rows = {kind: row(sizes, capability) for kind, sizes in KINDS.items()}
        yield from (f"## {gpu}", "", "| layers | for example | kernel | TFLOP/s | rates |", "|---|---|---|---|---|")
        for (layers, model), own in rows.items():
            numbers = own.rate.text().partition(" TFLOP/s, ")[0] if own.rate else ""
            words = ", ".join(x.strip(":") for x in ("measured", "published:", "assumed") if x in own.source)
            yield f"| {layers} | {model} | {own.kernel} | {numbers} | {words} |"
        yield ""
        alike: dict[str, list[str]] = {}
        for (layers, _), own in rows.items():
            alike.setdefault(own.explanation, []).append(layers)
        for explanation, kinds in alike.items():
            yield from page_text.folded(f"- {'; '.join(kinds)}: {explanation}")
        yield ""


def page(before: str) -> str:
    return page_text.replaced(before, BEGIN, END, "\n".join(["", *tables()]))
