"""What a template is known to write between the texts of a chat; learnt from renderings, and followed through others.

    user/content/ -> assistant/content/    <|im_end|>\\n<|im_start|>assistant

Decides whether a rendering is nothing but texts of the chat and what is known to stand between them: then each text
that was not needed for that is left out.  Never guesses: where anything else stands there, the answer is that it is
not known.  Does not render (`omitted.py`).
"""

from collections.abc import Sequence

from sft.data.chat.texts import NUM_FORMS, ChatText

_START, _END = "start", "end"
_MARGIN = 64  # spaces that a template may write or take away
_MOST_CHARACTERS = 2_000_000  # of all that is known; a template that never repeats itself teaches nothing more


class Between:
    """What one template writes between texts.

    forms  by label, how the template writes its texts (`texts_of`)
    """

    def __init__(self) -> None:
        self.forms: dict[str, int] = {}
        # By two labels what is known to stand between them, and how far behind the one the other begins at most.
        self._known: dict[tuple[str, str], tuple[set[str], int]] = {}
        self._moved: set[str] = set()  # labels whose texts a template writes out of the order of the messages
        self._characters = 0

    def left_out(self, text: str, texts: Sequence[ChatText], asides: Sequence[str]) -> list[ChatText] | None:
        """The texts that a rendering does not hold; None where that is not known.

        All between two texts must be known for their labels, so a short text that also stands in a header, or in
        another text, is not taken for itself.
        """
        at, before, last_start = 0, _START, 0  # last_start: of the text before
        skipped: list[tuple[ChatText, int]] = []
        doubtful: list[tuple[ChatText, int, int]] = []  # texts, and where else they may stand
        for part in texts:
            if skipped and self._moved:
                at, before = self._catch_up(text, skipped, at, before, asides)
            end = self._end_of(text, part, at, before, asides)
            if end < 0:
                skipped.append((part, at))
                continue
            if skipped:
                for other, since in reversed(skipped):
                    if since != at:
                        break
                    doubtful.append((other, last_start, end))
            at, before, last_start = end, part.label, end - len(part.written)
        if skipped and self._moved:
            at, before = self._catch_up(text, skipped, at, before, asides)
        ends = self._known.get((before, _END))
        if ends is None or _bare(text[at:], asides) not in ends[0]:
            return None
        if not skipped:
            return []
        missed = [part for part, _ in skipped]
        doubtful += [
            (part, last_start, len(text)) for part, since in skipped if since == at or part.label in self._moved
        ]
        for part, since, end in doubtful:
            is_moved = part.label in self._moved
            if (not is_moved or part in missed) and text.find(part.written, 0 if is_moved else since, end) >= 0:
                return None  # it may be this text that stands there, and another one that does not
        return missed

    def _catch_up(
        self, text: str, skipped: list[tuple[ChatText, int]], at: int, before: str, asides: Sequence[str]
    ) -> tuple[int, str]:
        """Takes the texts from `skipped` that the template writes here, later than where their message stands."""
        waiting = [entry for entry in skipped if entry[0].label in self._moved]
        while waiting:
            ends = [(self._end_of(text, part, at, before, asides), (part, since)) for part, since in waiting]
            end, entry = next((reached for reached in ends if reached[0] >= 0), (-1, None))
            if entry is None:
                break
            skipped.remove(entry)
            waiting.remove(entry)
            at, before = end, entry[0].label
        return at, before

    def _end_of(self, text: str, part: ChatText, at: int, before: str, asides: Sequence[str]) -> int:
        """Where a text ends that stands next in the rendering, behind `at`; -1 where it does not."""
        label, written, _ = part
        known = self._known.get((before, label))
        if known is None:
            return -1
        limit = at + known[1] + len(written)
        start = text.find(written, at, limit)
        while start >= 0:
            between = text[at:start]
            if between.strip() in known[0] or (asides and _bare(between, asides) in known[0]):
                return start + len(written)
            start = text.find(written, start + 1, limit)
        return -1

    def learn(self, text: str, texts: Sequence[ChatText], asides: Sequence[str], unknown: str) -> None:
        """What stands between texts that a rendering holds, each once.

        unknown  where it stands between two texts, one of them is written twice, and nothing is learnt of that place
        """
        present = [(start, part) for part in texts if (start := text.find(part.written)) >= 0]
        first = len(text)  # of those that follow
        for start, part in reversed(present):
            if start > first:
                self._moved.add(part.label)
            first = min(first, start)
        at, before = 0, _START
        for start, part in [*sorted(present), (len(text), ChatText(_END, "", 0))]:
            between = _bare(text[at:start], asides)
            if start >= at and unknown not in between and self._characters < _MOST_CHARACTERS:
                known, reach = self._known.get((before, part.label), (set(), 0))
                self._known[before, part.label] = known | {between}, max(reach, start - at + _MARGIN)
                self._characters += len(between)
            at, before = max(at, start + len(part.written)), part.label

    def next_form(self, label: str) -> None:
        """Tries the next way of writing the texts of a label; after the last comes the first."""
        self.forms[label] = (self.forms.get(label, 0) + 1) % NUM_FORMS.get(label, 2)


def _bare(between: str, asides: Sequence[str]) -> str:
    """Without spaces around it, nor what differs from chat to chat."""
    for aside in asides:
        between = between.replace(aside, "\0")
    return between.strip()
