"""Measures TFLOP/s of forward and of backward of every installed attention kernel, for each kind of layer.

    python -m tools.bench kernels                                  the table of docs/numbers/h200.md
    python -m tools.bench kernels --cases 256:one,256:2k --ways flashattention-4

A case is LAYER:DOCUMENTS.  LAYERS has the layers; documents are `one`, or all of one length, such as `2k`.  The kernels
are those of the portable backend, with the trainer's code for packed documents and for sinks; `cuDNN` is torch's
scaled_dot_product_attention with that kernel, one call for each document.  `plain torch` runs only on short packs.

Times are medians of --repeats repetitions.  FLOPs are causal, and those of keys outside of a window do not count;
backward counts 2.5 times forward.  `error` is the largest error of the output and of the gradients, relative to the
norm, against float64, on five documents of different lengths.  A kernel that cannot run here has a row that says why.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sft.mcore.attention.flash_kernel import Demand, FlashKernel
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backends.kernels import FLASH, PLAIN
from tools.bench import attention_ways
from tools.bench.attention_ways import BACKWARD
from tools.bench.clock import time_on
from tools.bench.harness import DONE, Bar, Column, Option, Row, Subject
from tools.bench.mixes import read_length

CUDNN = "cuDNN"
PLAIN_UP_TO = 16_384  # tokens; plain torch would take minutes for longer packs
CHECKED = (37, 300, 64, 511, 112)  # lengths of the documents of the comparison
CHECKED_WINDOW = 100  # longest window of the comparison, so that it hides keys
MAX_ERROR = 1e-2  # bar.  bf16 has 8 bits of mantissa: one rounding is 4e-3 at most, and 2.5e-3 was measured


@dataclass(frozen=True)
class Layer:
    """The attention of a kind of layers.  share: tokens of a pack / --tokens"""

    heads: int
    groups: int
    width: int
    value_width: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    share: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the layer is without window, sinks and soft cap."""
        return self.window is None and self.softcap is None and not self.has_sinks

    @property
    def scale(self) -> float:
        return float(self.width**-0.5)

    def demand(self, device_type: str) -> Demand:
        return Demand(
            device_type, torch.bfloat16, self.width, self.value_width, heads_per_key=self.heads // self.groups,
            has_window=self.window is not None, softcap=self.softcap,
        )  # fmt: skip

    def flops(self, boundaries: np.ndarray) -> float:
        """FLOPs of a forward pass.

        documents of 2 and 4 tokens, 3 heads of 8 with values of 8: 2 * 3 * 16 * (2 + 8) = 960, and with a window of 2
        tokens 2 * 3 * 16 * (2 + 6) = 768
        """
        lengths = np.diff(boundaries).astype(np.float64)
        pairs = lengths**2 / 2
        if self.window is not None:
            pairs -= np.maximum(lengths - self.window, 0) ** 2 / 2
        return 2.0 * self.heads * (self.width + self.value_width) * float(pairs.sum())


LAYERS = {
    "128": Layer(32, 8, 128, 128),
    "64": Layer(64, 8, 64, 64),
    "64-window128-sinks": Layer(64, 8, 64, 64, window=128, has_sinks=True),
    "256": Layer(16, 2, 256, 256),
    "256-window1k": Layer(16, 8, 256, 256, window=1024),
    "192-128": Layer(32, 32, 192, 128),
    "128-window4k-cap50": Layer(32, 16, 128, 128, window=4096, softcap=50.0),
    "512": Layer(8, 2, 512, 512, share=0.5),
}
NAMES = (*FLASH, CUDNN, PLAIN)
Inputs = Sequence[Tensor]  # query, key, value and, if the layer has them, sinks
Attend = Callable[[Inputs], Tensor]


def read_case(text: str) -> tuple[str, int | None]:
    """Reads a case: `64:2k` -> ("64", 2048), `64:one` -> ("64", None).  Raises ValueError."""
    name, _, documents = text.lower().partition(":")
    if name not in LAYERS or not documents:
        raise ValueError(f"{text} is not LAYER:DOCUMENTS with one of {', '.join(LAYERS)}, and one or a length")
    return name, None if documents == "one" else read_length(documents)


def why_not(name: str, layer: Layer, tokens: int, device: torch.device) -> str | None:
    """The reason why a kernel is not measured; None if it is."""
    if name == PLAIN:
        return None if tokens <= PLAIN_UP_TO else f"packs of more than {PLAIN_UP_TO:,} tokens would take minutes"
    if name in FLASH:
        return FLASH[name].why_not(layer.demand(device.type))
    if device.type != "cuda":
        return "it needs CUDA"
    return None if layer.is_plain else "torch's function has no windows, sinks and soft caps for it"


