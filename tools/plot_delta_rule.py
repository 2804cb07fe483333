"""Draws docs/pictures/delta-rule.svg: the rounding error of the gated delta rule over a document of 128K tokens.

    python -m tools.plot_delta_rule

One curve for each precision: fp32; bf16 inputs and outputs with fp32 states, which is what training in bf16 computes;
and the same with states that are rounded to bf16 after each chunk, which no kernel here does.  An error is that of the
outputs between two positions, as a share of their norm, against float64 with the same inputs before any rounding.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from sft.mcore.linear_attention.delta_rule import Fragments, Inputs
from sft.mcore.linear_attention.schedule import CHUNK
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel

PAGE = Path(__file__).resolve().parents[1] / "docs/pictures/delta-rule.svg"
TOKENS, KEY_HEADS, VALUE_HEADS, WIDTH = 131_072, 1, 2, 64
NOISE = 0.1  # correlated keys differ by this share of their norm
# Title, whether keys are correlated, median of log(-g), median of the logit of beta
CASES = (
    ("random keys, decay e^-0.05, beta 0.5", False, -3.0, 0.0),
    ("random keys, slow decay, beta 0.007", False, -12.0, -5.0),
    ("correlated keys, slow decay, beta 0.007", True, -12.0, -5.0),
)
LINES = {
    "fp32": 'stroke="#2e75b6"',
    "bf16, fp32 states": 'stroke="#1f4e79"',
    "bf16 states": 'stroke="#c00000" stroke-dasharray="5 4"',  # dashed, because it begins on the other line
}
BOTTOM, TOP = -7, -1  # powers of ten
PANEL, HEIGHT, LEFT, UPPER = 330, 220, 50, 30

KERNEL = TorchDeltaKernel()


def random_inputs(correlated: bool, log_decay: float, logit: float) -> Inputs:
    """float64.  log_decay: median of log(-g); logit: median of that of beta"""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = randn(TOKENS, KEY_HEADS, WIDTH), randn(TOKENS, KEY_HEADS, WIDTH)
    if correlated:
        k = NOISE * k + randn(1, KEY_HEADS, WIDTH)
    g = -torch.exp(randn(TOKENS, VALUE_HEADS) + log_decay)
    return Inputs(q, k, randn(TOKENS, VALUE_HEADS, WIDTH), g, (randn(TOKENS, VALUE_HEADS) + logit).sigmoid())


def rounded(inputs: Inputs) -> Inputs:
    """As a layer in bf16 passes them: all but the decays are bf16."""
    q, k, v, g, beta = inputs
    return Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), beta.bfloat16())


def with_bf16_states(inputs: Inputs) -> Tensor:
    state = torch.zeros(1, VALUE_HEADS, WIDTH, WIDTH)
    outputs = []
    for chunk in zip(*(x.split(CHUNK) for x in inputs)):
        fragment = KERNEL.schedule(Fragments.of([0, CHUNK], linked=[0]), VALUE_HEADS, inputs.v.device)
        outputs.append(KERNEL.forward(Inputs(*chunk), fragment, state)[0])
        a, b = KERNEL.transitions(Inputs(*chunk), fragment)
        state = (a @ state + b).bfloat16().float()
    return torch.cat(outputs)


def errors(inputs: Inputs) -> dict[str, list[float]]:
    """Of each precision the errors of the tokens 64 to 127, 128 to 255, ..."""
    whole = KERNEL.schedule(Fragments.of([0, TOKENS]), VALUE_HEADS, inputs.v.device)
    exact = KERNEL.forward(inputs, whole, None)[0]
    outputs = {
        "fp32": KERNEL.forward(Inputs(*(x.float() for x in inputs)), whole, None)[0],
        "bf16, fp32 states": KERNEL.forward(rounded(inputs), whole, None)[0],
        "bf16 states": with_bf16_states(rounded(inputs)),
    }
    starts = [CHUNK << i for i in range(int(math.log2(TOKENS // CHUNK)))]
    return {
        name: [float((out - exact)[n : 2 * n].norm() / exact[n : 2 * n].norm()) for n in starts]
        for name, out in outputs.items()
    }


def panel(title: str, curves: dict[str, list[float]], left: int) -> list[str]:
    """SVG elements: axes and one line for each precision."""
    num_points = len(next(iter(curves.values())))
    step, unit = (PANEL - LEFT - 20) / (num_points - 1), HEIGHT / (TOP - BOTTOM)

    def y(error: float) -> float:
        return UPPER + unit * (TOP - math.log10(error))

    parts = [f'<text x="{left}" y="{UPPER - 12}" font-weight="bold">{title}</text>']
    for power in range(BOTTOM, TOP + 1):
        height = y(10.0**power)
        parts.append(f'<path d="M{left} {height:.1f}h{PANEL - LEFT - 20}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">1e{power}</text>')
    for index in range(0, num_points, 2):
        position = CHUNK << index
        label = f"{position // 1024}K" if position >= 1024 else str(position)
        parts.append(
            f'<text x="{left + step * index:.1f}" y="{UPPER + HEIGHT + 16}" text-anchor="middle">{label}</text>'
        )
    for name, values in curves.items():
        points = " ".join(f"{left + step * i:.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" {LINES[name]} stroke-width="1.8"/>')
    return parts


def main() -> None:
    width, height = len(CASES) * (PANEL + 10), UPPER + HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (title, correlated, log_decay, logit) in enumerate(CASES):
        curves = errors(random_inputs(correlated, log_decay, logit))
        print(title, *(f"{name}: {' '.join(f'{x:.1e}' for x in values)}" for name, values in curves.items()), sep="\n")
        parts += panel(title, curves, LEFT + (PANEL + 10) * index)
    for index, (name, line) in enumerate(LINES.items()):
        x, y = LEFT + 150 * index, height - 10
        parts.append(f'<path d="M{x} {y - 4}h20" {line} stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{y}">{name}</text>')
    PAGE.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
