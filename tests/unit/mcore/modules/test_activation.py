"""Activations: values and gradients equal those of transformers, and only the output of linear_fc1 is saved."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from sft.mcore.modules.activation import Activation
from tests.builders import RECIPE, parsed, refusal_lines

FLOAT64 = dict(rtol=1e-12, atol=1e-12)  # both sides compute in float64
LIMIT, ALPHA, ROWS, WIDTH = 0.7, 1.702, 40, 6  # half of the gate and up values exceed the limit


def geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    output: Tensor = ACT2FN["gelu_pytorch_tanh"](gate) * up
    return output


def clamped_swiglu(x: Tensor) -> Tensor:
    experts: Any = SimpleNamespace(limit=LIMIT, alpha=ALPHA)
    interleaved = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    return GptOssExperts._apply_gate(experts, interleaved)


def limited_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate).clamp(max=LIMIT) * up.clamp(-LIMIT, LIMIT)  # Step3p7Experts._apply_gate


KINDS = {
    "geglu": (Activation(kind="geglu", limit=None, alpha=None), geglu),
    "clamped_swiglu": (Activation(kind="clamped_swiglu", limit=LIMIT, alpha=ALPHA), clamped_swiglu),
    "swiglu": (Activation(kind="swiglu", limit=LIMIT, alpha=None), limited_swiglu),
    "relu2": (Activation(kind="relu2", limit=None, alpha=None), ACT2FN["relu2"]),
}


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output of linear_fc1, its bias, weights of rows in at least fp32, and a gradient, as wide as the output."""
    generator = torch.Generator().manual_seed(7)
    shapes = (ROWS, 2 * WIDTH), (2 * WIDTH,), (ROWS,), (ROWS, 2 * WIDTH)
    x, bias, weights, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_(), weights.to(wide).requires_grad_(), grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias, is_weighted", [(False, False), (True, True)])
def test_values_and_gradients_are_those_of_transformers(kind: str, has_bias: bool, is_weighted: bool) -> None:
    compute, reference = KINDS[kind]
    results = []
    for is_reference in (False, True):
        x, bias, weights, grad = operands(torch.float64)
        if is_reference:
            output = reference(x + bias if has_bias else x) * (weights[:, None] if is_weighted else 1.0)
        else:
            output = compute(x, bias if has_bias else None, weights if is_weighted else None)
        output.backward(grad[:, : output.shape[1]])
        results.append((output, x.grad, bias.grad, weights.grad))
    for computed, expected in zip(*results, strict=True):
        assert (computed is None) is (expected is None)
        if expected is not None:
            torch.testing.assert_close(computed, expected, **FLOAT64)


def test_written_out() -> None:
    """limit 2, alpha 1: gate 3 is clamped to 2, up -5 to -2; (-2 + 1) * 2 * sigmoid(2).  Then gelu(1) * 2; squares."""
    clamped = Activation(kind="clamped_swiglu", limit=2.0, alpha=1.0)
    assert clamped(torch.tensor([[3.0, -5.0]])).item() == pytest.approx(-2 * 0.880797, abs=1e-5)
    limited = Activation(kind="swiglu", limit=0.5, alpha=None)
    assert limited(torch.tensor([[3.0, -5.0]])).item() == -0.25  # silu(3) = 2.86 and -5 are beyond the limit
    assert KINDS["geglu"][0](torch.tensor([[1.0, 2.0]])).item() == pytest.approx(2 * 0.841192, abs=1e-5)
    assert KINDS["relu2"][0](torch.tensor([[3.0, -5.0]])).tolist() == [[9.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_computed_in_fp32_and_rounded_once(kind: str) -> None:
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        narrow, bias, weights, grad = operands(torch.bfloat16)
        x, b = (tensor.detach().to(dtype).requires_grad_() for tensor in (narrow, bias))
        output = KINDS[kind][0](x, b, weights)
        assert output.dtype is dtype
        output.backward(grad[:, : output.shape[1]].bfloat16().to(dtype))
        results.append((output, x.grad, b.grad, weights.grad))
    for low, high in zip(*results, strict=True):
        assert torch.equal(low, high.to(low.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_output_of_linear_fc1_is_saved(kind: str) -> None:
    saved: list[int] = []
    x, bias, weights, _ = operands(torch.bfloat16)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        KINDS[kind][0](x, bias, weights)
    assert saved == [x.data_ptr(), bias.data_ptr(), weights.data_ptr()]


def test_the_keys_of_the_activation_fit_together() -> None:
    alone = refusal_lines(RECIPE, "model.activation_limit=7")
    assert any("model.activation_limit" in line and "has no effect" in line for line in alone)
    without = refusal_lines(RECIPE, "model.activation=clamped_swiglu", "model.activation_alpha=1.702")
    assert any("model.activation_limit" in line and "is required" in line for line in without)
    assert parsed("model.activation=geglu").config.model.activation == "geglu"
