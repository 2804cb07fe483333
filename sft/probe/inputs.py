"""Compares the microbatches that the ranks receive with the samples that they were made of.

The sample is the reference.  A microbatch has the document and the position of each token, and the sample says which
token, label and mask belong there.  Neither the pack nor the split over context-parallel ranks is computed again.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sft.batch import Microbatch, Sample
from sft.parallel.collectives import all_gather_objects
from sft.parallel.messages import message
from sft.parallel.position import Position

NameOf = Callable[[int], str]  # the name of a sample's row, by the sample's id


@message
@dataclass(frozen=True, kw_only=True)
class _Part:
    """A description of one microbatch on one rank, which is sent to all ranks."""

    location: tuple[int, int, int]  # dp rank, microbatch, cp rank
    cp_size: int  # number of ranks that share the pack
    digest: str  # a hash of all tensors
    runs: list[tuple[int, int, int]]  # see `runs`
    sizes: list[int]  # number of tokens of each document of the pack, with padding
    problems: list[str]


def problems_of(
    microbatches: Sequence[Microbatch], samples: Sequence[Sequence[Sample]], position: Position, name_of: NameOf
) -> list[str]:
    """The faults in the microbatches of all ranks, the same list on every rank.  Collective.

    samples: the samples of each microbatch on this rank, from the prepared data
    """

    def describe() -> list[_Part]:
        return [
            _Part(
                location=(position.dp_rank, index, position.cp_rank),
                cp_size=mb.cp_size,
                digest=_digest(mb),
                runs=runs(mb),
                sizes=np.diff(mb.cu_seqlens.numpy()).tolist(),
                problems=list(_local_problems(mb, of_pack, name_of)),
            )
            for index, (mb, of_pack) in enumerate(zip(microbatches, samples, strict=True))
        ]

    parts = [part for of_rank in all_gather_objects(describe, position.control) for part in of_rank]
    local: dict[str, None] = {}  # in order, and once for all ranks that hold the same part
    for part in parts:
        dp_rank, index, cp_rank = part.location
        for problem in part.problems:
            local[f"dp rank {dp_rank}, microbatch {index + 1}, cp rank {cp_rank}: {problem}"] = None
    return [*local, *_disagreements(parts)]


def runs(mb: Microbatch) -> list[tuple[int, int, int]]:
    """(document, first, end) of each run of consecutive tokens, which are tokens `first` to `end - 1` of the document.

    Two blocks of a document of 64 tokens, which one rank holds with cp 2 -> [(0, 0, 16), (0, 48, 64)]
    """
    documents, positions = mb.documents[0].numpy(), in_documents(mb)
    starts = np.flatnonzero((np.diff(documents, prepend=-1) != 0) | (np.diff(positions, prepend=-1) != 1))
    stops = [*starts[1:], len(positions)]
    return [(int(documents[a]), int(positions[a]), int(positions[b - 1]) + 1) for a, b in zip(starts, stops)]


def in_documents(mb: Microbatch) -> np.ndarray:
    """int64 [t]: the position of each token in its document; 0 for the first token, also in a branch."""
    positions = mb.position_ids[0].numpy()
    return positions if mb.branches is None else positions - mb.branches.depths[mb.documents[0].numpy()]


def _local_problems(mb: Microbatch, samples: Sequence[Sample], name_of: NameOf) -> Iterator[str]:
    """The faults of one microbatch on one rank, one line for each kind."""
    documents, positions, labels = mb.documents[0].numpy(), in_documents(mb), mb.labels[0].numpy()
    tokens, supervised = mb.tokens[0].numpy(), mb.loss_mask[0].numpy()
    sizes = np.diff(mb.cu_seqlens.numpy())[documents]  # [t]: the size of each token's document, with padding
    of_samples = [[len(s.tokens)] if s.tree is None else np.diff(s.tree.starts).tolist() for s in samples]
    real_lengths = [length for of_sample in of_samples for length in of_sample]
    lengths = np.array(real_lengths + [0] * (len(mb.lengths) - len(real_lengths)))
    first_tokens = np.concatenate([[0], np.cumsum(lengths)])
    starts, lengths = first_tokens[documents], lengths[documents]
    all_tokens = np.concatenate([*(sample.tokens for sample in samples), [-1, -1]])
    all_masks = np.concatenate([*(sample.weights > 0 for sample in samples), [False, False]])
    following = _following(first_tokens, all_masks, mb)
    inside = (positions >= 0) & (positions < sizes)
    real = inside & (positions < lengths)
    own = np.where(real, starts + positions, -1)
    has_next = inside & (following[own] >= 0)
    after = np.where(has_next, following[own], -1)
    faults = {
        "position_ids are outside of their document, as if positions did not start at 0": ~inside,
        "tokens are not those of the sample": real & (tokens != all_tokens[own]),
        "labels are not the next token of the same document": has_next & (labels != all_tokens[after]),
        "a document's last token, or padding, is supervised": inside & ~has_next & supervised,
        "the loss mask is not that of the sample": has_next & (supervised != all_masks[after]),
    }
    for fault, where in faults.items():
        if where.any():
            first = int(where.argmax())
            document = int(documents[first])
            sample = mb.samples_of_documents[document]
            name = name_of(samples[sample].sample_id) if sample < len(samples) else "filler"
            yield (
                f"{fault}: {where.sum():,} tokens, first in document {document} ({name}): position_id "
                f"{positions[first]} of {sizes[first]}"
            )


def _following(first_tokens: np.ndarray, masks: np.ndarray, mb: Microbatch) -> np.ndarray:
    """For each token of all samples, the index of the token that it predicts, among the same tokens; -1: no token.

    It is the next token of the same document.  If that token is not supervised, and the first token of a branch that
    begins there is, it is the first token of the branch.
    """
    following = np.arange(1, len(masks) + 1)
    following[first_tokens[1:] - 1] = -1
    following[-2:] = -1
    branches = mb.branches
    if branches is None:
        return following
    for document in np.flatnonzero(branches.parents >= 0).tolist():
        before = first_tokens[branches.parents[document]] + branches.forks[document] - 1
        if masks[first_tokens[document]] and not masks[following[before]]:
            following[before] = first_tokens[document]
    return following


def _disagreements(parts: Sequence[_Part]) -> Iterator[str]:
    """Yield faults that only a comparison of all ranks shows: each token of a pack must be on exactly one cp rank."""
    by_pack: dict[tuple[int, int, range], dict[int, _Part]] = {}
    for part in parts:
        dp_rank, index, cp_rank = part.location
        first = cp_rank // part.cp_size * part.cp_size
        holders = by_pack.setdefault((dp_rank, index, range(first, first + part.cp_size)), {})
        if holders.setdefault(cp_rank, part).digest != part.digest:
            yield f"dp rank {dp_rank}, microbatch {index + 1}: two ranks with cp rank {cp_rank} hold different tensors"
    for (dp_rank, index, cp_ranks), holders in sorted(by_pack.items(), key=lambda pack: (*pack[0][:2], pack[0][2][0])):
        where = f"dp rank {dp_rank}, microbatch {index + 1}"
        if len(by_pack) > len({key[:2] for key in by_pack}):  # dynamic CP
            where += f", cp ranks {cp_ranks[0]} to {cp_ranks[-1]}"
        sizes = {tuple(part.sizes) for part in holders.values()}
        if len(sizes) > 1:
            yield f"{where}: the cp ranks have different cu_seqlens"
            continue
        expected = dict(enumerate(sizes.pop()))
        reached = dict.fromkeys(expected, 0)
        for document, start, stop in sorted(run for part in holders.values() for run in part.runs):
            if start != reached[document]:
                times = "on two cp ranks" if start < reached[document] else "on no cp rank"
                low, high = sorted((start, reached[document]))
                yield f"{where}, document {document}: positions {low} to {high - 1} are {times}"
            reached[document] = max(stop, reached[document])
        for document, size in expected.items():
            if reached[document] < size:
                yield f"{where}, document {document}: positions {reached[document]} to {size - 1} are on no cp rank"


def _digest(mb: Microbatch) -> str:
    digest = hashlib.sha256()
    for tensor in (mb.tokens, mb.labels, mb.loss_weights, mb.position_ids, mb.documents, mb.cu_seqlens):
        digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return digest.hexdigest()
