"""What a teacher counts in the objective: by step, by source and by target."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sft.batch import BranchTargets, Microbatch, TeacherTargets
from sft.config import Config
from sft.mcore.loss import Targets
from sft.mcore.loss.mtp import MtpLoss
from sft.mcore.loss.teacher import TeacherWeights
from sft.recipe.load import parse_recipe
from tests.unit.loss_cases import case, microbatch, shard_of

CPU = torch.device("cpu")
RECIPE = """
run: {dir: unused, device: cpu, precision: fp32}
model: {num_layers: 1, hidden_size: 8, ffn_hidden_size: 8, num_attention_heads: 2, init_from: random}
data: {train: {chat: {files: unused}, code: {files: unused}}, seq_length: 32, teacher: {k: 2}}
train: {num_steps: 5, global_batch_size: 1}
optim: {lr: 1e-3}
"""


def config(*overrides: str) -> Config:
    return parse_recipe(RECIPE, "tests", list(overrides)).config


def two_documents(teacher: bool = True) -> Microbatch:
    """Four tokens, of which 0, 1 and 3 are supervised; documents of source 1 and 0; token 1 has no teacher."""
    mb = microbatch(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0.5, 1.0, 0.0, 2.0]]))
    ids = torch.tensor([[1, 2], [-1, -1], [3, 4], [5, -1]]).int()
    return replace(
        mb,
        documents=torch.tensor([[0, 0, 1, 1]]).int(),
        sources=np.array([1, 0], dtype=np.int32),
        teacher=TeacherTargets(ids=ids, logprobs=torch.full((4, 2), -1.0)) if teacher else None,
    )


@pytest.mark.parametrize("step, weight", [(0, 1.0), (1, 1.5), (3, 2.5), (4, 3.0), (9, 3.0)])
def test_the_weight_of_a_step(step: int, weight: float) -> None:
    """From 1 to 3 in four steps, with temperature 2: the factor has 2^2; source code counts half."""
    keys = ["weight=3.0", "start_weight=1.0", "ramp_steps=4", "temperature=2.0", "by_source={code: 0.5}"]
    weights = TeacherWeights(config(*(f"loss.distill.{key}" for key in keys)))
    mb = two_documents()
    weights.begin(step)
    found, evaluated = (weights.of_tokens(mb, training=training) for training in (True, False))
    assert found is not None and found.tolist() == [2 * weight, 2 * weight, 4 * weight, 4 * weight]
    assert evaluated is not None and evaluated.tolist() == [12.0] * 4
    assert weights.of_tokens(two_documents(teacher=False), training=True) is None


def test_without_a_ramp_each_step_has_the_same_weight() -> None:
    distill = config("loss.distill.weight=0.5").loss.distill
    assert [distill.weight_at(step) for step in (0, 7)] == [0.5, 0.5] and distill.is_on
    falling = config(*(f"loss.distill.{key}" for key in ("start_weight=1.0", "ramp_steps=2"))).loss.distill
    assert [falling.weight_at(step) for step in range(4)] == [1.0, 0.5, 0.0, 0.0] and falling.is_on
    assert not config().loss.distill.is_on


def test_a_token_counts_with_the_weights_of_all_its_targets() -> None:
    """Token 3 has two labels, of weights 2 and 0.25; a supervised token without a teacher counts 0."""
    table = BranchTargets(
        rows=np.array([1, 3]),
        labels=np.array([9, 9]),
        weights=np.array([4.0, 0.25], dtype=np.float32),
        counts=np.ones(2, dtype=np.int32),
    )
    found = Targets.of(replace(two_documents(), further=table), CPU, torch.tensor([1.0, 1.0, 1.0, 10.0])).teacher
    assert found is not None
    assert found.weights.tolist() == [0.5, 0.0, 22.5]
    assert found.ids.tolist() == [[1, 2], [-1, -1], [5, -1]] and found.is_known.tolist() == [True, False, True]
    plain = Targets.of(two_documents(), CPU).teacher  # a teacher that is only measured
    assert plain is not None and plain.weights.tolist() == [0.0, 0.0, 0.0]
    assert Targets.of(two_documents(teacher=False), CPU, torch.ones(4)).teacher is None


def test_multi_token_prediction_has_no_teacher(group: dist.ProcessGroup) -> None:
    """Its term is that of the labels alone, with their full weight."""
    c = case()
    second = torch.roll(c.labels, -1)
    mb = replace(microbatch(c.labels, c.weights), second_labels=second, second_mask=c.weights > 0)
    mb = replace(mb, teacher=TeacherTargets(ids=torch.zeros(23, 1).int(), logprobs=torch.full((23, 1), -0.1)))
    terms = []
    for keys in ([], ["loss.distill.weight=0.5", "loss.distill.label_weight=0.0"]):
        block = MtpLoss(config(*keys))
        block.set_scale(1.0, 1.0)
        terms.append(float(block.term(c.hidden, shard_of(c.weight, group), mb)))
    assert terms[0] == terms[1] > 0
