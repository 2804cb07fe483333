"""Ten steps with Muon in fp32 equal those of AdamW and a float64 Muon on the gradients of transformers and of PEFT."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import test_lora
from tests.ranks.hf_models import ADAMW, SHORT, backward, packs_of, stored_gradients
from tests.ranks.layouts import EP, PP, SHARDED, SP
from tests.ranks.peft_models import lora_recipe, peft_model, steps, trained_of, whole
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters
from tests.ranks.test_freeze import recipe, stored, train
from tests.ranks.test_muon import float64_muon
from tests.unit.fixtures import hf

MUON = ["optim.name=muon", "optim.muon.ns_dtype=fp32"]
STEPS = 10
STEP_TOLERANCE = 1e-5  # relative to a weight's norm: gradients of two implementations, amplified by Newton-Schulz
RATE, DECAY = 1e-3, 0.1  # of ADAMW


class MuonAndAdamW:
    """Muon in float64 for the matrices of layers of a transformers or PEFT model, torch's AdamW for the rest."""

    def __init__(self, model: Any) -> None:
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        own = {name for name, param in trained.items() if ".layers." in name and param.dim() > 1}
        own = {name for name in own if not name.endswith("mlp.gate.weight")}  # routers
        others = [param for name, param in trained.items() if name not in own]
        settings = [{"params": [param], "weight_decay": DECAY if param.dim() > 1 else 0.0} for param in others]
        self.adam = torch.optim.AdamW(settings, lr=RATE, betas=(0.9, 0.95), eps=1e-8) if others else None
        self.matrices = [pair for name in own for pair in matrices(name, trained[name])]
        self.wide = [weight().double() for weight, _ in self.matrices]
        self.momenta = [torch.zeros_like(wide) for wide in self.wide]

    def step(self) -> None:
        if self.adam is not None:
            self.adam.step()
        for number, (weight, grad) in enumerate(self.matrices):
            momentum, wide = self.momenta[number], self.wide[number]
            self.momenta[number], self.wide[number] = float64_muon(momentum, wide, grad().double(), RATE, DECAY)
            weight().copy_(self.wide[number])


def matrices(name: str, param: Any) -> Iterator[Any]:
    """Functions that return a matrix of a parameter, and its gradient.  transformers stacks experts, gate above up."""
    if param.dim() == 2:
        yield lambda: param.detach(), lambda: param.grad
        return
    height = param.shape[1]
    parts = [(0, height // 2), (height // 2, height)] if name.endswith("gate_up_proj") else [(0, height)]
    for expert in range(len(param)):
        for a, b in parts:
            yield (lambda e=expert, a=a, b=b: param.detach()[e, a:b]), (lambda e=expert, a=a, b=b: param.grad[e, a:b])


@pytest.mark.parametrize(
    "family,overrides",
    [("qwen3", [*SP, *SHARDED]), ("qwen3_moe", [*EP, *SHARDED]), ("deepseek_v3", PP)],
    ids=str,
)
def test_ten_steps_are_those_of_transformers(ranks: Ranks, tmp_path: Path, family: str, overrides: list[str]) -> None:
    source = hf.save(tmp_path / "source", family)
    model = hf.load(source).eval()
    before = stored_gradients(model, lambda param: param.detach())
    optimizer, samples = MuonAndAdamW(model), [sample for pack in packs_of(SHORT) for sample in pack]
    for _ in range(STEPS):
        backward(model, samples)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    results = ranks(2).run(train, [*recipe(source, []), *MUON, *overrides], str(source))
    after: dict[str, Tensor] = stored_gradients(model, lambda param: param.detach())
    found = stored(results, "weights", source)
    check_parameters({name: found[name] for name in after}, after, STEP_TOLERANCE)
    assert all(float((after[name] - before[name]).norm() / before[name].norm()) > 1e-3 for name in after)


def test_ten_steps_are_those_of_peft(ranks: Ranks, tmp_path: Path) -> None:
    source = hf.save(tmp_path / "source", "qwen3")
    model, values = peft_model(source, "all-linear")
    packs = packs_of(SHORT)
    overrides = [*lora_recipe(source, "all-linear"), *ADAMW, *MUON, *SP, *SHARDED]
    results = ranks(2).run(test_lora.train, overrides, str(source), values, packs)
    steps(model, packs, STEPS, MuonAndAdamW(model))
    check_parameters(whole(results, "factors"), trained_of(model), STEP_TOLERANCE)
