"""Makes the questions of a suite: evidence, the text around it, what is asked, and the answer.

    needle       one number in a text of sentences
    needles      four numbers, asked in another order
    keys         one number among many of the same form, with other keys
    values       four numbers of one key, asked in the order of the text
    association  a person, asked by a word that the text does not contain (the city of a landmark)
    tracing      the number that a chain of four variables passes on
    counting     how often something happens
    documents    a word in a second document, which a first document leads to
    code         the value of a constant that a function returns, defined far before the function
    records      a field of one of many JSON records

`compose.py` decides how many passages surround the evidence.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from sft.data.long.draws import Draws
from sft.data.long.words import BUILDINGS, COLOURS, FIRST_NAMES, FLOWERS, LANDMARKS, TOWNS, KeyNames, Persons, sentence

_ALONE = "Answer with the number alone."
_FOUR = "Answer with the four numbers alone, separated by commas."
_CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"
MOST_COUNTED = 9  # a count is one digit
_PERSONS = 8  # in a block of documents


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """A question without its length.

    opening   the first line of the user's message
    evidence  lines of which each is needed for the answer, in the order of the text; each occurs once in the message
    others    further lines at random places, which look like evidence of the answer and are none
    filler    passage number i, from 0; equal for every call.  Contains neither evidence nor the answer's key
    question  the end of the user's message
    answer    the assistant's message
    """

    opening: str
    evidence: tuple[str, ...]
    others: tuple[str, ...] = ()
    filler: Callable[[int], str]
    question: str
    answer: str


class _Passages:
    """The passages that a function draws one after the other, kept so that each is drawn once."""

    def __init__(self, make: Callable[[int], str]) -> None:
        self._make, self._made = make, list[str]()

    def __call__(self, i: int) -> str:
        while len(self._made) <= i:
            self._made.append(self._make(len(self._made)))
        return self._made[i]


def _sentences(draws: Draws) -> _Passages:
    return _Passages(lambda i: sentence(draws))


_BOOK = "Read the following text.  A question about it comes at the end."


def _needle(draws: Draws) -> Puzzle:
    key, (number,) = KeyNames(draws)[0], draws.numbers(6, 1)
    return Puzzle(
        opening=_BOOK,
        evidence=(f"The password of {key} is {number}.",),
        filler=_sentences(draws),
        question=f"What is the password of {key}?  {_ALONE}",
        answer=str(number),
    )


def _needles(draws: Draws) -> Puzzle:
    keys, numbers = KeyNames(draws), draws.numbers(6, 4)
    asked = draws.distinct(range(4), 4)
    named = [keys[i] for i in asked]
    return Puzzle(
        opening=_BOOK,
        evidence=tuple(f"The password of {keys[i]} is {number}." for i, number in enumerate(numbers)),
        filler=_sentences(draws),
        question=f"What are the passwords of {', '.join(named[:3])} and {named[3]}, in this order?  {_FOUR}",
        answer=", ".join(str(numbers[i]) for i in asked),
    )


def _keys(draws: Draws) -> Puzzle:
    keys, numbers = KeyNames(draws), draws.order(900_000)

    def line(i: int) -> str:
        return f"The password of {keys[i]} is {100_000 + numbers[i]}."

    return Puzzle(
        opening=_BOOK,
        evidence=(line(0),),
        filler=_Passages(lambda i: line(i + 1)),
        question=f"What is the password of {keys[0]}?  {_ALONE}",
        answer=str(100_000 + numbers[0]),
    )


def _values(draws: Draws) -> Puzzle:
    key, numbers = KeyNames(draws)[0], draws.numbers(6, 4)
    return Puzzle(
        opening=_BOOK,
        evidence=tuple(f"One of the passwords of {key} is {number}." for number in numbers),
        filler=_sentences(draws),
        question=f"What are the four passwords of {key}, in the order of the text?  {_FOUR}",
        answer=", ".join(map(str, numbers)),
    )


def _association(draws: Draws) -> Puzzle:
    (landmark, city), *others = draws.distinct(LANDMARKS, 4)
    name, *names = draws.distinct(FIRST_NAMES, 4)
    return Puzzle(
        opening=_BOOK,
        evidence=(f"{name} rents a room right beside {landmark}.",),
        others=tuple(f"{other} rents a room right beside {where}." for other, (where, _) in zip(names, others)),
        filler=_sentences(draws),
        question=f"Who lives in {city}?  Answer with the name alone.",
        answer=name,
    )


def _tracing(draws: Draws) -> Puzzle:
    first, second = draws.numbers(5, 2)
    names = ["".join(letters) for letters in (draws.distinct(_CONSONANTS, 5) for _ in range(64))]
    *chain, other, last_other = list(dict.fromkeys(names))[:7]
    passed = [f"The variable {b} gets the value of {a}." for a, b in zip(chain, chain[1:])]
    return Puzzle(
        opening=_BOOK,
        evidence=(f"The variable {chain[0]} gets the value {first}.", *passed),
        others=(
            f"The variable {other} gets the value {second}.",
            f"The variable {last_other} gets the value of {other}.",
        ),
        filler=_sentences(draws),
        question=f"Which number is the value of the variable {chain[-1]}?  {_ALONE}",
        answer=str(first),
    )


def _counting(draws: Draws) -> Puzzle:
    number, towns = 2 + draws.below(MOST_COUNTED - 1), draws.distinct(TOWNS, 2 * MOST_COUNTED)
    num_others = 1 + draws.below(MOST_COUNTED)
    return Puzzle(
        opening=_BOOK,
        evidence=tuple(f"A bell rings in {town}." for town in towns[:number]),
        others=tuple(f"A horn sounds in {town}." for town in towns[MOST_COUNTED : MOST_COUNTED + num_others]),
        filler=_sentences(draws),
        question=f"In how many towns of the text does a bell ring?  {_ALONE}",
        answer=str(number),
    )


def _documents(draws: Draws) -> Puzzle:
    keys, persons, flowers = KeyNames(draws), Persons(draws), draws.distinct(FLOWERS, len(FLOWERS))
    answer = flowers.pop()

    def report(i: int) -> str:
        return f"Report.  {sentence(draws)}  The keeper of {keys[i]} is {persons[i]}.  {sentence(draws)}"

    def note(i: int, flower: str) -> str:
        return f"Note.  {sentence(draws)}  In the office of {persons[i]} stands a vase with one {flower}."

    orders: list[list[int]] = []

    def document(i: int) -> str:
        """A report or a note.  Each block of 16 documents has the reports and notes of 8 persons, in random order."""
        block, at = divmod(i, 2 * _PERSONS)
        if at == 0:
            orders.append(draws.distinct(range(2 * _PERSONS), 2 * _PERSONS))
        person, is_note = divmod(orders[block][at], 2)
        person += 1 + _PERSONS * block
        return note(person, draws.choice(flowers)) if is_note else report(person)

    evidence = [report(0), note(0, answer)]
    return Puzzle(
        opening=f"Read the following documents.  {_BOOK.partition('  ')[2]}",
        evidence=tuple(evidence if draws.below(2) else evidence[::-1]),
        filler=_Passages(document),
        question=f"Which flower stands in the office of the keeper of {keys[0]}?  Answer with one word.",
        answer=answer,
    )


def _code(draws: Draws) -> Puzzle:
    keys, numbers = draws.order(len(COLOURS) * len(BUILDINGS) * len(FLOWERS)), draws.order(90_000)

    def name(i: int) -> str:
        number, colour = divmod(keys[i], len(COLOURS))
        flower, building = divmod(number, len(BUILDINGS))
        suffix = f"_{i // keys.size}" if i >= keys.size else ""
        return f"{COLOURS[colour]}_{BUILDINGS[building]}_{FLOWERS[flower]}{suffix}"

    def constant(i: int) -> str:
        return f"LIMIT_{name(i).upper()} = {10_000 + numbers[i]}"

    def passage(i: int) -> str:
        if draws.below(2):
            return constant(1 + i)
        return f"def read_{name(1 + i)}(x):\n    return x.{draws.choice(BUILDINGS)}.{draws.choice(COLOURS)}"

    return Puzzle(
        opening="Read the following Python module.  A question about it comes at the end.",
        evidence=(constant(0),),
        filler=_Passages(passage),
        question=(
            f"def read_{name(0)}():\n    return LIMIT_{name(0).upper()}\n\n"
            f"Which number does read_{name(0)}() return?  {_ALONE}"
        ),
        answer=str(10_000 + numbers[0]),
    )


def _records(draws: Draws) -> Puzzle:
    ids, shelves = draws.order(9_000_000), draws.order(90_000)

    def record(i: int) -> str:
        colour, building, town = (draws.choice(words) for words in (COLOURS, BUILDINGS, TOWNS))
        content = {"id": f"K{1_000_000 + ids[i]}", "town": town, "place": building, "label": colour}
        return json.dumps({**content, "shelf": 10_000 + shelves[i]}) + ","

    return Puzzle(
        opening="Read the following JSON records.  A question about them comes at the end.\n[",
        evidence=(record(0),),
        filler=_Passages(lambda i: record(1 + i)),
        question=f'null]\nWhat is the "shelf" of the record with the id K{1_000_000 + ids[0]}?  {_ALONE}',
        answer=str(10_000 + shelves[0]),
    )


_MAKERS: dict[str, Callable[[Draws], Puzzle]] = {
    "needle": _needle,
    "needles": _needles,
    "keys": _keys,
    "values": _values,
    "association": _association,
    "tracing": _tracing,
    "counting": _counting,
    "documents": _documents,
    "code": _code,
    "records": _records,
}
TASKS = tuple(_MAKERS)


def puzzle(task: str, draws: Draws) -> Puzzle:
    """A question of the task, one of `TASKS`."""
    return _MAKERS[task](draws)
