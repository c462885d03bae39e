"""Turns the text that a model wrote as arguments into a dict that fits the tool's schema, or one error for the model.

Aliases of parameters are renamed; nothing else is repaired. Text that is not JSON is an error, no type is coerced, and
no default is filled in. JSON has one kind of number, so 4.0 is accepted as the integer 4, and models send null for an
argument that they leave out, so null counts as left out where the schema allows that and null has no meaning there.
Invariant (A1): a tool runs only with an object that its schema accepts; anything else raises `InvalidArguments`. A
valid call costs one JSON decode and one compiled check, a few microseconds.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from itertools import compress
from operator import getitem
from typing import NoReturn

from jsonschema_rs import (
    Draft4Validator,
    Draft7Validator,
    ReferencingError,
    ValidationError,
    ValidationErrorKind,
    Validator,
    validator_for,
)

from palaestra.tools.call_text import shortened
from palaestra.tools.tool import ToolMistake, ToolSchema
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

_CACHED_SCHEMAS = 512
_SHOWN_CHARS = 120
_MOST_OPTIONS = 12


def schema_check(schema: Mapping[str, JSON], what: str, *, every_pattern: bool = False) -> Validator:
    """Return the check of a value against a JSON schema; its `validate` raises `jsonschema_rs.ValidationError`.

    A schema is read by the draft that it names, else as 2020-12, the dialect of MCP, and if it is not valid there as
    draft 7 or 4. Patterns are those of ECMA 262; `format` is not checked, and neither is a pattern that cannot be read,
    unless `every_pattern` makes it an error. `what` begins the error for a schema that cannot be used, such as `a
    tool's parameters are`. Raises `ConfigError`.
    """
    problems = []
    for draft in (validator_for, Draft7Validator, Draft4Validator):
        try:
            # A copy for each draft, because `_validator` removes patterns from it.
            own = _without_empty_required(schema) if draft is Draft4Validator else copy.deepcopy(dict(schema))
            return _validator(draft, own, every_pattern=every_pattern)
        except (ValidationError, ReferencingError, ValueError, RecursionError) as error:
            problems.append(error)
    where = ".".join(map(str, getattr(problems[0], "instance_path", ())))
    reason = shortened(getattr(problems[0], "message", str(problems[0])), _SHOWN_CHARS)
    raise ConfigError(f"{what} not a usable JSON schema: {where}{reason}") from problems[0]


def _without_empty_required(value: JSON) -> JSON:
    """Return a copy of a schema without empty lists of required names, which draft 4 forbids."""
    if isinstance(value, list):
        return [_without_empty_required(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: each if name in ("const", "default", "enum") else _without_empty_required(each)
        for name, each in value.items()
        if name != "required" or each != []
    }


def _validator(draft: Callable[..., Validator], schema: dict[str, JSON], *, every_pattern: bool) -> Validator:
    while True:
        try:
            return draft(schema, offline=True, mask="", validate_formats=False)
        except ValidationError as error:
            if every_pattern or error.kind.name != "format" or error.instance_path[-1] != "pattern":
                raise
            # Each error names only one unreadable pattern, so the schema is compiled again without it.
            *way, last = error.instance_path
            del reduce(getitem, way, schema)[last]  # type: ignore[arg-type]


class InvalidArguments(ToolMistake):
    """A call's arguments are invalid, so the call must not run. The message describes the error and, in most cases,
    lists the expected arguments."""


class ArgumentSchema:
    """The compiled form of one tool's parameters. Compiling takes about a millisecond, `parse` microseconds."""

    def __init__(self, schema: Mapping[str, JSON] | str, aliases: tuple[tuple[str, str], ...] = ()) -> None:
        self._aliases = aliases
        parameters: Mapping[str, JSON] = json.loads(schema) if isinstance(schema, str) else schema
        self._properties: Mapping[str, JSON] = parameters.get("properties") or {}
        self._required: tuple[str, ...] = tuple(parameters.get("required") or ())
        integers = map(_is_integer, self._properties.values())
        self._integers = tuple(compress(self._properties, integers))
        closed = _closed(parameters)
        self._refuses_unknown = closed.get("additionalProperties") is False
        self._check = schema_check(closed, "a tool's parameters are")

    def parse(self, raw: str | Mapping[str, JSON] | None) -> dict[str, JSON]:
        """Return the arguments as a fresh dict. Raises `InvalidArguments`.

        A blank string and None mean no arguments. An alias is renamed to its parameter, unless both are given. A name
        that is not in the schema is refused, unless the schema has a keyword that may allow it, for example
        `additionalProperties` or `anyOf`.
        """
        arguments = self._object(raw)
        for other, name in self._aliases:
            if other in arguments and name not in arguments:
                arguments[name] = arguments.pop(other)
        if _is_deep(arguments):
            raise InvalidArguments("Invalid arguments: nested too deeply. " + self._expected())
        try:
            # Models write null for what they leave out. It is removed only if the schema refuses it.
            if not self._check.is_valid(arguments):
                for name in self._unset(arguments):
                    del arguments[name]
                self._check.validate(arguments)
        except ValidationError as error:
            self._explain(arguments, error)
        except ValueError as error:  # a value of Python that JSON does not have
            raise InvalidArguments(f"Invalid arguments: not JSON: {error}. {self._expected()}") from None
        for name in self._integers:
            # JSON Schema counts 3.0 as an integer; Python's functions do not.
            if isinstance(value := arguments.get(name), float):
                arguments[name] = int(value)
        return arguments

    def _unset(self, arguments: dict[str, JSON]) -> set[str]:
        """Return the arguments that are null, may be left out, and may not be null."""
        errors = self._check.iter_errors(arguments)
        wrong = {str(error.instance_path[0]) for error in errors if len(error.instance_path) == 1}
        return {name for name in wrong.difference(self._required) if arguments[name] is None}

    def _object(self, raw: str | Mapping[str, JSON] | None) -> dict[str, JSON]:
        if isinstance(raw, Mapping):
            return dict(raw)
        if raw is None or (isinstance(raw, str) and not raw.strip()):
            if self._required:
                raise InvalidArguments("Invalid arguments: none were given. " + self._expected())
            return {}
        if not isinstance(raw, str):  # a server may pass on a decoded list or number
            raise InvalidArguments(
                f"Invalid arguments: expected a JSON object, got {_type_name(raw)}. {self._expected()}"
            )
        value = self._decode(raw)
        if not isinstance(value, dict):
            raise InvalidArguments(
                f"Invalid arguments: expected a JSON object, got {_type_name(value)}. {self._expected()}"
            )
        return value

    def _decode(self, raw: str) -> JSON:
        try:
            value = _DECODER.decode(raw)
            # A half of a surrogate pair in the text itself; the next lines look for escaped ones.
            raw.encode()
            if "\\ud" in raw or "\\uD" in raw:  # half of a surrogate pair cannot be encoded
                json.dumps(value, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            where, near = f"line {error.lineno} column {error.colno}", raw[max(0, error.pos - 30) : error.pos + 10]
            raise InvalidArguments(
                f"Invalid JSON in arguments: {error.msg} at {where}, near {near!r}. "
                "The call was not executed. Send the arguments again as one complete JSON object."
            ) from None
        except UnicodeEncodeError:
            raise InvalidArguments("Invalid JSON in arguments: unpaired surrogate (\\ud800 to \\udfff).") from None
        except RecursionError:
            raise InvalidArguments("Invalid JSON in arguments: nested too deeply.") from None
        except ValueError as error:
            raise InvalidArguments(f"Invalid JSON in arguments: {error}.") from None
        return value

    def _explain(self, arguments: Mapping[str, JSON], error: ValidationError) -> NoReturn:
        problems = [f"missing required argument '{name}'" for name in self._required if name not in arguments]
        if self._refuses_unknown:
            unknown = [name for name in arguments if name not in self._properties]
            problems += map(self._unknown, unknown[:_MOST_OPTIONS])
            if len(unknown) > _MOST_OPTIONS:
                problems.append(f"{len(unknown) - _MOST_OPTIONS} more unknown arguments")
        if not problems:
            name = ".".join(map(str, error.instance_path))
            rule = f"{shortened(_rule(error), _SHOWN_CHARS)}, got {_shortened_json(error.instance)}{_hint(error)}"
            problems = [f"argument '{name}'{rule}" if name else error.message.strip()]
        raise InvalidArguments(f"Invalid arguments: {'; '.join(problems)}. {self._expected()}") from None

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name[:_SHOWN_CHARS], list(self._properties), n=1, cutoff=0.5)
        return f"unknown argument '{name[:_SHOWN_CHARS]}'" + (f" (did you mean '{close[0]}'?)" if close else "")

    def _expected(self) -> str:
        if not self._properties:
            return "This tool takes no arguments."
        parts = []
        for name, schema in self._properties.items():
            kind = schema.get("type", "any") if isinstance(schema, Mapping) else "any"
            kind = "|".join(kind) if isinstance(kind, list) else kind
            # The allowed values say more than the type. A long list would fill the reply, and the model has it already.
            options = schema.get("enum") if isinstance(schema, Mapping) else None
            if isinstance(options, list) and len(options) <= _MOST_OPTIONS:
                kind = "|".join(_shortened_json(option) for option in options)
            parts.append(f"{name} ({kind}{', required' if name in self._required else ''})")
        return f"Expected: {', '.join(parts)}."


