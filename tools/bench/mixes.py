"""Makes document lengths of several distributions (mixes) for benchmarks, and reads lengths such as 64k.

one      a single document
chat     log-normal with median 600
longmix  98% of the documents as in chat, and 2% log-uniform from 8K to 128K
agent    log-normal with median 16K

coderforge, math  published quantiles of CoderForge traces and of Nemotron-Cascade-2 math
lognormal         Megatron-LM's test distribution: log-normal with mean 1,024 and sigma 1.5, from 128 to 8,192
"""

import math

import numpy as np

SEQ_LENGTHS = {"chat": 32_768, "longmix": 131_072, "agent": 131_072}  # maximum length of a document
MIXES = ("one", *SEQ_LENGTHS)
TRACES = {"coderforge": 131_072, "math": 131_072, "lognormal": 131_072}  # maximum length in further mixes
# Quantiles: (share of documents, tokens).  Between two quantiles, the logarithm of the length is linear.  The first
# quantile is assumed, not published.
QUANTILES = {
    "coderforge": [
        (0.0, 2000), (0.3, 32_768), (0.5, 38_000), (0.767, 49_152), (0.925, 65_536), (0.95, 71_000), (0.993, 98_304),
        (0.999, 131_072), (1.0, 184_000),
    ],
    "math": [(0.0, 600), (0.5, 12_432), (0.9, 43_089), (0.99, 84_679), (1.0, 140_459)],
}  # fmt: skip
NUM_LENGTHS = 20_000  # number of lengths from which packs are filled
MULTIPLE = 32  # data.doc_multiple of plans


def lengths_of(mix: str, num_lengths: int) -> np.ndarray:
    """Random lengths of a mix of SEQ_LENGTHS or TRACES, with a fixed seed.  int64 [num_lengths]"""
    rng = np.random.default_rng(0)
    if mix == "lognormal":
        lengths = rng.lognormal(math.log(1024) - 1.5**2 / 2, 1.5, num_lengths)
        return np.clip(lengths, 128, 8192).astype(np.int64)
    if mix in QUANTILES:
        shares, tokens = zip(*QUANTILES[mix])
        lengths = np.exp(np.interp(rng.random(num_lengths), shares, np.log(tokens)))
        return np.minimum(lengths, TRACES[mix]).astype(np.int64)
    chat = rng.lognormal(math.log(600), 1.1, num_lengths)
    lengths = {
        "chat": chat,
        "longmix": np.where(rng.random(num_lengths) < 0.02, 8192 * 16 ** rng.random(num_lengths), chat),
        "agent": rng.lognormal(math.log(16384), 0.9, num_lengths),
    }[mix]
    return np.clip(lengths.astype(np.int64), 1, SEQ_LENGTHS[mix])


def lengths_to(mix: str, total: int, longest: int) -> np.ndarray:
    """Lengths of the mix, at most `longest` each, until their sum reaches `total`.  int64"""
    if mix == "one":
        return np.full(-(-total // longest), longest)
    lengths = np.minimum(lengths_of(mix, NUM_LENGTHS), longest)
    lengths = np.tile(lengths, 1 + int(total // lengths.sum()))
    return lengths[: 1 + int(np.searchsorted(np.cumsum(lengths), total))]


def boundaries_of(mix: str, total: int, multiple: int) -> np.ndarray:
    """cu_seqlens of a full pack of the mix; document lengths are multiples of `multiple`.  int32 [documents + 1]"""
    sizes = -(-lengths_to(mix, total, total) // multiple) * multiple
    inner = np.cumsum(sizes)
    return np.array([0, *inner[inner < total], total], dtype=np.int32)


def read_length(text: str) -> int:
    """The number of tokens: `64k` or `65536` -> 65536"""
    return int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)


def read_length_and_mix(case: str) -> tuple[int, str]:
    """Reads a case: `64k:chat` -> (65536, "chat").  Raises ValueError."""
    length, mix = case.split(":")
    if mix not in MIXES:
        raise ValueError(f"{case}: {mix} is not one of {', '.join(MIXES)}")
    return read_length(length), mix


def short(tokens: int) -> str:
    """The length as text: 65536 -> 64K"""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
