"""A second witness of the divergence: the loss of megatron-core 0.19, from all logits and a teacher's list."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from sft.batch import TeacherTargets
from sft.config import LossConfig
from sft.config.distill import DistillConfig
from sft.mcore.loss import lm_loss
from tests.ranks import megatron_lm
from tests.unit.loss_cases import EACH, GRADIENT_TOLERANCE, LOSS_TOLERANCE, TOKENS, VOCAB, case, error, shard_of

K = 5


@pytest.mark.skipif(not megatron_lm.HAS_TRAINING, reason="megatron.training comes with core 0.19")
@pytest.mark.parametrize("loss", EACH, ids=lambda loss: loss.impl)
def test_a_forward_divergence_with_a_bucket_is_that_of_core(loss: LossConfig, group: dist.ProcessGroup) -> None:
    from megatron.training.distillation.cached_logits_loss import topk_kl_div

    generator = torch.Generator().manual_seed(2)
    top = torch.randn(TOKENS, VOCAB, generator=generator).log_softmax(-1).topk(K)
    c = replace(
        case(list(range(TOKENS))), teacher=TeacherTargets(top.indices.int(), top.values), factors=torch.ones(TOKENS)
    )
    c = replace(c, weights=torch.ones(1, TOKENS))
    weight = c.weight[:VOCAB].clone().requires_grad_()
    logits = (c.hidden @ weight.t()).clone()  # core overwrites its input
    of_core = topk_kl_div(
        logits, top.values[:, None], top.indices[:, None], tp_size=1, tp_rank=0, tp_group=group, add_ghost_token=True
    )
    of_core.sum().backward()
    leaf = c.weight[:VOCAB].clone().requires_grad_()
    config = loss.model_copy(update={"distill": DistillConfig(weight=1.0, label_weight=0.0)})
    total, rows = lm_loss(c.hidden, shard_of(leaf, group), c.targets(), config)
    total.backward()
    assert rows.divergence is not None and leaf.grad is not None and weight.grad is not None
    assert error(rows.divergence, of_core.detach().flatten()) <= LOSS_TOLERANCE
    assert error(leaf.grad, weight.grad) <= GRADIENT_TOLERANCE
