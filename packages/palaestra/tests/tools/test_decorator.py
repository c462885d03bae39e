"""`@tool`: what a typed function becomes, what it is given, and what is refused when it is declared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from golden_messages import check_message, raises
from palaestra import ToolMistake, tool
from palaestra.tools.arguments import compiled
from palaestra.tools.decorator import TypedTool
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import Tool, ToolResult, ToolRun
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Task
from palaestra_slots.sandbox.slot import Slot


class Unit(Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(BaseModel):
    """Somewhere."""

    city: str = Field(description="The city.")
    country: str | None = None


@tool(toolset="weather", parallel_safe=True)
async def forecast(
    place: Place,
    days: Annotated[int, Field(ge=1, le=14, description="How far ahead.")] = 3,
    unit: Unit = Unit.CELSIUS,
    kinds: list[Literal["rain", "wind"]] | None = None,
) -> dict[str, object]:
    """The weather of the next days,
    day by day.

    It is never right.

    Args:
        place: Where it is,
            or is going to be.
        unit (Unit): The unit of temperatures.

    Returns:
        One line per day.
    """
    return {"city": place.city, "days": days, "unit": unit.name, "kinds": kinds}


async def no_slot() -> Slot:
    raise AssertionError("nobody asked for a slot")


def call(made: Tool, slot: Callable[[], Awaitable[Slot]] = no_slot, **arguments: JSON) -> JSON:
    text = asyncio.run(ToolRuntime(ToolRegistry([made]), slot, "task-1").handle(made.name, arguments))
    return json.loads(text) if text.startswith("{") else text


def test_the_schema_comes_from_annotations_and_docstring() -> None:
    schema = forecast.schema.to_dict()["function"]
    assert schema["name"] == "forecast"
    assert schema["description"] == "The weather of the next days, day by day.\n\nIt is never right."
    properties = schema["parameters"]["properties"]
    assert list(properties) == ["place", "days", "unit", "kinds"]
    assert schema["parameters"]["required"] == ["place"]
    assert properties["place"]["description"] == "Where it is, or is going to be."
    assert properties["place"]["properties"]["city"] == {"description": "The city.", "type": "string"}
    assert properties["days"] == {
        "default": 3, "description": "How far ahead.", "maximum": 14, "minimum": 1, "type": "integer",
    }  # fmt: skip
    assert properties["unit"]["enum"] == ["celsius", "kelvin"]
    assert properties["unit"]["description"] == "The unit of temperatures."
    assert "$ref" not in json.dumps(schema)
    assert "title" not in json.dumps(schema)
    compiled(forecast.schema)


def test_arguments_arrive_as_their_types_and_defaults_fill_in() -> None:
    assert call(forecast, place={"city": "Rome"}) == {"city": "Rome", "days": 3, "unit": "CELSIUS", "kinds": None}
    reply = call(forecast, place={"city": "Oslo"}, days=14, unit="kelvin", kinds=["rain"])
    assert reply == {"city": "Oslo", "days": 14, "unit": "KELVIN", "kinds": ["rain"]}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"place": "Rome"},
        {"place": {"city": "Rome"}, "days": "3"},
        {"place": {"city": "Rome"}, "days": 15},
        {"place": {"city": "Rome"}, "unit": "fahrenheit"},
        {"place": {"city": "Rome"}, "kinds": ["snow"]},
        {"place": {"city": "Rome"}, "self": 1},
    ],
)
def test_arguments_that_do_not_fit_are_refused_and_the_function_is_not_called(arguments: dict[str, JSON]) -> None:
    assert call(forecast, **arguments)["error"].startswith("Invalid arguments: ")


async def test_a_tool_is_still_its_function_and_says_what_it_was_told() -> None:
    assert (await forecast(Place(city="Rome"), days=1))["days"] == 1  # type: ignore[arg-type]
    assert (forecast.toolset, forecast.parallel_safe, forecast.missing()) == ("weather", True, None)


@dataclass
class Pair:
    left: int
    right: int


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("text", "text"),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        (Pair(1, 2), {"left": 1, "right": 2}),
        ([1, 2], {"result": [1, 2]}),
        (None, {"result": None}),
        (True, {"result": True}),
        (Unit.KELVIN, {"result": "kelvin"}),
        (ToolResult(False, "half", "the rest is gone"), {"output": "half", "error": "the rest is gone"}),
        (ToolResult(True, "all"), "all"),
    ],
)
def test_whatever_a_function_returns_becomes_a_reply(answer: object, reply: JSON) -> None:
    @tool
    def give() -> object:
        """Give it."""
        return answer

    assert call(give) == reply


def test_an_integer_that_nobody_could_write_is_a_failure_of_the_tool() -> None:
    @tool
    def power(base: int, told: bool) -> object:
        """A power."""
        return ToolResult(True, "all", metadata={"n": base**5000}) if told else [base**5000]

    for told in (True, False):
        check_message(call(power, base=10, told=told)["error"], "ValueError", "Exceeds")


def test_a_plain_function_does_not_hold_up_the_loop() -> None:
    import threading

    @tool
    def where() -> bool:
        """Which thread."""
        return threading.current_thread() is threading.main_thread()

    assert call(where) == {"result": False}


def test_a_plain_function_that_finds_nothing_answers() -> None:
    @tool
    def first() -> str:
        """The first of none."""
        return next(line for line in ())

    assert call(first) == {"error": "Tool execution failed: RuntimeError: coroutine raised StopIteration"}


def test_mistakes_and_failures_are_replies() -> None:
    @tool
    def fail(how: str) -> str:
        """Fail."""
        if how == "mistake":
            raise ToolMistake("no such city", similar=["Rome"])
        raise LookupError("x")

    assert call(fail, how="mistake") == {"error": "no such city", "similar": ["Rome"]}
    assert call(fail, how="bug") == {"error": "Tool execution failed: LookupError: x"}


class Counter:
    def __init__(self) -> None:
        self.calls = 0


def test_a_function_may_ask_for_the_sandbox_and_for_the_run() -> None:
    slot = object()

    async def source() -> Slot:
        return slot  # type: ignore[return-value]

    @tool
    async def peek(sandbox: Slot, run: ToolRun, word: str) -> dict[str, object]:
        """Look around."""
        run.state(Counter).calls += 1
        return {"same": sandbox is slot, "task": run.task_id, "calls": run.state(Counter).calls, "word": word}

    assert list(peek.schema.parameters) == ["word"]
    assert call(peek, source, word="a") == {"same": True, "task": "task-1", "calls": 1, "word": "a"}
    assert call(peek, source, word="a", sandbox=1)["error"].startswith("Invalid arguments: unknown argument 'sandbox'")


def test_an_argument_may_be_called_like_what_can_be_asked_for() -> None:
    @tool
    def odd(task: str, schema: int, _x: bool, copy: str = "c") -> str:
        """Odd names."""
        return f"{task} {schema} {_x} {copy}"

    assert call(odd, task="t", schema=1, _x=True) == "t 1 True c"


def test_only_an_environment_has_the_task() -> None:
    with raises(ConfigError, "cheat"):

        @tool
        def cheat(task: Task) -> str:
            """Look at the answer."""
            return str(task.answer)


class Chain(BaseModel):
    next: Chain | None = None


def untold(city: str) -> str:
    return city


def untyped(city) -> str:  # type: ignore[no-untyped-def]
    """Say it."""
    return str(city)


def many(*cities: str) -> str:
    """Say them."""
    return str(cities)


def misspelt(city: str) -> str:
    """Say it.

    Args:
        cty: The city.
    """
    return city


def opaque(slot: asyncio.Queue[int]) -> str:
    """Say it."""
    return str(slot)


def circular(chain: Chain) -> str:
    """Say it."""
    return str(chain)


def unknown(city: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Say it."""
    return str(city)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untold, "tool untold needs a docstring"),
        (untyped, "parameter 'city' has no type"),
        (many, "cities.* cannot be passed by name"),
        (misspelt, "describes 'cty', which is not a parameter. Did you mean city"),
        (opaque, "tool opaque: .*Queue"),
        (circular, "the type Chain contains itself"),
        (unknown, "annotations of tool .* cannot be read: name 'Nowhere'"),
    ],
)
def test_a_function_that_no_model_could_use_is_refused_by_name(function: Callable[..., object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool(function)


def test_two_ways_to_declare() -> None:
    def city() -> str:
        """Say it."""
        return "Rome"

    named = tool(name="town", missing=lambda: "no map")(city)
    assert isinstance(named, TypedTool)
    assert (named.name, named.missing(), named.is_available()) == ("town", "no map", (False, "no map"))
    assert tool(city).name == "city"


def test_a_tool_says_whether_its_reply_comes_from_beyond_the_machine() -> None:
    @tool(touches_world=True, world_session="station")
    def weather(place: str) -> str:
        """Ask how the weather is."""
        return "rain"

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    assert (weather.touches_world, weather.world_session) == (True, "station")
    assert (add.touches_world, add.world_session) == (False, "")
