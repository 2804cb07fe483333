"""With a vocabulary of real size, the gradient norm equals that of float64 on every layout, so all layouts have one
curve."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from sft.mcore.engine import Engine
from sft.mcore.optimizer import build
from tests.ranks import scenarios
from tests.ranks.layouts import CP, PP, SHARDED, SP
from tests.ranks.pool import Ranks

VOCAB = 151_936  # vocabulary size of Qwen3
NUM_STEPS = 2
LENGTHS = [350, 250, 450, 150, 500, 32, 400, 175]  # tokens of each sample; two packs of up to 512 tokens per step

# Norm of the same gradients in float64; the measured difference is 1e-15.  torch's fp32 norm differs by 1e-4 here.
EXACT = 1e-12
# Tolerance for gradients whose fp32 sums have another order.
NORM_TOLERANCE = 1e-6
LOSS_TOLERANCE = 1e-8

RECIPE = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.tie_embeddings=true",
    "data.seq_length=512",
    "loss.chunk_size=128",
    "train.num_steps=4",
    # a rate of real fine-tuning; in the first steps, Adam moves a weight by lr even if its gradient is mere rounding
    "optim.lr=1e-4",
    "train.global_batch_size=2",
    "optim.clip_grad=0.05",  # far below every gradient norm here, so every step is clipped
]
# Each tp rank holds a part of these parameters, and the whole of all others.
SPLIT = ("word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight")
SPLIT += ("linear_fc1.weight", "linear_fc2.weight")


class TextLikeCorpus(scenarios.SkewedCorpus):
    """Tokens with the frequencies of words in text: the share of the i-th most frequent token is proportional to 1 / (i
    + 2.7) (Mandelbrot)."""

    def __init__(self) -> None:
        super().__init__(LENGTHS, VOCAB)
        share = 1 / (np.arange(VOCAB) + 2.7)
        rng = np.random.default_rng(5)
        self._tokens = [rng.choice(VOCAB, size=n, p=share / share.sum()).astype(np.int32) for n in LENGTHS]


def clipped(overrides: Sequence[str]) -> dict[str, Any]:
    """Steps from random weights; and for each step, in float64, the sum of squares of each parameter's gradient."""
    with scenarios.running([*RECIPE, *overrides], VOCAB) as engine:
        loader, squares = scenarios.loader_of(engine, TextLikeCorpus()), []
        update = build.update

        def looked_at(*given: Any) -> float:
            squares.append(squares_of(engine))
            return update(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "update", looked_at)
            results = [engine.train_step(loader.microbatches(step)) for step in range(NUM_STEPS)]
        return {
            "loss": [r.objective / r.num_tokens for r in results],
            "grad_norm": [r.grad_norm for r in results],
            "squares": squares,
        }


def squares_of(engine: Engine) -> dict[tuple[str, str], float]:
    """(part of the model, name) -> sum of squares.  Ranks that hold the same parameter have the same key."""
    place, found = engine.groups, {}
    for chunk in engine.chunks:
        for buffer in (
            [*chunk.buffers, *chunk.expert_parallel_buffers] if engine.config.parallel.distributed_optimizer else []
        ):
            gather(buffer)
        for name, param in chunk.module.named_parameters():
            part = f"pp{place.pp_rank}"
            if name.endswith(SPLIT):
                part += f" tp{place.tp_rank}"
            if name == "output_layer.weight":  # the last stage's copy of the embedding, which has the same gradient
                part = f"tied tp{place.tp_rank}"
            found[part, name] = float(param.main_grad.double().square().sum())
    return found


def gather(buffer: Any) -> None:
    """Each rank has the sum over all ranks of its own share of the gradients; after the gather every rank has all of
    it."""
    group = buffer.data_parallel_group
    for bucket in buffer.buckets:
        mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def norms(results: Sequence[dict[str, Any]]) -> list[float]:
    """The norm of each step, from the squares of all ranks, which count each part of each parameter once."""
    found = []
    for step in range(NUM_STEPS):
        squares: dict[tuple[str, str], float] = {}
        for result in results:
            for key, square in result["squares"][step].items():
                assert squares.setdefault(key, square) == square, key
        for (part, name), square in squares.items():
            if part.startswith("tied"):
                embedding = squares["pp0 " + part.removeprefix("tied "), "embedding.word_embeddings.weight"]
                assert square == embedding
        found.append(sum(square for (part, _), square in squares.items() if not part.startswith("tied")) ** 0.5)
    return found


def check(results: Sequence[dict[str, Any]], reference: dict[str, Any]) -> None:
    for result in results:
        np.testing.assert_allclose(result["grad_norm"], norms(results), rtol=EXACT)
        np.testing.assert_allclose(result["grad_norm"], reference["grad_norm"], rtol=NORM_TOLERANCE)
        np.testing.assert_allclose(result["loss"], reference["loss"], rtol=LOSS_TOLERANCE)
    assert min(reference["grad_norm"]) > 0.1


@pytest.fixture(scope="module")
def dense(ranks: Ranks) -> dict[str, Any]:
    (found,) = ranks(1).run(clipped, [])
    return found


def test_on_one_rank(dense: dict[str, Any]) -> None:
    check([dense], dense)


@pytest.mark.parametrize("layout", [CP, [*SP, *SHARDED], [*PP, *SHARDED]], ids=" ".join)
def test_on_two_ranks(ranks: Ranks, dense: dict[str, Any], layout: list[str]) -> None:
    check(ranks(2).run(clipped, layout), dense)
