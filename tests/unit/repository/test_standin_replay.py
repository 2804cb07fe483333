"""The model of hardware queues, with recordings written by hand: streams a and b, kernels of 400 us."""

from tests.standin.replay import Entry, replay

MS = 50_000_000  # bytes that a copy moves in 1 ms
KERNEL_MS = 0.4


def _entries(text: str) -> list[Entry]:
    """ "a k 0, b h 5" -> a kernel on stream a, then a copy of 5 bytes to the host on stream b."""
    rows = (row.split() for row in text.split(","))
    return [Entry(kind, stream, int(number)) for stream, kind, number in rows]


def _starts_ms(text: str, *, kernel_queues: int, copy_queues: int) -> list[float]:
    """The start of each piece of work, in the order of the recording."""
    pieces = replay(_entries(text), kernel_queues=kernel_queues, copy_queues=copy_queues)
    return [round(1e3 * piece.start, 6) for piece in sorted(pieces, key=lambda piece: piece.index)]


def test_a_stream_works_in_its_order_and_follows_the_events_that_it_waits_for() -> None:
    # The copy on b follows the first kernel on a; the third kernel on a follows the copy on b, which takes 1 ms.
    text = f"a k 0, a r 1, b w 1, b h {MS}, b r 2, a k 0, a w 2, a k 0"
    assert _starts_ms(text, kernel_queues=8, copy_queues=8) == [0.0, KERNEL_MS, KERNEL_MS, 1.4]


def test_an_event_of_before_the_recording_has_ended() -> None:
    assert _starts_ms("a w 7, a k 0", kernel_queues=8, copy_queues=8) == [0.0]


def test_directions_of_copies_and_messages_have_engines_of_their_own() -> None:
    text = f"a h {MS}, b d {MS}, c m {MS}, d k 0, e h {MS}"
    assert _starts_ms(text, kernel_queues=8, copy_queues=8) == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_in_one_queue_a_copy_that_waits_holds_up_the_copies_behind_it() -> None:
    # The copy on a waits for two kernels on c; the copy on b waits for nothing.
    text = f"c k 0, c k 0, c r 1, a w 1, a h {MS}, b d {MS}"
    assert _starts_ms(text, kernel_queues=8, copy_queues=8) == [0.0, KERNEL_MS, 2 * KERNEL_MS, 0.0]
    assert _starts_ms(text, kernel_queues=8, copy_queues=1) == [0.0, KERNEL_MS, 2 * KERNEL_MS, 2 * KERNEL_MS]


def test_in_one_queue_a_message_starts_before_the_kernel_that_was_launched_after_it() -> None:
    # The message on b waits for the first kernel on a.  The second kernel on a waits for nothing, but was launched
    # after the message.
    text = f"a k 0, a r 1, b w 1, b m {MS}, c k 0"
    assert _starts_ms(text, kernel_queues=8, copy_queues=8) == [0.0, KERNEL_MS, KERNEL_MS]
    held_up = f"a m {3 * MS}, a r 1, b w 1, b m {MS}, c k 0"  # messages of 0.5 ms and 0.17 ms
    assert _starts_ms(held_up, kernel_queues=8, copy_queues=8) == [0.0, 0.5, 0.0]
    assert _starts_ms(held_up, kernel_queues=1, copy_queues=8) == [0.0, 0.5, 0.5]
