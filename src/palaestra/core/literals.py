"""Values as others write them: words on a command line, YAML, numbers of any library.

A word is read by the type of its field, never by its looks alone, so a text field can hold `5`, `true` or `-x`. Ranges
and required keys are validated by the fields themselves (`palaestra.core.config.merge`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import Enum
from numbers import Real
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from palaestra.core.types import JSON

Annotation: TypeAlias = Any
"""A type in an annotation: a class, a union, a generic. Python has no type for these."""

_YES = frozenset({"true", "1", "yes", "y", "on", "t"})
_NO = frozenset({"false", "0", "no", "n", "off", "f"})
_NONE = frozenset({"none", "null"})
_SEQUENCES = (list, tuple, set, frozenset, Sequence)
_MAPPINGS = (dict, Mapping)


def read_words(annotation: Annotation, words: Sequence[str]) -> JSON:
    """The value of a field from `words`, which followed its flag and may be empty. Raises `ValueError`."""
    kinds = members(annotation)
    if takes_mapping(annotation) and words and not (len(words) == 1 and words[0].lower() in _NONE):
        return _read_mapping(words)
    if takes_sequence(annotation) and not (len(words) == 1 and type(None) in kinds and words[0].lower() in _NONE):
        return _read_sequence(kinds, words)
    if not words:
        if bool in kinds or Any in kinds:
            return True
        raise ValueError(f"needs a value ({describe(annotation)})")
    if Any in kinds:
        return read_json(words[0]) if len(words) == 1 else [read_json(word) for word in words]
    if len(words) > 1:
        raise ValueError(f"takes one value, got {len(words)}: {' '.join(words)}")
    return _read_scalar(kinds, words[0])


def members(annotation: Annotation) -> list[Annotation]:
    """The types of a union, or the one type, inside `Annotated` and PEP 695 aliases too."""
    origin = _origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in members(part)]
    return [annotation]


def takes_sequence(annotation: Annotation) -> bool:
    """Whether several words after a flag of this type are one list."""
    return any((_origin(kind) or kind) in _SEQUENCES for kind in members(annotation))


def takes_mapping(annotation: Annotation) -> bool:
    """Whether `k=v` words and dotted flags make a mapping for a field of this type."""
    return any((_origin(kind) or kind) in _MAPPINGS for kind in members(annotation))


def describe(annotation: Annotation) -> str:
    """The type for help texts."""
    names = []
    for kind in members(annotation):
        origin = _origin(kind) or kind
        if kind is type(None):
            names.append("None")
        elif origin is Literal:
            names.extend(str(choice) for choice in get_args(kind))
        elif isinstance(kind, type) and issubclass(kind, Enum):
            names.extend(str(member.value) for member in kind)
        elif origin in _SEQUENCES:
            names.append("list")
        elif origin in _MAPPINGS:
            names.append("mapping")
        else:
            names.append({str: "text", Any: "JSON"}.get(kind, getattr(kind, "__name__", str(kind))))
    return "|".join(dict.fromkeys(names))


def read_json(word: str) -> JSON:
    """The word as JSON if it is JSON (Python's None, True, False too), else the word itself."""
    if word in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[word]
    try:
        return json.loads(word, parse_constant=_refuse_constant)
    except ValueError:
        return word


def _origin(annotation: Annotation) -> Annotation:
    """`typing.get_origin` with its real type: any special form or class, or None."""
    return get_origin(annotation)


def _refuse_constant(name: str) -> JSON:
    raise ValueError(f"{name} is not JSON")


def _read_scalar(kinds: Sequence[Annotation], word: str) -> JSON:
    lowered = word.lower()
    if type(None) in kinds and lowered in _NONE:
        return None
    for kind in kinds:
        choice = _choice(kind, word)
        if choice is not None:
            return choice
    if bool in kinds and lowered in _YES | _NO and not (int in kinds and lowered in "01"):
        return lowered in _YES
    if str in kinds and (int in kinds or float in kinds):
        number = read_json(word)
        return number if isinstance(number, (int, float)) and not isinstance(number, bool) else word
    if bool in kinds and len([kind for kind in kinds if kind is not type(None)]) == 1:
        raise ValueError(f"{word!r} is neither true nor false")
    return word  # numbers, enums that do not match and the rest: the field's validation reads or refuses the text


def _choice(kind: Annotation, word: str) -> JSON:
    """The member of an enum or Literal that `word` names, by value or by name in any case; None without one."""
    if _origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == word), None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        named = (member for member in kind if word.lower() in (str(member.value).lower(), member.name.lower()))
        return next(named, None)
    return None


def _read_sequence(kinds: Sequence[Annotation], words: Sequence[str]) -> JSON:
    if len(words) == 1 and str in kinds:
        return words[0]  # "text or list" fields split for themselves
    kind = next(kind for kind in kinds if (_origin(kind) or kind) in _SEQUENCES)
    element = next(iter(get_args(kind)), Any)
    if len(words) == 1 and words[0].lstrip().startswith("["):
        try:
            return json.loads(words[0])
        except ValueError as error:
            raise ValueError(f"{words[0]!r} is not a JSON list: {error}") from None
    split = words[0].split(",") if len(words) == 1 else words
    return [read_words(element, [word.strip()]) for word in split if word.strip()]


def _read_mapping(words: Sequence[str]) -> JSON:
    if len(words) == 1 and words[0].lstrip().startswith("{"):
        try:
            return json.loads(words[0])
        except ValueError as error:
            raise ValueError(f"{words[0]!r} is not a JSON object: {error}") from None
    pairs = words[0].split(",") if len(words) == 1 else words
    entries: dict[str, JSON] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{pair!r} is neither JSON nor key=value")
        entries[key.strip()] = read_json(value.strip())
    return entries


def read_yaml(text: str) -> JSON:
    """The one YAML document of a text, as plain data. Raises `ValueError` for any other text.

    The library's own errors are not all: its constructors raise other errors for a value that does not fit its tag
    (`!!bool maybe`, a KeyError), and deeply nested text raises RecursionError.
    """
    import yaml  # here, because most runs read none

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def number(value: object) -> float | None:
    """A number or bool of any kind (numpy's, tensors, decimals) as a float, infinite if too large; None for anything
    else.

    Arrays and tensors count as their value if they hold exactly one.
    """
    item = getattr(value, "item", None)
    try:
        plain = item() if callable(item) else value
        return float(plain) if isinstance(plain, (Real, Decimal)) else None
    except OverflowError:
        return math.inf
    except (RuntimeError, TypeError, ValueError):
        return None
