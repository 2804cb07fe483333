"""Parts of a Gated DeltaNet layer: the gated norm, decays, and the order of its weights in a checkpoint."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sft.mcore.linear_attention import token_blocks
from sft.mcore.linear_attention.gated_norm import _GatedNorm, gated
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.mcore.model import recurrent_layer
from sft.parallel.cp_group import CpGroup
from tests.builders import layout_config

EPS = 1e-6


def reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The computation of Qwen3NextRMSNormGated in transformers."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed * gate * torch.sigmoid(gate)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in ((5, 3, 10), (5, 3, 10), (10,))]


@pytest.mark.parametrize("tokens", [1, 2, 1000], ids="{} tokens a block".format)
def test_the_gated_norm_and_its_gradients_in_float64(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setitem(token_blocks.BLOCK_NUMBERS, "cpu", 2 * tokens * 3 * 10)
    x, gate, weight = inputs(torch.float64)
    out, shrink = _GatedNorm.apply(x, gate, weight, EPS)
    expected = reference(x, gate, weight)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    grad = torch.randn_like(out)
    own, theirs = (torch.autograd.grad(result, (x, gate, weight), grad) for result in (out, expected))
    for a, b in zip(own, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert torch.equal(gated(x, gate, weight, shrink), out)  # what backward recomputes


def test_the_gated_norm_of_no_tokens() -> None:
    x, gate, weight = (tensor[:0] if tensor.dim() == 3 else tensor for tensor in inputs(torch.float32))
    out, shrink = _GatedNorm.apply(x, gate, weight, EPS)
    (dweight,) = torch.autograd.grad(out, weight, torch.zeros_like(out))
    assert (out.shape, shrink.shape, dweight.tolist()) == ((0, 3, 10), (0, 3, 1), [0.0] * 10)


def test_the_gated_norm_computes_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 blocks of 8 tokens: neither forward nor backward makes an fp32 copy of a bf16 tensor for all tokens at
    once."""
    monkeypatch.setitem(token_blocks.BLOCK_NUMBERS, "cpu", 2 * 8 * 4 * 16)
    x, gate, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((512, 4, 16), (512, 4, 16), (16,)))
    sizes = list[int]()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                sizes.append(out.numel())
            return out

    with Sizes():
        out, _ = _GatedNorm.apply(x, gate, weight, EPS)
        forward = len(sizes)
        out.backward(torch.ones_like(out))
    assert max(sizes[:forward]) == max(sizes[forward:]) == 512 * 4  # the factor of every head; its gradient; zeros
    assert sizes[:forward].count(8 * 4 * 16) >= 64 and sizes[forward:].count(8 * 4 * 16) >= 64  # blocks


def test_the_gated_norm_rounds_bf16_once() -> None:
    x, gate, weight = inputs(torch.bfloat16)
    out, _ = _GatedNorm.apply(x, gate, weight, EPS)
    exact = reference(*(tensor.double() for tensor in (x, gate, weight)))
    assert torch.equal(out, exact.to(torch.bfloat16))


def test_decays_are_computed_in_fp32() -> None:
    """A log-decay of -1e-3 in bf16 would be wrong by up to 4e-6, and a state after 1,000 tokens by 0.4%."""
    torch.manual_seed(0)
    a, a_log, bias = (torch.randn(*shape).bfloat16() for shape in ((64, 3), (3,), (3,)))
    g = TorchDeltaKernel().log_decay(a, a_log, bias)
    exact = -a_log.double().exp() * torch.log1p((a.double() + bias.double()).exp())
    assert g.dtype == torch.float32 and (g <= 0).all()
    torch.testing.assert_close(g.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_rows_of_each_part(rank: int) -> None:
    """Each of two ranks has half of q [4], half of k [4] and half of v [8], not half of the 16 rows; layers are not
    stacked."""
    data = torch.arange(24.0).view(8, 3)
    shard = ShardedTensor(
        key="conv1d.weight",
        data=data,
        dtype=data.dtype,
        local_shape=(8, 3),
        global_shape=(16, 3),
        global_offset=(8 * rank, 0),
        axis_fragmentations=(2, 1),
    )
    parts: Any = recurrent_layer._by_part(shard, {"query": 2, "key": 2, "value": 4}).build()
    described = [(part.key, part.global_shape, part.global_offset) for part in parts]
    assert described == [
        ("conv1d.weight.query", (4, 3), (2 * rank, 0)),
        ("conv1d.weight.key", (4, 3), (2 * rank, 0)),
        ("conv1d.weight.value", (8, 3), (4 * rank, 0)),
    ]
    assert torch.equal(torch.cat([part.data for part in parts]), data)
    assert all(part.data.untyped_storage().data_ptr() == data.data_ptr() for part in parts)


def test_a_microbatch_is_scheduled_once_for_the_heads_of_one_rank() -> None:
    """tp 2: two of four value heads.  256 chunks of two heads fill a block, so 300 documents make two groups."""
    linear = {"layers": [1], "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
    config = layout_config(model={"linear_attention": linear}, parallel={"tp": 2})
    backend: Any = SimpleNamespace(config=config, kernels={"linear attention": TorchDeltaKernel()})
    boundaries = np.arange(0, 301 * 64, 64, dtype=np.int32)
    made: Any = recurrent_layer.documents(
        "linear attention", backend, boundaries, CpGroup(1, 0, None), torch.device("cpu")
    )
    assert [group.num_fragments for group in made.schedule.groups] == [256, 44]
    assert made.kernel is backend.kernels["linear attention"]
