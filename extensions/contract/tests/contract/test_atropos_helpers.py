"""The functions and classes that Atropos environments import beside the base class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest

from golden_messages import raises
from palaestra_contract.chat_tokenizer import ChatTokenizer
from palaestra_contract.helpers.evaluations import EvalBase
from palaestra_contract.helpers.message_history import ensure_trajectory_token_limit, strip_thinking, truncate_thinking
from palaestra_contract.helpers.reward_functions import CombinedReward, RewardFunction, RewardRegistry, registry
from palaestra_contract.helpers.statistics import compute_stats, get_std_min_max_avg, pass_at_k, select_best_index
from palaestra_contract.helpers.tool_call_text import extract_tool_call, parse_tool_call
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ServerGroup
from palaestra_tokens.testing.fake_engine import toy_tokenizer


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ('<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>', ("look", {"at": 1}, False)),
        ("<tool_call>\n{'name': 'look', 'arguments': {}}\n</tool_call>", ("look", {}, False)),
        ('<tool_call>{"name": "gone", "arguments": {"at": 1}}</tool_call>', ("-ERROR-", {"at": 1}, True)),
        ("<tool_call>{</tool_call>", ("-ERROR-", {}, True)),
        ("<tool_call>[1]</tool_call>", ("-ERROR-", {}, True)),
        ("nothing", ("-ERROR-", {}, True)),
    ],
)
def test_the_first_call_of_a_reply(reply: str, read: tuple[str, dict[str, JSON], bool]) -> None:
    tools = [{"name": "look"}, {"type": "function", "function": {"name": "see"}}]
    assert parse_tool_call(reply, tools) == read


def test_tags_are_tried_in_order() -> None:
    text = "<a> 1 </a><tool_call>2</tool_call>"
    assert [extract_tool_call(text), extract_tool_call(text, ["b", "a"]), extract_tool_call(text, ["b"])] == [
        "2",
        "1",
        None,
    ]


class LengthReward(RewardFunction):
    """The length of a completion."""

    def compute(self, completions: list[JSON], **context: JSON) -> list[float]:
        return [float(len(self.get_content(each))) for each in completions]


class BrokenReward(RewardFunction):
    """Raises."""

    def compute(self, completions: list[JSON], **context: JSON) -> list[float]:
        raise ValueError("no")


def test_reward_functions_are_made_by_name() -> None:
    own = RewardRegistry()
    own.register(LengthReward)
    own.register(name="other")(LengthReward)
    own.register_function("two", lambda completions, **_: 2.0)
    assert own.list_registered() == ["length", "other", "two"]
    said = ["ab", {"role": "assistant", "content": "abc"}, [{"role": "user"}, {"role": "assistant", "content": "a"}]]
    assert own.create("length", weight=0.5)(said) == [1.0, 1.5, 0.5]
    assert own.create({"type": "other", "params": {"weight": 2.0}}, weight=3.0)(["a"]) == [2.0]
    assert own.create("two")(["a", "b"]) == [2.0, 2.0]
    assert BrokenReward()(["a", "b"]) == [0.0, 0.0]
    with pytest.raises(TypeError, match="not a subclass"):
        own.register(int)
    with raises(ImportError, "missing", "length"):
        own.get("missing")


def test_combined_rewards() -> None:
    registry.register(LengthReward)
    registry.register(BrokenReward)
    said = ["a", "abc", "<think>x</think>"]
    parts: list[str | dict[str, JSON]] = ["length", {"type": "format", "weight": 3.0}, "broken"]
    assert CombinedReward(parts).compute(said) == [1.0, 3.0, 17.0]
    assert CombinedReward(parts, normalization="sum").compute(said) == [1 / 5, 3 / 5, 17 / 5]
    assert CombinedReward(parts, normalization="minmax").compute(said) == [0.0, 0.125, 1.0]
    assert CombinedReward(parts).compute([]) == []


def test_statistics() -> None:
    found = get_std_min_max_avg("t", [1.0, 3.0], {"a": 1})
    assert found == {"a": 1, "t_mean": 2.0, "t_std": 1.0, "t_max": 3.0, "t_min": 1.0}
    assert compute_stats([1, [2, [3]]])["mean"] == 2
    assert pass_at_k(5, 1, 1) == pytest.approx(0.2)
    assert pass_at_k(5, 3, 4) == 1.0
    assert select_best_index([1, 2, 2], [5, 9, 3]) == 2
    assert select_best_index([1, 2, 2], [5, 9, 3], secondary_lower_is_better=False) == 1
    assert select_best_index([1, 2, 1], [5, 9, 5], primary_higher_is_better=False) == 0
    with pytest.raises(ValueError, match="same length"):
        select_best_index([1], [1, 2])


def test_thinking_is_stripped_or_shortened() -> None:
    assert strip_thinking("a<think>b</think>c") == "ac"
    assert strip_thinking("a<think>b") == "a<think>b"
    tokenizer = ChatTokenizer(toy_tokenizer())
    count = len(tokenizer.encode("one"))
    long = "x<think>\none\n\ntwo two\n\nend\n</think>\ny"
    assert truncate_thinking(long, tokenizer, 100) == "x<think>\none\n\ntwo two\n\nend\n</think>\ny"
    assert truncate_thinking(long, tokenizer, count) == "x<think>\n... end\n</think>\ny"
    assert truncate_thinking("x<think> </think>y", tokenizer, 1) == "x<think></think>y"
    assert truncate_thinking("<think>abcdef</think>y", tokenizer, 2) == "<think>\n... ef\n</think>y"


def test_long_steps_lose_their_oldest_turns() -> None:
    tokenizer = ChatTokenizer(toy_tokenizer())
    chat = [{"role": "system", "content": "s"}]
    for turn in range(4):
        chat += [{"role": "environment", "content": f"o{turn}"}, {"role": "agent", "content": f"a{turn}"}]
    ids = tokenizer.apply_chat_template(chat)
    step = {"messages": [chat, chat], "tokens": [ids, ids], "masks": [ids, ids], "seed": 1, "scores": [0, 1]}
    step["parsed_actions"] = [0, 1]
    limit = len(tokenizer.apply_chat_template([chat[0], *chat[-4:]]))
    (kept,) = ensure_trajectory_token_limit([step], tokenizer, limit)
    assert kept["messages"] == [[chat[0], *chat[-4:]]] * 2
    assert [len(row) for row in kept["tokens"]] == [limit, limit]
    assert kept["scores"] == [0, 1]
    assert ensure_trajectory_token_limit([step], tokenizer, len(ids)) == [step]
    assert ensure_trajectory_token_limit([step, {"messages": []}], tokenizer, 1) == []


class Sums(EvalBase):
    """Asks for a sum."""

    eval_dir: ClassVar[str]

    def setup_data(self) -> list[JSON]:
        return [1, 2]

    async def run_item(self, server: ServerGroup, data_item: JSON) -> tuple[dict[str, float], JSON]:
        return {"right": float(data_item == 1), "temperature": self.get_generation_params()["temperature"]}, {
            "item": data_item
        }


async def test_an_evaluation_writes_its_metrics_and_samples(tmp_path: Path) -> None:
    server = ServerGroup(APIServerConfig(server_type="scripted", model_name="noop"))
    evaluation = Sums(temperature=0.5, eval_dir=str(tmp_path / "out"), pass_at_n_samples=4)
    assert await evaluation(server) == {"right": 0.5, "temperature": 0.5}
    report = json.loads((tmp_path / "out/metrics.json").read_text())
    assert report["results"]["atropos|Sums@1:4|0"] == report["results"]["all"] == {"right": 0.5, "temperature": 0.5}
    assert report["config_general"]["generation_parameters"]["n"] == 4
    assert [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()] == [
        {"item": 1},
        {"item": 2},
    ]
