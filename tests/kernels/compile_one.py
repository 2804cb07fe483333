"""Compiles one configuration of a kernel for a GPU that is not there, in a process of its own.

    python -m tests.kernels.compile_one KIND NUMBER ARCHITECTURE [--quick]

KIND is a name of KINDS, and NUMBER counts its configurations (configurations.py).  With --quick, autotuners try one
variant.  The last line of the output is a JSON list of `Compiled`.  Attention runs in torch's fake-tensor mode through
the same `Operators` that a run calls.  Kernels in Triton get small tensors in host memory, and are recorded in place of
a launch.
"""

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sft.layers import kernel_rates
from sft.mcore.attention.flash_kernel import Demand, Operators
from sft.mcore.backends import kernels
from tests.kernels import configurations, cute, triton_driver
from tests.kernels.cubins import Compiled, Usage, usage
from tests.unit.fixtures.recurrence import ALL_ROWS

HEADS = 8  # at least; the number of heads does not change a kernel
TOKENS, KEYS, DOCUMENTS = 4096, 8192, 4


def attention(name: str, number: int, architecture: str) -> Iterator[Compiled]:
    """The kernels of one call of a package's forward and backward operator."""
    demand, is_causal = configurations.attention_calls()[number]
    yield from operators_of(name, demand, architecture, is_causal)  # sets what the package reads when it is imported
    reason = kernels.FLASH[name].why_not(demand._replace(capability=configurations.ARCHITECTURES[architecture]))
    assert reason is None, f"it compiles, but a run would not choose it: {reason}"


def operators_of(name: str, demand: Demand, architecture: str, is_causal: bool = True) -> Iterator[Compiled]:
    """The kernels of `kernels.FLASH[name]`, called as `FlashKernel` calls them."""
    capability = configurations.ARCHITECTURES[architecture]
    with TemporaryDirectory() as folder:
        os.environ |= {
            "FLASH_ATTENTION_ARCH": architecture,
            "FLASH_ATTENTION_NUM_SMS": str(triton_driver.MULTIPROCESSORS[capability[0]]),
            "CUTE_DSL_ARCH": architecture,
            "CUTE_DSL_KEEP": "cubin",
            "CUTE_DSL_DUMP_DIR": folder,
        }
        torch.cuda.get_device_capability = lambda device=None: capability
        torch.use_deterministic_algorithms(demand.is_deterministic)
        shared = cute.record_launches()
        seen: set[str] = set()
        with FakeTensorMode(), torch.no_grad():
            start = time.perf_counter()
            for step in _passes(kernels.FLASH[name], demand, is_causal):
                seconds, new = time.perf_counter() - start, {path.name for path in Path(folder).rglob("*.cubin")} - seen
                assert new, f"{step}: the compiler wrote no binary"
                yield from _dumped(step, sorted(Path(folder, file) for file in new), max(shared), seconds)
                seen |= new
                shared.clear()
                start = time.perf_counter()


