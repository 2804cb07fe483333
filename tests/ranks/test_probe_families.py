"""The probes pass on small models of every family and every kind of layer: windows, own rotary bases, no rotary
positions.

Packs hold three documents of 64 and 96 tokens.  Windows of 11 tokens are shorter than a document, and shorter or longer
than a chunk; windows of 60 tokens are longer than all chunks.
"""

from pathlib import Path
from typing import Any

import pytest

from sft.hf.families import FAMILIES
from tests.launching import HF_RECIPE
from tests.ranks.pool import Ranks
from tests.ranks.probing import prepare, probe
from tests.unit.fixtures import families, hf

LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": dict(sliding_window=11),  # windows in all layers
    "qwen2": dict(use_sliding_window=True, sliding_window=11, max_window_layers=1),
    "qwen3": dict(use_sliding_window=True, sliding_window=60, layer_types=LAYERS, num_hidden_layers=4),
    "exaone4": dict(sliding_window=11, layer_types=LAYERS, num_hidden_layers=4),  # full attention without rotation
    "olmo3": dict(num_hidden_layers=4, layer_types=LAYERS),  # windows of 11 with a rotary base of their own
    "gemma4_text": dict(num_hidden_layers=4, layer_types=LAYERS, **hf.GEMMA4_MIXTURE),
    "gpt_oss": dict(num_hidden_layers=4, layer_types=LAYERS),  # sinks in all layers, windows of 11 in two
}
QUICK = (
    "olmo3 windows",
    "gpt_oss windows",
    "gemma2",
    "glm4_moe",
    "deepseek_v3",
    "nemotron_h",
    "kimi_linear",
)  # test_probe.py has layers without rotary positions
CASES = [*FAMILIES, *(f"{name} windows" for name in WINDOWS)]
PROBES = {
    "leak": ["leak", "train.recompute=selective"],
    "parity": ["parity", "--against", "parallel.cp=1,parallel.tp=2,parallel.sequence_parallel=true"],
}


def marked(names: list[str], quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.grid) for name in names]


@pytest.mark.card("probes")
@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_the_probes_pass(ranks: Ranks, tmp_path: Path, case: str) -> None:
    name, _, windows = case.partition(" ")
    families.save(tmp_path / "source", name, **(WINDOWS[name] if windows else {}))
    recipe = prepare(tmp_path, HF_RECIPE)
    for words in PROBES.values():
        code, answer = probe(ranks(2), recipe, words)
        assert (code, answer["problems"]) == (0, []), answer
        assert str(tmp_path / "source") in answer["weights"]
