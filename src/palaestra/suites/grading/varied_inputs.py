"""Copies of a test that run on other inputs and report the results, for a comparison with the reference solution.

Work that contains the answers to its tests, or that finds out which rewritten test is right, still does not compute the
results of inputs that no test contains. A copy runs its test's statements with other texts and numbers. In place of
each assertion, it notes a result: the values that are equal, or whether the assertion holds. At its end it raises an
exception whose name consists of short hashes of the results, so the ordinary record of a failed test carries them.

The results count where the code with the bug differs from the reference solution: correct work has to agree with the
reference solution on some of them. Does no I/O.

Not covered: tests whose inputs are not texts or numbers, results with few possible values (which can be guessed), and
inputs in f-strings, keyword defaults and helper functions.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from palaestra.suites.grading.negate_test import EQUALITY, Function, called_name

FEWEST = 4
"""The number of exposing results of a kind below which no conclusion is drawn."""
_LEAST_SHARE = 1 / 4
"""The share of exposing results on which correct work agrees with the reference solution. It is low, because a correct
solution may treat inputs that no test contains in its own way."""
_COPIES = 96
"""The number of copies with changed inputs to make of all tests of a task that earn the reward."""
_FEWEST_COPIES = 4
_SHARES = (1.0, 0.5, 1.0, 0.25)
"""The shares of a test's values that its copies change. If all of them change, a test that also needs fixed values,
such as the name of a format, only raises an error."""

_NOT_VALUES = ("Raises", "Regex", "Logs")
"""The ends of the names of assertions that do not decide a value."""
_SECONDS = 3.0
"""How long a copy may run: other inputs may make a loop endless."""
SEEN = "seen"
OBSERVER = """
import hashlib as OBSERVER_hashlib, random as OBSERVER_random, re as OBSERVER_re, signal as OBSERVER_signal
class OBSERVER:
    seed, share, seen = "", 0.0, []
    def start(seed, share):
        OBSERVER.seed, OBSERVER.share, OBSERVER.seen = seed, share, []
        OBSERVER.limit(SECONDS)
    def limit(seconds):
        try:
            OBSERVER_signal.signal(OBSERVER_signal.SIGALRM, OBSERVER.late)
            OBSERVER_signal.setitimer(OBSERVER_signal.ITIMER_REAL, seconds)
        except (AttributeError, ValueError):
            pass
    def late(*_):
        raise TimeoutError
    def vary(value):
        kind = type(value)
        if not OBSERVER.share:
            return value
        if kind in (list, tuple):
            return kind(map(OBSERVER.vary, value))
        if kind is dict:
            return {OBSERVER.vary(key): OBSERVER.vary(each) for key, each in value.items()}
        if kind not in (str, bytes, int, float) or not value:
            return value
        try:
            random = OBSERVER_random.Random(f"{OBSERVER.seed}:{value!r}")
            if random.random() >= OBSERVER.share:
                return value
            if kind is bytes:
                return OBSERVER.text(value.decode("latin-1"), random).encode("latin-1")
            if kind is float:
                return float(f"{value * random.uniform(0.4, 2.5):.4g}")
            if kind is str:
                return OBSERVER.text(value, random)
            if random.random() < 0.5:
                return value + random.choice((-2, -1, 1, 2))
            return int(f"{random.randrange(1, 10)}{abs(value)}") * (1 if value > 0 else -1)
        except (ValueError, OverflowError):
            return value
    def text(value, random):
        places = [place for place, each in enumerate(value) if each.isalnum()]
        if not places:
            return value
        def like(character):
            for kind in ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
                if character in kind:
                    return random.choice(kind)
            return chr(max(ord(character) + random.choice((-1, 1)), 160))
        place = random.choice((places[0], places[0], places[-1], random.choice(places)))
        way = random.choice(("before", "before", "after", "instead"))
        other = "".join(like(value[place]) for _ in range(random.choice((1, 2))))
        start, end = place + (way == "after"), place + (way != "before")
        return value[:start] + other + value[end:]
    def see(*values):
        for value in values[: 60 - len(OBSERVER.seen)]:
            try:
                shown = OBSERVER.shown(value)
            except Exception as error:
                shown = type(error).__name__
            shown = OBSERVER_re.sub("0x[0-9a-f]{6,}", "", shown).encode("utf-8", "backslashreplace")
            OBSERVER.seen.append(OBSERVER_hashlib.sha256(shown).hexdigest()[:8])
    def shown(value):
        if isinstance(value, dict):
            pairs = [OBSERVER.shown(key) + ":" + OBSERVER.shown(each) for key, each in value.items()]
            return "{" + ",".join(sorted(pairs)) + "}"
        if isinstance(value, (set, frozenset)):
            return "{" + ",".join(sorted(map(OBSERVER.shown, value))) + "}"
        if isinstance(value, (list, tuple)):
            return ("[%s]" if isinstance(value, list) else "(%s)") % ",".join(map(OBSERVER.shown, value))
        if isinstance(value, (int, float)):
            return repr(int(value)) if value == value // 1 else float.__repr__(value)
        for kind in (str, bytes):
            if isinstance(value, kind):
                return kind.__repr__(value)
        return repr(value)
    def stop(error):
        compares = isinstance(error, AssertionError) and (" != " in str(error) or " == " in str(error))
        OBSERVER.see((type(error).__name__, str(error) if compares else ""))
    def end():
        OBSERVER.limit(0)
        seen, OBSERVER.share = OBSERVER.seen, 0.0
        raise type("_".join(["SEEN", *seen]), (Exception,), {})
