"""The table of kernel rates: its numbers, its gaps, and the order that follows from it."""

import pytest

from sft.layers.kernel_rates import (
    BLACKWELL,
    FFPA,
    FLASH2,
    FLASH3,
    FLASH4,
    HOPPER,
    KERNELS,
    PLAIN,
    TRANSFORMER_ENGINE,
    Rate,
    architecture_of,
    fastest_first,
    rate,
)


@pytest.mark.parametrize(
    "kernel, widths, rates",
    [
        (FLASH2, (64, 64), (319, 292)),
        (FLASH2, (128, 128), (357, 324)),
        (FLASH2, (192, 128), (271, 233)),
        (FLASH2, (256, 256), (287, 265)),
        (FLASH4, (64, 64), (537, 542)),
        (FLASH4, (128, 128), (667, 592)),
        (FLASH4, (192, 128), (724, 494)),
        (FLASH4, (256, 256), (705, 381)),
        (FFPA, (512, 512), (603, 221)),
    ],
)
def test_rates_of_the_h200(kernel: str, widths: tuple[int, int], rates: tuple[float, float]) -> None:
    """The rates of docs/numbers/h200.md."""
    known = rate(kernel, HOPPER, *widths)
    assert known is not None and (known.forward, known.backward) == rates
    assert known.source.startswith("measured") and known.highest is None


def test_a_rate_of_a_gb200_is_scaled_to_a_b200() -> None:
    """1593 and 1221 of 2,450, at 2,250."""
    known = rate(TRANSFORMER_ENGINE, BLACKWELL, 128, 128)
    assert known is not None and (known.forward, known.backward) == (1463, 1121)


def test_other_widths_take_the_next_row() -> None:
    assert rate(FLASH4, HOPPER, 80, 80) == rate(FLASH4, HOPPER, 128, 128)
    assert rate(FLASH2, HOPPER, 192, 192) == rate(FLASH2, HOPPER, 256, 256)


def test_what_no_kernel_takes() -> None:
    assert rate(FLASH3, BLACKWELL, 128, 128) is None
    assert rate(FLASH4, BLACKWELL, 256, 256) is None
    assert rate(FLASH4, HOPPER, 512, 512) is None
    assert rate(FFPA, HOPPER, 256, 256) is None
    assert rate(FFPA, HOPPER, 512, 512, has_window=True) is None
    assert rate(FLASH2, HOPPER, 128, 128, has_softcap=True) is None
    assert rate(FLASH2, None, 128, 128) is None


def test_order() -> None:
    def order(*arguments: object, **options: bool) -> list[str]:
        return [kernel for kernel, _ in fastest_first(*arguments, **options)]  # type: ignore[arg-type]

    assert order(HOPPER, 128, 128) == [FLASH4, FLASH3, TRANSFORMER_ENGINE, FLASH2, PLAIN]
    assert order(HOPPER, 256, 256)[:2] == [FLASH3, FLASH4]  # FlashAttention-4's backward pass is slow there
    assert order(HOPPER, 192, 128)[0] == FLASH4
    assert order(HOPPER, 512, 512) == [FFPA, PLAIN]
    assert order(HOPPER, 128, 128, has_softcap=True) == [FLASH4, PLAIN]
    assert order(BLACKWELL, 256, 256) == [TRANSFORMER_ENGINE, FLASH2, PLAIN]
    assert order(BLACKWELL, 128, 128)[0] == FLASH4
    assert order(None, 128, 128) == []


def test_a_range_names_no_measurement() -> None:
    """Every rate names its source, and only a rate that nobody has published is a range."""
    for architecture in (HOPPER, BLACKWELL, architecture_of(8)):
        for kernel in KERNELS:
            for widths in ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512)):
                for softcap in (False, True):
                    known = rate(kernel, architecture, *widths, has_softcap=softcap)
                    if known is None:
                        continue
                    assert known.source.split(" ")[0] in ("measured", "published:", "assumed:")
                    if known.highest is not None:
                        assert known.highest[0] >= known.forward and known.highest[1] > known.backward
                        assert not known.source.startswith("measured")


def test_together() -> None:
    assert Rate(400, 400, "").together == pytest.approx(400)
    assert Rate(100, 250, "").together == pytest.approx(175)  # 1 of 100, 2.5 of 250: 3.5 in 0.02


def test_text() -> None:
    assert Rate(667, 592, "measured here").text() == "667 / 592 TFLOP/s, measured here"
    assert Rate(400, 360, "assumed", (500, 450)).text() == "400 to 500 / 360 to 450 TFLOP/s, assumed"


def test_architectures() -> None:
    assert [architecture_of(major) for major in (7, 8, 9, 10, 12)] == [None, "ampere", "hopper", "blackwell", None]
