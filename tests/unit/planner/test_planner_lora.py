"""LoRA in proposals: for every released model, the recipe accepts the proposed adapters; a question without LoRA gets
an answer about the requested layouts."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from sft.config import yaml
from sft.planner.cheapest import changes, with_adapters
from sft.planner.report import Report
from sft.planner.search import Search
from sft.planner.subject import lora_keys, recipe_of
from sft.weights.lora.targets import not_adaptable
from tests.unit.fixtures import hf
from tests.unit.fixtures.tasks import task_of

RELEASED = sorted(file.stem for file in (Path(hf.__file__).parent / "released").glob("*.json"))
EXCLUDED = {"qwen3_6_35b_a3b": ["shared_expert_gate"]}  # other models: no exclusion
FIT, NO_FIT = ("b200", 64, 2**15), ("a100-40", 8, 2**20)
# On FIT, models of NEVER fit only with LoRA; all others fit.  On NO_FIT, models of ALWAYS fit with and without LoRA.
NEVER, ALWAYS = {"deepseek_v3", "kimi_k2"}, {
    "llama_3_1_8b", "ministral_3_8b", "qwen2_5_vl_7b", "qwen3_0p6b", "qwen3_8b", "qwen3_vl_8b",
}  # fmt: skip
WITH_LORA = {  # models that fit NO_FIT only with LoRA
    "gemma_3_27b", "gpt_oss_20b", "mistral_small_3_2", "moonlight_16b_a3b", "qwen3_30b_a3b", "qwen3_vl_30b_a3b",
}  # fmt: skip
QUICK = ["gemma_4_26b_a4b", "qwen3_6_35b_a3b"]
KINDS = [*QUICK, "gpt_oss_20b", "llama_3_1_8b", "moonlight_16b_a3b", "qwen3_30b_a3b"]  # one for each kind of layer


def names(quick: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.grid) for name in RELEASED]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has a folder of each released model."""
    for name in RELEASED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(hf.released(name)))
    monkeypatch.setenv("SFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", names(KINDS))
def test_every_released_model_has_adapters(name: str) -> None:
    """A new recipe with LoRA, and the proposed change of a recipe to LoRA, have the same adapters."""
    recipe, task = task_of(name, 2**15, is_lora=True)
    assert recipe.config.lora.exclude == EXCLUDED.get(name, [])
    other = with_adapters(task_of(name, 2**15)[1])
    assert other is not None and list(other.trained.adapted) == list(task.trained.adapted) != []
    linears = [linear for weight in task.trained.adapted for linear in weight.linears()]
    assert not [linear for linear in linears if linear.endswith(tuple(EXCLUDED.get(name, ("none",))))]
    assert any(linear.endswith("self_attn.o_proj") for linear in linears)


@pytest.mark.parametrize("name", names(QUICK))
@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("case", [FIT, NO_FIT])
def test_every_question_is_answered(name: str, is_lora: bool, case: tuple[str, int, int]) -> None:
    gpu, num_gpus, length = case
    _, task = task_of(name, length, gpu=gpu, is_lora=is_lora)
    report = Report.of(task, num_gpus)
    fits = (name not in NEVER or is_lora) if case == FIT else name in ALWAYS | (WITH_LORA if is_lora else set())
    assert bool(report.proposals) is fits
    if fits:
        assert all(proposal.config.lora == task.config.lora for proposal in report.proposals)
    else:
        assert report.least is not None
        assert all(
            change.task.config.lora.is_used is is_lora for change in report.changes if "LoRA" not in change.setting
        )


@pytest.mark.parametrize(
    "name, setting",
    [
        ("qwen3_6_35b_a3b", "LoRA (lora.rank=16 lora.exclude=[shared_expert_gate]) instead of all weights"),
        ("gemma_4_26b_a4b", "LoRA (lora.rank=16) instead of all weights"),
        ("gpt_oss_20b", "LoRA (lora.rank=16) instead of all weights"),
    ],
)
def test_the_change_to_lora_names_what_it_excludes(name: str, setting: str) -> None:
    _, task = task_of(name, 2**17, gpu="h100")
    assert not Search(task, 1).best(1)
    found = [change for change in changes(task, 1) if change.setting.startswith("LoRA")]
    with_lora = with_adapters(task)
    assert with_lora is not None
    fits = bool(Search(with_lora, 1).best(1))
    assert [change.setting for change in found] == [setting] * fits


@pytest.mark.parametrize(
    "keys, why",
    [
        ("train.freeze=[embed_tokens]", "LoRA freezes all weights"),
        ("train.mtp=joint", "adapters leave the block"),
        ("model.moe.bias_update_rate=0.001", "it changes the model itself"),
    ],
)
def test_what_excludes_lora_gets_no_proposal_of_it(keys: str, why: str) -> None:
    name = "glm_4_5_air"
    recipe = recipe_of(name, seq_length=2**15, overrides=[keys])
    _, task = task_of(name, 2**15)
    changed = task.changed(config=recipe.config)
    assert with_adapters(changed) is None, why


@pytest.mark.grid
def test_a_change_to_adapters_is_not_found_where_the_recipe_excludes_them() -> None:
    recipe = recipe_of("glm_4_5_air", seq_length=2**15, overrides=["train.mtp=joint"])
    _, task = task_of("glm_4_5_air", 2**15)
    found = changes(task.changed(config=recipe.config), 8)
    assert found and not [change for change in found if "LoRA" in change.setting]


def test_a_recipe_gets_the_same_keys(tmp_path: Path) -> None:
    """`--lora` for a recipe that trains all weights; a recipe with LoRA stays the same."""
    recipe = tmp_path / "all.yaml"
    recipe.write_text(
        "model: {hf: qwen3_6_35b_a3b}\nrun: {dir: r}\ndata: {train: t.jsonl, seq_length: 4096}\n"
        "train: {num_epochs: 1, global_batch_size: 1}\noptim: {lr: 1.0e-5}\n"
    )
    lora = recipe_of(str(recipe), is_lora=True).config.lora
    assert (lora.rank, lora.alpha, lora.exclude) == (16, 32.0, ["shared_expert_gate"])
    recipe.write_text(recipe.read_text() + "lora: {rank: 8, exclude: [shared_expert_gate, o_proj]}\n")
    assert recipe_of(str(recipe), is_lora=True).config.lora.exclude == ["shared_expert_gate", "o_proj"]


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next"])
def test_ends_of_small_models(family: str, tmp_path: Path) -> None:
    folder = hf.save(tmp_path / family, family)
    config = recipe_of(str(folder), seq_length=4096).config
    ends = ["shared_expert_gate"]
    assert not_adaptable(config.model) == ends and yaml.write(ends) == "[shared_expert_gate]"
    assert lora_keys(config.model) == {"rank": 16, "alpha": 32, "exclude": ends}
