"""Real chats, short and long together, through the whole path: same falling curve and exact counts on two layouts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.console import QUIET
from sft.data.cache.prepare import prepare
from sft.data.chat.tokenizer import load_tokenizer
from tests.ranks import scenarios
from tests.ranks.pool import RankPool

DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = [DATA / "gsm8k_chat.jsonl", DATA / "kv_retrieval_chat.jsonl"]
STEPS = 20
LOSS_TOLERANCE = 1e-5  # 20 Adam steps let fp32 rounding of another order of sums grow
RECIPE = [
    f"data.train=[{', '.join(map(str, FILES))}]",
    "data.seq_length=13312",
    "model.num_layers=1",
    "model.num_attention_heads=2",
    "model.num_query_groups=2",
    f"train.num_steps={STEPS}",
    "train.global_batch_size=1",
    "optim.lr=3e-3",
    "optim.schedule=constant",
    "parallel.sequence_parallel=true",
    "parallel.distributed_optimizer=true",
]
pytestmark = pytest.mark.skipif(not all(f.exists() for f in FILES), reason="the shared chat data are not here")


def train(overrides: list[str], cache: str) -> dict[str, Any]:
    with scenarios.running(RECIPE + overrides, vocab=259) as engine:
        data = engine.config.data
        corpus = prepare(data.train, data, load_tokenizer(data), Path(cache), QUIET)
        loader = scenarios.loader_of(engine, corpus)
        results = [engine.train_step(loader.microbatches(step)) for step in range(STEPS)]
        return {
            "loss": [r.objective / r.num_tokens for r in results],
            "num_tokens": [r.num_tokens for r in results],
            "num_documents": [r.num_documents for r in results],
            "samples": [[i for pack in loader.plans.global_batch(step) for i in pack] for step in range(STEPS)],
        }


def supervised_by_hand() -> list[int]:
    """Bytes of every assistant message and one end-of-turn token for each, straight from the files."""
    counts = []
    for file in FILES:
        for line in file.read_text(encoding="utf-8").splitlines():
            said = [m["content"] for m in json.loads(line)["messages"] if m["role"] == "assistant"]
            counts.append(sum(len(content.encode()) + 1 for content in said))
    return counts


@pytest.mark.grid  # the two layouts are in the covering set; the data are too large for every change
@pytest.mark.timeout(600)
def test_real_chats_train_alike_on_both_layouts(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    by_hand = supervised_by_hand()
    two = ranks(2).run(train, ["parallel.cp=2"], str(tmp_path))
    four = ranks(4).run(train, ["parallel.tp=2", "parallel.cp=2"], str(tmp_path), timeout_s=500)
    reference = two[0]
    for result in [*two, *four]:
        assert result["samples"] == reference["samples"]
        assert result["num_tokens"] == [sum(by_hand[i] for i in ids) for ids in reference["samples"]]
        assert result["num_documents"] == [len(ids) for ids in reference["samples"]]
        np.testing.assert_allclose(result["loss"], reference["loss"], rtol=LOSS_TOLERANCE)
    assert reference["loss"][0] > 5.4  # ln 259 = 5.56: nothing is known yet
    assert np.mean(reference["loss"][-3:]) < 4.2
    long = [i for ids in reference["samples"] for i in ids if i >= 2000]
    short = [i for ids in reference["samples"] for i in ids if i < 2000]
    assert long and short
