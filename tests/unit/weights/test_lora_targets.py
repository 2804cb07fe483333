"""The Linears that get adapters: chosen as in peft, by names and patterns; all other names are refused."""

from pathlib import Path

import peft
import pytest
import torch

from sft.config.lora import LoraConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture, read
from sft.hf.families import FAMILIES
from sft.layers.adapters import AdaptedWeight, Adapter
from sft.mcore.model.gated_delta_net import GatedDeltaNet
from sft.mcore.model.mamba import Mamba2
from sft.recipe.load import parse_recipe
from sft.weights.lora.base_digest import _digest_of
from sft.weights.lora.peft.targets import lost_by_peft
from sft.weights.lora.targets import select
from sft.weights.trained import trained_weights
from tests.unit.fixtures import hf, vision

RECIPE = """
run: {{dir: runs/none}}
model: {{hf: {folder}}}
lora: {{rank: 2, targets: ["experts.*.up_proj"]}}
data: {{train: none.jsonl, seq_length: 32}}
train: {{num_steps: 1, global_batch_size: 1}}
optim: {{lr: 1e-3}}
"""
STACKED = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "granitemoe",
    "granitemoe_swa",
)  # peft also adapts their experts, which transformers stacks
OTHERS = (
    *STACKED,
    *("afmoe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "qwen2_moe", "nemotron_h", "qwen3_next", "qwen3_5_moe_text"),
    *hf.ROUTED_FAMILIES,
    *hf.LATENT_FAMILIES,
    *hf.OWN_WINDOW_FAMILIES,
)


def selected(
    folder: Path, targets: list[str], exclude: list[str] | None = None, parameters: list[str] | None = None
) -> list[AdaptedWeight]:
    found = architecture(read(folder), str(folder))
    lora = LoraConfig(rank=2, targets=targets, exclude=exclude or [], target_parameters=parameters or [])
    return select(lora, found.model, found.family.mappings(found.model, found.vocab_size))


def names(weights: list[AdaptedWeight]) -> list[str]:
    return [name for weight in weights for name in weight.linears()]


@pytest.mark.parametrize("family", [family for family in hf.FAMILIES if family not in OTHERS])
def test_all_linear_is_that_of_peft(tmp_path: Path, family: str) -> None:
    folder = hf.save(tmp_path / "model", family)
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model_state_dict(peft.get_peft_model(hf.load(folder), settings))
    expected = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in theirs}
    assert len(expected) >= 8 and set(names(selected(folder, ["all-linear"]))) == expected


def test_linears_of_nemotron_h(tmp_path: Path) -> None:
    """PEFT refuses out_proj of Mamba-2 with all-linear; it has our names of all others, with another first part."""
    folder = hf.save(tmp_path / "model", "nemotron_h")
    ours = {name.replace("backbone.", "model.") for name in names(selected(folder, ["all-linear"]))}
    wanted = sorted({name.rpartition(".")[2] for name in ours} - {"out_proj"})
    settings = peft.LoraConfig(r=2, target_modules=wanted, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model_state_dict(peft.get_peft_model(hf.load(folder), settings))
    expected = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in theirs}
    outputs = {name for name in ours if name.endswith(".out_proj")}
    assert len(outputs) == 2 and ours - outputs == expected
    lost = lost_by_peft(sorted(ours), rslora=False)
    assert lost is not None and "model.layers.0.mixer.out_proj" in lost and "lora.exclude=[out_proj]" in lost
    assert lost_by_peft(sorted(ours - outputs), rslora=False) is None


def test_all_linear_of_a_model_with_a_tower(tmp_path: Path) -> None:
    """All Linears of the language model, among them the output gate's, which has the name of the MLP's gate."""
    folder = vision.save(tmp_path / "model", "muse_glimmer")
    linears = [name for name, module in vision.load(folder).named_modules() if isinstance(module, torch.nn.Linear)]
    expected = {name for name in linears if name.startswith("model.language_model.")}
    assert len(expected) == 4 * 8 and set(names(selected(folder, ["all-linear"]))) == expected


