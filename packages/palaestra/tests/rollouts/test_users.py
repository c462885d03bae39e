"""A user in the conversation: who is asked when, and resumes, forks, replays and exports of such rollouts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

import palaestra
from golden_messages import check_message, raises
from palaestra import ChatModel, ConfigError, Prices, Say, Task, ToolStep, environment
from palaestra.cli.main import main
from palaestra.envs.run.library import assembled
from palaestra.rollouts.chat_model import _Servers
from palaestra.rollouts.counterfactual import fork_of
from palaestra.rollouts.events import ReplyReceived, RolloutResumed, TurnTaken
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.verify import verify_run
from palaestra_slots.core.errors import EngineError, EngineRefused, EngineReplyError
from palaestra_slots.core.types import JSON, Blame, Outcome
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from palaestra_tokens.testing.fake_engine import toy_tokenizer

CALL = '<tool_call>\n{"name": "note", "arguments": {"word": "b"}}\n</tool_call>'
SAID = ["What do you need?", CALL, "Noted. And what else?", "Goodbye."]
TALK = ["assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]
"""The roles of a whole conversation after its prompt."""


class Waiter(TokenChat):
    """Says `SAID`, one after the other, and counts what it samples."""

    def __init__(self, said: Sequence[str] = SAID) -> None:
        self.toy = toy_tokenizer([*SAID, "I want b", "and c"] * 9, plain=("<tool_call>", "</tool_call>"))
        super().__init__(APIServerConfig(model_name="waiter"), tokenizer=self.toy)
        self.said, self.sampled = said, 0

    async def aclose(self) -> None: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> Sampled:
        turn = self.toy.decode(list(input_ids), skip_special_tokens=False).count("<|im_start|>assistant") - 1
        ids = [*self.toy.encode(self.said[min(turn, len(self.said) - 1)]), self.toy.stop_ids[0]]
        self.sampled += len(ids)
        return Sampled(ids, [-1.0] * len(ids), "stop", "7")


asked: list[int] = []


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked.clear()


def cafe(user: Callable[..., Any] | None = None) -> Any:
    @environment(toolsets=[])
    def cafe() -> Iterator[Task]:
        yield Task(id="one", prompt="Hello.", solution=[Say("What?"), ToolStep("note", {"word": "b"}), Say("Bye.")])

    @cafe.state
    def notes() -> dict[str, Any]:
        return {"words": [], "told": 0}

    @cafe.tool
    def note(word: str, state: dict) -> str:  # type: ignore[type-arg]
        """Note a word."""
        state["words"].append(word)
        return "noted"

    def guest(messages: Sequence[JSON], state: dict[str, Any]) -> str | None:
        assert messages[-1]["role"] == "assistant"
        asked.append(len(messages))
        state["told"] += 1
        return ["I want b", "and c", None][min(state["told"], 3) - 1]

    cafe.user(user or guest)

    @cafe.score
    def noted(state: dict[str, Any]) -> float:
        return float(state["words"] == ["b"])

    return cafe


def played(made: Any, **settings: Any) -> palaestra.Run:
    given = {"server": settings.pop("server", None) or Waiter(), "folder": "runs", **settings}
    return palaestra.run_sync(made, **given)


def test_the_user_answers_plain_text_until_nothing_is_left_to_say() -> None:
    engine = Waiter()
    run = played(cafe(), server=engine)
    (rollout,) = run.trajectories
    assert [each["role"] for each in rollout.messages[1:]] == TALK
    assert (rollout.outcome, rollout.reward, len(rollout.turns)) == (Outcome.NATURAL, 1.0, 4)
    assert rollout.state == {"words": ["b"], "told": 3}
    verdict = verify_run(run.path / "journal.jsonl")
    assert verdict.ok, verdict.violation
    assert verdict.trained == engine.sampled  # of the user's words, nothing is trained on
    (row,) = run.to_rows()
    words = engine.toy.decode([each for each, mask in zip(row["completion_ids"], row["mask"], strict=True) if mask])
    assert "I want" not in words
    assert "What do you need?" in words


@pytest.mark.parametrize("last", range(8))
def test_a_conversation_is_resumed_where_it_was_cut_off(last: int) -> None:
    """The journal ends after each of its lines: within a turn whose reply is known, too."""
    engine = Waiter()
    run = played(cafe(), server=engine)
    (whole,) = run.trajectories
    journal = run.path / "journal.jsonl"
    lines, events = journal.read_bytes().splitlines(keepends=True), list(read_journal(journal))
    places = [n for n, event in enumerate(events, 1) if isinstance(event, TurnTaken | ReplyReceived)]
    assert len(places) == 8  # the prompt, four turns, and three replies that a user answered
    journal.write_bytes(b"".join(lines[: places[last]]))
    asked.clear()
    again = Waiter()
    resumed = played(cafe(), server=again, resume=run.path)
    (rollout,) = resumed.trajectories
    assert (rollout.messages, rollout.state, rollout.reward) == (whole.messages, whole.state, 1.0)
    assert rollout.ledger == whole.ledger
    assert [event.anew for event in read_journal(journal) if isinstance(event, RolloutResumed)] in ([""], [])
    known = [event for event in events[: places[last]] if isinstance(event, TurnTaken | ReplyReceived)]
    replies = sum(isinstance(event, ReplyReceived) or (event.turn == 2) for event in known)
    assert again.sampled == engine.sampled * (4 - replies) / 4 or replies
    assert (again.sampled == 0) == (replies == 4)
    answered = sum(isinstance(event, TurnTaken) and event.turn in (1, 3, 4) for event in known)
    assert len(asked) == 3 - answered  # a recorded answer is not asked for again
    assert verify_run(journal).ok


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_fork_begins_with_the_users_answer_and_its_state(turn: int) -> None:
    run = played(cafe())
    asked.clear()
    begins = fork_of(run.path / "journal.jsonl", "000000-one/0", turn, "seed")
    line = {"group_size": 2, "folder": "runs", "server": Waiter()}
    report = asyncio.run(assembled(cafe(), "process", {}, **line)(begins=begins))
    fork = palaestra.open_run(report.folder)
    for each in fork.trajectories:
        assert (each.messages, each.reward, each.state) == (
            run.trajectories[0].messages,
            1.0,
            run.trajectories[0].state,
        )
    assert len(asked) == 2 * sum(place > turn for place in (1, 3, 4))
    verdict = verify_run(fork.path / "journal.jsonl")
    assert verdict.ok, verdict.violation


GREETING: list[JSON] = [{"role": "assistant", "content": "What do you need?"}]


def opened(prompt: Sequence[JSON]) -> Any:
    """An environment whose user speaks first."""

    @environment(toolsets=[])
    def opened() -> Iterator[Task]:
        yield Task(id="one", prompt=[{"role": "system", "content": "Serve."}, *prompt], solution=[Say("What?")])

    @opened.state
    def told() -> dict[str, int]:
        return {"told": 0}

    @opened.user
    def guest(messages: Sequence[JSON], state: dict[str, int]) -> str | None:
        asked.append(len(messages))
        state["told"] += 1
        return ["I want b", "and c", None][min(state["told"], 3) - 1]

    @opened.score
    def heard(state: dict[str, int]) -> bool:
        return state["told"] == 3

    return opened


@pytest.mark.parametrize("prompt", [[], GREETING, [{"role": "user", "content": "?"}, *GREETING]])
def test_the_user_opens_a_conversation_whose_prompt_ends_without_a_message_of_the_user(prompt: list[JSON]) -> None:
    engine = Waiter(["Hm.", "So."])
    run = played(opened(prompt), server=engine)
    (rollout,) = run.trajectories
    roles = [each["role"] for each in rollout.messages]
    assert roles[1 + len(prompt) :] == ["user", "assistant", "user", "assistant"]
    assert rollout.messages[1 + len(prompt)]["content"] == "I want b"
    assert (rollout.reward, len(rollout.turns)) == (1.0, 2)
    verdict = verify_run(run.path / "journal.jsonl")
    assert verdict.ok, verdict.violation
    assert verdict.trained == engine.sampled


OPENED = """
from palaestra import Say, Task, environment

