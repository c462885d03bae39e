"""The types that a tool's schema gives its arguments, for formats that write values as bare text.

Not for validating. Invariant: text becomes another value only when the schema names that value's type and the text is
exactly such a value in JSON (or a boolean or None as Python prints it, which some families' templates write); otherwise
it stays the text that the model wrote, and the check of the arguments says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Malformed, Tools
from palaestra.inference.parsers.syntax.json_text import decode

_PRINTED: Mapping[str, tuple[str, JSON]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
_COMMON = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""What schemas written by hand call the types."""
_DEPTH = 16


class ArgumentTypes:
    """Types by tool and argument, as JSON Schema names them."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._parameters: dict[str, Mapping[str, JSON]] | None = None

    def value(self, tool: str, argument: str, text: str) -> JSON:
        """The value that `text` is for this argument. Text stays text where the type is unknown."""
        return typed(text, self._types(tool, argument))

    def _types(self, tool: str, argument: str) -> frozenset[str]:
        if self._parameters is None:
            self._parameters = dict(_named(self._tools))
        parameters = self._parameters.get(tool)
        if parameters is None:
            return frozenset()
        properties = parameters.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = parameters.get("additionalProperties")
        return frozenset(_types(schema, parameters, _DEPTH))


def typed(text: str, types: frozenset[str]) -> JSON:
    """`text` as the first of these types that it is."""
    if not types or types == {"string"}:
        return text
    kind, printed = _PRINTED.get(text.strip(), ("", None))
    if kind in types and "string" not in types:
        return printed
    try:
        value = decode(text)
    except Malformed:
        return text
    return value if not isinstance(value, str) and _kinds(value) & types else text


def _kinds(value: JSON) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"object"} if isinstance(value, dict) else {"array"}


def _named(tools: Tools) -> Iterator[tuple[str, Mapping[str, JSON]]]:
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
    if isinstance(declared, str):
        yield _COMMON.get(declared, declared)
    elif isinstance(declared, Sequence):
        yield from (_COMMON.get(kind, kind) for kind in declared if isinstance(kind, str))
    if schema.get("nullable") is True:
        yield "null"
    if declared is None:
        for constant in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            yield from ["string"] if isinstance(constant, str) else _kinds(constant)
        if "properties" in schema:
            yield "object"
        if "items" in schema:
            yield "array"
    for union in ("anyOf", "oneOf", "allOf"):
        for member in _list(schema.get(union)):
            yield from _types(member, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        yield from _types(_followed(reference, root), root, depth - 1)


def _followed(reference: str, root: JSON) -> JSON:
    for step in reference[2:].split("/"):
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def _list(value: JSON) -> Sequence[JSON]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
