"""What became of every sample of a file: kept, cut or dropped, in samples, tokens and supervised labels.

Does not decide any of it (`encode.py`); it only counts, so that nothing is lost silently.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Counts of one or more files.  Kept, cut and dropped add up to what the files hold.

    cut: lost from samples that were kept, by over_long = truncate.  dropped: lost with their samples.
    """

    samples_kept: int
    samples_cut: int  # among the kept
    samples_dropped: int
    tokens_kept: int
    tokens_cut: int
    tokens_dropped: int
    supervised_kept: int
    supervised_cut: int
    supervised_dropped: int
    longest: int  # tokens of the longest kept sample
    cut_rows: tuple[int, ...]  # row numbers in the file
    dropped_rows: tuple[int, ...]

    def __str__(self) -> str:
        share = 100 * self.supervised_kept / max(1, self.tokens_kept)
        text = (
            f"{self.samples_kept:,} samples, {self.tokens_kept:,} tokens "
            f"({share:.1f}% supervised), longest {self.longest:,}"
        )
        if self.samples_cut:
            text += (
                f"; cut {self.samples_cut:,} samples by {self.tokens_cut:,} tokens "
                f"({self.supervised_cut:,} supervised): {_rows(self.cut_rows)}"
            )
        if self.samples_dropped:
            text += (
                f"; dropped {self.samples_dropped:,} samples of {self.tokens_dropped:,} tokens "
                f"({self.supervised_dropped:,} supervised): {_rows(self.dropped_rows)}"
            )
        return text


def count_rows(rows: np.ndarray) -> Ledger:
    """The ledger of a table of rows (columns: `encode.Block`).

    rows (1, 10, 4, 10, 4), (2, 10, 4, 25, 9), (3, 0, 0, 99, 9)
    -> kept 2 samples of 20 tokens, 8 supervised; cut 1 by 15 tokens, 5 supervised; dropped 1 of 99 and 9
    """
    number, kept, supervised, full, full_supervised = rows.T
    dropped = kept == 0
    cut = ~dropped & (kept < full)
    return Ledger(
        samples_kept=int((~dropped).sum()),
        samples_cut=int(cut.sum()),
        samples_dropped=int(dropped.sum()),
        tokens_kept=int(kept.sum()),
        tokens_cut=int((full - kept)[cut].sum()),
        tokens_dropped=int(full[dropped].sum()),
        supervised_kept=int(supervised.sum()),
        supervised_cut=int((full_supervised - supervised)[cut].sum()),
        supervised_dropped=int(full_supervised[dropped].sum()),
        longest=int(kept.max(initial=0)),
        cut_rows=tuple(int(i) for i in number[cut]),
        dropped_rows=tuple(int(i) for i in number[dropped]),
    )


def _rows(numbers: tuple[int, ...], shown: int = 8) -> str:
    listed = ", ".join(str(number) for number in numbers[:shown])
    return f"row {listed}" if len(numbers) == 1 else f"rows {listed}{', ...' if len(numbers) > shown else ''}"
