"""The example of tau2-bench: conversations and their scores, against the original's where that is installed."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import importlib.util
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import palaestra
from palaestra import ToolError
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

EXAMPLE = Path(__file__).parents[2] / "examples/tau2_retail.py"
CHANGES = ("cancel_", "exchange_", "modify_", "return_")
STOP = "###STOP###"

Call: TypeAlias = tuple[str, dict[str, Any]]
Talk: TypeAlias = Sequence[str | Call]
"""The agent's part of a conversation: texts, which the user answers, and calls."""


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("tau2_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def completed(said: str | Call) -> FakeAnswer:
    if isinstance(said, str):
        return FakeAnswer(completion(said))
    call = {"id": "c", "type": "function", "function": {"name": said[0], "arguments": json.dumps(said[1])}}
    return FakeAnswer(completion(None, "tool_calls", tool_calls=[call]))


def both_sides(talk: Talk) -> list[str | Call]:
    """What the user and the agent say, one after the other. The user ends the conversation after the last text."""
    said: list[str | Call] = ["Hello."]
    for each in talk:
        said += [each, "Yes."] if isinstance(each, str) else [each]
    return [*said[:-1], STOP]


async def played(form: Any, talks: Sequence[Talk], folder: Path, **settings: Any) -> palaestra.Run:
    answers = [completed(each) for talk in talks for each in both_sides(talk)]
    async with LoopbackServer(*answers) as server:
        given = {"user_model": "user", "user_url": server.url, "concurrency": 1, **settings}
        run = await palaestra.run(form, model="agent", base_url=server.url, folder=folder, **given)
        assert sum(each.method == "POST" for each in server.seen) == len(answers)
    return run


ORDER = {
    "order_id": "#1",
    "user_id": "ada",
    "address": {},
    "items": [{"name": "Cup", "product_id": "p", "item_id": "i1", "price": 3.0, "options": {"size": "s"}}],
    "status": "pending",
    "payment_history": [{"transaction_type": "payment", "amount": 3.0, "payment_method_id": "gift"}],
}
USER = {
    "user_id": "ada",
    "name": {"first_name": "Ada", "last_name": "Stone"},
    "address": {"zip": "11111"},
    "email": "Ada@example.org",
    "payment_methods": {
        "gift": {"source": "gift_card", "id": "gift", "balance": 1.5},
        "card": {"source": "credit_card", "id": "card"},
    },
    "orders": ["#1", "#2"],
}
VARIANTS = {
    name: {"item_id": name, "options": {"size": size}, "available": there, "price": price}
    for name, size, there, price in (("i1", "s", True, 3.0), ("i2", "m", True, 5.0), ("i3", "l", False, 4.0))
}
SWAP = {"item_ids": ["i1"], "new_item_ids": ["i2"], "payment_method_id": "card"}
POOR, GONE = {**SWAP, "payment_method_id": "gift"}, {**SWAP, "new_item_ids": ["i3"]}
PLACE = {"address1": "Hill 1", "address2": "", "city": "Rom", "state": "NY", "country": "USA", "zip": "22222"}
TASKS: dict[str, tuple[list[Call], list[str]]] = {
    "cancel": ([("cancel_pending_order", {"order_id": "#1", "reason": "no longer needed"})], []),
    "ask": ([("get_order_details", {"order_id": "#1"})], ["3.00"]),
    "swap": ([("exchange_delivered_order_items", {"order_id": "#2", **SWAP})], ["2.0"]),
    "nothing": ([("transfer_to_human_agents", {"summary": "?"})], []),
    "move": ([("modify_user_address", {"user_id": "ada", **PLACE})], []),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    shop = tmp_path / "data/domains/retail"
    shop.mkdir(parents=True)
    rows = {
        "users": {"ada": USER},
        "orders": {"#1": ORDER, "#2": {**ORDER, "order_id": "#2", "status": "delivered"}},
        "products": {"p": {"name": "Cup", "product_id": "p", "variants": VARIANTS}},
    }
    (shop / "db.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (shop / "policy.txt").write_text("Be kind.")
    tasks = [
        {
            "id": name,
            "user_scenario": {"instructions": {"reason_for_call": f"Please {name}.", "unknown_info": None}},
            "evaluation_criteria": {
                "actions": [{"name": called, "arguments": arguments} for called, arguments in actions],
                "communicate_info": told,
            },
        }
        for name, (actions, told) in TASKS.items()
    ]
    (shop / "tasks.json").write_text(json.dumps(tasks))
    (shop / "split_tasks.json").write_text(json.dumps({"base": [*TASKS], "small": ["ask"]}))
    rules = shop.parents[1] / "user_simulator/simulation_guidelines.txt"
    rules.parent.mkdir()
    rules.write_text("Play a customer.")
    return tmp_path / "data"


def rewards(run: palaestra.Run) -> dict[str, float | None]:
    return {each.task_id: each.reward for each in run.trajectories}


def test_the_reference_is_right_and_doing_nothing_gets_the_floor(example: Any, tmp_path: Path, data: Path) -> None:
    form = example.tau2_retail(data=str(data))
    right = palaestra.run_sync(form, policy="oracle", folder=tmp_path)
    assert rewards(right) == dict.fromkeys(TASKS, 1.0)
    nothing = palaestra.run_sync(form, policy="noop", folder=tmp_path)
    assert rewards(nothing) == {name: float(name == "nothing") for name in TASKS}


@pytest.mark.parametrize(
    ("task", "talk", "reward"),
    [
        ("cancel", ["Sure?", *TASKS["cancel"][0], "Done."], 1.0),
        ("cancel", [*TASKS["cancel"][0], *TASKS["cancel"][0], "Done."], 1.0),
        ("cancel", [("cancel_pending_order", {"order_id": "#1", "reason": "bored"}), "Done."], 0.0),
        ("cancel", [*TASKS["cancel"][0], *TASKS["move"][0], "Done."], 0.0),
        ("ask", ["It costs 3.00 dollars."], 1.0),
        ("ask", ["It costs 3 dollars."], 0.0),
        (
            "swap",
            [("exchange_delivered_order_items", {"order_id": "#2", **SWAP, "payment_method_id": "gift"}), "2.0"],
            0,
        ),
        ("swap", [("exchange_delivered_order_items", {"order_id": "#2", **SWAP, "new_item_ids": ["i3"]}), "2.0"], 0.0),
        ("swap", [*TASKS["swap"][0], "You owe 2.0."], 1.0),
        ("move", [("find_user_id_by_email", {"email": "ada@EXAMPLE.org"}), *TASKS["move"][0], "Done."], 1.0),
    ],
)
async def test_a_conversation_with_a_customer(
    example: Any, tmp_path: Path, data: Path, task: str, talk: Talk, reward: float
) -> None:
    run = await played(example.tau2_retail, [talk], tmp_path, data=str(data), task=task)
    assert rewards(run) == {task: reward}
    (rollout,) = run.trajectories
    assert [each["role"] for each in rollout.messages[:2]] == ["system", "user"]
    texts = [each["content"] for each in rollout.messages if each["role"] == "user"]
    assert texts == ["Hello.", *["Yes."] * (sum(isinstance(each, str) for each in talk) - 1)]


async def test_the_customer_gets_the_scenario_and_the_rules(example: Any, tmp_path: Path, data: Path) -> None:
    async with LoopbackServer(FakeAnswer(completion(STOP))) as server:
        given: dict[str, Any] = {"data": str(data), "user_model": "u", "user_url": server.url, "split": "small"}
        await palaestra.run(example.tau2_retail(**given), policy="oracle", folder=tmp_path)
        (asked,) = [each.body for each in server.seen if each.method == "POST"]
        assert asked["messages"][0]["content"].startswith("Play a customer.\n")
        assert "Please ask." in asked["messages"][0]["content"]


def test_calculations(example: Any) -> None:
    assert example.calculate(expression=" 2 * (3 + 4.5) / -4") == "-3.75"
    for wrong in ("1 / 0", "2 ** 9", "x", "1 +", "(" * 9999, "'a' * 9", "True + 1j"):
        with pytest.raises(ToolError):
            example.calculate(expression=wrong)


def rows_of(original: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((original / "domains/retail/tasks.json").read_text())
    return rows


def actions_of(row: dict[str, Any]) -> list[Call]:
    return [(each["name"], each["arguments"]) for each in row["evaluation_criteria"]["actions"]]


def altered(call: Call, rng: random.Random) -> Call:
    """A call with one other argument."""
    name, arguments = call[0], dict(call[1])
    which = rng.choice(sorted(arguments))
    other = {
        "payment_method_id": "gift_card_0000000",
        "order_id": "#W0000000",
        "user_id": "sara_doe_496",
        "reason": "ordered by mistake" if arguments.get("reason") == "no longer needed" else "no longer needed",
    }
    value = arguments[which]
    arguments[which] = value[1:] + value[:1] if isinstance(value, list) and len(value) > 1 else value
    if arguments[which] == value:
        arguments[which] = [] if isinstance(value, list) else other.get(which, f"{value} A")
    return name, arguments


def talk_of(row: dict[str, Any], kind: str, rng: random.Random) -> Talk:
    calls, told = actions_of(row), " and ".join(row["evaluation_criteria"]["communicate_info"])
    changing = [place for place, (name, _) in enumerate(calls) if name.startswith(CHANGES)]
    last = f"It is done: {told}."
    if not changing and kind in ("one change less", "another argument", "twice"):
        kind = "silent"
    match kind:
        case "right":
            return ["Shall I do it?", *calls, last]
        case "in small steps":
            return [each for call in calls for each in (call, "And now?")] + [last.upper()]
        case "changes only":
            return ["Do you confirm?", *(calls[place] for place in changing), last]
        case "silent":
            return ["Do you confirm?", *calls, "It is done."]
        case "one change less":
            return [*(call for place, call in enumerate(calls) if place != rng.choice(changing)), last]
        case "another argument":
            place = rng.choice(changing)
            return [*calls[:place], altered(calls[place], rng), *calls[place + 1 :], last]
        case "stumbling":
            wrong = [altered(rng.choice(calls), rng), ("get_order_details", {"order_id": "#W0"})] if calls else []
            return ["One moment.", *wrong, *calls, last]
        case "twice":
            return [*calls, *(calls[place] for place in changing), last]
    return ["Goodbye."]


KINDS = [
    *("right", "in small steps", "changes only", "silent"),
    *("one change less", "another argument", "stumbling", "twice", "nothing"),
]


def scores_of_original(data: Path, talks: dict[str, Talk], folder: Path) -> dict[str, float]:
    """The scores that the original gives to these conversations, by task."""
    import inspect_ai
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    retail = importlib.import_module("inspect_evals.tau2.tau2")
    rows = [row for row in rows_of(data) if row["id"] in talks]
    chosen = folder / "tasks.json"
    chosen.write_text(json.dumps(rows))
    said: dict[bool, list[ModelOutput]] = {True: [], False: []}
    for row in rows:
        user_next = True
        for each in both_sides(talks[row["id"]]):
            if isinstance(each, str):
                said[user_next].append(ModelOutput.from_content("mockllm", each))
                user_next = not user_next
            else:
                said[False].append(ModelOutput.for_tool_call("mockllm", *each))
    for output in (*said[True], *said[False]):
        output.usage = ModelUsage()  # otherwise its tokens are counted with a file from the network
    user_says, agent_says = iter(said[True]), iter(said[False])
    user = get_model("mockllm/model", custom_outputs=user_says, memoize=False)
    agent = get_model("mockllm/model", custom_outputs=agent_says, memoize=False)
    task = retail.tau2_retail(shuffle=False, tasks_file_override=str(chosen))
    (log,) = inspect_ai.eval(
        task, model=agent, model_roles={"user": user}, max_samples=1, display="none", log_dir=str(folder / "logs")
    )
    assert log.status == "success"
    assert [*user_says, *agent_says] == []
    assert log.samples is not None
    return {
        str(sample.id): float({"C": 1, "I": 0}[str(score.value)])
        for sample in log.samples
        for score in (sample.scores or {}).values()
    }


def only_rows_of(tasks: Sequence[dict[str, Any]], original: Path, folder: Path) -> Path:
    """A folder with the data of the original, but of the database only the rows near to these tasks. The original
    compares the whole database after each call, which takes seconds."""
    shop, text = folder / "data/domains/retail", json.dumps(tasks)
    shop.mkdir(parents=True)
    for name in ("policy.txt", "split_tasks.json", "tasks.json"):
        (shop / name).symlink_to(original / "domains/retail" / name)
    (folder / "data/user_simulator").symlink_to(original / "user_simulator")
    rows = json.loads(gzip.decompress((original / "domains/retail/db.json.gz").read_bytes()))
    near = {each["user_id"] for each in rows["orders"].values() if each["order_id"] in text}
    near |= {name for name, each in rows["users"].items() if name in text or each["name"]["last_name"] in text}
    rows["users"] = {name: each for name, each in rows["users"].items() if name in near}
    rows["orders"] = {name: each for name, each in rows["orders"].items() if each["user_id"] in near}
    (shop / "db.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    return folder / "data"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
async def test_conversations_get_the_scores_of_the_original(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("inspect_evals.tau2")
    original = Path(importlib.import_module("inspect_evals.tau2.utils").TAU2_DATA_DIR)
    rng = random.Random(kind)
    tasks = rng.sample(rows_of(original), 8)
    data = only_rows_of(tasks, original, tmp_path)
    tools = importlib.import_module("inspect_evals.tau2.retail.RetailAgentTools")
    monkeypatch.setattr(tools, "TAU2_DATA_DIR", data)
    talks = {row["id"]: talk_of(row, kind, rng) for row in tasks}
    wanted = scores_of_original(data, talks, tmp_path)
    ordered = [talks[row["id"]] for row in rows_of(data) if row["id"] in talks]
    run = await played(example.tau2_retail, ordered, tmp_path, data=str(data), task=",".join(talks))
    assert rewards(run) == wanted
    print(f"{kind}: {len(wanted)} conversations, {sum(wanted.values()):g} right")
    if kind in ("right", "in small steps", "one change less", "nothing"):
        assert (min(wanted.values()) == 1.0) == (kind in ("right", "in small steps"))


def random_call(actions: Sequence[Call], rows: dict[str, Any], rng: random.Random) -> Call:
    """A call of the reference, or one on any order with arguments that often fit."""
    name, arguments = rng.choice(actions)
    if rng.random() < 0.3:
        return altered((name, arguments), rng)
    if "order_id" not in arguments or rng.random() < 0.2:
        return name, arguments
    order = rows["orders"][rng.choice(sorted(rows["orders"]))]
    some = rng.choices(order["items"], k=rng.choice([1, 1, 2, 3]))
    fitting = {
        "order_id": order["order_id"],
        "item_ids": [each["item_id"] for each in some],
        "new_item_ids": [rng.choice(sorted(rows["products"][each["product_id"]]["variants"])) for each in some],
        "payment_method_id": rng.choice(sorted(rows["users"][order["user_id"]]["payment_methods"])),
    }
    return name, {key: fitting.get(key, value) for key, value in arguments.items()}


def without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nothing(each) for key, each in value.items() if each is not None}
    return [without_nothing(each) for each in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_the_tools_change_the_database_as_the_original_does(example: Any) -> None:
    original = pytest.importorskip("inspect_evals.tau2.retail.RetailAgentTools")
    inspect_tools = importlib.import_module("inspect_ai.tool")
    data, rng = str(original.TAU2_DATA_DIR), random.Random(0)
    theirs = original.RetailAgentTools(instance="compared")
    theirs.initialize()
    own, tools = example.Shop(data, {}, {}), {each.name: each for each in example.tau2_retail.tools}
    actions = [each for row in rows_of(Path(data)) for each in actions_of(row)]
    actions = [each for each in actions if each[0] not in ("calculate", "transfer_to_human_agents")]
    actions += [("modify_pending_order_payment", {"order_id": "#", "payment_method_id": ""})] * 60
    rows, done = example.database(data), Counter[tuple[str, bool]]()
    for name, arguments in (random_call(actions, rows, rng) for _ in range(3000)):
        expected = found = None
        with contextlib.suppress(inspect_tools.ToolError):
            expected = getattr(theirs, name)(**arguments)
        with contextlib.suppress(ToolError):
            found = tools[name](**arguments, shop=own)
        assert (found is None) == (expected is None), (name, arguments)
        if isinstance(found, dict):
            assert found == without_nothing(json.loads(expected)), (name, arguments)
        else:
            assert found == expected
        done[name, found is not None] += 1
    assert {name for name, worked in done if worked} == {name for name, _ in actions}
    assert {name for name, worked in done if not worked} == {name for name, _ in actions}
    left = theirs.db.model_dump(mode="json")
    for table, changed in (("users", own.users), ("orders", own.orders)):
        assert rows[table] | changed == without_nothing(left[table])


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 340  # the original has 1,196, and 1,200 that its domains share