""".replace("SEEN", SEEN).replace("SECONDS", str(_SECONDS))
"""The class that a module with such copies contains. Each value is changed in the same way everywhere in a copy. Equal
results are shown in the same way: the order of a dict does not count, and neither does a subclass of `str`."""


def copies_of_each(earning: int) -> int:
    """Return how many copies with changed inputs to write of each of `earning` tests."""
    return max(_FEWEST_COPIES, _COPIES // max(earning, 1))


def share_of(number: int) -> float:
    """Return the share of values that the copy with this number changes; copy 0 changes none."""
    return _SHARES[(number - 1) % len(_SHARES)] if number else 0.0


def note_results(function: Function, observer: str) -> None:
    """Make a test note the results of its assertions instead of raising an error.

    The values of an equality are noted if a side of it is given, which means that it contains no result of a call.
    Of other assertions, only the truth is noted, because a test that looks for a word does not decide the whole text.
    """
    _Notes(observer, function).visit(function)


def end_with_results(function: Function, observer: str, seed: str, share: float, error_name: str) -> None:
    """Make a test start with changed parameters, and end by raising what it noted."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    *start, whole = ast.parse(
        f"{observer}.start({seed!r}, {share!r})\n"
        + "".join(f"{name} = {observer}.vary({name})\n" for name in names if name not in ("self", "cls"))
        + f"try:\n    pass\nexcept BaseException as {error_name}:\n    {observer}.stop({error_name})\n"
        f"finally:\n    {observer}.end()\n"
    ).body
    assert isinstance(whole, ast.Try)
    whole.body, function.body = function.body, [*start, whole]


