"""The parts of a predicted step.  Expected values are computed by hand, with constants of one rate and one bandwidth at
a time."""

from typing import Any

import numpy as np
import pytest

from sft.data.packing.balance import assign, efficiency
from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_grid import makespan_ns
from sft.data.packing.dynamic_cp import assign as plan_groups
from sft.data.packing.plan import plan_epoch
from sft.estimate import uneven
from sft.estimate.constants import Constants, assumed
from sft.estimate.gpus import gpu
from sft.estimate.layer_work import LayerWork
from sft.estimate.lengths import Lengths
from sft.estimate.products import Product
from sft.estimate.step_time import PARTS, StepTime, step_time
from sft.layers.flops import AttentionCost
from sft.layers.kinds import layer_groups
from sft.layers.mixers.softmax import SoftmaxAttention
from sft.layers.rank_share import RankShare
from sft.parallel.layout import Layout
from tests.builders import LLAMA_8B, layout_config
from tests.unit.fixtures.layouts import MILLION, of_millions
from tests.unit.fixtures.rates import flat

# Llama-8B.  Products per token: 32 layers x (4096 x (2 x 4096 + 2 x 1024) + 3 x 4096 x 14,336) = 6,979,321,856, x 6
# FLOPs.  Per supervised token: 128,256 x 4096 x 6.  Per token and token of its document: 6 x 32 x 4096.
VOCAB = 128_256
LINEAR, ATTENTION, HEAD = MILLION * 41_875_931_136, MILLION * MILLION * 786_432, MILLION * 3_152_019_456
MEASURED_TOLERANCE = 0.12  # two kernels with one curve of shares; rates of long documents come from another GPU
NEAR_WAITS = 0.02  # of 1: packs are drawn at random, and exchanges of sequences are left out
RATE = 1e15  # FLOPs that a rank computes in a second
TFLOPS = RATE / 1e12
NAMED = ("linear", "attention", "head", "recompute", "bubble")


def predicted(
    constants: Constants = flat(TFLOPS), lengths: Lengths | None = None, num_gpus: int = 8, **sections: dict[str, Any]
) -> StepTime:
    """8 packs of a million tokens on 8 GPUs, changed by `sections`."""
    config, layout = of_millions(num_gpus, **sections)
    return step_time(config, layout, VOCAB, lengths or Lengths.all_of(config.data.seq_length), constants)


def test_a_teacher_reads_the_scores_once_more() -> None:
    """A million tokens x 128,256 scores of 2 bytes at 1,000 GB/s, for each of 8 packs on 8 ranks."""
    constants = flat(TFLOPS, elementwise_gb_s=1000.0)
    for parallel in ({}, {"tp": 2, "cp": 2}):
        taught, plain = (
            predicted(constants, parallel=parallel, data={"teacher": {"k": k}}).parts["head"] for k in (64, None)
        )
        assert taught - plain == pytest.approx(0.256512 * MILLION / 1e6)


def test_flops_of_a_step() -> None:
    """8 microbatches on 8 ranks take as long as one microbatch on one rank."""
    time = predicted()
    assert tuple(time.parts) == PARTS
    for name, flops in (("linear", LINEAR), ("attention", ATTENTION), ("head", HEAD)):
        assert time.parts[name] == pytest.approx(flops / RATE)
    assert time.step_s == pytest.approx((LINEAR + ATTENTION + HEAD) / RATE)
    assert time.microbatch_s == pytest.approx(time.step_s / 8)
    assert (time.tokens, time.num_gpus) == (8 * MILLION, 8)
    assert time.tokens_per_s == pytest.approx(8 * MILLION / time.step_s)
    assert time.mfu == pytest.approx(RATE / 989.4e12)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"parallel": {"cp": 4}}, (LINEAR, ATTENTION, HEAD, 0, 0)),  # dp 2, 4 microbatches each
        ({"parallel": {"cp": 4, "tp": 2}}, (LINEAR, ATTENTION, HEAD, 0, 0)),
        # 4 stages, cp 2: the last stage has the whole head, and waits for 3 turns of 8, or half as long.
        ({"parallel": {"cp": 2, "pp": 4}}, (LINEAR, ATTENTION, 4 * HEAD, 0, 3 / 8 * (LINEAR + ATTENTION))),
        (
            {"parallel": {"cp": 2, "pp": 4, "virtual_stages": 2}},
            (LINEAR, ATTENTION, 4 * HEAD, 0, 3 / 16 * (LINEAR + ATTENTION)),
        ),
        # All products but those of down, 32 x 4096 x 14,336 for a token.
        (
            {"train": {"recompute": "full"}},
            (LINEAR, ATTENTION, HEAD, (LINEAR + ATTENTION) / 3 - MILLION * 2 * 1_879_048_192, 0),
        ),
        # Products of a token with gate and up: 32 x 2 x 4096 x 14,336.
        ({"train": {"recompute": "selective"}}, (LINEAR, ATTENTION, HEAD, MILLION * 2 * 3_758_096_384, 0)),
        ({"train": {"global_batch_size": 16}}, (2 * LINEAR, 2 * ATTENTION, 2 * HEAD, 0, 0)),
    ],
)
def test_layouts(sections: dict[str, dict[str, Any]], expected: tuple[float, ...]) -> None:
    time = predicted(**sections)
    assert [time.parts[name] for name in NAMED] == pytest.approx([flops / RATE for flops in expected])
    assert time.step_s == pytest.approx(sum(expected) / RATE)


