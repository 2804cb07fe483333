"""Merged exports: adapters are added once, and every other tensor equals that of the base, bit for bit."""

import math
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from sft.cli import main
from sft.console import QUIET
from sft.errors import CheckpointError, SftError, StorageError
from sft.hf.architecture import read
from sft.recipe.load import parse_recipe
from sft.weights.export import written_tensors
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from sft.weights.lora import initial_adapters, merged_adapters
from sft.weights.lora.base_digest import digest_of
from sft.weights.trained import trained_weights
from tests.unit.fixtures import hf, vision
from tests.unit.fixtures.adapters import STEP, linears, trained

# half the distance between neighbouring numbers
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
SUM_TOLERANCE = 1e-6  # relative to the largest term: an fp32 sum of rank + 1 products, each of about 1
Tensors = dict[str, torch.Tensor]


def check_merged(before: Tensors, after: Tensors, factors: Tensors, dtype: torch.dtype) -> None:
    """Adapted weights equal a float64 sum, rounded once; all other weights are unchanged."""
    adapted = {name.removesuffix(".lora_A.weight") for name in factors if name.endswith("A.weight")}
    assert adapted and after.keys() == before.keys()
    others = {name for name in before if name.removesuffix(".weight") not in adapted}
    assert hf.same({name: before[name] for name in others}, {name: after[name] for name in others})
    for name in adapted:
        a, b = (factors[f"{name}.lora_{factor}.weight"].double() for factor in "AB")
        exact = before[f"{name}.weight"].double() + 2 * b @ a
        found = after[f"{name}.weight"]
        assert found.dtype == dtype
        assert ((found.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + SUM_TOLERANCE).all(), name
        assert (exact - before[f"{name}.weight"].double()).abs().max() > 0.1, "an adapter that shows nothing"


@pytest.mark.parametrize(
    "family,tied,dtype",
    [
        ("qwen3", True, torch.bfloat16),
        ("phi3", False, torch.float32),
        ("qwen2_5_vl", False, torch.bfloat16),
        ("llama", False, torch.float16),
    ],
    ids=str,
)
def test_adapted_weights_are_rounded_once_and_others_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("sft.weights.export.merged_weights.BLOCK_BYTES", 700)  # five rows
    models: Any = vision if family in vision.VISION else hf
    source = models.save(tmp_path / "source", family, tied=tied, dtype=dtype)
    if tied:  # as in old files
        hf.rewrite(source, **{"lm_head/weight": hf.tensors(source)["model.embed_tokens.weight"].clone()})
    factors = trained(tmp_path / "run", source, **{"model.base_dtype": "as_stored"})
    export_hf(tmp_path / "run", tmp_path / "merged", QUIET)
    check_merged(hf.tensors(source), hf.tensors(tmp_path / "merged"), factors, dtype)
    assert (tmp_path / "merged/config.json").read_bytes() == (source / "config.json").read_bytes()
    card = (tmp_path / "merged/README.md").read_text()
    assert "hold the LoRA adapters of" in card and "\nmodel.base_dtype: as_stored\n" in card
    export_hf(tmp_path / "run", tmp_path / "wide", QUIET, dtype="float32")
    wide = {name: tensor.float() for name, tensor in hf.tensors(source).items()}
    check = {name: tensor for name, tensor in hf.tensors(tmp_path / "wide").items()}
    untrained = {name: tensor for name, tensor in hf.tensors(source).items() if "visual" in name}
    check_merged(wide | untrained, check, factors, torch.float32)


@pytest.mark.parametrize(
    "family,dtype", [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("qwen3_5_text", torch.float32)], ids=str
)
def test_peft_merges_to_the_same_weights(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """peft rounds the product of B and A before it adds the product, and we do not."""
    import transformers

    source = hf.save(tmp_path / "source", family, dtype=dtype)
    trained(tmp_path / "run", source)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--no-merged"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    before = hf.tensors(source)
    for name, found in hf.tensors(tmp_path / "merged").items():
        bound = (
            2 * ROUNDING[dtype] * (before[name].abs() + (theirs[name] - before[name]).abs()).double() + SUM_TOLERANCE
        )
        assert ((found.double() - theirs[name].double()).abs() <= bound).all(), name
    model = hf.load(tmp_path / "merged")
    assert model.generate(torch.tensor([[5, 7, 11]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_adapters_of_a_quantised_base_are_added_to_its_numbers(tmp_path: Path) -> None:
    source = hf.save(tmp_path / "source", "llama", dtype=torch.bfloat16)
    stored = hf.tensors(source)
    quantised, numbers = dict(stored), dict(stored)
    for name in (f"{linear}.weight" for linear in linears(source)):
        scale = stored[name].float().abs().max() / 448
        quantised[name] = (stored[name].float() / scale).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scale.reshape(1, 1)
        numbers[name] = (quantised[name].float() * scale).bfloat16()
    hf.rewrite(source, **quantised)
    hf.change(source, quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    factors = trained(tmp_path / "run", source)
    export_hf(tmp_path / "run", tmp_path / "merged", QUIET)
    check_merged(numbers, hf.tensors(tmp_path / "merged"), factors, torch.bfloat16)
    assert "quantization_config" not in read(tmp_path / "merged")


def test_adapters_of_an_imported_base(tmp_path: Path) -> None:
    """The weights come from the Megatron checkpoint from which the run started."""
    source = hf.save(tmp_path / "source", "phi3", dtype=torch.bfloat16)
    import_hf(source, tmp_path / "imported", QUIET)
    base = digest_of(tmp_path / "imported/iter_0000000", tmp_path)
    factors = trained(tmp_path / "run", source, base=base, **{"model.init_from": str(tmp_path / "imported")})
    export_hf(tmp_path / "run", tmp_path / "merged", QUIET)
    check_merged(hf.tensors(source), hf.tensors(tmp_path / "merged"), factors, torch.bfloat16)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_weight_without_an_adapter_cannot_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, write = hf.save(tmp_path / "source", "llama"), written_tensors.write_tensors
    trained(tmp_path / "run", source)

    def write_changed(folder: Path, planned: Any, values: Any, *rest: Any, **options: Any) -> Any:
        changed = ((key, value + 1e-3 if key == name else value) for key, value in values)
        return write(folder, planned, changed, *rest, **options)

    monkeypatch.setattr(written_tensors, "write_tensors", write_changed)
    told = refused(lambda: export_hf(tmp_path / "run", tmp_path / "merged", QUIET), tmp_path)
    assert "tensors that are not trained differ from those of the original" in told


# --- refusals ----------------------------------------------------------------------------------------------


def refused(work: Callable[[], object], folder: Path, expected: type[SftError] = CheckpointError) -> str:
    before = sorted(folder.rglob("*"))
    with pytest.raises(expected) as error:
        work()
    assert sorted(folder.rglob("*")) == before
    return str(error.value)


def test_adapters_are_not_merged_twice_nor_into_other_weights(tmp_path: Path) -> None:
    source, run = hf.save(tmp_path / "source", "llama"), tmp_path / "run"
    trained(run, source)
    export_hf(run, tmp_path / "merged", QUIET)

    def merge(**options: Any) -> str:
        return refused(lambda: export_hf(run, tmp_path / "again", QUIET, **options), tmp_path)

    told = merge(like=tmp_path / "merged")
    assert f"{tmp_path}/merged holds these weights with adapters merged already" in told
    assert f"those of {run / STEP} (step 3)" in told
    other = shutil.copytree(source, tmp_path / "other")
    hf.rewrite(other, **{"model/norm/weight": torch.ones(hf.WIDTH)})
    assert f"but {other} holds" in merge(like=other)
    (tmp_path / "empty").mkdir()
    shutil.copyfile(source / "config.json", tmp_path / "empty/config.json")
    assert f"{tmp_path}/empty has no model.safetensors" in merge(like=tmp_path / "empty")

    # Another adapter, trained on the merged weights, may be added to these.
    trained(tmp_path / "second", tmp_path / "merged")
    export_hf(tmp_path / "second", tmp_path / "both", QUIET)
    assert [entry.checkpoint for entry in merged_adapters.read(tmp_path / "both")] == [
        str(run / STEP), str(tmp_path / "second" / STEP),
    ]  # fmt: skip
    assert "adapters merged already" in merge(like=tmp_path / "both")


RECIPE = """
model: {{hf: {base}}}
data: {{train: unused, seq_length: 256}}
train: {{num_steps: 5, global_batch_size: 4}}
optim: {{lr: 1e-3}}
lora: {{rank: 3, alpha: 6, exclude: [layers.1.self_attn.o_proj], init_from: {adapter}}}
run: {{dir: unused}}
"""


def test_a_run_does_not_start_from_adapters_that_its_base_holds(tmp_path: Path) -> None:
    source, run = hf.save(tmp_path / "source", "llama"), tmp_path / "run"
    trained(run, source)
    trained(tmp_path / "other", source, size=0.5)
    export_hf(run, tmp_path / "merged", QUIET)
    for name in (run, tmp_path / "other"):
        export_hf(name, Path(f"{name}_adapter"), QUIET, merged=False)

    def describe(base: str, adapter: str) -> list[str]:
        recipe = RECIPE.format(base=tmp_path / base, adapter=tmp_path / adapter)
        config = parse_recipe(recipe, "tests", []).config
        return initial_adapters.describe(config, trained_weights(config, hf.VOCAB))

    told = refused(lambda: describe("merged", "run_adapter"), tmp_path)
    assert f"{tmp_path}/run_adapter has the adapters of {run / STEP} (step 3), which {tmp_path}/merged holds" in told
    assert "13 adapters" in describe("merged", "other_adapter")[0]
    assert "13 adapters" in describe("source", "run_adapter")[0]


def test_what_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = hf.save(tmp_path / "source", "llama"), tmp_path / "target"
    trained(tmp_path / "random", source, base="random weights, seed 7", **{"model.init_from": "random"})
    assert "has adapters of random weights" in refused(lambda: export_hf(tmp_path / "random", target, QUIET), tmp_path)
    import_hf(source, tmp_path / "whole", QUIET)
    whole = refused(lambda: export_hf(tmp_path / "whole", target, QUIET, merged=True), tmp_path)
    assert "holds whole weights and no adapters.  Leave out --merged" in whole
    wide = hf.save(tmp_path / "wide", "llama", intermediate_size=96)
    trained(
        tmp_path / "other",
        wide,
        base=digest_of(source, tmp_path),
        **{"model.hf": str(source), "model.ffn_hidden_size": 64},
    )
    other = refused(lambda: export_hf(tmp_path / "other", target, QUIET), tmp_path)
    assert "has adapters that fit no weight of" in other and "mlp.down_proj (layers 0-1)" in other
    trained(tmp_path / "diverged", source, size=math.inf)
    diverged = refused(lambda: export_hf(tmp_path / "diverged", target, QUIET), tmp_path)
    assert "is not finite in F32 with its adapter" in diverged
    trained(tmp_path / "run", source)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 1 << 40, 1000))
        full = refused(lambda: export_hf(tmp_path / "run", target, QUIET), tmp_path, StorageError)
        assert "free; nothing was written" in full
    monkeypatch.setattr(
        "sft.weights.export.export_hf.write_model_card", lambda *a: (_ for _ in ()).throw(OSError(28, "No space"))
    )
    assert "No space" in refused(lambda: export_hf(tmp_path / "run", target, QUIET), tmp_path, StorageError)
