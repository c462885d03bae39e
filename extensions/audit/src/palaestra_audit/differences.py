"""Calls by which a mutant of a solution is compared with the solution: those that the prompt has, and others near them.

A mutant without any other result may mean the same as the solution. The code runs in a sandbox.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot

_MOST_CALLS = 200
_RUN_S = 30.0
_CALLS_AT, _SCRIPT_AT = "/tmp/.palaestra-calls.json", "/tmp/.palaestra-calls.py"  # noqa: S108  in the sandbox


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of a module with plain values. `named` calls stand in the prompt."""

    function: str
    values: Sequence[JSON]
    named: bool

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(repr, self.values))})"


def calls_of(source: bytes, asked: str) -> list[Call]:
    """Return calls of the module's functions: those in the prompt, and others whose values are near theirs."""
    tree = ast.parse(source)
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    constants = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    words = [each for each in dict.fromkeys(constants) if isinstance(each, str) and each.isalnum()]
    named = [
        Call(each.name, values, named=True)
        for each in functions
        for values in _values_in(asked, each.name)
        if _takes(each, len(values))  # `f()` in a sentence is often only the name of f
    ]
    near = [Call(each.function, values, named=False) for each in named for values in _near(each.values, words[:20])]
    return list({str(each): each for each in (*near, *named)}.values())[-_MOST_CALLS:]


def _takes(function: ast.FunctionDef, count: int) -> bool:
    """Return whether a function can be called with so many values by their places."""
    taken, most = function.args, len(function.args.posonlyargs) + len(function.args.args)
    alone = sum(each is None for each in taken.kw_defaults)
    return most - len(taken.defaults) <= count and (count <= most or taken.vararg is not None) and not alone


def _values_in(asked: str, name: str) -> Iterator[list[JSON]]:
    for match in re.finditer(rf"(?<!\w){re.escape(name)}\(", asked):
        for end in re.finditer(r"\)", asked[match.end() : match.end() + 200]):
            try:
                values = ast.literal_eval(f"[{asked[match.end() : match.end() + end.start()]}]")
                json.dumps(values)
            except (SyntaxError, ValueError, TypeError, MemoryError):
                continue  # such as a bracket within a text, or the name of an argument
            yield values
            break


def _near(values: Sequence[JSON], words: Sequence[str]) -> Iterator[list[JSON]]:
    """Yield values of which one is another one of its type, as EvalPlus makes inputs (arXiv 2305.01210), or has a word
    of the code, as fuzzers take them from a dictionary."""
    for number, value in enumerate(values):
        for other in [*_others(value), *_with_words(value, words)]:
            yield [*values[:number], other, *values[number + 1 :]]


def _with_words(value: JSON, words: Sequence[str]) -> Iterator[JSON]:
    parts = value.split() if isinstance(value, str) else []
    for at in range(min(len(parts), 5)):
        for word in words:
            yield " ".join([*parts[:at], word, *parts[at + 1 :]])


def _others(value: JSON) -> list[JSON]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1, 0, -value, value * 2]
    if isinstance(value, str):
        return ["", value[1:], value[:-1], value * 2, f" {value}", value[::-1], value.upper(), value.lower()]
    if isinstance(value, list):
        inner = [[*value[:at], other, *value[at + 1 :]] for at, each in enumerate(value) for other in _others(each)]
        return [[], value[1:], value[:-1], value * 2, value[::-1], *inner[:20]]
    return []


_SCRIPT = """\
import importlib, json, os, sys
path, calls = json.load(open(sys.argv[1]))
folder, name = os.path.dirname(path), os.path.basename(path)[:-3]
while os.path.exists(os.path.join(folder, "__init__.py")):
    folder, name = os.path.dirname(folder), os.path.basename(folder) + "." + name
sys.path.insert(0, folder)
sys.dont_write_bytecode = True
shown, sys.stdout = sys.stdout, open(os.devnull, "w")
module, results = importlib.import_module(name), []
for function, values in calls:
    try:
        results.append(repr(getattr(module, function)(*values))[:2000])
    except BaseException as error:
        results.append(type(error).__name__)
print("\\n" + json.dumps(results), file=shown)
"""


async def results_of(slot: Slot, path: str, source: bytes, calls: Sequence[Call]) -> list[str] | None:
    """Return what the calls of the module `source` at `path` give in a slot that has the other files of the solution;
    None if this cannot be known."""
    await slot.write_bytes(path, source)
    await slot.write_text(_SCRIPT_AT, _SCRIPT)
    await slot.write_text(_CALLS_AT, json.dumps([path, [[each.function, list(each.values)] for each in calls]]))
    done = await slot.execute(f"python3 {_SCRIPT_AT} {_CALLS_AT}", timeout_s=_RUN_S)
    try:
        results = json.loads(done.output.strip().split("\n")[-1])
    except ValueError:
        return None
    return results if isinstance(results, list) and len(results) == len(calls) else None


def first_difference(calls: Sequence[Call], right: Sequence[str], wrong: Sequence[str]) -> tuple[Call, str] | None:
    """Return a call with two results, one that the prompt names if there is one, and both results as text."""
    found = [each for each in zip(calls, right, wrong, strict=True) if each[1] != each[2]]
    for call, old, new in itertools.chain((each for each in found if each[0].named), found):
        return call, f"{call} gives {new:.200} instead of {old:.200}"
    return None
