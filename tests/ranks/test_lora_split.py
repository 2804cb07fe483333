"""Adapters of layers whose ranks only give terms of a sum, as those of experts split over etp, and initial values.

The dispatcher of experts sums outputs and input gradients over etp, and etp above 1 needs NCCL.  So experts are
computed here on two ranks without core, and the sums are made by the test.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.config.lora import LoraConfig
from sft.layers.adapters import AdaptedWeight, Adapter
from sft.mcore.lora import adapted
from sft.mcore.lora.split import Split
from tests.ranks import scenarios
from tests.ranks.peft_models import whole
from tests.ranks.pool import Ranks

LORA = LoraConfig(rank=3, alpha=5.0)
SCALE = 5.0 / 3.0
HIDDEN, WIDTH = 6, 8
COUNTS = [3, 0, 2]  # tokens of each expert
EXPERTS, TOKENS = len(COUNTS), sum(COUNTS)
TOLERANCE = 1e-12  # float64
WEIGHTS = [
    AdaptedWeight(
        module="mlp.experts.experts.linear_fc1", layer=0, num_experts=EXPERTS, part_rows=(WIDTH, WIDTH),
        num_columns=HIDDEN, num_groups=1,
        adapters=(Adapter(name="experts.*.gate", parts=(0,)), Adapter(name="experts.*.up", parts=(1,))),
    ),
    AdaptedWeight(
        module="mlp.experts.experts.linear_fc2", layer=0, num_experts=EXPERTS, part_rows=(HIDDEN,),
        num_columns=WIDTH, num_groups=1, adapters=(Adapter(name="experts.*.down", parts=(0,)),),
    ),
]  # fmt: skip
SIZES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}  # of the weights of an expert
SHAPES: dict[str, tuple[int, ...]] = {"x": (TOKENS, HIDDEN), "upstream": (TOKENS, HIDDEN)}
for name, (rows, columns) in SIZES.items():
    SHAPES[name] = EXPERTS, rows, columns
    SHAPES[f"{name}.lora_A.weight"], SHAPES[f"{name}.lora_B.weight"] = (EXPERTS, 3, columns), (EXPERTS, rows, 3)


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


class Part(torch.nn.Module):
    """A linear layer of all experts, as core calls it: without communication of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        return torch.cat([part @ weight.t() for part, weight in zip(x.split(counts), self.weight)]), None


def compute() -> dict[str, Any]:
    """Output and gradients of this rank, which holds half of the width of each expert."""
    with scenarios.running(["parallel.tp=2"]) as engine:
        group, rank, given = engine.groups.collection.tp, engine.groups.tp_rank, values()
        mine = slice(rank * WIDTH // 2, (rank + 1) * WIDTH // 2)
        bases = [Part(torch.cat([given["gate"][:, mine], given["up"][:, mine]], 1)), Part(given["down"][:, :, mine])]
        layers = []
        for base, weight in zip(bases, WEIGHTS):
            split = Split(
                group=group, by_columns=weight is WEIGHTS[1], sequence_parallel=False, replica=0, experts=range(EXPERTS)
            )
            layers.append(adapted.AdaptedExperts(base, weight, split, LORA))
        with torch.no_grad():
            for shard in adapted.sharded_tensors(layers):
                value = given[shard.key.removeprefix(f"{adapted.PREFIX}experts.*.")]
                shard.data.copy_(value[tuple(slice(o, o + n) for o, n in zip(shard.global_offset, shard.local_shape))])
        x = given["x"].clone().requires_grad_()
        gate, up = layers[0](x, COUNTS)[0].chunk(2, -1)
        output = layers[1](torch.nn.functional.silu(gate) * up, COUNTS)[0]
        output.backward(given["upstream"])
        total, dx = output.detach().clone(), x.grad
        dist.all_reduce(total, group=group)  # as the dispatcher does
        dist.all_reduce(dx, group=group)
        gradients = [(s.key, s.global_offset, s.data.grad.numpy()) for s in adapted.sharded_tensors(layers)]
        return {"output": total.numpy(), "dx": dx.numpy(), "gradients": gradients}  # type: ignore[union-attr]


def test_terms_of_a_sum(ranks: Ranks) -> None:
    """Against one matrix for each expert, to which its adapter is added; one expert has no token."""
    given = {name: value.requires_grad_() for name, value in values().items()}
    gate, up, down = (
        given[name] + SCALE * given[f"{name}.lora_B.weight"] @ given[f"{name}.lora_A.weight"] for name in SIZES
    )
    outputs = [
        (torch.nn.functional.silu(x @ gate[i].t()) * (x @ up[i].t())) @ down[i].t()
        for i, x in enumerate(given["x"].split(COUNTS))
    ]
    output = torch.cat(outputs)
    output.backward(given["upstream"].detach())
    results = ranks(2).run(compute)
    for result in results:
        np.testing.assert_allclose(result["output"], output.detach().numpy(), rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(result["dx"], given["x"].grad.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
        for name, offset, gradient in result["gradients"]:  # those of replicated factors are complete on each rank
            expected = given[name.removeprefix(f"{adapted.PREFIX}experts.*.")].grad
            mine = expected[tuple(slice(o, o + n) for o, n in zip(offset, gradient.shape))]
            np.testing.assert_allclose(gradient, mine.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


def initial(overrides: list[str]) -> dict[str, Any]:
    with scenarios.running(["model.qkv_bias=false", "lora.rank=3", *overrides]) as engine:
        shards = adapted.linear_tensors(engine.chunks)
        return {"factors": [(s.key, s.global_shape, s.global_offset, s.data.detach().numpy().copy()) for s in shards]}


def test_initial_values_are_those_of_one_process(ranks: Ranks) -> None:
    """A is uniform within 1 / sqrt(columns), B is 0; another seed gives other values."""
    expected = whole(ranks(1).run(initial, []), "factors")
    for overrides in (["parallel.tp=2", "parallel.sequence_parallel=true"], ["parallel.pp=2"]):
        found = whole(ranks(2).run(initial, overrides), "factors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name, value in expected.items():
        if name.endswith("lora_B.weight"):
            assert not value.any()
        else:
            assert 0.8 < float(value.abs().max()) * value.shape[1] ** 0.5 <= 1.0 and abs(float(value.mean())) < 0.05
    other = whole(ranks(1).run(initial, ["run.seed=8"]), "factors")
    assert not any(torch.equal(other[name], expected[name]) for name in expected if name.endswith("lora_A.weight"))
