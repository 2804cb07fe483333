"""The table in docs/reference/models.md of features that each family supports agrees with the code."""

from pathlib import Path
from typing import Any

import pytest

from sft.hf.architecture import architecture
from sft.hf.families import FAMILIES, family_of
from sft.weights.lora.parameters import STACKED
from sft.weights.lora.targets import kinds_of
from tests.unit.fixtures import hf, vision
from tests.unit.hf import released

PAGE = Path(__file__).parents[3] / "docs/reference/models.md"
# Here the widths of heads decide, or transformers has no such type.
RELEASED = {"deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2", "glm4_moe_lite": "glm_4_7_flash"}
RELEASED |= {"mistral4": "mistral_small_4 text", "kimi_k25": "kimi_k2_5"}
REFUSED_BY_LORA = {
    "the files of this model hold gate and up of all experts in two tensors, and PEFT adapts both as one": "experts",
    "megatron-core multiplies with this weight outside of a linear layer": "`shared_expert_gate`",
}


def rows() -> list[list[str]]:
    """A row for each family: its name, then the other cells."""
    section = PAGE.read_text().split("## What each family supports")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line]
    return [[name.strip("`"), *row[1:]] for row in cells[2:] for name in row[0].split(", ")]


ROWS = rows()


def content(model_type: str) -> dict[str, Any]:
    """The config.json of a family; for Gemma 4 that of its mixture of experts, because its dense models have fewer
    refusals."""
    if model_type in RELEASED:
        return released.config(RELEASED[model_type])
    if model_type == "step3p5":  # transformers has the language model inside step3p7 only
        own = dict(vision.config("step3p7").text_config.to_dict())
        return {key: value for key, value in own.items() if key != "architectures"}
    if model_type in vision.VISION:
        return dict(vision.config(model_type).to_dict())
    fields: dict[str, Any] = hf.GEMMA4_MIXTURE if model_type == "gemma4_text" else {}
    return dict(hf.config(model_type, **fields).to_dict())


def test_the_table_has_every_family_once() -> None:
    names = [row[0] for row in ROWS]
    assert len(names) == len(set(names)) and set(names) == {name.partition("/")[0] for name in FAMILIES}


@pytest.mark.parametrize("model_type,te,refused,mtp", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_what_the_code_does(model_type: str, te: str, refused: str, mtp: str) -> None:
    config = content(model_type)
    model, family = architecture(config, "config.json").model, family_of(config)
    assert family is not None
    latent = model.latent_attention
    if model.portable_only or (latent.is_used and not latent.has_te_kernel):
        assert te == "no"
    else:
        assert te == ("yes, if `te` is named" if latent.is_used else "yes")
    reasons = {kind for kind in kinds_of(family, model).values() if kind not in ("linear", "expert", STACKED)}
    assert refused == " and ".join(sorted(REFUSED_BY_LORA[reason] for reason in reasons))
    passes = family.has_mtp_layers or any("mtp" in pattern for pattern in family.passed_through)
    assert mtp == ("trained" if family.mtp else "passed through" if passes else "none")