@pytest.mark.parametrize(
    "targets,exclude,expected",
    [
        (["q_proj"], [], ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (["mlp.down_proj"], ["layers.0.*"], ["model.layers.1.mlp.down_proj"]),
        (["layers.1.*_proj"], ["mlp.*", "[qkv]_proj"], ["model.layers.1.self_attn.o_proj"]),
        (["model.layers.0.self_attn.v_proj"], [], ["model.layers.0.self_attn.v_proj"]),
        (["all-linear"], ["layers.0.*", "self_attn.*", "up_proj", "gate_proj"], ["model.layers.1.mlp.down_proj"]),
    ],
)
def test_names_and_patterns(tmp_path: Path, targets: list[str], exclude: list[str], expected: list[str]) -> None:
    assert names(selected(hf.save(tmp_path / "model", "qwen3"), targets, exclude)) == expected


def test_gates_of_heads_are_linears(tmp_path: Path) -> None:
    """Their rows are a part of linear_qkv; groups have 2 and 4 heads."""
    weights = selected(hf.save(tmp_path / "model", "laguna"), ["self_attn.*"])
    names_of = [f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qgkvo"]
    assert names(weights) == names_of
    assert [weight.part_rows for weight in weights[::2]] == [(128, 16, 32, 32), (64, 8, 32, 32)]


@pytest.mark.parametrize("family", sorted({*hf.LINEAR_FAMILIES, *hf.MAMBA_FAMILIES, "kimi_linear", "bailing_hybrid"}))
def test_rules_name_parts_of_a_weight_in_the_order_of_its_rows(family: str) -> None:
    """An adapter's rows in a weight follow from the order of the rules."""
    mixer = Mamba2 if family in hf.MAMBA_FAMILIES else GatedDeltaNet
    for name, parts in mixer.parts.items():
        start = f"decoder.layers.self_attention.{name}."
        named = [rule.ours.removeprefix(start) for rule in FAMILIES[family].rules if rule.ours.startswith(start)]
        assert named == [part for part in parts if part in named] and len(named) >= 3


def test_parts_of_a_weight(tmp_path: Path) -> None:
    """k_proj is the second part of qkv; an adapter of a fused Linear covers all parts."""
    folder = hf.save(tmp_path / "model", "llama")
    weight, _ = selected(folder, ["k_proj"])
    assert (weight.module, weight.layer, weight.num_experts) == ("self_attention.linear_qkv", 0, 0)
    assert weight.adapters == (Adapter(name="model.layers.0.self_attn.k_proj", parts=(1,)),)
    fused, _ = selected(hf.save(tmp_path / "fused", "phi3"), ["gate_up_proj"])
    assert fused.adapters == (Adapter(name="model.layers.0.mlp.gate_up_proj", parts=(0, 1)),)


@pytest.mark.parametrize(
    "family,targets,exclude,message",
    [
        ("llama", ["q_prj"], [], "lora.targets names 'q_prj', which matches no Linear of this model.  Nearest: q_proj"),
        ("llama", ["experts.*"], [], "lora.targets names 'experts.*', which matches no Linear of this model."),
        ("llama", ["lm_head"], [], "lora.targets names 'lm_head', which matches no Linear of this model."),
        ("llama", ["q_proj"], ["w1"], "lora.exclude names 'w1', which matches no Linear of this model."),
        ("llama", ["q_proj"], ["self_attn.*"], "lora.exclude excludes everything that lora.targets names"),
        ("qwen2_moe", ["all-linear"], [], "LoRA cannot adapt model.layers.0.mlp.shared_expert_gate: megatron-core"),
        ("qwen3_moe", ["experts.*"], ["experts.2.up_proj"], "lora.targets and lora.exclude give model.layers.0.mlp."),
        (
            *("gpt_oss", ["experts.*"], []),
            "LoRA cannot adapt model.layers.0.mlp.experts.gate_up_proj: the files of this model hold all experts of a "
            "layer in one tensor, which is no Linear.  lora.target_parameters adapts it, for example [experts.gate_up_",
        ),
        ("granitemoe", ["input_linear"], [], "LoRA cannot adapt model.layers.0.block_sparse_moe.input_linear: the fil"),
    ],
)
def test_refusals(tmp_path: Path, family: str, targets: list[str], exclude: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        selected(hf.save(tmp_path / "model", family), targets, exclude)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "family,parameters,message",
    [
        (
            *("gpt_oss", ["experts.gate_up"]),
            "this model has no such parameter.  Nearest: experts.gate_up_proj.  It has experts.down_proj, "
            "experts.gate_up_proj, router.weight, for example model.layers.0.mlp.router.weight.",
        ),
        ("gpt_oss", ["layers.9.experts.down_proj"], "this model has no such parameter.  Nearest: experts.down_proj."),
        (
            *("qwen3_moe", ["mlp.gate.weight"]),
            "the routers of this model have no adapters here: only models whose files hold all experts of a layer as "
            "one tensor have them, if the router is no Linear.  Remove this name.",
        ),
        ("gpt_oss", ["q_proj.weight"], "this is a Linear.  Name it in lora.targets: q_proj."),
        ("gpt_oss", ["self_attn.k_proj"], "this is a Linear.  Name it in lora.targets: self_attn.k_proj."),
        (
            *("qwen3_moe", ["experts.gate_up_proj"]),
            "the files of this model hold one tensor for each expert, so each expert has its own adapters.  Name them "
            'in lora.targets: "experts.*".',
        ),
        ("llama", ["experts.down_proj"], "this model has no experts that its files hold as one tensor.  Use lora.tar"),
    ],
)
def test_parameters_that_have_no_adapters(tmp_path: Path, family: str, parameters: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        selected(hf.save(tmp_path / "model", family), ["q_proj"], parameters=parameters)
    assert str(error.value).startswith(f"lora.target_parameters names {parameters[0]!r}, but {message}")


def test_stacked_experts_have_one_adapter_for_each_expert(tmp_path: Path) -> None:
    """All rows of gate and up have one adapter; rows of gpt-oss alternate in the files only."""
    folder = hf.save(tmp_path / "model", "gpt_oss")
    parameters = ["experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    query, gate_up, *rest = selected(folder, ["q_proj"], parameters=parameters)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert gate_up.adapters == (Adapter(name=f"{name}.*", parts=(0, 1)),) and gate_up.adapters[0].tensor == name
    assert (gate_up.num_experts, gate_up.part_rows, gate_up.num_columns) == (4, (24, 24), 32)
    assert gate_up.linears() == [f"{name}.{number}" for number in range(4)]
    assert gate_up.num_trained(2) == 4 * (2 * 32 + 48 * 2)  # PEFT: lora_A [8, 32] and lora_B [48, 8]
    assert [(weight.layer, weight.module.rpartition(".")[2]) for weight in (query, gate_up, *rest)] == [
        (0, "linear_qkv"), (0, "linear_fc1"), (1, "linear_qkv"), (1, "linear_fc1"), (1, "linear_fc2"),
    ]  # fmt: skip


def test_adapters_that_peft_would_lose_are_refused_before_the_run(tmp_path: Path) -> None:
    folder = hf.save(tmp_path / "model", "qwen3_moe")
    recipe = RECIPE.format(folder=folder)
    config = parse_recipe(recipe, "tests", ["checkpoint.export_hf=last"]).config
    with pytest.raises(
        ConfigError, match="export_hf = last would write a PEFT folder, but .* PEFT reads those of gate"
    ):
        trained_weights(config, 301)
    for overrides in ([], ["checkpoint.export_hf=last", "lora.export=merged"]):
        assert len(trained_weights(parse_recipe(recipe, "tests", overrides).config, 301).adapted) == 2
    with pytest.raises(
        ConfigError, match="lora.export.*adds adapters to weights of files, and model.init_from is rand"
    ):
        parse_recipe(recipe, "tests", [*overrides, "model.init_from=random"])


def test_experts_have_adapters_by_name_only(tmp_path: Path) -> None:
    folder = hf.save(tmp_path / "model", "qwen2_moe")
    dense = names(selected(folder, ["all-linear"], ["shared_expert_gate"]))
    assert not any(".experts." in name for name in dense) and any(".shared_expert." in name for name in dense)
    down = selected(folder, ["experts.*.down_proj"])
    assert [(weight.layer, weight.num_experts) for weight in down] == [(0, 4), (1, 4)]
    assert down[0].adapters[0].name == "model.layers.0.mlp.experts.*.down_proj"
    assert down[0].linears() == [f"model.layers.0.mlp.experts.{i}.down_proj" for i in range(4)]


def test_a_digest_is_computed_once_for_a_file_that_does_not_change(tmp_path: Path) -> None:
    file, calls = tmp_path / "model.safetensors", list[Path]()

    def compute(path: Path) -> str:
        calls.append(path)
        return f"digest {len(calls)}"

    file.write_bytes(b"weights")
    entry = _digest_of(file, {}, compute)
    assert entry["sha256"] == "digest 1" and _digest_of(file, {str(file): entry}, compute) == entry and len(calls) == 1
    file.write_bytes(b"weights and more")
    assert _digest_of(file, {str(file): entry}, compute)["sha256"] == "digest 2"
