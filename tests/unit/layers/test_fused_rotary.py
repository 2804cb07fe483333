"""The longest pack that Transformer Engine's fused rotary kernel can rotate, and the code that rotates longer packs."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft.cli import main
from sft.layers import fused_rotary
from sft.mcore.attention.rope import Rotation
from sft.mcore.backends import transformer_engine
from sft.mcore.backends.selection import choose
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup
from tests.builders import RECIPE, parsed

QWEN = ["model.num_attention_heads=16", "model.num_query_groups=8", "model.head_dim=128", "model.qk_norm=true"]
LLAMA_8B = ["model.num_attention_heads=32", "model.num_query_groups=8", "model.head_dim=128", "model.qk_norm=false"]


@pytest.mark.parametrize(
    "model, stride, most",
    [
        (QWEN, 2_048, 1_048_576),  # 0.6B and 1.7B: 16 x 128 queries, written by the norm
        (LLAMA_8B, 6_144, 349_525),  # (32 + 8 + 8) x 128: keys are a view of the projection's output
        ([*LLAMA_8B, "parallel.tp=2"], 3_072, 699_050),
        ([*LLAMA_8B, "model.qk_norm=true"], 4_096, 524_288),  # Qwen3-8B
    ],
)
def test_stride_and_longest_pack(model: list[str], stride: int, most: int) -> None:
    def why_not(seq_length: int) -> str | None:
        return fused_rotary.why_not(parsed(*model, "data.doc_multiple=1", f"data.seq_length={seq_length}").config)

    assert fused_rotary.token_stride(parsed(*model).config) == stride
    assert most * stride <= 2_147_483_648 < (most + 1) * stride
    assert why_not(most) is None
    assert why_not(most + 1) == (
        f"rotary embedding in plain torch: {most + 1:,} tokens of a rank x {stride:,} elements exceed the int32 "
        f"offsets of Transformer Engine's fused kernel, which rotates at most {most:,} tokens"
    )


def test_only_the_tokens_of_a_rank_count() -> None:
    """2,097,152 tokens over two ranks are 1,048,576 tokens on each rank."""
    assert fused_rotary.why_not(parsed(*QWEN, "data.seq_length=2097152", "parallel.cp=2").config) is None
    assert fused_rotary.why_not(parsed(*QWEN, "data.seq_length=2097152", "parallel.cp=1").config) is not None


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that Transformer Engine is installed."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(transformer_engine, "check_release", lambda config: None)


@pytest.mark.parametrize("seq_length, rotates", [(1_048_576, False), (1_048_608, True)])
def test_who_rotates(te: None, seq_length: int, rotates: bool) -> None:
    """megatron-core rotates with a table of angles, or attention rotates with the positions of this rank's tokens; the
    log says which."""
    backend = choose(parsed(*QWEN, f"data.seq_length={seq_length}").config, "cuda")
    positions, boundaries = torch.tensor([[0, 1, 0, 1]]), torch.tensor([0, 2, 4], dtype=torch.int32)
    documents = backend.documents(boundaries, 2, positions, CpGroup(1, 0, None))
    assert (backend.rotary_table(torch.device("cpu")) is None) == rotates
    assert (documents.rotation is not None) == rotates
    assert backend.transformer_fields["apply_rope_fusion"] != rotates
    assert str(backend).startswith("te (Transformer Engine; rotary embedding in plain torch: " if rotates else "te (T")
    assert ("1,048,608 tokens of a rank" in str(backend)) == rotates


def test_transformer_engine_has_no_branches(te: None) -> None:
    backend = choose(parsed(*QWEN).config, "cuda")
    positions, boundaries = torch.tensor([[0, 1, 1, 2]]), torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(AssertionError, match="attention of te has no branches"):
        backend.documents(boundaries, 3, positions, CpGroup(1, 0, None), Branches.of([-1, 0], [0, 1]))


def test_with_dynamic_cp_core_gets_the_group_of_each_pack(te: None) -> None:
    """Without a group and a size, megatron-core would use the group of the previous pack.  Its fused rotary kernel
    would use the cp group of the run, so attention rotates."""
    backend = choose(parsed(*QWEN, "parallel.cp=2", "parallel.dynamic_cp=true").config, "cuda")
    assert backend.attention_rotates and "uses the cp group of the run" in str(backend)
    positions, boundaries, members = torch.tensor([[0, 1]]), torch.tensor([0, 4], dtype=torch.int32), object()
    found = []
    for cp in (CpGroup(1, 0, None), CpGroup(2, 1, members), CpGroup(1, 0, None)):
        documents = backend.documents(boundaries, 4, positions, cp)
        found.append((documents.cp_group, documents.local_cp_size))
    assert found == [(None, 1), (members, 2), (None, 1)]
    fixed = choose(parsed(*QWEN, "parallel.cp=2").config, "cuda")
    documents = fixed.documents(boundaries, 4, positions, CpGroup(2, 1, members))
    assert (documents.cp_group, documents.local_cp_size) == (None, None)


class Recorder:
    """Replaces Transformer Engine's attention: returns its arguments."""

    def __init__(self, *, layer_number: int, softmax_scale: float) -> None:
        self.scale = softmax_scale

    def forward(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        return *given, named


@pytest.mark.parametrize("layer, skips", [(1, False), (2, True)])
def test_queries_and_keys_are_rotated_before_attention(layer: int, skips: bool) -> None:
    """The angle is a quarter turn: cosine 0 and sine 1 turn (1, 2) into (-2, 1).  Values stay.  Queries are doubled.

    Layer 2 has no rotary positions, and the scale of a model without positions: 1 / sqrt(128).
    """
    rotation = Rotation(cos=torch.zeros(1, 1, 2), sin=torch.ones(1, 1, 2), query_scale=torch.full((1, 1, 1), 2.0))
    x, packed = torch.tensor([[[1.0, 2.0]]]), SimpleNamespace(rotation=rotation)
    attention = transformer_engine.rotating(Recorder, parsed(*QWEN, "model.rope.skip_layers=[2]").config.model)
    module = attention(layer_number=layer, softmax_scale=0.5)
    query, key, value, mask, named = module.forward(
        x, 2 * x, 3 * x, None, attn_mask_type="padding_causal", packed_seq_params=packed
    )
    assert query.tolist() == ([[[1.0, 2.0]]] if skips else [[[-4.0, 2.0]]])
    assert key.tolist() == ([[[2.0, 4.0]]] if skips else [[[-4.0, 2.0]]]) and value.tolist() == [[[3.0, 6.0]]]
    assert mask is None and named == {"attn_mask_type": "padding_causal", "packed_seq_params": packed}
    assert module.scale == (pytest.approx(0.0883883) if skips else 0.5)


@pytest.mark.parametrize(
    "overrides, says", [([], True), (["attention.backend=portable"], False), (["run.device=cpu"], False)]
)
def test_check_says_it(tmp_path: Any, capsys: pytest.CaptureFixture[str], overrides: list[str], says: bool) -> None:
    """The message appears if the run may use Transformer Engine."""
    (tmp_path / "a.yaml").write_text(RECIPE)
    assert main(["check", f"{tmp_path}/a.yaml", "--no-data", *QWEN, "data.seq_length=1048608", *overrides]) == 0
    printed = capsys.readouterr().out
    assert ("rotary  with te: rotary embedding in plain torch: 1,048,608 tokens" in printed) == says
