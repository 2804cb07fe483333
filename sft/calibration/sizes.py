"""Lists the sizes that a calibration measures on a device.  They give steady rates, and take about a minute."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MeasuredSizes:
    """The sizes of all measurements on a type of device.

    products      smallest sizes of the measured matrix products, which have at least `rows` rows
    documents     lengths at which attention is measured, with `heads` heads of width `head_dim`.  A pack has as many
                  tokens as the longest document
    message       bytes that a rank receives in the message that measures a bandwidth
    hidden_size, seq_length, vocab_size  sizes of the short training steps
    """

    products: tuple[int, ...]
    rows: int
    documents: tuple[int, ...]
    heads: int
    head_dim: int
    message: int
    hidden_size: int
    seq_length: int
    vocab_size: int


SIZES: Mapping[str, MeasuredSizes] = {
    "cpu": MeasuredSizes(
        products=(16, 64, 128, 256, 512, 1024),
        rows=1024,
        documents=(64, 256, 1024, 2048),
        heads=4,
        head_dim=64,
        message=4 << 20,
        hidden_size=256,
        seq_length=1024,
        vocab_size=16384,
    ),
    "cuda": MeasuredSizes(
        products=(16, 64, 256, 512, 1024, 2048, 4096, 8192),
        rows=8192,
        documents=(512, 2048, 8192, 32768),
        heads=16,
        head_dim=128,
        message=256 << 20,
        hidden_size=4096,
        seq_length=8192,
        vocab_size=131072,
    ),
}
