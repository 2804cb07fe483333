"""The rates of attention kernels, by GPU architecture and width of the heads.  Each rate names its source.

Selection tries the fastest kernels first, and the prediction of a step uses the rate of the kernel that would run.  A
kernel without a rate for an architecture and width has no code for them, or its code there was never compared with
plain attention.  Everything else that a kernel refuses is asked of its own code (sft/mcore/attention).
"""

from typing import NamedTuple

TRANSFORMER_ENGINE = "Transformer Engine"  # its attention is cuDNN's
FLASH3, FLASH4 = "FlashAttention-3", "FlashAttention-4"
FFPA = "ffpa-attn"
FLASH2 = "torch's flash kernel"  # FlashAttention-2
PLAIN = "plain torch"
KERNELS = (TRANSFORMER_ENGINE, FLASH3, FLASH4, FFPA, FLASH2, PLAIN)

HOPPER, BLACKWELL, AMPERE = "hopper", "blackwell", "ampere"
PEAKS = {HOPPER: 989.4, BLACKWELL: 2250.0, AMPERE: 312.0}  # dense bf16 TFLOP/s of the GPU whose rates the table has
BACKWARD = 2.5  # FLOPs of backward / FLOPs of forward.  Backward computes the scores again


class Rate(NamedTuple):
    """TFLOP/s of a kernel with long documents.  FLOPs are causal, and those of backward are 2.5 times those of forward.

    forward, backward  the rates; the lowest that are likely if nobody has published them
    source             "measured on ...", "published: ..." or "assumed: ..."
    highest            the highest rates that are likely, forward and backward; None: the rates are known
    """

    forward: float
    backward: float
    source: str
    highest: tuple[float, float] | None = None

    @property
    def together(self) -> float:
        """TFLOP/s of a forward with its backward pass."""
        return (1 + BACKWARD) / (1 / self.forward + BACKWARD / self.backward)

    def text(self) -> str:
        """`667 / 592 TFLOP/s, measured on ...` or `400 to 500 / 360 to 450 TFLOP/s, assumed: ...`"""
        highest = self.highest or (self.forward, self.backward)
        ranges = [
            f"{low:g}" if low == high else f"{low:g} to {high:g}"
            for low, high in zip((self.forward, self.backward), highest)
        ]
        return f"{' / '.join(ranges)} TFLOP/s, {self.source}"


_H200 = "measured on one H200 (docs/numbers/h200.md)"
_FA3 = "published: FlashAttention-3, figures 5 and 6"
_UNKNOWN = "assumed: not published"
_LIKE_HOPPER = f"{_UNKNOWN}; its ratio to the kernel's rate for heads of 128 is that of Hopper"
_TILES = "assumed: calculated from FLOPs and bytes of tiles in bf16 on tensor cores"
_ANY = (10**6, 10**6)

