"""Draws four pictures of context parallelism for docs/pictures; the code of sft decides which rank holds which token.

    context-parallel.svg   attention work of four ranks, contiguous and zigzag
    zigzag.svg             two packed documents and the parts of two ranks
    halo.svg               keys that ranks receive in a layer with a sliding window
    states.svg             states of linear attention, which pass from fragment to fragment

`python -m tools.pages` writes them.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from sft.parallel.context_parallel import Chunk, local_chunks, local_indices
from sft.parallel.halo import Halo

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")  # one for each rank
GREY, INK = "#e9e9e9", "#333333"
CELL, LEFT = 24, 84


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">'
    )
    marker = (
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        f'<path d="M0 0L6 3L0 6z" fill="{INK}"/></marker></defs>'
    )
    return "\n".join([opening, marker, '<rect width="100%" height="100%" rx="6" fill="white"/>', *parts, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{weight}>{words}</text>'


def cell(x: float, y: float, label: str, colour: str, *, is_held: bool = True) -> Iterator[str]:
    """The square of a token.  is_held: the square is filled; otherwise only its border has the colour"""
    fill, ink = (colour, "white") if is_held else ("white", colour)
    border = "white" if is_held else colour
    size = f'width="{CELL - 2}" height="{CELL - 2}"'
    yield f'<rect x="{x + 1:g}" y="{y + 1:g}" {size} fill="{fill}" stroke="{border}" stroke-width="1.5"/>'
    yield text(x + CELL / 2, y + 16, label, anchor="middle", colour=ink)


def row(y: float, name: str) -> str:
    return text(LEFT - 10, y + 16, name, anchor="end", bold=True)


def parts_of(cu_seqlens: Sequence[int], cp: int) -> list[tuple[Chunk, ...]]:
    return [local_chunks(np.array(cu_seqlens), cp, rank) for rank in range(cp)]


# --- attention work -----------------------------------------------------------------------------------------------


def attention_work() -> str:
    """The attention work of contiguous and of zigzag parts.  A row is a chunk of queries, as wide as their keys."""
    cp = 4
    chunks = 2 * cp
    zigzag = {chunk.position: rank for rank, held in enumerate(parts_of([0, chunks], cp)) for chunk in held}
    contiguous = {position: position // 2 for position in range(chunks)}
    panels = (("contiguous parts", contiguous), ("zigzag", zigzag))
    drawn = [line for i, (title, ranks) in enumerate(panels) for line in _work_panel(20 + 330 * i, title, ranks)]
    return svg(660, 290, drawn)


def _work_panel(left: int, title: str, ranks: dict[int, int]) -> Iterator[str]:
    """The drawing of one assignment.  ranks: chunk -> the rank that has it

    Queries of a chunk attend to all earlier chunks, and on average to half of their own chunk.
    """
    yield text(left, 24, title, bold=True)
    yield text(left, 44, "a row: a chunk of queries, as wide as its keys")
    for chunk, rank in sorted(ranks.items()):
        y, colour = 58 + CELL * chunk, COLOURS[rank]
        width = CELL * chunk
        yield f'<path d="M{left} {y}h{width}l{CELL} {CELL}h{-width - CELL}z" fill="{colour}" stroke="white"/>'
        yield text(left + 8.4 * CELL, y + 16, f"rank {rank}", colour=colour, bold=True)
    work = {rank: sum(chunk + 0.5 for chunk in ranks if ranks[chunk] == rank) for rank in sorted(set(ranks.values()))}
    shares = ", ".join(f"{100 * of_rank / sum(work.values()):.0f}%" for of_rank in work.values())
    yield text(left, 58 + CELL * len(ranks) + 22, f"work of ranks 0 to {len(work) - 1}: {shares}")


# --- two packed documents -----------------------------------------------------------------------------------------


def zigzag() -> str:
    """The tokens that each rank holds, as SVG, for the pack of docs/concepts/life-of-a-batch.md.

    The pack has documents of 16 and 8 tokens, at cp 2.
    """
    cu_seqlens, cp = np.array([0, 16, 24]), 2
    rank_of = {int(i): rank for rank in range(cp) for i in local_indices(cu_seqlens, cp, rank)}
    parts = [row(40, "pack"), *_documents(cu_seqlens, cp)]
    for position, rank in sorted(rank_of.items()):
        parts += cell(LEFT + CELL * position, 40, str(position), COLOURS[rank])
    for rank in range(cp):
        y, held = 84 + 34 * rank, local_indices(cu_seqlens, cp, rank).tolist()
        parts.append(row(y, f"rank {rank}"))
        for offset, position in enumerate(held):
            parts += cell(LEFT + CELL * offset, y, str(position), COLOURS[rank])
    return svg(LEFT + CELL * 24 + 20, 160, parts)


def _documents(cu_seqlens: np.ndarray, cp: int) -> Iterator[str]:
    """SVG text: the name of each document above its tokens, and the numbers of its chunks."""
    yield text(LEFT - 10, 30, "chunk", anchor="end")
    for document, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        length = (stop - start) // (2 * cp)
        yield text(LEFT + CELL * start + 2, 14, f"document {document}", bold=True)
        for chunk in range(2 * cp):
            x = LEFT + CELL * (start + chunk * length)
            yield f'<path d="M{x + 2} 34h{CELL * length - 4}" stroke="{INK}"/>'
            yield text(x + CELL * length / 2, 30, str(chunk), anchor="middle")


# --- halos of windows ---------------------------------------------------------------------------------------------


def halo() -> str:
    """The keys that each rank holds and receives: a document of 12 tokens at cp 3, with a window of 3 tokens."""
    length, cp, window = 12, 3, 3
    cu_seqlens = np.array([0, length])
    rank_of = {int(i): rank for rank in range(cp) for i in local_indices(cu_seqlens, cp, rank)}
    words = "filled: a token of the rank; border only: a key that it receives, in the colour of its owner"
    parts = [text(10, 20, words), row(34, "document")]
    for position, rank in sorted(rank_of.items()):
        parts += cell(LEFT + CELL * position, 34, str(position), COLOURS[rank])
    for rank in range(cp):
        y, needs = 74 + 30 * rank, Halo.of(cu_seqlens, window, cp, rank)
        parts.append(row(y, f"rank {rank}"))
        shown = set[int]()
        for chunk, before in zip(needs.chunks, needs.num_before.tolist()):
            shown |= set(range(chunk.position - before, chunk.position + chunk.length))
        for position in sorted(shown):
            is_held = rank_of[position] == rank
            parts += cell(LEFT + CELL * position, y, str(position), COLOURS[rank_of[position]], is_held=is_held)
        received = sum(needs.num_received)
        parts.append(text(LEFT + CELL * length + 14, y + 16, f"receives {received} keys"))
    return svg(LEFT + CELL * length + 190, 172, parts)


# --- states of linear attention -----------------------------------------------------------------------------------


def states() -> str:
    """A document of 64 tokens at cp 2: four fragments, and the states that pass between them."""
    length, cp, scale, high = 64, 2, 9, 34
    fragments = sorted(
        (chunk.position, chunk.length, rank) for rank, held in enumerate(parts_of([0, length], cp)) for chunk in held
    )
    top = [44 + 64 * rank for rank in range(cp)]
    parts = [text(LEFT, 20, "a document of 64 tokens, cp 2: the state after a fragment is the start of the next one")]
    parts += [row(top[rank] + 6, f"rank {rank}") for rank in range(cp)]
    for position, tokens, rank in fragments:
        x, wide = LEFT + scale * position, scale * tokens
        parts.append(f'<rect x="{x}" y="{top[rank]}" width="{wide}" height="{high}" fill="{COLOURS[rank]}"/>')
        words = f"tokens {position} to {position + tokens - 1}"
        parts.append(text(x + wide / 2, top[rank] + 21, words, anchor="middle", colour="white"))
    for number, ((_, _, before), (position, _, after)) in enumerate(zip(fragments, fragments[1:]), 1):
        x, label = LEFT + scale * position, f"S{number}"
        if before == after:
            y = top[before] + high
            parts.append(f'<path d="M{x - 24} {y + 4}v10h48v-8" fill="none" stroke="{INK}" marker-end="url(#tip)"/>')
            parts.append(text(x, y + 28, label, anchor="middle"))
        else:
            start, end = (top[before] + high, top[after]) if after > before else (top[before], top[after] + high)
            ends = f"M{x - 14} {start}L{x + 14} {end}"
            parts.append(f'<path d="{ends}" stroke="{INK}" marker-end="url(#tip)"/>')
            parts.append(text(x + 14, (start + end) / 2 + 4, label))
    return svg(LEFT + scale * length + 20, top[-1] + high + 40, parts)