@environment(toolsets=[])
def opened():
    yield Task(id="one", prompt=[{"role": "system", "content": "Serve."}], solution=[Say("What?")])

@opened.user
def guest(messages):
    return f"It is my message after {len(messages)}."

@opened.score
def fine(rollout):
    return "after 1." in rollout.messages[1]["content"]
"""


@pytest.mark.parametrize("policy", ["oracle", "noop"])
def test_the_user_opens_the_conversation_of_a_policy_too(policy: str) -> None:
    Path("my_env.py").write_text(OPENED)
    assert main(["run", "my_env.py", "--policy", policy]) == 0
    (folder,) = Path().glob("runs/*/*")
    (rollout,) = palaestra.open_run(folder).trajectories
    assert [each["role"] for each in rollout.messages] == ["system", "user", "assistant"]
    assert main(["replay", str(folder)]) == 0


@pytest.mark.parametrize("last", range(4))
def test_an_opened_conversation_is_resumed_where_it_was_cut_off(last: int) -> None:
    run = played(opened(GREETING), server=Waiter(["Hm.", "So."]))
    (whole,) = run.trajectories
    journal = run.path / "journal.jsonl"
    lines, events = journal.read_bytes().splitlines(keepends=True), list(read_journal(journal))
    places = [n for n, event in enumerate(events, 1) if isinstance(event, TurnTaken | ReplyReceived)]
    journal.write_bytes(b"".join(lines[: places[last]]))
    asked.clear()
    (rollout,) = played(opened(GREETING), server=Waiter(["Hm.", "So."]), resume=run.path).trajectories
    assert (rollout.messages, rollout.state, rollout.reward) == (whole.messages, whole.state, 1.0)
    answered = sum(isinstance(event, TurnTaken) for event in events[: places[last]])
    assert len(asked) == 3 - answered
    assert verify_run(journal).ok


def test_turns_and_time_are_those_of_the_whole_conversation() -> None:
    async def slow() -> str:
        await asyncio.sleep(0.05)
        return "and?"

    rollout = played(cafe(slow), max_agent_turns=3).trajectories[0]
    assert (rollout.outcome, len(rollout.turns), rollout.messages[-1]["role"]) == (Outcome.MAX_TURNS, 3, "assistant")

    async def stuck() -> str:
        await asyncio.sleep(60)
        return "and?"

    rollout = played(cafe(stuck), worker_timeout=0.3).trajectories[0]
    assert (rollout.outcome, len(rollout.turns), rollout.messages[-1]["role"]) == (Outcome.BUDGET, 1, "assistant")
    assert rollout.reward == 0.0


@pytest.mark.parametrize(("turns", "questions"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_the_user_is_not_asked_after_the_last_turn(turns: int, questions: int) -> None:
    (rollout,) = played(cafe(), max_agent_turns=turns).trajectories
    assert (len(rollout.turns), len(asked), rollout.outcome) == (turns, questions, Outcome.MAX_TURNS)
    assert ("user" in rollout.beside.stages) == bool(questions)
    asked.clear()
    (solved,) = palaestra.run_sync(cafe(), policy="oracle", max_agent_turns=3).trajectories
    assert (solved.outcome, len(asked)) == (Outcome.NATURAL, 1)  # its last step is its last turn


def test_the_reference_ends_with_its_last_step_and_noop_with_its_first_reply() -> None:
    oracle = palaestra.run_sync(cafe(), policy="oracle").trajectories[0]
    assert [each["role"] for each in oracle.messages[1:]] == ["assistant", "user", "assistant", "tool", "assistant"]
    assert (oracle.reward, len(asked)) == (1.0, 1)
    noop = palaestra.run_sync(cafe(), policy="noop").trajectories[0]
    assert (noop.reward, len(noop.messages), len(asked)) == (0.0, 2, 1)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("more", "more"),
        ({"content": "more"}, "more"),
        ({"role": "user", "content": [{"type": "text", "text": "more"}]}, [{"type": "text", "text": "more"}]),
    ],
)
def test_a_user_may_return_text_or_a_message(answer: JSON, content: JSON) -> None:
    rollout = palaestra.run_sync(cafe(lambda: answer), policy="oracle").trajectories[0]
    assert rollout.messages[2] == {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (7, "returned 7; it must return text"),
        ({"role": "assistant", "content": "x"}, "a message with role `user`"),
        ({"role": "user"}, "a message with role `user`"),
        ({"content": {1, 2}}, "a message that is not JSON"),
    ],
)
def test_what_is_no_message_is_the_tasks_failure(answer: JSON, said: str) -> None:
    rollout = palaestra.run_sync(cafe(lambda: answer), policy="oracle").trajectories[0]
    assert (rollout.reward, rollout.blame) == (None, Blame.TASK)
    assert said in rollout.error


def test_an_error_of_the_user_names_its_line() -> None:
    def broken(task: Task) -> str:
        return str(task.nothing)  # type: ignore[attr-defined]

    rollout = palaestra.run_sync(cafe(broken), policy="oracle").trajectories[0]
    assert rollout.blame is Blame.TASK
    check_message(rollout.error, "000000-one/0", "AttributeError")
    assert "test_users.py, line" in rollout.error


def test_a_user_is_declared_once_with_known_parameters() -> None:
    made = cafe()
    with pytest.raises(ConfigError, match="two users"):
        made.user(lambda: None)
    other = environment(toolsets=[])(lambda: iter(()))
    with raises(ConfigError, "messages", "sandbox", "rng"):
        other.user(lambda message: None)


WORKING = """
from palaestra import Say, Task, environment

