"""Routing by sigmoid scores, compared with literals; logits, sums over documents, and biases."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sft.config import MoeConfig
from sft.mcore.experts import router
from sft.mcore.experts.documents import TokenDocuments

# Logits whose sigmoids are SCORES.
SCORES = torch.tensor([[0.6, 0.5, 0.2, 0.1], [0.1, 0.3, 0.8, 0.7]], dtype=torch.float64)
LOGITS = torch.logit(SCORES)
BIAS = torch.tensor([-0.3, 0.0, 0.25, 0.0])


def moe(**fields: Any) -> MoeConfig:
    return MoeConfig(num_experts=4, top_k=2, score_function="sigmoid", **fields)


@pytest.mark.parametrize(
    "fields,bias,weights",
    [
        # The chosen scores are 0.6 and 0.5 for the first token, 0.8 and 0.7 for the second
        ({}, None, [[6 / 11, 5 / 11, 0, 0], [0, 0, 8 / 15, 7 / 15]]),
        ({"normalize_top_k": False}, None, [[0.6, 0.5, 0, 0], [0, 0, 0.8, 0.7]]),
        ({"normalize_top_k": False, "scaling_factor": 2.5}, None, [[1.5, 1.25, 0, 0], [0, 0, 2.0, 1.75]]),
        # With the bias, scores are 0.3 0.5 0.45 0.1 and -0.2 0.3 1.05 0.7; weights come from the scores without bias.
        ({"correction_bias": True}, BIAS, [[0, 5 / 7, 2 / 7, 0], [0, 0, 8 / 15, 7 / 15]]),
        # The best group of the first token is the one with 0.5 + 0.45, scores with the bias, not that with 0.3 + 0.5.
        ({"normalize_top_k": False, "num_groups": 2}, None, [[0.6, 0.5, 0, 0], [0, 0, 0.8, 0.7]]),
    ],
)
def test_weights_of_the_chosen_experts(fields: dict[str, Any], bias: Any, weights: list[list[float]]) -> None:
    routing = router.Routing.of(LOGITS, moe(**fields), bias)
    expected = np.array(weights)
    np.testing.assert_allclose(routing.weights, expected, atol=1e-12)
    np.testing.assert_array_equal(routing.chosen, expected > 0)


def test_a_token_chooses_groups_before_experts() -> None:
    """The group with 0.6 + 0.5 wins over that with 0.9 + 0.1, whose first expert has the largest score of all."""
    logits = torch.logit(torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.3, 0.2]], dtype=torch.float64))
    fields: Any = dict(num_experts=6, top_k=2, score_function="sigmoid", normalize_top_k=False, num_groups=3)
    found = router.Routing.of(logits, MoeConfig(**fields, top_groups=1), None)
    np.testing.assert_allclose(found.weights, [[0, 0, 0.6, 0.5, 0, 0]], atol=1e-12)
    found = router.Routing.of(logits, MoeConfig(**fields, top_groups=2), None)
    np.testing.assert_allclose(found.weights, [[0.9, 0, 0.6, 0, 0, 0]], atol=1e-12)
    swayed = router.Routing.of(logits, MoeConfig(**fields, correction_bias=True), torch.tensor([0, 0, 0, 0, 0.4, 0.4]))
    np.testing.assert_allclose(swayed.weights, [[0, 0, 0, 0, 0.3, 0.2]], atol=1e-12)


def test_the_balancing_loss_is_about_scores_without_bias() -> None:
    """DeepSeek-V3, equations 17 to 20: choices by score without bias, and scores divided by their sum."""
    settings = moe(correction_bias=True, scaling_factor=2.5)
    probabilities, chosen = router.Routing.of(LOGITS, settings, BIAS).balanced(LOGITS, settings)
    np.testing.assert_allclose(probabilities, SCORES / torch.tensor([[1.4], [1.9]]), atol=1e-12)
    np.testing.assert_array_equal(chosen, [[True, True, False, False], [False, False, True, True]])


def test_weights_reach_the_router_and_the_choice_does_not() -> None:
    def weights(logits: torch.Tensor) -> torch.Tensor:
        return router.Routing.of(logits, moe(correction_bias=True, scaling_factor=1.5), BIAS).weights

    assert torch.autograd.gradcheck(weights, LOGITS.clone().requires_grad_())


def test_a_step_of_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias rises if an expert has fewer tokens than the mean, and falls if it has more; each layer has counts of
    its own."""
    routers = [SimpleNamespace(layer_number=n, expert_bias=torch.full((3,), 0.5)) for n in (2, 3)]
    monkeypatch.setattr(router, "_routers", lambda chunks: routers)
    load: Any = SimpleNamespace(chosen=np.array([[6.0, 2.0, 4.0], [1.0, 1.0, 2.0]]), first_layer=1)
    router.update_biases([], load, 0.125)
    assert routers[0].expert_bias.tolist() == [0.375, 0.625, 0.5]
    assert routers[1].expert_bias.tolist() == [0.625, 0.625, 0.375]


