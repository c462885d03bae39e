"""Notes, earlier conversations and questions to the user: real where somebody arranged them, refused where not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from palaestra.tools.builtin.clarify import User
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_contract.agent_loop import HermesAgentLoop
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.engine import AssistantMessage, ChatChoice, ChatCompletion, FunctionCall, ToolCallMessage
from palaestra_toolsets.tools.memory import MAX_CHARS, Notes
from palaestra_toolsets.tools.session_search import PastSession, Sessions


async def no_slot() -> Slot:
    raise AssertionError("no slot is needed")


def tools(*shared: object) -> ToolRuntime:
    made = ToolRuntime(build_tool_registry(["memory", "session_search", "clarify"]), no_slot, "t")
    for thing in shared:
        made.share(thing)
    return made


def call(made: ToolRuntime, name: str, **arguments: JSON) -> JSON:
    return json.loads(asyncio.run(made.handle(name, arguments)))


def memory(folder: Path, action: str, target: str = "memory", **more: JSON) -> JSON:
    return call(tools(Notes(folder)), "memory", action=action, target=target, **more)


def test_notes_are_there_for_the_next_session(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert memory(folder, "read")["entries"] == []
    assert not folder.exists()
    memory(folder, "add", content="  tests run with make  ")
    memory(folder, "add", "user", content="likes short answers")
    reply = memory(folder, "add", content="the port is 80\n\nnot 8080")
    assert reply["entries"] == ["tests run with make", "the port is 80\n\nnot 8080"]
    assert reply["usage"] == f"46 of {MAX_CHARS['memory']} characters"
    assert memory(folder, "add", content="tests run with make")["entries"] == reply["entries"]
    assert memory(folder, "replace", old_text="port", content="the port is 81")["entries"][1] == "the port is 81"
    assert memory(folder, "remove", old_text="make")["entries"] == ["the port is 81"]
    assert memory(folder, "read", "user")["entries"] == ["likes short answers"]
    assert (folder / "memory.md").read_text() == "the port is 81"


def test_no_two_notes_are_alike(tmp_path: Path) -> None:
    memory(tmp_path, "add", content="a\r\nb")
    assert memory(tmp_path, "add", content="a\nb")["entries"] == ["a\nb"]
    memory(tmp_path, "add", content="c")
    assert memory(tmp_path, "replace", old_text="c", content="a\r\nb")["entries"] == ["a\nb"]
    assert memory(tmp_path, "remove", old_text="a")["entries"] == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"action": "add"}, "content is needed for add"),
        ({"action": "add", "content": " "}, "content is needed"),
        ({"action": "add", "content": "a\n§\nb"}, "cannot contain the sign"),
        ({"action": "remove", "old_text": "zzz"}, "No note contains that old_text"),
        ({"action": "replace", "old_text": "a", "content": "x"}, "2 notes contain that old_text"),
        ({"action": "add", "content": "x" * 4000}, "would be 4009 of 4000 characters"),
        ({"action": "forget"}, "Invalid arguments"),
    ],
)
def test_what_is_refused_changes_nothing(tmp_path: Path, arguments: JSON, error: str) -> None:
    memory(tmp_path, "add", content="a")
    memory(tmp_path, "add", content="ba")
    reply = call(tools(Notes(tmp_path)), "memory", target="memory", **arguments)
    assert error in reply["error"]
    assert memory(tmp_path, "read")["entries"] == ["a", "ba"]


def add_ten(folder: Path, name: str) -> None:
    for number in range(10):
        Notes(folder).add("memory", f"{name}{number}")


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add_ten, [tmp_path] * 2, "ab"))
    assert sorted(Notes(tmp_path).read("memory")) == sorted(f"{name}{n}" for name in "ab" for n in range(10))


def session(name: str, *said: str, started_at: float = 0.0) -> PastSession:
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return PastSession(session_id=name, started_at=started_at, messages=messages, title=name.title())


def test_earlier_conversations_are_found_by_their_words(tmp_path: Path) -> None:
    store = Sessions(tmp_path, current="now")
    store.save(session("nginx", "Why does nginx answer 502?", "The upstream Socket was missing.", started_at=5.0))
    store.save(session("cake", "How long does a cake bake?", "An hour. " + "Stir. " * 200 + "No socket is needed."))
    store.save(session("now", "socket socket socket"))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "later.json").write_text(
        '{"schema":"palaestra.session/2","session_id":"x","started_at":0,"messages":[]}'
    )
    store.save(session("never", "Which socket?", started_at=1e300))
    (tmp_path / "deep.json").write_text(
        '{"schema":"palaestra.session/1","session_id":"d","started_at":0,"messages":' + "[" * 100_000
    )
    made = tools(store)
    reply = call(made, "session_search", query="socket nginx")
    assert [each["session_id"] for each in reply["results"]] == ["nginx", "cake"]
    assert reply["results"][0] == {
        "session_id": "nginx",
        "started_at": "1970-01-01T00:00:05+00:00",
        "title": "Nginx",
        "excerpts": [
            {"role": "user", "text": "Why does nginx answer 502?"},
            {"role": "assistant", "text": "The upstream Socket was missing."},
        ],
    }
    (excerpt,) = reply["results"][1]["excerpts"]
    assert excerpt["text"].startswith("…")
    assert excerpt["text"].endswith("No socket is needed.")
    assert call(made, "session_search", query="socket", limit=1)["count"] == 1
    assert call(made, "session_search", query="socket", role_filter="user")["count"] == 0
    assert call(made, "session_search", query="zebra crossing")["results"] == []
    assert "query is empty" in call(made, "session_search", query=" ")["error"]
    with pytest.raises(ConfigError, match="session id"):
        store.save(session("../x", "y"))


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("memory", {"action": "read", "target": "user"}, "No notes are kept here"),
        ("session_search", {"query": "x"}, "No earlier conversations are kept here"),
        ("clarify", {"question": "x"}, "There is nobody to ask here"),
    ],
)
def test_where_nobody_arranged_it_the_model_is_told(name: str, arguments: JSON, error: str) -> None:
    assert error in call(tools(), name, **arguments)["error"]


def test_a_question_reaches_the_user() -> None:
    asked: list[tuple[str, Sequence[str]]] = []

    async def ask(question: str, choices: Sequence[str]) -> str | None:
        asked.append((question, choices))
        return "the second" if choices else None

    made = tools(User(ask))
    reply = call(made, "clarify", question="Which?", choices=["a", "b"])
    assert reply == {"question": "Which?", "choices_offered": ["a", "b"], "user_response": "the second"}
    assert "did not answer" in call(made, "clarify", question="Why?")["error"]
    assert asked == [("Which?", ["a", "b"]), ("Why?", [])]


class Once:
    """A server whose model asks for its notes, and then stops."""

    async def chat_completion(self, **request: JSON) -> ChatCompletion:
        said = AssistantMessage(content="done")
        if len(request["messages"]) == 1:
            wanted = FunctionCall(name="memory", arguments='{"action": "read", "target": "memory"}')
            said = AssistantMessage(tool_calls=[ToolCallMessage(id="1", function=wanted)])
        return ChatCompletion(choices=[ChatChoice(message=said, finish_reason="stop")])


@pytest.mark.parametrize("beyond", [frozenset(), frozenset({"memory"})], ids=["rollout", "allowed"])
async def test_a_rollout_has_none_unless_its_environment_says_so(tmp_path: Path, beyond: frozenset[str]) -> None:
    Notes(tmp_path).add("memory", "from before")
    made = tools(Notes(tmp_path))
    definitions, names = made.registry.definitions(), set(made.registry.list_tools())
    loop = HermesAgentLoop(Once(), definitions, names, tool_handler=made.handle, beyond=beyond)
    result = await loop.run([{"role": "user", "content": "hi"}])
    reply = json.loads(str(result.messages[2]["content"]))
    if beyond:
        assert reply["entries"] == ["from before"]
    else:
        assert reply == {"error": "Memory is not available in RL environments."}


def test_links_in_a_folder_of_others_show_and_change_no_other_file(tmp_path: Path) -> None:
    folder, secret = tmp_path / "notes", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("hidden")
    (folder / "memory.md").symlink_to(secret)
    (folder / ".user.md.lock").symlink_to(secret)
    for action, target in (("read", "memory"), ("add", "memory"), ("add", "user")):
        reply = memory(folder, action, target, content="x")
        assert "symbolic links" in reply["error"]
        assert "hidden" not in str(reply)
    assert secret.read_text() == "hidden"
