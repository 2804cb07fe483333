"""Multi-token prediction: allowed recipes, predicted tokens of a document, tensors of the block, and its cost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.config import ModelConfig
from sft.data.packing.pack import Collator
from sft.errors import CheckpointError, ConfigError
from sft.estimate.memory import estimate, stage_memory
from sft.hf.families import FAMILIES
from sft.hf.source import open_source
from sft.layers import kinds
from sft.layers.adapters import Trained
from sft.layers.flops import AttentionCost, TrainFlops, num_parameters
from sft.parallel.layout import Layout
from sft.weights.trained import trained_weights
from tests.builders import RECIPE, parsed, refusal_lines, sample
from tests.ranks import mtp_models
from tests.unit.fixtures import hf
from tests.unit.fixtures.layouts import TINY, of, parameters, stage_of


def test_train_mtp_gives_the_model_its_block() -> None:
    assert not parsed().config.model.has_mtp and parsed().config.train.mtp == "off"
    recipe = parsed("train.mtp=detached")
    assert recipe.config.model.has_mtp and str(recipe.origins["model.has_mtp"]) == "derived: train.mtp"
    assert parsed("train.mtp=joint", "train.mtp_loss_weight=0.3").config.train.mtp_loss_weight == 0.3


@pytest.mark.parametrize(
    "overrides,why",
    [
        (
            ["model.has_mtp=true"],
            "model.has_mtp = true (command line: model.has_mtp=true) does not fit train.mtp = off",
        ),
        (["train.mtp_loss_weight=0.3"], "has no effect with train.mtp = off; use mtp = detached or joint"),
        (["train.mtp=joint", "train.mtp_loss_weight=0"], "expected a number above 0"),
        (["train.mtp=both"], "expected one of off, detached, joint"),
        (
            ["train.mtp=joint", "lora.rank=8"],
            "lora.rank = 8 (command line: lora.rank=8) is not supported with train.mtp",
        ),
        (["train.mtp=joint", "train.freeze=embed_tokens"], "is not supported with train.mtp = joint"),
        (["train.mtp=detached", "run.fp8=blockwise"], "is not supported with train.mtp = detached"),
        (
            ["train.mtp=joint", "train.recompute=full", "train.offload_fraction=0.5"],
            "is not supported with train.mtp = joint; use train.mtp = off, or train.offload_fraction = 0",
        ),
    ],
)
def test_what_does_not_go_together(overrides: list[str], why: str) -> None:
    assert any(why in line for line in refusal_lines(RECIPE, *overrides)), refusal_lines(RECIPE, *overrides)


def test_a_family_without_a_known_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="but the model is llama.*: glm4_moe, .*qwen3_5, .*Use train.mtp = off"):
        trained_weights(parsed("train.mtp=joint").config, 100)


DOCUMENTS = [sample([10, 11, 12, 13], [0, 1, 0, 1]), sample([20, 21, 22, 23]), sample([30]), sample([40, 41])]


def test_what_a_document_predicts() -> None:
    """For each token, the second token after it, if that is supervised and in the same document; with and without
    padding."""
    pack = Collator(doc_multiple=4, pad_id=0).pack(DOCUMENTS)
    assert pack.second_mask.astype(int).tolist() == [0, 1, 0, 0, 1, 1, 0, 0, *[0] * 8]
    assert pack.second_labels[pack.second_mask].tolist() == [13, 22, 23]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_ranks_share_out_the_predicted_tokens(cp_size: int) -> None:
    whole = Collator(doc_multiple=4, pack_multiple=8, pad_id=0, cp_size=cp_size)
    parts = [replace(whole, cp_rank=rank).microbatch(DOCUMENTS) for rank in range(cp_size)]
    found = [(int(t), int(s)) for p in parts for t, s in zip(p.tokens[p.second_mask], p.second_labels[p.second_mask])]
    assert sorted(found) == [(11, 13), (20, 22), (21, 23)]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5_text", "qwen3_next"])
def test_every_tensor_of_the_block_is_trained_or_passed_through(tmp_path: Path, family: str) -> None:
    source, by_hand = mtp_models.save(tmp_path / "source", family)
    of_block = {name for name in hf.tensors(source) if mtp_models.is_of_block(family, name)}
    copies = {name for name in of_block if "embed_tokens" in name or "shared_head.head" in name}
    frozen = open_source(source)
    assert set(frozen.names("passed through")) == of_block - copies and set(frozen.names("tied copy")) == copies
    opened = open_source(source, has_mtp=True)
    assert set(opened.names("tied copy")) == copies and len(copies) == (0 if family in mtp_models.QWEN else 2)
    assert of_block - copies < set(opened.names("trained")) and not opened.names("passed through")


def test_copies_with_other_values_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    source, _ = mtp_models.save(tmp_path / "source", "glm4_moe")
    name = "model/layers/2/shared_head/head/weight"
    hf.rewrite(source, **{name: torch.zeros(hf.VOCAB, hf.WIDTH), "model/layers/2/enorm/weight": None})
    frozen = open_source(source)
    assert name.replace("/", ".") in frozen.names("passed through")  # its values are its own
    assert frozen.names("tied copy") == ["model.layers.2.embed_tokens.weight"]
    with pytest.raises(CheckpointError) as refused:
        open_source(source, has_mtp=True)
    assert "but model.layers.2.shared_head.head.weight and lm_head.weight differ" in str(refused.value)
    assert "missing: model.layers.*.enorm.weight" in str(refused.value)


def test_sft_check_names_the_block() -> None:
    model = of()[0].model
    assert kinds.describe(model) is None
    assert kinds.describe(with_block(model)) == "layers 1 with full attention; a block for multi-token prediction"


# --- cost --------------------------------------------------------------------------------------------------------


def with_block(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"has_mtp": True})


def test_parameters_and_flops_counted_by_hand() -> None:
    """`flops.num_parameters`: 160 of matrices and 8 of norms in a layer; 32 of the projection, and three norms of 4."""
    model = of()[0].model
    assert num_parameters(with_block(model), 10) == 212 + 168 + 32 + 12
    assert TrainFlops.of(model, 10) == TrainFlops(6.0 * 160, 6.0 * 40, AttentionCost(40.0))
    flops = TrainFlops.of(with_block(model), 10)
    assert (flops.per_token, flops.per_label) == (6 * (160 + 160 + 32), 6 * 2 * 40)
    assert flops.attention(np.array([10])) == pytest.approx(2 * 24 * 100)  # two layers


def test_parameters_are_those_of_the_files(tmp_path: Path) -> None:
    """Without copied tensors, and without correction biases, which are buffers."""
    source, _ = mtp_models.save(tmp_path / "source", "glm4_moe")
    stored, model = hf.tensors(source), open_source(source, has_mtp=True).architecture.model
    counted = {n: x for n, x in stored.items() if not n.endswith(("bias", "2.embed_tokens.weight", "head.head.weight"))}
    biases = sum(x.numel() for n, x in stored.items() if n.endswith("proj.bias"))
    assert num_parameters(model, hf.VOCAB) == sum(x.numel() for x in counted.values()) + biases
    assert {"glm4_moe", "deepseek_v3", "qwen3_5"} < {name for name, family in FAMILIES.items() if family.mtp}


def test_the_block_is_on_the_last_stage() -> None:
    """The last stage also has a copy of the embedding, 128 rows of 4, unless it is the first stage, or the output
    weight is tied."""

    def added(pp: int, stage: int, **changes: Any) -> float:
        config, layout = of(pp, model={**TINY, "num_layers": 2, **changes}, parallel={"pp": pp})
        block = config.model_copy(update={"model": with_block(config.model)})
        return parameters(block, layout, stage).total - parameters(config, layout, stage).total

    assert added(1, 0) == added(2, 1) == 168 + 32 + 12 and added(2, 0) == 0
    assert added(2, 1, tie_embeddings=False) == 168 + 32 + 12 + 512


def test_memory_of_the_block() -> None:
    """The block has a layer, four hidden states around it, and the hidden states of a second loss head.

    Its backward runs first, while the gradient of the first head waits.  This frees the block's tensors for backward of
    the other layers.
    """
    config, layout = of()
    config = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 2})})
    block = config.model_copy(update={"model": with_block(config.model)})
    before, after = (estimate(one, layout, 10, 1024, Trained()) for one in (config, block))
    hidden = 2 * 4 * 1024
    saved = before.layers / 2 + 4 * hidden
    assert after.layers - before.layers == saved
    head, *others = before.sets
    second_head, mlp, attention, *layers = after.sets
    assert second_head.held - head.held == 2 * hidden
    assert [mlp.held, attention.held] == [other.held + hidden for other in others]
    assert [mlp.freed, attention.freed] == [other.freed for other in others]
    assert [layer.freed for layer in layers] == [other.freed + saved for other in others]
    full = [
        one.model_copy(update={"train": one.train.model_copy(update={"recompute": "full"})}) for one in (config, block)
    ]
    before, after = (estimate(one, layout, 10, 1024, Trained()) for one in full)
    assert after.layers - before.layers == before.layers / 2 + 2 * hidden
    assert after.sets[1].held - before.sets[1].held == 6 * hidden  # five hidden states are computed again
    assert Layout.resolve(block, 1) == layout


def test_memory_of_a_tied_table_on_two_stages() -> None:
    """The gradient of the table, 128 x 4 elements in bf16, waits for that of the block's embedding, if the block trains
    it."""
    config, layout = of(2, {**TINY, "num_layers": 2}, parallel={"pp": 2}, train={"global_batch_size": 2})
    model = with_block(config.model)
    ways = ("detached", "joint")
    trains = (config.train.model_copy(update={"mtp": way}) for way in ways)
    stages = (
        stage_memory(stage_of(config.model_copy(update={"model": model, "train": train}), layout, 1), 1024)
        for train in trains
    )
    detached, joint = (found.sets for found in stages)
    waits = [after.held - before.held for before, after in zip(detached, joint)]
    assert waits == [0, 1024, 1024, 0, 0]  # the loss head, the two working sets of the block, and that of the layer
