"""The arithmetic of a layout, also with FP8, and the errors for layouts that do not work."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.config import Config
from sft.errors import ConfigError
from sft.layers.mixers.delta import DeltaRule
from sft.layers.mixers.latent import LatentAttention
from sft.layers.mlps.experts import Experts
from sft.parallel.alignment import smallest_world
from sft.parallel.layout import Layout, surplus_note, vocab_rows
from tests.builders import LLAMA_8B, layout_config


def refusal(wanted: Config, world_size: int | None = None) -> str:
    """The error for this recipe on so many processes, or on the smallest possible number; "" without an error."""
    try:
        Layout.resolve(wanted, world_size or smallest_world(wanted))
    except ConfigError as error:
        return str(error)
    return ""


def told(world_size: int, **sections: Mapping[str, object]) -> list[str]:
    return refusal(layout_config(**sections), world_size).split("\n")


def test_a_layout() -> None:
    assert Layout.resolve(layout_config(parallel={"tp": 2, "cp": 2}), 8) == Layout(
        world_size=8,
        tp=2,
        cp=2,
        pp=1,
        dp=2,
        ep=1,
        etp=1,
        virtual_stages=1,
        sequence_parallel=True,
        global_batch_size=16,
        num_microbatches=8,
        doc_multiple=32,
        pack_multiple=32,
    )
    assert not Layout.resolve(layout_config(), 1).sequence_parallel
    assert not Layout.resolve(layout_config(parallel={"tp": 2, "sequence_parallel": False}), 2).sequence_parallel


def test_equations() -> None:
    assert Layout.resolve(layout_config(parallel={"tp": 2, "cp": 2}), 8).equations(32768) == [
        "world_size 8 = tp 2 x cp 2 x pp 1 x dp 2",
        "global_batch_size 16 packs = dp 2 x num_microbatches 8",
        "tokens per step <= 16 packs x 32,768 = 524,288",
        "tokens per rank and microbatch <= 32,768 / cp 2 = 16,384",
        "between layers, sequence parallel: 16,384 / tp 2 = 8,192",
        "documents padded to a multiple of 32, packs to a multiple of 32",
    ]
    layout = Layout.resolve(layout_config(parallel={"pp": 2, "virtual_stages": 3}), 4)
    assert layout.equations(32768)[4:-1] == ["pipeline stages: pp 2 x virtual_stages 3 = 6"]
    layout = Layout.resolve(layout_config(parallel={"cp": 4, "dynamic_cp": True}), 8)
    assert layout.cp_sizes == (1, 2, 4)
    assert layout.equations(32768)[1:-1] == [
        "global_batch_size 16 packs = dp 2 x 8, before dynamic CP",
        "tokens per step <= 16 packs x 32,768 = 524,288",
        "tokens per rank and microbatch <= 32,768 / cp 4 = 8,192",
        "dynamic CP: each pack is on 1, 2 or 4 ranks; microbatches by the plan",
    ]

    layout = Layout.resolve(layout_config(parallel={"cp": 4, "shard": "weights", "shard_size": 4}), 8)
    assert layout.equations(32768)[4:-1] == ["dp 2 x cp 4 = shard_size 4 x 2 replicas"]


@pytest.mark.parametrize("size, of_experts", [(None, 6), (12, 6), (6, 6), (4, 3), (2, 2)])
def test_experts_are_divided_over_the_ranks_that_hold_them(size: int | None, of_experts: int) -> None:
    moe = {"moe": {"num_experts": 4, "top_k": 2}}
    wanted = layout_config(
        model=moe,
        parallel={"cp": 3, "ep": 2, "shard": "weights", "shard_size": size},
        data={"doc_multiple": 24, "seq_length": 960},
        train={"global_batch_size": 24},
    )
    layout = Layout.resolve(wanted, 12)
    assert (layout.shard_ranks, layout.expert_shard_ranks) == (size or 12, of_experts)


MISFITS = {
    "shards over one rank": (
        2,
        {"parallel": {"tp": 2, "shard": "gradients"}},
        "parallel.shard = gradients has no effect with dp 1 x cp 1: one rank holds all.  Use optimizer, or more ranks "
        "of dp or cp.",
    ),
    "shards and dp x cp": (
        8,
        {"parallel": {"cp": 4, "shard": "weights", "shard_size": 3}},
        "parallel.shard_size = 3 does not divide dp 2 x cp 4 = 8.  Sizes that fit: 2, 4, 8; null is all 8.",
    ),
    "a shard of one rank": (
        2,
        {"parallel": {"cp": 2, "shard": "weights", "shard_size": 1}},
        "parallel.shard_size = 1 would share with no other rank.  Sizes that fit: 2; null is all 2.",
    ),
    "cp, doc_multiple and the world": (
        16,
        {"parallel": {"cp": 3, "tp": 2}, "data": {"doc_multiple": 24, "seq_length": 960}},
        "parallel.cp = 3 does not fit 16 GPUs with tp = 2, pp = 1.  Context-parallel sizes that fit: 1, 2, 4.  "
        "Or start 6 GPUs, or another multiple.",
    ),
    "packs and dp": (
        3,
        {},
        "train.global_batch_size = 16 packs cannot be divided evenly among dp = 3 ranks.  Nearest that fit: 15, 18.",
    ),
    "tp and everything": (
        5,
        {"parallel": {"tp": 5}, "data": {"seq_length": 320}},
        "parallel.tp = 5 does not divide model.num_attention_heads = 24, model.num_query_groups = 8, "
        "model.ffn_hidden_size = 96.  Tensor-parallel sizes that fit: 1, 2, 4, 8.",
    ),
    "one group of Mamba-2": (
        2,
        {"model": {"mamba": {"layers": [1], "num_heads": 8, "num_groups": 1}}, "parallel": {"tp": 2}},
        "parallel.tp = 2 does not divide model.mamba.num_groups = 1.  A rank has whole groups of Mamba-2: all heads of "
        "a group read the same B and C, and one root mean square normalises their outputs.  Tensor-parallel sizes that "
        "fit: 1.",
    ),
    "layers and virtual stages": (
        4,
        {"parallel": {"pp": 4, "virtual_stages": 2}},
        "model.num_layers = 12 cannot be cut into parallel.pp 4 x virtual_stages 2 = 8 equal stages.  "
        "Pipeline-parallel sizes that fit: 2, 3, 6.",
    ),
    "microbatches and the interleaved schedule": (
        2,
        {"parallel": {"pp": 2, "virtual_stages": 2}, "train": {"global_batch_size": 5}},
        "train.global_batch_size = 5 packs are 5 microbatches on each of dp = 1 ranks; with virtual_stages "
        "= 2 they must be a multiple of pp = 2.  Nearest that fit: 4, 6.",
    ),
    "bf16 gradients and microbatches": (
        8,
        {"optim": {"grad_dtype": "bf16"}},
        "optim.grad_dtype = bf16 needs one microbatch per step on each rank, but train.global_batch_size = 16 packs "
        "are 2 on each of dp = 8 ranks: a sum of their gradients in bf16 would lose small terms.  Use "
        "optim.grad_dtype=fp32, or train.global_batch_size=8, or 2 times as many ranks.",
    ),
    "documents and cp": (
        32,
        {"parallel": {"cp": 32}, "train": {"global_batch_size": 1}},
        "data.doc_multiple = 32 is not a multiple of 2 x cp = 64, the number of a document's chunks.  "
        "Smallest that fits: 64.",
    ),
    "packs and sequence parallel": (
        8,
        {"parallel": {"tp": 8}, "data": {"doc_multiple": 4, "seq_length": 100}},
        "data.seq_length = 100 is not a multiple of 8 (doc_multiple 4, cp 1, tp 8 with sequence parallel).  "
        "Nearest that fit: 96, 104.",
    ),
    "heads and all-to-all": (
        8,
        {"parallel": {"cp": 8, "cp_comm": "a2a"}, "model": {"num_query_groups": 4}},
        "parallel.cp_comm = a2a distributes whole heads: tp 1 x cp 8 = 8 does not divide "
        "model.num_query_groups = 4.  "
        "Use p2p or all_gather, or a cp of 1, 2, 4.",
    ),
    "heads and all-to-all of two levels": (
        16,
        {"parallel": {"cp": 8, "tp": 2, "cp_comm": "a2a+p2p", "cp_a2a": 4}, "model": {"num_query_groups": 4}},
        "parallel.cp_comm = a2a+p2p distributes whole heads: tp 2 x cp_a2a 4 = 8 does not divide "
        "model.num_query_groups = 4.  Use p2p or all_gather, or a cp_a2a of 2.",
    ),
    "heads and chunks": (
        2,
        {"parallel": {"tp": 2}, "train": {"head_chunks": 3}},
        "train.head_chunks = 3 cannot divide a rank's key heads: parallel.tp 2 x 3 = 6 does not divide "
        "model.num_query_groups = 8.  Use null, or 1, 2, 4.",
    ),
    "dynamic CP": (
        4,
        {"parallel": {"cp": 4, "dynamic_cp": True}, "data": {"seq_length": 192}},
        "data.seq_length = 192 is not a multiple of 128 (doc_multiple 32 x cp 4, because of dynamic_cp).  "
        "Nearest that fit: 128, 256.",
    ),
    "a rank to profile": (
        8,
        {"profile": {"torch": {"steps": [1], "ranks": [0, 8]}}},
        "profile.torch.ranks = [0, 8]: this run has no rank 8, only ranks 0 to 7.",
    ),
}


@pytest.mark.parametrize("world_size, sections, message", MISFITS.values(), ids=MISFITS.keys())
def test_misfits(world_size: int, sections: dict[str, dict[str, object]], message: str) -> None:
    assert told(world_size, **sections) == [message]


def test_all_to_all_binds_transformer_engine_only() -> None:
    short = layout_config(parallel={"cp": 16, "cp_comm": "a2a"}, attention={"backend": "portable"})
    assert Layout.resolve(short, 16).cp == 16


def test_two_levels_need_heads_for_one() -> None:
    """cp 8 as 2 x 4: two ranks can divide the 4 groups of a tp rank; all 8 ranks could not."""
    parallel = {"tp": 2, "cp": 8, "cp_comm": "a2a+p2p", "cp_a2a": 2}
    layout = Layout.resolve(layout_config(parallel=parallel, model={"num_query_groups": 4}), 16)
    assert layout.cp_a2a == 2
    assert "cp 8 = 2 ranks of all-to-all x 4 of the ring" in layout.equations(32768)
    elsewhere = layout_config(parallel=parallel, attention={"backend": "portable"})
    assert Layout.resolve(elsewhere, 16).cp_a2a is None


def test_all_misfits_at_once() -> None:
    parallel = {"tp": 3, "pp": 5}
    assert told(31, parallel=parallel, data={"seq_length": 1000}) == [
        "1 of 4: parallel: tp 3 x cp 1 x pp 5 = 15 does not divide 31 GPUs.  Start a multiple of 15 processes.",
        "  2 of 4: parallel.tp = 3 does not divide model.num_query_groups = 8.  "
        "Tensor-parallel sizes that fit: 1, 2, 4, 8.",
        "  3 of 4: model.num_layers = 12 cannot be cut into parallel.pp 5 x virtual_stages 1 = 5 equal "
        "stages.  "
        "Pipeline-parallel sizes that fit: 1, 2, 3, 4, 6, 12.",
        "  4 of 4: data.seq_length = 1000 is not a multiple of 32 (doc_multiple).  Nearest that fit: 992, 1024.",
    ]


SIZES = st.integers(1, 12)


@settings(deadline=None, max_examples=200)
@given(tp=SIZES, cp=SIZES, pp=SIZES, virtual=st.integers(1, 3), world=st.integers(1, 64), packs=SIZES)
def test_a_layout_adds_up_or_is_refused(tp: int, cp: int, pp: int, virtual: int, world: int, packs: int) -> None:
    if pp == 1:
        virtual = 1
    parallel = {"tp": tp, "cp": cp, "pp": pp, "virtual_stages": virtual}
    wanted = layout_config(parallel=parallel, train={"global_batch_size": packs})
    try:
        layout = Layout.resolve(wanted, world)
    except ConfigError as error:
        offers = re.findall(r"parallel\.(cp|tp|pp) = \d+ does not (fit|divide) .*that fit: ([0-9, ]+)\.", str(error))
        for name, verb, sizes in offers:
            for size in sizes.split(", "):
                changed = layout_config(parallel={**parallel, name: int(size)}, train={"global_batch_size": packs})
                assert f"parallel.{name} = {size} does not {verb}" not in refusal(changed, world)
        return
    assert layout.tp * layout.cp * layout.pp * layout.dp == world
    assert layout.dp * layout.num_microbatches == packs
    assert layout.pack_multiple % layout.doc_multiple == 0
    assert layout.pack_multiple % (2 * cp) == 0
    assert layout.pack_multiple // cp % tp == 0
    assert 12 % (pp * virtual) == 0


MOE = {"moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 6}}


def test_experts_share_the_ranks_of_a_stage() -> None:
    layout = Layout.resolve(layout_config(model=MOE, parallel={"tp": 2, "cp": 2, "pp": 2, "ep": 4}), 16)
    assert (layout.dp, layout.ep, layout.etp) == (2, 4, 1)
    assert not any("experts" in line for line in Layout.resolve(layout_config(model=MOE), 2).equations(32768))
    layout = Layout.resolve(layout_config(model=MOE, parallel={"tp": 2, "ep": 2, "etp": 2}), 8)
    assert "experts: 8 ranks of a stage = ep 2 x etp 2 x 2 copies" in layout.equations(32768)


@pytest.mark.parametrize(
    "world_size, parallel, model, message",
    [
        (2, {"ep": 2}, {}, "ep = 2 and etp = 1 are for experts; without model.moe.num_experts both must be 1."),
        (8, {"ep": 8, "pp": 2}, MOE, "on 4 ranks of a pipeline stage (tp x cp x dp).  Expert-parallel sizes that fit: "
                                     "1, 2, 4."),
        (4, {"ep": 4, "etp": 2}, MOE, "parallel.ep = 4 x etp = 2 does not fit 8 experts on 4 ranks of a pipeline stage "
                                      "(tp x cp x dp).  Expert-parallel sizes that fit: 1, 2."),
        (4, {"ep": 2, "etp": 4}, MOE, "parallel.etp = 4 does not divide the expert width 6.  Sizes that fit: "
                                      "1, 2, 3, 6."),
        (2, {"etp": 2}, {**MOE, "mlp_bias": True, "hidden_size": 4097, "head_dim": 128},
         "parallel.etp = 2 does not divide model.hidden_size 4097"),
        (4, {"tp": 2, "sequence_parallel": False}, MOE, "A mixture of experts needs sequence_parallel, or tp = 1."),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit(
    world_size: int, parallel: dict[str, object], model: dict[str, object], message: str
) -> None:
    assert any(message in line for line in told(world_size, parallel=parallel, model=model))


def test_where_experts_are_not_spoken_of_and_where_they_are_not_split() -> None:
    """Five ranks cannot form two stages, so the error does not mention how experts would be divided."""
    (line,) = told(5, parallel={"pp": 2, "ep": 4}, model=MOE)
    assert line.startswith("parallel.pp = 2 does not fit 5 GPUs")
    assert told(2, parallel={"etp": 2}, model=MOE, run={"dir": "runs/a", "device": "cpu"}) == [
        "parallel.etp = 2 needs NCCL: gloo cannot gather parts of unequal size.  On the CPU, use etp = 1."
    ]


def test_the_width_of_a_dense_mlp_that_is_not_there_need_not_split() -> None:
    odd = {**MOE, "ffn_hidden_size": 97}
    assert Layout.resolve(layout_config(model=odd, parallel={"tp": 8}), 8).tp == 8


def test_vocabulary() -> None:
    model = layout_config(model={"vocab_size": 300}).model
    assert vocab_rows(layout_config().model, 259) == 259
    assert vocab_rows(model, 259) == 300
    assert vocab_rows(model, 301) == 300  # the ids in the data decide (test_vocabulary.py)
    assert surplus_note(model, 300) is None
    assert surplus_note(model, 301) == (
        "the tokenizer has 301 ids, and the embedding 300 rows (model.vocab_size): id 300 has no row, and data with "
        "them are refused; data.add_tokens gives them rows"
    )
    assert "ids 300 to 301 have no row" in str(surplus_note(model, 302))


# Sizes of Qwen3-8B: 32 query heads in 8 groups, width 128
QWEN = {"hidden_size": 4096, "ffn_hidden_size": 12288, "num_attention_heads": 32, "head_dim": 128}


def sized(
    *, fp8: str | None, seq_length: int, doc_multiple: int = 32, model: dict[str, Any] | None = None, **parallel: Any
) -> Config:
    return layout_config(
        run={"dir": "runs/a", "fp8": fp8},
        model={**QWEN, **(model or {})},
        data={"seq_length": seq_length, "doc_multiple": doc_multiple},
        parallel=parallel,
    )


def resolved(wanted: Config) -> Layout:
    return Layout.resolve(wanted, smallest_world(wanted))


@pytest.mark.parametrize(
    "fp8, tp, cp, sequence_parallel, doc_multiple, multiple",
    [
        (None, 4, 4, True, 8, 16),
        (None, 4, 4, False, 8, 8),
        (None, 8, 2, True, 12, 48),
        # 32 tokens of a pack are 8 of a rank, so it is not enough that 16 divides the pack
        ("delayed", 1, 4, True, 32, 64),
        ("delayed", 2, 2, True, 4, 64),
        ("tensorwise", 4, 2, True, 32, 128),
        ("mxfp8", 2, 4, True, 32, 256),
        ("blockwise", 2, 2, True, 12, 1536),
    ],
)
def test_packs(fp8: str | None, tp: int, cp: int, sequence_parallel: bool, doc_multiple: int, multiple: int) -> None:
    size = {"doc_multiple": doc_multiple, "seq_length": multiple}
    layout = resolved(sized(fp8=fp8, **size, tp=tp, cp=cp, sequence_parallel=sequence_parallel))
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
    """The number of tokens of each rank, as layers get them, fits FP8; no smaller multiple would be enough."""
    document = 2 * cp * chunks
    wanted = sized(fp8=fp8, seq_length=2**20, doc_multiple=document, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
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
    assert refusal(sized(fp8="mxfp8", seq_length=8000, tp=2, cp=2)) == (
        "data.seq_length = 8000 is not a multiple of 128 (doc_multiple 32, cp 2, tp 2 with sequence parallel, 32 "
        "tokens of a rank for fp8 mxfp8).  Nearest that fit: 7936, 8064."
    )
    assert resolved(sized(fp8=None, seq_length=8000, tp=2, cp=2)).pack_multiple == 32


def test_the_equation() -> None:
    layout = resolved(sized(fp8="mxfp8", seq_length=8192, tp=2, cp=4))
    assert layout.equations(8192)[4:] == [
        "between layers, sequence parallel: 2,048 / tp 2 = 1,024",
        "fp8 mxfp8: 32 tokens of a rank x cp 4 x tp 2 = 256, which divides the length of each pack",
        "documents padded to a multiple of 32, packs to a multiple of 256",
    ]
    layout = resolved(sized(fp8="blockwise", seq_length=8192, tp=2, cp=4, sequence_parallel=False))
    equation = "fp8 blockwise: 128 tokens of a rank x cp 4 = 512, which divides the length of each pack"
    assert equation in layout.equations(8192)


NARROW = {
    "the feed-forward of a tp rank": (
        {"ffn_hidden_size": 1216},  # 152 x 8
        {"tp": 8},
        "run.fp8 = delayed needs widths that are multiples of 16, but model.ffn_hidden_size / tp = 152.  "
        "Use a tp of 1, 2, 4, or run.fp8=null.",
    ),
    "narrow heads": (
        {"hidden_size": 4104, "num_attention_heads": 14, "num_query_groups": 2, "head_dim": 12},
        {},
        "run.fp8 = delayed needs widths that are multiples of 16, but model.hidden_size = 4,104, "
        "num_attention_heads x head_dim / tp = 168, (num_attention_heads + 2 x num_query_groups) x head_dim / tp = "
        "216.  Use run.fp8=null.",
    ),
    "an expert": (
        {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}},
        {},
        "run.fp8 = delayed needs widths that are multiples of 16, but the width of an expert / etp = 24.  "
        "Use run.fp8=null.",
    ),
}


KIMI = {"num_key_heads": 32, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}


def test_the_widths_of_layers_in_transformer_engine() -> None:
    """Kimi-Linear, Qwen3.6-27B's layers with linear attention, Ling's gate of heads, and Nemotron 3 Super's experts."""

    def linear(**changes: object) -> DeltaRule:
        return DeltaRule(
            layout_config(model={**LLAMA_8B, "linear_attention": {"layers": [1], **KIMI, **changes}}).model
        )

    kimi = linear(decay="channel", low_rank=128)
    assert [*kimi.te_widths(4).values()] == [(3 * 4096 + 32) // 4, 1024, 128, 1024]  # 3080 is 8 x 385
    assert [*linear(num_key_heads=16).te_widths(4).values()] == [(2 * 2048 + 2 * 4096 + 2 * 32) // 4, 1024]
    latent = {"kv_lora_rank": 512, "head_gate": True}
    own_keys = {**LLAMA_8B, "head_dim": None, "num_query_groups": None}
    gated = LatentAttention(layout_config(model={**own_keys, "latent_attention": latent}).model)
    assert gated.te_widths(4)["num_attention_heads / tp with latent_attention.head_gate"] == 8
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 2688, "latent_size": 1000}
    experts = Experts(layout_config(model={**LLAMA_8B, "moe": moe}).model)
    assert experts.te_widths(1, 2) == {"the width of an expert / etp": 1344, "model.moe.latent_size": 1000}


@pytest.mark.parametrize("model, parallel, message", NARROW.values(), ids=NARROW.keys())
def test_widths_that_fp8_cannot_take(model: dict[str, object], parallel: dict[str, object], message: str) -> None:
    assert refusal(sized(fp8="delayed", seq_length=8192, model=model, **parallel)) == message
    resolved(sized(fp8=None, seq_length=8192, model=model, **parallel))


@pytest.mark.parametrize("fp8, multiple", [("delayed", 16), ("tensorwise", 16), ("blockwise", 32), ("mxfp8", 32)])
def test_the_multiple_of_widths(fp8: str, multiple: int) -> None:
    narrow = sized(fp8=fp8, seq_length=8192, model={"ffn_hidden_size": multiple // 2})
    assert f"multiples of {multiple}, but model.ffn_hidden_size / tp = {multiple // 2}." in refusal(narrow)
    resolved(sized(fp8=fp8, seq_length=8192, model={"ffn_hidden_size": multiple}))


def test_widths_are_not_spoken_of_where_tp_does_not_fit() -> None:
    assert refusal(sized(fp8="mxfp8", seq_length=8192, tp=16, model={"ffn_hidden_size": 1216})) == (
        "parallel.tp = 16 does not divide model.num_query_groups = 8.  Tensor-parallel sizes that fit: 1, 2, 4, 8."
    )


def test_tp_divides_heads_that_no_layer_has() -> None:
    """All layers have linear attention; megatron-core nevertheless checks the sizes of its own attention."""
    linear = {"layers": [*range(1, 13)], "num_key_heads": 4, "num_value_heads": 4}
    (line,) = told(4, model={"num_attention_heads": 6, "num_query_groups": 6, "linear_attention": linear},
                   parallel={"tp": 4})  # fmt: skip
    assert line.startswith("parallel.tp = 4 does not divide model.num_attention_heads = 6, model.num_query_groups = 6.")
