"""Loss on held-out data, through the same packed, context-parallel path as training."""

from collections.abc import Callable

from sft.data.loader import Loader
from sft.mcore.engine import Engine
from sft.tally import Totals


def evaluate(engine: Engine, loader: Loader, on_batch: Callable[[], None] = lambda: None) -> Totals:
    """Sums over every sample of `loader` exactly once, whatever the layout.  Collective.

    `on_batch` is called before each batch: all of them may take long, one should not.
    """
    totals = []
    for microbatches in loader.eval_batches():
        on_batch()
        totals.append(engine.evaluate(microbatches, sources=loader.sources))
    return sum(totals[1:], start=totals[0])
