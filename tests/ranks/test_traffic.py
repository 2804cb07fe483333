"""The bytes that ranks send in a step equal those of tools/traffic_table.py; Transformer Engine's attention is not
covered."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sft.parallel.cp_bytes import CpBytes
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import LINEAR, MOE
from tests.ranks.pool import Ranks
from tools import traffic_table

COMMON = ["run.precision=bf16", f"model.vocab_size={scenarios.VOCAB}"]
TP = ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=1"]
# Linear attention in every layer; the test writes the numbers of the layers.
LINEAR_TP = [*TP, *LINEAR, "model.linear_attention.layers=EVERY"]
EP = [*MOE, "parallel.ep=2", "parallel.cp=2", "train.global_batch_size=1"]
DP = ["parallel.distributed_optimizer=true", "train.global_batch_size=2"]
PADDING_TOLERANCE = 0.02  # for gradients, which megatron-core pads to a multiple of the number of ranks
# index of the whole tensor among the arguments
OPERATIONS = {"allreduce": 0, "allgather": 0, "reduce_scatter": 1, "alltoall": 1, "send": 0}


class Sent(TorchDispatchMode):
    """Bytes of the whole tensor of each collective, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for name, whole in OPERATIONS.items():
                if name in func._schema.name:  # collectives of one tensor, or of several at once
                    tensors = args[whole] if isinstance(args[whole], list) else [args[whole]]
                    self.num_bytes[name] += sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


