"""Adapter folders: we read folders of PEFT exactly, and PEFT computes the same as we do with our folders."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.config.lora import LoraConfig
from sft.files.file_digest import Entry
from sft.weights.lora.peft import folder as peft_folder
from sft.weights.lora.peft.config import AdapterConfig
from sft.weights.lora.peft.folder import Contents
from sft.weights.lora.peft.targets import module_of, target_modules
from tests.unit.fixtures import hf, peft, vision
from tests.unit.fixtures.peft import ALPHA, ATTENTION, MLP, RANK, Factors

# Logits are up to about 10; with the adapter merged into the weight, fp32 sums have another order.
LOGITS = 1e-4
# Gradients are up to about 0.1, and their fp32 sums also have another order.
GRADIENTS = 1e-6
# Losing any adapter changes some logit by more than this.
LOST = 0.1
MIXTRAL = ["w1", "w2", "w3"]
PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def in_experts(module: str) -> bool:
    return ".experts." in module


class Written:
    """A small random model, an adapter of ours for some of its modules, and the model with the adapter merged.

    chosen: whether a module whose last name is in `leaves` gets an adapter
    """

    def __init__(
        self,
        path: Path,
        save: Callable[[Path], Any],
        leaves: list[str],
        chosen: Callable[[str], bool] = lambda module: True,
        *,
        has_vision: bool = False,
        **config: Any,
    ) -> None:
        self.path, self.has_vision, self.base, self.folder = path, has_vision, path / "base", path / "adapter"
        save(self.base)
        self.weights = hf.tensors(self.base)
        self.name_of = {
            module_of(name, has_vision=has_vision): name for name in self.weights if name.endswith("weight")
        }
        towers = ("vision_tower", "visual", "multi_modal")
        self.modules = {
            module: tuple(self.weights[name].shape)
            for module, name in self.name_of.items()
            if module.rpartition(".")[2] in leaves and chosen(module) and not any(tower in name for tower in towers)
        }
        self.config = AdapterConfig(**{"rank": RANK, "alpha": float(ALPHA)} | config)
        self.scale = LoraConfig(rank=RANK, alpha=self.config.alpha, rslora=self.config.rslora).scale
        self.saved: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(3)
        self.factors: dict[str, Factors] = {
            module: (
                0.2 * torch.randn(RANK, num_columns, generator=generator),
                0.2 * torch.randn(num_rows, RANK, generator=generator),
            )
            for module, (num_rows, num_columns) in self.modules.items()
        }

    def contents(self) -> Contents:
        shapes = {module: tuple(weight.shape) for module, weight in self.saved.items()}
        return Contents(config=self.config, modules=self.modules, saved=shapes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors one after the other, in the order of the file."""
        values = {peft_folder.key_of_saved(module): weight for module, weight in self.saved.items()}
        for module, (a, b) in self.factors.items():
            values |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        yield from ((key, values[key]) for key in self.contents().shapes())

    def write(self, **options: Any) -> Path:
        others = [module for module in self.name_of if module not in self.modules]
        peft_folder.write(self.folder, self.contents(), self.tensors(), others=others, **options)
        return self.folder

    def load(self, folder: Path) -> Any:
        import transformers

        kind = "ImageTextToText" if self.has_vision else "CausalLM"
        return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    def merged_model(self) -> Any:
        """A transformers model with the weights W + scale * B A, computed in float64."""
        weights = dict(self.weights)
        for module, (a, b) in self.factors.items():
            weight = weights[self.name_of[module]].double() + self.scale * (b.double() @ a.double())
            weights[self.name_of[module]] = weight.float()
        stored = [module for module in self.saved if module in self.name_of]  # without a tied output weight
        weights |= {self.name_of[module]: self.saved[module] for module in stored}
        content = json.loads((self.base / "config.json").read_text())
        return self.load(hf.write(self.path / "merged", content, weights))


@pytest.mark.parametrize(
    "family, targets",
    [("llama", ATTENTION), ("qwen3", "all-linear"), ("phi3", "all-linear"), ("qwen3_moe", ATTENTION)],
)
def test_what_peft_writes_is_read_exactly(tmp_path: Path, family: str, targets: Any) -> None:
    model = peft.adapted(hf.build(family), target_modules=targets)
    model.save_pretrained(tmp_path)
    adapter = peft_folder.read(tmp_path)
    expected = peft.factors(model)
    assert adapter.contents.config == AdapterConfig(rank=RANK, alpha=ALPHA, base=adapter.contents.config.base)
    assert adapter.contents.modules == {module: (len(b), a.shape[1]) for module, (a, b) in expected.items()}
    values = peft.values(adapter)
    leaves = {"llama": ATTENTION, "qwen3_moe": ATTENTION, "qwen3": ATTENTION + MLP, "phi3": PHI3}[family]
    assert {module.rpartition(".")[2] for module in expected} == {*leaves}
    assert len(expected) == hf.LAYERS * len(leaves)
    for module, factors in expected.items():
        for factor, theirs in zip("AB", factors, strict=True):
            assert torch.equal(values[f"base_model.model.{module}.lora_{factor}.weight"], theirs)


