"""Log-probs of given logits, forward and backward: milliseconds and MiB, as in the table of SkyRL PR #1610.

    python -m tools.bench logprobs --device cuda

A case is VOCABULARY:TOKENS.  The default sizes, up to 128K x 128K, need tens of GiB.  `chunked` is the trainer's code.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.loss import Targets, VocabShard, chunked
from tools.bench import ranks
from tools.bench.harness import Option, Subject
from tools.bench.loss_bars import CONCATENATE
from tools.bench.loss_ways import concatenated_logprobs
from tools.bench.mixes import read_length
from tools.bench.problem import OUT_OF_MEMORY, Problem, catch_out_of_memory, measure
from tools.bench.results import Column, Row


def read(name: str) -> tuple[int, int]:
    vocab, num_tokens = name.split(":")
    return int(vocab), read_length(num_tokens)


def given_logits(vocab: int, num_tokens: int, *, chunk: int, device: torch.device) -> Problem:
    """The input is bf16 logits, the result the sum of the labels' log-probs."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(num_tokens, vocab, generator=generator, dtype=torch.bfloat16, device=device).requires_grad_()
    labels = torch.randint(vocab, (num_tokens,), generator=generator, device=device)
    rows, weights = torch.arange(num_tokens, device=device), torch.ones(num_tokens, device=device)
    targets = Targets(rows=rows, labels=labels, weights=weights)
    shard = VocabShard.of(logits.new_empty((vocab, 0)), vocab, group, sequence_parallel=False)
    loss = LossConfig(impl="chunked", chunk_size=chunk)

    def unchunked() -> Tensor:
        return torch.log_softmax(logits.float(), -1).gather(1, labels[:, None]).sum()

    return Problem(
        ways={
            "log_softmax, gather": unchunked,
            f"chunked {chunk}": lambda: chunked.row_statistics(logits, shard, targets, loss).logprob.sum(),
            CONCATENATE: lambda: concatenated_logprobs(logits, labels, chunk).sum(),
        },
        leaves=(logits,),
        constants=(rows, labels, weights),
    )


def measure_case(case: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    """Measures a case.  Checks gradients on a few chunks only."""
    (vocab, num_tokens), chunk = case, options.chunk
    with ranks.alone(options.device.type), catch_out_of_memory() as errors:
        checked = given_logits(vocab, min(num_tokens, 2 * chunk + 1), chunk=chunk, device=options.device)
        problem = given_logits(vocab, num_tokens, chunk=chunk, device=options.device)
        yield from measure(problem, checked, repeats=options.repeats)
    if errors:
        yield {"status": OUT_OF_MEMORY}


SUBJECT = Subject(
    measure=measure_case,
    columns=[
        Column("seconds", "ms", ",.1f", 1e-3),
        Column("total", "MiB", ",.2f", 2**20),
    ],
    cases=[f"{vocab}:{tokens}k" for vocab in (32_000, 64_000, 128_000) for tokens in (32, 64, 128)],
    tiny_cases=["40:9", "40:20", "70:9"],
    read=read,
    options={
        "chunk": Option(1024, 4, "tokens per chunk"),
        "repeats": Option(5, 1, "timed repetitions"),
    },
    device="gpu",
)
