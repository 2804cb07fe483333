"""The schema as a whole: the number of keys, the words of its texts, and the page that is generated from it."""

import pytest
from pydantic import ValidationError

from sft.config import Config, Conflict, DataConfig, OptimConfig, ParallelConfig
from sft.config.keys import expected, leaves, nearest, sections
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from tests.builders import RECIPE
from tools import pages


def config(*overrides: str) -> Config:
    return parse_recipe(RECIPE, "a.yaml", list(overrides)).config


def test_there_are_few_keys_and_every_one_is_explained() -> None:
    assert len(leaves()) <= 286
    for key, info in leaves().items():
        assert info.description and info.description.endswith("."), key
    for group, model in sections().items():
        for name, info in model.model_fields.items():
            assert info.description, f"{group}.{name}"


@pytest.mark.parametrize(
    "key, words",
    [
        ("run.seed", "a whole number of at least 0 and below 2147483648"),
        (
            "data.train",
            "a path or a list of paths, not empty, or a mapping of names to groups of keys",
        ),
        ("data.train.chat.weight", "a number above 0.0 or null"),
        ("data.eval", "a path or a list of paths or a mapping of names to such or groups of keys or null"),
        ("loss.chunk_size", "a whole number of at least 1 or null or auto"),
        ("log.position_edges", "a whole number of at least 1 or a list of such"),
        ("model.megatron", "a mapping of names to values"),
        ("model.megatron.moe_permute_fusion", "false"),
        ("optim.warmup_fraction", "a number of at least 0.0 and below 1.0 or null"),
        ("optim.wsd_decay_fraction", "a number above 0.0 and of at most 1.0"),
    ],
)
def test_what_a_key_accepts_in_words(key: str, words: str) -> None:
    assert expected(key) == words


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("seq_length", "data.seq_length"),
        ("optimiser.lr", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("model.rope.yarn_factor", "model.rope.factor"),
        ("lgo", "log"),
        ("data.train.chat.wieght", "data.train.chat.weight"),
        ("data.train.chat.path", None),
        ("loss.zzz", None),
        ("model.megatron.num-layers", None),
    ],
)
def test_the_nearest_key(typed: str, meant: str | None) -> None:
    assert nearest(typed) == meant


def test_nothing_can_be_written_back() -> None:
    config = parse_recipe(RECIPE, "a.yaml").config
    with pytest.raises(ValidationError):
        config.parallel.cp = 2  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.parallel = ParallelConfig(cp=2)  # type: ignore[misc]


def test_built_in_python_the_schema_is_as_strict() -> None:
    for wrong in ({"cp": "2"}, {"cp": True}, {"cp": 2.0}, {"cq": 2}):
        with pytest.raises(ValidationError):
            ParallelConfig.model_validate(wrong)
    for rate in (float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            OptimConfig(lr=rate)
    with pytest.raises(ValidationError):
        DataConfig(train=[], seq_length=32)


def test_a_conflict_names_all_its_problems() -> None:
    with pytest.raises(ValidationError) as caught:
        OptimConfig(lr=1e-5, min_lr=1.0, warmup_steps=1, warmup_fraction=0.1)
    cause = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(cause, Conflict)
    assert cause.problems == (
        ("warmup_fraction", "clashes with warmup_steps = 1; give one of them"),
        ("min_lr", "is above the peak learning rate, lr = 1e-05"),
    )


def test_the_pages_that_follow_from_code_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "true", "1.5", "all"])
def test_chunks_of_no_size_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="chunk_size = .*; expected a whole number of at least 1 or null or auto"):
        config(f"loss.chunk_size={wrong}")


@pytest.mark.parametrize(
    "overrides, rows, chunk",
    [
        ([], 10_000, 4096),
        ([], 100, 100),
        (["loss.impl=chunked"], 10_000, 1024),
        (["loss.impl=chunked", "loss.chunk_size=7"], 10_000, 7),
        (["loss.chunk_size=null"], 10_000, 10_000),
        (["loss.impl=full"], 10_000, 10_000),
        ([], 0, 1),
    ],
    ids=str,
)
def test_rows_of_a_chunk(overrides: list[str], rows: int, chunk: int) -> None:
    assert config(*overrides).loss.chunk(rows) == chunk


