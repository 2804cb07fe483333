"""Measures the error of optim.grad_dtype = bf16: curves of a small model in bf16 on four ranks over gloo.

    python -m tests.ranks.bf16_curves 200

Prints differences from a run with fp32 gradients on dp 2 x cp 2: of the run with bf16 gradients, and of a run with fp32
gradients on cp 4, which rounds bf16 activations in another order.  The same 20 packs repeat, two in a step.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.ranks import scenarios
from tests.ranks.layouts import SHARDED
from tests.ranks.pool import RankPool

RECIPE = [
    *("model.hidden_size=128", "model.ffn_hidden_size=256", "model.tie_embeddings=true", "run.precision=bf16"),
    *("train.global_batch_size=2", "optim.schedule=cosine", "optim.warmup_steps=10", *SHARDED),
]
WAYS = {
    "fp32": ["parallel.cp=2"],
    "bf16": ["parallel.cp=2", "optim.grad_dtype=bf16"],
    "fp32, cp 4": ["parallel.cp=4"],
}
LAST = 20  # steps of a mean


def curve(overrides: Sequence[str], num_steps: int) -> dict[str, Any]:
    """The losses and gradient norms of the run, and those of its first step."""
    return scenarios.train([*RECIPE, f"train.num_steps={num_steps}", *overrides], range(num_steps))


def main(num_steps: int) -> None:
    pool = RankPool(4)
    try:
        curves = {name: pool.run(curve, overrides, num_steps)[0] for name, overrides in WAYS.items()}
    finally:
        pool.close()
    base = curves.pop("fp32")
    print(f"fp32: loss {base['loss'][0]:.4f} to {np.mean(base['loss'][-LAST:]):.5f}")
    for name, found in curves.items():
        losses, norms = (np.divide(found[key], base[key]) - 1 for key in ("loss", "grad_norm"))
        last = np.mean(found["loss"][-LAST:]) / np.mean(base["loss"][-LAST:]) - 1
        print(
            f"{name}: first norm {norms[0]:+.1e}, largest difference of a loss {np.abs(losses).max():.1e} and of a "
            f"norm {np.abs(norms).max():.1e}, mean of the last {LAST} losses {last:+.1e}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
