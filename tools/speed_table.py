"""Makes the table of docs/numbers/estimates.md of predicted speeds of recipes; nothing is measured.

`python -m tools.speed_table` prints the table, and `python -m tools.pages` writes it into the page.

All numbers use the assumed constants, even on a machine that has a calibration, and packs of one document.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sft.config import Config
from sft.estimate import gpus
from sft.estimate.attention_kernels import Assumed, Kernels, attention_kernels
from sft.estimate.constants import assumed
from sft.estimate.lengths import Lengths
from sft.estimate.step_time import StepTime, step_time
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe
from tools import page_text
from tools.plan_recipes import released_models

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by tools/speed_table.py -->\n", "<!-- end of speeds -->\n"
LARGEST = 3  # parts of a step that a row names


class Planned(NamedTuple):
    """A recipe, with settings that replace its own.

    note  words for the settings
    """

    recipe: str
    num_gpus: int
    note: str = ""
    settings: tuple[str, ...] = ()


def _portable(kernel: str) -> tuple[str, ...]:
    return "attention.backend=portable", f"attention.kernels=[{kernel}]"


_DEEPEP = ("parallel.ep_comm=deepep",)
ROWS = (
    Planned("qwen3_8b_128k", 16),
    Planned("qwen3_8b_128k", 16, "FP8", ("run.fp8=blockwise",)),
    Planned("qwen3_8b_128k", 16, "FlashAttention-3", _portable("fa3")),
    Planned("qwen3_8b_128k", 16, "FlashAttention-4", _portable("fa4")),
    Planned("gpt_oss_20b_128k", 16),
    Planned("qwen36_27b_128k", 16),
    Planned("qwen36_35b_a3b_128k", 16),
    Planned("qwen36_35b_a3b_128k", 16, "DeepEP", _DEEPEP),
    Planned("gemma4_26b_a4b_128k", 16),
    Planned("glm45_air_64k", 64),
    Planned("glm45_air_64k", 64, "DeepEP", _DEEPEP),
)


def at_best(kernels: Kernels) -> Kernels:
    """The kernels at the highest rates that are likely."""
    best = {}
    for kind, (kernel, rate) in kernels.items():
        if rate is not None and rate.highest is not None:
            rate = rate._replace(forward=rate.highest[0], backward=rate.highest[1])
        best[kind] = Assumed(kernel, rate)
    return best


def predicted(config: Config, layout: Layout, name: str, *, is_best: bool = False) -> StepTime:
    """The step on GPUs of this name, with the lowest rates that are likely, or with the highest."""
    kernels = attention_kernels(config, name)
    return step_time(
        config,
        layout,
        config.model.vocab_size or 0,
        Lengths.all_of(config.data.seq_length),
        assumed(gpus.gpu(name), gpus.fabric("ib400")),
        kernels=at_best(kernels) if is_best else kernels,
    )


def _mfu(config: Config, layout: Layout, name: str) -> str:
    """The predicted MFU in percent, or the range between the likely rates: `44.4`, `33.0 to 35.9`"""
    low, high = (f"{100 * predicted(config, layout, name, is_best=best).mfu:.1f}" for best in (False, True))
    return low if low == high else f"{low} to {high}"


def _parts(time: StepTime) -> str:
    """The largest parts of a step's time, such as `attention 70%, linear 18%, recompute 5%`."""
    largest = sorted(time.parts.items(), key=lambda part: -part[1])[:LARGEST]
    return ", ".join(f"{name} {seconds / time.step_s:.0%}" for name, seconds in largest)


def table() -> str:
    with released_models():
        return "\n".join([*_rows(), ""])


def _rows() -> Iterator[str]:
    yield "| recipe | MFU, H100 | step, s | largest parts | MFU, B200 |"
    yield "|---|---:|---:|---|---:|"
    for row in ROWS:
        config = load_recipe(str(ROOT / "recipes" / f"{row.recipe}.yaml"), list(row.settings)).config
        layout = Layout.resolve(config, row.num_gpus)
        time = predicted(config, layout, "h100")
        name = ", ".join(filter(None, (row.recipe, row.note)))
        b200 = "" if config.attention.kernels else _mfu(config, layout, "b200")
        yield f"| {name} | {_mfu(config, layout, 'h100')} | {time.step_s:.1f} | {_parts(time)} | {b200} |"


def page(text: str) -> str:
    """The page with a new table between its marks."""
    return page_text.replaced(text, BEGIN, END, f"\n{table()}\n")


if __name__ == "__main__":
    print(table(), end="")
