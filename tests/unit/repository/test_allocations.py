"""The counter of allocations that checks predicted memory, with events written by hand."""

import pytest

from tests.allocations.categories import Event, Frame, Peak, category_of, peak

FORWARD: Frame = ("/x/sft/mcore/engine.py", "_forward_step")
LAYER: Frame = ("/x/sft/mcore/model/layer.py", "forward")
ROPE: Frame = ("/x/sft/mcore/attention/rope.py", "tables")
OFFLOAD: Frame = ("/x/sft/mcore/activations/offload.py", "fetch")


@pytest.mark.parametrize(
    "frames, expected",
    [
        ((), "working"),  # autograd's thread has no Python
        ((LAYER, FORWARD), "saved by layers"),
        ((LAYER,), "working"),  # recomputed in backward
        ((ROPE, FORWARD), "rotary"),
        ((ROPE, LAYER, FORWARD), "saved by layers"),  # rotated queries
        ((("/x/sft/mcore/modules/norm.py", "forward"), FORWARD), "working"),  # the last norm
        ((OFFLOAD,), "saved by layers"),
    ],
)
def test_what_a_block_is_for(frames: tuple[Frame, ...], expected: str) -> None:
    assert category_of(frames) == expected


def test_the_moment_with_most_bytes() -> None:
    """10 bytes of weights and 4 of another tensor exist; 7 are saved, the 4 are freed, 6 work, the 7 are freed, 5
    work."""
    saved = (LAYER, FORWARD)
    events = [Event(1, 7, saved), Event(99, -4), Event(2, 6), Event(1, -7), Event(2, -6), Event(1, 5), Event(3, 6)]
    found = peak(events, {"weights": 10, "other": 4})
    assert found == Peak({"weights": 10, "saved by layers": 7, "working": 6}, "backward", found.largest)
    assert found.total == 23
    # without "other" in `standing`, the free of the 4 bytes is ignored
    assert peak(events, {"weights": 10}).total == 23
