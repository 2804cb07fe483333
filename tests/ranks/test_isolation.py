"""Documents never leak: the content of a document does not change its neighbours in the pack."""

import pytest

from sft.batch import Sample
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import CP, EP, GEMMA, LATENT, LINEAR, MAMBA, MODELS, PP, SP, TP, WINDOWS
from tests.ranks.pool import Ranks

# Layers 1, 2 and 4 have windows and a rotary base of their own; layer 3 has no rotary positions.
KINDS = [
    "model.rope={window_base: 1e3, skip_layers: [3]}",
    "model.attention_sinks=true",
    "model.attention_softcap=5",
    "model.logits_softcap=10",
    "model.init_std=0.3",  # sinks are drawn with this standard deviation
]
LAYOUTS = [
    (1, []),
    (2, SP),
    (4, ["parallel.cp=4"]),
    (4, ["parallel.pp=4"]),  # the middle stages get neither tokens nor a loss
    (2, [*CP, "train.recompute=full"]),
    (4, ["parallel.cp=4", *WINDOWS]),  # halos begin where the document begins
    (4, [*CP, *PP, *WINDOWS, "train.recompute=selective"]),
    (4, [*CP, *TP, *GEMMA, "train.recompute=selective"]),
    (4, ["parallel.cp=4", *WINDOWS, *KINDS]),
    (4, [*CP, *SP, *MODELS["gemma4"], *EP]),
    (4, ["parallel.cp=4", *LINEAR]),  # documents of 64 and 96 tokens count as long
    (4, ["parallel.cp=4", *LINEAR, "run.precision=bf16"]),  # the first document counts as short
    (4, [*CP, *PP, *LINEAR, "train.recompute=selective"]),
    (4, [*CP, *SP, *MAMBA]),
    (4, [*CP, *SP, *LATENT]),
    (4, ["parallel.cp=4", *LATENT, "run.precision=bf16", "train.recompute=full"]),
    (4, [*CP, *SP, *MODELS["routers"], *EP]),
]


def document(length: int, seed: int, first: int = 0, last: int = scenarios.VOCAB, supervised: bool = True) -> Sample:
    return answer(length, length * supervised, seed=seed, first=first, last=last)


@pytest.mark.parametrize("world_size,overrides", LAYOUTS, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_replacing_one_document_leaves_the_others_bitwise_unchanged(
    ranks: Ranks, world_size: int, overrides: list[str]
) -> None:
    a, b, c, other = document(50, 1), document(70, 2), document(90, 3), document(70, 4)
    results = ranks(world_size).run(scenarios.token_losses, overrides, [[a, b, c], [a, other, c]])
    before, after = (scenarios.in_pack_order(results, pack, 64 + 96 + 96) for pack in (0, 1))
    assert (before[:64] == after[:64]).all()
    assert (before[160:] == after[160:]).all()
    # the replaced document does change, so the test would see a leak
    assert (before[64:133] != after[64:133]).mean() > 0.9
