"""Compares steps with LoRA with steps of full fine-tuning: both train in one process, in turns, on the same pack.

Bytes are counted on the tensors of the two engines: gradients, and the states of the optimizer without weights that
are the model's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sft.batch import Microbatch
from sft.mcore.checkpoint_io.optimizer_shards import optimizer_slices
from sft.mcore.engine import Engine
from tools.bench.clock import medians, wall_on
from tools.bench.problem import catch_out_of_memory
from tools.bench.steps.case import StepCase

ROUNDS = 5  # timed steps of each


def against_full(
    case: StepCase, adapted: Engine, microbatches: Sequence[Microbatch], make: Callable[[StepCase], Engine]
) -> dict[str, Any]:
    """Facts of `adapted`, the engine of a case with LoRA, and of the case without; make: makes an engine.

    time_ratio is the median time of a step / that of full fine-tuning; None if both do not fit in memory.
    """
    facts: dict[str, Any] = {"time_ratio": None, "lora": state_of(adapted)}
    with catch_out_of_memory():
        engines = {"lora": adapted, "full": make(replace(case, lora=0))}
        calls = {name: (lambda engine=engine: engine.train_step(microbatches)) for name, engine in engines.items()}
        seconds = medians(calls, repeats=ROUNDS, clock=wall_on(adapted.groups.device))
        facts |= {"time_ratio": seconds["lora"] / seconds["full"], "full": state_of(engines["full"])}
    return facts


def state_of(engine: Engine) -> dict[str, int]:
    """Trained parameters, and the bytes of their gradients and of the optimizer's states.

    the shape `tiny` with rank 8 in fp32: 16,384 trained, 65,536 bytes of gradients, 131,072 of the optimizer
    """
    params = [param for chunk in engine.chunks for param in chunk.parameters()]
    buffers = [buffer for chunk in engine.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    own = {param.untyped_storage().data_ptr() for param in params}
    states = [tensor for part in optimizer_slices(engine.optimizer) for tensor in part.tensors.values()]
    return {
        "trained": sum(param.numel() for param in params if param.requires_grad),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer_bytes": sum(x.nbytes for x in states if x.untyped_storage().data_ptr() not in own),
    }
