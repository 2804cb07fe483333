"""Bytes that ranks send in a step, against tools/traffic_table.py; without Transformer Engine's attention."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import MOE
from tests.ranks.pool import RankPool
from tools import traffic_table

Ranks = Callable[[int], RankPool]
COMMON = ["run.precision=bf16", f"model.vocab_size={scenarios.VOCAB}"]
TP = ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=1"]
EP = [*MOE, "parallel.ep=2", "parallel.cp=2", "train.global_batch_size=1"]
DP = ["parallel.distributed_optimizer=true", "train.global_batch_size=2"]
PADDING_TOLERANCE = 0.02  # of gradients, which core pads to a multiple of the ranks
OPERATIONS = {"allgather": 0, "reduce_scatter": 1, "alltoall": 1}  # and which tensor is the whole


class Sent(TorchDispatchMode):
    """Bytes of the whole tensor of each collective, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for name, whole in OPERATIONS.items():
                if name in func._schema.name:  # of one tensor, or of several at once
                    tensors = args[whole] if isinstance(args[whole], list) else [args[whole]]
                    self.num_bytes[name] += sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def sent(overrides: list[str]) -> Counter[str]:
    """In a step of full packs."""
    with scenarios.running([*COMMON, *overrides]) as engine:
        samples = [answer(256, 64, seed=seed, last=scenarios.VOCAB) for seed in range(engine.layout.num_microbatches)]
        microbatches = [scenarios.microbatch_of(engine, [sample]) for sample in samples]
        with Sent() as counted:
            engine.train_step(microbatches)
        return counted.num_bytes


def said(overrides: list[str], group: str) -> float:
    config = parse_recipe(scenarios.RECIPE, "tests", [*COMMON, *overrides]).config
    (found,) = [one for one in traffic_table.of(config, Layout.resolve(config, 2)) if one.group.startswith(group)]
    return found.num_bytes


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "group, names, overrides", [("tp", ("allgather", "reduce_scatter"), TP), ("ep", ("alltoall",), EP)]
)
def test_messages_of_a_layer(
    ranks: Ranks, group: str, names: tuple[str, ...], overrides: list[str], recompute: str
) -> None:
    """Of two more layers.  Experts' counts of tokens are gathered, too, which the table leaves out."""
    few, many = ([*overrides, f"train.recompute={recompute}", f"model.num_layers={layers}"] for layers in (2, 4))
    expected = said(many, group) - said(few, group)
    found = [
        sum(more[name] - less[name] for name in names) / 2  # a rank keeps its own half
        for less, more in zip(ranks(2).run(sent, few), ranks(2).run(sent, many))
    ]
    if group == "ep":  # how many tokens each rank sends depends on the routers
        found = [sum(found) / 2]
    assert found == [expected] * len(found)


def test_gradients_and_weights(ranks: Ranks) -> None:
    for found in ranks(2).run(sent, DP):
        num_bytes = (found["allgather"] + found["reduce_scatter"]) / 2
        assert num_bytes == pytest.approx(said(DP, "dp x cp"), rel=PADDING_TOLERANCE)