def test_attention_takes_the_rate_of_its_kernel() -> None:
    """On an H100: FlashAttention-4 at 667 / 592 TFLOP/s, with a soft cap 288 / 344, ffpa-attn for heads of 512 at 603 /
    221.  The constants are those of cuDNN, 602 / 530.  A third of the time is forward.  Heads of 512 have 4 times the
    FLOPs of heads of 128.
    """
    portable = {"attention": {"backend": "portable"}}
    found = [
        predicted(**portable, model=model).parts["attention"] * RATE / ATTENTION
        for model in ({}, {"attention_softcap": 50.0}, {"head_dim": 512})
    ]
    expected = [(602 / forward + 2 * 530 / backward) / 3 for forward, backward in ((667, 592), (288, 344), (603, 221))]
    assert found == pytest.approx([expected[0], expected[1], 4 * expected[2]])


def test_short_documents_take_less() -> None:
    """Half of the documents have 8,192 tokens and half 24,576: on average, a token's document has 20,480 tokens."""
    lengths = Lengths(np.array([8192.0, 24_576.0]), np.array([0.5, 0.5]))
    assert predicted(lengths=lengths).parts["attention"] == pytest.approx(ATTENTION / MILLION * 20_480 / RATE)


def test_ranks_wait_for_the_pack_with_the_most_attention() -> None:
    """Packs of 9 5 4 2 on two ranks have 10 in the mean of a rank.  If both wait for each other, 9 + 4; if not, the
    rank with 9 has at least 2 more.  On four ranks, 9 of 5 in both cases."""
    packs = np.array([5.0, 2.0, 9.0, 4.0])
    assert [uneven.of_step(packs, 2, width) for width in (2, 1)] == pytest.approx([1.3, 1.1])
    assert [uneven.of_step(packs, 4, width) for width in (4, 1)] == pytest.approx([1.8, 1.8])
    assert uneven.of_step(np.array([3.0] * 4), 2, 2) == 1.0 and uneven.of_step(np.zeros(4), 2, 2) == 1.0


def test_few_packs_of_many_documents_are_drawn() -> None:
    """256 packs of 4 documents; 32,768 documents of 1,000 in a pack."""
    for length, packs in ((4, 256), (1000, 33)):
        assert abs(len(uneven._packs((1.0,), (1.0,), length, AttentionCost(crossover=1.0))) - packs) <= 1


