"""The words by which a reader filters rollouts: `reward<1 outcome:max_turns label=tests_edited parser`.

The grammar is that of the page (`page/filter.js`): FIELD, a comparison and a value; `differs` and `changed`; all other
words are searched in task, error, category and last reply. `none` stands for a missing value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from palaestra.core.errors import ConfigError
from palaestra.viewer.run_index import FIELDS, Condition

_BARE = ("differs", "changed")
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')
_TERM = re.compile(r"(differs|changed|[a-z]+(?:\.[^\s:=!<>]+)?)(?:(:|!=|<=|>=|=|<|>)(.*))?", re.DOTALL)


def parse_filter(text: str) -> list[Condition]:
    """Return the conditions of a filter. Raises `ConfigError` for a comparison with an unknown field."""
    return [_condition(found[0]) for found in _WORD.finditer(text)]


def _condition(word: str) -> Condition:
    term = _TERM.fullmatch(word)
    field, comparison, value = (str(each or "") for each in term.groups()) if term else ("", "", "")
    if field in _BARE and not comparison:
        return field, "=", 1
    if comparison and (field in FIELDS or field.startswith("metric.")):
        value = value[1:-1] if re.fullmatch(r'".*"', value, re.DOTALL) else value
        return field, comparison, "" if value == "none" else value
    if comparison in ("<", ">", "<=", ">="):
        raise ConfigError(f"there is no field {field}")
    return "any", ":", word.replace('"', "")


def filter_text(where: Sequence[Condition]) -> str:
    """Return the words of conditions, which `parse_filter` reads again."""
    return " ".join(_words(*condition) for condition in where)


def _words(field: str, comparison: str, value: str | float) -> str:
    if field in _BARE:
        return field
    text = str(value)
    shown = "none" if text == "" else f'"{text.replace(chr(34), "")}"' if re.search(r'[\s"]', text) else text
    return shown if field == "any" else f"{field}{comparison}{shown}"
