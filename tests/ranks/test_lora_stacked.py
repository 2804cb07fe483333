"""Adapters of experts that files hold as one tensor are those of PEFT's `target_parameters`, on every layout.

PEFT has one pair of factors for all experts of a parameter.  `by_expert` divides them as PEFT's own code reshapes them,
so token losses, gradients, steps and folders are compared factor by factor.
"""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from sft.console import QUIET
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.lora import adapted
from sft.mcore.modules.stored import sharded_tensors
from sft.weights.export.export_adapter import export_adapter
from sft.weights.lora.initial_adapters import load_new_adapters
from tests.covering import Case, covering_set
from tests.ranks import etp_on_gloo, scenarios
from tests.ranks.hf_cases import FOUR_KINDS
from tests.ranks.hf_models import ADAMW, SHORT, check_token_losses, expected_losses, load, packs_of
from tests.ranks.layouts import (
    CP,
    EP,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    PP,
    SHARDED,
    SP,
    STEP_TOLERANCE,
)
from tests.ranks.peft_models import (
    ALPHA,
    RANK,
    factors,
    lora_recipe,
    losses_and_gradients,
    peft_gradients,
    peft_model,
    shapes_of,
    shard_parts,
    steps,
    trained_of,
    whole,
)
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters
from tests.unit.fixtures import hf, vision

Tensors = dict[str, torch.Tensor]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
FULL, SELECTIVE = "train.recompute=full", "train.recompute=selective"
ETP = ["parallel.etp=2", "run.device=auto"]
MODELS: dict[str, dict[str, Any]] = {"gemma4_text": hf.GEMMA4_MIXTURE}
# The names of the tensors in files, after "layers.N."; transformers may have others.
IN_FILES = {
    "gpt_oss": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "gemma4_text": ("experts.gate_up_proj", "experts.down_proj"),
    "granitemoe": ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    "qwen3_vl_moe": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}
STEPS = 10
LAYOUT_TOLERANCE = 5e-6  # of the norm of an expert's gradient: fp32 sums in another order; measured 2.9e-6
# So large that a step does not magnify the rounding of small gradients: with 1e-8, factors of gpt-oss differ by 1e-3.
EPSILON = 1e-4


def models_of(family: str) -> Any:
    return vision if family.partition(" ")[0] in vision.VISION else hf


def saved(folder: Path, family: str) -> Path:
    save = vision.made if models_of(family) is vision else hf.save
    return save(folder, family, **MODELS.get(family, {}))


def by_expert(values: Tensors, model: Any, family: str) -> Tensors:
    """PEFT's factors as those of single experts, by the names that a run gives them; other factors are unchanged.

    PEFT reshapes lora_A to [experts, rank, in] and lora_B to [out, rank, experts].  Rows of gate and up alternate in
    gpt-oss; a run has all rows of gate first.
    """
    stacks = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "parameter_name")
    }
    found: Tensors = {}
    for name, value in values.items():
        module, _, factor = name.removesuffix(".weight").rpartition(".")
        if module not in stacks:
            found[name] = value
            continue
        if stacks[module].parameter_name == "weight":
            router = module.replace("block_sparse_moe.router", "block_sparse_moe.router.layer")
            found[f"{router}.{factor}.weight"] = value
            continue
        is_gate_up = stacks[module].parameter_name == "gate_up_proj"
        layer = module.partition(".layers.")[2].partition(".")[0]
        begin = f"{module.partition('.layers.')[0]}.layers.{layer}"
        tensor = f"{begin}.{IN_FILES[family.partition(' ')[0]][0 if is_gate_up else 1]}"
        if factor == "lora_A":
            experts = value.reshape(hf.EXPERTS, -1, value.shape[-1])
        else:
            experts = torch.stack([value.reshape(len(value), -1, hf.EXPERTS)[..., e] for e in range(hf.EXPERTS)])
            if is_gate_up and family == "gpt_oss":
                experts = torch.cat([experts[:, 0::2], experts[:, 1::2]], 1)
        found |= {f"{tensor}.{e}.{factor}.weight": part.contiguous() for e, part in enumerate(experts)}
    return found


