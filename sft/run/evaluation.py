"""Loss on held-out data, through the same packed, context-parallel path as training."""

from collections.abc import Callable

from sft.data.loader import Loader
from sft.mcore.engine import Engine
from sft.metrics.accumulator import Totals


def evaluate(engine: Engine, loader: Loader, goes_on: Callable[[], bool] = lambda: True) -> Totals | None:
    """Sums over every sample of `loader` exactly once, whatever the layout.  Collective.

    `goes_on` is asked before each batch, and answers the same on all ranks: a pass may take long, and somebody may ask
    the run to stop.  None where it did.
    """
    totals = []
    for microbatches in loader.eval_batches():
        if not goes_on():
            return None
        totals.append(engine.evaluate(microbatches, sources=loader.sources))
    return sum(totals[1:], start=totals[0])
