"""Which long-context questions a run asks, by their predicted cost."""

import json
import re
from pathlib import Path

import pytest

from sft.config import Config
from sft.errors import ConfigError
from sft.estimate import forward
from sft.estimate.constants import constants_of
from sft.estimate.gpus import gpu
from sft.estimate.lengths import Lengths
from sft.estimate.step_time import step_time
from sft.layers.adapters import Trained
from sft.parallel.layout import Layout
from sft.recipe.long_in_run import InRun, asked_in_run
from sft.recipe.resolved import Recipe
from tests.builders import LLAMA_8B, QWEN3, of_hf, parsed

VOCAB = 128_256
# 8 billion parameters with packs of 32,768 tokens.
LLAMA = [f"model.{key}={value}" for key, value in LLAMA_8B.items()] + ["data.seq_length=32768", "train.recompute=full"]


def asked(recipe: Recipe, num_steps: int | None, world_size: int = 8, usable: float | None = None) -> InRun:
    layout = Layout.resolve(recipe.config, world_size)
    lengths = Lengths.all_of(recipe.config.data.seq_length)
    return asked_in_run(recipe, layout, VOCAB, lengths, num_steps, usable)


def llama(*overrides: str) -> Recipe:
    return parsed(*LLAMA, "parallel.cp=4", "train.global_batch_size=16", *overrides)


def lengths_of(found: InRun) -> tuple[int, ...]:
    return () if found.settings is None else found.settings.lengths


def test_a_longer_run_asks_longer_questions() -> None:
    """At most 2% of the run, so the share of the next length is above 2%."""
    short, long, none = (asked(llama(), steps) for steps in (1_000, 4_000, 10))
    assert lengths_of(short) < lengths_of(long) and lengths_of(long)[:2] == (8192, 16384) and not lengths_of(none)
    line, left_out = short.lines
    share = float(re.search(r"together ([\d.]+)% of the run$", line)[1])  # type: ignore[index]
    (more,) = re.findall(r"tokens they would take ([\d.]+)% of the run, more than 2%", left_out)
    assert 0 < share <= 2 < float(more)
    assert none.lines[0].startswith("not in this run: with 8,192 tokens they would take ")


def test_the_share_is_twice_the_time_of_the_questions_by_that_of_the_run() -> None:
    recipe = llama("data.long.lengths=[0.25]", "data.long.tasks=[needle]")
    layout, constants = Layout.resolve(recipe.config, 8), constants_of(gpu("h100"), None)
    step = step_time(recipe.config, layout, VOCAB, Lengths.all_of(32768), constants)
    time = forward.forward_time(
        recipe.config, layout.with_short_batches(), VOCAB, constants, Trained(), tokens=8192, num_packs=20
    )
    assert time.total_s == 10 * time.batch_s  # 20 questions on dp 2
    (line,) = asked(recipe, 500).lines
    share = 2 * time.total_s / (500 * step.step_s)
    assert "20 questions of 8,192 tokens" in line and f"together {share:.2%} of the run" in line


def test_a_forward_pass_takes_about_a_third_of_a_step_of_one_microbatch() -> None:
    """Backward takes about twice as long as forward."""
    recipe = llama("train.recompute=none", "train.global_batch_size=2")
    layout, constants = Layout.resolve(recipe.config, 8), constants_of(gpu("h100"), None)
    step = step_time(recipe.config, layout, VOCAB, Lengths.all_of(32768), constants)
    time = forward.forward_time(recipe.config, layout, VOCAB, constants, Trained(), tokens=32768, num_packs=2)
    assert time.total_s == time.batch_s and 0.25 < time.batch_s / step.step_s < 0.45


def memory(config: Config, layout: Layout, tokens: int) -> float:
    return forward.forward_memory(config, layout, VOCAB, Trained(), tokens)


def test_questions_need_no_more_memory_than_a_step() -> None:
    """A layer of the forward pass needs more with the length, and saved layers make up for it."""
    recipe, steps = llama("model.num_layers=8"), 1_000_000
    layout = Layout.resolve(recipe.config, 8)
    found = asked(recipe, steps)
    assert lengths_of(found) == (8192, 16384, 32768, 65536)
    assert re.search(r"none of more tokens: 131,072 tokens would need [\d.]+ GiB, and a training step", found.lines[1])
    assert memory(recipe.config, layout, 65536) < memory(recipe.config, layout, 131072)


def test_true_asks_all_lengths_if_they_fit_the_gpu() -> None:
    recipe = llama("data.long.in_run=true", "model.num_layers=8")
    assert len(lengths_of(asked(recipe, 10))) == 5 == len(lengths_of(asked(recipe, 10, usable=200 * 2**30)))
    expected = (
        r"data.long.in_run = true asks questions of 131,072 tokens in the run.  A rank then needs [\d.]+ GiB "
        r"\(predicted, with gradients and optimizer states\), and can use [\d.]+ GiB.  Ask shorter ones with "
        r"data.long.lengths=\[0.25, 0.5, 1, 2\], or use data.long.in_run=auto, which leaves out what does not fit.$"
    )
    with pytest.raises(ConfigError, match=expected):
        asked(recipe, 10, usable=22 * 2**30)


def test_when_auto_asks_none() -> None:
    for overrides in (["run.device=cpu"], ["run.precision=fp32"]):
        found = asked(llama(*overrides), 10**6)
        assert found.settings is None and "without a prediction of its time (fp32, or a CPU)" in found.lines[0]
    found = asked(llama(), None)
    assert found.settings is None and "unknown before the data are read" in found.lines[0]
    assert "`sft eval --long` asks them" in asked(llama("data.long.in_run=false"), 10**6).lines[0]
    grace = asked(llama("run.grace_s=1"), 10**6)
    warned = asked(llama("run.grace_s=1", "data.long.in_run=true"), 10**6).lines[1]
    assert re.match(
        r"WARNING: a pass of 131,072 tokens takes 2.7 s \(predicted\), longer than run.grace_s = 1$", warned
    )
    assert 131072 not in lengths_of(grace) and "longer than run.grace_s = 1" in grace.lines[-1]


def test_too_few_positions(recipe_folder: Path) -> None:
    """auto asks none, and true is refused, with the same reason."""
    (recipe_folder / "m").mkdir()
    (recipe_folder / "m" / "config.json").write_text(json.dumps(QWEN3))
    few = ["data.seq_length=512", "data.long.lengths=[2.0]", "run.precision=bf16"]
    found = asked(of_hf("m", *few), 10, 1)
    assert found.settings is None and "and model.hf = m has 512 positions" in found.lines[0]
    with pytest.raises(ConfigError, match="and model.hf = m has 512 positions"):
        asked(of_hf("m", *few, "data.long.in_run=true"), 10, 1)
