"""Adapter folders from which training cannot continue, and adapters that PEFT would not read: refused by name."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from sft.config.lora import LoraConfig
from sft.errors import CheckpointError
from sft.weights.lora.peft import folder as peft_folder
from sft.weights.lora.peft.config import AdapterConfig
from sft.weights.lora.peft.folder import Contents
from tests.unit.fixtures import hf, peft
from tests.unit.fixtures.peft import ALPHA, RANK

PREFIX = "base_model.model.model.layers.1.self_attn.q_proj"
NAN = torch.full((RANK, hf.WIDTH), torch.nan)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    peft.adapted(hf.build("llama"), target_modules=["q_proj"]).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A folder of PEFT that can be read."""
    return Path(shutil.copytree(written, tmp_path / "adapter"))


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        read()
    return str(error.value)


def reasons(folder: Path) -> str:
    """The text of the error after the name of the folder."""
    begin = f"{folder} is an adapter that cannot be continued: "
    text = refusal(lambda: peft_folder.read(folder))
    assert text.startswith(begin) and text.endswith(".")
    return text[len(begin) : -1]


def test_the_folder_of_these_tests_is_read(folder: Path) -> None:
    assert len(peft_folder.read(folder).contents.modules) == hf.LAYERS


@pytest.mark.parametrize(
    "option, value, reason",
    [
        ("peft_type", "LOHA", 'peft_type = "LOHA" is not supported, only LORA'),
        ("task_type", "SEQ_CLS", 'task_type = "SEQ_CLS" is not supported, only CAUSAL_LM'),
        ("bias", "lora_only", 'bias = "lora_only" is not supported, only none: biases are not trained'),
        ("use_dora", True, "use_dora = true is not supported: DoRA also scales the rows of the weight"),
        ("use_qalora", True, "use_qalora = true is not supported: it averages inputs, for quantised weights"),
        ("rank_pattern", {"q_proj": 2}, 'rank_pattern = {"q_proj": 2} is not supported: adapters of different ranks'),
        (
            "alpha_pattern",
            {"q_proj": 2},
            'alpha_pattern = {"q_proj": 2} is not supported: adapters of different scales',
        ),
        (
            "target_parameters",
            "experts.down_proj",
            'target_parameters = "experts.down_proj" is not supported: it is no list of names',
        ),
        ("layers_to_transform", [1], "layers_to_transform = [1] is not supported: name the layers in target_modules"),
        ("layer_replication", [[0, 2], [0, 2]], "layer_replication = [[0, 2], [0, 2]] is not supported: it repeats"),
        ("lora_bias", True, "lora_bias = true is not supported: biases are not trained"),
        ("megatron_config", {"tp": 2}, 'megatron_config = {"tp": 2} is not supported'),
        ("loftq_config", {"loftq_bits": 4}, 'loftq_config = {"loftq_bits": 4} is not supported: LoftQ quantises'),
        (
            "trainable_token_indices",
            [3],
            "the file of tensors lacks rows of a module for trainable_token_indices = [3]",
        ),
        ("trainable_token_indices", [3, 3], "trainable_token_indices = [3, 3] is neither a list of different ids"),
        ("fan_in_fan_out", True, "fan_in_fan_out = true is not supported: its weights are transposed"),
        ("use_magic", 1, "use_magic = 1 is not supported: this trainer does not know what it means"),
        ("r", 0, "r = 0 is not a whole number of at least 1"),
        ("r", True, "r = true is not a whole number of at least 1"),
        ("r", ..., "r = null is not a whole number of at least 1"),
        ("lora_alpha", -1, "lora_alpha = -1 is not a number above 0"),
        ("lora_alpha", 10**400, f"lora_alpha = 1{'0' * 76}... is not a number above 0"),
        ("lora_dropout", 1.5, "lora_dropout = 1.5 is not a number from 0 to 1"),
        ("use_rslora", "yes", 'use_rslora = "yes" is neither true nor false'),
        ("base_model_name_or_path", 1, "base_model_name_or_path = 1 is no text"),
        ("modules_to_save", "lm_head", 'modules_to_save = "lm_head" is no list of names'),
        (
            "modules_to_save",
            ["lm_head"],
            "adapter_model.safetensors lacks the weight of lm_head, which modules_to_save",
        ),
    ],
)
def test_options_that_cannot_be_continued(folder: Path, option: str, value: Any, reason: str) -> None:
    assert reasons(peft.rewrite(folder, **{option: value})).startswith(reason)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", 1])
