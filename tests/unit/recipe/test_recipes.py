"""Every recipe in the repository is complete, fits its hardware, and has the published size of its model."""

import re
from pathlib import Path

import pytest

from sft.layers.flops import active_parameters, num_parameters
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe, parse_recipe
from sft.recipe.resolved import dump

FOLDER = Path(__file__).resolve().parents[3] / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.yaml"))
pytestmark = pytest.mark.usefixtures("released_models")
# The settings in a recipe whose model has a config.json.
OWN = {"hf", "rope.scaling", "rope.factor", "rope.original_max_position", "moe.aux_loss_coef"}
OWN |= {"rope.attention_factor", "rope.mscale_all_dim"}
MOST_LINES = 25
HEADER = ["Purpose", "Launch", "Hardware", "Expect", "Sibling"]


def header(name: str) -> list[str]:
    return (FOLDER / name).read_text().split("\n")[:5]


def launched_world_size(name: str) -> int:
    """The number of processes in the command of the header."""
    command = header(name)[1]
    per_node = re.search(r"--(?:nproc-per-node|processes) (\d+)", command)
    nodes = re.search(r"--nnodes (\d+)", command)
    assert per_node, command
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1)


@pytest.mark.parametrize("name", RECIPES)
def test_headers(name: str) -> None:
    lines = header(name)
    for line, word in zip(lines, HEADER, strict=True):
        assert line.startswith(f"# {word}") and len(line.partition(":")[2].strip()) > 10, line
    assert f"sft train recipes/{name}" in lines[1]
    siblings = re.findall(r"\w+\.yaml", lines[4])
    assert siblings and set(siblings) <= set(RECIPES) - {name}


@pytest.mark.parametrize("name", RECIPES)
def test_each_resolves_where_its_header_launches_it(name: str) -> None:
    recipe = load_recipe(str(FOLDER / name))
    layout = Layout.resolve(recipe.config, launched_world_size(name))
    assert layout.world_size == launched_world_size(name)
    assert parse_recipe(dump(recipe), name).config == recipe.config


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"demo.yaml", "demo_retrieval.yaml"}))
def test_no_recipe_repeats_what_comes_with_the_model(name: str) -> None:
    recipe = load_recipe(str(FOLDER / name))
    written = {key for key, origin in recipe.origins.items() if origin.kind == "file"}
    assert {key.removeprefix("model.") for key in written if key.startswith("model.")} <= OWN
    assert not written & {"data.tokenizer", "data.chat_template"}
    assert len((FOLDER / name).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    "name, world_size, dp, tokens_per_rank",
    [
        ("qwen3_0p6b_32k.yaml", 8, 4, 16384),
        ("qwen3_8b_64k.yaml", 8, 1, 16384),
        ("qwen3_8b_128k.yaml", 16, 2, 32768),
        ("qwen3_8b_128k.yaml", 32, 4, 32768),
        ("qwen3_30b_a3b_64k.yaml", 16, 2, 8192),
        ("gpt_oss_20b_128k.yaml", 16, 2, 16384),
        ("gemma3_27b_128k.yaml", 16, 1, 65536),
        ("gemma4_26b_a4b_128k.yaml", 16, 2, 32768),
        ("qwen36_27b_128k.yaml", 16, 2, 65536),
        ("qwen36_35b_a3b_128k.yaml", 16, 4, 32768),
        ("llama31_8b_128k.yaml", 16, 1, 16384),
        ("glm45_air_64k.yaml", 64, 1, 8192),
        ("moonlight_16b_a3b_128k.yaml", 16, 2, 16384),
        ("moonlight_16b_a3b_128k_muon.yaml", 16, 2, 16384),
        ("llama31_8b_128k.yaml", 32, 2, 16384),
        ("llama31_8b_128k_dynamic_cp.yaml", 16, 1, 16384),
    ],
)
def test_what_a_rank_holds(name: str, world_size: int, dp: int, tokens_per_rank: int) -> None:
    config = load_recipe(str(FOLDER / name)).config
    layout = Layout.resolve(config, world_size)
    assert layout.dp == dp
    assert config.data.seq_length // layout.cp == tokens_per_rank
    assert config.train.global_batch_size * config.data.seq_length == 2**20


@pytest.mark.parametrize(
    "name, parameters, rope",  # published numbers, without correction biases; Qwen3.6 by hand (its language model)
    [
        ("qwen3_0p6b_32k.yaml", 596_049_920, (1e6, "none", 1.0, None)),
        ("qwen3_8b_64k.yaml", 8_190_735_360, (1e6, "yarn", 2.0, 32768)),
        ("qwen3_8b_128k.yaml", 8_190_735_360, (1e6, "yarn", 4.0, 32768)),
        ("qwen3_30b_a3b_64k.yaml", 30_532_122_624, (1e6, "yarn", 2.0, 32768)),
        ("gpt_oss_20b_128k.yaml", 20_914_757_184, (1.5e5, "yarn", 32.0, 4096)),
        ("gemma3_27b_128k.yaml", 27_009_346_304, (1e6, "linear", 8.0, None)),
        ("gemma4_26b_a4b_128k.yaml", 25_233_141_760, (1e6, "proportional", 1.0, None)),
        ("qwen36_27b_128k.yaml", 26_895_998_464, (1e7, "none", 1.0, None)),
        ("qwen36_35b_a3b_128k.yaml", 34_660_610_688, (1e7, "none", 1.0, None)),
        ("glm45_air_64k.yaml", 106_852_245_504, (1e6, "none", 1.0, None)),
        ("moonlight_16b_a3b_128k.yaml", 15_960_108_544, (5e4, "yarn", 16.0, 8192)),
        ("moonlight_16b_a3b_128k_muon.yaml", 15_960_108_544, (5e4, "yarn", 16.0, 8192)),
        ("llama31_8b_128k.yaml", 8_030_261_248, (5e5, "llama3", 8.0, 8192)),
    ],
)
def test_parameters_and_positions(name: str, parameters: int, rope: tuple[float, str, float, int | None]) -> None:
    config = load_recipe(str(FOLDER / name)).config
    assert config.model.vocab_size is not None
    assert num_parameters(config.model, config.model.vocab_size) == parameters
    found = config.model.rope
    assert (found.base, found.scaling, found.factor, found.original_max_position) == rope
    if found.scaling == "yarn" and found.original_max_position:
        assert found.original_max_position * found.factor == config.data.seq_length


def test_what_a_token_meets_of_a_mixture() -> None:
    """The publisher of Qwen3-30B-A3B gives 3.3 billion activated parameters."""
    model = load_recipe(str(FOLDER / "qwen3_30b_a3b_64k.yaml")).config.model
    assert model.vocab_size is not None
    assert active_parameters(model, model.vocab_size) == 3_353_032_704
