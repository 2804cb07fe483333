"""Adapters beside a base in low bits equal those of peft: on transformers' own dequantisation, and on bitsandbytes."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.ranks import low_bit_bases
from tests.ranks.hf_models import GRADIENT_TOLERANCE, SHORT, check_token_losses, expected_losses, in_float64, packs_of
from tests.ranks.low_bit_bases import BASES
from tests.ranks.peft_models import (
    ALPHA,
    HEAD,
    RANK,
    factors,
    lora_recipe,
    losses_and_gradients,
    peft_gradients,
    whole,
)
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters


def dequantised(folder: Path, config: Any) -> Any:
    """The model as transformers dequantises it."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, quantization_config=config, dtype=torch.bfloat16, attn_implementation="eager")


def adapted(model: Any, targets: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with adapters by peft, in float64, and the values of the adapters."""
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(in_float64(model), settings)
    stored = {name.removeprefix(HEAD): tensor for name, tensor in peft.get_peft_model_state_dict(model).items()}
    values = factors({name: tuple(tensor.shape) for name, tensor in stored.items()})
    peft.set_peft_model_state_dict(model, {HEAD + name: value for name, value in values.items()})
    return model.eval(), values


@pytest.mark.parametrize("name", ["mxfp4", "fp8 in whole blocks"])
def test_losses_and_gradients_are_those_on_transformers_dequantisation(ranks: Ranks, tmp_path: Path, name: str) -> None:
    source, _ = low_bit_bases.save(name, tmp_path)
    config = transformers.Mxfp4Config if name == "mxfp4" else transformers.FineGrainedFP8Config
    check(ranks, source, name, dequantised(source, config(dequantize=True)))


def test_losses_and_gradients_are_those_on_bitsandbytes(ranks: Ranks, tmp_path: Path) -> None:
    """bitsandbytes quantises the Linears of a model, and peft adapts them."""
    functional = pytest.importorskip("bitsandbytes.functional")
    source, _ = low_bit_bases.save("nf4", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
            octets, state = functional.quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=False)
            module.weight.data = functional.dequantize_4bit(octets, state)
    check(ranks, source, "nf4", model)


def check(ranks: Ranks, source: Path, name: str, model: Any) -> None:
    base, packs = BASES[name], packs_of(SHORT)
    exact, values = adapted(copy.deepcopy(model), base.targets)
    recipe = [*lora_recipe(source, base.targets), "model.init_from=null", f"model.base_dtype={base.dtype}"]
    (result,) = ranks(1).run(losses_and_gradients, recipe, str(source), values, packs)
    check_token_losses([result["losses"]], expected_losses(exact, packs), packs)
    expected, _ = peft_gradients(exact, packs)
    check_parameters(whole([result], "gradients"), expected, GRADIENT_TOLERANCE)
