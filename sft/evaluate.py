"""Loss on held-out data, through the same packed, context-parallel path as training."""

from sft.data.loader import Loader
from sft.mcore.engine import Engine
from sft.tally import Totals


def evaluate(engine: Engine, loader: Loader) -> Totals:
    """Sums over every sample of `loader` exactly once, whatever the layout.  Collective."""
    totals = [engine.evaluate(microbatches, sources=loader.sources) for microbatches in loader.eval_batches()]
    return sum(totals[1:], start=totals[0])