@environment(toolsets=["terminal"])
def working():
    yield Task(id="one", prompt="Hello.", solution=[Say("Ready?"), "cat from_user > answer", Say("Right?"), "true"])

@working.user
async def person(sandbox, messages, rng):
    await sandbox.write_text("from_user", "42")
    return f"Look at from_user, {rng.random()}."

@working.score
async def right(sandbox):
    return await sandbox.read_text("answer", missing="") == "42"
"""


@pytest.mark.slots
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_user_who_works_in_the_sandbox_does_so_again_on_resume(tmp_path: Path, turn: int) -> None:
    Path("my_env.py").write_text(WORKING)
    run = ["run", "my_env.py", "--policy", "oracle"]
    assert main(run) == 0
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    events = list(read_journal(journal))
    (before,) = palaestra.open_run(journal.parent).trajectories
    place = next(n for n, event in enumerate(events, 1) if isinstance(event, TurnTaken) and event.turn == turn)
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:place]))
    assert main([*run, "--resume", str(journal.parent)]) == 0
    (after,) = palaestra.open_run(journal.parent).trajectories
    assert (after.messages, after.reward) == (before.messages, 1.0)
    assert main(["replay", str(journal.parent)]) == 0


ASKING = """
from palaestra import ChatModel, Prices, Say, Task, ToolStep, environment