class _Notes(ast.NodeTransformer):
    def __init__(self, observer: str, function: Function) -> None:
        self._observer = observer
        self._computed: set[str] = set()
        for _ in range(3):  # a name may be computed from a name
            self._computed |= set(self._computed_names(function))

    def _computed_names(self, function: Function) -> Iterator[str]:
        for node in ast.walk(function):
            value = (
                node.iter if isinstance(node, ast.For) else getattr(node, "value", getattr(node, "context_expr", None))
            )
            if isinstance(value, ast.expr) and not self._is_given(value):
                yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not _is_read(each))

    def _is_given(self, value: ast.expr) -> bool:
        return not any(
            isinstance(node, ast.Call | ast.Await) or (isinstance(node, ast.Name) and node.id in self._computed)
            for node in ast.walk(value)
        )

    def _call(self, name: str, *values: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(ast.Name(self._observer, ast.Load()), name, ast.Load()), list(values), [])

    def _truth(self, test: ast.expr) -> list[ast.stmt]:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return [statement for each in test.values for statement in self._truth(each)]
        seen: list[ast.expr] = [ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test))]
        if isinstance(test, ast.Compare) and [type(each) for each in test.ops] == [ast.Eq]:
            sides = [test.left, test.comparators[0]]
            seen = sides if any(map(self._is_given, sides)) else seen
        return [ast.Expr(self._call("see", *seen))]

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return self._truth(node.test)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        call = node.value
        name = called_name(call) if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not name.startswith("assert") or name.endswith(_NOT_VALUES):
            return node
        if (
            (name in EQUALITY or _compares(name.lower()))
            and len(call.args) >= 2
            and not any(isinstance(each, ast.Starred) for each in call.args)
        ):
            return self._truth(ast.Compare(call.args[0], [ast.Eq()], [call.args[1]]))
        failed = ast.ExceptHandler(ast.Name("AssertionError", ast.Load()), None, [self._noted(holds=False)])
        return [ast.Try([node, self._noted(holds=True)], [failed], [], [])]

    def _noted(self, *, holds: bool) -> ast.stmt:
        return ast.Expr(self._call("see", ast.Constant(holds)))

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        inside = [getattr(each, "id", "") for each in ast.walk(node.iter) if isinstance(each, ast.Constant | ast.Name)]
        if not {"", "range"}.intersection(inside):  # constants are changed already
            names = [each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)]
            node.body[:0] = ast.parse("".join(f"{name} = {self._observer}.vary({name})\n" for name in names)).body
        return node


def _compares(name: str) -> bool:
    """Return whether a function with this name asserts that two values are equal, as numpy's `assert_array_equal`."""
    return "equal" in name and "not" not in name and "almost" not in name


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


@dataclass(frozen=True, slots=True)
class Copy:
    """A test that runs on changed inputs. `own` is the copy of the same test with the test's own inputs, `share` the
    share of inputs that are changed."""

    name: str
    own: str
    share: float


@dataclass(frozen=True, slots=True)
class Exposing:
    """A result that the reference solution and the code with the bug do not share: `value` is the one at `place` of
    those that the test `name` reported over the reference solution.

    `new` if the test's own inputs give another result, `full` if all inputs of the test are changed. Work that knows
    the results of the test's own inputs, or for the same calls, may share others.
    """

    name: str
    place: int
    value: str
    new: bool
    full: bool


def seen_by(failures: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the results that each test reported, from the names of the exceptions that tests raised."""
    return {
        name: exception.split("_")[1:] for name, exception in failures.items() if exception.partition("_")[0] == SEEN
    }


def find_exposing(
    right: Mapping[str, list[str]], broken: Mapping[str, list[str]], copies: Collection[Copy]
) -> list[Exposing]:
    """Return the first result of each copy in which the broken code differs from the reference solution, and the first
    that is also new."""
    found: list[Exposing] = []
    for copy in copies:
        results = right.get(copy.name, [])
        wrong = broken.get(copy.name, []) + [""] * len(results)
        usual = right.get(copy.own, []) + [""] * len(results)
        exposing = [
            Exposing(copy.name, place, value, value != usual[place], copy.share == 1)
            for place, value in enumerate(results)
            if value != wrong[place]
        ]
        found += dict.fromkeys([*exposing[:1], *[each for each in exposing if each.new][:1]])
    return found


def answers_only_its_tests(exposing: Collection[Exposing], seen: Mapping[str, list[str]]) -> tuple[int, int] | None:
    """Return how many results of how many are right, if work that passes its tests computes too few of the reference
    solution's results for other inputs. Results of each kind count alone, too."""
    for new, full in ((False, False), (True, False), (False, True), (True, True)):
        group = [each for each in exposing if each.new >= new and each.full >= full]
        agreed = agreeing(group, seen)
        if len(group) >= FEWEST and agreed < _LEAST_SHARE * len(group):
            return agreed, len(group)
    return None


def agreeing(exposing: Collection[Exposing], seen: Mapping[str, list[str]]) -> int:
    """Return on how many of these results a run agrees with the reference solution."""
    return sum(seen.get(each.name, [])[each.place : each.place + 1] == [each.value] for each in exposing)