def _rule(error: ValidationError) -> str:
    """Return what a value must be, as the continuation of its name. The wording of the commonest kinds never changes:
    models read it, so recorded rollouts contain it, and a replay compares it."""
    match error.kind:
        case ValidationErrorKind.Type(types=types):
            return f" must be {' or '.join(types)}"
        case ValidationErrorKind.Enum(options=options):
            return f" must be one of {options}"
        case ValidationErrorKind.Minimum(limit=limit):
            return f" must be bigger than or equal to {limit}"
        case ValidationErrorKind.Maximum(limit=limit):
            return f" must be smaller than or equal to {limit}"
    # The text of the value, with which some messages begin, is masked.
    return error.message if error.message.startswith(" ") else f": {error.message}"


def _hint(error: ValidationError) -> str:
    """Return how to fix a value that is the text of the wanted type, or an empty string."""
    match error.kind, error.instance:
        case ValidationErrorKind.Type(types=[wanted]), str(text) if _is_json_of(wanted, text):
            return f" (a string; send the {wanted} itself, without quotes around it)"
    return ""


def compiled(schema: Mapping[str, JSON] | ToolSchema) -> ArgumentSchema:
    """Return the compiled form of a tool's schema, from a bounded cache. Raises `ConfigError` for an invalid schema.

    `schema` is an OpenAI function schema, its `function` part, the parameters alone, or a `ToolSchema`.
    """
    parameters = _parameters(schema)
    aliases = tuple(schema.aliases.items()) if isinstance(schema, ToolSchema) else ()
    return _compiled(json.dumps({name: parameters[name] for name in sorted(parameters)}, default=str), aliases)


