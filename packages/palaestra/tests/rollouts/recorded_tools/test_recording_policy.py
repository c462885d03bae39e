"""Recording what tools were told by the world, and telling it again: order, sessions, failures, what is missing."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra.rollouts.journal.reader import WORLD_NAME
from palaestra.rollouts.recorded_tools.recording_file import Reader
from palaestra.rollouts.recorded_tools.recording_policy import RunWorld, open_world, world_of_run
from palaestra.rollouts.spec import RecordedTools
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import ConfigError, ToolUnavailable
from palaestra_slots.core.types import JSON, Blame
from palaestra_slots.sandbox.slot import Slot

_TEXT = {"type": "string"}


class Outside:
    """A world that never says the same twice. `asked` are the calls that reached it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down = False
        self._count = itertools.count()

    async def ask(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        """One call that reaches the world."""
        self.asked.append(f"{run.task_id}: {arguments['query']}")
        await asyncio.sleep(0)
        if self.down:
            raise ToolUnavailable("the engine is down")
        if arguments["query"] == "bad":
            raise ToolMistake("no such query", hint="another")
        return {"found": f"{arguments['query']} {next(self._count)}"}

    def tools(self) -> list[FunctionTool]:
        """A search, two tools of one browser, and a tool of the slot."""
        search = ToolSchema(
            "search", "Search.", {"query": _TEXT, "limit": {"type": "integer", "default": 5}}, ("query",)
        )
        names = {name: ToolSchema(name, "Browse.", {"query": _TEXT}, ("query",)) for name in ("open", "click", "count")}
        return [
            FunctionTool(search, self.ask, parallel_safe=True, touches_world=True),
            FunctionTool(names["open"], self.ask, touches_world=True, world_session="browser"),
            FunctionTool(names["click"], self.ask, touches_world=True, world_session="browser"),
            FunctionTool(names["count"], self.ask),
        ]


async def no_slot() -> Slot:
    raise AssertionError("no tool here needs a slot")


def agent(world: RunWorld | RecordedTools, outside: Outside, rollout: str = "r/0") -> ToolRuntime:
    return ToolRuntime(ToolRegistry(outside.tools()), no_slot, rollout, middleware=[world.rollout(rollout)])


async def said(tools: ToolRuntime, *calls: tuple[str, str]) -> list[JSON]:
    return [(await tools.call(name, {"query": query})).reply for name, query in calls]


def test_recordings_are_opened_by_the_first_call_that_needs_them(tmp_path: Path) -> None:
    made: list[RunWorld] = []

    def open_one() -> RunWorld:
        made.append(RunWorld())
        return made[-1]

    tools, path = RecordedTools(open_one), tmp_path / WORLD_NAME
    tools.keep(path)
    tools.remember(path)  # a run that is continued and has no recording
    asyncio.run(tools.commit())
    tools.close()
    assert not made
    asyncio.run(said(agent(tools, Outside()), ("search", "a"), ("search", "b")))
    assert len(made) == 1
    tools.close()
    assert len(path.read_text().splitlines()) == 2


CALLS = (
    ("search", "a"),
    ("search", "a"),
    ("search", "b"),
    ("open", "x"),
    ("click", "y"),
    ("open", "x"),
    ("click", "y"),
)


def record(
    path: Path, outside: Outside, *rollouts: str, calls: tuple[tuple[str, str], ...] = CALLS
) -> list[list[JSON]]:
    """Record the same calls by several rollouts that take turns."""

    async def main() -> list[list[JSON]]:
        world = open_world("record")
        world.keep(path)
        try:
            told = await asyncio.gather(*(said(agent(world, outside, rollout), *calls) for rollout in rollouts))
            await world.commit()
            return told
        finally:
            world.close()

    return asyncio.run(main())


def replay(path: Path, *rollouts: str, calls: tuple[tuple[str, str], ...] = CALLS, strict: bool = True) -> list[JSON]:
    """What rollouts are told by a recording. The world is down, so nothing else can answer."""

    async def main() -> list[JSON]:
        world, outside = open_world("replay", path, strict=strict), Outside()
        outside.down = True
        try:
            told = await asyncio.gather(*(said(agent(world, outside, rollout), *calls) for rollout in rollouts))
        finally:
            world.close()
        assert outside.asked == []
        return told

    return asyncio.run(main())


def test_a_recording_tells_each_rollout_what_it_was_told_in_its_order(tmp_path: Path) -> None:
    path, outside = tmp_path / WORLD_NAME, Outside()
    told = record(path, outside, "r/0", "r/1")
    assert len(outside.asked) == 2 * len(CALLS)
    assert told[0] != told[1]
    assert told[0][0] != told[0][1], "the world does not stand still"
    assert replay(path, "r/1", "r/0") == [told[1], told[0]]


def test_the_order_of_the_lines_does_not_matter(tmp_path: Path) -> None:
    path, outside = tmp_path / WORLD_NAME, Outside()
    record(path, outside, "r/0", "r/1", "r/2")
    rollouts = ("r/0", "r/1", "r/2", "other/0", "other/1")
    before = replay(path, *rollouts)
    lines = path.read_text().splitlines(keepends=True)
    for seed in range(5):
        random.Random(seed).shuffle(lines)
        path.write_text("".join(lines))
        assert replay(path, *rollouts) == before


def test_another_rollout_is_told_what_the_first_one_was_and_then_the_world_stands_still(tmp_path: Path) -> None:
    path = tmp_path / WORLD_NAME
    told = record(path, Outside(), "r/1", "r/0")[1]
    searches = (("search", "a"),) * 4
    assert replay(path, "new", calls=searches)[0] == [told[0], told[1], told[1], told[1]]
    assert replay(path, "new") == [told]


def test_a_call_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    path, outside = tmp_path / WORLD_NAME, Outside()
    (told,) = record(path, outside, "r/0", calls=(("search", "a"),))

    async def main() -> None:
        world = open_world("replay", path, strict=True)
        for arguments in ('{"limit": 5.0, "query": "a"}', {"query": "a", "limit": 5}, '{"query":"a"}'):
            assert (await agent(world, outside).call("search", arguments)).reply == told[0]
        with pytest.raises(ToolUnavailable, match="search"):
            await agent(world, outside).call("search", {"query": "a", "limit": 6})
        world.close()

    asyncio.run(main())


def test_what_a_session_says_depends_on_the_calls_before_it(tmp_path: Path) -> None:
    path = tmp_path / WORLD_NAME
    told = record(path, Outside(), "r/0")[0]
    assert replay(path, "new", calls=CALLS[3:5]) == [told[3:5]]
    with raises(ToolUnavailable):
        replay(path, "new", calls=(("click", "y"),))
    assert "not available" in str(replay(path, "new", calls=(("open", "x"), ("open", "x")), strict=False)[0][1])


def test_a_tool_may_say_what_else_decides_its_reply(tmp_path: Path) -> None:
    path, outside, picture = tmp_path / WORLD_NAME, Outside(), {"hash": "red"}

    async def key(arguments: Mapping[str, JSON], run: ToolRun) -> JSON:
        return [arguments, picture["hash"]]

    schema = ToolSchema("look", "Look.", {"query": _TEXT}, ("query",))
    tool = FunctionTool(schema, outside.ask, touches_world=True, world_key=key)

    async def look(world: RunWorld, picture_hash: str) -> ToolReply:
        picture["hash"] = picture_hash
        tools = ToolRuntime(ToolRegistry([tool]), no_slot, "r/0", middleware=[world.rollout("r/0")])
        try:
            return (await tools.call("look", {"query": "a.png"})).reply
        finally:
            world.close()

    recorded = open_world("record")
    recorded.keep(path)
    told = asyncio.run(look(recorded, "red"))
    assert asyncio.run(look(open_world("replay", path), "red")) == told
    with pytest.raises(ToolUnavailable):
        asyncio.run(look(open_world("replay", path, strict=True), "blue"))


def test_what_a_recording_lacks_is_an_error_for_the_model_or_the_end(tmp_path: Path) -> None:
    path = tmp_path / WORLD_NAME
    record(path, Outside(), "r/0")
    ((reply,),) = replay(path, "r/0", calls=(("search", "never asked"),), strict=False)
    check_message(reply["error"])
    with pytest.raises(ToolUnavailable, match=r"r/0") as caught:
        replay(path, "r/0", calls=(("search", "never asked"),))
    assert caught.value.blame is Blame.TOOL


def test_mistakes_are_told_again_and_failures_of_the_world_are_not_recorded(tmp_path: Path) -> None:
    path, outside = tmp_path / WORLD_NAME, Outside()
    (told,) = record(path, outside, "r/0", calls=(("search", "bad"),))
    assert told == [{"error": "no such query", "hint": "another"}]
    assert replay(path, "r/0", calls=(("search", "bad"),)) == [told]
    outside.down = True
    with pytest.raises(ToolUnavailable):
        record(path, outside, "r/1", calls=(("search", "a"),))
    assert len(path.read_text().splitlines()) == 1


def test_a_reply_is_told_before_a_failure_but_to_the_rollout_that_failed(tmp_path: Path) -> None:
    path = tmp_path / WORLD_NAME
    record(path, Outside(), "r/0", "r/1", calls=(("search", "a"),))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"failed": True, "reply": {"error": "slow"}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(path, "r/0", "new", calls=(("search", "a"),)) == [[{"error": "slow"}], [lines[1]["reply"]]]


def test_tools_of_the_slot_are_not_recorded_and_mistaken_calls_never_ask(tmp_path: Path) -> None:
    path, outside = tmp_path / WORLD_NAME, Outside()
    record(path, outside, "r/0", calls=(("count", "a"),))
    assert outside.asked == ["r/0: a"]
    assert not path.exists()


def test_filling_asks_once_for_what_is_not_there_and_keeps_it_for_other_runs(tmp_path: Path) -> None:
    shared, outside = tmp_path / "shared.jsonl", Outside()

    async def run(folder: str, *rollouts: str) -> list[list[JSON]]:
        world = open_world("fill", shared)
        world.keep(tmp_path / folder / WORLD_NAME)
        tools = [agent(world, outside, rollout) for rollout in rollouts]
        try:
            return await asyncio.gather(*(said(each, ("search", "a"), ("search", "bad")) for each in tools))
        finally:
            world.close()

    first = asyncio.run(run("one", "r/0", "r/1"))
    assert first[0][0] == first[1][0]
    assert [call.partition(": ")[2] for call in outside.asked].count("a") == 1
    second = asyncio.run(run("two", "r/7"))
    assert second[0][0] == first[0][0]
    asked = [call.partition(": ")[2] for call in outside.asked]
    assert (asked.count("a"), asked.count("bad")) == (1, 3), "what failed is asked again"
    assert replay(tmp_path / "two", "r/7", calls=(("search", "a"),)) == [[second[0][0]]]


def test_filling_a_session_is_asking_the_world(tmp_path: Path) -> None:
    shared, outside = tmp_path / "shared.jsonl", Outside()

    async def run() -> list[JSON]:
        world = open_world("fill", shared)
        try:
            return await said(agent(world, outside), ("open", "x"))
        finally:
            world.close()

    assert asyncio.run(run()) != asyncio.run(run())
    assert len(outside.asked) == 2


def test_an_attempt_that_was_tried_again_counts_as_it_was_last(tmp_path: Path) -> None:
    path, outside = tmp_path / WORLD_NAME, Outside()
    record(path, outside, "r/0")
    again = record(path, outside, "r/0")
    assert replay(path, "r/0") == again


def test_a_torn_line_is_left_out_and_what_follows_is_not(tmp_path: Path) -> None:
    path, outside = tmp_path / WORLD_NAME, Outside()
    record(path, outside, "r/0", calls=(("search", "a"),))
    with path.open("ab") as file:
        file.write(b'{"schema":"palaestra.world/1","roll')
    (torn,) = replay(path, "r/0", calls=(("search", "a"),))
    (told,) = record(path, outside, "r/0", calls=(("search", "b"),))
    assert replay(path, "r/0", calls=(("search", "a"), ("search", "b"))) == [[*torn, *told]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}\n", "is not a recorded call"),
        ("what\n", "not JSON"),
        ('{"schema": "palaestra.world/9", "rollout": "r", "key": "k", "n": 0}\n', "palaestra.world/9"),
    ],
)
def test_what_is_no_recording_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Reader(path)