def test_weights_that_peft_trains_whole_are_read_exactly(tmp_path: Path) -> None:
    model = peft.adapted(hf.build("qwen3"), target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model.save_pretrained(tmp_path)
    adapter = peft_folder.read(tmp_path)
    shape = (hf.VOCAB, hf.WIDTH)
    assert adapter.contents.saved == {"model.embed_tokens": shape, "lm_head": shape}
    trained = model.base_model.model
    values, embedding = peft.values(adapter), trained.model.embed_tokens.modules_to_save.default.weight
    assert torch.equal(values["base_model.model.lm_head.weight"], trained.lm_head.modules_to_save.default.weight)
    assert torch.equal(values["base_model.model.model.embed_tokens.weight"], embedding)


def test_a_tied_embedding_that_peft_trains_is_read(tmp_path: Path) -> None:
    """PEFT stores it twice, but names only one of the two in modules_to_save."""
    options = dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    peft.adapted(hf.build("qwen3", tied=True), **options).save_pretrained(tmp_path)
    adapter = peft_folder.read(tmp_path)
    assert adapter.contents.config.tied
    assert adapter.contents.saved.keys() == {"lm_head", "model.embed_tokens"}
    adapter.check_equal("lm_head", "model.embed_tokens")


@pytest.mark.parametrize(
    "family, leaves, chosen",
    [
        ("llama", ATTENTION + MLP, None),
        ("qwen3", ["q_proj", "down_proj"], lambda module: ".layers.1." in module),
        ("phi3", PHI3, None),
        ("qwen3_moe", ATTENTION, None),
        ("qwen3_moe", ATTENTION + MLP, None),
        ("qwen3_moe", ["down_proj"], None),
        ("qwen2_moe", ATTENTION + MLP, None),
        ("qwen2_moe", ATTENTION + MLP, lambda module: not in_experts(module)),
        ("qwen2_moe", MLP, in_experts),
        ("mixtral", ATTENTION + MIXTRAL, None),
        ("olmoe", MLP, None),
    ],
)
def test_peft_computes_the_same_with_what_we_write(
    tmp_path: Path, family: str, leaves: list[str], chosen: Callable[[str], bool] | None
) -> None:
    ours = Written(tmp_path, lambda path: hf.save(path, family), leaves, chosen or (lambda module: True))
    assert_peft_computes_the_same(ours)


@pytest.mark.parametrize("family", ["mistral3", "mistral3/ministral3", "qwen2_5_vl", "qwen3_vl"])
def test_peft_computes_the_same_beside_a_vision_tower(tmp_path: Path, family: str) -> None:
    """In memory, its modules have other names than in the files, and the vision tower may also have a q_proj."""
    ours = Written(tmp_path, lambda path: vision.save(path, family), ATTENTION + MLP, has_vision=True)
    assert_peft_computes_the_same(ours)


def test_peft_has_our_scale_with_rslora(tmp_path: Path) -> None:
    ours = Written(tmp_path, lambda path: hf.save(path, "llama"), ["q_proj"], rslora=True, alpha=2.5)
    assert ours.scale == 1.25
    assert_peft_computes_the_same(ours)


@pytest.mark.parametrize("tied", [False, True])
def test_peft_has_the_weights_that_we_train_whole(tmp_path: Path, tied: bool) -> None:
    ours = Written(tmp_path, lambda path: hf.save(path, "qwen3", tied=tied), ["q_proj"], tied=tied)
    embedding = torch.randn(hf.VOCAB, hf.WIDTH, generator=torch.Generator().manual_seed(4))
    ours.saved = {"model.embed_tokens": embedding, "lm_head": embedding if tied else embedding.flip(0)}
    assert_peft_computes_the_same(ours)


def assert_peft_computes_the_same(ours: Written) -> None:
    model = peft.loaded(ours.load(ours.base), ours.write())
    expected, without = peft.logits(ours.merged_model()), peft.logits(ours.load(ours.base))
    assert (expected - without).abs().max() > LOST
    torch.testing.assert_close(peft.logits(model), expected, atol=LOGITS, rtol=0)
    stored = {renamed_by_transformers(module): factors for module, factors in ours.factors.items()}
    in_memory = peft.factors(model)
    assert in_memory.keys() == stored.keys()
    for module, factors in stored.items():
        assert all(torch.equal(a, b) for a, b in zip(factors, in_memory[module], strict=True))


def test_gradients_of_experts_in_peft_are_those_of_single_adapters(tmp_path: Path) -> None:
    """For y = (W + scale B A) x: dA = scale B^T dW and dB = scale dW A^T, with dW of the merged model."""
    ours = Written(tmp_path, lambda path: hf.save(path, "qwen3_moe"), ["q_proj", *MLP])
    model, merged_model = peft.loaded(ours.load(ours.base), ours.write(), is_trainable=True), ours.merged_model()
    for each in (model, merged_model):
        each(input_ids=peft.TOKENS, labels=peft.TOKENS).loss.backward()
    gradients = peft.factors(model, lambda parameter: parameter.grad)
    for module, (a, b) in ours.factors.items():
        by_a, by_b = gradients[module]
        weight = gradient_of_weight(merged_model, module)
        torch.testing.assert_close(by_a, ours.scale * b.T @ weight, atol=GRADIENTS, rtol=0)
        torch.testing.assert_close(by_b, ours.scale * weight @ a.T, atol=GRADIENTS, rtol=0)
        assert by_a.abs().max() > 100 * GRADIENTS and by_b.abs().max() > 100 * GRADIENTS


def gradient_of_weight(model: Any, module: str) -> torch.Tensor:
    """dW of a module; for single experts, a part of dW of the stacked experts of transformers [experts, out, in]."""
    if not in_experts(module):
        gradient: torch.Tensor = model.get_submodule(module).weight.grad
        return gradient
    experts, number, leaf = module.rsplit(".", 2)
    if leaf == "down_proj":
        return model.get_submodule(experts).down_proj.grad[int(number)]
    gate, up = model.get_submodule(experts).gate_up_proj.grad[int(number)].chunk(2)
    return gate if leaf == "gate_proj" else up


def renamed_by_transformers(module: str) -> str:
    """Mixtral's modules have other names in memory than in the files."""
    module = module.replace("block_sparse_moe", "mlp")
    for stored, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        module = re.sub(rf"\.{stored}$", f".{name}", module)
    return module


def test_what_we_write_is_read_again(tmp_path: Path) -> None:
    """Also the options for experts, which a folder with stacked adapters also has."""
    ours = Written(
        tmp_path,
        lambda path: hf.save(path, "qwen3_moe"),
        ["q_proj", *MLP],
        dropout=0.0,
        base="org/model",
        revision="main",
    )
    ours.saved = {"lm_head": torch.arange(6.0).reshape(3, 2)}
    adapter = peft_folder.read(ours.write(dtype=torch.bfloat16))
    assert adapter.contents == ours.contents()
    adapter.check(ours.modules, adapter.contents.saved)
    assert hf.same(peft.values(adapter), {key: value.bfloat16().float() for key, value in ours.tensors()})
    # With transformers 4, where an expert is a module, PEFT wrote none of the options for experts.
    peft.rewrite(ours.folder, target_parameters=None, rank_pattern={}, alpha_pattern={})
    assert peft_folder.read(ours.folder).contents == ours.contents()


def test_the_configuration_that_we_write(tmp_path: Path) -> None:
    ours = Written(tmp_path, lambda path: hf.save(path, "qwen3"), ATTENTION + MLP, base="org/model")
    seen: list[str] = []

    def finish(folder: Path, entries: dict[str, Entry]) -> None:
        seen.extend(sorted(path.name for path in folder.iterdir()))
        assert entries.keys() == {"adapter_model.safetensors"}

    content = json.loads((ours.write(finish=finish) / "adapter_config.json").read_text())
    assert seen == ["adapter_config.json", "adapter_model.safetensors"]
    assert content["base_model_name_or_path"] == "org/model"
    assert content["target_modules"] == sorted(ATTENTION + MLP)
    assert content["lora_alpha"] == ALPHA and isinstance(content["lora_alpha"], int)
    assert not {"rank_pattern", "alpha_pattern", "target_parameters"} & content.keys()


def test_an_adapter_is_one_file_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT reads a single file."""
    monkeypatch.setattr("sft.hf.safetensors_writer.write_tensors.__defaults__", (100,))  # bytes of a file
    folder = Written(tmp_path, lambda path: hf.save(path, "llama"), ATTENTION).write()
    assert [path.name for path in folder.glob("*.safetensors*")] == ["adapter_model.safetensors"]


@pytest.mark.parametrize(
    "adapted, others, endings",
    [
        ("a.0.q a.1.q", "a.0.k a.1.k", "q"),
        ("a.1.q a.1.k", "a.0.q", "1.q k"),
        ("a.1.q", "a.0.q a.11.q", "1.q"),
        ("a.0.q_proj", "a.0.kq_proj", "q_proj"),
        ("a.q", "b.a.q", "a.q"),  # PEFT's matching cannot distinguish these names
        ("t.0.attn.q", "v.0.attn.q", "t.0.attn.q"),
    ],
)
def test_target_modules_are_the_shortest_endings_that_are_exact(adapted: str, others: str, endings: str) -> None:
    assert target_modules(adapted.split(), others.split()) == endings.split()
