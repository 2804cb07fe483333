"""The equations of memory, checked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from sft.config.linear_attention import LinearAttentionConfig
from sft.estimate import memory
from sft.estimate.communicators import communicators, compared, nccl_bytes
from sft.estimate.gpus import GIB
from sft.estimate.memory import Memory, estimate, longest_context, stage_memory
from sft.estimate.parameters import Numbers
from sft.estimate.saved_by_layer import LayerBytes
from sft.estimate.working_sets import ATTENTION, GATHERED, HEAD, MATRICES, MLP, UPDATE
from sft.layers.adapters import Trained
from sft.layers.mixers.delta import DeltaBytes, HeadSizes
from sft.layers.mixers.mamba import MambaBytes, MambaSizes
from sft.layers.mixers.recurrent import STATE_INTERVAL
from sft.layers.mixers.softmax_bytes import LARGE_SCORE_TILE, SCORE_TILE, PortableBytes
from sft.layers.mixers.te_bytes import TransformerEngineBytes
from sft.layers.rank_share import RankShare
from sft.layers.tree_share import TreeDocuments, TreeShare
from sft.mcore.attention import torch_kernel
from sft.mcore.linear_attention import schedule
from tests.builders import LLAMA_8B, layout_config
from tests.unit.fixtures.layouts import TINY, adapted, of, parameters, stage_of
from tools import memory_table

KIB = 1024
TINY_PARAMETERS = 684
EXPERTS = {**TINY, "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 2}}


def most(found: Memory, name: str) -> float:
    """The most bytes that any working set has under this name."""
    return max(working.by_name.get(name, 0.0) for working in found.sets)


def taken(world_size: int = 1, **sections: Any) -> Memory:
    return estimate(*of(world_size, **sections), 10, 1024)


# --- saved bytes of a layer and token ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recompute, norms, expected",
    [("selective", True, 972), ("selective", False, 932), ("full", True, 128), ("none", True, 2704)],
)
def test_what_autograd_keeps(recompute: str, norms: bool, expected: int) -> None:
    """The same model and counts as in tests/ranks/test_saved_tensors.py; without recomputation those of a fused
    activation, which saves 4 x 192 bytes less."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 8, "num_query_groups": 2, "head_dim": 16}
    model = layout_config(model={**TINY, **sizes, "qk_norm": norms}).model
    assert LayerBytes.of(PortableBytes(model=model), recompute).total == expected
    # Norms after attention and MLP save their inputs instead of their outputs; two norms across heads save 2 scales.
    after = model.model_copy(update={"norm_placement": "post", "qk_norm_across_heads": norms})
    more = {"full": 0, "none": 0, "selective": 128}[recompute] + (norms and recompute != "full") * (8 - 40)
    assert LayerBytes.of(PortableBytes(model=after), recompute).total == expected + more
    # Norms before and after also save the outputs of attention and MLP, 128 each, and two scales of 4; selective only
    # the first of each.
    both = model.model_copy(update={"norm_placement": "both"})
    more = {"full": 0, "none": 2 * (128 + 4), "selective": 128 + 4}[recompute]
    assert LayerBytes.of(PortableBytes(model=both), recompute).total == expected + more


DELTA = LinearAttentionConfig(layers=[1], num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=32)


