"""Divides the documents of a pack into parts, so that each text of a tree is a list of whole parts.  In numpy.

A document is cut where a branch begins and where a text ends; the pieces are its parts.  A sum over a text, such as of
a router's choices, is a sum over the parts of the text.  A token counts once for each text that contains its part:

    document 0   s0 s1 s2 | s3 s4        parts 0 and 1: document 1 continues the first 3 tokens
    document 1            | a0 a1        part 2
    texts (0, 5) and (1, 2)              contain parts 0 1 and parts 0 2; part 0 counts twice
"""

from dataclasses import dataclass

import numpy as np

from sft.parallel.branches import Branches


@dataclass(frozen=True, eq=False)
class TextParts:
    """The parts of a pack, in the order of its documents.

    documents, starts  int64 [parts], the document of each part, and the part's first token in the document
    in_text            bool [texts, parts], whether the text contains the part
    """

    documents: np.ndarray
    starts: np.ndarray
    in_text: np.ndarray

    @staticmethod
    def of(branches: Branches, texts: np.ndarray) -> "TextParts":
        """The parts of a pack.

        texts: int64 [texts, 2], the document in which each text ends, and the text's number of tokens in this document
        """
        is_branch = branches.parents >= 0
        cuts = np.stack([branches.parents[is_branch], branches.forks[is_branch]], axis=1)
        begins = np.stack([np.arange(len(branches)), np.zeros(len(branches), dtype=np.int64)], axis=1)
        ends = np.unique(np.concatenate([begins, cuts, texts]), axis=0)
        parts = TextParts(ends[:, 0], ends[:, 1], np.zeros((len(texts), len(ends)), dtype=bool))
        for row, (document, count) in zip(parts.in_text, texts.tolist()):
            for piece, length in [
                (document, count),
                *((piece.document, piece.length) for piece in branches.path(document)),
            ]:
                row |= (parts.documents == piece) & (parts.starts < length)
        return parts

    def __len__(self) -> int:
        return len(self.documents)

    def of_tokens(self, documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [t]: the part of each token, from its document and its position in the document."""
        size = int(max(self.starts.max(), positions.max(initial=0))) + 1
        keys = documents.astype(np.int64) * size + positions
        return np.searchsorted(self.documents * size + self.starts, keys, side="right") - 1
