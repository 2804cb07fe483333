"""The rates of attention kernels, by GPU architecture and width of the heads.  Each rate names its source.

Selection tries the fastest kernels first, and the prediction of a step uses the rate of the kernel that would run.  If
a kernel has no rate for an architecture and width, the kernel has no code for them, or nobody has compared its results
with plain attention there.  For all other limits of a kernel, selection asks the code of the kernel
(sft/mcore/attention).
"""

from typing import NamedTuple

TRANSFORMER_ENGINE = "Transformer Engine"  # computes attention with cuDNN
FLASH3, FLASH4 = "FlashAttention-3", "FlashAttention-4"
FFPA = "ffpa-attn"
FLASH2 = "torch's flash kernel"  # FlashAttention-2
PLAIN = "plain torch"
KERNELS = (TRANSFORMER_ENGINE, FLASH3, FLASH4, FFPA, FLASH2, PLAIN)

HOPPER, BLACKWELL, AMPERE = "hopper", "blackwell", "ampere"
PEAKS = {HOPPER: 989.4, BLACKWELL: 2250.0, AMPERE: 312.0}  # dense bf16 TFLOP/s of the GPU on which rates were measured
BACKWARD = 2.5  # FLOPs of backward / FLOPs of forward: backward computes the scores again


class Rate(NamedTuple):
    """TFLOP/s of a kernel with long documents.  FLOPs are causal, and those of backward are 2.5 times those of forward.

    forward, backward  the rates.  If they are not known, the lowest rates that are likely
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
_NVIDIA = "published: NVIDIA/cudnn-frontend, attention_training, 2026-09-28"  # documents of 32K, causal
_UNKNOWN = "assumed: not published"
_LIKE_HOPPER = f"{_UNKNOWN}; its ratio to the kernel's rate for heads of 128 is that of Hopper"
_ANY = 10**6


def _of_gb200(forward: float, backward: float) -> Rate:
    """A rate that is published for a GB200, at the peak of a B200."""
    scale = PEAKS[BLACKWELL] / 2450.0
    return Rate(round(scale * forward), round(scale * backward), f"{_NVIDIA}, GB200, scaled to the peak of a B200")


def _plain(scale: float) -> tuple[tuple[tuple[int, int], Rate], ...]:
    """Rates of attention in bf16 tiles of plain torch.

    The time is assumed to be that of reading and writing fp32 scores, about ten times in forward and twenty times in
    backward.  It does not depend on the width of the heads.

    scale: bandwidth of the GPU's memory, divided by that of Hopper
    """
    source = "assumed: calculated from the bytes of its tiles"
    return tuple(
        ((width, width), Rate(scale * low, scale * 1.6 * low, source, (2 * scale * low, 2 * scale * 1.6 * low)))
        for width, low in ((64, 4.0), (128, 8.0), (256, 16.0), (512, 30.0), (_ANY, 30.0))
    )


# Rates by kernel and architecture.  A row has the widest keys and values for which it holds, and the rate.  A head
# takes the first row that is wide enough for its keys and values.
_Rows = tuple[tuple[tuple[int, int], Rate], ...]
_RATES: dict[tuple[str, str], _Rows] = {
    (TRANSFORMER_ENGINE, HOPPER): (
        ((64, 64), Rate(413, 395, f"{_FA3}; backward at 2K tokens", (413, 440))),
        ((128, 128), Rate(602, 530, f"{_H200}, cuDNN called by torch")),
        ((192, 128), Rate(607, 508, f"{_NVIDIA}, H200")),
        ((256, 256), Rate(678, 358, f"{_NVIDIA}, H200, cuDNN 9.27")),
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
    (PLAIN, HOPPER): _plain(1.0),
    (TRANSFORMER_ENGINE, BLACKWELL): (
        ((64, 64), Rate(700, 600, _UNKNOWN, (1000, 900))),
        ((128, 128), _of_gb200(1593, 1221)),
        ((192, 128), _of_gb200(1705, 1112)),
        ((256, 256), _of_gb200(1838, 1045)),
    ),
    (FLASH4, BLACKWELL): (  # 256: GB200 1685 / 939, but nobody has compared chunks of documents there
        ((64, 64), Rate(836, 650, f"published: flash-attention#2605; backward {_UNKNOWN}", (852, 850))),
        ((128, 128), Rate(1418, 1208, "published: flash-attention#2280")),
        ((192, 128), _of_gb200(1617, 1132)),
    ),
    (FLASH2, BLACKWELL): (  # it computes with mma.sync, as on Ampere
        ((64, 64), Rate(360, 325, _LIKE_HOPPER, (450, 405))),
        ((128, 128), Rate(400, 360, _UNKNOWN, (500, 450))),
        ((192, 128), Rate(300, 260, _LIKE_HOPPER, (380, 325))),
        ((256, 256), Rate(320, 295, _LIKE_HOPPER, (400, 370))),
    ),
    (PLAIN, BLACKWELL): _plain(1.6),
    (TRANSFORMER_ENGINE, AMPERE): (((128, 128), Rate(176, 143, f"{_NVIDIA}, A100 PCIe")),),
    (FLASH2, AMPERE): (
        ((64, 64), Rate(170, 150, _UNKNOWN, (205, 180))),
        ((128, 128), Rate(199, 180, f"{_NVIDIA}, A100 PCIe")),
        ((192, 128), Rate(140, 110, _UNKNOWN, (175, 140))),
        ((256, 256), Rate(184, 136, f"{_NVIDIA}, A100 PCIe")),
    ),
    (PLAIN, AMPERE): _plain(0.5),
}
# Rates of FlashAttention-4 with a soft cap of the scores.  No other flash kernel supports a soft cap.
_CAPPED: dict[str, _Rows] = {
    HOPPER: (
        ((128, 128), Rate(288, 344, f"{_H200}, with windows of 4,096")),
        ((256, 256), Rate(250, 180, f"{_UNKNOWN} with a soft cap", (350, 260))),
    ),
    BLACKWELL: (((128, 128), Rate(600, 600, f"{_UNKNOWN} with a soft cap", (1100, 1000))),),
}


def architecture_of(major: int) -> str | None:
    """The architecture of an NVIDIA GPU; None: the table has no rates for it.

    major: the first number of the GPU's compute capability
    """
    return {8: AMPERE, 9: HOPPER, 10: BLACKWELL}.get(major)


def rate(
    kernel: str,
    architecture: str | None,
    key_width: int,
    value_width: int,
    has_window: bool = False,
    has_softcap: bool = False,
    is_grouped: bool = False,
) -> Rate | None:
    """The rate of a kernel; None: no rate is known, and selection does not take the kernel.

    key_width, value_width: elements of a head.  is_grouped: whether several query heads share a key head.
    With a window, the rate is that of long windows.
    """
    if architecture is None:
        return None
    rows = _RATES.get((kernel, architecture), ())
    if has_softcap and kernel != PLAIN:
        rows = _CAPPED.get(architecture, ()) if kernel == FLASH4 else ()
    if has_window and kernel == FFPA:
        rows = ()
    if kernel == FLASH4 and architecture == HOPPER and is_grouped and key_width != value_width:  # flash4.py says why
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
    is_grouped: bool = False,
) -> list[tuple[str, Rate]]:
    """The kernels that have a rate, the fastest first, with their rates.  Takes the same arguments as `rate`."""
    rates = (
        (kernel, rate(kernel, architecture, key_width, value_width, has_window, has_softcap, is_grouped))
        for kernel in KERNELS
    )
    return sorted(((kernel, known) for kernel, known in rates if known), key=lambda item: -item[1].together)