def test_what_linear_attention_keeps() -> None:
    """Elements: mixed channels 2 x 32 + 128, z 128, two numbers for each of 4 heads; a state of 4 x 16 x 32 every 512
    tokens.

    tests/ranks/test_saved_tensors.py counts these bytes for packs without saved states, 16 less per token.
    """
    assert STATE_INTERVAL == schedule.CHUNK * schedule.INTERVAL
    sizes = {"hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 8, "num_query_groups": 2, "head_dim": 16}
    config, layout = of(model={**TINY, **sizes, "num_layers": 2, "qk_norm": True}, train={"recompute": "selective"})
    model = config.model.model_copy(update={"linear_attention": DELTA})
    mixed = config.model_copy(update={"model": model})
    delta = DeltaBytes.of(model, layout.share(mixed), 512)
    kept = {"layer's input": 128, "norms' scales": 4, "MLP's norm input": 128}
    assert LayerBytes.of(delta, "selective").by_name == kept
    kept |= {"queries, keys, values": 384, "decays and beta": 56, "states": 16, "delta rule's output": 256}
    kept |= {"projections": 656, "gated norm's scale": 16}
    assert LayerBytes.of(delta, "none").by_name == kept | {
        "normed input": 128, "gated norm's output": 256, "MLP norm's scale": 4, "MLP's normed input": 128,
        "gate and up": 768, "gated": 384,
    }  # fmt: skip
    assert LayerBytes.of(delta, "full").total == 128
    # Mixed channels 192 and values 128, bf16: the gradients of the norm take 3 x 128, and its output is free; the delta
    # rule would take 192; six blocks in fp32.
    assert delta.local(512) == 512 * 2 * 256 + 6 * 4 * 512 * 192
    assert delta.local(2**20) == 2**20 * 2 * 256 + 6 * 4 * 2**24
    cpu = mixed.model_copy(update={"run": mixed.run.model_copy(update={"device": "cpu"})})
    assert DeltaBytes.of(model, layout.share(cpu), 512).local(2**20) == 2**20 * 2 * 256 + 6 * 4 * 2**20
    # Over cp, A and the states before two fragments: 2 x 4 x (16 x 16 + 16 x 32) numbers for 128 tokens.
    four = of(4, model={**TINY, **sizes}, parallel={"cp": 4})[1]
    over_cp = DeltaBytes.of(model, four.share(mixed), 512)
    assert over_cp.saved["maps"] == 2 * 4 * (16 * 16 + 16 * 32) * 4 / 128
    # A trunk with branches at 5 places: 5 maps and 6 states are saved, and backward has those of all 11 fragments.
    trees = TreeShare((TreeDocuments(1, 400, 0), TreeDocuments(5, 20, 200)), forks=5, keys=380)
    of_trees = DeltaBytes.of(model, replace(layout.share(mixed), trees=trees), 512)
    assert of_trees.saved["maps"] == 4 * (5 * 16 * 16 + 6 * 16 * 32) * 4 / 512
    assert of_trees.local(512) - delta.local(512) == 3 * 11 * 4 * 16 * (16 + 2 * 32) * 4
    full = LayerBytes.of(PortableBytes(model=config.model), "selective").total
    before, after = (estimate(one, layout, 10, 512).layers for one in (config, mixed))
    assert before == 2 * 512 * full and after == 512 * (full + 260)
    gated = PortableBytes(model=config.model.model_copy(update={"attention_output_gate": True}))
    assert LayerBytes.of(gated, "selective").total == full + 128 * (2 + 2)
    plain = replace(gated, rank=RankShare(is_fused=False))  # a CPU saves the gate in fp32
    assert LayerBytes.of(plain, "selective").total == full + 128 * (4 + 2)


def test_maps_and_states_of_mamba() -> None:
    """4 heads: A is one number, a state has 24 x 16.  The trunk and its branches are those of the test above."""
    model, sizes = layout_config(model=TINY).model, MambaSizes(heads=4, groups=2, head_dim=16, state_dim=24)
    documents = (TreeDocuments(1, 400, 0), TreeDocuments(5, 20, 200))
    none, trees = TreeShare(), TreeShare(documents, forks=5, keys=380)
    found = {
        (cp, bool(of_pack)): MambaBytes(
            model=model, rank=RankShare(cp=cp, trees=of_pack), heads=sizes, tokens=512 / cp, block_numbers=2**20
        )
        for cp in (1, 2)
        for of_pack in (none, trees)
    }
    alone, number, state = found[1, False], 4 * 4, 4 * 24 * 16 * 4
    # x and the gradient of the gate take 64 numbers each, B and C 48; backward has freed what is as wide as two others.
    assert alone.local(512) == 512 * 2 * (64 + 64 + 2 * 48) + 6 * 4 * 512 * (64 + 2 * 48)
    assert "maps" not in alone.saved
    assert found[1, True].saved["maps"] == (5 * number + 6 * state) / 512
    assert found[2, False].saved["maps"] == 2 * (number + state) / 256
    # Over cp 2, a document is long from 103 tokens on: 2 fragments of the trunk on each rank, and half of 5 branches
    # and 5 forks.
    assert sizes.max_short(2) == 102 and found[2, True].saved["maps"] == 7 * (number + state) / 256
    for case, fragments in (((1, True), 11), ((2, False), 2), ((2, True), 7)):
        assert found[case].local(512) - alone.local(512) == 3 * fragments * (number + 2 * state)


def test_decays_of_channels_take_more_than_decays_of_heads() -> None:
    """A head of 128.  FLA passes 1984 and 3328 numbers of two bytes for a token; dg has 128 numbers in fp32."""
    model = layout_config(model=TINY).model
    found = {
        (decays, is_fla): DeltaBytes(
            model=model,
            heads=HeadSizes(key_heads=1, value_heads=1, key_dim=128, value_dim=128, decays=decays),
            tokens=512,
            block_numbers=0,
            is_fla=is_fla,
        ).local(512)
        for decays in (1, 128)
        for is_fla in (False, True)
    }
    assert found == {
        (1, False): 512 * 2 * (1 + 2) * 128,
        (128, False): 512 * (2 * (1 + 2) * 128 + 512),
        (1, True): 512 * 2 * ((1 + 2) * 128 + 1984),
        (128, True): 512 * (2 * ((1 + 2) * 128 + 3328) + 512),
    }


def test_what_a_token_leaves_by_name() -> None:
    """Saved bytes of a token by name: hidden 4096, queries 4096, keys 1024, ffn 14,336, two bytes each."""
    model = layout_config(model={**LLAMA_8B, "qk_norm": True}).model
    assert LayerBytes.of(PortableBytes(model=model), "none").by_name == {
        "layer's input": 8192,
        "normed input": 8192,
        "normed queries and keys": 10_240,
        "norms' scales": 4 + 4 * 40,
        "MLP norm's scale": 4,
        "queries, keys, values": 12_288,
        "attention's output": 8192,
        "log-sum-exp": 128,
        "MLP's norm input": 8192,
        "MLP's normed input": 8192,
        "gate and up": 57_344,
        "gated": 28_672,
    }
    kept = {"layer's input": 8192, "queries, keys, values": 12_288, "attention's output": 8192}
    kept |= {"log-sum-exp": 128, "MLP's norm input": 8192, "norms' scales": 164}
    assert LayerBytes.of(PortableBytes(model=model), "selective").by_name == kept
    assert LayerBytes.of(TransformerEngineBytes(model=model), "selective").by_name == {
        **kept,
        "normed input": 8192,
        "normed queries and keys": 10_240,
    }


def test_tensor_parallelism_divides_heads_and_the_mlp() -> None:
    """Hidden states between layers are divided only with sequence parallelism."""
    model = layout_config(model=LLAMA_8B).model
    found = LayerBytes.of(PortableBytes(model=model, rank=RankShare(tp=2)), "none").by_name
    assert (found["layer's input"], found["queries, keys, values"], found["log-sum-exp"]) == (8192, 6144, 64)
    assert (found["gate and up"], found["MLP's normed input"]) == (28_672, 8192)
    halved = LayerBytes.of(PortableBytes(model=model, rank=RankShare(tp=2, sequence=0.5)), "none").by_name
    assert halved["MLP's normed input"] == 4096
    assert LayerBytes.of(PortableBytes(model=model, rank=RankShare(width=4)), "full").total == 16_384


def test_a_token_among_experts() -> None:
    """A token goes to 2 of 8 experts of width 2: twice 4 hidden elements there and back; gate and up 2 x 2 x 2, gated 2
    x 2."""
    dense, sparse = (PortableBytes(model=layout_config(model=sizes).model) for sizes in (TINY, EXPERTS))
    found = LayerBytes.of(sparse, "none").by_name
    assert found["sent to experts"] == 16 and "from experts" not in found  # no operation needs it in backward
    assert (found["gate and up"], found["gated"], found["router"]) == (16, 8, 8 * 14 + 2 * 24)
    assert LayerBytes.of(sparse, "selective").mlp == {"MLP norm's scale": 4, "router": 160, "sent to experts": 16}
    assert LayerBytes.of(dense, "selective").mlp == {} == LayerBytes.of(sparse, "full").mlp
    moe = sparse.model.moe.model_copy(update={"shared_ffn_hidden_size": 6, "shared_gate": True})
    shared = LayerBytes.of(PortableBytes(model=sparse.model.model_copy(update={"moe": moe})), "none").by_name
    # Elements: 2 x 6 and 6 inside the shared expert, its output of 4, and the gate's number
    assert {name: size for name, size in shared.items() if name not in found} == {
        "shared gate and up": 24,
        "shared gated": 12,
        "shared expert's output and gate": 10,
    }
    te = TransformerEngineBytes(model=sparse.model)
    assert LayerBytes.of(te, "selective").mlp.keys() == {*LayerBytes.of(sparse, "selective").mlp, "MLP's normed input"}


# --- weights, gradients, optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("precision, each", [("bf16", (2, 4, 12)), ("fp32", (4, 4, 8))])
def test_a_parameter_takes_18_or_16_bytes(precision: str, each: tuple[int, int, int]) -> None:
    """In fp32, the weights are also the main parameters."""
    found = taken(run={"precision": precision})
    assert (found.weights, found.gradients, found.optimizer) == tuple(n * TINY_PARAMETERS for n in each)


def test_bf16_gradients_take_2_bytes_and_fp32_sums_for_a_time() -> None:
    """On dp 2, the update needs fp32 gradients of the rank's half.  The head sums the gradient of 128 x 4 over chunks
    in fp32, and backward of the MLP that of 3 x 4 x 8 over tiles; an adapter's gradient needs no such sums."""
    halved = {"optim": {"grad_dtype": "bf16"}, "train": {"global_batch_size": 2, "mlp_tile": 64}}
    plain = {"train": halved["train"]}
    found, usual = taken(2, **halved), taken(2, **plain)
    assert (found.gradients, usual.gradients) == (2 * TINY_PARAMETERS, 4 * TINY_PARAMETERS)
    assert most(found, UPDATE) == 4 * TINY_PARAMETERS / 2 and most(usual, UPDATE) == 0
    assert most(found, HEAD) - most(usual, HEAD) == 4 * 128 * 4
    assert most(found, MLP) - most(usual, MLP) == 4 * 3 * 4 * 8
    assert taken(4, **halved, parallel={"tp": 2}).gradients == taken(4, **plain, parallel={"tp": 2}).gradients / 2
    assert found.sets[-1].freed == found.layers  # layers have nothing saved when the update begins
    qkv = adapted("self_attention.linear_qkv", (4, 4, 4), (0,), (1,), (2,))
    sections = {**halved, "lora": {"rank": 2}}
    trained = Trained(adapted=[qkv], whole=[])
    lora, usual = (estimate(*of(2, **s), 10, 1024, trained) for s in (sections, {**sections, "optim": {}}))
    assert (most(lora, HEAD), most(lora, MLP)) == (most(usual, HEAD), most(usual, MLP))


def test_the_distributed_optimizer_takes_6_and_a_share_of_12() -> None:
    assert taken(8, parallel={"cp": 2}).static == pytest.approx((6 + 12 / 8) * TINY_PARAMETERS)  # dp 4
    assert taken(8, parallel={"cp": 2, "distributed_optimizer": False}).static == 18 * TINY_PARAMETERS


def test_lora_trains_the_adapters_only() -> None:
    """qkv has 12 x 4 weights (q, k and v with adapters of their own), proj 4 x 4: adapters of rank 2 have 2 x (3 x 4 +
    12) and 2 x (4 + 4) elements, together 64."""
    qkv = adapted("self_attention.linear_qkv", (4, 4, 4), (0,), (1,), (2,))
    trained = Trained(adapted=[qkv, adapted("self_attention.linear_proj", (4,), (0,))], whole=[])
    found = estimate(*of(2, lora={"rank": 2}), 10, 1024, trained)
    assert (found.weights, found.gradients, found.optimizer) == (2 * (TINY_PARAMETERS + 64), 4 * 64, 12 * 64 / 2)
    split = estimate(*of(2, lora={"rank": 2}, parallel={"tp": 2}), 10, 1024, trained)
    assert split.gradients == 4 * (2 * (3 * 4 + 12 / 2) + 2 * (4 / 2 + 4))
    assert trained.describe(2, TINY_PARAMETERS) == "trained 64 in 4 adapters of rank 2 (9.36% of 684)"


def test_experts_are_shared_out_by_themselves() -> None:
    """8 experts of 24 parameters are 192; a rank of ep 4 holds 48, and half of their states, because 8 / 4 = 2 ranks
    share them.  All other parameters are 588 and a router of 32."""
    found = taken(8, model=EXPERTS, parallel={"cp": 2, "ep": 4})
    assert found.weights == 2 * (620 + 48)
    shared = {**EXPERTS, "moe": {**EXPERTS["moe"], "shared_ffn_hidden_size": 6, "shared_gate": True}}
    assert taken(8, model=shared, parallel={"cp": 2, "ep": 4}).weights == 2 * (620 + 48 + 3 * 4 * 6 + 4)
    assert found.optimizer == pytest.approx(12 * (620 / 8 + 48 / 2))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_dense_layers_before_experts(recompute: str) -> None:
    """A model with one layer of each kind saves the sum of a dense model's layer and of a layer with experts."""
    train = {"recompute": recompute}
    mixed = {**EXPERTS, "num_layers": 2, "moe": {**EXPERTS["moe"], "dense_layers": 1}}
    kinds = [taken(model=model, train=train).layers for model in (TINY, EXPERTS)]
    assert taken(model=mixed, train=train).layers == sum(kinds) and kinds[0] != kinds[1]


def test_offload_moves_the_optimizer_to_the_host() -> None:
    """12 bytes in host memory, and 4 bytes for the gradient in transfer."""
    found = taken(optim={"offload_fraction": 0.75})
    assert (found.optimizer, found.host_optimizer) == (3 * TINY_PARAMETERS, 12 * TINY_PARAMETERS)


def test_tensor_and_pipeline_parallelism_divide_parameters() -> None:
    """tp 2: a rank has 256 of the embedding, 80 of the 160 parameters of the layer's matrices, and whole norms."""
    assert taken(2, parallel={"tp": 2}).weights == 2 * (256 + 80 + 8 + 4)
    wanted, layout = of(2, {**TINY, "num_layers": 2}, parallel={"pp": 2})
    assert parameters(wanted, layout, 0) == Numbers(dense=512 + 168, experts=0)
    assert parameters(wanted, layout, 1).dense == 512 + 168 + 4  # tied: the first and the last stage each have a copy


def test_a_stage_has_the_parameters_of_its_own_layers() -> None:
    """4 layers: the first is dense, with 96 parameters in its MLP; the others have 8 experts of 24 and a router of 32.
    Two stages, with one chunk each or two."""
    mixed = {**EXPERTS, "num_layers": 4, "moe": {**EXPERTS["moe"], "dense_layers": 1}}
    for virtual in (1, 2):
        parallel = {"pp": 2, "virtual_stages": virtual}
        wanted, layout = of(2, mixed, parallel=parallel, train={"global_batch_size": 4})
        first, last = (parameters(wanted, layout, stage) for stage in (0, 1))
        assert (first.experts, last.experts) == (8 * 24, 2 * 8 * 24)
        assert last.dense - first.dense == 32 - 96 + 4  # a router, no dense MLP, and the last norm
    assert layout.chunks(4, 0) == [range(1, 2), range(3, 4)] and layout.chunks(4, 1) == [range(2, 3), range(4, 5)]


# --- activations -------------------------------------------------------------------------------------------------


def test_a_middle_stage_may_need_most() -> None:
    """Only layers 3 and 4 of 8 have linear attention, with 64 value heads: the second of four stages saves most."""
    linear = {"layers": [3, 4], "num_key_heads": 16, "num_value_heads": 64}
    model = {**TINY, "num_layers": 8, "hidden_size": 64, "linear_attention": linear}
    config, layout = of(4, model=model, parallel={"pp": 4}, train={"recompute": "none"})
    assert estimate(config, layout, 10, 1024).stage == 1


def test_layers_of_llama_8b() -> None:
    """1024 tokens in 32 layers: 36 KiB and 132 bytes per token and layer."""
    found = estimate(*of(1, LLAMA_8B, train={"recompute": "selective"}), 128_256, 1024)
    assert found.layers == 1024 * 32 * (36 * KIB + 132)
    assert found.ends == 1024 * 4 * 128  # cosine and sine
    # the MLP half, the gradients of gate and up, the gradients of its input and output, and the gradient of the widest
    # weight
    around = 1024 * 2 * 8192 + 2 * 4096 * 28_672
    assert most(found, MLP) == 1024 * (8196 + 3 * 28_672 + 57_344) + around
    # attention has 16 x 4096 and 6 x 1024; the output of its norm again; minus one hidden state, because the input of
    # the MLP half is free
    assert most(found, ATTENTION) == 1024 * (71_680 + 8192) + around - 1024 * 8192
    assert [working.freed for working in found.sets] == [-8192 * 1024, 0, 8192 * 1024]
    # The hidden states after the last norm, and their gradient; those before it count as saved by layers.
    head = 4096 * 128_256 * 2 + 2 * 8192 * 1024
    assert most(found, HEAD) == head and found.peak.by_name == {HEAD: head} and most(found, GATHERED) == 0
    assert found.device == found.static + found.layers + found.ends + head + 8192 * 1024
    assert found.items()["saved by layers"] == found.layers + 8192 * 1024


def test_a_tile_is_all_that_the_mlp_works_on() -> None:
    """The MLP half has 151,556 bytes per token.  With a small tile, backward of attention takes more."""
    around = 1024 * 2 * 8192 + 2 * 4096 * 28_672
    found = estimate(*of(1, LLAMA_8B, train={"recompute": "selective", "mlp_tile": 256}), 128_256, 1024)
    assert most(found, MLP) == 256 * 151_556 + around
    assert most(found, ATTENTION) == 1024 * (71_680 + 8192) + around - 1024 * 8192 > most(found, MLP)
    whole = estimate(*of(1, LLAMA_8B, train={"recompute": "full"}), 128_256, 1024)
    tiled = estimate(*of(1, LLAMA_8B, train={"recompute": "full", "mlp_tile": 256}), 128_256, 1024)
    assert most(whole, MLP) - most(tiled, MLP) == 151_556 * 768
    # The tensors of attention wait meanwhile: 36 KiB without the layer's input, and its normed input.  The layer's
    # output has no memory.  In backward of attention the input of the MLP is free, and with tiles so is the gradient of
    # the layer's output.
    assert most(whole, MLP) == 1024 * (151_556 + 36 * KIB + 132) + around - 1024 * 8192
    assert most(whole, ATTENTION) == 1024 * (71_680 + 28 * KIB + 132) + around
    assert most(tiled, ATTENTION) == most(whole, ATTENTION) - 1024 * 8192
    none = estimate(*of(1, LLAMA_8B, train={"mlp_tile": 256}), 128_256, 1024)
    assert none.layers == 1024 * 32 * (44 * KIB + 132)


def test_heads_in_chunks() -> None:
    """8 chunks of 4 heads and one key head.  Each token saves the output and 32 fp32 sums, and no queries and keys.

    In backward a chunk has queries, keys and values, and again those of a whole layer with 4 heads; beside them are the
    gradients of the normed input and of the other heads' output, and for the flash kernel two copies of a chunk and its
    result.
    """
    chunks = {"head_chunks": 8}
    saved = estimate(*of(1, LLAMA_8B, train={**chunks, "recompute": "selective"}), 128_256, 1024)
    assert saved.layers == 1024 * 32 * (
        8192 + 8192 + 128 + 4 + 8192
    )  # input, output, sums, a norm's scale, MLP's input
    full = {"recompute": "full", "mlp_tile": 256}
    found = estimate(*of(1, LLAMA_8B, train={**chunks, **full}), 128_256, 1024)
    chunk = 6 * 256 + (3 * 4 + 1) * 256 + 4 * 4 * 128 + 2 * (2 * 1 + 2 * 4) * 128 + 3 * 4 * 256
    waits = 8192 + 8192 + 132  # normed input, output and its sums, scales
    gradients = 8192 + 28 * 256 + 8192  # of normed input, of the output's other heads, of the residual stream
    assert most(found, ATTENTION) == 1024 * (chunk + waits + gradients) + 2 * 4096 * 28_672


def test_tokens_in_experts_while_backward_computes_them() -> None:
    """2 of 8 experts of width 2 in bf16: a token sends 2 x 4 x 2 bytes; gate and up have 2 x 2 x 2 x 2, gated half of
    it.

    The gradient of the experts' output is as large as the sent tokens.  If only the experts are recomputed, the output,
    its gradient and the gradient of the input exist all the time, and at the end of recomputation also the output in
    the order of experts.  With full, the norm's output and all 160 bytes of the router are recomputed, and three
    tensors are as large as the sent tokens.
    """
    sent, gate_up, gated, norm, router = 16, 16, 8, 8, 4 + 160
    around = 8 * 1024 + 2 * 128 * 4  # hidden states, and the tied table
    one_by_one = taken(model=EXPERTS, run={"device": "cpu"}, train={"recompute": "none"})
    # Without recomputation: the gradient of the output, in one piece and by expert.
    assert most(one_by_one, MLP) == 1024 * 2 * sent + around and one_by_one.sets[1].freed == 0
    found = {recompute: taken(model=EXPERTS, train={"recompute": recompute}) for recompute in ("none", "selective")}
    assert most(found["selective"], MLP) == 1024 * (gate_up + gated + 4 * sent) + around
    one_token = estimate(*of(model=EXPERTS, train={"recompute": "selective"}), 10, 1)
    # When backward ends, all gradients of 8 experts of 3 x 2 x 4 parameters exist: more than the tensors of a few
    # tokens.
    assert most(one_token, MLP) == 5 * sent + 2 * 8 * 3 * 2 * 4 + 8 + 2 * 128 * 4
    on_cpu = taken(model=EXPERTS, run={"device": "cpu"}, train={"recompute": "selective"})  # SwiGLU is not fused
    assert most(on_cpu, MLP) - most(found["selective"], MLP) == 1024 * 3 * 8
    assert most(found["none"], MLP) == 1024 * (gate_up + gated + sent) + around
    wide = {**EXPERTS, "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 8}, "activation": "geglu"}
    together = taken(model=wide, train={"recompute": "selective"})
    assert most(together, MLP) == 1024 * (2 * 64 + 32 + 3 * sent) + around  # 64 for gate, and 64 for up
    full = taken(model=EXPERTS, train={"recompute": "full"})
    inside = gate_up + gated + norm + router + sent + 3 * sent
    dense = taken(train={"recompute": "full"})  # the same tensors of attention wait; the MLP has width 8
    assert most(full, MLP) - most(dense, MLP) == 1024 * (inside - (norm + 4 + 32 + 16 + 32)) - (2 * 4 * 16 - 2 * 4 * 4)


def test_the_sum_of_repeated_experts_beside_a_shared_expert() -> None:
    """The shared expert's output and the sum of the others have 4 numbers; gate, up and gated, of 2, are recomputed."""
    plain, shared = (
        most(taken(model={**EXPERTS, "moe": {**EXPERTS["moe"], **more}}, train={"recompute": "full"}), MLP)
        for more in ({}, {"shared_ffn_hidden_size": 2})
    )
    assert shared - plain == 1024 * 2 * (2 * 4 + 3 * 2)


def test_backward_of_a_layer_finds_what_the_layers_after_it_saved_free() -> None:
    """Layers 1 and 2 of 4 are dense, 3 and 4 have experts: when backward reaches a dense layer, the tensors of both
    others are free."""
    mixed = {**EXPERTS, "num_layers": 4, "moe": {**EXPERTS["moe"], "dense_layers": 2}}
    saved = [taken(model=model).layers for model in (TINY, EXPERTS)]
    head, mlp, attention, dense_mlp, dense_attention = taken(model=mixed).sets
    gated = 1024 * 16  # of a dense layer, width 8
    assert (head.freed, mlp.freed, dense_mlp.freed) == (-1024 * 8, 0, gated + 2 * saved[1])
    assert dense_attention.freed > 2 * saved[1] > attention.freed
    offloaded = taken(model=mixed, train={"recompute": "full", "offload_fraction": 1.0})
    assert {working.freed for working in offloaded.sets} == {-1024 * 8, 0.0}
    # With two stages, each stage has layers of one kind.
    wanted, layout = of(2, mixed, parallel={"pp": 2}, train={"global_batch_size": 2})
    first, last = (stage_memory(stage_of(wanted, layout, stage), 1024) for stage in (0, 1))
    assert (first.layers, last.layers) == (2 * 2 * saved[0], 2 * saved[1])
    assert [len(first.sets), len(last.sets)] == [2, 3]


def test_an_adapter_of_gate_and_up_needs_no_output_of_its_own() -> None:
    """Its product is added to the weight's output, in the same memory, so it takes what an adapter of proj takes."""
    lora: dict[str, Any] = {"lora": {"rank": 2}, "train": {"recompute": "selective"}}
    for module in ("mlp.linear_fc1", "self_attention.linear_proj"):
        found = estimate(*of(**lora), 10, 1024, Trained(adapted=[adapted(module, (8, 8), (0, 1))], whole=[]))
        assert most(found, MLP) == 1024 * (12 + 32 + 16 + 32 + 2 * 8)


def test_attention_where_no_keys_are_shared() -> None:
    """The kernel computes the summed gradients of keys and values directly: 4 x 4096 less.

    The tensors that the MLP saved without recomputation are free again, and so is the input of the MLP half.
    """
    shared, own = (of(1, {**LLAMA_8B, "num_query_groups": groups}) for groups in (16, 32))
    around = 2 * 4096 * 28_672 + 1024 * 8192
    assert estimate(*own, 10, 1024).sets[2].freed == 1024 * (4 + 8192 + 57_344 + 28_672 + 8192)
    assert most(estimate(*shared, 10, 1024), ATTENTION) == 1024 * (16 * 4096 + 6 * 2048) + around
    assert most(estimate(*own, 10, 1024), ATTENTION) == 1024 * (12 * 4096 + 6 * 4096) + around


@pytest.mark.parametrize(
    "share, here, away", [(1.0, 2, 30), (0.92, 2, 30), (0.9, 3, 29), (0.5, 16, 16), (0.01, 31, 1), (0.0, 32, 0)]
)
def test_offloaded_layers_wait_on_the_host(share: float, here: int, away: int) -> None:
    """Whole layers of 32 wait on the host, 8 KiB per token each, in slabs of 256 MiB; the others stay, at least two,
    because backward reaches them at once."""
    train = {"recompute": "full", "offload_fraction": share}
    found = estimate(*of(1, LLAMA_8B, train=train), 128_256, 1024 * 5)
    assert found.layers == here * 40 * KIB * 1024
    assert found.host_layers == {30: 5, 29: 5, 16: 3, 1: 1, 0: 0}[away] * 256 * KIB * 1024
    assert found.host == found.host_layers


def test_offloaded_layers_of_a_pipeline() -> None:
    """8 layers on 2 stages in 2 chunks of 2 each; of a chunk's layers, a share of 0.3 is 1; five chunks wait on the
    first stage, and each has a slab of 256 MiB.

    Each of the five chunks also keeps its output.
    """
    train = {"recompute": "full", "offload_fraction": 0.3, "global_batch_size": 8}
    wanted, layout = of(2, {**TINY, "num_layers": 8}, parallel={"pp": 2, "virtual_stages": 2}, train=train)
    found = stage_memory(stage_of(wanted, layout, 0), 1024)
    assert (found.layers, found.host_layers) == (1024 * 8 * 5 * (2 + 1), 5 * 256 * 1024 * KIB)
    one_layer = estimate(*of(1, train={**train, "offload_fraction": 1.0}), 10, 1024)
    assert (one_layer.layers, one_layer.host_layers) == (1024 * 8, 0)


def test_context_parallelism_divides_tokens_and_gathers_keys() -> None:
    """cp 8, 8192 tokens: a rank has 1024.  A quarter of the heads has 512 elements for the keys and values of each of
    8192 tokens: the next group in bf16, and the previous one in fp32.  In the kernel's order, there are 17 / 16 times
    as many; and their gradients, also two for each of the group's 8 heads of 128."""
    alone = estimate(*of(1, LLAMA_8B, train={"recompute": "full"}), 128_256, 1024)
    found = estimate(*of(8, LLAMA_8B, train={"recompute": "full"}, parallel={"cp": 8}), 128_256, 8192)
    gathered = 8192 * (512 * (2 + 4) + (512 * 2 * 2 + 2 * 1024 * 2) * 17 / 16)
    assert found.layers == alone.layers and most(found, GATHERED) == gathered
    # Alone, for all heads: the queries' gradient in fp32 and bf16, and the gradients of keys and values.  Here, for a
    # quarter: the same, and copies of the output and its gradient; for three quarters, the fp32 gradients of local keys
    # and values.
    of_all, of_quarter = 6 * 4096 + 2 * (2048 + 2 * 4096), (6 + 2 * 2) * 1024 + 4 * 3 * 512
    assert most(alone, ATTENTION) - most(found, ATTENTION) == 1024 * (of_all - of_quarter)
    assert {ATTENTION: most(found, ATTENTION), GATHERED: gathered} in [dict(working.by_name) for working in found.sets]
    # the group has four heads
    halved = most(estimate(*of(8, LLAMA_8B, parallel={"cp": 4, "tp": 2}), 128_256, 8192), GATHERED)
    assert halved == 8192 * (256 * (2 + 4) + (256 * 2 * 2 + 2 * 512 * 2) * 9 / 8)
    assert most(estimate(*of(8, LLAMA_8B, parallel={"tp": 8}), 128_256, 8192), GATHERED) == 0
    own = of(8, {**LLAMA_8B, "num_query_groups": 32}, parallel={"cp": 8})
    assert most(estimate(*own, 128_256, 8192), GATHERED) == 8192 * 2048 * (2 + 4 + 2 * 2 * 17 / 16)
    one = of(8, {**LLAMA_8B, "num_query_groups": 1}, parallel={"cp": 8})  # a single group, so nothing is in transfer
    assert most(estimate(*one, 128_256, 8192), GATHERED) == 8192 * (256 * 2 * 2 + 2 * 4096 * 2) * 17 / 16


def test_windows_need_their_halo_for_all_heads() -> None:
    """cp 8, 8192 tokens, windows of 512 in all layers: 1024 local keys and two halos, and their gradients."""
    windows = {**LLAMA_8B, "sliding_window": 512}
    found = estimate(*of(8, windows, train={"recompute": "full"}, parallel={"cp": 8}), 128_256, 8192)
    assert most(found, GATHERED) == 2048 * (2048 * 2 * 2 + 2 * 4096 * 2)
    full = of(8, LLAMA_8B, train={"recompute": "full"}, parallel={"cp": 8})
    quarter = 6 * 4096 - ((6 + 2 * 2) * 1024 + 4 * 3 * 512)
    assert most(found, ATTENTION) - most(estimate(*full, 128_256, 8192), ATTENTION) == 1024 * quarter
    own = of(8, {**windows, "num_query_groups": 32}, parallel={"cp": 8})  # gradients, in bf16 and half of them in fp32,
    assert most(estimate(*own, 128_256, 8192), GATHERED) == 2048 * 8192 * (2 + 4 / 2 + 4)  # and their sums in fp32
    # With one full layer, the estimate equals that of a model with full layers only.
    mixed = of(8, {**windows, "sliding_window_layers": list(range(2, 33))}, parallel={"cp": 8})
    assert most(estimate(*mixed, 128_256, 8192), GATHERED) == most(estimate(*full, 128_256, 8192), GATHERED)


# Of scores for all heads of Llama 8B, three in fp32 and one in bf16; of slopes of a soft cap, two in fp32
PLAIN_TILES = (3 * 4 + 2) * 32 * 1024 * 2048
SLOPE_TILES = 2 * 4 * 32 * 1024 * 2048


def test_soft_caps_have_the_larger_of_two_kernels() -> None:
    """Plain torch holds tiles of scores, and gradients of keys and values in fp32; FlashAttention-4 has gradients of
    queries, keys and values in bf16 and in fp32.  Few tokens take more in tiles, many take more in FA4."""
    capped = {**LLAMA_8B, "attention_softcap": 50.0}
    for tokens in (8192, 131_072):
        flash2, either = (most(estimate(*of(1, model), 128_256, tokens), ATTENTION) for model in (LLAMA_8B, capped))
        plain = tokens * (2 * 4096 + 4 * 2048) + PLAIN_TILES + SLOPE_TILES
        flash4 = tokens * ((2 + 4) * 4096 + (2 + 4) * 2048)
        of_flash2 = tokens * ((2 + 4) * 4096 + 2 * (2048 + 2 * 4096))
        assert either - flash2 == (plain if tokens == 8192 else flash4) - of_flash2
        assert (plain > flash4) == (tokens == 8192)


@pytest.mark.parametrize(
    "changes, width, gradients",
    [
        ({"attention_softcap": 50.0}, 512, 2 + 4),  # FlashAttention-4: gradients in bf16 and fp32
        ({"head_dim": 512}, 2048, 2 + 2),  # ffpa-attn copies keys and values
    ],
)
def test_keys_of_other_kernels_over_cp(changes: dict[str, Any], width: int, gradients: int) -> None:
    """In bf16 the next head group; in fp32 sums of the previous one; keys by sequence, and what the kernel adds."""
    tokens = 262_144  # with fewer, plain torch takes more
    over_cp = most(estimate(*of(8, {**LLAMA_8B, **changes}, parallel={"cp": 8}), 128_256, tokens), GATHERED)
    assert over_cp == tokens * width * (2 + 4) + tokens * (1 + 1 / 16) * width * (2 + gradients)


def test_a_tile_of_scores_is_that_of_the_kernel() -> None:
    assert SCORE_TILE == torch_kernel.QUERY_TILE * torch_kernel.KEY_TILE
    assert LARGE_SCORE_TILE == torch_kernel.LARGE_QUERY_TILE * torch_kernel.LARGE_KEY_TILE


def test_plain_torch_that_the_recipe_names() -> None:
    """The flash kernel also has gradients of queries in fp32, and those of keys and values for each query head."""
    flash, plain = (
        most(estimate(*of(1, LLAMA_8B, attention={"kernels": kernels}), 128_256, 8192), ATTENTION)
        for kernels in (None, ["torch"])
    )
    assert plain - flash == PLAIN_TILES + 8192 * (2 * 4096 + 4 * 2048 - (2 + 4) * 4096 - 2 * (2048 + 2 * 4096))


def test_the_gradient_of_a_tied_output_waits_for_that_of_the_input() -> None:
    """128 rows of 4 in bf16.  No gradient waits if the table is not tied, if two stages divide the model, or if it is
    frozen."""
    tied, untied = taken(), taken(model={**TINY, "tie_embeddings": False})
    assert most(tied, MLP) - most(untied, MLP) == most(tied, ATTENTION) - most(untied, ATTENTION) == 2 * 128 * 4
    layers = {**TINY, "num_layers": 2}
    both = [most(taken(2, model={**layers, "tie_embeddings": tie}, parallel={"pp": 2}), MLP) for tie in (True, False)]
    assert both[0] == both[1]
    assert (
        most(estimate(*of(lora={"rank": 2}), 10, 1024, Trained(whole=[])), MLP) == most(untied, MLP) - 2 * 4 * 2 * 8
    )  # widest


def test_ways_of_transformer_engine_over_cp() -> None:
    """cp 8, 8192 tokens, 2 x 1024 elements of keys and values each: p2p holds two chunks of 1024 / 2, twice; all_gather
    holds all of them eight times.  With exchanged heads, the output of 4096 elements is saved twice."""
    ways = {way: {"cp": 8, "cp_comm": way} for way in ("p2p", "all_gather", "a2a")}
    found = {
        w: estimate(*of(8, LLAMA_8B, parallel=p, attention={"backend": "te"}), 128_256, 8192) for w, p in ways.items()
    }
    assert most(found["p2p"], GATHERED) == most(found["a2a"], GATHERED) == 1024 * 2 * 1024 * 2 * 4
    assert most(found["all_gather"], GATHERED) == 8192 * 2 * 1024 * 2 * 8
    assert found["all_gather"].layers == found["p2p"].layers
    assert found["a2a"].layers - found["p2p"].layers == 32 * 1024 * 4096 * 2


@pytest.mark.parametrize(
    "stage, virtual, packs, passes, hidden",
    [
        (0, 1, 8, 4, 4 * 2),
        (3, 1, 8, 1, 1 * 2),
        (0, 1, 2, 2, 2 * 2),
        (0, 2, 8, 11, 11 * (1 + 1)),  # a chunk of one layer also keeps its sent output
        (3, 2, 8, 5, 5 * (1 + 1) - 1),  # the last chunk sends nothing
        (0, 2, 4, 8, 8 * (1 + 1)),
    ],
)
def test_microbatches_that_wait_in_a_pipeline(stage: int, virtual: int, packs: int, passes: int, hidden: int) -> None:
    """With full recompute, each layer keeps its input for every microbatch that waits: 8 layers on 4 stages.

    Each pass of a chunk has rotary tables, for heads of width 2.
    """
    parallel = {"pp": 4, "virtual_stages": virtual}
    layers = {**TINY, "num_layers": 8}
    wanted, layout = of(4, layers, parallel=parallel, train={"global_batch_size": packs, "recompute": "full"})
    found = stage_memory(stage_of(wanted, layout, stage), 1024)
    assert (found.layers, found.ends) == (1024 * 8 * hidden, 1024 * 4 * 2 * passes)


def test_with_dynamic_cp_a_pipeline_may_be_full() -> None:
    """Two packs of the plan may become more microbatches, so four may wait on the first stage."""
    layers = {**TINY, "num_layers": 8}
    sizes = {"pp": 4, "cp": 2, "dynamic_cp": True}
    wanted, layout = of(8, layers, parallel=sizes, train={"global_batch_size": 2, "recompute": "full"})
    assert stage_of(wanted, layout, 0).num_waiting == 4
    assert stage_of(wanted, replace(layout, cp_sizes=()), 0).num_waiting == 2


def test_the_fullest_stage_counts() -> None:
    """The last stage has the loss head; four microbatches wait on the first stage."""
    layers = {**TINY, "num_layers": 8}
    assert taken(4, model=layers, parallel={"pp": 4}).stage == 0
    assert taken(4, model=layers, parallel={"pp": 4}, loss="full").stage == 3


@pytest.mark.parametrize("loss, per_logit", [("chunked", 4), ("full", 12)])
def test_losses_that_have_logits(loss: str, per_logit: int) -> None:
    assert (
        most(taken(loss=loss), HEAD) == per_logit * 1024 * 128 + 1024 * 8
    )  # and the hidden states after the last norm


def test_a_teacher_takes_its_lists_and_a_part_of_each_chunk() -> None:
    """1,024 tokens in one chunk, lists of 3 + the label, 128 vocabulary rows; with `full` also fp32 scores of all
    tokens and a mask."""
    lists, outcomes = 8 * 4 * 1024, 52 * 4 * 1024
    wanted = {"fused": lists + outcomes, "chunked": 2 * lists + outcomes, "full": lists + 1024 * (5 * 128 + 4 * 29)}
    for impl, more in wanted.items():
        taught = taken(loss=impl, data={"teacher": {"k": 3, "label": True}})
        assert most(taught, HEAD) - most(taken(loss=impl), HEAD) == more, impl


# --- the longest context -----------------------------------------------------------------------------------------


def test_the_longest_context_fits_and_one_step_more_does_not() -> None:
    wanted, layout = of(8, LLAMA_8B, train={"recompute": "selective"}, parallel={"cp": 8})
    longest = longest_context(wanted, layout, 128_256, 80e9)
    assert longest % layout.pack_multiple == 0
    assert estimate(wanted, layout, 128_256, longest).device <= 80e9
    assert estimate(wanted, layout, 128_256, longest + layout.pack_multiple).device > 80e9


def test_a_model_that_never_fits() -> None:
    assert longest_context(*of(1, LLAMA_8B), 128_256, 80e9) == 0
    assert memory.describe(*of(1, LLAMA_8B), 128_256)[-1] == (
        "longest context in 75 GiB (an 80-GB card), by the same estimate: none, because weights, gradients and "
        "optimizer states alone need more"
    )


def test_the_description() -> None:
    wanted = of(8, LLAMA_8B, train={"recompute": "full", "offload_fraction": 1.0}, parallel={"cp": 8})
    assert memory.describe(*wanted, 128_256) == [
        "per rank, estimated and not measured: 57 GiB, of which",
        "weights 15 GiB, gradients 30 GiB, optimizer 11 GiB, saved by layers 96 MiB, rotary 2.0 MiB, loss head 1.0 GiB",
        "and of the host: 1.0 GiB, of which layers 1.0 GiB; 8.0 GiB for all ranks of a node",
        "longest context in 75 GiB (an 80-GB card), by the same estimate: 731,616 tokens",
    ]


def test_the_items_sum_up_to_the_device() -> None:
    """Only the largest working set is an item: attention with cp, and the loss head without cp."""
    tiled = {"recompute": "full", "mlp_tile": 1024}
    over_cp = estimate(*of(8, LLAMA_8B, parallel={"cp": 8}, train=tiled), 10, 131_072)
    names = ["weights", "gradients", "optimizer", "saved by layers", "rotary"]
    assert list(over_cp.items()) == [*names, "attention in backward", "gathered keys and values"]
    head = taken(loss="full")
    assert list(head.items()) == [*names, "loss head"] and head.items()["loss head"] == most(head, HEAD)
    for found in (over_cp, head):
        assert sum(found.items().values()) == pytest.approx(found.device, rel=1e-12)


WINDOWS = {"sliding_window": 16, "sliding_window_layers": [1]}
LINEAR = {"linear_attention": {"layers": [1], "num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 16}}


@pytest.mark.parametrize(
    "world_size, parallel, model, expected, gib",
    [
        (1, {}, {}, {}, 0.0),
        (8, {"tp": 2, "cp": 2}, {}, {"tp": 2, "cp": 2, "dp x cp": 4, "all ranks": 8}, 2.4),
        (
            8, {"cp": 8, "dynamic_cp": True}, {},
            {"cp": 8, "cp of 2": 2, "cp of 4": 4, "dp x cp": 8, "all ranks": 8}, 3.0,
        ),
        # Experts, windows, linear attention and cp_comm a2a exchange data by all-to-alls, which take 3 GiB a group.
        (
            8, {"cp": 2, "ep": 4}, EXPERTS,
            {"cp": 2, "dp x cp": 8, "ep": 4, "copies of an expert": 2, "all ranks": 8}, 5.4,
        ),
        (2, {"cp": 2}, WINDOWS, {"cp": 2, "dp x cp": 2, "all ranks": 2}, 4.2),
        (2, {"cp": 2}, LINEAR, {"cp": 2, "dp x cp": 2, "all ranks": 2}, 4.2),
        (2, {"cp": 2, "cp_comm": "a2a"}, {}, {"cp": 2, "dp x cp": 2, "all ranks": 2}, 4.2),
        (
            8, {"cp": 8, "cp_comm": "a2a+p2p", "cp_a2a": 2}, {},
            {"cp": 8, "cp, heads": 2, "cp, ring": 4, "dp x cp": 8, "all ranks": 8}, 5.4,
        ),
        (
            4, {"pp": 2}, {"num_layers": 2},
            {"dp x cp": 2, "pp": 2, "first and last stage": 2, "all ranks": 4}, 2.4,
        ),
        (  # unbatched messages: a communicator for each pair of ranks
            4, {"pp": 4, "virtual_stages": 2}, {"num_layers": 8},
            {"previous stage": 2, "next stage": 2, "first and last stage": 2, "all ranks": 4}, 2.4,
        ),
        (  # ranks with the same parameters have the same part of the gradient norm
            4, {"tp": 2, "distributed_optimizer": False}, {},
            {"tp": 2, "dp x cp": 2, "tp x pp": 2, "all ranks": 4}, 2.4,
        ),
        (  # shards of two ranks, two copies of each; of an expert, each rank of its two has a whole copy
            4, {"cp": 2, "shard": "weights", "shard_size": 2}, {},
            {"cp": 2, "dp x cp": 4, "shards": 2, "replicas": 2, "all ranks": 4}, 3.0,
        ),
        (
            8, {"ep": 2, "shard": "weights", "shard_size": 2}, EXPERTS,
            {
                "dp x cp": 8, "shards": 2, "replicas": 4, "shards of experts": 2, "replicas of experts": 2, "ep": 2,
                "copies of an expert": 4, "all ranks": 8,
            }, 7.2,
        ),
        (2, {"tp": 2, "distributed_optimizer": False}, {}, {"tp": 2, "all ranks": 2}, 1.2),
    ],
    ids=str,
)  # fmt: skip
def test_communicators(
    world_size: int, parallel: dict[str, Any], model: dict[str, Any], expected: dict[str, int], gib: float
) -> None:
    config, layout = of(world_size, {**TINY, **model}, parallel=parallel)
    opened = communicators(config, layout)
    assert {name: communicator.ranks for name, communicator in opened.items()} == expected
    assert nccl_bytes(config, layout) / GIB == pytest.approx(gib)
    on_cpu, _ = of(world_size, {**TINY, **model}, parallel=parallel, run={"device": "cpu"})
    assert nccl_bytes(on_cpu, layout) == 0.0


def test_scales_of_fp8_have_a_communicator() -> None:
    found = {
        fp8: list(communicators(*of(4, LLAMA_8B, parallel={"tp": 2}, run={"fp8": fp8})))
        for fp8 in (None, "blockwise", "delayed")
    }
    assert found[None] == found["blockwise"] == ["tp", "dp x cp", "all ranks"]
    assert found["delayed"] == ["tp", "dp x cp", "tp x dp x cp", "all ranks"]


def test_assumed_and_measured_memory_of_nccl() -> None:
    assert compared(*of(8, {**TINY, **EXPERTS}, parallel={"cp": 2, "ep": 4}), 7.25 * GIB) == (
        "GPU memory outside of torch's allocator: 7.25 GiB (used on the GPU - reserved by torch).  `sft check` and "
        "`sft plan` assume 6.15: CUDA's context 0.75 and NCCL's buffers 5.4 (cp 0.6, dp x cp 0.6, ep 3.0, copies of an "
        "expert 0.6, all ranks 0.6)"
    )
    assert compared(*of(1, TINY), 0.5 * GIB).endswith("assume 0.75: CUDA's context 0.75")


def test_the_copy_of_a_save_in_the_background() -> None:
    """14 bytes for each of 8.03e9 parameters on 8 ranks; no copy if training waits for saves, or for the last save
    only."""
    lines = {}
    for key in ({"save_every": 9}, {"save_every_minutes": 9.0}, {"save_every": 9, "async_save": False}, {}):
        lines[str(key)] = memory.describe(*of(8, LLAMA_8B, parallel={"cp": 8}, checkpoint=key), 128_256)[-2]
    copied = "and of the host: 13 GiB, of which copy for saves 13 GiB; 105 GiB for all ranks of a node"
    assert [line == copied for line in lines.values()] == [True, True, False, False], lines


def test_a_row_of_the_table_by_hand() -> None:
    """Qwen3-1.7B: 18 bytes for each of 1,720,574,976 parameters, on 8 ranks 7.5; 4 x 2048 + 2 x 6144 + 64 + 4 + 96
    bytes per token and layer, or 20.2 KiB.
    """
    assert "| Qwen3-1.7B | 29 GiB | 12 GiB | 70.2 KiB | 20.2 KiB | 4.0 KiB |" in memory_table.tables()


@pytest.mark.parametrize("cp_comm, received", [("all_gather", 0), ("p2p", 2 * 2048), ("a2a", 2 * (4096 + 2048))])
def test_transformer_engine_keeps_what_it_received(cp_comm: str, received: int) -> None:
    """Llama 8B, attention kept: 4,096 numbers of the input, 4,096 of the output (twice with an all-to-all)."""
    model = of(8, LLAMA_8B)[0].model
    rank = RankShare(cp=8)
    saved = LayerBytes.of(TransformerEngineBytes(model=model, rank=rank, cp_comm=cp_comm), "attention_kept").by_name
    outputs = 2 if cp_comm == "a2a" else 1
    assert sum(saved.values()) == 2 * 4096 * (1 + outputs) + 4 * 32 + received


def test_trees_need_copies_of_keys() -> None:
    """8,192 tokens of Llama-8B, of which ten branches have 200: 4,096 elements of queries, 2,048 of a key and a value.

    Over cp, the 380 keys of parents are gathered once more: with four head groups, in bf16 as keys, as gradients and
    for each query head.  A window of 101 has 100 keys before each branch, and over cp before both chunks of it.
    """
    trees = TreeShare((TreeDocuments(1, 400, 0), TreeDocuments(10, 20, 200)), forks=5, keys=380)
    full, windows = (layout_config(model={**LLAMA_8B, **also}).model for also in ({}, {"sliding_window": 101}))
    for cp, keys, in_window in ((1, 0, 8192 + 10 * 100), (2, 380, 4096 + 2 * 101 + 11 * 200)):
        plain, found = (
            PortableBytes(model=full, rank=RankShare(cp=cp, trees=x)).gathered(8192) for x in (TreeShare(), trees)
        )
        assert found - plain == keys * (2 * 2 * 2048 + 2 * 2 * 4096) / 4
        window = PortableBytes(model=windows, rank=RankShare(cp=cp, trees=trees))
        assert window.gathered(8192) == in_window * (2 * 2 * 2048 + 2 * 2 * 4096)
    with_parents = PortableBytes(model=full, rank=RankShare(trees=trees)).local(8192)
    assert with_parents == PortableBytes(model=full).local(8192)  # the causal call's sums are larger
    most_trees = RankShare(trees=replace(trees, documents=(TreeDocuments(100, 80, 90),)))
    more = PortableBytes(model=full, rank=most_trees).local(8192) - with_parents
    assert more == 8000 * (2 * 4 + 2) * 4096 + 380 * ((4 + 3) * 2048 + 2 * 2 * 4096) - 8192 * 4 * 4096


def test_muon_keeps_one_moment() -> None:
    """Attention has 4 x 16 matrix elements here, and the MLP 3 x 4 x 8; the embedding and the norms stay with AdamW."""
    config, layout = of()
    muon = config.model_copy(update={"optim": config.optim.model_copy(update={"name": "muon"})})
    adamw, found = (estimate(one, layout, 10, 1024) for one in (config, muon))
    assert adamw.optimizer - found.optimizer == 4 * (4 * 16 + 3 * 4 * 8)
    assert most(found, MATRICES) == 6 * 2 * (4 * 16 + 3 * 4 * 8)  # six copies in bf16
