"""The schema as a whole: its size, its words, and the page made of it."""

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from sft.config import Config, Conflict, DataConfig, OptimConfig, ParallelConfig, divisors, listed
from sft.config.keys import expected, leaves, nearest, sections, values
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from tests.builders import RECIPE
from tools import pages

ROOT = Path(__file__).resolve().parents[2]


def config(*overrides: str) -> Config:
    return parse_recipe(RECIPE, "a.yaml", list(overrides)).config


def test_there_are_few_keys_and_every_one_is_explained() -> None:
    assert len(leaves()) <= 118
    for key, info in leaves().items():
        assert info.description and info.description.endswith("."), key
    for group, model in sections().items():
        for name, info in model.model_fields.items():
            assert info.description, f"{group}.{name}"


def test_the_groups() -> None:
    assert list(sections()) == [
        "run",
        "model",
        "model.rope",
        "model.moe",
        "data",
        "parallel",
        "attention",
        "loss",
        "train",
        "optim",
        "checkpoint",
        "log",
        "profile",
        "profile.memory",
        "profile.torch",
    ]


@pytest.mark.parametrize(
    "key, words",
    [
        ("run.device", "one of auto, cuda, cpu"),
        ("run.dir", "non-empty text"),
        ("run.seed", "a whole number of at least 0 and below 2147483648"),
        ("data.train", "a path or a list of paths, not empty, or a mapping of names to groups of keys"),
        ("data.train.chat.files", "a path or a list of paths, not empty"),
        ("data.train.chat.weight", "a number above 0.0 or null"),
        ("data.eval", "a path or a list of paths or a mapping of names to such"),
        ("loss.chunk_size", "a whole number of at least 1 or null or auto"),
        ("log.position_edges", "a whole number of at least 1 or a list of such"),
        ("data.shuffle", "true or false"),
        ("data.chat_template", "non-empty text or null"),
        ("model.head_dim", "a whole number of at least 1 or null"),
        ("model.megatron", "a mapping of names to values"),
        ("model.megatron.anything", "true, false, a number, text, null or a list of texts"),
        ("optim.warmup_fraction", "a number of at least 0.0 and below 1.0 or null"),
        ("optim.wsd_decay_fraction", "a number above 0.0 and of at most 1.0"),
    ],
)
def test_what_a_key_accepts_in_words(key: str, words: str) -> None:
    assert expected(key) == words


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("data.seq_lenght", "data.seq_length"),
        ("seq_length", "data.seq_length"),
        ("optimiser.lr", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("model.rope_theta", "model.rope.base"),
        ("model.rope.yarn_factor", "model.rope.factor"),
        ("lgo", "log"),
        ("data.train.chat.wieght", "data.train.chat.weight"),
        ("data.train.chat.path", None),
        ("parallel.zq", None),
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
        ("min_lr", "is above the peak, lr = 1e-05"),
    )


def test_values_are_flat_and_whole() -> None:
    config = parse_recipe(RECIPE, "a.yaml", ["model.megatron.a=1"]).config
    flat = values(config)
    assert flat["model.rope.base"] == 10000.0
    assert flat["model.megatron.a"] == 1 and "model.megatron" not in flat
    sources = {"data.train.NAME.files", "data.train.NAME.weight", "data.train.NAME.epochs"}
    assert set(leaves()) - set(flat) == {"model.megatron", *sources}
    assert json.loads(config.model_dump_json())["model"]["rope"]["base"] == flat["model.rope.base"]


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(10**12, limit=10) == [1, 2, 4, 5, 8, 10]


def test_several_problems_are_a_list_whose_first_line_stands_by_itself() -> None:
    assert listed(["a is wrong."]) == "a is wrong."
    assert listed(["a is wrong.", "b too."]) == "1 of 2: a is wrong.\n  2 of 2: b too."


def test_the_pages_that_follow_from_code_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_out_of_date_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in pages.PAGES:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    page = (tmp_path / "config.md").read_text()
    (tmp_path / "config.md").write_text(page.replace("`parallel.cp`", "`parallel.context`"))
    assert pages.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err == "config.md is out of date; run: python -m tools.pages\n"
    assert pages.main([], tmp_path) == 0
    assert (tmp_path / "config.md").read_text() == page
    assert pages.main(["--check"], tmp_path) == 0


