"""Rates, bandwidths and overheads, each with its source.  `step_time.py` computes seconds from them.

`assumed` gives the constants of a GPU that was not measured.  `sft plan --calibrate` measures them and writes a file.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from sft.errors import ConfigError, first_few
from sft.estimate.gpus import Gpu
from sft.files.atomic_files import replace_text
from sft.files.folder_files import CONFIG_BYTES, read_file
from sft.layers.kernel_rates import BLACKWELL, FLASH2, HOPPER, KERNELS, PEAKS, PLAIN, TRANSFORMER_ENGINE, rate

VERSION = 2
# Shares of the peak.  Large products reach 650 of 989 TFLOP/s in layers of an H200 (docs/numbers/performance.md).  A
# product with one short side reads more bytes for each FLOP.
GEMM_SHARES = ((16, 0.08), (64, 0.25), (128, 0.38), (256, 0.48), (512, 0.56), (1024, 0.62), (4096, 0.66))
# Rate of matrix products of layers in FP8 / their rate in bf16.  Assumed: the peak is twice as high, and casts to FP8
# take a part of the gain.
FP8_PRODUCTS = 1.6
# Shares of a kernel's rate with long documents (sft/layers/kernel_rates.py), by the tokens of a document on a rank.  A
# window of 128 counts as a document of 256.  With 0.65 at 2K tokens and 0.10 at 256, and with the passes around the
# kernel, predicted rates of attention differ by at most 12% from those of docs/numbers/h100.md
# (tests/unit/estimate/test_step_time.py).  Kernels alone reached 0.67 to 0.79 at 2K and 0.15 to 0.24 at 256 on an H200.
# The other points are assumed.
ATTENTION_SHARES = ((128, 0.06), (256, 0.10), (512, 0.30), (2048, 0.65), (8192, 0.93), (32768, 1.0))
# TFLOP/s of FLA's forward pass with heads of 128 and 32K tokens, by value heads x sequences: FLA 0.5.1 on an H200 and a
# GB200 (QwenLM/FlashQLA, benchmark_results_H200.txt and benchmark_results_GB200.txt).
DELTA_RULE: Mapping[str, tuple[tuple[float, float], ...]] = {
    HOPPER: ((8, 28.6), (16, 41.5), (24, 49.7), (32, 54.7), (48, 57.0), (64, 61.9)),
    BLACKWELL: ((8, 25.4), (16, 41.1), (24, 50.7), (32, 59.0), (48, 61.3), (64, 70.0)),
}
# Products of the delta rule in plain torch are in fp32, without TF32, with sides of 64 to 128 elements.  FP32_PEAK is
# the peak in fp32 / the peak in bf16 (67 / 989, H100 data sheet).  Assumed: these products reach the same share of the
# fp32 peak as bf16 products with a side of 64 reach of the bf16 peak.
FP32_PEAK, PLAIN_SIDE = 0.068, 64
REFERENCE_WIDTH = 128  # width of the heads for which constants have the rate of attention
HOST_ADAM_GB_S = 60.0  # assumed, for one of 8 GPUs that share two sockets; Adam moves 28 bytes per parameter


class Constant(NamedTuple):
    """One measured or assumed constant.

    source: "measured 2026-11-23 on NVIDIA H100", or "assumed: " and the reason
    """

    value: float
    source: str

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")


class Curve(NamedTuple):
    """A rate as a function of a size.  It is linear in log(size) between the points, and constant outside of them.

    points ((128, 100), (512, 300)): 100 at size 64, 200 at 256, 300 at 1024
    """

    points: tuple[tuple[float, float], ...]
    source: str

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")

    def at(self, size: float) -> float:
        sizes = self.points
        if size <= sizes[0][0]:
            return sizes[0][1]
        for (low, before), (high, after) in zip(sizes, sizes[1:]):
            if size <= high:
                return before + (after - before) * math.log(size / low) / math.log(high / low)
        return sizes[-1][1]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of one type of GPU.

    peak_tflops         bf16 peak, for MFU
    gemm_tflops         TFLOP/s of matrix products, by the smallest of m, n and k
    grouped_gemm        share of `gemm_tflops` that the products of experts reach
    attention_kernel    the kernel of `attention_forward` and `attention_backward` (sft/layers/kernel_rates.py)
    attention_forward, attention_backward  TFLOP/s of this kernel with heads of 128, by tokens of a document on a rank.
                        The FLOPs are causal; backward has 2.5 times those of forward
    linear_attention    TFLOP/s of the delta rule, for the FLOPs that sft/layers/flops.py counts, by the number of
                        sequences that a rank computes at once: value heads x fragments of documents
    elementwise_gb_s    GB/s that norms, activations and residual sums read and write
    optimizer_gb_s      GB/s of Adam on the device; host_optimizer_gb_s: on the host, for one rank
    pcie_gb_s           GB/s of copies between device and host, in one direction
    intra_gb_s, inter_gb_s  GB/s that a rank receives from ranks of its node, and from other nodes, in an all-gather
    reduce_scatter, send  bandwidth of a reduce-scatter, and of a message from one rank to another, as shares of
                        intra_gb_s and inter_gb_s
    latency_us          time of a collective or a message without bytes
    layer_overhead_us   time of a layer in a microbatch outside its kernels, forward and backward
    exposed             share of the time of messages that computation could hide but does not hide.  Assumed: 0 on
                        CUDA, where messages have their own streams, and 1 with gloo
    """

    gpu: str
    peak_tflops: float
    attention_kernel: str
    gemm_tflops: Curve
    grouped_gemm: Constant
    attention_forward: Curve
    attention_backward: Curve
    linear_attention: Curve
    elementwise_gb_s: Constant
    optimizer_gb_s: Constant
    host_optimizer_gb_s: Constant
    pcie_gb_s: Constant
    intra_gb_s: Constant
    inter_gb_s: Constant
    reduce_scatter: Constant
    send: Constant
    latency_us: Constant
    layer_overhead_us: Constant
    exposed: Constant

    def items(self) -> Iterator[tuple[str, Constant | Curve]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Constant | Curve):
                yield field.name, value

    @property
    def plain_tflops(self) -> float:
        """Assumed TFLOP/s of the fp32 products of the delta rule in plain torch.  H100: 0.25 x 989 x 0.068 = 17"""
        return self.gemm_tflops.at(PLAIN_SIDE) * (1.0 if self.gpu == "cpu" else FP32_PEAK)

    def with_peak(self, tflops: float) -> "Constants":
        """The constants for another peak.  The rates of matrix products and attention change in proportion to it."""
        scale = tflops / self.peak_tflops
        changes: dict[str, Any] = {"peak_tflops": tflops}
        for name, value in self.items():
            if isinstance(value, Curve):
                changes[name] = value._replace(points=tuple((size, rate * scale) for size, rate in value.points))
        return replace(self, **changes)

    def describe(self) -> str:
        """`constants of h100: measured gemm_tflops; assumed attention_forward, ...`"""
        groups: dict[str, list[str]] = {"measured": [], "assumed": []}
        for name, value in self.items():
            groups["measured" if value.is_measured else "assumed"].append(name)
        if not groups["measured"]:
            return f"all constants of {self.gpu} are assumed; `sft plan --calibrate` measures them"
        known = "; ".join(f"{word} {', '.join(names)}" for word, names in groups.items() if names)
        return f"constants of {self.gpu}: {known}"


