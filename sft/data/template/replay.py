"""Keeps the results of a template's statements, and uses them in other renderings of the same chat.

Decides when a result is used again: if all values that the statement reads are equal.  `iterations.py` finds these
values, `value_keys.py` compares them, and `compiler.py` inserts the calls.

    kept = KeptResults()
    template.rendered(inputs of 3 messages, kept=kept)    executes 3 iterations
    template.rendered(inputs of 5 messages, kept=kept)    uses the results of 3, executes 2

Where `lookahead.py` proves that more messages do not change the first iterations of a loop, their results are used at
once, without comparing the keys of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from sft.data.template.limits import TooMuch
from sft.data.template.loop_walk import LoopPass, Result, Walk, moved, num_same
from sft.data.template.rendering import Output
from sft.data.template.value_keys import Incomparable, ValueKeys, leave, value_of

MOST_KEPT = 50_000_000  # characters; further results are not kept
TRIES = 200  # executions of a statement without any use of its results, after which they are not kept

_Changes = tuple[tuple[Any, str | None], ...]  # the namespace and attribute of each change, or the list and None
_Outcome = Callable[[Any], tuple[Any, ...]]  # the values of a query's conditions for an item
# `Lookahead`: reach, behind, lists, values, and each query with the position of its list
_Lookahead = tuple[int, int, tuple[Any, ...], Callable[[], tuple[Any, ...]], tuple[tuple[str, int, _Outcome], ...]]


@dataclass
class KeptResults:
    """The results of statements in renderings of one chat, with equal tools, documents and variables.

    results     {key of a statement's values: its result}
    starts      {values of names at the start of a statement: a number}
    outcomes    {(query, id of an item): the values of the query's conditions}
    passes      {values at the start of a loop: its iterations}
    tries       {number of a statement: executions since a result of it was last used, from -TRIES}
    characters  number of characters of all results; executed, replayed, written: statements that were executed, or
                whose results were used again, and characters that executed ones wrote; copied: characters of results
                that were used again
    """

    results: dict[tuple[Any, ...], Result] = field(default_factory=dict)
    starts: dict[tuple[Any, ...], int] = field(default_factory=dict)
    outcomes: dict[tuple[str, int], Any] = field(default_factory=dict)
    passes: dict[tuple[Any, ...], LoopPass] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    characters: int = 0
    executed: int = 0
    written: int = 0
    replayed: int = 0
    copied: int = 0


class _Start(NamedTuple):
    """The number in `KeptResults.starts` of the values of names before a statement; the ids of lists among them."""

    number: int
    lists: list[int]


class _Statement(NamedTuple):
    """A statement that is being executed.  key: the key of its result; None: the result is not kept

    changes  the namespaces and lists that it may change
    before   their values before it
    parts, runs, start  number of parts, runs and characters of the output before it
    """

    key: tuple[Any, ...] | None
    changes: _Changes
    before: list[Any]
    parts: int
    runs: int
    start: int


class Replay(ValueKeys):
    """The methods that a compiled template calls before and after each statement whose result may be kept.

    output  the parts of the rendering that have been written so far
    kept    the results of other renderings of the chat; None: every statement is executed
    """

    output: Output
    kept: KeptResults | None

    def begin_output(self, output: Output, kept: KeptResults | None) -> None:
        """Starts a rendering.  Called after `begin`."""
        self.output, self.kept = output, kept
        self._statement: _Statement | None = None
        self._at_start: _Start | None = None
        self._walk: Walk | None = None

    def begin_loop(
        self, number: int, items: Any, names: tuple[Any, ...], changes: _Changes, looks: _Lookahead | None = None
    ) -> Any:
        """Returns the iterable of a loop, and compares the loop with that of an earlier rendering.

        number   number of the loop in the template
        names    the values of its `Reads.names`
        changes  the namespace or list of each of its `Reads.changes`
        looks    its `Lookahead`; None: not known
        """
        self._statement = self._at_start = self._walk = None
        kept = self.kept
        if kept is None or kept.tries.get(number, 0) > TRIES:
            return self.loop_items(items)
        self._at_start = start = self._start(names)
        if start is None or looks is None or type(items) is not list:
            return self.loop_items(items)
        walk = self._walk = Walk(self.loop_items(items))
        try:
            self._compare_pass(walk, (number, start.number), changes, looks)
        except TooMuch:
            raise
        except Exception:  # the template may never evaluate the expression that raises
            walk.now = walk.earlier = None
        return walk

    def _compare_pass(self, walk: Walk, position: tuple[int, int], changes: _Changes, looks: _Lookahead) -> None:
        """Finds how many of the first iterations of a loop are the same as in an earlier rendering."""
        reach, walk.behind, lists, values, queries = looks
        before = [value_of(*change) for change in changes]
        key = self.key((*before, *values()), [])
        assert self.kept is not None
        passes = self.kept.passes
        if key is None or any(type(value) is not list for value in lists) or list in map(type, before):
            return
        walk.now, walk.earlier = LoopPass(walk.items, lists), passes.get((*position, key))
        passes[(*position, key)] = walk.now
        if walk.earlier is None:
            return
        walk.num_equal = walk.earlier.num_equal(walk.items, lists, reach)
        for number, at, outcome in queries:
            both = walk.earlier.lists[at], lists[at]
            same = num_same(*both)
            tail = max(both, key=len)[max(same - 1, 0) :]  # from the last item that both have on
            if not same or len(self.query(number, tail, outcome)) > 1:
                walk.num_equal = 0

    def repeats(
        self,
        number: int,
        item: Any,
        changes: _Changes,
        keys: Callable[[], tuple[Any, ...]],
        loop: Any = None,
        names: tuple[Any, ...] | None = None,
    ) -> bool:
        """Whether a kept result was used instead of a statement.  If False, the template executes the statement next.

        item     the item of the loop; None: the statement is no loop
        changes  the namespace or list of each of `Reads.changes`
        keys     returns the values of `Reads.keys`
        loop     the variable `loop`; None: the template does not use it
        names    the values of `Reads.names`; None: those of `begin_loop`
        """
        kept, walk = self.kept, self._walk
        if kept is None:
            return False
        if walk is not None:
            walk.position += 1
            if self._statement is not None:  # the previous iteration ended early, with `continue` or `break`
                walk.now = walk.earlier = None
            if walk.position == walk.behind and walk.position < walk.num_equal and self._skip(walk, changes, loop):
                return True
        self._statement = None
        start = self._at_start if names is None else self._start(names)
        key = None if start is None else self._key_of(number, start, item, changes, keys)
        result = None if key is None else kept.results.get(key)
        parts, runs = self.output
        at = runs[-1].end if runs else 0
        if result is None or key is None:
            kept.tries[number] = kept.tries.get(number, 0) + 1
            before = [] if key is None else [value_of(*change) for change in changes]
            self._statement = _Statement(key, changes, before, len(parts), len(runs), at)
            return False
        if result.start != at:
            result = kept.results[key] = moved(result, at)
        parts.append(result.text)
        runs += result.runs
        for (owner, attribute), value in zip(changes, result.left, strict=True):
            leave(owner, attribute, value)
        kept.replayed += 1
        kept.copied += len(result.text)
        kept.tries[number] = -TRIES
        self._stepped(key, result)
        self.tick(len(result.text))
        return True

    def end_statement(self) -> None:
        """Ends a statement that was executed, and keeps its result."""
        statement, kept = self._statement, self.kept
        self._statement = None
        if statement is None or kept is None:
            return
        parts, runs = self.output
        text = "".join(parts[statement.parts :])
        kept.executed += 1
        kept.written += len(text)
        if statement.key is None:
            if self._walk is not None:
                self._walk.now = self._walk.earlier = None
            return
        after = [value_of(*change) for change in statement.changes]
        is_same = all(a is b for a, b in zip(statement.before, after) if list in (type(a), type(b)))
        lists: list[int] = []
        is_same = is_same and self.key(tuple(after), lists) is not None
        is_flat = set(lists) <= {id(value) for value in after if type(value) is list}
        if kept.characters + len(text) > MOST_KEPT or not is_same or not is_flat:  # an inner list may change later
            if self._walk is not None:
                self._walk.now = self._walk.earlier = None
            return
        kept.characters += len(text)
        left = [list(value) if type(value) is list else value for value in after]
        result = Result(statement.start, text, runs[statement.runs :], left)
        kept.results[statement.key] = result
        self._stepped(statement.key, result)

    def query(self, number: str, items: Any, outcome: _Outcome) -> tuple[Any, ...]:
        """The combinations of values of a query's conditions, each once, in falling order of the last item with it."""
        assert self.kept is not None
        known = self.kept.outcomes
        outcomes: dict[Any, None] = {}
        self.step(len(items))
        for item in reversed(items):
            key = number, id(item)
            if key not in known:
                if id(item) not in self.messages:
                    raise Incomparable
                known[key] = tuple(bool(test) for test in outcome(item))
            outcomes.setdefault(known[key], None)
        return tuple(outcomes)

    def _start(self, names: tuple[Any, ...]) -> _Start | None:
        """The start of a statement with these values of names; None if they cannot be compared."""
        lists: list[int] = []
        key = self.key(names, lists)
        assert self.kept is not None
        return None if key is None else _Start(self.kept.starts.setdefault(key, len(self.kept.starts)), lists)

    def _key_of(
        self, number: int, start: _Start, item: Any, changes: _Changes, keys: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...] | None:
        """The key of a statement's result; None if its values cannot be compared."""
        lists = list(start.lists)
        try:
            before = [value_of(*change) for change in changes]
            key = self.key((item, *before, *keys()), lists)
        except TooMuch:
            raise
        except Exception:  # the template may never evaluate the expression that raises here
            return None
        if key is None or (list in map(type, before) and len({*lists}) < len(lists)):
            return None  # two values are the same list, so a change of one would change the other
        return number, start.number, self.message, key

    def _skip(self, walk: Walk, changes: _Changes, loop: Any) -> bool:
        """Uses the results of all iterations from this one on that are the same as in an earlier rendering.

        Returns False if their text would be at another position than in the earlier rendering.
        """
        kept, (parts, runs) = self.kept, self.output
        assert kept is not None and walk.earlier is not None and walk.now is not None
        steps = walk.earlier.steps[walk.position : walk.num_equal]
        if steps[0][1].start != (runs[-1].end if runs else 0):
            return False
        parts.append("".join([result.text for _, result in steps]))
        runs += chain.from_iterable([result.runs for _, result in steps])
        for (owner, attribute), value in zip(changes, steps[-1][1].left, strict=True):
            leave(owner, attribute, value)
        walk.now.steps += steps
        following = walk.iterator if loop is None else loop
        for _ in steps[1:]:
            next(following)
        self.message = steps[-1][0][2]
        walk.position = walk.num_equal - 1
        kept.replayed += len(steps)
        kept.copied += len(parts[-1])
        kept.tries[steps[0][0][0]] = -TRIES
        self.step(len(steps))
        self.tick(len(parts[-1]))
        return True

    def _stepped(self, key: tuple[Any, ...], result: Result) -> None:
        """Adds the key and the result of an iteration to those of this rendering."""
        walk = self._walk
        if walk is None or walk.now is None:
            return
        walk.now.steps.append((key, result))
        earlier = walk.earlier
        if earlier is not None and walk.position < walk.behind:
            is_same = len(earlier.steps) > walk.position and earlier.steps[walk.position][0] == key
            walk.num_equal = walk.num_equal if is_same else 0