def test_the_whole_schema_is_in_the_config() -> None:
    assert list(Config.model_fields) == [group for group in sections() if "." not in group]


@pytest.mark.parametrize("wrong", ["0", "-1", "true", "false", "1.5", "all", "[4]"])
def test_chunks_of_no_size_are_refused(wrong: str) -> None:
    with pytest.raises(
        ConfigError, match=r"loss\.chunk_size = .*; expected a whole number of at least 1 or null or auto"
    ):
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


def test_chunks_of_what_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss.chunk_size = 7 .*does nothing with impl = full"):
        config("loss.impl=full", "loss.chunk_size=7")


@pytest.mark.parametrize("edges", ["[4, 4]", "[8, 4]"])
def test_edges_that_do_not_increase_are_refused(edges: str) -> None:
    with pytest.raises(ConfigError, match="position_edges .*must increase"):
        config(f"log.position_edges={edges}")


MOE = ("model.moe.num_experts=8", "model.moe.top_k=2")


@pytest.mark.parametrize(
    "overrides, why",
    [
        (("model.moe.top_k=2",), "model.moe.top_k = 2 .*has no effect without model.moe.num_experts"),
        (("model.moe.capacity_factor=2",), "model.moe.capacity_factor .*has no effect without model.moe.num_experts"),
        (("model.moe.num_experts=8",), "model.moe.top_k .*is required with num_experts"),
        ((*MOE, "model.moe.top_k=9"), "model.moe.top_k = 9 .*is more than num_experts = 8"),
        ((*MOE, "model.moe.top_k=1"), "model.moe.normalize_top_k .*makes all weights 1 where top_k is 1"),
        ((*MOE, "model.moe.aux_loss_coef=-1e-3"), "model.moe.aux_loss_coef = -0.001"),
        ((*MOE, "model.moe.z_loss_coef=-1e-3"), "model.moe.z_loss_coef = -0.001"),
        ((*MOE, "model.moe.capacity_factor=0"), "model.moe.capacity_factor = 0"),
    ],
)
def test_experts_that_cannot_be(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(*overrides)


@pytest.mark.parametrize(
    "overrides, why",
    [
        (("train.mlp_tile=0",), "train.mlp_tile = 0"),
        ((*MOE, "train.mlp_tile=4096"), "train.mlp_tile = 4096 .*is for dense models: experts are balanced over whole"),
        (("train.offload_fraction=0.5",), "train.offload_fraction = 0.5 .*needs recompute = selective or full"),
    ],
)
def test_memory_that_cannot_be_saved(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(*overrides)


def test_experts_as_wide_as_they_are_told() -> None:
    """And one expert a token, where its weight says how sure the router was."""
    assert config(*MOE, "model.moe.ffn_hidden_size=7").model.resolved_expert_ffn == 7
    wide = config(*MOE).model
    assert wide.resolved_expert_ffn == wide.ffn_hidden_size
    assert config(*MOE, "model.moe.top_k=1", "model.moe.normalize_top_k=false").model.moe.top_k == 1


@pytest.mark.parametrize("wrong", ["-0.1", "1.01", "2", "true", "all", "null"])
def test_no_share_of_the_optimizer_beyond_all_of_it_is_on_the_host(wrong: str) -> None:
    with pytest.raises(
        ConfigError, match=r"optim\.offload_fraction = .*; expected a number of at least 0\.0 and of at most 1\.0"
    ):
        config(f"optim.offload_fraction={wrong}")


@pytest.mark.parametrize("also", ["run.precision=fp32", "parallel.distributed_optimizer=false"])
def test_what_an_optimizer_on_the_host_needs(also: str) -> None:
    for works in ("0", "0.5", "1"):
        assert config(f"optim.offload_fraction={works}").optim.offload_fraction == float(works)
    assert config("optim.offload_fraction=0", also).optim.offload_fraction == 0.0
    with pytest.raises(ConfigError) as caught:
        config("optim.offload_fraction=0.5", also)
    assert str(caught.value) == (
        "optim.offload_fraction = 0.5 (command line: optim.offload_fraction=0.5) needs run.precision = bf16 and "
        "parallel.distributed_optimizer = true, the only ones whose weights megatron-core's hybrid optimizer updates "
        "in full; set those, or offload_fraction = 0."
    )