CASES = [
    ("gpt_oss", ["q_proj"], BOTH, 1, [SELECTIVE]),
    ("gpt_oss", ["o_proj"], [*BOTH, "router.weight"], 4, [*SP, *EP, *CP, SELECTIVE]),
    ("gpt_oss", [], ["gate_up_proj"], 2, [*PP, FULL]),
    ("gpt_oss", [], BOTH, 4, [*SP, *ETP, *EP, *CP]),
    ("gemma4_text", ["router.proj"], BOTH, 2, [*SP, *EP, SELECTIVE]),
    ("gemma4_text", ["router.proj"], ["layers.1.experts.down_proj"], 2, [*CP, *EP]),
    ("qwen3_vl_moe", ["k_proj"], [*BOTH, "gate.weight"], 2, [*EP, *SHARDED, "parallel.shard=weights", FULL]),
    ("qwen3_vl_moe as released", [], ["experts.gate_up_proj"], 2, [*SP, *ETP, SELECTIVE]),
    ("granitemoe", ["o_proj"], [*BOTH, "router.weight"], 2, [*CP, *EP, SELECTIVE]),
    ("granitemoe", [], ["down_proj"], 4, [*PP, *SP, *EP]),
]


@pytest.mark.parametrize("family,targets,parameters,world_size,overrides", CASES, ids=str)
def test_losses_and_gradients_are_those_of_peft(
    ranks: Ranks,
    tmp_path: Path,
    family: str,
    targets: list[str],
    parameters: list[str],
    world_size: int,
    overrides: list[str],
) -> None:
    source = saved(tmp_path / "source", family)
    model, values = peft_model(source, targets, exact=True, load=models_of(family).load, target_parameters=parameters)
    packs, recipe = packs_of(SHORT), [*lora_recipe(source, targets, parameters), *overrides]
    ours = by_expert(values, model, family)
    results = ranks(world_size).run(etp_on_gloo.run, losses_and_gradients, recipe, str(source), ours, packs)
    check_token_losses([result["losses"] for result in results], expected_losses(model, packs), packs)
    stored, _ = peft_gradients(model, packs)
    assert all(tensor.norm() > 0 for tensor in stored.values()), "a factor without a gradient shows nothing"
    check_parameters(whole(results, "gradients"), by_expert(stored, model, family), GRADIENT_TOLERANCE)
    norm = float(torch.stack([tensor.norm() for tensor in stored.values()]).norm())
    assert all(result["norm"] == pytest.approx(norm, rel=GRADIENT_TOLERANCE) for result in results)


DIMENSIONS: dict[str, list[Any]] = {
    **{
        "tp": [1, 2],
        "cp": [1, 2],
        "pp": [1, 2],
        "virtual_stages": [1, 2],
        "dp": [1, 2],
        "ep": [1, 2, 4],
        "etp": [1, 2],
    },
    "shard": ["optimizer", "gradients", "weights"],
    "recompute": ["none", "selective", "full"],
}
RULES = (
    lambda tp, cp, pp, dp: tp * cp * pp * dp <= 4,
    lambda pp, virtual_stages, dp: virtual_stages == 1 or (pp > 1 and dp == 1),
    lambda tp, cp, dp, ep, etp: etp <= tp and tp * cp * dp % (ep * etp) == 0,
    lambda cp, dp, shard: shard == "optimizer" or cp * dp > 1,
    lambda pp, shard: shard != "weights" or pp == 1,
)
LAYOUTS = covering_set(DIMENSIONS, RULES)
QUICK = 4  # of the layouts; the others are `grid`


def overrides_of(case: Case) -> list[str]:
    keys = [f"parallel.{key}={case[key]}" for key in ("tp", "cp", "pp", "virtual_stages", "ep", "etp", "shard")]
    keys += [f"parallel.sequence_parallel={str(case['tp'] > 1).lower()}", f"train.recompute={case['recompute']}"]
    return [*keys, *(SHARDED if case["shard"] != "optimizer" else []), "run.device=auto"]


@pytest.fixture(scope="module")
def on_one_rank(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, dict[str, Any]]:
    """A model in files, random factors, and the results of one rank."""
    source = hf.save(tmp_path_factory.mktemp("stacked") / "source", "gpt_oss", **FOUR_KINDS)
    recipe = lora_recipe(source, ["o_proj"], [*BOTH, "router.weight"])
    (shapes,) = ranks(1).run(shapes_of, recipe)
    values = factors(shapes)
    (found,) = ranks(1).run(losses_and_gradients, recipe, str(source), values, packs_of(SHORT))
    return source, values, found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.grid if number >= QUICK else ()) for number, case in enumerate(LAYOUTS)],
    ids=lambda case: " ".join(f"{key} {value}" for key, value in case.items() if value != DIMENSIONS[key][0]),
)
def test_every_layout_has_the_results_of_one_rank(
    ranks: Ranks, on_one_rank: tuple[Path, Tensors, dict[str, Any]], case: Case
) -> None:
    source, values, expected = on_one_rank
    recipe = [*lora_recipe(source, ["o_proj"], [*BOTH, "router.weight"]), *overrides_of(case)]
    world_size = case["tp"] * case["cp"] * case["pp"] * case["dp"]
    arguments = (losses_and_gradients, recipe, str(source), values, packs_of(SHORT))
    results = ranks(world_size).run(etp_on_gloo.run, *arguments)
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=LOSS_TOLERANCE)
        assert result["norm"] == pytest.approx(expected["norm"], rel=NORM_TOLERANCE)
    check_parameters(whole(results, "gradients"), whole([expected], "gradients"), LAYOUT_TOLERANCE)


