"""Draws the tree of a sample as text: a line for each document, indented by the document's depth.

    ----##---##---##      1,240 tokens
        ####              420 tokens
             ####         410 tokens

Decides the scale, so that the longest text takes at most 60 characters, and how many documents are shown.
"""

from collections.abc import Iterator

import numpy as np

from sft.batch import Sample

_WIDTH, _MOST = 60, 20


def picture(sample: Sample) -> Iterator[str]:
    """Yields the lines of a sample's tree; none if it has no tree.

    A # stands for tokens of which some are supervised, a - for tokens of which none is.
    """
    if sample.tree is None:
        return
    starts, depths = sample.tree.starts, sample.tree.branches.depths
    scale = -(-int((depths + np.diff(starts)).max()) // _WIDTH)
    for document, depth in enumerate(depths[:_MOST].tolist()):
        start, stop = starts[document : document + 2].tolist()
        cells = (depth + np.arange(stop - start)) // scale - depth // scale
        supervised = np.bincount(cells, weights=sample.weights[start:stop] > 0)
        bar = " " * (depth // scale) + "".join("#" if count else "-" for count in supervised)
        yield f"{bar:{_WIDTH}}  {stop - start:,} tokens"
    if len(depths) > _MOST:
        yield f"... and {len(depths) - _MOST:,} more documents"
