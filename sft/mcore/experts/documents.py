"""Numbers the documents over which routers average their balancing losses, or with trees, the parts of texts."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sft.batch import Microbatch
from sft.mcore.device import send
from sft.parallel.text_parts import TextParts


@dataclass(frozen=True)
class TokenDocuments:
    """The document of each local token of a microbatch; in a pack with trees, its part of a document (`TextParts`).

    numbers     int32 [t], number of each token's document or part in the pack; -1 for padding
    count       number of documents or parts of the whole pack, filler documents included
    cp_members  the ranks that share the pack; None: this rank has all of it
    in_text     [texts, parts], 1.0 where a text contains a part (`sft.parallel.text_parts`); None: no trees
    """

    numbers: Tensor
    count: int
    cp_members: dist.ProcessGroup | None = None
    in_text: Tensor | None = None

    @property
    def is_real(self) -> Tensor:
        """bool [t], false for padding"""
        return self.numbers >= 0

    def times(self) -> Tensor:
        """int64 [t], the number of texts of the pack that contain a token; 0 for padding."""
        if self.in_text is None:
            return self.is_real.long()
        return self.in_text.sum(0).long()[self.numbers.clamp(min=0).long()] * self.is_real

    def count_of(self, table: Tensor) -> Tensor:
        """The number of tokens for which each column is true: bool [t, n] -> int64 [n].

        A token counts once for each text that contains it.
        """
        return table.sum(0) if self.in_text is None else (table * self.times()[:, None]).sum(0)

    def by_text(self, table: Tensor) -> Tensor:
        """Turn sums over documents or parts, [count, n], into sums over texts, [texts, n].

        The product is in float64, because GPUs may round the factors of an fp32 product to TF32.
        """
        return table if self.in_text is None else (self.in_text.double() @ table.double()).to(table.dtype)


def numbered(mb: Microbatch, device: torch.device) -> tuple[Tensor, int, Tensor | None]:
    """The number of each local token's document or part, -1 for padding: int32 [1, t].

    Also returns `count` and `in_text` of `TokenDocuments`.  All tensors are on the device.
    """
    if mb.branches is None or mb.texts is None:
        return send(mb.documents.masked_fill(mb.is_padding, -1), device), len(mb.lengths), None
    parts, documents = TextParts.of(mb.branches, mb.texts), mb.documents.numpy()
    numbers = parts.of_tokens(documents, mb.position_ids.numpy() - mb.branches.depths[documents])
    of_tokens = torch.from_numpy(numbers).to(torch.int32).masked_fill(mb.is_padding, -1)
    return send(of_tokens, device), len(parts), send(torch.from_numpy(parts.in_text).to(torch.float32), device)
