"""A Mamba-2 layer computes what NemotronHMamba2Mixer of transformers does, forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig
from transformers.models.nemotron_h import modeling_nemotron_h

from sft.mcore.linear_attention.documents import LinearDocuments
from sft.mcore.linear_attention.grouped_norm import GroupedNorm
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel
from sft.mcore.model.mamba import Mamba2
from sft.parallel.cp_group import CpGroup

HEADS, GROUPS, P, N, HIDDEN = 6, 2, 5, 8, 16
INNER = HEADS * P
TOLERANCE = 1e-11  # relative to the largest value, in float64


def theirs() -> Any:
    config = NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["linear_attention"],
        mamba_num_heads=HEADS,
        mamba_head_dim=P,
        n_groups=GROUPS,
        ssm_state_size=N,
        chunk_size=16,
        time_step_min=0.5,  # so large that some time steps are raised to it
        num_attention_heads=2,
    )
    mixer, generator = modeling_nemotron_h.NemotronHMamba2Mixer(config, layer_idx=0).double(), torch.Generator()
    with torch.no_grad():
        for weight in mixer.parameters():  # nothing at its neutral value
            noise = torch.randn(weight.shape, generator=generator.manual_seed(weight.numel()), dtype=torch.float64)
            weight.copy_(0.3 * noise + (weight.dim() == 1))
    return mixer


@contextmanager
def in_float64() -> Iterator[None]:
    """What transformers computes in fp32 for any input is computed in float64."""
    with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(Tensor, "float", Tensor.double):
        yield


def ours(mixer: Any, projected: Tensor, lengths: list[int]) -> Tensor:
    """`Mamba2.mixed` with the weights of `mixer`, on packed documents, and the output projection."""
    edges = np.cumsum([0, *lengths])
    cpu, cp = torch.device("cpu"), CpGroup(1, 0, None)
    documents = LinearDocuments.of(edges, cp, cpu, TorchSsdKernel(), heads=HEADS, num_taps=4, max_short=0)
    norm = GroupedNorm(INNER, GROUPS, mixer.norm.variance_epsilon, torch.float64)
    norm.weight = mixer.norm.weight
    layer = SimpleNamespace(
        _widths=[INNER, INNER, GROUPS * N, GROUPS * N, HEADS],
        _head_dim=P,
        _state_dim=N,
        _limits={"low": 0.5, "high": None},
        conv1d={"weight": mixer.conv1d.weight, "bias": mixer.conv1d.bias},
        norm=norm,
        **{name: getattr(mixer, name) for name in ("A_log", "D", "dt_bias")},
    )
    packed = SimpleNamespace(attend=lambda caller, function, inputs: function(*inputs))
    mixed: Any = Mamba2.mixed
    return mixer.out_proj(mixed(layer, projected, documents, packed))


@pytest.mark.parametrize("lengths", [[50], [1, 70, 3]], ids=str)
def test_outputs_and_gradients_are_those_of_transformers(lengths: list[int]) -> None:
    """Also of each document of a pack as if it was alone."""
    mixer = theirs()
    hidden = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    with in_float64():
        expected = torch.cat([mixer(x[None])[0] for x in hidden.split(lengths)])
    assert expected.dtype == torch.float64
    found = ours(mixer, mixer.in_proj(hidden), lengths)
    leaves = [hidden, *mixer.parameters()]
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).double()
    gradients = [torch.autograd.grad(out, leaves, grad) for out in (found, expected)]
    for x, reference in zip([found, *gradients[0]], [expected, *gradients[1]], strict=True):
        assert float(((x - reference).abs().max() / reference.abs().max()).detach()) < TOLERANCE