def test_starts_that_change_the_base_weights(folder: Path, start: Any) -> None:
    shown = json.dumps(start)
    assert reasons(peft.rewrite(folder, init_lora_weights=start)) == (
        f"init_lora_weights = {shown} is not supported, because it may change the base weights.  PEFT converts such an "
        "adapter: save_pretrained with path_initial_model_for_weight_conversion"
    )


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva", ...])
def test_other_starts_and_options_without_meaning_for_the_numbers(folder: Path, start: Any) -> None:
    peft.rewrite(folder, init_lora_weights=start, exclude_modules=["k_proj"], lora_dropout=0.1, use_magic=None)
    assert peft_folder.read(folder).contents.config.dropout == 0.1


@pytest.mark.parametrize(
    "tensors, reason",
    [
        ({f"{PREFIX}.lora_A.weight": None}, f"{PREFIX}.lora_A.weight (layer 1) is missing"),
        ({f"{PREFIX}.lora_B.weight": None}, f"{PREFIX}.lora_B.weight (layer 1) is missing"),
        ({f"{PREFIX}.lora_magnitude_vector": torch.ones(2)}, f"{PREFIX}.lora_magnitude_vector (layer 1) is no part of"),
        ({f"{PREFIX}.base_layer.weight": torch.ones(2, 2)}, f"{PREFIX}.base_layer.weight (layer 1) is no part of"),
        ({"model.lora_A.weight": torch.ones(2, 2)}, "model.lora_A.weight is no part of a LoRA adapter"),
        ({f"{PREFIX}.lora_A.weight": torch.ones(3, 32)}, f"{PREFIX}.lora_A.weight (layer 1) is 3 x 32, which does not"),
        ({f"{PREFIX}.lora_B.weight": torch.ones(64, 5)}, f"{PREFIX}.lora_B.weight (layer 1) is 64 x 5, which does not"),
        (
            {f"{PREFIX}.lora_B.weight": torch.ones(4)},
            f"{PREFIX}.lora_B.weight (layer 1) is 4, which does not fit r = 4",
        ),
        (
            {f"{PREFIX}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)},
            f"{PREFIX}.lora_A.weight has the type I8, but F32, F16, BF16 are supported",
        ),
    ],
)
def test_tensors_that_are_no_adapter(folder: Path, tensors: dict[str, torch.Tensor | None], reason: str) -> None:
    text = reasons(peft.rewrite(folder, tensors)).replace("layers.*", "layers.1")
    assert text.startswith(reason)


def test_every_reason_is_named_at_once(folder: Path) -> None:
    text = reasons(peft.rewrite(folder, {f"{PREFIX}.lora_A.weight": None}, use_dora=True, r=-1))
    assert text.startswith("1 of 3: use_dora = true")
    assert "2 of 3: r = -1" in text and "3 of 3: base_model.model" in text


def test_a_file_without_adapters(folder: Path) -> None:
    save_file({}, folder / "adapter_model.safetensors")
    assert reasons(folder) == "adapter_model.safetensors holds no pair of factors A and B"


def test_stacked_adapters_of_two_ranks(tmp_path: Path) -> None:
    """With targets that name gate and up, PEFT doubles the rank of their parameter."""
    model = peft.adapted(hf.build("qwen3_moe"), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    model.save_pretrained(tmp_path)
    peft.rewrite(tmp_path, target_parameters=["gate_up_proj", "down_proj"])  # in another order than our list
    key = r".*\\.gate_up_proj"  # escaped as in JSON
    assert reasons(tmp_path).splitlines() == [
        f'1 of 2: rank_pattern = {{"{key}": 8}} is not supported: adapters of different ranks are not supported',
        f'  2 of 2: alpha_pattern = {{"{key}": 24}} is not supported: adapters of different scales are not supported',
    ]


def test_folders_that_are_none(tmp_path: Path, folder: Path) -> None:
    assert refusal(lambda: peft_folder.read(tmp_path)) == (
        f"{tmp_path} is no PEFT folder, because it has no adapter_config.json.  Name a folder that PEFT's "
        "save_pretrained or `sft export` wrote."
    )
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-4])
    assert f"{weights} is not a complete safetensors file" in refusal(lambda: peft_folder.read(folder))
    weights.unlink()
    assert refusal(lambda: peft_folder.read(folder)) == (
        f"{folder} is no complete PEFT folder, because it has no adapter_model.safetensors.  Copy it again."
    )
    (folder / "adapter_model.bin").write_bytes(b"not a pickle file, and never opened")
    assert "has adapter_model.bin, a pickle file" in refusal(lambda: peft_folder.read(folder))
    for text in ("{", "[1]", "[" * 100_000):
        (folder / "adapter_config.json").write_text(text)
        assert f"{folder / 'adapter_config.json'} is damaged" in refusal(lambda: peft_folder.read(folder))


