"""The gated delta rule of linear attention, compared with transformers' fallback: time and saved bytes.

    python -m tools.bench delta_rule --check        2K and 8K tokens, an eighth of the heads of Qwen3.6-27B

A case is LENGTH:MIX (tools/bench/mixes.py).  `torch` is our kernel in plain torch, and `fla` is the kernel of
flash-linear-attention (CUDA, bf16).  Both compute all documents of a pack in one call.  `transformers` computes one
document after another, as transformers does without flash-linear-attention.  On a CPU, inputs are fp32, and times are
CPU times.

If an output or gradient differs from that of transformers, nothing is timed.  Times are medians; the ways take turns.
`fwd+bwd` includes forward, and the recomputation in backward.  `saved` is the number of bytes that forward saves for
backward, without the inputs.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from sft.mcore.linear_attention import fla_functions
from sft.mcore.linear_attention.delta_rule import DeltaKernel, Inputs
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tools.bench.clock import check_close, cpu_time, medians, time_on
from tools.bench.harness import Bar, Column, Option, Row, Subject
from tools.bench.mixes import boundaries_of, read_length_and_mix

BASELINE = "transformers"
WAYS = (BASELINE, "torch", "fla")
CHECKED = 1024  # tokens of the pack on which results are compared
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}  # norm of the difference / norm of the result, in fp32 and bf16
MAX_TIME, MAX_SAVED = 0.7, 0.1  # bars: shares of the baseline's time and saved bytes
JUDGED = "8k:one"

Way = Callable[[Inputs], Tensor]


def random_inputs(tokens: int, options: argparse.Namespace) -> Inputs:
    device, dtype = options.device, torch.float32 if options.device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    keys, values, width = options.key_heads, options.value_heads, options.head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, device=device, generator=generator)

    q, k, v, beta = randn(keys, width), randn(keys, width), randn(values, width), randn(values).sigmoid()
    tensors = *(x.to(dtype) for x in (q, k, v)), -torch.exp(randn(values) - 3), beta.to(dtype)
    return Inputs(*(x.requires_grad_() for x in tensors))


def by_transformers(boundaries: Sequence[int], inputs: Inputs) -> Tensor:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    lengths = [stop - start for start, stop in zip(boundaries, boundaries[1:])]
    documents = zip(*(x[None].split(lengths, dim=1) for x in inputs))
    rule = getattr(torch_chunk_gated_delta_rule, "__wrapped__", torch_chunk_gated_delta_rule)
    return torch.cat([rule(*document, use_qk_l2norm_in_kernel=True)[0][0] for document in documents])


def ways_of(boundaries: Sequence[int], options: argparse.Namespace) -> dict[str, Way]:
    """The implementations for a pack with these boundaries, by name.  The baseline comes first."""
    kernels: dict[str, Callable[[], DeltaKernel]] = {
        "torch": TorchDeltaKernel,
        "fla": lambda: FlaKernel(fla_functions.functions()),
    }
    ways: dict[str, Way] = {BASELINE: partial(by_transformers, boundaries)}
    for name in filter(options.ways.__contains__, kernels):
        kernel = kernels[name]()
        schedule = kernel.schedule(Fragments.of(boundaries), options.value_heads, options.device)
        ways[name] = partial(recurrent_attention, schedule=schedule, kernel=kernel)
    return ways


def backward(way: Way, inputs: Inputs, grad: Tensor) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    out = way(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def prepare(options: argparse.Namespace) -> Iterator[Row]:
    """Removes fla if it cannot run here, and yields a row that says why.

    Raises Refused if an output or gradient differs from that of the baseline.
    """
    if "fla" in options.ways:
        if problem := "it needs CUDA" if options.device.type == "cpu" else fla_functions.problem():
            options.ways = [name for name in options.ways if name != "fla"]
            yield {"case": "every", "way": "fla", "status": f"does not run here: {problem}"}
    inputs, boundaries = random_inputs(CHECKED, options), [0, 100, 164, 165, CHECKED]
    grad = torch.randn_like(inputs.v)
    ways = ways_of(boundaries, options)
    expected = backward(ways[BASELINE], inputs, grad)
    for name, way in ways.items():
        results = dict(zip(("the output", *(f"d{x}" for x in Inputs._fields)), backward(way, inputs, grad)))
        check_close(name, results, expected, TOLERANCE[options.device.type])


def saved_bytes(way: Way, inputs: Inputs) -> int:
    """Bytes of all storages that forward saves for backward, without those of the inputs."""
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = way(inputs)
    of_inputs = {x.untyped_storage().data_ptr() for x in inputs}
    del out  # keeps the saved storages alive until here, so that no address is reused
    return sum(size for address, size in storages.items() if address not in of_inputs)


def measure(case: tuple[int, str], options: argparse.Namespace) -> Iterator[Row]:
    length, mix = case
    boundaries = boundaries_of(mix, length, 1).tolist()
    inputs = random_inputs(length, options)
    grad, ways = torch.randn_like(inputs.v), ways_of(boundaries, options)
    clock = cpu_time if options.device.type == "cpu" else time_on(options.device)
    calls: dict[str, Callable[[], object]] = {f"fwd {name}": partial(way, inputs) for name, way in ways.items()}
    calls |= {f"both {name}": partial(backward, way, inputs, grad) for name, way in ways.items()}
    seconds = medians(calls, repeats=options.repeats, clock=clock)
    base_forward, base_both = seconds[f"fwd {BASELINE}"], seconds[f"both {BASELINE}"]
    base_saved = saved_bytes(ways[BASELINE], inputs)
    for name, way in ways.items():
        forward, both, saved = seconds[f"fwd {name}"], seconds[f"both {name}"], saved_bytes(way, inputs)
        yield {
            "way": name, "tokens": length, "documents": len(boundaries) - 1, "device": options.device.type,
            "fwd_s": forward, "both_s": both, "fwd_ratio": forward / base_forward, "ratio": both / base_both,
            "saved": saved, "saved_ratio": saved / base_saved,
        }  # fmt: skip


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    judged = [row for row in rows if (row["case"], row.get("way"), row.get("device")) == (JUDGED, "torch", "cpu")]
    row = judged[-1] if judged else {}
    for key, title, bound in (
        ("fwd_ratio", "forward, CPU time", MAX_TIME),
        ("ratio", "forward and backward, CPU time", MAX_TIME),
        ("saved_ratio", "saved bytes", MAX_SAVED),
    ):
        yield Bar(name=f"{JUDGED}, torch over transformers: {title}", value=row.get(key), bound=bound)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("documents", "documents", ","),
        Column("fwd_s", "fwd ms", ",.1f", 1e-3),
        Column("both_s", "fwd+bwd ms", ",.1f", 1e-3),
        Column("fwd_ratio", "fwd ratio", ".3f"),
        Column("ratio", "ratio", ".3f"),
        Column("saved", "saved MiB", ",.2f", 2**20),
        Column("saved_ratio", "saved ratio", ".4f"),
    ],
    cases=["2k:one", "8k:one", "8k:chat"],
    tiny_cases=["256:one", "512:chat"],
    ways=WAYS,
    read=read_length_and_mix,
    options={
        "key_heads": Option(2, 1, "number of query and key heads"),
        "value_heads": Option(6, 3, "number of value heads"),
        "head_dim": Option(128, 16, "size of a head"),
        "repeats": Option(3, 1, "timed repetitions"),
    },
    prepare=prepare,
    bars=bars,
    device="any",
)