class Leaving(TorchDispatchMode):
    """Bytes of all-to-alls that leave this rank."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default:
            message, rows = args[1], args[4]
            self.num_bytes += message.nbytes // max(len(message), 1) * (len(message) - rows[dist.get_rank()])
        return func(*args, **(kwargs or {}))


def sent(overrides: list[str]) -> tuple[Counter[str], Counter[str]]:
    """The bytes in a step of full packs: of the reduction of gradients, and of everything else."""
    with scenarios.running([*COMMON, *overrides]) as engine:
        samples = [answer(256, 64, seed=seed, last=scenarios.VOCAB) for seed in range(engine.layout.num_microbatches)]
        microbatches = [scenarios.microbatch_of(engine, [sample]) for sample in samples]
        reduction, reduce = Sent(), engine.core_config.finalize_model_grads_func

        def counted_reduction(*args: Any, **kwargs: Any) -> None:
            with reduction:
                reduce(*args, **kwargs)

        engine.core_config.finalize_model_grads_func = counted_reduction
        with Sent() as step:
            engine.train_step(microbatches)
        return reduction.num_bytes, step.num_bytes - reduction.num_bytes


def over_cp(overrides: list[str]) -> tuple[float, float]:
    """The bytes of all-to-alls that leave this rank for a microbatch in training, and those that the equations give for
    all ranks."""
    with scenarios.running([*COMMON, *overrides]) as engine:
        samples = [answer(length, 8, seed=length, last=scenarios.VOCAB) for length in (16, 144, 20, 8)]
        microbatch = scenarios.microbatch_of(engine, samples, doc_multiple=4)
        with Leaving() as step:
            engine.train_step([microbatch])
        padded = np.diff(microbatch.cu_seqlens.numpy())
        return step.num_bytes, float(CpBytes.of(engine.config).other_than_keys(padded, engine.layout.cp).sum())


def said(overrides: list[str], group: str) -> float:
    config = parse_recipe(scenarios.RECIPE, "tests", [*COMMON, *overrides]).config
    (found,) = [one for one in traffic_table.of(config, Layout.resolve(config, 2)) if one.group.startswith(group)]
    return found.num_bytes


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "group, names, overrides",
    [
        ("tp", ("allgather", "reduce_scatter"), TP),
        ("tp", ("allgather", "reduce_scatter"), LINEAR_TP),
        ("ep", ("alltoall",), EP),
    ],
    ids=["tp", "tp linear", "ep"],
)
def test_messages_of_a_layer(
    ranks: Ranks, group: str, names: tuple[str, ...], overrides: list[str], recompute: str
) -> None:
    """Compares models that differ by two layers.  Ranks also gather counts of the experts' tokens, which the table
    omits."""
    few, many = (
        [
            *(text.replace("EVERY", str([*range(1, layers + 1)])) for text in overrides),
            *(f"train.recompute={recompute}", f"model.num_layers={layers}"),
        ]
        for layers in (2, 4)
    )
    expected = said(many, group) - said(few, group)
    found = [
        sum(more[name] - less[name] for name in names) / 2  # a rank keeps its own half
        for (_, less), (_, more) in zip(ranks(2).run(sent, few), ranks(2).run(sent, many))
    ]
    if group == "ep":  # the number of tokens that each rank sends depends on the routers
        found = [sum(found) / 2]
    assert found == [expected] * len(found)


@pytest.mark.parametrize("recompute", ["none", "selective", "attention_kept", "full"])
def test_linear_attention_over_cp(ranks: Ranks, recompute: str) -> None:
    """Short documents, one long one and halos, in forward, repeated forward and backward."""
    overrides = [*LINEAR, "parallel.cp=2", "train.global_batch_size=1", f"train.recompute={recompute}"]
    (first, expected), (second, _) = ranks(2).run(over_cp, overrides)
    assert first + second == expected > 0


def test_gradients_and_weights(ranks: Ranks) -> None:
    for gradients, weights in ranks(2).run(sent, DP):
        num_bytes = (gradients["reduce_scatter"] + weights["allgather"]) / 2
        assert num_bytes == pytest.approx(said(DP, "dp x cp"), rel=PADDING_TOLERANCE)


# --- LoRA: no gradient of a frozen weight is sent ------------------------------------------------------------------

# Elements in the factors of a layer of width 32 (q 32, k and v 16, gate, up and down 64) at rank 4.
ATTENTION, MLP = 4 * (32 + 32) + 2 * 4 * (32 + 16) + 4 * (32 + 32), 3 * 4 * (32 + 64)
REPLICATED = 7 * 4 * 32  # elements in the factors that tp does not split
EXPERT = 3 * 4 * (32 + 24)
# Elements in the weights: the embedding or output with its padding, a layer without MLP, norms of a layer, the last
# norm.
TABLE, LAYER, NORMS, LAST = 384 * 32, 32 * (2 * 32 + 2 * 16), 2 * 32 + 2 * 4, 32
FULL_MLP, FULL_EXPERTS = 3 * 32 * 64, 4 * 32 + 2 * 3 * 32 * 24  # a router, and 2 of 4 experts
WHOLE = 2 * TABLE + 4 * (LAYER + NORMS + FULL_MLP) + LAST
# megatron-core pads each weight to 64 elements, and their sum to 128: norms of q and k, other norms, end.  Factors need
# none.
PADDING = 8 * (64 - 4) + 9 * (64 - 32) + 64
INNER = 4 * 256 * 7 * 4  # bytes of A x for 256 tokens, in 4 layers
FP32 = 4
REDUCED = {  # reduced elements of adapters and of full fine-tuning; other elements that LoRA sends more or less
    "dp2": (["train.global_batch_size=2"], "allreduce", 4 * (ATTENTION + MLP), WHOLE, {}),
    "dp2-sharded": (
        DP, "reduce_scatter", 4 * (ATTENTION + MLP), WHOLE + PADDING,
        {"allgather": 4 * (ATTENTION + MLP) - WHOLE - PADDING},  # the new weights
    ),
    "tp2": (  # split weights; then replicated factors or norms, which are also summed over tp
        TP, "allreduce", 2 * (ATTENTION + MLP - REPLICATED) + 2 * 4 * REPLICATED,
        TABLE + 2 * (LAYER + FULL_MLP) + 2 * (4 * NORMS + LAST),
        # No weight gradient needs a second gather of the inputs of qkv, fc1 and output.  The embedding needs no
        # gradient.
        {"allgather": INNER - (2 * 4 + 1) * 256 * 32, "reduce_scatter": INNER - 256 * 32},
    ),
    "pp2": (  # the first stage
        ["parallel.pp=2", "train.global_batch_size=1"], "allreduce", 2 * (ATTENTION + MLP),
        TABLE + 2 * (LAYER + NORMS + FULL_MLP), {},
    ),
    "cp2": (["parallel.cp=2", "train.global_batch_size=1"], "allreduce", 4 * (ATTENTION + MLP), WHOLE, {}),
    "ep2": (
        [*MOE, "parallel.ep=2", "train.global_batch_size=2"], "allreduce", 4 * (ATTENTION + 2 * EXPERT),
        2 * TABLE + 4 * (LAYER + NORMS + FULL_EXPERTS) + LAST, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", REDUCED)
def test_no_gradient_of_a_frozen_weight_is_sent(ranks: Ranks, layout: str) -> None:
    overrides, operation, trained, every, other = REDUCED[layout]
    overrides = [*overrides, "model.qkv_bias=false", "run.precision=fp32"]
    targets = "[all-linear, 'experts.*']" if layout == "ep2" else "[all-linear]"
    adapters = ranks(2).run(sent, [*overrides, f"lora={{rank: 4, targets: {targets}}}"])
    whole = ranks(2).run(sent, overrides)
    for rank, ((gradients, rest), (all_gradients, other_rest)) in enumerate(zip(adapters, whole, strict=True)):
        is_last_stage = layout == "pp2" and rank == 1
        assert gradients == {operation: FP32 * trained}
        assert all_gradients == {operation: FP32 * (every + is_last_stage * LAST)}
        for name in rest | other_rest:
            assert rest[name] - other_rest[name] == FP32 * other.get(name, 0), name
