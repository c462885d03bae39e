"""`env check` and `audit` of environments with function tools: plays that are derived from the reference solution."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.rollouts.events import TurnTaken
from palaestra_audit.cheats.derived_plays import (
    ARGUMENT,
    CALLS,
    IDLE,
    SISTER,
    WITHOUT,
    WORDS,
    derived_plays,
    leak,
    steps_of,
)  # fmt: skip
from palaestra_audit.cheats.proof import Proof, check_environment
from palaestra_audit.cheats.state_changes import Changes, Play, PlayedTurn, TurnRecorder, carried_over, leaves
from palaestra_slots.core.types import Say, Task, ToolStep

ENV = """
from palaestra import Say, Task, ToolError, ToolStep, environment

ROOMS = {"R1": {"guest": "", "price": 80}, "R2": {"guest": "", "price": 96}}
LEDGER = []

@environment(toolsets=[])
def inn():
    for name, room, guest in (("a", "R1", "Ann"), ("b", "R2", "Bob")):
        price = ROOMS[room]["price"]
        yield Task(name, "Hello, a room, please.", data={"room": room, "guest": guest, "price": price}, solution=[
            Say("Which room?"), ToolStep("look", {"room": room}), ToolStep("book", {"room": room, "guest": guest}),
            Say(f"It costs {price}.")])

@inn.state
def rooms():
    return STATE

@inn.user
def guest(task, state):
    state["asked"] += 1
    return f"{task.data['guest']}, {task.data['room']}, please." if state["asked"] == 1 else None

@inn.tool
def look(room: str, *, state) -> dict:
    '''Look at a room.'''
    state["log"].append(room)
    return {"price": state["rooms"][room]["price"]}

@inn.tool
def book(room: str, guest: str, *, state) -> str:
    '''Book a room.'''
    state["log"].append(room)
    LEDGER.append(room)
    if state["rooms"][room]["guest"]:
        raise ToolError("taken")
    state["rooms"][room]["guest"] = guest
    return "booked"

@inn.score
def right(task, state, rollout):
    rooms, said = state["rooms"], str(rollout.final_response)
    wanted = {name: dict(each, guest=task.data["guest"] if name == task.data["room"] else "")
              for name, each in ROOMS.items()}
    price = f"It costs {task.data['price']}."
    return SCORE
