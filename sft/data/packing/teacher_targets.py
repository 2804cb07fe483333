"""Places the distributions of a teacher at the tokens of a pack that one context-parallel rank holds.

Decides nothing: the token that predicts a label (`tree_packs.predicting_rows`) gets the label's distribution.  All
labels after one token, of which a tree may have several, have the same distribution.
"""

from collections.abc import Sequence

import numpy as np

from sft.batch import Sample, TeacherTargets
from sft.data.packing.tree_packs import predicting_rows, tree_of


def local_teacher(samples: Sequence[Sample], cu_seqlens: np.ndarray, indices: np.ndarray) -> TeacherTargets:
    """The distributions at the tokens `indices`, rising, of a pack of these samples, at least one of which has some.

    cu_seqlens: int32 [num_documents + 1], padded boundaries of the pack
    """
    import torch

    width = max(sample.teacher["ids"].shape[1] for sample in samples if sample.teacher is not None)
    ids = np.full((len(indices), width), -1, dtype=np.int32)
    logprobs = np.zeros((len(indices), width), dtype=np.float32)
    first = 0
    for sample in samples:
        tree = tree_of(sample)
        starts = cu_seqlens[first : first + len(tree.branches)]
        first += len(starts)
        if sample.teacher is None:
            continue
        rows = predicting_rows(tree, starts)[sample.labels]
        local = np.minimum(np.searchsorted(indices, rows), len(indices) - 1)
        is_local = indices[local] == rows
        ids[local[is_local]] = sample.teacher["ids"][is_local]
        logprobs[local[is_local]] = sample.teacher["logprobs"][is_local]
    return TeacherTargets(ids=torch.from_numpy(ids), logprobs=torch.from_numpy(logprobs))