MOE = ("model.moe.num_experts=8", "model.moe.top_k=2")
LINEAR = ("model.linear_attention.num_key_heads=2", "model.linear_attention.num_value_heads=2")
SIGMOID = (*MOE, "model.moe.top_k=2", "model.moe.score_function=sigmoid")
CHUNKS = ("train.head_chunks=2",)
LORA = ("lora.rank=4", "lora.alpha=8.0")
HOST_OPTIMIZER = "offload_fraction = 0.5 .*needs run.precision = bf16 and parallel.distributed_optimizer = true"


@pytest.mark.parametrize(
    "overrides, why",
    [
        (("loss.impl=full", "loss.chunk_size=7"), "loss.chunk_size = 7 .*has no effect with impl = full"),
        (("loss.distill.weight=1.0",), "distill.weight = 1.0 .*needs the distributions of a teacher, which .*k = null"),
        (("loss.distill.start_weight=0.0",), "loss.distill.start_weight = 0.0 .*needs ramp_steps"),
        (("loss.distill.ramp_steps=9",), "loss.distill.ramp_steps = 9 .*needs start_weight"),
        (("loss.distill.label_weight=0.5",), "label_weight = 0.5 .*has no effect with loss.distill.weight = 0"),
        (("loss.distill.temperature=0.0",), "temperature = 0.0 .*; expected a number above 0.0"),
        (
            ("loss.distill.weight=1.0", "loss.distill.by_source={code: 0.5}"),
            "loss.distill.by_source = .*names code, but data.train has no named sources",
        ),
        (("log.position_edges=[4, 4]",), "position_edges .*must increase"),
        (("model.moe.top_k=2",), "model.moe.top_k = 2 .*has no effect without model.moe.num_experts"),
        (("model.moe.num_experts=8",), "model.moe.top_k .*is required with num_experts"),
        ((*MOE, "model.moe.top_k=9"), "model.moe.top_k = 9 .*is more than num_experts = 8"),
        (
            (*MOE, "model.moe.top_k=1"),
            "model.moe.normalize_top_k .*= true makes all weights 1 with top_k = 1; use " "false, or a larger top_k",
        ),
        ((*MOE, "model.moe.aux_loss_coef=-1e-3"), "model.moe.aux_loss_coef = -0.001"),
        ((*MOE, "model.moe.z_loss_coef=-1e-3"), "model.moe.z_loss_coef = -0.001"),
        ((*MOE, "model.moe.capacity_factor=0"), "model.moe.capacity_factor = 0"),
        ((*MOE, "model.moe.num_groups=4"), "model.moe.num_groups = 4 .*needs score_function = sigmoid"),
        (
            (*SIGMOID, "model.moe.num_groups=3"),
            "num_groups = 3 .*does not cut 8 experts into groups .*use one of 1, 2, 4",
        ),
        ((*SIGMOID, "model.moe.top_groups=2"), "top_groups = 2 .*is more than num_groups = 1"),
        ((*SIGMOID, "model.moe.num_groups=4", "model.moe.top_k=3"), "leaves a token 2 experts, but top_k = 3"),
        (
            (*SIGMOID, "model.moe.bias_update_rate=0.1"),
            "bias_update_rate = 0.1 .*has no effect without correction_bias",
        ),
        (
            (*SIGMOID, "model.moe.correction_bias=true", "model.moe.bias_update_rate=0.1", *LORA),
            "model.moe.bias_update_rate = 0.1 .*changes the model itself, which lora.rank leaves as it is; use 0",
        ),
        ((*MOE, "model.moe.dense_layers=40"), "dense_layers = 40 .*leaves no layer of .* for experts"),
        (("model.moe.dense_layers=1",), "dense_layers = 1 .*has no effect without model.moe.num_experts"),
        (("train.mlp_tile=0",), "train.mlp_tile = 0"),
        ((*MOE, "train.mlp_tile=4096"), "train.mlp_tile = 4096 .*needs a dense model: experts are balanced over whole"),
        (("train.head_chunks=0",), "train.head_chunks = 0"),
        ((*CHUNKS, "attention.backend=te"), "head_chunks = 2 .*does not support attention.backend = te, which attends"),
        (
            (*CHUNKS, "run.fp8=mxfp8"),
            "does not support run.fp8 = mxfp8, whose modules compute whole projections; use null",
        ),
        ((*CHUNKS, "model.attention_output_gate=true"), "model.attention_output_gate, which is a third tensor of all"),
        ((*CHUNKS, "model.qk_norm=true", "model.qk_norm_across_heads=true"), "model.qk_norm_across_heads, which needs"),
        ((*CHUNKS, *LINEAR, "model.linear_attention.layers=[1]"), "model.linear_attention, whose layers have no key"),
        (
            ("train.offload_fraction=0.5",),
            "train.offload_fraction = 0.5 .*needs recompute = selective, attention_kept or full",
        ),
        (("optim.offload_fraction=-0.1",), "expected a number of at least 0.0 and of at most 1.0"),
        (("optim.offload_fraction=1.01",), "expected a number of at least 0.0 and of at most 1.0"),
        (("optim.offload_fraction=0.5", "run.precision=fp32"), HOST_OPTIMIZER),
        (("optim.wsd_decay=cosine",), 'wsd_decay = "cosine" .*has no effect with schedule = cosine'),
        (
            ("optim.moments=int8", "optim.offload_fraction=0.5"),
            'moments = "int8" .*clashes with offload_fraction = 0.5',
        ),
        (("optim.moments=bf16", "optim.name=muon"), 'moments = "bf16" .*needs name = adamw'),
        (("optim.offload_fraction=0.5", "parallel.distributed_optimizer=false"), HOST_OPTIMIZER),
        (
            ("data.turns=each", "data.supervise=all"),
            "turns = .each. .*clashes with supervise = all; use supervise = assist",
        ),
        (
            ("data.turns=each", "data.supervise=last"),
            "turns = .each. .*clashes with supervise = last; use supervise = assis",
        ),
        (
            ("data.turns=each", "train.mtp=joint"),
            "data.turns = .each. .*does not fit train.mtp = joint: .*use train.mtp = off",
        ),
        (
            ("data.turns=each", "attention.backend=te"),
            "data.turns = .each. .*backend = te cannot compute; use portable or",
        ),
        (("data.date=2026-13-40",), "data.date = .*is a day that no calendar has; give a day such as 2026-01-01"),
        (
            (*LINEAR, "model.linear_attention.layers=[1]", "model.sliding_window=8", "model.sliding_window_layers=[1]"),
            "sliding_window_layers .*names layers that linear_attention.layers names, too: 1",
        ),
        (
            (*LINEAR, "model.linear_attention.layers=[1,2]", "model.sliding_window=8"),
            "sliding_window .*has no effect: linear_attention.layers names all layers; use null",
        ),
        (
            (
                *(*LINEAR, "model.linear_attention.layers=[1]", "model.sliding_window=8"),
                *("model.full_attention.num_query_groups=2", "model.rope.window_base=500"),
            ),
            "full_attention.num_query_groups .*needs layers of both kinds",
        ),
    ],
)
def test_what_cannot_be(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(*overrides)


def test_turns_with_a_common_beginning_need_portable_attention() -> None:
    assert config().auto_is_portable is None
    assert "data.turns = each" in str(config("data.turns=each").auto_is_portable)


def test_experts_as_wide_as_they_are_told() -> None:
    """Also a model with one expert per token, whose weight is the router's probability."""
    assert config(*MOE, "model.moe.ffn_hidden_size=7").model.resolved_expert_ffn == 7
    wide = config(*MOE).model
    assert wide.resolved_expert_ffn == wide.ffn_hidden_size
    assert config(*MOE, "model.moe.top_k=1", "model.moe.normalize_top_k=false").model.moe.top_k == 1


@pytest.mark.parametrize("share", ["0", "0.5", "1"])
def test_shares_of_an_optimizer_on_the_host(share: str) -> None:
    assert config(f"optim.offload_fraction={share}").optim.offload_fraction == float(share)
