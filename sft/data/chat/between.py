"""What a template is known to write between the texts of a chat; learnt from renderings, and followed through others.

    user/content/ -> assistant/content/    <|im_end|>\\n<|im_start|>assistant

Decides whether a rendering is nothing but texts of the chat and what is known to stand between them: then each text
that was not needed for that is left out.  Never guesses: where anything else stands there, the answer is that it is
not known.  Does not render (`omitted.py`).
"""

from collections.abc import Sequence

from sft.data.chat.texts import NUM_FORMS, Text

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

    def left_out(self, text: str, texts: Sequence[Text], asides: Sequence[str]) -> list[Text] | None:
        """The texts that a rendering does not hold; None where that is not known.

        All between two texts must be known for their labels, so a short text that also stands in a header, or in
        another text, is not taken for itself.
        """
        at, before, begun = 0, _START, 0  # begun: where the text before begins
        skipped: list[tuple[Text, int]] = []
        doubtful: list[tuple[Text, int, int]] = []  # texts, and where else they may stand
        for one in texts:
            if skipped and self._moved:
                at, before = self._catch_up(text, skipped, at, before, asides)
            end = self._end_of(text, one, at, before, asides)
            if end < 0:
                skipped.append((one, at))
                continue
            if skipped:
                for other, since in reversed(skipped):
                    if since != at:
                        break
                    doubtful.append((other, begun, end))
            at, before, begun = end, one[0], end - len(one[1])
        if skipped and self._moved:
            at, before = self._catch_up(text, skipped, at, before, asides)
        ends = self._known.get((before, _END))
        if ends is None or _bare(text[at:], asides) not in ends[0]:
            return None
        if not skipped:
            return []
        missed = [one for one, _ in skipped]
        doubtful += [(one, begun, len(text)) for one, since in skipped if since == at or one.label in self._moved]
        for one, since, end in doubtful:
            is_moved = one.label in self._moved
            if (not is_moved or one in missed) and text.find(one.said, 0 if is_moved else since, end) >= 0:
                return None  # it may be this text that stands there, and another one that does not
        return missed

    def _catch_up(
        self, text: str, skipped: list[tuple[Text, int]], at: int, before: str, asides: Sequence[str]
    ) -> tuple[int, str]:
        """Takes the texts from `skipped` that the template writes here, later than where their message stands."""
        waiting = [entry for entry in skipped if entry[0].label in self._moved]
        while waiting:
            ends = [(self._end_of(text, one, at, before, asides), (one, since)) for one, since in waiting]
            end, entry = next((found for found in ends if found[0] >= 0), (-1, None))
            if entry is None:
                break
            skipped.remove(entry)
            waiting.remove(entry)
            at, before = end, entry[0].label
        return at, before

    def _end_of(self, text: str, one: Text, at: int, before: str, asides: Sequence[str]) -> int:
        label, said, _ = one
        known = self._known.get((before, label))
        if known is None:
            return -1
        limit = at + known[1] + len(said)
        start = text.find(said, at, limit)
        while start >= 0:
            between = text[at:start]
            if between.strip() in known[0] or (asides and _bare(between, asides) in known[0]):
                return start + len(said)
            start = text.find(said, start + 1, limit)
        return -1

    def learn(self, text: str, texts: Sequence[Text], asides: Sequence[str], unknown: str) -> None:
        """What stands between texts that a rendering holds, each once.

        unknown  where it stands between two texts, one of them is written twice, and nothing is learnt of that place
        """
        found = [(place, one) for one in texts if (place := text.find(one.said)) >= 0]
        first = len(text)  # of those that follow
        for place, one in reversed(found):
            if place > first:
                self._moved.add(one.label)
            first = min(first, place)
        at, before = 0, _START
        for place, one in [*sorted(found), (len(text), Text(_END, "", 0))]:
            between = _bare(text[at:place], asides)
            if place >= at and unknown not in between and self._characters < _MOST_CHARACTERS:
                known, reach = self._known.get((before, one.label), (set(), 0))
                self._known[before, one.label] = known | {between}, max(reach, place - at + _MARGIN)
                self._characters += len(between)
            at, before = max(at, place + len(one.said)), one.label

    def next_form(self, label: str) -> None:
        """Tries the next way of writing the texts of a label; after the last comes the first."""
        self.forms[label] = (self.forms.get(label, 0) + 1) % NUM_FORMS.get(label, 2)


def _bare(between: str, asides: Sequence[str]) -> str:
    """Without spaces around it, nor what differs from chat to chat."""
    for aside in asides:
        between = between.replace(aside, "\0")
    return between.strip()
