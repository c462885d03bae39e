"""The types that a tool's schema gives its arguments, for formats that write values as bare text.

Nothing is validated here. Invariant: text becomes another value only if the schema names that value's type and the text
is exactly such a value in JSON (or a boolean or None as Python prints it, which some families' templates write);
otherwise it stays the text that the model wrote, and the validation of the arguments reports the problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Malformed, Tools
from palaestra.inference.parsers.scan import decode

_PRINTED: Mapping[str, tuple[str, JSON]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
_PYTHON_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""Type names in schemas written by hand."""
_MAX_DEPTH = 16


class ArgumentTypes:
    """Types by tool and argument, as JSON Schema names them."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._parameters: dict[str, Mapping[str, JSON]] | None = None

    def value(self, tool: str, argument: str, text: str) -> JSON:
        """The value that `text` is for this argument. Text stays text if the type is unknown."""
        return typed(text, self._types(tool, argument))

    def _types(self, tool: str, argument: str) -> frozenset[str]:
        if self._parameters is None:
            self._parameters = dict(_parameters(self._tools))
        parameters = self._parameters.get(tool)
        if parameters is None:
            return frozenset()
        properties = parameters.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = parameters.get("additionalProperties")
        return frozenset(_types(schema, parameters, _MAX_DEPTH))


def typed(text: str, types: frozenset[str]) -> JSON:
    """`text` as a value of one of these types, or as it is."""
    if not types or types == {"string"}:
        return text
    name, printed = _PRINTED.get(text.strip(), ("", None))
    if name in types and "string" not in types:
        return printed
    try:
        value = decode(text)
    except Malformed:
        return text
    return value if not isinstance(value, str) and _types_of(value) & types else text


def _types_of(value: JSON) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"object"} if isinstance(value, dict) else {"array"}


def _parameters(tools: Tools) -> Iterator[tuple[str, Mapping[str, JSON]]]:
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if isinstance(parameters, Mapping):
            yield str(function.get("name", "")), parameters


def _types(schema: JSON, root: Mapping[str, JSON], depth: int) -> Iterator[str]:
    """The types that a schema allows, through its unions, references, enumerations and constants."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, Sequence) else ()
    yield from (_PYTHON_NAMES.get(name, name) for name in names if isinstance(name, str))
    if schema.get("nullable") is True:
        yield "null"
    if declared is None:
        for constant in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            yield from ["string"] if isinstance(constant, str) else _types_of(constant)
        if "properties" in schema:
            yield "object"
        if "items" in schema:
            yield "array"
    for union in ("anyOf", "oneOf", "allOf"):
        for member in _list(schema.get(union)):
            yield from _types(member, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: JSON = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _types(target, root, depth - 1)


def _list(value: JSON) -> Sequence[JSON]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