"""
FRESH = '{"rooms": {name: dict(each) for name, each in ROOMS.items()}, "asked": 0, "log": []}'


def write(tmp_path: Path, score: str, state: str = FRESH) -> str:
    path = tmp_path / "inn_env.py"
    path.write_text(ENV.replace("SCORE", score).replace("STATE", state))
    return str(path)


def failed(proof: Proof) -> list[str]:
    return [line.policy for line in proof.lines if not line.ok]


@pytest.mark.slots
@pytest.mark.parametrize(
    ("score", "noted"),
    [
        ("rooms == wanted and price == said", ""),
        ("rooms == wanted", "80"),
        ("rooms[task.data['room']]['guest'] == task.data['guest']", "80"),
        ("0.5 * (rooms == wanted) + 0.5 * (price == said)", "its words without its calls earn 0.5"),
    ],
    ids=["both", "state", "one-room", "partial"],
)
def test_a_sound_score_passes_without_commands(score: str, noted: str, tmp_path: Path) -> None:
    proof = check_environment(write(tmp_path, score), [], tasks=2, quiet=True)
    assert not failed(proof), proof.lines
    assert proof.proven
    assert not proof.untried
    assert proof.classes["parts of the solution"] == "closed"
    assert {"conftest-skip", "pth-plant"} & {name for names in proof.not_applicable.values() for name in names}
    about = [each for each in proof.warnings if "further calls" not in each]
    assert len(about) == (2 if noted else 0)
    assert all(noted in each for each in about[:1])


@pytest.mark.slots
@pytest.mark.parametrize(
    ("score", "paid"),
    [
        ("price in said", {"words-only", "without-call", "other-argument"}),
        ("'It costs' in said", {"words-only", "without-call", "other-argument", "other-solution"}),
        ("any(each['guest'] for each in rooms.values())", {"other-argument", "other-solution"}),
        ("rooms[task.data['room']]['guest'] != ''", {"other-argument"}),
        ("len(said) < 9 or rooms == wanted", {"idle-words"}),
    ],
    ids=["words", "any-words", "any-room", "any-guest", "idle"],
)
def test_a_score_that_does_not_ask_for_the_change_is_found(score: str, paid: set[str], tmp_path: Path) -> None:
    proof = check_environment(write(tmp_path, score), [], tasks=1, quiet=True)
    assert set(failed(proof)) == paid
    witnesses = {line.policy: line.witness for line in proof.lines if line.witness}
    assert witnesses.keys() == paid
    assert all(each.task == "a" and each.steps for each in witnesses.values())


@pytest.mark.slots
@pytest.mark.parametrize(
    ("score", "state", "policy", "named"),
    [
        ("rooms == wanted", '{"rooms": ROOMS, "asked": 0, "log": []}', "oracle again", "rooms.R1.guest"),
        ("rooms == wanted and len(LEDGER) < 2", FRESH, "oracle again", "scores 1 and"),
        ("bool(LEDGER)", FRESH, "noop", "same process"),
    ],
    ids=["shared-state", "counted-elsewhere", "paid-ever-after"],
)
def test_what_a_rollout_leaves_for_the_next_one_is_found(
    score: str, state: str, policy: str, named: str, tmp_path: Path
) -> None:
    # Otherwise the room would stay in what the score compares with.
    score = score.replace("wanted", "{**ROOMS, 'R1': {'guest': 'Ann', 'price': 80}}")
    proof = check_environment(write(tmp_path, score, state), [], tasks=1, quiet=True)
    assert failed(proof) == [policy]
    assert named in next(line.error for line in proof.lines if line.policy == policy)
    assert not [line for line in proof.lines if line.state is not None]


@pytest.mark.slots
def test_several_tasks_of_function_tools_are_checked_unless_a_number_is_given(tmp_path: Path) -> None:
    path = write(tmp_path, "rooms == wanted and (price == said or task.id == 'b')")
    assert check_environment(path, [], tasks=None, quiet=True).tasks == ("a", "b")
    assert check_environment(path, [], tasks=1, quiet=True).tasks == ("a",)


@pytest.mark.slots
def test_the_command_of_a_witness_prints_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "price in said")
    assert main(["env", "check", path]) == 1
    command = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("--only words-only"))
    assert main(command.partition("palaestra ")[2].split()) == 1
    assert "say 'It costs 80.'" in capsys.readouterr().out


@pytest.mark.slots
@pytest.mark.parametrize(
    ("score", "state", "kinds"),
    [
        ("rooms == wanted and price in said", FRESH, set[str]()),
        ("price in said", FRESH, {"pays_for_nothing", "weak"}),
        ("rooms[task.data['room']]['guest'] != ''", '{"rooms": ROOMS, "asked": 0, "log": []}', {"flaky"}),
        ("bool(LEDGER)", FRESH, {"flaky"}),
    ],
    ids=["sound", "words", "shared-state", "paid-ever-after"],
)
def test_an_audit_has_witnesses_that_play_again(
    score: str,
    state: str,
    kinds: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, score, state)
    skipped = [word for kind in ("hackable", "depends_on_the_world") for word in ("--skip", kind)]
    assert main(["audit", path, "--json", "--jobs", "1", *skipped]) == bool(kinds)
    found = [each for task in json.loads(capsys.readouterr().out)["tasks"] for each in task.get("findings", [])]
    found = [each for each in found if not each.get("note")]
    assert {each["kind"] for each in found} == kinds
    for each in found:
        assert main(["audit", "replay", f"audits/{Path(path).stem}/audit.json", each["id"]]) == 0


LOOK, BOOK, PAY = ToolStep("look", {"room": "R1"}), ToolStep("book", {"room": "R1"}), ToolStep("pay", {"sum": 9})
ASK, DONE = Say("Which room?"), Say("It costs 9.")


def names(solution: object, *sisters: object) -> list[str]:
    others = [Task(f"s{n}", "p", solution=each) for n, each in enumerate(sisters)]  # type: ignore[arg-type]
    return [play.cheat.name for play in derived_plays(Task("t", "p", solution=solution), others)]  # type: ignore[arg-type]


def test_plays_are_derived_only_from_calls_of_functions() -> None:
    every = [ASK, LOOK, BOOK, DONE]
    assert names(every) == [each.name for each in (IDLE, WORDS, CALLS, WITHOUT, WITHOUT)]
    assert names([BOOK, DONE]) == [WORDS.name, CALLS.name]
    assert names([BOOK]) == []
    assert names(every, every, [ASK, PAY], "echo") == [*names(every), SISTER.name]
    assert names([LOOK, PAY], [ToolStep("look", {"room": "R2"})]) == [
        WITHOUT.name, WITHOUT.name, ARGUMENT.name, ARGUMENT.name, SISTER.name,
    ]  # fmt: skip
    assert names([ToolStep("tell", {"text": "It is late."})], [ToolStep("tell", {"text": "It is early."})]) == [
        SISTER.name
    ]
    assert names([LOOK] * 20).count(WITHOUT.name) == 8
    for others in ("echo hi", ["echo hi", BOOK], [ToolStep("terminal", {"command": "ls"})], [DONE], None, [7]):
        assert steps_of(Task("t", "p", solution=others)) is None  # type: ignore[arg-type]


def play(before: object, *turns: tuple[Sequence[str], object], reward: float = 1.0, replies: str = "") -> Play:
    states = [leaves(before), *(leaves(after) for _, after in turns)]
    taken = [
        PlayedTurn(
            frozenset(tools), frozenset({path for path in {*old, *new} if old.get(path) != new.get(path)}), replies
        )
        for (tools, _), old, new in zip(turns, states, states[1:], strict=False)
    ]
    return Play(reward, before=states[0], after=states[-1], turns=taken)


def test_a_value_that_every_call_changes_may_be_a_record() -> None:
    start = {"log": [], "rooms": {"R1": ""}, "asked": 0}
    looked = {"log": ["look"], "rooms": {"R1": ""}, "asked": 1}
    booked = {"log": ["look", "book"], "rooms": {"R1": "Ann"}, "asked": 1}
    solved = play(start, ((), {**start, "asked": 1}), (["look"], looked), (["book"], booked))
    changes = Changes(solved, solved)
    assert changes.lacking(play(start, (["book"], {**booked, "log": ["book"]}))) == (["log"], False)
    assert changes.lacking(play(start, (["look"], looked))) == (["rooms.R1"], True)
    assert changes.lacking(solved) == ([], False)


@pytest.mark.parametrize(
    ("before", "after", "certain"),
    [
        ({"guest": ""}, {"guest": "Ann"}, True),
        ({"sum": 100}, {"sum": 70}, True),
        ({"rooms": {"R1": 1}}, {"rooms": {}}, True),
        ({"calls": 0}, {"calls": 1}, False),
        ({"log": ["a"]}, {"log": ["a", "b"]}, False),
        ({}, {"seen": True}, False),
    ],
)
def test_with_one_tool_only_what_does_not_grow_is_certain(before: object, after: object, certain: bool) -> None:
    solved = play(before, (["only"], after))
    assert Changes(solved, solved).lacking(play(before))[1] is certain


BOOKING = {"guest": "Ann", "dishes": [{"name": "soup", "price": 8}]}


@pytest.mark.parametrize(
    ("tool", "replies", "certain"),
    [
        ("open_booking", "opened", True),
        ("open_booking", json.dumps(BOOKING), False),
        ("open_booking", json.dumps({"told": json.dumps(BOOKING)}), False),
        ("open_booking", json.dumps({**BOOKING, "guest": "Bob"}), True),
        ("get_booking", "opened", False),
        ("getaway", "opened", True),
    ],
)
def test_what_a_lookup_keeps_of_its_reply_may_be_a_record(tool: str, replies: str, certain: bool) -> None:
    start, kept, paid = {"paid": 0}, {"paid": 0, "bookings": {"B1": BOOKING}}, {"paid": 9, "bookings": {"B1": BOOKING}}
    solved = play(start, ([tool], kept), (["pay"], paid), replies=replies)
    assert Changes(solved, solved).lacking(play(start, (["pay"], {"paid": 9})))[1] is certain
    changed = {"paid": 9, "bookings": {"B1": {**BOOKING, "guest": "Cy"}}}
    assert Changes(solved, solved).lacking(play(start, (["pay"], changed))) == (["bookings.B1.guest"], True)


def test_what_another_solution_changes_may_still_be_kept_by_a_lookup() -> None:
    start, kept, paid = {"paid": 0}, {"paid": 0, "bookings": {"B1": BOOKING}}, {"paid": 9, "bookings": {"B1": BOOKING}}
    solved = play(start, (["get_booking"], kept), (["pay"], paid), replies=json.dumps(BOOKING))
    renamed = {"paid": 0, "bookings": {"B1": {**BOOKING, "guest": "Cy"}}}
    sister = play(start, (["get_booking"], kept), (["rename"], renamed))
    only_paid = play(start, (["pay"], {"paid": 9}))
    assert not Changes(solved, solved, [sister]).lacking(only_paid)[1]
    assert Changes(sister, sister, [solved]).lacking(play(start, (["get_booking"], kept))) == (
        ["bookings.B1.guest"],
        True,
    )


def test_values_of_chance_are_no_evidence() -> None:
    first, second = (play({"id": 0}, (["book"], {"id": 0, "code": code})) for code in ("x7", "q2"))
    assert Changes(first, second).lacking(play({"id": 0})) == ([], False)


def test_a_state_that_begins_otherwise_by_chance_is_no_leak() -> None:
    first = play({"seed": 3, "room": ""}, (["book"], {"seed": 3, "room": "Ann"}))
    second = play({"seed": 8, "room": ""}, (["book"], {"seed": 8, "room": "Ann"}))
    assert not carried_over(first, second)
    assert not leak(first, second)
    third = play({"seed": 8, "room": "Ann"}, (["book"], {"seed": 8, "room": "Ann"}))
    assert carried_over(first, third) == ["room"]


def test_a_failed_call_shows_nothing_about_its_tool() -> None:
    recorder = TurnRecorder()
    take = recorder.handlers()[TurnTaken]
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "book", "arguments": "{}"}}]}
    replies = {"a/0": '{"error": "taken"}', "b/0": "booked"}
    for rollout, reply in replies.items():
        take(TurnTaken(at=0.0, rollout_id=rollout, turn=0, messages=[], state={"x": 1}))
        said = {"role": "tool", "tool_call_id": "1", "content": reply}
        take(TurnTaken(at=0.0, rollout_id=rollout, turn=1, messages=[called, said]))
    turns = {name: recorder.of(name)[2] for name in replies}
    assert [set(turns[name][0].tools) for name in replies] == [set(), {"book"}]