# By kernel and architecture: the widest keys and values of each row, and the rate.  A head takes the first row that is
# wide enough for it.
_Rows = tuple[tuple[tuple[int, int], Rate], ...]
_RATES: dict[tuple[str, str], _Rows] = {
    (TRANSFORMER_ENGINE, HOPPER): (
        ((64, 64), Rate(413, 395, f"{_FA3}; backward at 2K tokens", (413, 440))),
        ((128, 128), Rate(602, 530, f"{_H200}, cuDNN called by torch")),
        ((192, 128), Rate(550, 400, _UNKNOWN, (650, 500))),
        ((256, 256), Rate(509, 380, f"{_FA3}; backward {_UNKNOWN}", (509, 480))),
    ),
    (FLASH3, HOPPER): (
        ((64, 64), Rate(497, 422, f"{_FA3}; backward at 2K tokens", (497, 480))),
        ((128, 128), Rate(648, 561, _FA3)),
        ((192, 128), Rate(600, 350, f"{_UNKNOWN}; its backward pass pads values to 192", (700, 450))),
        ((256, 256), Rate(642, 400, f"{_FA3}; backward {_UNKNOWN}", (642, 550))),
    ),
    (FLASH4, HOPPER): (
        ((64, 64), Rate(537, 542, _H200)),
        ((128, 128), Rate(667, 592, _H200)),
        ((192, 128), Rate(724, 494, _H200)),
        ((256, 256), Rate(705, 381, _H200)),
    ),
    (FFPA, HOPPER): (((512, 512), Rate(603, 221, _H200)),),
    (FLASH2, HOPPER): (
        ((64, 64), Rate(319, 292, _H200)),
        ((128, 128), Rate(357, 324, _H200)),
        ((192, 128), Rate(271, 233, _H200)),
        ((256, 256), Rate(287, 265, _H200)),
    ),
    (PLAIN, HOPPER): (  # bound by bytes of scores: 38 an element forward, 64 backward, and 4 and 10 FLOPs a number
        ((64, 64), Rate(10, 15, _TILES, (17, 25))),
        ((128, 128), Rate(20, 28, _TILES, (33, 47))),
        ((256, 256), Rate(37, 52, _TILES, (62, 86))),
        (_ANY, Rate(65, 90, _TILES, (110, 147))),
    ),
    (TRANSFORMER_ENGINE, BLACKWELL): (
        ((64, 64), Rate(700, 600, _UNKNOWN, (1000, 900))),
        ((128, 128), Rate(1100, 900, _UNKNOWN, (1600, 1300))),
        ((192, 128), Rate(1000, 750, _UNKNOWN, (1500, 1100))),
        ((256, 256), Rate(600, 450, _UNKNOWN, (1200, 900))),
    ),
    (FLASH4, BLACKWELL): (
        ((64, 64), Rate(836, 650, f"published: flash-attention#2605; backward {_UNKNOWN}", (852, 850))),
        ((128, 128), Rate(1418, 1208, "published: flash-attention#2280")),
        ((192, 128), Rate(1100, 800, _UNKNOWN, (1500, 1200))),
    ),
    (FLASH2, BLACKWELL): (  # it computes with mma.sync, as on Ampere
        ((64, 64), Rate(360, 325, _LIKE_HOPPER, (450, 405))),
        ((128, 128), Rate(400, 360, _UNKNOWN, (500, 450))),
        ((192, 128), Rate(300, 260, _LIKE_HOPPER, (380, 325))),
        ((256, 256), Rate(320, 295, _LIKE_HOPPER, (400, 370))),
    ),
    (PLAIN, BLACKWELL): (  # 2.4 times the bytes a second
        ((64, 64), Rate(10, 15, _TILES, (40, 60))),
        ((128, 128), Rate(20, 28, _TILES, (78, 110))),
        ((256, 256), Rate(37, 52, _TILES, (145, 200))),
        (_ANY, Rate(65, 90, _TILES, (260, 340))),
    ),
    (TRANSFORMER_ENGINE, AMPERE): (
        ((128, 128), Rate(190, 170, _UNKNOWN, (228, 197))),
        ((256, 256), Rate(145, 120, _UNKNOWN, (185, 160))),
    ),
    (FLASH2, AMPERE): (
        ((64, 64), Rate(170, 150, _UNKNOWN, (205, 177))),
        ((128, 128), Rate(190, 170, "published: FlashAttention-2, up to 73% of the peak, backward 63%", (228, 197))),
        ((192, 128), Rate(145, 120, _UNKNOWN, (175, 140))),
        ((256, 256), Rate(155, 140, _UNKNOWN, (185, 160))),
    ),
    (PLAIN, AMPERE): (
        ((64, 64), Rate(6, 9, _TILES, (10, 15))),
        ((128, 128), Rate(12, 17, _TILES, (19, 28))),
        ((256, 256), Rate(21, 29, _TILES, (35, 48))),
        (_ANY, Rate(36, 47, _TILES, (60, 78))),
    ),
}
# Plain torch in fp32, without tensor cores.
_FP32 = "assumed: calculated for tiles in fp32, without tensor cores"
PLAIN_FP32 = {HOPPER: Rate(14, 17, _FP32), BLACKWELL: Rate(14, 17, _FP32), AMPERE: Rate(4, 5, _FP32)}
# Rates with a soft cap of the scores, of the only flash kernel that has one.
_CAPPED: dict[str, _Rows] = {
    HOPPER: (
        ((128, 128), Rate(288, 344, f"{_H200}, with windows of 4,096")),
        ((256, 256), Rate(250, 180, f"{_UNKNOWN} with a soft cap", (350, 260))),
    ),
    BLACKWELL: (((128, 128), Rate(600, 600, f"{_UNKNOWN} with a soft cap", (1100, 1000))),),
}


def architecture_of(major: int) -> str | None:
    """The architecture of an NVIDIA GPU.  major: of its compute capability; None: the table has no rates for it"""
    return {8: AMPERE, 9: HOPPER, 10: BLACKWELL}.get(major)


def rate(
    kernel: str,
    architecture: str | None,
    key_width: int,
    value_width: int,
    has_window: bool = False,
    has_softcap: bool = False,
) -> Rate | None:
    """The rate of a kernel; None: nothing is known, and the kernel does not run there.

    With a window, the rate is that of long windows.
    """
    if architecture is None:
        return None
    rows = _RATES.get((kernel, architecture), ())
    if has_softcap and kernel != PLAIN:
        rows = _CAPPED.get(architecture, ()) if kernel == FLASH4 else ()
    if has_window and kernel == FFPA:
        rows = ()
    if kernel == FFPA and (key_width, value_width) != (512, 512):
        rows = ()
    for (keys, values), known in rows:
        if key_width <= keys and value_width <= values:
            return known
    return None


def fastest_first(
    architecture: str | None,
    key_width: int,
    value_width: int,
    has_window: bool = False,
    has_softcap: bool = False,
) -> list[tuple[str, Rate]]:
    """The kernels that have a rate, the fastest first."""
    rates = (
        (kernel, rate(kernel, architecture, key_width, value_width, has_window, has_softcap)) for kernel in KERNELS
    )
    return sorted(((kernel, known) for kernel, known in rates if known), key=lambda item: -item[1].together)
