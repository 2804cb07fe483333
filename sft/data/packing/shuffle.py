"""Shuffles reproducibly: a permutation depends only on n, seed and `turn`, not on a process, machine or release.

`turn` distinguishes the permutations of a run.  numpy's random numbers are not used, because numpy does not promise the
same numbers in every release, and a resumed run needs the order with which it began.
"""

import numpy as np


def shuffled(n: int, seed: int, turn: int) -> np.ndarray:
    """A permutation of range(n): the numbers sorted by their SplitMix64 hashes (Steele et al. 2014).

    n 8, seed 1234: turn 0 -> 3 6 7 2 1 5 0 4        turn 1 -> 1 0 4 5 2 7 6 3
    """
    with np.errstate(over="ignore"):
        key = mix(mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(turn))
        return np.argsort(mix(mix(np.arange(n, dtype=np.uint64)) ^ key), kind="stable")


def mix(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 hash of each number, uint64 [n]: 0 -> 0xE220A8397B1DCDAF"""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