def test_packs_of_unlike_documents_lengthen_a_step() -> None:
    """Rows of sharded ranks wait more than ranks that meet once a step, and documents of one length not at all."""
    mixed = Lengths(np.array([1024.0, MILLION / 4]), np.array([0.997, 0.003]))  # 43% of the packs are long
    case: dict[str, Any] = {"num_gpus": 16, "train": {"global_batch_size": 8}, "data": {"seq_length": MILLION // 4}}
    shards: dict[str, Any] = {"parallel": {"cp": 4, "shard": "weights"}}
    met, alone = (predicted(lengths=mixed, **case, **parallel).parts for parallel in (shards, {"parallel": {"cp": 4}}))
    assert met["attention"] == alone["attention"]
    assert 0 < alone["waits"] < met["waits"] < met["attention"]
    assert predicted(lengths=Lengths.all_of(MILLION // 4), **case, **shards).parts["waits"] == 0.0


@pytest.mark.parametrize("meets", [False, True])
def test_waits_are_about_those_of_the_trainer_s_packs(meets: bool) -> None:
    """Against the assignment of a plan of lognormal lengths to 4 ranks with 4 microbatches each.  The trainer also
    exchanges sequences, which the prediction leaves out."""
    lengths = np.minimum(np.random.RandomState(0).lognormal(9.2, 1.0, 4000).astype(np.int64) + 1, 65_536)
    shards = {"shard": "weights"} if meets else {}
    sections = {"data": {"seq_length": 65_536}, "train": {"global_batch_size": 16}}
    config, layout = of_millions(16, parallel={"cp": 4, **shards}, **sections)
    attention = AttentionCost.of(config.model)
    plan = plan_epoch(lengths, capacity=65_536, doc_multiple=1, seed=0, epoch=0, shuffle=True)
    found = []
    for batch in range(len(plan) // 16):
        packs = plan.batch(batch, 16)
        slots = assign(packs, lengths, dp=4, seq_length=65_536, doc_multiple=1, attention=attention, meets=meets)
        work = np.array([[attention(lengths[list(pack)]).sum() for pack in rank] for rank in slots])
        found.append(1 / efficiency(work)[meets])
    expected = 1.15 if meets else 1.01
    assert np.mean(found) == pytest.approx(expected, abs=0.01)
    assert uneven.slowest(config, layout, Lengths.of_corpus(lengths)) == pytest.approx(expected, abs=NEAR_WAITS)


def test_groups_wait_for_the_longest_documents() -> None:
    """Documents of 9 and 3 on a rank each, which wait: 3 more than the mean of 6, also where they meet once a step.
    Documents of 12 on four ranks and of 4 4 1 1 on one each: the first row takes 12 / 4, and 4 and 4 are in the next.
    """
    nothing = np.zeros(2)
    for meeting in (2, 1):
        assert uneven.of_groups(np.array([9.0, 3.0]), nothing, np.array([1, 1]), 2, meeting, 20) == 3.0
    tokens, sizes = np.array([12.0, 4.0, 4.0, 1.0, 1.0]), np.array([4, 1, 1, 1, 1])
    # Two rows of four ranks of 4 tokens hold all: the mean row takes 22 / 8, so 12 on four ranks and 4 are long.
    assert uneven.of_groups(tokens, np.zeros(5), sizes, 4, 4, 4) == 3 + 4 - 22 / 4
    assert uneven.of_groups(tokens, np.zeros(5), sizes, 4, 1, 4) == 0.0


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_waits_with_dynamic_cp_are_about_those_of_the_trainer_s_plan(shard: str) -> None:
    """Against plans of lognormal lengths for 16 ranks; each token and its attention take time, messages none."""
    lengths = np.minimum(np.random.RandomState(0).lognormal(9.2, 1.0, 4000).astype(np.int64) + 1, 65_536)
    parallel = {"cp": 4, "shard": shard, "dynamic_cp": True}
    sections = {"data": {"seq_length": 65_536}, "train": {"global_batch_size": 16}}
    config, layout = of_millions(16, parallel=parallel, **sections)
    attention = AttentionCost.of(config.model)
    cost = CpCost(attention=attention, token_ns=1000.0, wait_ranks=16 if shard == "weights" else 1)
    plan = plan_epoch(lengths, capacity=65_536, doc_multiple=1, seed=0, epoch=0, shuffle=True)
    found, shares = [], []
    for batch in range(0, len(plan) // 16, 2):
        ids = [i for pack in plan.batch(batch, 16) for i in pack]
        grid = plan_groups(ids, lengths, dp=4, cp=4, rank_tokens=65_536 // 4, cost=cost)
        of_attention = attention(lengths[ids]).sum() / 16
        mean = lengths[ids].sum() / 16 + of_attention
        found.append(makespan_ns(grid, lengths, cost) / 1000 / mean)
        shares.append(of_attention / mean)
    waits = (uneven.slowest(config, layout, Lengths.of_corpus(lengths)) - 1) * np.mean(shares)  # of the mean step
    expected = 1.04 if shard == "weights" else 1.002
    assert np.mean(found) == pytest.approx(expected, abs=0.01)
    assert 1 + waits == pytest.approx(expected, abs=NEAR_WAITS)


def test_fp8_makes_products_of_layers_faster() -> None:
    """All but the head, by 1.6, as assumed."""
    found = predicted(run={"fp8": "blockwise"}).parts
    assert [found[name] for name in ("linear", "head", "attention")] == pytest.approx(
        [LINEAR / 1.6 / RATE, HEAD / RATE, ATTENTION / RATE]
    )


def test_fp8_leaves_products_that_all_tensor_parallel_ranks_compute() -> None:
    """No module of Transformer Engine computes them (sft/mcore/modules/duplicated_linear.py)."""
    config, layout = of_millions(8, run={"fp8": "blockwise"})
    work = LayerWork(config, layout, flat(TFLOPS), Lengths.all_of(1000))
    parts = ("latent attention, duplicated", "linear attention, duplicated", "latent of experts", "linear attention")
    forward = [work.seconds([Product(part, 1000, 1000, 1000)])[0] for part in parts]
    assert forward == pytest.approx([2e9 / RATE] * 3 + [2e9 / RATE / 1.6])


def test_elementwise_optimizer_and_overhead() -> None:
    """In forward, a layer moves 10 hidden states, queries, keys and values twice (copies), queries and keys twice
    (rotation), and gate, up and their product.  Backward moves 12 hidden states, the same of attention, and 5 tensors
    of the MLP; an element has 2 bytes.  Each microbatch adds 8.03e9 gradients to fp32 sums, 10 bytes each.
    """
    parameters = 8_030_261_248
    time = predicted(flat(TFLOPS, elementwise_gb_s=1000.0))
    numbers = (10 + 12) * 4096 + 2 * (2 * (4096 + 2048) + 2 * (4096 + 1024)) + (3 + 5) * 14_336
    expected = MILLION * 32 * 2 * numbers + 8 * 10 * parameters
    assert time.parts["elementwise"] == pytest.approx(expected / 1e12)
    # The update moves 28 bytes for the eighth of the parameters that a rank owns, and 16 bytes for all gradients.
    time = predicted(flat(TFLOPS, optimizer_gb_s=1000.0))
    assert time.parts["optimizer"] == pytest.approx(parameters * (28 / 8 + 16) / 1e12)
    # Gradients in bf16: 6 bytes for the sum of one microbatch, and 8 in the update.
    halved = {"optim": {"grad_dtype": "bf16"}, "train": {"global_batch_size": 1}}
    assert predicted(flat(TFLOPS, elementwise_gb_s=1000.0), **halved).parts["elementwise"] == pytest.approx(
        (MILLION * 32 * 2 * numbers / 8 + 6 * parameters) / 1e12
    )
    time = predicted(flat(TFLOPS, optimizer_gb_s=1000.0), **halved)
    assert time.parts["optimizer"] == pytest.approx(parameters * (28 / 8 + 8) / 1e12)
    time = predicted(flat(TFLOPS, layer_overhead_us=100.0))
    assert time.parts["overhead"] == pytest.approx(8 * 32 * 1e-4)
    # On the host: 28 bytes for each parameter that the rank owns, and 8 bytes that are transferred.
    rates = flat(TFLOPS, host_optimizer_gb_s=100.0, pcie_gb_s=50.0)
    time = predicted(rates, optim={"offload_fraction": 1.0})
    assert time.parts["offload"] == pytest.approx(parameters / 8 * (28 / 100e9 + 8 / 50e9))


DELTA = {"layers": list(range(1, 25)), "num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128}


def test_bytes_that_mixers_move() -> None:
    """On portable, with tp 2, attention has 2,048 numbers of queries and 512 of keys and of values, in bf16.  Forward
    copies them, rotates queries and keys, and copies the output: 15,360 numbers.  Backward moves 22,528.

    Linear attention has 1,024 numbers of queries, 1,024 of keys and 2,048 of values: 4,096 in the convolution, 2,048 in
    the gated norm.  A fused convolution moves 4 and 12 bytes a number, the norm 10 and 14; in plain torch 68 and 206,
    72 and 158.  Copies and their gradients add 4 bytes for each of 4,096 and 6,144 numbers.
    """

    def moved(**attention: str) -> dict[str, tuple[float, ...]]:
        config = layout_config(model={**LLAMA_8B, "linear_attention": DELTA}, attention=attention)
        mixers = [group.mixer for group in layer_groups(config.model)]
        return {mixer.kind: tuple(mixer.moved(config, RankShare(tp=2), is_portable=True)) for mixer in mixers}

    fused = 4 * 4096 + 10 * 2048 + 4 * 4096, 12 * 4096 + 14 * 2048 + 4 * 6144
    assert moved() == {"linear attention": (*fused, fused[0]), "full attention": (2 * 15_360, 2 * 22_528, 0)}
    plain = 68 * 4096 + 72 * 2048 + 4 * 4096, 206 * 4096 + 158 * 2048 + 4 * 6144
    assert moved(delta_rule="torch")["linear attention"] == (*plain, plain[0])


def test_measured_rates_of_short_documents_and_windows() -> None:
    """The trainer's attention on an H100, as docs/numbers/h100.md has it: TFLOP/s forward and backward of
    FlashAttention-4, with the copies around the kernel and the correction for sinks, on packs of 64K tokens."""
    heads = {"num_attention_heads": 64, "num_query_groups": 8, "head_dim": 64}
    sinks = {"attention_sinks": True, "sliding_window": 128, "sliding_window_layers": [1]}
    cases = {  # model, length of documents -> measured
        (32, 65_536, 702, 618): {"num_attention_heads": 32, "num_query_groups": 8, "head_dim": 128},
        (32, 2048, 366, 348): {"num_attention_heads": 32, "num_query_groups": 8, "head_dim": 128},
        (64, 65_536, 545, 559): heads,
        (64, 2048, 300, 322): heads,
        (64, 65_536, 32, 33): heads | sinks,
    }
    for (num_heads, length, *measured), model in cases.items():
        config = layout_config(
            model={**LLAMA_8B, **model, "num_layers": 1}, attention={"backend": "portable"}, data={"seq_length": 65_536}
        )
        work = LayerWork(config, Layout.resolve(config, 1), assumed(gpu("h100"), 40.0), Lengths.all_of(length))
        (group,) = layer_groups(config.model)
        assert isinstance(group.mixer, SoftmaxAttention)
        around = group.mixer.passes_around_kernel(RankShare())
        moved = [65_536 * num_bytes / (0.75 * 3350e9) for num_bytes in (around.forward, around.backward)]
        seconds = [kernel + passes for kernel, passes in zip(work.attention(), moved)]
        keys = min(length, 128) if "sliding_window" in model else length
        flops = 2 * num_heads * model["head_dim"] * keys * (2 * length - keys) * (65_536 / length)
        found = [flops / seconds[0] / 1e12, 2.5 * flops / seconds[1] / 1e12]
        assert found == pytest.approx(measured, rel=MEASURED_TOLERANCE), (model, length)


def test_passes_of_the_delta_rule() -> None:
    """24 layers with 3 x 4,096 x 128 products of states for a token, 2 FLOPs each; attention in 8 of 32 layers.

    On one rank, forward and three times as much in backward; over cp, 1.75 and 4, of which each rank has its part.
    """
    run = 8 * MILLION * 24 * 2 * 3 * 4096 * 128 / RATE / 8
    attention = ATTENTION / RATE / 4  # of 8 ranks together
    for cp, passes in ((1, 1 + 3.0), (8, 1.75 + 4.0)):
        model = {**LLAMA_8B, "linear_attention": DELTA}
        time = predicted(model=model, parallel={"cp": cp}, attention={"backend": "portable"})
        alike = attention * (602 / 667 + 2 * 530 / 592) / 3  # by FlashAttention-4
        assert time.parts["attention"] == pytest.approx(alike + passes * run)
        full = predicted(model=model, parallel={"cp": cp}, train={"recompute": "full"}).parts["recompute"]
        selective = predicted(model=model, parallel={"cp": cp}, train={"recompute": "selective"}).parts["recompute"]
        assert full > selective > (1.0 if cp == 1 else 1.75) * run


def test_the_delta_rule_in_plain_torch_has_a_rate_of_its_own() -> None:
    """fp32 products of 24 layers: 32 value heads take 6 x 128 x 128 + 4 x 64 x 128 + 64 x 64 + 128 = 135,296 FLOPs
    each, 16 key heads 32,768; at 0.068 of the rate of bf16.  Bytes: 32 heads x (7 x 128 + 99 x 128 + 122 x 64 + 39 x
    256) and 16 x 106 x 128.  Backward takes 2.7 as long; over cp, maps and gradients of states add 1.15 and 1.0.
    """
    flops, moved = 32 * 135_296 + 16 * 32_768, 32 * 31_360 + 16 * 13_568
    tokens = 8 * MILLION * 24 / 8  # of all microbatches on a rank, times layers
    attention = {"backend": "portable", "delta_rule": "torch"}
    for cp, passes in ((1, 1 + 2.7), (8, 2.15 + 3.7)):
        case: dict[str, Any] = dict(model={**LLAMA_8B, "linear_attention": DELTA}, parallel={"cp": cp})
        alike = ATTENTION / RATE / 4 * (602 / 667 + 2 * 530 / 592) / 3
        found = predicted(flat(TFLOPS, elementwise_gb_s=1000.0), **case, attention=attention).parts["attention"]
        assert found == pytest.approx(alike + passes * tokens * (flops / (0.068 * RATE) + moved / 1e12))


def test_the_delta_rule_is_faster_with_more_sequences() -> None:
    """32 heads of one document: 54.7 TFLOP/s on an H200.  tp 4: 8 heads, 28.6.  cp 8: two fragments, 61.9."""
    rates = assumed(gpu("h200"), 40.0)
    model = {**LLAMA_8B, "linear_attention": {**DELTA, "layers": list(range(1, 33))}}
    found = {}
    for name, parallel in {"one": {"cp": 1}, "tp": {"tp": 4, "cp": 1}, "cp": {"cp": 8}}.items():
        time = predicted(rates, model=model, parallel=parallel)
        found[name] = time.parts["attention"]
    run = MILLION * 32 * 2 * 3 * 4096 * 128 / 1e12
    assert found == pytest.approx({"one": 4 * run / 54.7, "tp": 4 * run / 28.6, "cp": 5.75 * run / 61.9})


def test_messages_of_tp() -> None:
    """A gather or scatter of 262,144 tokens of 8 KiB over tp 2 sends half of the bytes: 1.0737e9.

    Of the 10 messages in a layer, products hide 4 in backward.  Embedding and head have one pair each.  32 x 6 + 4
    messages per microbatch are exposed.  With few FLOPs and many messages, the hidden ones also take time.
    """
    sections = {"parallel": {"cp": 4, "tp": 2}}
    time = predicted(flat(1e-3, intra_gb_s=100.0), **sections)
    assert time.parts["tp"] == pytest.approx(8 * (32 * 6 + 4) * MILLION / 4 * 8192 / 2 / 100e9)
    time = predicted(flat(1e15, intra_gb_s=100.0), **sections)
    assert time.parts["tp"] == pytest.approx(8 * (32 * 10 + 4) * MILLION / 4 * 8192 / 2 / 100e9)


def test_messages_of_shards() -> None:
    """Embedding and head have 525,336,576 elements and a layer 218,112,000, of which a rank receives 7/8.

    Slow computation hides all but the gathers of embedding and first layer, and the reductions of embedding and head.
    Fast computation hides nothing: forward gathers 31 layers and the head, and the norm counts as nothing; backward
    gathers and reduces 32 layers.  With gradients, nothing is gathered but all weights after the step.  A hidden
    message delays computation by 12% of its time.
    """
    table, layer, second = 525_336_576, 218_112_000, 7 / 8 / 100e9
    shown, hidden = 2 * (table + layer) + 4 * 2 * table, 2 * (31 * layer + table) + (2 + 4) * 32 * layer
    for rate, num_bytes in ((1e-3, shown + 0.12 * hidden), (1e15, shown + hidden)):
        time = predicted(flat(rate, intra_gb_s=100.0), parallel={"cp": 8, "shard": "weights"})
        assert time.parts["dp"] == pytest.approx(8 * num_bytes * second)
        time = predicted(flat(rate, intra_gb_s=100.0), parallel={"cp": 8, "shard": "gradients"})
        reduced = 4 * (2 * table + 32 * layer * (1 if rate > 1 else 0.12))
        assert time.parts["dp"] == pytest.approx((8 * reduced + 2 * (2 * table + 32 * layer + 4096)) * second, rel=1e-6)
    alone = predicted(flat(1e-3, intra_gb_s=100.0), parallel={"cp": 8, "shard": "weights", "overlap": False})
    assert alone.parts["dp"] == pytest.approx(8 * (shown + 4 * 32 * layer + 0.12 * (hidden - 4 * 32 * layer)) * second)
    # Two nodes with a copy each: after the step, the fp32 parts of 1/8 are summed, half of them there and half back.
    parallel = {"cp": 8, "shard": "weights", "shard_size": 8}
    two = predicted(flat(1e-3, intra_gb_s=100.0, inter_gb_s=10.0), num_gpus=16, parallel=parallel)
    summed = 4 * (2 * table + 32 * layer + 4096) / 8 / 10e9
    assert two.parts["dp"] == pytest.approx(4 * (shown + 0.12 * hidden) * second + summed, rel=1e-6)


def test_a_rank_updates_the_gradients_that_it_has() -> None:
    """Adam moves 12 + 14 bytes or what the optimizer says; clipping 16 bytes for each gradient that a rank has."""
    whole, sharded = (
        predicted(flat(TFLOPS, optimizer_gb_s=1.0), parallel={"cp": 8, "shard": shard}).parts["optimizer"]
        for shard in ("optimizer", "gradients")
    )
    assert whole - sharded == pytest.approx(16 * 8_030_261_248 * 7 / 8 / 1e9)


def test_messages_of_cp() -> None:
    """Other ranks get 2 x 8 x 128 elements of a token in 32 layers: twice in bf16, and gradients in fp32: 524,288
    bytes.

    A rank receives 7 / 8 of a pack, and attention hides all messages.  An all-gather hides none.
    """
    received = MILLION * 7 / 8 * 524_288 / 100e9
    assert predicted(flat(TFLOPS, intra_gb_s=100.0)).parts["cp"] == 0
    slow = predicted(flat(1e15, intra_gb_s=100.0))
    assert slow.parts["cp"] == pytest.approx(8 * received)
    gathered = predicted(flat(TFLOPS, intra_gb_s=100.0), parallel={"cp_comm": "all_gather"})
    assert gathered.parts["cp"] == pytest.approx(8 * received)
    # a2a sends queries, keys, values and outputs of the rank's tokens, in forward and backward, in bf16: 40,960 bytes
    # each.
    exchanged = predicted(flat(TFLOPS, intra_gb_s=100.0), parallel={"cp_comm": "a2a"})
    heads = 32 * 2 * MILLION / 8 * 2 * 2 * (4096 + 1024) * 7 / 8 / 100e9
    assert exchanged.parts["cp"] == pytest.approx(8 * heads)


def test_dynamic_cp_sends_what_one_rank_cannot_hold() -> None:
    """Documents of an eighth of the pack stay on their rank, and those of a quarter are on two ranks."""
    sections = {"parallel": {"dynamic_cp": True}}
    rates = flat(1e15, intra_gb_s=100.0)
    assert predicted(rates, Lengths.all_of(MILLION // 8), **sections).parts["cp"] == 0
    two = predicted(rates, Lengths.all_of(MILLION // 4), **sections)
    assert two.parts["cp"] == pytest.approx(8 * MILLION / 8 * 524_288 / 100e9)


def test_messages_between_nodes() -> None:
    """16 GPUs on two nodes: a ring of cp 16 crosses the network; gradients use the network ports of all 8 ranks of a
    node."""
    rates = flat(1e15, intra_gb_s=1e9, inter_gb_s=10.0)
    time = predicted(rates, num_gpus=16, parallel={"cp": 16})
    assert time.parts["cp"] == pytest.approx(8 * MILLION * 15 / 16 * 524_288 / 10e9)
    # Weights in bf16 and gradients in fp32, 15 / 16 of them, through 8 ports of 10 GB/s; no computation hides them.
    assert time.parts["dp"] == pytest.approx(8_030_261_248 * 6 * 15 / 16 / 80e9)
    halved = {"optim": {"grad_dtype": "bf16"}, "train": {"global_batch_size": 1}}
    time = predicted(rates, num_gpus=16, parallel={"cp": 16}, **halved)
    assert time.parts["dp"] == pytest.approx(8_030_261_248 * 4 * 15 / 16 / 80e9)
    fast = predicted(flat(TFLOPS, intra_gb_s=1e9, inter_gb_s=10.0), num_gpus=16, parallel={"cp": 16})
    assert fast.parts["dp"] == pytest.approx(8_030_261_248 * 2 * 15 / 16 / 80e9)  # backward hides the gradients


def test_messages_of_experts_and_stages() -> None:
    """A token goes to 8 experts and back, each time with 4096 bf16 elements and half of an fp32 weight; the same in
    backward."""
    experts = {"num_experts": 16, "top_k": 8, "ffn_hidden_size": 1024}
    model = {**LLAMA_8B, "moe": experts}
    rates = flat(TFLOPS, intra_gb_s=100.0)
    time = predicted(rates, model=model, parallel={"cp": 8, "ep": 8})
    sent = 32 * 4 * MILLION / 8 * 8 * (8192 + 2) * 7 / 8
    assert time.parts["ep"] == pytest.approx(8 * sent / 100e9)
    # A stage sends hidden states between nodes, 8,192 bytes per token, and gets their gradient.
    time = predicted(flat(TFLOPS, inter_gb_s=10.0), num_gpus=16, parallel={"cp": 8, "pp": 2})
    assert time.parts["pp"] == pytest.approx(8 * 2 * MILLION / 8 * 8192 / 10e9)


def test_deepep_sends_a_token_to_a_node_once() -> None:
    """32 ranks on 4 nodes, 8 experts of a token: 4 x (1 - (3/4) ** 8) = 3.6 nodes, 3/4 of them others, instead of 8."""
    model = {**LLAMA_8B, "moe": {"num_experts": 32, "top_k": 8, "ffn_hidden_size": 1024}}
    rates = flat(TFLOPS, intra_gb_s=1e9, inter_gb_s=10.0)
    found = [
        predicted(rates, num_gpus=32, model=model, parallel={"cp": 8, "ep": 32, "ep_comm": way}).parts["ep"]
        for way in ("alltoall", "deepep")
    ]
    sent = 2 * 32 * 4 * MILLION / 8 * (8192 + 2) / 10e9  # 2 packs for each of 4 dp ranks
    nodes = 4 * (1 - 0.75**8)
    assert found == pytest.approx([sent * 8 * 3 / 4, sent * nodes * 3 / 4])


def test_layers_without_experts_take_the_time_of_dense_layers() -> None:
    """With experts in 24 of 32 layers, every part is a quarter of a dense model's and three quarters of that with
    experts in all layers."""
    experts = {"num_experts": 16, "top_k": 8, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 512}
    rates = flat(TFLOPS, intra_gb_s=100.0, elementwise_gb_s=1000.0)
    layout, train = {"cp": 4, "tp": 2, "ep": 8}, {"recompute": "selective"}

    def parts(dense_layers: int) -> dict[str, float]:
        model = {**LLAMA_8B, "moe": {**experts, "dense_layers": dense_layers}}
        return predicted(rates, model=model, parallel=layout, train=train).parts

    dense = predicted(rates, parallel={**layout, "ep": 1}, train=train).parts
    found, of_experts = parts(8), parts(0)
    for name in ("linear", "elementwise", "recompute", "tp", "ep"):
        assert found[name] == pytest.approx(dense[name] / 4 + of_experts[name] * 3 / 4), name
    assert of_experts["ep"] > dense["ep"] == 0.0


def test_activation_offload_shows_where_copies_take_longer() -> None:
    """full saves 8,192 bytes per token and layer: 131,072 x 32 x 8,192 = 3.436e10 bytes, at 1 GB/s 34.36 s.

    Forward of the pack takes (LINEAR + ATTENTION) / 3 / 8 / RATE = 37.9 s, backward three times as long: both hide all
    copies.  At 0.5 GB/s, 68.7 - 37.9 s of forward remain exposed.
    """
    sections: dict[str, Any] = {"train": {"recompute": "full", "offload_fraction": 1.0}}
    assert predicted(flat(TFLOPS, pcie_gb_s=1.0), **sections).parts["offload"] == 0
    time = predicted(flat(TFLOPS, pcie_gb_s=0.5), **sections)
    assert time.parts["offload"] == pytest.approx(8 * (2 * 34.359738368 - (LINEAR + ATTENTION) / 24 / RATE), rel=1e-6)