async def test_a_recording_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=WORLD_NAME):
        open_world("replay", tmp_path)
    world = world_of_run(tmp_path)
    with pytest.raises(ToolUnavailable, match="does not exist"):
        await said(agent(world, Outside()), ("search", "a"))


def test_what_no_file_can_hold_is_recorded_as_the_model_read_it(tmp_path: Path) -> None:
    async def odd(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        return {"found": "caf\udce9 é"}

    async def main(world: RunWorld) -> str:
        tool = FunctionTool(ToolSchema("odd", "Find."), odd, touches_world=True)
        try:
            return await ToolRuntime(ToolRegistry([tool]), no_slot, "r/0", middleware=[world.rollout("r/0")]).handle(
                "odd", {}
            )
        finally:
            world.close()

    recorded = open_world("record")
    recorded.keep(tmp_path / WORLD_NAME)
    read = asyncio.run(main(recorded))
    assert json.loads(read) == {"found": "caf? é"}
    assert asyncio.run(main(open_world("replay", tmp_path))) == read


async def test_a_failing_tool_is_not_the_worlds_failure(tmp_path: Path) -> None:
    async def broken(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        raise RuntimeError("a bug")

    async def main() -> ToolReply:
        world = open_world("record")
        world.keep(tmp_path / WORLD_NAME)
        tool = FunctionTool(ToolSchema("broken", "Break."), broken, touches_world=True)
        tools = ToolRuntime(ToolRegistry([tool]), no_slot, "r/0", middleware=[world.rollout("r/0")])
        try:
            return (await tools.call("broken", {})).reply
        finally:
            world.close()

    assert await main() == {"error": "Tool execution failed: RuntimeError: a bug"}


async def test_a_rollout_that_is_taken_up_again_hears_what_it_heard_and_asks_only_for_what_is_new(
    tmp_path: Path,
) -> None:
    outside, path, repeats = Outside(), tmp_path / WORLD_NAME, [True]
    before = open_world("record")
    before.keep(path)
    first = await said(agent(before, outside), *CALLS[:5])
    before.close()
    outside.asked.clear()
    world = open_world("record")
    world.remember(path)
    world.keep(path)
    tools = ToolRuntime(
        ToolRegistry(outside.tools()), no_slot, "r/0", middleware=[world.rollout("r/0", lambda: repeats[0])]
    )
    again = await said(tools, *CALLS[:5])
    assert again[:3] == first[:3]
    assert outside.asked == ["r/0: x", "r/0: y"], "a browser has to be led where it was"
    repeats[0] = False
    outside.asked.clear()
    assert (await said(tools, ("search", "a")))[0] not in first, "from here on the world is asked"
    assert outside.asked == ["r/0: a"]
    other = ToolRuntime(ToolRegistry(outside.tools()), no_slot, "r/1", middleware=[world.rollout("r/1", lambda: True)])
    assert (await said(other, ("search", "a")))[0] not in first, "another rollout has heard nothing"
    world.close()