def test_the_bias_is_not_rounded_with_the_weights() -> None:
    """bf16 cannot represent 0.03."""
    half = router.Router.__new__(router.Router)
    torch.nn.Module.__init__(half)
    half.weight = torch.nn.Parameter(torch.zeros(3, 2))
    half.register_buffer("expert_bias", torch.full((3,), 0.03))
    half.bfloat16()
    assert half.weight.dtype == torch.bfloat16
    assert half.expert_bias is not None and torch.equal(half.expert_bias, torch.full((3,), 0.03))


def scores(precision: torch.dtype) -> Any:
    torch.manual_seed(3)
    shapes = ((6, 8), (4, 8), (4,))
    inputs = [torch.randn(shape, dtype=precision, requires_grad=True) for shape in shapes]
    return *inputs, router._Logits.apply(*inputs)


def test_scores_are_products_whose_gradient_is_right() -> None:
    tokens, weight, bias, found = scores(torch.float64)
    assert torch.equal(found, tokens @ weight.T + bias)
    assert torch.equal(router._Logits.apply(tokens, weight, None), tokens @ weight.T)
    assert torch.autograd.gradcheck(router._Logits.apply, (tokens, weight, bias))
    tokens, weight, bias, found = scores(torch.bfloat16)
    assert found.dtype == torch.float32
    expected = tokens.detach().float() @ weight.detach().float().T + bias.detach().float()
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-6)
    kept = {saved.dtype for saved in found.grad_fn.saved_tensors}
    assert kept == {torch.bfloat16}  # there is no wide copy of the tokens


def test_a_long_document_is_summed_as_float64_would() -> None:
    """131,072 tokens and 8 experts; sequential sums in fp32 would be wrong by 1e-5."""
    generator = torch.Generator().manual_seed(3)
    odds = (2 * torch.randn(1 << 17, 8, generator=generator)).softmax(1)
    index = torch.ones(1 << 17, dtype=torch.int32)
    index[::7] = 2
    found = router._SumOfRows.apply(odds, index, 4)
    for row, expected in ((0, 0.0), (3, 0.0), (1, odds[index == 1].double().sum(0)), (2, odds[::7].double().sum(0))):
        torch.testing.assert_close(found[row], torch.as_tensor(expected).expand(8).double(), rtol=1e-12, atol=0.0)
    few = odds[:9].double().requires_grad_()
    assert torch.autograd.gradcheck(router._SumOfRows.apply, (few, index[:9], 4))


def test_sums_over_a_text_are_exact() -> None:
    """fp32 has no 2^24 + 1, and TF32, to which a GPU may round, no 2^11 + 1."""
    documents = TokenDocuments(
        torch.zeros(1, dtype=torch.int32), 3, None, torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    )
    assert documents.by_text(torch.tensor([[2.0**24], [1.0], [1.0]])).tolist() == [[2**24 + 2], [2**24]]
