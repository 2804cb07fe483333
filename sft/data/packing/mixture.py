"""How often an epoch sees the samples of each source.

Decides what weights and epochs mean: how many tokens of each source an epoch takes, and which samples are seen
once more than others to get there.  A pure function of lengths, sources, seed and epoch.  Does not know the order
of an epoch or its packs (`plan.py`).

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

# The order in which a source's samples take turns at being seen once more; epochs are drawn with turns from 0 on.
_FIRST_TURN = 2**32
MOST_ROUNDS = 1000  # of all files, in an epoch: beyond that a number is mistyped


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Which source each sample is of, int [n], and how many tokens of each source an epoch takes."""

    sources: np.ndarray
    wanted: tuple[int, ...]

    @staticmethod
    def of(configs: Mapping[str, SourceConfig], sources: np.ndarray, lengths: np.ndarray) -> "Mixture | None":
        """As the recipe's named sources ask for; None where every sample is seen once per epoch.

        Raises DataError where a source has no sample, or an epoch would have none or far too many.
        """
        tokens = [int(lengths[sources == source].sum()) for source in range(len(configs))]
        if empty := [name for name, have in zip(configs, tokens) if not have]:
            raise DataError(f"data.train.{empty[0]} has no sample left, and its share cannot be had without.")
        epochs = [config.epochs for config in configs.values() if config.epochs is not None]
        weights = [config.weight for config in configs.values() if config.weight is not None]
        if not epochs and not weights:
            return None
        times = [round(times * have) for times, have in zip(epochs, tokens, strict=True)] if epochs else []
        wanted = tuple(times or wanted_tokens(tokens, weights))
        longest = [int(lengths[sources == source].max()) for source in range(len(configs))]
        if all(want < most for want, most in zip(wanted, longest, strict=True)):
            raise DataError("data.train asks for less than a sample: some epochs would have none.  Raise its epochs.")
        if sum(wanted) > MOST_ROUNDS * sum(tokens):
            raise DataError(
                f"data.train asks for epochs of {sum(wanted):,} tokens, over {MOST_ROUNDS:,} times what the files "
                "hold.  Bring weights or epochs nearer to each other."
            )
        return Mixture(sources=sources, wanted=wanted)

    def samples(self, lengths: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Ids of an epoch's samples, with repetitions, source by source; whose tokens are those wanted, to less than
        a sample's length for each source.

        Whole rounds, then part of one: the samples take turns at that, and none is in such a part twice before
        all others of its source were once, over however many epochs.
        """
        parts = []
        for source, wanted in enumerate(self.wanted):
            ids = np.flatnonzero(self.sources == source)
            ring = ids[shuffled(len(ids), seed, _FIRST_TURN + source)]
            starts = np.cumsum(lengths[ring]) - lengths[ring]
            total = int(lengths[ids].sum())
            rounds, rest = divmod(wanted, total)
            begin = epoch * rest % total  # the part of epoch e is [e * rest, (e + 1) * rest) of the tokens in a ring
            parts += [ids] * rounds
            parts.append(ring[(starts - begin) % total < rest])
        return np.concatenate(parts)


def wanted_tokens(tokens: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Tokens of each source in the shortest epoch with shares by `weights` in which no sample is left out.

    tokens 300 100, weights 6 4 -> 300 200
    """
    scale = max(have / weight for have, weight in zip(tokens, weights, strict=True))
    return [max(have, round(scale * weight)) for have, weight in zip(tokens, weights, strict=True)]
