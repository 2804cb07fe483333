"""Decides how often an epoch contains the samples of each source.

Computes from weights or epochs how many tokens an epoch has of each source, and which samples occur once more than
others to reach that number.  The result depends only on lengths, sources, seed and epoch.  `plan.py` decides the order
of the samples and their packs.

    tokens of chat and code 300 and 100, weights 0.5 and 0.5 -> chat once, code three times: 300 and 300
                                         weights 0.6 and 0.4 -> chat once, code twice: 300 and 200
                                         weights 0.9 and 0.1 -> chat three times, code once: 900 and 100
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sft.config import SourceConfig
from sft.data.packing.shuffle import shuffled
from sft.errors import DataError

# The first `turn` of the shuffles that decide which samples of a source occur once more.  The shuffles of epochs use
# smaller turns.
_FIRST_TURN = 2**32
MOST_ROUNDS = 1000  # most tokens of an epoch / tokens of the files; with more, a number was probably mistyped


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The source of each sample, int [n], and for each source the number of tokens that an epoch should have."""

    sources: np.ndarray
    wanted: tuple[int, ...]

    @staticmethod
    def of(configs: Mapping[str, SourceConfig], sources: np.ndarray, lengths: np.ndarray) -> "Mixture | None":
        """The mixture that a recipe's named sources define; None if an epoch contains every sample once.

        Raises DataError if a source has no sample, or if an epoch would have no sample or far too many.
        """
        tokens = [int(lengths[sources == source].sum()) for source in range(len(configs))]
        if empty := [name for name, have in zip(configs, tokens) if not have]:
            raise DataError(f"data.train.{empty[0]} has no samples left, so the epoch cannot contain its share.")
        epochs = [config.epochs for config in configs.values() if config.epochs is not None]
        weights = [config.weight for config in configs.values() if config.weight is not None]
        if not epochs and not weights:
            return None
        times = [round(times * have) for times, have in zip(epochs, tokens, strict=True)] if epochs else []
        wanted = tuple(times or wanted_tokens(tokens, weights))
        longest = [int(lengths[sources == source].max()) for source in range(len(configs))]
        if all(want < most for want, most in zip(wanted, longest, strict=True)):
            raise DataError(
                "data.train asks for less than one sample per epoch, so some epochs would be empty.  Raise epochs of "
                "data.train."
            )
        if sum(wanted) > MOST_ROUNDS * sum(tokens):
            raise DataError(
                f"data.train asks for epochs of {sum(wanted):,} tokens, more than {MOST_ROUNDS:,} times the tokens of "
                "the files.  Choose weights or epochs that differ less."
            )
        return Mixture(sources=sources, wanted=wanted)

    def samples(self, lengths: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """int64: ids of an epoch's samples, with repetitions, source by source.  The number of tokens of a source
        differs from the wanted number by less than the length of a sample.

        An epoch contains each sample of a source equally often, and some samples once more.  Over the epochs, the
        samples of a source take turns: all have occurred once more before one of them does so again.
        """
        parts = []
        for source, wanted in enumerate(self.wanted):
            ids = np.flatnonzero(self.sources == source)
            ring = ids[shuffled(len(ids), seed, _FIRST_TURN + source)]
            starts = np.cumsum(lengths[ring]) - lengths[ring]
            total = int(lengths[ids].sum())
            rounds, rest = divmod(wanted, total)
            begin = epoch * rest % total  # epoch e repeats tokens [e * rest, (e + 1) * rest), modulo total
            parts += [ids] * rounds
            parts.append(ring[(starts - begin) % total < rest])
        return np.concatenate(parts)


def wanted_tokens(tokens: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The tokens of each source in the shortest epoch that contains every sample, with tokens in the ratio of
    `weights`.

    tokens 300 100, weights 6 4 -> 300 200
    """
    scale = max(have / weight for have, weight in zip(tokens, weights, strict=True))
    return [max(have, round(scale * weight)) for have, weight in zip(tokens, weights, strict=True)]