def assumed(gpu: Gpu, fabric_gb_s: float) -> Constants:
    """The constants of a GPU that was not measured.  fabric_gb_s: GB/s that the GPU receives from other nodes"""

    def curve(shares: tuple[tuple[float, float], ...], why: str, tflops: float = gpu.tflops) -> Curve:
        return Curve(tuple((size, share * tflops) for size, share in shares), f"assumed: {why}")

    def constant(value: float, why: str) -> Constant:
        return Constant(value, f"assumed: {why}")

    is_cpu = gpu.name == "cpu"
    kernel, forward, backward = attention_rates(gpu)
    return Constants(
        gpu=gpu.name,
        peak_tflops=gpu.tflops,
        attention_kernel=kernel,
        gemm_tflops=curve(GEMM_SHARES, "0.66 of the peak for large products"),
        grouped_gemm=constant(0.7, "grouped GEMM of experts with uneven loads"),
        attention_forward=curve(ATTENTION_SHARES, "docs/numbers/h200.md and published rates", forward),
        attention_backward=curve(ATTENTION_SHARES, "docs/numbers/h200.md and published rates", backward),
        linear_attention=_delta_rule(gpu),
        elementwise_gb_s=constant(0.75 * gpu.hbm_gb_s, "3/4 of the memory's bandwidth"),
        optimizer_gb_s=constant(0.75 * gpu.hbm_gb_s, "3/4 of the memory's bandwidth"),
        host_optimizer_gb_s=constant(HOST_ADAM_GB_S, "two sockets for 8 GPUs"),
        pcie_gb_s=constant(gpu.pcie_gb_s, "copies of page-locked memory"),
        intra_gb_s=constant(gpu.intra_node_gb_s, "3/4 of the link's one direction"),
        inter_gb_s=constant(fabric_gb_s, "the network that was named"),
        reduce_scatter=constant(0.5 if is_cpu else 1.0, "gloo sums by an all-reduce" if is_cpu else "as an all-gather"),
        send=constant(1.0, "as an all-gather"),
        latency_us=constant(20.0, "a collective of small messages"),
        layer_overhead_us=constant(100.0, "gaps between kernels"),
        exposed=constant(float(is_cpu), "gloo takes the core" if is_cpu else "messages overlap with kernels on CUDA"),
    )


