"""Random trees of documents, and attention to their texts computed one text after the other: for tests of kernels."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sft.parallel.branches import Branches


def random_tree(seed: int, multiple: int, longest: int = 40, count: int = 12) -> tuple[np.ndarray, Branches]:
    """Padded boundaries and parents of documents up to 3 deep, in the order of a pack, with plain documents between.

    Each third document has several branches at one fork.  Half of the lengths of documents are padded.
    """
    generator = np.random.default_rng(seed)
    lengths, parents, forks = list[int](), list[int](), list[int]()

    def add(parent: int, fork: int, depth: int) -> None:
        number, length = len(lengths), int(generator.integers(1, longest + 1))
        lengths.append(length), parents.append(parent), forks.append(fork)
        found = [] if depth == 3 else sorted(generator.integers(1, length + 1, size=generator.integers(0, 4)).tolist())
        for place in found if number % 3 else found[:1] * len(found):
            if len(lengths) < count:
                add(number, place, depth + 1)

    while len(lengths) < count:
        add(-1, 0, 0)
    padded = -(-np.array(lengths) // multiple) * multiple
    return np.concatenate([[0], np.cumsum(padded)]).astype(np.int32), Branches.of(parents, forks)


def rows_before(cu_seqlens: np.ndarray, branches: Branches, document: int) -> list[int]:
    """The rows of the pack before a document's first token in its texts, by a walk from the document to its root."""
    parent, fork = int(branches.parents[document]), int(branches.forks[document])
    if parent < 0:
        return []
    start = int(cu_seqlens[parent])
    return [*rows_before(cu_seqlens, branches, parent), *range(start, start + fork)]


def text_by_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: np.ndarray,
    branches: Branches,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [t, heads, d], key and value [t, key heads, d], sinks [heads] -> [t, heads, d].

    Each document attends to the tokens of its text, without the other documents.
    """
    outs = []
    for rows, own in _texts(cu_seqlens, branches):
        q, k, v = query[rows[-own:]], *(
            x[rows].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        distance = torch.arange(len(rows))[-own:, None] - torch.arange(len(rows))
        scores = scores.masked_fill((distance < 0) | (distance >= (window or len(rows))), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, own, 1)], dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(rows)], v))
    return torch.cat(outs)


def _texts(cu_seqlens: np.ndarray, branches: Branches) -> Iterator[tuple[list[int], int]]:
    """For each document, the rows of its text in order, and how many of them are its own."""
    for document, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        yield [*rows_before(cu_seqlens, branches, document), *range(start, stop)], stop - start