def _passes(operators: Operators, demand: Demand, is_causal: bool) -> Iterator[str]:
    """Calls forward and backward, and yields the name of each pass after its call.

    The calls are those of `FlashKernel`, whose own slices of fake tensors torch for CPUs cannot compute.
    """
    heads = max(HEADS // demand.heads_per_key, 1)

    def made(tokens: int, count: int, width: int) -> Tensor:
        return torch.empty(tokens, count, width, dtype=demand.dtype, device="cuda")

    query = made(TOKENS, heads * demand.heads_per_key, demand.key_width)
    keys, values = made(KEYS, heads, demand.key_width), made(KEYS, heads, demand.value_width)
    edges = [torch.empty(DOCUMENTS + 1, dtype=torch.int32, device="cuda") for _ in range(2)]
    sequences = *edges, TOKENS // 2, KEYS // 2
    options: dict[str, float] = {"num_before": 127} if demand.has_window else {}
    if not is_causal:
        options["causal"] = False
    if demand.softcap is not None:
        options["softcap"] = demand.softcap
    out, lse = operators.forward(query, keys, values, *sequences, scale=0.1, **options)
    assert out.shape == (*query.shape[:2], demand.value_width), out.shape
    assert (lse.dtype, lse.shape) == (torch.float32, (query.shape[1], TOKENS)), (lse.dtype, lse.shape)
    yield "forward"
    saved = torch.empty_like(out), query, keys, values, out, lse
    grads = operators.backward(*saved, *sequences, scale=0.1, **options)
    assert [x.shape for x in grads] == [x.shape for x in (query, keys, values)], [x.shape for x in grads]
    yield "backward"


def _dumped(step: str, files: Sequence[Path], shared: int, seconds: float) -> Iterator[Compiled]:
    """The kernels of the binaries.  shared: bytes of the launch that takes most"""
    for file in files:
        for name, used in usage(file).items():
            yield Compiled(step, _short(name), used._replace(shared=shared), 1, seconds / len(files))


def refused(number: int, architecture: str) -> Iterator[Compiled]:
    """Asserts that a package refuses what our code says that it refuses; the result has its words."""
    name, demand, _ = configurations.REFUSED[number]
    start = time.perf_counter()
    try:
        compiled = list(operators_of(name, demand, architecture))
    except (AssertionError, NotImplementedError, ValueError) as error:  # a compiler that breaks raises others
        words = " ".join(f"{type(error).__name__}: {error}".split())
        yield Compiled("refused", words, Usage(0, 0, 0), 1, time.perf_counter() - start)
        return
    raise AssertionError(
        f"{name} compiles this now: compare it on a GPU, and change what our code refuses.  {compiled}"
    )


def _short(name: str) -> str:
    """kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_... ->
    FlashAttentionForwardSm90"""
    return name.partition("_object_at_")[0].rpartition("_")[2].lstrip("0123456789sm") or name


@contextmanager
def recorded(step: str, driver: triton_driver.RecordingDriver, into: list[Compiled]) -> Iterator[None]:
    """Adds the kernels that Triton compiles in the block to `into`."""
    before, start = len(driver.loaded), time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    new = driver.loaded[before:]
    for name in dict.fromkeys(loaded.name for loaded in new):
        variants = [loaded.usage for loaded in new if loaded.name == name]
        best = min(variants, key=lambda used: (used.spilled, used.registers))
        into.append(Compiled(step, name, best, len(variants), seconds * len(variants) / len(new)))


def loss(number: int, architecture: str) -> Iterator[Compiled]:
    """Both kernels of the loss head, for all its options."""
    driver, found = triton_driver.activate(configurations.ARCHITECTURES[architecture][0]), list[Compiled]()
    from sft.mcore.loss import softmax_triton
    from sft.mcore.loss.objective import GradientCoefficients

    rows, columns = 4, 32_768
    local, per_row = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    for dtype in (torch.bfloat16, torch.float32):
        scores = torch.zeros(rows, columns, dtype=dtype)
        for softcap in (None, 30.0):
            for entropy in (False, True):
                coefficients = GradientCoefficients(
                    softmax=per_row, entropy=per_row if entropy else None, label=per_row
                )
                options = ["capped"] * (softcap is not None) + ["with entropy"] * entropy
                step = ", ".join([str(dtype).removeprefix("torch."), *options])
                with recorded(step, driver, found):
                    softmax_triton.row_sums(scores, local, columns - 3, entropy, softcap)
                    softmax_triton.score_gradient(
                        scores, local, columns - 3, per_row, per_row, coefficients, scores, softcap
                    )
    yield from found


class _Passing:
    """`HeadwisePassing` that sends nothing."""

    read = ALL_ROWS

    def initial_states(self, maps: Tensor, offsets: Tensor) -> Tensor:
        return offsets

    def final_gradients(self, maps: Tensor, dstates: Tensor) -> Tensor:
        return dstates


def linear(number: int, architecture: str) -> Iterator[Compiled]:
    """The kernels of a layer of linear attention: two fragments of a long document, and a short document."""
    driver, found = triton_driver.activate(configurations.ARCHITECTURES[architecture][0]), list[Compiled]()
    from sft.mcore.linear_attention.delta_rule import Inputs
    from sft.mcore.linear_attention.recurrence import Fragments
    from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
    from sft.parallel.taps import Taps

    shape, (config, mixer) = list(configurations.linear().items())[number]
    kernel = kernels.KERNELS[mixer.kind](config, mixer, "cuda").kernel
    if isinstance(shape, configurations.Mamba):
        yield from _mamba(shape, kernel, driver)
        return
    assert type(kernel).__name__ == "FlaKernel", str(kernel)
    heads, tokens, cpu = 4, 330, torch.device("cpu")
    value_heads = heads * shape.heads_per_key
    torch.distributed.all_to_all_single = lambda received, *x, **y: received.zero_()
    maps: Any = importlib.import_module("fla.ops.cp.chunk_fwd")
    maps._check_cp_device = lambda device: None  # it refuses host memory

    def made(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype, requires_grad=True)

    for cp_size, cp_rank in ((1, 0), (2, 1)):
        taps = Taps.of(np.array([0, 4, 24, 160]), shape.taps, cp_size, cp_rank)
        plan = kernel.convolution_plan(taps, cpu)
        x, weight = made(int(taps.boundaries[-1]), value_heads * shape.value_width), made(
            value_heads * shape.value_width, shape.taps
        )
        with recorded(f"convolution, cp {cp_size}: forward", driver, found):
            out = kernel.convolution(x, weight, plan, None)
        with recorded(f"convolution, cp {cp_size}: backward", driver, found):
            out.backward(torch.zeros_like(out))
    decays = (value_heads, shape.key_width) if shape.decay == "channel" else (value_heads,)
    a, a_log, dt_bias = made(tokens, *decays), made(value_heads), made(math.prod(decays))
    with recorded("decay: forward", driver, found):
        g = kernel.log_decay(a, a_log, dt_bias, shape.low_limit)
    with recorded("decay: backward", driver, found):
        g.backward(torch.zeros_like(g))
    for linked in ([0, 1], []):
        schedule = kernel.schedule(Fragments.of([0, 130, 264, tokens], linked=linked), value_heads, cpu)
        q, k = made(tokens, heads, shape.key_width), made(tokens, heads, shape.key_width)
        v = made(tokens, value_heads, shape.value_width)
        inputs = Inputs(q, k, v, made(tokens, *decays, dtype=torch.float32), made(tokens, value_heads))
        what = "delta rule, states passed" if linked else "delta rule"
        with recorded(f"{what}: forward", driver, found):
            out = recurrent_attention(inputs, schedule, kernel, _Passing() if linked else None)
        with recorded(f"{what}: backward", driver, found):
            out.backward(torch.zeros_like(out))
    norm = (
        made(tokens, value_heads, shape.value_width),
        made(tokens, value_heads, shape.value_width),
        made(shape.value_width),
    )
    with recorded("gated norm: forward", driver, found):
        normed, _ = kernel.gated_norm(*norm, 1e-6, shape.gate)
    with recorded("gated norm: backward", driver, found):
        normed.backward(torch.zeros_like(normed))
    yield from found


def _mamba(shape: configurations.Mamba, kernel: Any, driver: triton_driver.RecordingDriver) -> Iterator[Compiled]:
    """The kernels of a layer with Mamba-2, as those of linear attention."""
    from sft.mcore.linear_attention.recurrence import Fragments
    from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
    from sft.mcore.linear_attention.ssd import SsdInputs
    from sft.parallel.taps import Taps

    assert type(kernel).__name__ == "FlaSsdKernel", str(kernel)
    groups, tokens, cpu, found = 2, 330, torch.device("cpu"), list[Compiled]()
    heads = groups * shape.heads_per_group
    torch.distributed.all_to_all_single = lambda received, *x, **y: received.zero_()

    def made(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype, requires_grad=True)

    inner = heads * shape.head_width
    for cp_size, cp_rank in ((1, 0), (2, 1)):
        taps = Taps.of(np.array([0, 4, 24, 160]), shape.taps, cp_size, cp_rank)
        x, weight, bias = made(int(taps.boundaries[-1]), inner), made(inner, shape.taps), made(inner)
        with recorded(f"convolution, cp {cp_size}: forward", driver, found):
            out = kernel.convolution(x, weight, kernel.convolution_plan(taps, cpu), None, bias)
        with recorded(f"convolution, cp {cp_size}: backward", driver, found):
            out.backward(torch.zeros_like(out))
    of_groups, decays = (tokens, groups, shape.state_width), [made(tokens, heads, dtype=torch.float32) for _ in "ab"]
    inputs = SsdInputs(made(*of_groups), made(*of_groups), made(tokens, heads, shape.head_width), *decays)
    for linked in ([0, 1], []):
        schedule = kernel.schedule(Fragments.of([0, 130, 264, tokens], linked=linked), heads, cpu)
        what = "SSD, states passed" if linked else "SSD"
        passing: Any = _Passing() if linked else None
        with recorded(f"{what}: forward", driver, found):
            out = recurrent_attention(inputs, schedule, kernel, passing)
        with recorded(f"{what}: backward", driver, found):
            out.backward(torch.zeros_like(out))
    by_group = tokens, groups, inner // groups
    with recorded("norm by groups: forward", driver, found):
        normed, _ = kernel.grouped_norm(made(*by_group), made(*by_group), made(*by_group[1:]), 1e-5)
    with recorded("norm by groups: backward", driver, found):
        normed.backward(torch.zeros_like(normed))
    yield from found


def _attention(name: str) -> Callable[[int, str], Iterator[Compiled]]:
    return lambda number, architecture: attention(name, number, architecture)


KINDS: Mapping[str, Callable[[int, str], Iterator[Compiled]]] = {
    kernel_rates.FLASH4: _attention(kernel_rates.FLASH4),
    kernel_rates.FFPA: _attention(kernel_rates.FFPA),
    "loss head": loss,
    "linear attention": linear,
    "refused": refused,
}


def main(kind: str, number: str, architecture: str, quick: str = "") -> None:
    if quick:
        triton_driver.first_variants()
    print(json.dumps(list(KINDS[kind](int(number), architecture))))


if __name__ == "__main__":
    main(*sys.argv[1:])