def continued(overrides: list[str], folder: str, checkpoint: Path) -> dict[str, Any]:
    """The adapters of lora.init_from on this rank, which are also written as a checkpoint; the adapters after steps."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        source = load_new_adapters(engine, engine.config, QUIET)
        before = shard_parts(sharded_tensors(list(adapted.leaves(engine.chunks))))
        if engine.groups.rank == 0:
            checkpoint.mkdir()
        state = engine_state.snapshot(engine, {"iteration": STEPS})
        engine_state.write(state, checkpoint, engine.groups.control)
        for _ in range(STEPS):
            engine.train_step(scenarios.microbatches_of(engine, packs_of(SHORT)))
        after = shard_parts(sharded_tensors(list(adapted.leaves(engine.chunks))))
        return {"source": source, "before": before, "after": after}


def resumed(overrides: list[str], folder: str, checkpoint: Path) -> dict[str, Any]:
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        engine_state.load(engine, checkpoint)
        return {"loaded": shard_parts(sharded_tensors(list(adapted.leaves(engine.chunks))))}


@pytest.mark.parametrize(
    "family,targets,parameters,world_size,overrides,other",
    [
        ("gpt_oss", ["q_proj"], [*BOTH, "router.weight"], 2, [*EP, *SHARDED], [*PP]),
        ("gemma4_text", ["router.proj"], BOTH, 2, [*CP, *EP], [*SP, *EP]),
        ("qwen3_vl_moe", ["v_proj"], ["experts.gate_up_proj"], 2, [*PP], [*EP]),
        ("granitemoe", [], [*BOTH, "router.weight"], 4, [*SP, *EP, *SHARDED], [*CP]),
    ],
    ids=str,
)
def test_an_adapter_of_peft_continues_and_comes_back(
    ranks: Ranks,
    tmp_path: Path,
    family: str,
    targets: list[str],
    parameters: list[str],
    world_size: int,
    overrides: list[str],
    other: list[str],
) -> None:
    """From PEFT to a run, to a checkpoint, to another layout, and to a folder of PEFT: the same bits; ten steps from
    there are those of AdamW in PEFT."""
    source = saved(tmp_path / "source", family)
    model, _ = peft_model(source, targets, load=models_of(family).load, target_parameters=parameters)
    before = trained_of(model)
    model.save_pretrained(tmp_path / "adapter")
    recipe = [*lora_recipe(source, targets, parameters), *ADAMW, f"optim.epsilon={EPSILON}"]
    recipe_from, checkpoint = [*recipe, f"lora.init_from={tmp_path}/adapter"], tmp_path / f"iter_{STEPS:07}"
    results = ranks(world_size).run(continued, [*recipe_from, *overrides], str(source), checkpoint)
    assert results[0]["source"].startswith(f"the adapters of {tmp_path}/adapter: ")
    start = by_expert(before, model, family)
    assert hf.same(whole(results, "before"), start)
    assert hf.same(whole(ranks(2).run(resumed, [*recipe, *other], str(source), checkpoint), "loaded"), start)

    export(checkpoint, tmp_path / "export", source)
    names = ("adapter/adapter_model.safetensors", "export/adapter_model.safetensors")
    stored, again = (load_file(tmp_path / name) for name in names)
    assert hf.same(stored, again)
    loaded = peft.PeftModel.from_pretrained(models_of(family).load(source), tmp_path / "export")
    tokens = torch.arange(1, 60)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits)

    trained = copy.deepcopy(model)
    params = [param for param in trained.parameters() if param.requires_grad]
    adam = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1)
    steps(trained, packs_of(SHORT), STEPS, adam)
    moved = {name: tensor - before[name] for name, tensor in trained_of(trained).items()}
    after = whole(results, "after")
    changes = {name: tensor - start[name] for name, tensor in after.items()}
    check_parameters(changes, by_expert(moved, model, family), STEP_TOLERANCE)


def export(checkpoint: Path, target: Path, source: Path) -> None:
    recipe = {"lora.rank": RANK, "lora.alpha": ALPHA, "lora.rslora": False, "model.hf": str(source)}
    export_adapter(checkpoint, target, QUIET, {}, recipe, like=source, dtype=None, finish=lambda *_: None)