@environment(toolsets=["todo"])
def asking(url: str):
    yield Task(id="one", prompt="Hello.", data=url, solution=[
        Say("What is it?"), ToolStep("todo", {}), Say("And?"), ToolStep("todo", {})])

def model(task):
    return ChatModel("m", base_url=task.data, prices=Prices(1.0, 2.0))

@asking.user
async def person(task, messages):
    return await model(task).play_user("You want tea.", messages)

@asking.score
async def judged(task, rollout):
    return float(await model(task).ask(f"How good is this, from 0 to 1? {rollout.final_response}"))
"""


def said(text: str) -> FakeAnswer:
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return FakeAnswer({**completion(text), "usage": usage})


@pytest.mark.parametrize("cut", [None, "first answer", "second answer", "last turn"])
def test_a_model_plays_the_user_and_judges_and_is_not_asked_again(tmp_path: Path, cut: str | None) -> None:
    Path("my_env.py").write_text(ASKING)

    async def scenario() -> None:
        words = ["I want tea.", "With milk.", "0.75"]
        # What the user is asked after the turn that was cut off is new, and the verdict is not.
        new = {None: 0, "first answer": 1, "second answer": 0, "last turn": 0}[cut]
        answers = [said(each) for each in [*words, *words[1 : 1 + new]]]
        async with LoopbackServer(*answers) as server:
            run = ["run", "my_env.py", "--policy", "oracle", "--env.url", server.url]
            assert await asyncio.to_thread(main, run) == 0
            (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
            first = server.seen[0].body if server.seen[0].method == "POST" else server.seen[1].body
            roles = [each["role"] for each in first["messages"]]
            assert roles == ["system", "user", "assistant", "user"]
            assert "You want tea." in first["messages"][0]["content"]
            (rollout,) = palaestra.open_run(journal.parent).trajectories
            assert [each["content"] for each in rollout.messages if each["role"] == "user"][1:] == [
                "I want tea.",
                "With milk.",
            ]
            assert rollout.reward == 0.75
            assert {name: rollout.metrics[name] for name in rollout.metrics if name.startswith("model_")} == {
                "model_calls": 3.0,
                "model_prompt_tokens": 300.0,
                "model_completion_tokens": 30.0,
                "model_cost": pytest.approx(3 * (100 + 20) / 1e6),
            }
            posted = sum(each.method == "POST" for each in server.seen)
            assert posted == 3
            assert await asyncio.to_thread(main, ["replay", str(journal.parent)]) == 0
            if cut is not None:
                turn = {"first answer": 1, "second answer": 3, "last turn": 5}[cut]
                events = list(read_journal(journal))
                place = next(n for n, each in enumerate(events) if isinstance(each, TurnTaken) and each.turn == turn)
                lines = journal.read_bytes().splitlines(keepends=True)
                journal.write_bytes(b"".join(lines[: place + (cut == "last turn")]))
                assert await asyncio.to_thread(main, [*run, "--resume", str(journal.parent)]) == 0
                (again,) = palaestra.open_run(journal.parent).trajectories
                assert (again.messages, again.reward, again.metrics) == (
                    rollout.messages,
                    rollout.reward,
                    rollout.metrics,
                )
            assert sum(each.method == "POST" for each in server.seen) == posted + new

    asyncio.run(scenario())


async def test_a_model_is_asked_outside_of_a_rollout_too() -> None:
    async with LoopbackServer(said("yes")) as server:
        model = ChatModel("m", base_url=server.url, prices=Prices(1, 1))
        assert await model.ask("?") == "yes"
        talk: list[JSON] = [{"role": "user", "content": "a"}]
        assert await model.play_user("You are short.", talk, stop="yes") is None
        assert await model.play_user("You are short.", talk, stop=["no", "ye"], rules="Be a cat.") is None
        assert await model.play_user("You are short.", talk, stop=["no", "never"]) == "yes"
        asked_for = [each.body["messages"][0]["content"] for each in server.seen if each.method == "POST"]
        systems = asked_for[-2:]
        assert systems[0] == "Be a cat.\nYou are short."
        check_message(systems[1])


async def test_a_users_model_that_fails_leaves_the_rollout_unscored() -> None:
    refused = FakeAnswer({"error": {"message": "no such model"}}, status=404)
    async with LoopbackServer(refused) as server:
        model = ChatModel("m", base_url=server.url)

        async def person(messages: Sequence[JSON]) -> str | None:
            return await model.play_user("You want tea.", messages)

        run = await palaestra.run(cafe(person), policy="oracle")
        (rollout,) = run.trajectories
        assert (rollout.reward, rollout.blame) == (None, Blame.ENGINE)
        assert "no such model" in rollout.error


@pytest.mark.parametrize("status", [0, 401, 403, 404, 405])
async def test_errors_of_a_users_model_name_the_model_and_no_setting_of_the_run(status: int) -> None:
    async with LoopbackServer(FakeAnswer({"error": {"message": "no"}}, status=status or 500)) as server:
        address = server.url if status else "http://127.0.0.1:1/v1"
        model = ChatModel("guest-of-honour", base_url=address)

        async def person(messages: Sequence[JSON]) -> str | None:
            return await model.play_user("You want tea.", messages)

        for asked_by in (palaestra.run(cafe(person), policy="oracle", infra_retries=0), None):
            if asked_by is None:
                with pytest.raises(EngineError) as raised:
                    await model.ask("?")
                error = str(raised.value)
            else:
                error = (await asked_by).trajectories[0].error
            assert "ChatModel" in error
            assert "guest-of-honour" in error
            assert str(URL(address).port) in error
            assert "--openai" not in error
            assert "OPENAI_API_KEY" not in error
            assert error.count("api_key of ChatModel") == (status in (401, 403))


def test_journals_without_users_are_as_before(tmp_path: Path) -> None:
    Path("my_env.py").write_text(
        "from palaestra import Task, environment\n\n@environment(toolsets=[])\ndef plain():\n"
        "    yield Task(id='a', prompt='?', solution=[])\n\n@plain.score\ndef fine():\n    return 1\n"
    )
    assert main(["run", "my_env.py", "--policy", "oracle"]) == 0
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    for line in map(json.loads, journal.read_text().splitlines()):
        assert not {"state", "model_calls"} & {*line, *line.get("trajectory", {})}


def test_a_resumed_rollout_asks_a_user_again_who_failed() -> None:
    failures = [EngineRefused("the user's model is away")]

    def guest(messages: Sequence[JSON]) -> str | None:
        asked.append(len(messages))
        if failures:
            raise failures.pop()
        return None

    engine = Waiter()
    run = played(cafe(guest), server=engine, infra_retries=0)
    (failed,) = run.trajectories
    assert (failed.reward, failed.outcome) == (None, Outcome.API_ERROR)
    verdict = verify_run(run.path / "journal.jsonl")
    assert verdict.ok, verdict.violation
    journal = run.path / "journal.jsonl"
    lines, events = journal.read_bytes().splitlines(keepends=True), list(read_journal(journal))
    last = max(n for n, event in enumerate(events, 1) if isinstance(event, TurnTaken | ReplyReceived))
    journal.write_bytes(b"".join(lines[:last]))
    (rollout,) = played(cafe(guest), server=engine, resume=run.path).trajectories
    assert (rollout.outcome, len(asked)) == (Outcome.NATURAL, 2)
    assert engine.sampled == len(engine.toy.encode(SAID[0])) + 1  # the reply was recorded


async def test_a_model_whose_reply_has_no_room_for_text_is_an_error() -> None:
    empty = completion("")
    empty["choices"][0]["finish_reason"] = "length"
    async with LoopbackServer(FakeAnswer(empty)) as server:
        with raises(EngineReplyError, "max_tokens", "ChatModel", "2048"):
            await ChatModel("m", base_url=server.url).ask("?")


async def test_concurrent_questions_share_a_started_connection_and_a_failed_start_is_repeated() -> None:
    class Slow(ChatModel):
        def server(self) -> Any:
            return Connection()

    class Connection:
        started = closed = False

        async def start(self) -> None:
            made.append(self)
            await asyncio.sleep(0)
            if len(made) == 1:
                raise EngineRefused("not yet")
            self.started = True

        async def aclose(self) -> None:
            self.closed = True

    made: list[Connection] = []
    servers, model = _Servers(), Slow("m", base_url="http://127.0.0.1:1")
    with pytest.raises(EngineRefused):
        await servers.of(model)
    found: list[Any] = await asyncio.gather(*(servers.of(model) for _ in range(5)))
    assert [each.started for each in found] == [True] * 5
    assert len(made) == 2
    await servers.aclose()
    assert all(each.closed for each in made)


async def test_a_question_does_not_queue_behind_those_that_waited_for_the_start() -> None:
    class Quick(ChatModel):
        def server(self) -> Any:
            return Connection()

    class Connection:
        async def start(self) -> None:
            await asyncio.sleep(0)

        async def aclose(self) -> None: ...

    servers, model = _Servers(), Quick("m", base_url="http://127.0.0.1:1")
    first, *others = [asyncio.create_task(servers.of(model)) for _ in range(50)]
    await first
    assert not all(each.done() for each in others)
    with pytest.raises(StopIteration):
        servers.of(model).send(None)  # it is answered without a round of the event loop
    await asyncio.gather(*others)


def test_a_plain_hook_with_a_loop_of_its_own_gets_one_clear_error() -> None:
    made = cafe()
    made.scores.clear()

    @made.score
    def judged() -> float:
        return float(asyncio.run(ChatModel("m", base_url="http://127.0.0.1:1").ask("?")))

    rollout = palaestra.run_sync(made, policy="oracle").trajectories[0]
    assert (rollout.reward, rollout.blame) == (None, Blame.TASK)
    check_message(rollout.error, "async def", "await model.ask(...)")


REPEATED = """
from palaestra import ChatModel, Say, Task, environment

