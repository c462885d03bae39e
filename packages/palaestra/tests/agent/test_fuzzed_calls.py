"""Ten thousand calls as broken models write them: only what the schema accepts is run, and everything is answered.

The judge of what may run is written here a second time, plainly, so that the checker is not its own witness.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from palaestra.agent.replies import RequestedCall
from palaestra.agent.tool_calls import CallAnswer, ToolCalls, handler_runtime
from palaestra.tools.registry.build import builtin_tools
from palaestra_slots.core.types import JSON

CALLS, PER_TURN = 10_000, 8
SCHEMAS = [tool.schema.to_dict() for tool in builtin_tools()]
PARAMETERS = {schema["function"]["name"]: schema["function"]["parameters"] for schema in SCHEMAS}
KINDS = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "number": (int, float)}


def accepts(schema: Mapping[str, JSON], value: JSON, *, top: bool = True) -> bool:
    """Whether the value fits, for the words that schemas of tools here use."""
    if "type" in schema and not any(is_a(kind, value) for kind in kinds(schema)):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0)
    if isinstance(value, list):
        fits = all(accepts(schema.get("items", {}), each, top=False) for each in value)
        return fits and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if set(schema.get("required", ())) - value.keys() or (top and value.keys() - known.keys()):
            return False
        return all(accepts(known[name], each, top=False) for name, each in value.items() if name in known)
    return True


def kinds(schema: Mapping[str, JSON]) -> list[str]:
    """The types that a schema takes; it may name one or several."""
    named = schema.get("type", "string")
    return named if isinstance(named, list) else [named]


def is_a(kind: str, value: JSON) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, KINDS[kind])


def fitting(rng: random.Random, schema: Mapping[str, JSON]) -> JSON:
    """A value that the schema accepts."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match rng.choice(kinds(schema)):
        case "integer" | "number":
            return rng.randint(schema.get("minimum", 0), min(schema.get("maximum", 10**6), 10**6))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            items = schema.get("items", {})
            most = min(3, schema.get("maxItems", 3))
            return [fitting(rng, items) for _ in range(rng.randint(schema.get("minItems", 0), most))]
        case "object":
            required, names = schema.get("required", ()), schema.get("properties", {})
            return {n: fitting(rng, each) for n, each in names.items() if n in required or rng.random() < 0.5}
    return rng.choice(["ls", "a b", "\n", "ü€𝄞", '"', "\\", "{}", "None", "x" * rng.randint(1, 300)])


