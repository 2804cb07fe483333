"""The weights that stay trained with train.freeze, by Hugging Face names; names that match nothing or only a part of a
weight."""

from pathlib import Path

import pytest

from sft.checkpoint.train_state import Conditions, changes
from sft.config.keys import values
from sft.errors import ConfigError
from sft.hf.architecture import architecture, read
from sft.layers.adapters import Weight
from sft.recipe.load import parse_recipe
from sft.weights.trained import projections, trained_weights, unfrozen
from tests.unit.fixtures import hf

RECIPE = """
run: {{dir: runs/none}}
model: {{hf: {folder}}}
data: {{train: none.jsonl, seq_length: 32}}
train: {{num_steps: 1, global_batch_size: 1}}
optim: {{lr: 1e-3}}
"""


def left(folder: Path, *patterns: str) -> list[Weight]:
    found = architecture(read(folder), str(folder))
    return unfrozen(patterns, found.family, found.model, found.family.mappings(found.model, found.vocab_size))


def test_names_ends_and_patterns(tmp_path: Path) -> None:
    """The name of a module stands for its weight and its bias."""
    folder = hf.save(tmp_path / "model", "qwen2")
    weights = left(folder, "model.layers.0.*", "embed_tokens", "mlp.*", "[qkv]_proj", "*_layernorm")
    assert [(weight.key.removeprefix("decoder.layers."), weight.index, weight.shape) for weight in weights] == [
        ("decoder.final_layernorm.weight", (), (hf.WIDTH,)),
        ("output_layer.weight", (), (hf.VOCAB, hf.WIDTH)),
        ("self_attention.linear_proj.weight", (1,), (hf.WIDTH, hf.HEADS * hf.HEAD_DIM)),
    ]


def test_linear_attention_is_frozen_as_a_whole(tmp_path: Path) -> None:
    weights = left(hf.save(tmp_path / "model", "qwen3_5_text"), "layers.0.*", "linear_attn.*", "mlp.*", "self_attn.*")
    kept = [weight.key for weight in weights if weight.layer is not None]
    norms = ("self_attention.in_proj.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    assert kept[:2] == [f"decoder.layers.1.{norm}" for norm in norms] and len(kept) == 6
    assert [weight.layer for weight in weights] == [None, None, None, 1, 1, 2, 2, 3, 3]


def test_experts_are_frozen_one_by_one_or_as_the_tensor_that_holds_all(tmp_path: Path) -> None:
    single = left(hf.save(tmp_path / "single", "qwen3_moe"), "layers.1.mlp.experts.[012].*")
    assert [weight.index for weight in single if weight.is_expert and weight.index[0] == 1] == [(1, 3), (1, 3)]
    stacked = left(hf.save(tmp_path / "stacked", "granitemoe"), "layers.0.*input_linear")
    kinds = {(w.key.rpartition("experts.")[2], w.index[0]) for w in stacked if w.is_expert}
    assert kinds == {("linear_fc2.weight", 0), ("linear_fc1.weight", 1), ("linear_fc2.weight", 1)}


@pytest.mark.parametrize(
    "family,patterns,message",
    [
        ("llama", ["embed_token"], "names 'embed_token', which matches no tensor of this model.  Nearest: embed_t"),
        ("llama, tied", ["lm_head"], "names 'lm_head', but the output weight of this model is its embedding (model."),
        ("llama", ["*"], "freezes every weight, so that nothing would be trained."),
        ("llama", ["q_proj"], "names model.layers.0.self_attn.q_proj.weight, but not model.layers.0.self_attn.k_"),
        ("llama", ["layers.1.*.up_proj"], "names model.layers.1.mlp.up_proj.weight, but not model.layers.1.mlp.g"),
        (  # projections of linear attention are several tensors in a checkpoint, but a single weight in memory
            "qwen3_5_text",
            ["in_proj_z"],
            "names model.layers.0.linear_attn.in_proj_z.weight, but not model.layers.0.linear_attn.in_proj_qkv.weight",
        ),
    ],
)
def test_refusals(tmp_path: Path, family: str, patterns: list[str], message: str) -> None:
    name, _, tied = family.partition(", ")
    with pytest.raises(ConfigError) as error:
        left(hf.save(tmp_path / "model", name, tied=tied == "tied"), *patterns)
    assert str(error.value).startswith(f"train.freeze {message}")


def test_keys_that_exclude_each_other(tmp_path: Path) -> None:
    recipe = RECIPE.format(folder=hf.save(tmp_path / "model", "llama", tied=True))
    with pytest.raises(ConfigError, match="train.freeze = .* has no effect with lora.rank, because LoRA freezes all"):
        parse_recipe(recipe, "tests", ["lora.rank=2", "train.freeze=[embed_tokens]"])
    with pytest.raises(ConfigError, match="lora.train_head = .* cannot be used with model.tie_embeddings"):
        parse_recipe(recipe, "tests", ["lora.rank=2", "lora.train_head=true"])


def test_the_embedding_and_the_output_weight_beside_adapters(tmp_path: Path) -> None:
    recipe = RECIPE.format(folder=hf.save(tmp_path / "model", "llama"))
    config = parse_recipe(recipe, "tests", ["lora.rank=2", "lora.train_embeddings=true"]).config
    trained = trained_weights(config, hf.VOCAB)
    assert trained.whole == [Weight(key="embedding.word_embeddings.weight", index=(), shape=(hf.VOCAB, hf.WIDTH))]
    assert trained.describe(2, 100_000) == (
        "trained 12,064, of which 2,432 in 14 adapters of rank 2 (12.06% of 100,000)"
    )


def test_a_resume_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    recipe = RECIPE.format(folder=hf.save(tmp_path / "model", "llama"))
    before, now = (
        Conditions(plan={}, recipe=values(parse_recipe(recipe, "tests", overrides).config), layout={}, versions={})
        for overrides in ([], ["train.freeze=[embed_tokens]"])
    )
    assert changes(vars(before), now, []).refused == {"train.freeze": "was [], is ['embed_tokens']"}
    assert not changes(vars(before), before, []).refused


def test_a_resume_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    folder = hf.save(tmp_path / "model", "llama")
    recipes = [parse_recipe(RECIPE.format(folder=folder), "test", given) for given in ([], ["optim.name=muon"])]
    before, now = (Conditions(plan={}, recipe=values(recipe.config), layout={}, versions={}) for recipe in recipes)
    assert changes(vars(before), now, []).refused == {"optim.name": "was adamw, is muon"}


def test_projections_that_muon_updates(tmp_path: Path) -> None:
    """Rows of q, k and v alternate by group of query heads; gate comes before up.  Routers are not projections."""
    found = architecture(read(hf.save(tmp_path / "model", "qwen3_moe")), "model")
    rows = projections(found.family.mappings(found.model, found.vocab_size))
    groups, width = hf.GROUPS, hf.HEAD_DIM
    group = hf.HEADS // groups * width + 2 * width
    starts = [group * number for number in range(groups)]
    query = group - 2 * width
    assert rows["decoder.layers.self_attention.linear_qkv.weight"] == (
        tuple((start, start + query) for start in starts),
        tuple((start + query, start + query + width) for start in starts),
        tuple((start + query + width, start + group) for start in starts),
    )
    first = rows["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert [len(runs) for runs in first] == [1, 1] and first[0][0][1] == first[1][0][0] == first[1][0][1] // 2
    assert not any("router" in key or "norm" in key or "embedding" in key for key in rows)