def _delta_rule(gpu: Gpu) -> Curve:
    """Rates of FLA's forward pass.  A GPU without published rates gets a share of its peak."""
    if gpu.architecture is not None and gpu.architecture in DELTA_RULE:
        scale = gpu.tflops / PEAKS[gpu.architecture]
        points = tuple((size, scale * tflops) for size, tflops in DELTA_RULE[gpu.architecture])
        return Curve(points, "assumed: FLA 0.5.1 on H200 and GB200 (QwenLM/FlashQLA, benchmark)")
    return Curve(((1.0, 0.06 * gpu.tflops),), "assumed: chunked kernels of the delta rule")


def attention_rates(gpu: Gpu) -> tuple[str, float, float]:
    """The kernel whose rates are assumed for this GPU, and TFLOP/s forward and backward with long documents."""
    if gpu.architecture is not None:
        kernel, known = TRANSFORMER_ENGINE, rate(TRANSFORMER_ENGINE, gpu.architecture, *2 * (REFERENCE_WIDTH,))
        scale = gpu.tflops / PEAKS[gpu.architecture]
    else:  # an unknown GPU or a CPU is assumed to reach the same share of its peak as FlashAttention-2 on an H100
        kernel = PLAIN if gpu.name == "cpu" else FLASH2
        known, scale = rate(FLASH2, HOPPER, *2 * (REFERENCE_WIDTH,)), gpu.tflops / PEAKS[HOPPER]
    assert known is not None
    return kernel, known.forward * scale, known.backward * scale


def path_of(gpu: str) -> Path:
    """The file of a type of GPU: $SFT_CACHE/calibration/h100.json; SFT_CACHE is ~/.cache/sft if it is not set."""
    return Path(os.environ.get("SFT_CACHE") or Path.home() / ".cache" / "sft") / "calibration" / f"{gpu}.json"


def constants_of(gpu: Gpu, fabric_gb_s: float) -> Constants:
    """The measured constants of this type of GPU; the assumed ones if it was not measured."""
    path = path_of(gpu.name)
    return read(path) if path.exists() else assumed(gpu, fabric_gb_s)


def write(constants: Constants, path: Path) -> None:
    """Writes the constants as JSON.  `path_of` names the file of a type of GPU."""
    values = {name: value._asdict() for name, value in constants.items()}
    names = ("gpu", "peak_tflops", "attention_kernel")
    head = {"version": VERSION, **{name: getattr(constants, name) for name in names}}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({**head, **values}, indent=1) + "\n")


def read(path: Path) -> Constants:
    """The constants in a file that `write` made.  Raises ConfigError if the file is missing or not valid."""
    try:
        return _parsed(json.loads(read_file(path, CONFIG_BYTES)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no file of constants of this version: {error}.  Make it again: sft plan --calibrate."
        ) from error


def _parsed(values: dict[str, Any]) -> Constants:
    if values.pop("version") != VERSION:
        raise ValueError(f"its version is not {VERSION}")
    arguments: dict[str, Any] = {"gpu": str(values.pop("gpu")), "peak_tflops": float(values.pop("peak_tflops"))}
    arguments["attention_kernel"] = str(values.pop("attention_kernel"))
    if arguments["attention_kernel"] not in KERNELS:
        raise ValueError(f"unknown attention_kernel {arguments['attention_kernel']}")
    for field in fields(Constants):
        if field.name in arguments:
            continue
        value, source = values[field.name], str(values[field.name]["source"])
        if field.type is Curve:
            points = tuple((float(size), float(rate)) for size, rate in value["points"])
            sizes = [size for size, _ in points]
            if not points or sizes != sorted(set(sizes)) or min(min(point) for point in points) <= 0:
                raise ValueError(f"{field.name} needs positive points in increasing order")
            arguments[field.name] = Curve(points, source)
        else:
            number = float(value["value"])
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{field.name} = {number}")
            arguments[field.name] = Constant(number, source)
        del values[field.name]
    if values:
        raise ValueError(f"unknown {', '.join(first_few(values))}")
    return Constants(**arguments)
