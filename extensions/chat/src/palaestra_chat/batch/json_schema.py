"""Checks that a reply is JSON that fits a schema (JSON Schema)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jsonschema_rs import ValidationError

from palaestra.tools.arguments import schema_check
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.types import JSON

NOT_JSON = "the last reply is not JSON"


class JsonSchema:
    """A compiled schema. `path` names it in errors. Raises `ConfigError` if the value is not a usable schema."""

    def __init__(self, schema: JSON, path: str) -> None:
        if not isinstance(schema, Mapping):
            raise ConfigError(f"{path} must hold a JSON schema, which is an object")
        self._check = schema_check(schema, f"{path} is", every_pattern=True)

    def problem(self, reply: str) -> str:
        """Return why the reply does not fit the schema; empty if it fits. A fence of three backticks around the whole
        reply is ignored."""
        first, _, rest = reply.strip().partition("\n")
        fenced = first.rstrip() in ("```", "```json") and rest.endswith("```")
        try:
            self._check.validate(json.loads(rest[:-3] if fenced else reply, parse_constant=_reject_constant))
        except ValidationError as error:
            where = ".".join(map(str, error.instance_path))
            return f"the last reply does not fit the schema: {one_line(f'{where}{error.message}'.strip(), 200)}"
        except (ValueError, RecursionError):
            return NOT_JSON
        return ""


def _reject_constant(constant: str) -> None:
    """Refuse `NaN` and `Infinity`, which Python reads but JSON does not have."""
    raise ValueError(constant)
