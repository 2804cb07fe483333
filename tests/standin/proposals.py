"""Builds the planner's best proposals on the stand-in, and compares the peak of a step with the prediction.

    python -m tests.standin.proposals          the 12 cases of tests/unit/planner/test_planner_golden.py, as JSON lines
    python -m tests.standin.proposals 0 3      cases by number
    python -m tests.standin.proposals gpt_oss_120b_128k_lora_1n      a planned recipe for one node of 8 GPUs

Each case builds the whole layout of the proposal, with all its GPUs, as seen by one rank of the stage that needs most
(one_rank.py).  A step has fewer packs than the proposal: one for each rank of dp, and 2 x pp with a pipeline.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from sft.config import Config
from sft.parallel.layout import Layout
from tests.standin import build, categories

BYTES = str(300 * 10**9)  # of the device: more than any GPU of the 12 cases has


def of_case(number: int) -> dict[str, Any]:
    from sft.planner.search import Search
    from tests.unit.fixtures.tasks import task_of
    from tests.unit.planner.test_planner_golden import CASES, line

    model, length, num_gpus, gpu, is_lora = CASES[number]
    _, task = task_of(model, length, gpu=gpu, is_lora=is_lora)
    best = Search(task, num_gpus).best(1)[0]
    name = line(model, length, f"{num_gpus} {gpu}", is_lora, best)
    return {"case": number, **_built(best.config, num_gpus, task.vocab_size, name)}


def of_recipe(name: str) -> dict[str, Any]:
    from sft.recipe.load import load_recipe

    config = load_recipe(str(build.ROOT / "recipes/planned" / f"{name}.yaml")).config
    assert config.model.vocab_size is not None
    return {"case": name, **_built(config, 8, config.model.vocab_size, name)}


def _built(config: Config, num_gpus: int, vocab_size: int, name: str) -> dict[str, Any]:
    layout = Layout.resolve(config, num_gpus)
    packs = layout.dp * (2 * layout.pp if layout.pp > 1 else 1)
    sections = {
        "train": {"global_batch_size": packs},
        "attention": {"backend": "portable"},
        "run": {"device": "cuda"},
    }
    smaller = config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )
    assert Layout.resolve(smaller, num_gpus).dp == layout.dp
    lengths = np.full(4 * packs, config.data.seq_length)
    return categories.in_this_process(smaller, num_gpus, vocab_size, lengths, name)


def main(words: list[str]) -> int:
    if os.environ.get("STANDIN_BYTES") != BYTES:
        os.environ.update({**build.environment(build.library()), "STANDIN_BYTES": BYTES})
        os.execv(sys.executable, [sys.executable, "-m", "tests.standin.proposals", *words])
    from tests.unit.fixtures import hf

    cases, is_good = words or [str(number) for number in range(12)], True
    with tempfile.TemporaryDirectory() as folder:
        for name, file in hf.ON_HUB.items():
            Path(folder, name).mkdir(parents=True)
            Path(folder, name, "config.json").write_text(json.dumps(hf.released(file)))
        os.chdir(folder)
        for case in cases:
            try:
                print(json.dumps(of_case(int(case)) if case.isdecimal() else of_recipe(case)), flush=True)
            except Exception:
                print(f"failed: {case}\n{traceback.format_exc()}", flush=True)
                is_good = False
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
