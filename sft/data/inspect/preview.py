"""Cuts the text of a sample into pieces, each of which is supervised or context.

Decides which pieces are shown, and how much of each.  Both ends of a long piece are shown, so the text around each
boundary between context and answer is visible.  `report.py` formats the pieces.
"""

from dataclasses import dataclass
from itertools import chain

from sft.batch import Sample
from sft.data.cache.truncation import turns
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.inspect.tree_picture import picture

_CHARACTERS = 200  # number of characters shown on each side of a boundary; about as many tokens are decoded
_FIRST_PIECES, _LAST_PIECES = 8, 4


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Consecutive tokens that are all supervised or all context.

    is_gap: this piece stands for tokens that are not shown; with a text, it marks the beginning of a branch
    """

    text: str
    is_supervised: bool
    tokens: int
    is_gap: bool = False


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The pieces of one sample.

    name  the name of its row and window
    why   why it was chosen: `first`, `longest answer`, or both
    tree  the lines of a picture of its tree
    """

    name: str
    why: str
    tokens: int
    supervised: int
    pieces: tuple[TokenRun, ...]
    tree: tuple[str, ...] = ()


def preview(sample: Sample, name: str, why: str, tokenizer: ChatTokenizer) -> Preview:
    """The preview of a sample: at most its first 8 and its last 4 pieces, with 200 characters at each end of a piece.

    A gap stands for each part that is not shown.

    user "a", assistant "b", byte tokenizer ->
    "<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\n", then supervised "b<|im_end|>", then "\\n"
    """
    of_branches = [] if sample.tree is None else sample.tree.starts.tolist()
    edges = sorted({0, *chain.from_iterable(turns(sample.weights)), len(sample.tokens), *of_branches})
    spans = list(zip(edges, edges[1:], strict=False))
    left_out = spans[_FIRST_PIECES:-_LAST_PIECES]
    shown = [piece for span in spans[:_FIRST_PIECES] for piece in _pieces(sample, *span, tokenizer)]
    if left_out:
        shown.append(TokenRun(text="", is_supervised=False, tokens=left_out[-1][1] - left_out[0][0], is_gap=True))
    rest = spans[max(_FIRST_PIECES, len(spans) - _LAST_PIECES) :]
    shown += [piece for span in rest for piece in _pieces(sample, *span, tokenizer)]
    return Preview(
        name=name,
        why=why,
        tokens=len(sample.tokens),
        supervised=sample.num_supervised,
        pieces=tuple(shown),
        tree=tuple(picture(sample)),
    )


def _pieces(sample: Sample, start: int, end: int, tokenizer: ChatTokenizer) -> list[TokenRun]:
    """The pieces of the tokens from start to end.  If a branch begins at start, a gap with a text comes first."""
    if sample.tree is not None and start and start in sample.tree.starts:
        depth = int(sample.tree.branches.depths[sample.tree.starts.searchsorted(start)])
        branch = TokenRun(text=f"branch after {depth:,} tokens", is_supervised=False, tokens=0, is_gap=True)
        return [branch, *_tokens(sample, start, end, tokenizer)]
    return _tokens(sample, start, end, tokenizer)


def _tokens(sample: Sample, start: int, end: int, tokenizer: ChatTokenizer) -> list[TokenRun]:
    is_supervised = start > 0 and bool(sample.weights[start] > 0)
    tokens = sample.tokens[start:end]
    if len(tokens) <= 2 * _CHARACTERS and len(text := tokenizer.decode(tokens)) <= 2 * _CHARACTERS:
        return [TokenRun(text=text, is_supervised=is_supervised, tokens=len(tokens))]
    reach = min(_CHARACTERS, len(tokens) // 2)
    # Show as many whole tokens as fit into _CHARACTERS; most tokens have about four characters.
    while reach > 1 and max(len(tokenizer.decode(part)) for part in (tokens[:reach], tokens[-reach:])) > _CHARACTERS:
        reach = reach * 3 // 4
    # If the cut splits a character that consists of several tokens, the rest decodes to U+FFFD, which is not shown.
    head, tail = tokenizer.decode(tokens[:reach]).rstrip("\ufffd"), tokenizer.decode(tokens[-reach:]).lstrip("\ufffd")
    return [
        TokenRun(text=head, is_supervised=is_supervised, tokens=reach),
        TokenRun(text="", is_supervised=is_supervised, tokens=len(tokens) - 2 * reach, is_gap=True),
        TokenRun(text=tail, is_supervised=is_supervised, tokens=reach),
    ]
