"""The arithmetic of a layout, and what is said when it does not work out."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.config import Config
from sft.errors import ConfigError
from sft.parallel.layout import Layout, vocab_rows
from tests.builders import layout_config


def told(world_size: int, **sections: Mapping[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Layout.resolve(layout_config(**sections), world_size)
    return str(caught.value).split("\n")


def refusal(wanted: Config, world_size: int) -> ConfigError | None:
    try:
        Layout.resolve(wanted, world_size)
    except ConfigError as error:
        return error
    return None


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


def test_sequence_parallel_is_what_takes_effect() -> None:
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
    assert Layout.resolve(layout_config(parallel={"pp": 2, "virtual_stages": 3}), 4).equations(32768) == [
        "world_size 4 = tp 1 x cp 1 x pp 2 x dp 2",
        "global_batch_size 16 packs = dp 2 x num_microbatches 8",
        "tokens per step <= 16 packs x 32,768 = 524,288",
        "tokens per rank and microbatch <= 32,768 / cp 1 = 32,768",
        "pipeline stages: pp 2 x virtual_stages 3 = 6",
        "documents padded to a multiple of 32, packs to a multiple of 32",
    ]


MISFITS = {
    "cp and the world": (
        16,
        {"parallel": {"cp": 3, "tp": 2}, "data": {"doc_multiple": 96, "seq_length": 960}},
        "parallel.cp = 3 does not fit 16 GPUs with tp = 2, pp = 1.  Context-parallel sizes that fit: 1, 2, 4, 8.",
    ),
    "only sizes that doc_multiple allows": (
        16,
        {"parallel": {"cp": 3}, "data": {"doc_multiple": 12, "seq_length": 960}},
        "parallel.cp = 3 does not fit 16 GPUs with tp = 1, pp = 1.  Context-parallel sizes that fit: 1, 2.",
    ),
    "pp and the world": (
        8,
        {"parallel": {"pp": 3}},
        "parallel.pp = 3 does not fit 8 GPUs with tp = 1, cp = 1.  Pipeline-parallel sizes that fit: 1, 2, 4.",
    ),
    "the product and the world": (
        4,
        {"parallel": {"tp": 8, "pp": 3}},
        "parallel: tp 8 x cp 1 x pp 3 = 24 does not divide 4 GPUs.  Start a multiple of 24.",
    ),
    "packs and dp": (
        3,
        {},
        "train.global_batch_size = 16 packs cannot be shared by dp = 3 ranks.  Nearest that fit: 15, 18.",
    ),
    "tp and query groups": (
        3,
        {"parallel": {"tp": 3}, "data": {"seq_length": 96}},
        "parallel.tp = 3 does not divide model.num_query_groups = 8.  Tensor-parallel sizes that fit: 1, 2, 4, 8.",
    ),
    "tp and everything": (
        5,
        {"parallel": {"tp": 5}, "data": {"seq_length": 320}},
        "parallel.tp = 5 does not divide model.num_attention_heads = 24, model.num_query_groups = 8, "
        "model.ffn_hidden_size = 96.  Tensor-parallel sizes that fit: 1, 2, 4, 8.",
    ),
    "layers and stages": (
        5,
        {"parallel": {"pp": 5}},
        "model.num_layers = 12 cannot be cut into parallel.pp 5 x virtual_stages 1 = 5 equal stages.  "
        "Pipeline-parallel sizes that fit: 1, 2, 3, 4, 6, 12.",
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
    "documents and cp": (
        32,
        {"parallel": {"cp": 32}, "train": {"global_batch_size": 1}},
        "data.doc_multiple = 32 is not a multiple of 2 x cp = 64, a document's chunks.  Smallest that fits: 64.",
    ),
    "packs and documents": (
        1,
        {"data": {"seq_length": 1000}},
        "data.seq_length = 1000 is not a multiple of 32 (doc_multiple 32, cp 1).  Nearest that fit: 992, 1024.",
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
        "parallel.cp_comm = a2a hands out whole heads: tp 1 x cp 8 = 8 does not divide "
        "model.num_query_groups = 4.  "
        "Use p2p or all_gather, or a cp of 1, 2, 4.",
    ),
    "heads and all-to-all of two levels": (
        16,
        {"parallel": {"cp": 8, "tp": 2, "cp_comm": "a2a+p2p", "cp_a2a": 4}, "model": {"num_query_groups": 4}},
        "parallel.cp_comm = a2a+p2p hands out whole heads: tp 2 x cp_a2a 4 = 8 does not divide "
        "model.num_query_groups = 4.  Use p2p or all_gather, or a cp_a2a of 2.",
    ),
    "heads that no second level could share": (
        16,
        {"parallel": {"cp": 4, "tp": 4, "cp_comm": "a2a+p2p", "cp_a2a": 2}, "model": {"num_query_groups": 4}},
        "parallel.cp_comm = a2a+p2p hands out whole heads: tp 4 x cp_a2a 2 = 8 does not divide "
        "model.num_query_groups = 4.  Use p2p or all_gather, or a cp_a2a of none.",
    ),
    "a rank to profile": (
        8,
        {"profile": {"torch": {"steps": [1], "ranks": [0, 8]}}},
        "profile.torch.ranks = [0, 8]: this run has no rank 8, only 0 to 7.",
    ),
}


@pytest.mark.parametrize("world_size, sections, message", MISFITS.values(), ids=MISFITS.keys())
def test_misfits(world_size: int, sections: dict[str, dict[str, object]], message: str) -> None:
    assert told(world_size, **sections) == [message]


@pytest.mark.parametrize("elsewhere", [{"attention": {"backend": "portable"}}, {"run": {"device": "cpu"}}])
def test_all_to_all_binds_transformer_engine_only(elsewhere: dict[str, dict[str, object]]) -> None:
    short = layout_config(parallel={"cp": 16, "cp_comm": "a2a"}, **elsewhere)
    assert Layout.resolve(short, 16).cp == 16


def test_two_levels_need_heads_for_one() -> None:
    """cp 8 as 2 x 4: two ranks share the 4 groups of a tp rank, which all 8 could not."""
    parallel = {"tp": 2, "cp": 8, "cp_comm": "a2a+p2p", "cp_a2a": 2}
    layout = Layout.resolve(layout_config(parallel=parallel, model={"num_query_groups": 4}), 16)
    assert layout.cp_a2a == 2
    assert "cp 8 = 2 ranks of all-to-all x 4 of the ring" in layout.equations(32768)
    elsewhere = layout_config(parallel=parallel, attention={"backend": "portable"})
    assert Layout.resolve(elsewhere, 16).cp_a2a is None


def test_all_misfits_at_once() -> None:
    parallel = {"tp": 3, "pp": 5}
    assert told(31, parallel=parallel, data={"seq_length": 1000}) == [
        "1 of 4: parallel: tp 3 x cp 1 x pp 5 = 15 does not divide 31 GPUs.  Start a multiple of 15.",
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
                assert f"parallel.{name} = {size} does not {verb}" not in str(refusal(changed, world))
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
    assert "experts: 8 ranks of a stage = ep 4 x etp 1 x 2 copies" in layout.equations(32768)
    assert not any("experts" in line for line in Layout.resolve(layout_config(model=MOE), 2).equations(32768))
    layout = Layout.resolve(layout_config(model=MOE, parallel={"tp": 2, "ep": 2, "etp": 2}), 8)
    assert "experts: 8 ranks of a stage = ep 2 x etp 2 x 2 copies" in layout.equations(32768)


@pytest.mark.parametrize(
    "world_size, parallel, model, message",
    [
        (2, {"ep": 2}, {}, "ep = 2 and etp = 1 are for experts; without model.moe.num_experts both must be 1."),
        (4, {"ep": 3}, MOE, "ep = 3 x etp = 1 does not fit 8 experts on 4 ranks of a pipeline stage (tp x cp x dp).  "
                            "Expert-parallel sizes that fit: 1, 2, 4."),
        (16, {"ep": 16}, MOE, "ep = 16 x etp = 1 does not fit 8 experts on 16 ranks of a pipeline stage (tp x cp x "
                              "dp).  Expert-parallel sizes that fit: 1, 2, 4, 8."),
        (8, {"ep": 8, "pp": 2}, MOE, "on 4 ranks of a pipeline stage (tp x cp x dp).  Expert-parallel sizes that fit: "
                                     "1, 2, 4."),
        (4, {"ep": 4, "etp": 2}, MOE, "parallel.ep = 4 x etp = 2 does not fit 8 experts on 4 ranks of a pipeline stage "
                                      "(tp x cp x dp).  Expert-parallel sizes that fit: 1, 2."),
        (2, {"etp": 2}, {}, "ep = 1 and etp = 2 are for experts; without model.moe.num_experts both must be 1."),
        (4, {"ep": 2, "etp": 4}, MOE, "parallel.etp = 4 does not divide an expert of width 6.  Fit: 1, 2, 3, 6."),
        (4, {"tp": 2, "sequence_parallel": False}, MOE, "A mixture of experts needs sequence_parallel, or tp = 1."),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit(
    world_size: int, parallel: dict[str, object], model: dict[str, object], message: str
) -> None:
    assert any(message in line for line in told(world_size, parallel=parallel, model=model))


def test_experts_are_not_spoken_of_where_the_stages_do_not_fit() -> None:
    """Five ranks are no two stages: how experts would share one of them is nobody's question."""
    (line,) = told(5, parallel={"pp": 2, "ep": 4}, model=MOE)
    assert line.startswith("parallel.pp = 2 does not fit 5 GPUs")


def test_experts_are_not_split_on_the_cpu() -> None:
    run = {"dir": "runs/a", "device": "cpu"}
    (line,) = told(2, parallel={"etp": 2}, model=MOE, run=run)
    assert line == "parallel.etp = 2 needs NCCL: gloo cannot gather parts of unequal size.  On the CPU etp is 1."


def test_the_width_of_a_dense_mlp_that_is_not_there_need_not_split() -> None:
    odd = {**MOE, "ffn_hidden_size": 97}
    assert Layout.resolve(layout_config(model=odd, parallel={"tp": 8}), 8).tp == 8


def test_vocabulary() -> None:
    model = layout_config(model={"vocab_size": 300}).model
    assert vocab_rows(layout_config().model, 259) == 259
    assert vocab_rows(model, 259) == 300
    with pytest.raises(ConfigError) as caught:
        vocab_rows(model, 301)
    assert str(caught.value) == (
        "model.vocab_size = 300 is smaller than the tokenizer: 301 tokens.  Use the model's own tokenizer "
        "(data.tokenizer), or at least 301 rows."
    )
