"""Makes the tables of docs/numbers/performance.md that sft/estimate/memory.py predicts; nothing is measured.

`python -m tools.memory_table` prints the tables, and `python -m tools.pages` writes them into the page.
"""

from collections.abc import Iterator

from sft.config import Config
from sft.estimate import memory
from sft.estimate.saved_by_layer import LayerBytes
from sft.layers.mixers.softmax_bytes import PortableBytes
from sft.parallel.layout import Layout
from tools import page_text
from tools.bench.mixes import short
from tools.bench.steps.case import StepCase

BEGIN, END = "<!-- made by tools/memory_table.py -->\n", "<!-- end of it -->\n"
LENGTHS = (65_536, 131_072, 1_048_576)
CARDS = (80e9, 141e9)  # bytes of the cards; vendors count in 10^9 bytes, the tables print GiB
GIB = 2.0**30
WAYS = ("selective", "full", "selective+offload", "full+offload+tile4k")
MODELS = {"Qwen3-1.7B": "1.7b", "Qwen3-4B": "4b", "Qwen3-8B": "8b"}  # name -> shape of StepCase
VOCABULARY = 151_936
GPUS = 8


def resolved(model: str, way: str, cp: int) -> tuple[Config, Layout, int]:
    config = StepCase.read(f"{MODELS[model]}:64k:one:{way}").config("cuda", also=[f"parallel.cp={cp}"])
    return config, Layout.resolve(config, cp), VOCABULARY


def tables() -> str:
    """All tables in Markdown."""
    return "\n".join([*_tokens(), "", *_lengths(1), "", *_lengths(GPUS), ""])


def _tokens() -> Iterator[str]:
    yield "| model | weights, gradients, optimizer: 1 GPU | 8 GPUs, cp 8 | token and layer: none | selective | full |"
    yield "|---|---|---|---|---|---|"
    for model in MODELS:
        alone, node = (memory.estimate(*resolved(model, "full", cp)).static for cp in (1, GPUS))
        kept = (
            LayerBytes.of(PortableBytes(model=resolved(model, "full", 1)[0].model), way).total
            for way in ("none", "selective", "full")
        )
        yield f"| {model} | {_gib(alone)} GiB | {_gib(node)} GiB | {' | '.join(f'{x / 1024:.1f} KiB' for x in kept)} |"


def _lengths(cp: int) -> Iterator[str]:
    lengths = " | ".join(short(length) if length < 1_000_000 else "1M" for length in LENGTHS)
    where = "one GPU" if cp == 1 else f"each of {cp} GPUs, cp {cp}"
    cards = " | ".join(f"longest, {card / 1e9:.0f}-GB card" for card in CARDS)
    yield f"| {where}: GiB + GiB of host memory | {lengths} | {cards} |"
    yield "|---|" + "---|" * (len(LENGTHS) + len(CARDS))
    for model in MODELS:
        for way in WAYS:
            needed = [_both(memory.estimate(*resolved(model, way, cp), length)) for length in LENGTHS]
            longest = [_tokens_of(memory.longest_context(*resolved(model, way, cp), card)) for card in CARDS]
            yield f"| {model}, {way} | {' | '.join(needed)} | {' | '.join(longest)} |"


def _both(needed: memory.Memory) -> str:
    return _gib(needed.device) + (f" + {_gib(needed.host)}" if needed.host else "")


def _gib(amount: float) -> str:
    return f"{amount / GIB:.0f}" if amount >= 10 * GIB else f"{amount / GIB:.1f}"


def _tokens_of(tokens: int) -> str:
    return f"{tokens // 1024:,}K" if tokens else "none"


def page(text: str) -> str:
    """The page with new tables between its marks."""
    return page_text.replaced(text, BEGIN, END, f"\n{tables()}\n")


if __name__ == "__main__":
    print(tables(), end="")