_compiled = lru_cache(_CACHED_SCHEMAS)(ArgumentSchema)


def _parameters(schema: Mapping[str, JSON] | ToolSchema) -> Mapping[str, JSON]:
    if isinstance(schema, ToolSchema):
        schema = schema.to_dict()
    function = schema.get("function")
    if schema.get("type") == "function" and isinstance(function, Mapping):
        schema = function
    if "parameters" in schema and "name" in schema and "properties" not in schema:
        schema = schema["parameters"] or {}
    return schema


_NAMING = frozenset({
    "additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "if", "then",
    "else", "dependentSchemas", "dependentRequired", "dependencies", "$ref", "$dynamicRef",
})  # fmt: skip
"""Keywords of JSON Schema that may name arguments beside `properties`."""


def _closed(parameters: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the schema, changed to refuse unknown names unless one of its keywords may allow them."""
    closed = {"type": "object", **parameters}
    required = {*(parameters.get("required") or ())} - {*(parameters.get("properties") or ())}
    if not required and _NAMING.isdisjoint(closed):
        closed["additionalProperties"] = False
    return closed


def _is_integer(schema: JSON) -> bool:
    """Return whether the schema's `type` allows integers and no other numbers, so that an accepted float is an
    integer."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    return kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)


def _object_of_pairs(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {_shortened_json(twice)} is given twice in one object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_PYTHON_TYPES: Mapping[object, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_DECODER = json.JSONDecoder(object_pairs_hook=_object_of_pairs, parse_constant=_no_constant)


def _type_name(value: JSON) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def _is_deep(value: JSON, levels: int = 500) -> bool:
    """Return whether a value has more than this many levels: the check of a far deeper one would overflow its stack."""
    inner: list[JSON] = [value]
    while inner and levels:
        levels -= 1
        inner = [
            each
            for part in inner
            for each in (part.values() if isinstance(part, Mapping) else part)
            if isinstance(each, (Mapping, list, tuple))
        ]
    return bool(inner)


def _shortened_json(value: JSON) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str), _SHOWN_CHARS)


def _is_json_of(wanted: object, text: str) -> bool:
    """Return whether the content of a string is JSON of the wanted type. If so, the model quoted it by mistake."""
    if wanted not in _PYTHON_TYPES:
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return type(value) in _PYTHON_TYPES[wanted]