def random_inputs(layer: Layer, tokens: int, device: torch.device) -> tuple[Inputs, Tensor]:
    """Inputs that require gradients, and a gradient of the output, in bf16."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    heads = [(layer.heads, layer.width), (layer.groups, layer.width), (layer.groups, layer.value_width)]
    inputs = [randn(tokens, *shape) for shape in heads] + ([randn(layer.heads)] if layer.has_sinks else [])
    return [x.requires_grad_() for x in inputs], randn(tokens, layer.heads, layer.value_width)


def attend_by(name: str, layer: Layer, boundaries: np.ndarray, device: torch.device) -> Attend:
    if name == CUDNN:
        return partial(_by_cudnn, boundaries.tolist(), layer.scale)
    options: dict[str, Any] = {"window": layer.window, "softcap": layer.softcap}
    kernel: Any
    if name == PLAIN:
        kernel = TorchKernel.of(boundaries, 1, 0, device, **options)
    else:
        kernel = FlashKernel.of(boundaries, 1, 0, device, operators=FLASH[name], **options)
    return partial(_by_trainer, kernel, layer.scale)


def _by_trainer(kernel: Any, scale: float, inputs: Inputs) -> Tensor:
    query, key, value, *sinks = inputs
    return packed_attention(query, key, value, kernel, scale, None, sinks=sinks[0] if sinks else None)


def _by_cudnn(ends: Sequence[int], scale: float, inputs: Inputs) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        parts = (tuple(x[a:b] for x in inputs) for a, b in zip(ends, ends[1:]))
        return torch.cat([attention_ways.sdpa(query, key, value, scale) for query, key, value in parts])


def in_float64(layer: Layer, boundaries: np.ndarray, inputs: Inputs, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the inputs, with a table of all scores of a document."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    query, key, value, *sinks = leaves
    key, value = (x.repeat_interleave(layer.heads // layer.groups, dim=1) for x in (key, value))
    outs = []
    for start, stop in zip(boundaries.tolist(), boundaries.tolist()[1:]):
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], key[start:stop]) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        positions = torch.arange(stop - start, device=grad.device)
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= (layer.window or stop - start))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks:
            column = sinks[0][:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : stop - start]
        outs.append(torch.einsum("hqk,khd->qhd", weights, value[start:stop]))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def error_of(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance of a tensor from the expected one / the expected norm; NaN if one is NaN."""
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(tensors, expected, strict=True)]
    return float(torch.stack(errors).max())


def results(attend: Attend, inputs: Inputs, grad: Tensor) -> list[Tensor]:
    out = attend(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def seconds(attend: Attend, inputs: Inputs, grad: Tensor, repeats: int) -> tuple[float, float]:
    """Median seconds of forward and of backward.  The first repetition is a warm-up and does not count."""
    clock, forward, backward = time_on(grad.device), list[float](), list[float]()
    for _ in range(1 + repeats):
        outs: list[Tensor] = []
        forward.append(clock(lambda: outs.append(attend(inputs))))
        backward.append(clock(lambda: torch.autograd.grad(outs[0], inputs, grad)))
    return float(np.median(forward[1:])), float(np.median(backward[1:]))


def measure(case: tuple[str, int | None], options: argparse.Namespace) -> Iterator[Row]:
    name, length = case
    layer, device = LAYERS[name], options.device
    tokens = int(options.tokens * layer.share)
    boundaries = np.array([*range(0, tokens, length or tokens), tokens], dtype=np.int32)
    checked = np.cumsum([0, *CHECKED]).astype(np.int32)
    short = layer if layer.window is None else replace(layer, window=min(layer.window, CHECKED_WINDOW))
    small, small_grad = random_inputs(short, int(checked[-1]), device)
    expected = in_float64(short, checked, small, small_grad)
    inputs, grad = random_inputs(layer, tokens, device)
    flops = layer.flops(boundaries)
    for way in options.ways:
        facts: Row = {"way": way, "tokens": tokens, "documents": len(boundaries) - 1, "device": device.type}
        if reason := why_not(way, layer, tokens, device):
            yield {**facts, "status": f"not measured: {reason}"}
            continue
        try:
            error = error_of(results(attend_by(way, short, checked, device), small, small_grad), expected)
            forward, backward = seconds(attend_by(way, layer, boundaries, device), inputs, grad, options.repeats)
        except attention_ways.REFUSALS as refusal:
            is_ours = way == PLAIN or isinstance(refusal, torch.OutOfMemoryError)
            verdict = "failed" if is_ours or way != CUDNN else "not measured"
            yield {**facts, "status": f"{verdict}: {attention_ways.reason(refusal)}", "error_text": str(refusal)}
            continue
        yield {
            **facts, "error": error, "fwd_s": forward, "bwd_s": backward, "fwd_tflops": flops / forward / 1e12,
            "bwd_tflops": BACKWARD * flops / backward / 1e12,
        }  # fmt: skip


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """A bar for every measured kernel, and one without a value for every kernel whose package is not installed."""
    for row in rows:
        status, title = row.get("status", DONE), f"{row['case']} by {row.get('way')}, error"
        if status == DONE:
            yield Bar(name=title, value=row["error"], bound=MAX_ERROR)
        elif "not installed" in status:
            yield Bar(name=f"{title}: {status}", value=None, bound=MAX_ERROR)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("documents", "documents", ","),
        Column("fwd_s", "fwd ms", ".2f", 1e-3),
        Column("bwd_s", "bwd ms", ".2f", 1e-3),
        Column("fwd_tflops", "fwd TFLOP/s", ".0f"),
        Column("bwd_tflops", "bwd TFLOP/s", ".0f"),
        Column("error", "error", ".1e"),
    ],
    cases=["128:one", "128:2k", "64:one", "64:2k", *(f"{name}:one" for name in [*LAYERS][2:])],
    tiny_cases=["64-window128-sinks:100", "192-128:one", "128-window4k-cap50:one"],
    ways=NAMES,
    read=read_case,
    options={
        "tokens": Option(65_536, 256, "tokens of a pack"),
        "repeats": Option(5, 1, "timed repetitions"),
    },
    bars=bars,
    device="gpu",
)
