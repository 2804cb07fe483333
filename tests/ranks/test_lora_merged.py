"""A merged export of a run on any layout has the losses that the run had with its adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft.checkpoint.train_state import Conditions
from sft.config.keys import values
from sft.console import QUIET
from sft.errors import CheckpointError
from sft.hf.source import open_source
from sft.mcore.engine import weights_changed
from sft.mcore.lora import adapted
from sft.weights import kept
from sft.weights.export.export_hf import export_hf
from sft.weights.lora.base_digest import base_digest
from tests.ranks import scenarios
from tests.ranks.hf_models import VISIBLE, check_losses, load, packs_of, recipe_of
from tests.ranks.layouts import EP, PP, SP
from tests.ranks.pool import Ranks
from tests.ranks.saving import Run
from tests.unit.fixtures import hf, vision

LORA = "lora={rank: 3, alpha: 5, lr_ratio: 4, export: merged, %s}"
EXPERTS = 'targets: [all-linear, "experts.*"]'
STACKED = "targets: [all-linear], target_parameters: [experts.gate_up_proj, experts.down_proj, router.weight]"
WHOLE = "train_embeddings: true, train_head: true"
STEPS = 2


def train_and_save(overrides: list[str], source: str, run: str) -> list[Any]:
    """Trains adapters of the weights in the folder `source`, and saves them.  Returns this rank's token losses."""
    with scenarios.running(overrides, has_weights=False) as engine:
        load(engine, source)
        adapted.initialise(engine.chunks, seed=3)
        weights_changed(engine)
        for _ in range(STEPS):
            engine.train_step(scenarios.microbatches_of(engine, packs_of()))
        base = base_digest(engine.config, Path(run), engine.groups)
        conditions = Conditions(plan={}, recipe=values(engine.config), layout={}, versions={}, base=base)
        Run(engine, f"{run}/checkpoints", conditions).save(STEPS, wait=True)
        return scenarios.losses_of(engine, packs_of())


def resume(overrides: list[str], run: str) -> str:
    with scenarios.running(overrides, has_weights=False) as engine:
        try:
            base_digest(engine.config, Path(run), engine.groups)
        except CheckpointError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    "family,keys,layout",
    [
        ("qwen3_moe", EXPERTS, EP),
        ("phi3", WHOLE, SP),
        ("qwen2_5_vl", "targets: [all-linear]", PP),
        ("qwen3_5_text", "targets: [all-linear]", SP),
        ("gpt_oss", STACKED, EP),  # matrices are transposed in files, and rows of gate and up alternate
        ("granitemoe", STACKED, EP),
    ],
    ids=str,
)
def test_merged_weights_have_the_losses_of_the_run(
    ranks: Ranks, tmp_path: Path, family: str, keys: str, layout: list[str]
) -> None:
    models: Any = vision if family in vision.VISION else hf
    source, run = models.save(tmp_path / "source", family), tmp_path / "run"
    recipe = [*recipe_of(source), f"model.hf={source}", LORA % keys, "optim.lr=1e-2", "optim.schedule=constant"]
    recipe += ["checkpoint.async_save=false", "model.init_from=null", *layout]
    kept.keep(open_source(source), run / "hf")
    results = ranks(2).run(train_and_save, recipe, str(source), str(run))
    export_hf(run, tmp_path / "merged", QUIET)
    check_losses(results, models.load(tmp_path / "merged"), packs_of())
    before, after = hf.tensors(source), hf.tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    ends = (
        "_proj.weight",
        *(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        *(("experts.gate_up_proj", "experts.down_proj") if keys == STACKED else ()),
        *(("input_linear.weight", "output_linear.weight") if keys == STACKED else ()),
        *(("router.weight", "router.layer.weight") if keys == STACKED else ()),
        *(("embed_tokens.weight", "lm_head.weight") if keys == WHOLE else ()),
    )
    assert moved == {name for name in before if name.endswith(ends) and "visual" not in name}
    name = next(name for name in moved if name.endswith("self_attn.o_proj.weight"))
    assert float((before[name] - after[name]).abs().max()) > VISIBLE

    merged = [*recipe, f"model.hf={tmp_path / 'merged'}"]
    for told in ranks(2).run(resume, merged, str(run)):
        assert f"The run in {run} has adapters of the weights" in told and "They would be added twice" in told
    assert set(ranks(2).run(resume, merged, str(tmp_path / "new"))) == {""}
