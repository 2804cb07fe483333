"""NF4: 16 values that divide a normal distribution into equal shares, one fp32 scale for each 64 numbers of a row.

The scale is the largest absolute value of the block.  The format is that of bitsandbytes without double quantisation
(Dettmers et al., 2023, arXiv:2305.14314).  bitsandbytes divides the flattened matrix into blocks; if 64 divides the
number of columns, these are the blocks of the rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits.part import StoredPart

BLOCK = 64
_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# The limits between neighbouring values.  A number that equals a limit gets the smaller value.
_LIMITS = (
    *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984),
    *(-0.13791173696517944, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668),
    *(0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
)


@dataclass(frozen=True, kw_only=True)
class Nf4Part(StoredPart):
    """A matrix.

    octets: uint8 [rows, blocks * 32], two numbers in a byte, the first one in the upper four bits
    scales: fp32 [rows, blocks]; columns: number of columns; the last block may have more numbers than columns
    """

    octets: Tensor
    scales: Tensor
    columns: int

    def values(self, dtype: torch.dtype) -> Tensor:
        numbers = torch.tensor(_VALUES, device=self.octets.device)
        pairs = torch.stack((numbers.repeat_interleave(16), numbers.repeat(16)), dim=1)  # by byte
        shares = pairs.index_select(0, self.octets.flatten().to(torch.int32)).view(*self.scales.shape, BLOCK)
        return shares.mul_(self.scales[..., None]).flatten(1)[:, : self.columns].to(dtype)


def quantised(matrix: Tensor) -> Nf4Part:
    """The NF4 numbers of a floating-point matrix [rows, columns] with finite values, on its device."""
    rows, columns = matrix.shape
    blocks = torch.nn.functional.pad(matrix.float(), (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(2)
    # A block of zeros has scale 0; its numbers stay 0.
    shares = blocks * torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    codes = torch.bucketize(shares, torch.tensor(_LIMITS, device=matrix.device)).to(torch.uint8).flatten(1)
    return Nf4Part(octets=(codes[:, ::2] << 4) | codes[:, 1::2], scales=scales, columns=columns)
