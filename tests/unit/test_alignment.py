"""What packs and widths must be multiples of, FP8 included, and what is said where they are not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.config import Config
from sft.errors import ConfigError
from sft.parallel.alignment import smallest_world
from sft.parallel.layout import Layout
from tests.builders import layout_config

# 32 query heads in 8 groups of 128, as Qwen3-8B: hidden 4096, feed-forward 12,288
QWEN = {
    "num_layers": 36,
    "hidden_size": 4096,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "head_dim": 128,
}


def config(
    *,
    fp8: str | None,
    seq_length: int,
    doc_multiple: int = 32,
    model: dict[str, object] | None = None,
    **parallel: object,
) -> Config:
    return layout_config(
        run={"dir": "runs/a", "fp8": fp8},
        model={**QWEN, **(model or {})},
        data={"seq_length": seq_length, "doc_multiple": doc_multiple},
        parallel=parallel,
    )


def resolved(wanted: Config) -> Layout:
    return Layout.resolve(wanted, smallest_world(wanted))


def told(wanted: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(wanted)
    return str(caught.value)


@pytest.mark.parametrize(
    "fp8, tp, cp, sequence_parallel, doc_multiple, multiple",
    [
        (None, 1, 1, True, 32, 32),
        (None, 4, 4, True, 8, 16),
        (None, 4, 4, False, 8, 8),
        (None, 8, 2, True, 12, 48),
        ("delayed", 1, 4, True, 32, 64),  # 32 of a pack are 8 of a rank: that 16 divides the pack is not enough
        ("delayed", 2, 2, True, 4, 64),
        ("tensorwise", 4, 2, True, 32, 128),
        ("tensorwise", 8, 16, True, 32, 2048),
        ("mxfp8", 2, 4, True, 32, 256),
        ("mxfp8", 4, 3, True, 96, 384),
        ("blockwise", 1, 1, True, 32, 128),
        ("blockwise", 2, 2, True, 12, 1536),
    ],
)
def test_packs(fp8: str | None, tp: int, cp: int, sequence_parallel: bool, doc_multiple: int, multiple: int) -> None:
    size = {"doc_multiple": doc_multiple, "seq_length": multiple}
    layout = resolved(config(fp8=fp8, **size, tp=tp, cp=cp, sequence_parallel=sequence_parallel))
    assert layout.pack_multiple == multiple


LOCAL = {None: 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


@given(
    fp8=st.sampled_from(list(LOCAL)),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.integers(1, 12),
    sequence_parallel=st.booleans(),
    chunks=st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_any_pack_suits_the_kernels(fp8: str | None, tp: int, cp: int, sequence_parallel: bool, chunks: int) -> None:
    """Each rank's tokens are what FP8 takes, as layers keep them; and no smaller multiple would do."""
    document = 2 * cp * chunks
    wanted = config(fp8=fp8, seq_length=2**20, doc_multiple=document, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    ranks = cp * (tp if sequence_parallel else 1)
    try:
        pack = resolved(wanted).pack_multiple
    except ConfigError as error:
        assert str(error).startswith("data.seq_length = 1048576 is not a multiple of")
        pack = int(str(error).split("multiple of ")[1].split(" ")[0])

    def suits(length: int) -> bool:
        return length % ranks == 0 and length // ranks % LOCAL[fp8] == 0

    assert pack % document == 0 and suits(pack)
    assert not any(suits(shorter) for shorter in range(document, pack, document))


def test_a_length_that_fp8_cannot_take() -> None:
    assert told(config(fp8="mxfp8", seq_length=8000, tp=2, cp=2)) == (
        "data.seq_length = 8000 is not a multiple of 128 (doc_multiple 32, cp 2, tp 2 with sequence parallel, 32 "
        "tokens of a rank for fp8 mxfp8).  Nearest that fit: 7936, 8064."
    )
    assert resolved(config(fp8=None, seq_length=8000, tp=2, cp=2)).pack_multiple == 32


def test_the_equation() -> None:
    layout = resolved(config(fp8="mxfp8", seq_length=8192, tp=2, cp=4))
    assert layout.equations(8192)[4:] == [
        "between layers, sequence parallel: 2,048 / tp 2 = 1,024",
        "fp8 mxfp8: 32 tokens of a rank x cp 4 x tp 2 = 256, which divides packs",
        "documents padded to a multiple of 32, packs to a multiple of 256",
    ]
    layout = resolved(config(fp8="blockwise", seq_length=8192, tp=2, cp=4, sequence_parallel=False))
    assert "fp8 blockwise: 128 tokens of a rank x cp 4 = 512, which divides packs" in layout.equations(8192)
    assert not any("fp8" in line for line in resolved(config(fp8=None, seq_length=8192)).equations(8192))


NARROW = {
    "the feed-forward of a tp rank": (
        {"ffn_hidden_size": 1216},  # 152 x 8
        {"tp": 8},
        "run.fp8 = delayed takes weights whose sides are multiples of 16, and here model.ffn_hidden_size / tp = 152.  "
        "Use a tp of 1, 2, 4, or run.fp8=null.",
    ),
    "the hidden size": (
        {"hidden_size": 4104},
        {},
        "run.fp8 = delayed takes weights whose sides are multiples of 16, and here model.hidden_size = 4,104.  "
        "Use run.fp8=null.",
    ),
    "narrow heads": (
        {"num_attention_heads": 14, "num_query_groups": 2, "head_dim": 12},
        {},
        "run.fp8 = delayed takes weights whose sides are multiples of 16, and here num_attention_heads x head_dim / "
        "tp = 168, (num_attention_heads + 2 x num_query_groups) x head_dim / tp = 216.  Use run.fp8=null.",
    ),
    "an expert": (
        {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}},
        {},
        "run.fp8 = delayed takes weights whose sides are multiples of 16, and here the width of an expert / etp = 24.  "
        "Use run.fp8=null.",
    ),
}


@pytest.mark.parametrize("model, parallel, message", NARROW.values(), ids=NARROW.keys())
def test_widths_that_fp8_cannot_take(model: dict[str, object], parallel: dict[str, object], message: str) -> None:
    assert told(config(fp8="delayed", seq_length=8192, model=model, **parallel)) == message
    resolved(config(fp8=None, seq_length=8192, model=model, **parallel))


@pytest.mark.parametrize("fp8, multiple", [("delayed", 16), ("tensorwise", 16), ("blockwise", 32), ("mxfp8", 32)])
def test_the_multiple_of_widths(fp8: str, multiple: int) -> None:
    for size in (16, 32, 48, 64, 96):
        wanted = config(fp8=fp8, seq_length=8192, model={"ffn_hidden_size": size})
        if size % multiple:
            assert f"multiples of {multiple}, and here model.ffn_hidden_size / tp = {size}." in told(wanted)
        else:
            resolved(wanted)


def test_widths_are_not_spoken_of_where_tp_does_not_fit() -> None:
    assert told(config(fp8="mxfp8", seq_length=8192, tp=16, model={"ffn_hidden_size": 1216})) == (
        "parallel.tp = 16 does not divide model.num_query_groups = 8.  Tensor-parallel sizes that fit: 1, 2, 4, 8."
    )