@environment(toolsets=[])
def repeated(url: str):
    yield Task(id="one", prompt="Hello.", data=url, solution=[Say("1"), Say("2"), Say("3"), Say("4")])

@repeated.user
async def person(task):
    return await ChatModel("m", base_url=task.data).ask("What next?")

@repeated.score
def fine():
    return 1
"""


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_question_that_is_repeated_each_turn_gets_new_replies_after_a_resume(tmp_path: Path, turn: int) -> None:
    Path("my_env.py").write_text(REPEATED)

    async def scenario() -> None:
        words = ["one", "two", "three"]
        async with LoopbackServer(*(said(each) for each in [*words, *words[turn + 1 :], "none"])) as server:
            run = ["run", "my_env.py", "--policy", "oracle", "--env.url", server.url]
            assert await asyncio.to_thread(main, run) == 0
            (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
            (before,) = palaestra.open_run(journal.parent).trajectories
            events = list(read_journal(journal))
            # The turn after this one was cut off while its reply was known and the user had answered.
            place = next(n for n, each in enumerate(events) if isinstance(each, TurnTaken) and each.turn == turn + 1)
            journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:place]))
            assert await asyncio.to_thread(main, [*run, "--resume", str(journal.parent)]) == 0
            (after,) = palaestra.open_run(journal.parent).trajectories
            assert after.messages == before.messages
            assert await asyncio.to_thread(main, ["replay", str(journal.parent)]) == 0

    asyncio.run(scenario())