def anything(rng: random.Random, depth: int = 0) -> JSON:
    """Any JSON value."""
    match rng.randrange(8 if depth < 3 else 6):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.randint(-(10**20), 10**20)
        case 3:
            return rng.uniform(-1e9, 1e9)
        case 4 | 5:
            return "".join(chr(rng.choice([rng.randint(32, 126), rng.randint(0x80, 0xD7FF)])) for _ in range(5))
        case 6:
            return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(anything(rng, 3)): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def arguments_of(rng: random.Random, parameters: Mapping[str, JSON]) -> str:
    """Arguments as a model may write them: right, nearly right, or not at all."""
    value: Any = fitting(rng, parameters)
    match rng.randrange(12):
        case 0 | 1 | 2:
            pass
        case 3:
            value[rng.choice(["command", "path", "", "köpfe", "todos"])] = anything(rng)
        case 4 if value:
            value[rng.choice(sorted(value))] = anything(rng)
        case 5 if value:
            del value[rng.choice(sorted(value))]
        case 6:
            value = anything(rng)
        case 7:
            return rng.choice(["", " ", "\n\t", "null", "{}", "[]", "{", "}", "''", "None", "\ufeff{}", "{}{}"])
        case 8:
            return json.dumps({"a": "b"}).replace("b", rng.choice(["NaN", "\\ud800", "\\x41", "\ud800", "\0"]))
        case 9:
            deep = rng.randint(1, 3000)
            return rng.choice(
                ["[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, '{"command":"' + "\\" * deep]
            )
        case 10 if isinstance(value, dict) and value:
            twice = json.dumps(value)
            return twice[:-1] + "," + twice[1:]
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    return mangled(rng, text) if rng.random() < 0.25 else text


def mangled(rng: random.Random, text: str) -> str:
    """The text with something cut out of it or put into it."""
    at = rng.randrange(len(text) + 1)
    cut = rng.choice(["", text[at : at + rng.randint(1, 4)]])
    put = rng.choice(["", '"', ",", "}", "{", "\\", "'", "\n", "//", "\x00", "é", "0", "null"])
    return text[:at] + put + text[at + len(cut) :] if rng.random() < 0.7 else text[:at]


def requested(rng: random.Random, number: int) -> RequestedCall:
    name = rng.choice(sorted(PARAMETERS))
    arguments = arguments_of(rng, PARAMETERS[name])
    if rng.random() < 0.05:
        name = rng.choice(["", "termina", "Terminal", "terminal ", "functions.terminal", "\ud800", "x" * 300])
    return RequestedCall(f"c{number}", name, arguments)


def judged(call: RequestedCall) -> dict[str, JSON] | None:
    """The arguments that the call may run with, or None."""
    parameters = PARAMETERS.get(call.name)
    if parameters is None:
        return None
    if not call.arguments.strip():
        return None if parameters["required"] else {}
    try:
        call.arguments.encode()
        value = json.loads(call.arguments, object_pairs_hook=no_name_twice, parse_constant=no_constant)
        json.dumps(value, ensure_ascii=False).encode()
        if isinstance(value, dict):  # null is an argument that is left out, where it can be
            value = {name: each for name, each in value.items() if not is_unset(parameters, name, each)}
        return value if isinstance(value, dict) and accepts(parameters, value) else None
    except (ValueError, RecursionError):
        return None


def is_unset(parameters: Mapping[str, JSON], name: str, value: JSON) -> bool:
    known = parameters["properties"]
    return value is None and name in known and name not in parameters["required"] and not accepts(known[name], value)


def no_name_twice(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def no_constant(name: str) -> JSON:
    raise ValueError(name)


@pytest.mark.parametrize("seed", range(5))
def test_only_what_the_schema_accepts_is_run_and_all_calls_are_answered(seed: int) -> None:
    rng = random.Random(seed)
    ran: list[tuple[str, dict[str, JSON]]] = []

    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        ran.append((name, arguments))
        return json.dumps({"ran": len(ran)})

    tools = handler_runtime(handler, SCHEMAS, PARAMETERS, "t1")
    calls = ToolCalls(tools, set(PARAMETERS), {"read_file", "search_files"})
    met: Counter[str] = Counter()
    for first in range(0, CALLS // 5, PER_TURN):
        turn = [requested(rng, first + place) for place in range(PER_TURN)]
        ran.clear()
        answers = calls.check(turn, cut_off=rng.random() < 0.1)
        asyncio.run(calls.run(answers))
        wanted = [(call.name, judged(call)) for call in turn]
        # Two tools are answered by the loop itself, whatever their arguments.
        expected = [pair for pair in wanted if pair[1] is not None and pair[0] not in ("memory", "session_search")]
        assert ran == expected
        for call, answer, (_, valid) in zip(turn, answers, wanted, strict=True):
            check(call, answer, valid)
            met["valid" if valid is not None else "refused"] += 1
            met["empty"] += valid == {} and not call.arguments.strip()
    assert min(met["valid"], met["refused"]) > CALLS // 5 / 4
    assert met["empty"] > 0


def check(call: RequestedCall, answer: CallAnswer, valid: dict[str, JSON] | None) -> None:
    message = answer.message()
    assert message["tool_call_id"] == call.id
    reply = json.loads(message["content"])
    if valid is None:
        assert answer.checked is None
        assert list(reply) == ["error"]
        assert 0 < len(reply["error"]) < 3000
        assert reply["error"] == answer.error
    else:
        assert answer.checked is not None
        assert answer.checked.arguments == valid
