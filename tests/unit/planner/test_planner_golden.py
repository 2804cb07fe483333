"""The best proposal for 12 tasks, with the assumed constants.  Review every change of this table.

After a change of a prediction, the failed assertion prints the new table.  For each changed line, ask: is the new
layout really better, and is the new number nearer to the truth?
"""

import pytest

from sft.console import short_count
from sft.estimate.gpus import GIB
from sft.planner.reasons import named
from sft.planner.search import Search
from sft.planner.task import Proposal
from tests.unit.fixtures.tasks import task_of

K, M = 2**10, 2**20
# model, tokens of a pack, GPUs, their type, LoRA; a million tokens per step
CASES: list[tuple[str, int, int, str, bool]] = [
    ("Qwen/Qwen3-0.6B", 128 * K, 8, "a100-40", False),
    ("Qwen/Qwen3-8B", 64 * K, 8, "h100", False),
    ("Qwen/Qwen3-8B", 256 * K, 64, "h100", False),
    ("Qwen/Qwen3-8B", M, 64, "h200", False),
    ("meta-llama/Llama-3.1-8B-Instruct", 128 * K, 16, "a100-80", False),
    ("meta-llama/Llama-3.1-8B-Instruct", M, 32, "b200", True),
    ("Qwen/Qwen3-30B-A3B", 64 * K, 16, "h100", False),
    ("Qwen/Qwen3-30B-A3B", 256 * K, 128, "h100", False),
    ("Qwen/Qwen3-30B-A3B", 128 * K, 8, "h100", True),
    ("openai/gpt-oss-20b", 128 * K, 16, "h100", False),
    ("google/gemma-3-27b-it", 128 * K, 32, "mi300x", False),
    ("Qwen/Qwen3.6-27B", 256 * K, 64, "h200", False),
]
GOLDEN = """
Qwen3-0.6B 128K on 8 a100-40: tp 2, cp 4: 23 GiB, 49 s, 42%
Qwen3-8B 64K on 8 h100: tp 2, cp 4: 73 GiB, 28 s, 49%
Qwen3-8B 256K on 64 h100: tp 2, cp 8, dp 4, shard weights, mlp tile 8192: 36 GiB, 9.7 s, 47%
Qwen3-8B 1M on 64 h200: tp 2, cp 32, shard weights: 83 GiB, 34 s, 48%
Llama-3.1-8B-Instruct 128K on 16 a100-80: tp 2, cp 4, dp 2, shard weights, optimizer offloaded: 74 GiB, 68 s, 46%
Llama-3.1-8B-Instruct LoRA 1M on 32 b200: cp 32: 159 GiB, 27 s, 46%
Qwen3-30B-A3B 64K on 16 h100: cp 2, dp 8, shard weights, recompute selective, activations offloaded: 49 GiB, 15 s, 42%
Qwen3-30B-A3B 256K on 128 h100: tp 4, cp 8, dp 4, shard weights: 54 GiB, 6.1 s, 44%
Qwen3-30B-A3B LoRA 128K on 8 h100: cp 4, dp 2, recompute selective, activations offloaded: 66 GiB, 50 s, 45%
gpt-oss-20b 128K on 16 h100: cp 2, dp 8, shard weights, recompute selective, activations offloaded: 49 GiB, 10 s, 38%
gemma-3-27b-it 128K on 32 mi300x: tp 2, cp 8, dp 2, shard gradients: 151 GiB, 12 s, 43%
Qwen3.6-27B 256K on 64 h200: tp 2, cp 8, dp 4, shard weights, mlp tile 8192: 117 GiB, 12 s, 41%
"""


def line(model: str, length: int, gpus: str, is_lora: bool, best: Proposal) -> str:
    """Memory in whole GiB, and time with two digits: a change of the third digit needs no review."""
    task = f"{model.rpartition('/')[2]}{' LoRA' * is_lora} {short_count(length)} on {gpus}"
    time = best.time
    return f"{task}: {named(best)}: {best.memory.device / GIB:.0f} GiB, {time.step_s:.2g} s, {time.mfu:.0%}"


@pytest.mark.usefixtures("released_models")
def test_the_best_proposals() -> None:
    lines = []
    for model, length, num_gpus, gpu, is_lora in CASES:
        _, task = task_of(model, length, gpu=gpu, is_lora=is_lora)
        best = Search(task, num_gpus).best(1)[0]
        lines.append(line(model, length, f"{num_gpus} {gpu}", is_lora, best))
    table = "\n".join(lines)
    assert table == GOLDEN.strip(), f"the table is now:\n{table}"
