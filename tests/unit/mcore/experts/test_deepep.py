"""What DeepEP is given, with a recorder in place of its dispatch: padding goes to no expert."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from sft.mcore.experts.layer import ExpertLayer

EXPERTS, TOP_K, RANKS, TOKENS, WIDTH = 128, 8, 32, 4096, 4
PADDING = 0.025


class Recorder:
    """Keeps the indices that DeepEP gets; the experts of all ranks return each token times its weights."""

    def dispatch(self, tokens: Tensor, indices: Tensor, weights: Tensor, *unused: Any, **options: Any) -> Any:
        self.indices = indices
        return tokens, indices, weights, torch.bincount(indices[indices >= 0], minlength=EXPERTS), None


def layer_of(recorder: Recorder) -> Any:
    config: Any = SimpleNamespace(
        moe_router_dtype="fp32", moe_expert_capacity_factor=None, moe_permute_fusion=False,
        moe_flex_dispatcher_num_sms=None, moe_deepep_num_sms=20,
    )  # fmt: skip
    with (
        mock.patch.object(token_dispatcher, "fused_dispatch", recorder.dispatch),
        mock.patch.object(token_dispatcher, "set_deepep_num_sms", lambda count: None),
    ):
        manager = token_dispatcher._DeepepManager(
            group=None, num_local_experts=EXPERTS, router_topk=TOP_K, num_experts=EXPERTS, config=config
        )
    flex: Any = token_dispatcher.MoEFlexTokenDispatcher.__new__(token_dispatcher.MoEFlexTokenDispatcher)
    flex._comm_manager = manager
    flex.dispatch_postprocess = lambda tokens, weights: (tokens, None, weights)
    flex.combine_preprocess = lambda output: output
    layer: Any = ExpertLayer.__new__(ExpertLayer)
    torch.nn.Module.__init__(layer)
    layer.token_dispatcher = flex

    def preprocess(tokens: Tensor, weights: Tensor, sent: Tensor) -> Any:
        manager.setup_metadata(sent, weights)
        return tokens, manager.token_probs

    layer.preprocess = preprocess
    layer.dispatch = lambda tokens, weights: (manager.dispatch(tokens), weights)
    layer._compute = lambda tokens, counts, weights: tokens * weights.sum(1)[:, None]
    layer.combine, layer.postprocess = (lambda output: output), (lambda output, shared: output)
    return layer


@pytest.fixture
def routing() -> tuple[Tensor, Tensor]:
    """Weights and choices, balanced: token n has the experts from 8 n; every 40th token is padding."""
    weights = torch.zeros(TOKENS, EXPERTS)
    experts = (torch.arange(TOKENS)[:, None] * TOP_K + torch.arange(TOP_K)) % EXPERTS
    weights.scatter_(1, experts, 0.125)
    sent = weights > 0
    weights[torch.arange(0, TOKENS, round(1 / PADDING))] = 0.0
    return weights, sent


def test_padding_goes_to_no_expert(routing: tuple[Tensor, Tensor]) -> None:
    """Without the mask the slowest of 32 ranks would have 1.8 times the mean: 103 rows more for 8 of 128 experts."""
    recorder, (weights, sent) = Recorder(), routing
    layer = layer_of(recorder)
    tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    with mock.patch.object(token_dispatcher, "fused_dispatch", recorder.dispatch):
        output = layer._mixed(tokens, (weights, sent), None)
    is_padding = weights.sum(1) == 0
    assert bool((recorder.indices[is_padding] == -1).all())
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, recorder.indices.clamp(min=0), True)
    assert torch.equal(chosen[~is_padding], sent[~is_padding]), "real tokens go to the chosen experts"
    by_rank = torch.bincount(recorder.indices[recorder.indices >= 0] // (EXPERTS // RANKS), minlength=RANKS)
    assert float(by_rank.max() / by_rank.double().mean()) < 1.1
    assert torch.equal(output[~is_padding], tokens[~is_padding]) and not output[is_padding].any()
