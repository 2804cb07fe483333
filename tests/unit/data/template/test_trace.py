"""Texts keep the sources of their characters through the operations of templates, and never get a wrong source."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.data.template.sources import CONSTANT, UNKNOWN, Field, Piece, Unknown
from sft.data.template.trace import Text, concatenated, pieces_of

# Each source has its own letters, so the letters of a result show their source; all sources share spaces and a comma.
SHARED = " \n,"
LETTERS = {"asked": "abcß", "answered": "ABCé", "template": "<|>", "lost": "xyz"}
FIELDS = {name: Field(number, ("content",), name) for number, name in enumerate(("asked", "answered"))}


def texts(name: str) -> st.SearchStrategy[str]:
    return st.text(st.sampled_from(LETTERS[name] + SHARED), max_size=8)


def sources_of(text: str) -> list[tuple[str, str]]:
    """Each character with the name of its source.  Checks that exact pieces consist of the field's own characters."""
    pieces = pieces_of(text)
    assert sum(piece.length for piece in pieces) == len(text)
    result, at = [], 0
    for source, start, stop, length, _ in pieces:
        part = str.__str__(text)[at : at + length]
        if isinstance(source, Field):
            assert stop - start != length or source.text[start:stop] == part
        name = source.role if isinstance(source, Field) else "template" if source is CONSTANT else "lost"
        result += [(character, name) for character in part]
        at += length
    return result


def check(text: str) -> None:
    """Every letter has its own source."""
    for character, name in sources_of(text):
        assert character in LETTERS[name] + SHARED


class Two:
    """A traced text, and the same text without sources."""

    def __init__(self, traced: str, plain: str) -> None:
        self.traced, self.plain = traced, plain
        assert str.__eq__(traced, plain) and len(traced) == len(plain)
        check(traced)


def both(operation: Callable[..., Any], *parts: Two) -> list[Two]:
    """The results of an operation on traced and on plain texts, which must be equal."""
    traced, plain = operation(*(part.traced for part in parts)), operation(*(part.plain for part in parts))
    if isinstance(plain, str):
        traced, plain = [traced], [plain]
    assert len(traced) == len(plain)
    return [Two(one, other) for one, other in zip(traced, plain, strict=True)]


NUMBERS = st.integers(-4, 6)
NONE_OR_NUMBER = st.none() | NUMBERS