def test_numbers_that_are_not_finite(folder: Path) -> None:
    adapter = peft_folder.read(peft.rewrite(folder, {f"{PREFIX}.lora_A.weight": NAN}))
    text = refusal(lambda: peft.values(adapter))
    assert text.endswith(f"{PREFIX}.lora_A.weight has numbers that are not finite.  Use another adapter.")


def test_a_file_that_changes_after_it_was_opened(folder: Path) -> None:
    adapter = peft_folder.read(folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    text = refusal(lambda: peft.values(adapter))
    assert "its size has changed since it was opened" in text


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "names, rslora, reason",
    [
        (
            "0.gate_proj 0.up_proj",
            False,
            "has adapters of gate_proj, up_proj alone.  PEFT reads those of gate, up and d",
        ),
        ("0.gate_proj 0.down_proj", False, "has adapters of down_proj, gate_proj alone.  PEFT reads those of gate, up"),
        ("0.w1 0.w3", False, "has adapters of w1, w3 alone.  PEFT reads those of gate, up and down together"),
        ("0.down_proj 2.down_proj", False, "has adapters of some experts only.  PEFT stacks those of all experts"),
        ("0.w1 0.w2 0.w3 1.w1 1.w3", False, "has adapters of some experts only.  PEFT stacks those of all experts"),
        ("0.w1 0.w2 0.w3", True, "has adapters with rslora.  PEFT stacks gate and up, and scales them by sqrt(2) too"),
    ],
)
def test_adapters_of_experts_that_peft_would_lose(tmp_path: Path, names: str, rslora: bool, reason: str) -> None:
    modules = {f"{EXPERTS}.{name}": (3, 2) for name in names.split()}
    contents = Contents(config=AdapterConfig(rank=2, alpha=4.0, rslora=rslora), modules=modules)
    target = tmp_path / "out"
    text = refusal(lambda: peft_folder.write(target, contents, [], others=[]))
    assert text.startswith(f"{target} was not written: {EXPERTS} {reason}")
    assert text.endswith(".  Export the merged model instead.")
    assert not target.exists()


def test_numbers_that_the_type_of_the_file_cannot_hold(tmp_path: Path) -> None:
    contents = Contents(config=AdapterConfig(rank=1, alpha=1.0), modules={"q": (1, 1)})
    tensors = [(key, torch.full((1, 1), 1e6)) for key in contents.shapes()]
    text = refusal(lambda: peft_folder.write(tmp_path / "out", contents, tensors, others=[], dtype=torch.float16))
    assert (
        text
        == "base_model.model.q.lora_A.weight has numbers that are not finite in torch.float16.  Nothing was written."
    )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "leaves, rslora", [(["gate_proj", "up_proj"], False), (["gate_proj", "up_proj", "down_proj"], True)]
)
def test_peft_still_loses_what_we_refuse_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: list[str], rslora: bool
) -> None:
    """If this test fails, PEFT reads such folders, and `lost_by_peft` can be removed."""
    base = hf.save(tmp_path / "base", "qwen3_moe")
    weights = hf.tensors(base)
    modules = {name.removesuffix(".weight"): weights[name] for name in weights if name.split(".")[-2] in leaves}
    config = AdapterConfig(rank=RANK, alpha=float(ALPHA), rslora=rslora)
    scale = LoraConfig(rank=RANK, alpha=float(ALPHA), rslora=rslora).scale
    contents = Contents(config=config, modules={name: tuple(weight.shape) for name, weight in modules.items()})
    generator = torch.Generator().manual_seed(2)
    tensors = {key: 0.2 * torch.randn(shape, generator=generator) for key, shape in contents.shapes().items()}
    monkeypatch.setattr(peft_folder, "lost_by_peft", lambda modules, rslora: None)
    peft_folder.write(tmp_path / "adapter", contents, tensors.items(), others=[])
    for module, weight in modules.items():
        a, b = (tensors[key].double() for key in (peft_folder.key_of_a(module), peft_folder.key_of_b(module)))
        weights[f"{module}.weight"] = (weight + scale * (b @ a)).float()
    merged = hf.load(hf.write(tmp_path / "merged", json.loads((base / "config.json").read_text()), weights))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(hf.load(base), tmp_path / "adapter")
    assert (peft.logits(model) - peft.logits(merged)).abs().max() > 0.1
