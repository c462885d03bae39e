"""The words by which a reader filters rollouts: `reward<1 outcome:max_turns label=tests_edited parser`.

The grammar is that of the page (`page/filter.js`): FIELD, a comparison and a value, also with spaces around the
comparison; `differs` and `changed`; all other words are searched in task, error, category and last reply. A field is
one of the index, the head of a column, or a criterion of the environment. `none` stands for a missing value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from palaestra.core.errors import ConfigError
from palaestra.viewer.run_index import FIELDS, NUMBERS, Condition

HEADS = {"time": "seconds", "labels": "label", "failed": "errors", "again": "regraded", "judged": "verdict"}
"""The heads of columns that are not called like their field."""

_BARE = ("differs", "changed")
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')
_TERM = re.compile(r'([^\s:=!<>"]+)(:|!=|<=|>=|=|<|>)(.*)', re.DOTALL)
_APART = re.compile(r'"[^"]*"|(^|\s)([^\s:=!<>"]+)\s*(!=|<=|>=|=|<|>|:)\s*(?=[^\s:=!<>/])')
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)


def parse_filter(text: str, criteria: Collection[str] = ()) -> list[Condition]:
    """Return the conditions of a filter; `criteria` are the names of the environment's own criteria. Raises
    `ConfigError` for an unknown field, a comparison that a field does not have, and a value that is not a number."""

    def joined(found: re.Match[str]) -> str:
        before, name, comparison = found.groups()
        return f"{before}{name}{comparison}" if name and _field(name, criteria) else found[0]

    return [_condition(found[0], criteria) for found in _WORD.finditer(_APART.sub(joined, text))]


def _field(name: str, criteria: Collection[str]) -> str:
    """Return the field of a name; empty if there is none."""
    if name in FIELDS or name.startswith("metric."):
        return name
    return f"metric.{name}" if name in criteria else HEADS.get(name, "")


def _condition(word: str, criteria: Collection[str]) -> Condition:
    if word in _BARE:
        return word, "=", 1
    term = _TERM.fullmatch(word)
    name, comparison, value = term.groups() if term else ("", "", "")
    if field := _field(name, criteria):
        value = value[1:-1] if re.fullmatch(r'".*"', value, re.DOTALL) else value
        value = "" if value == "none" else value
        _check(field, comparison, value)
        return field, comparison, value
    if value and value[0] not in ":/" and _NAME.fullmatch(name):
        raise ConfigError(f"there is no field {name}")
    return "any", ":", word.replace('"', "")


def _check(field: str, comparison: str, value: str) -> None:
    ordered = comparison in ("<", ">", "<=", ">=")
    if field not in NUMBERS and not field.startswith("metric."):
        if ordered:
            raise ConfigError(f"{field} is text, so it cannot be compared with {comparison}")
    elif not _NUMBER.fullmatch(value) and (ordered or value != ""):
        raise ConfigError(f"{field} needs a number, not {value or 'nothing'}")


def filter_text(where: Sequence[Condition]) -> str:
    """Return the words of conditions, which `parse_filter` reads again."""
    return " ".join(_words(*condition) for condition in where)


def _words(field: str, comparison: str, value: str | float) -> str:
    if field in _BARE:
        return field
    text = str(value)
    again = re.search(r'[\s":=!<>]' if field == "any" else r'[\s"]', text)
    shown = "none" if text == "" else f'"{text.replace(chr(34), "")}"' if again else text
    return shown if field == "any" else f"{field}{comparison}{shown}"