@st.composite
def operations(draw: st.DrawFn) -> tuple[Callable[..., Any], int]:
    """An operation that keeps sources, and the number of texts that it takes."""
    a, b, n = draw(NONE_OR_NUMBER), draw(NONE_OR_NUMBER), draw(NUMBERS)
    flag = draw(st.booleans())
    return draw(
        st.sampled_from(
            [
                (lambda x, y: x + y, 2),
                (lambda x, y: y.__radd__(x) if type(y) is Text else x + y, 2),
                (lambda x: x * max(n, 0), 1),
                (lambda x: max(n, 0) * x, 1),
                (lambda x: x[a:b], 1),
                (lambda x: x[n] if -len(x) <= n < len(x) else x, 1),
                (lambda x: [*x], 1),
                (lambda x: x.strip(), 1),
                (lambda x: x.lstrip(SHARED), 1),
                (lambda x: x.rstrip(SHARED + "ab"), 1),
                (lambda x, y: x.strip(str.__str__(y) or None), 2),
                (lambda x, y: x.removeprefix(y[:1]), 2),
                (lambda x: x.removeprefix(x[: abs(n)]), 1),
                (lambda x: x.removesuffix(x[len(x) - abs(n) :] if abs(n) <= len(x) else x), 1),
                (lambda x, y: x.removesuffix(y[:1]), 2),
                (lambda x: x.split(None, n), 1),
                (lambda x: x.rsplit(None, n), 1),
                (lambda x: x.split(",", n), 1),
                (lambda x: x.rsplit(" ", n), 1),
                (lambda x, y: x.split(y[:2] or ",", n), 2),
                (lambda x, y: x.rsplit(y[:1] or "a", n), 2),
                (lambda x: x.splitlines(flag), 1),
                (lambda x: x.partition(","), 1),
                (lambda x: x.rpartition(" "), 1),
                (lambda x, y: x.partition(y[:1] or ","), 2),
                (lambda x, y, z: x.replace(y[:1] or ",", z), 3),
                (lambda x, y: x.replace(" ", y, n), 2),
                (lambda x, y, z: x.join([y, z, y]), 3),
                (lambda x, y: y.join(x.split(",")), 2),
                (lambda x, y: y.join([*x]), 2),
                (lambda x: str(x), 1),
            ]
        )
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_operations_keep_each_letter_and_its_source(data: st.DataObject) -> None:
    """Applies twenty operations to each other's results, and the same operations to plain texts."""
    known = []
    for name in LETTERS:
        plain = data.draw(texts(name))
        source: Any = {"template": CONSTANT, "lost": UNKNOWN}.get(name, Field(0, ("content",), name, plain))
        known.append(Two(Text.of(plain, source), plain))
    for _ in range(20):
        operation, count = data.draw(operations())
        parts = [known[data.draw(st.integers(0, len(known) - 1))] for _ in range(count)]
        results = both(operation, *parts)
        known += [result for result in results if len(result.plain) < 60][:4]


@given(asked=texts("asked"), answered=texts("answered"), lost=texts("lost"))
def test_formats_keep_sources(asked: str, answered: str, lost: str) -> None:
    one, two = (
        Text.of(value, Field(0, ("content",), name, value))
        for name, value in (("asked", asked), ("answered", answered))
    )
    for template in ("<%s|%s>", "<%s|%s", "%s%s"):
        filled = Text.of(template, CONSTANT) % (one, two)
        assert str.__eq__(filled, template % (asked, answered))
        check(filled)
    for template, names in (("<{}|{}>", ()), ("{1}<{0}", ()), ("{a}|{b}", ("a", "b"))):
        args, kwargs = ((), {"a": one, "b": two}) if names else ((one, two), {})
        plain = template.format(*args, **kwargs)
        filled = Text.of(template, CONSTANT).filled(args, kwargs, plain)
        assert str.__eq__(filled, plain)
        check(filled)
    assert sources_of(Text.of("%%%s", CONSTANT) % one)[0] == ("%", "template")
    mixed = Text.of("<%s|%s>", CONSTANT) % (one, lost)
    assert [name for _, name in sources_of(mixed)].count("lost") == len(lost)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (Text.of("%5s", CONSTANT) % "ab", "   ab"),
        (Text.of("%r", CONSTANT) % "ab", "'ab'"),
        (Text.of("%s", CONSTANT) % None, "None"),
        (Text.of("ab", FIELDS["asked"]).zfill(4), "00ab"),
        (Text.of("ab", FIELDS["asked"]).center(4), " ab "),
        (Text.of("ab", FIELDS["asked"]).ljust(4), "ab  "),
        (Text.of("a\tb", FIELDS["asked"]).expandtabs(2), "a b"),
        (Text.of("ab", FIELDS["asked"]).swapcase(), "AB"),
        (Text.of("aß", FIELDS["asked"]).upper(), "ASS"),  # the result has another number of characters
        (Text.of("ab", FIELDS["asked"]).translate({97: "x"}), "xb"),
        (Text.of("ab", FIELDS["asked"])[::-1], "ba"),
        (Text.of("abc", FIELDS["asked"])[::2], "ac"),
        (Text.of("ab", FIELDS["asked"]).replace("", "-"), "-a-b-"),
        (Text.of("{:>3}", CONSTANT).filled(("a",), {}, "  a"), "  a"),
        (f"{Text.of('ab', FIELDS['asked'])}!", "ab!"),
        ("".join([Text.of("ab", FIELDS["asked"])]), "ab"),
        (Text("ab"), "ab"),
    ],
)
def test_what_is_not_defined_is_unknown(text: str, expected: str) -> None:
    assert str.__eq__(text, expected)
    assert all(isinstance(piece.source, Unknown) for piece in pieces_of(text))


def test_letters_keep_their_place_when_their_case_changes() -> None:
    text = Text.of("<", CONSTANT) + Text.of("ab c", FIELDS["asked"])
    expected = (Piece(CONSTANT, 0, 1, 1), Piece(FIELDS["asked"], 0, 4, 4))
    for changed, value in (
        (text.upper(), "<AB C"),
        (text.upper().lower(), "<ab c"),
        (text.title(), "<Ab C"),
        (text.capitalize(), "<ab c"),
    ):
        assert (changed, pieces_of(changed)) == (value, expected)


def test_parts_of_an_escaped_text_may_come_from_any_of_its_characters() -> None:
    escaped = Text('a\\"b', (Piece(FIELDS["asked"], 0, 3, 4),))
    assert pieces_of(escaped[1:3]) == (Piece(FIELDS["asked"], 0, 3, 2),)
    assert pieces_of(escaped + Text.of("c", CONSTANT))[0] == Piece(FIELDS["asked"], 0, 3, 4)


def test_parts_of_a_split_have_their_own_places() -> None:
    field = FIELDS["asked"]
    assert [pieces_of(part) for part in Text.of(" a  a b", field).split()] == [
        (Piece(field, 1, 2, 1),),
        (Piece(field, 4, 5, 1),),
        (Piece(field, 6, 7, 1),),
    ]
    assert [pieces_of(part) for part in Text.of("a,,a", field).split(",")] == [
        (Piece(field, 0, 1, 1),),
        (),
        (Piece(field, 3, 4, 1),),
    ]
    assert pieces_of(Text.of("aba", field).replace("b", Text.of("|", CONSTANT))) == (
        Piece(field, 0, 1, 1),
        Piece(CONSTANT, 0, 1, 1),
        Piece(field, 2, 3, 1),
    )


def test_empty_texts_have_no_pieces() -> None:
    assert pieces_of(Text.of("", CONSTANT)) == pieces_of("") == pieces_of(concatenated([])) == ()


def test_a_text_sent_to_another_process_is_a_plain_one() -> None:
    import pickle

    copy = pickle.loads(pickle.dumps(Text.of("ab", FIELDS["asked"])))
    assert type(copy) is str and copy == "ab"
    assert pieces_of(copy) == (Piece(UNKNOWN, 0, 2, 2),)
