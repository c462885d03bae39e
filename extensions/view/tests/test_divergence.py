"""Where rollouts part, compared with a plain search on generated pairs."""

from __future__ import annotations

import json
import random
from array import array

from recorded import call, rollout, say

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.ledger import Ledger, SegmentReason
from palaestra_tokens.ledger.records import packed
from palaestra_view.check_evidence import check_facts, gist, listed_tests, short
from palaestra_view.divergence import Call, calls_of, differing_call, first_difference, siblings


def plain_search(one: list[int], other: list[int]) -> int | None:
    for place in range(max(len(one), len(other))):
        if place >= len(one) or place >= len(other) or one[place] != other[place]:
            return place
    return None


def test_the_first_differing_token_is_that_of_a_plain_search_on_1000_pairs() -> None:
    rng = random.Random(11)
    kinds = set()
    for _ in range(1000):
        one = [rng.choice([0, 1, 255, 256, 65536, 2**31 - 1]) for _ in range(rng.randrange(60))]
        other = [*one[: rng.randrange(len(one) + 1)], *(rng.randrange(3) for _ in range(rng.randrange(5)))]
        other = one[:] if rng.random() < 0.1 else other
        found = first_difference(packed(array("i", one)), packed(array("i", other)))
        assert found == plain_search(one, other), (one, other)
        kinds.add("equal" if found is None else "ends" if found >= min(len(one), len(other)) else "differs")
    assert kinds == {"equal", "ends", "differs"}


def test_the_first_differing_call_is_that_of_a_plain_search_on_1000_pairs() -> None:
    rng = random.Random(12)

    def messages(names: list[str]) -> list[Message]:
        calls = [call(place, json.dumps({"b": name, "a": 1})) for place, name in enumerate(names)]
        return [{"role": "assistant", "content": "", "tool_calls": [each]} for each in calls]

    for _ in range(1000):
        one = [rng.choice("xyz") for _ in range(rng.randrange(12))]
        other = [*one[: rng.randrange(len(one) + 1)], *(rng.choice("xyz") for _ in range(rng.randrange(3)))]
        found = differing_call(list(calls_of(messages(one))), list(calls_of(messages(other))))
        assert found == plain_search([ord(each) for each in one], [ord(each) for each in other])


def test_arguments_are_compared_as_values_and_malformed_ones_as_text() -> None:
    texts = ('{"a": 1, "b": 2}', '{"b":2,"a":1}', '{"a": ', None)
    made = [
        list(calls_of([{"role": "assistant", "content": "", "tool_calls": [call(1, each)]}]))  # type: ignore[arg-type]
        for each in texts
    ]
    assert differing_call(made[0], made[1]) is None
    assert differing_call(made[0], made[2]) == 0
    assert made[3] == [Call(1, "weather", "null", 0, 0)]
    assert list(calls_of([{"role": "assistant", "content": "", "tool_calls": ["no call", {"function": 3}]}])) == [
        Call(1, "None", "null", 0, 0), Call(1, "None", "null", 0, 1),
    ]  # fmt: skip


def exact(index: int, ids: list[int], reward: float, **fields: JSON) -> JSON:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    say(ledger, segment, [1, 2], [7, 9], "s")
    say(ledger, segment, [3], ids, "s")
    return rollout(index, [{"role": "assistant", "content": "x"}], reward, ledger=ledger.record(), **fields)


def test_siblings_are_compared_with_the_best_one() -> None:
    tests = {"tests": {"a": True, "b": False}}
    found = siblings(
        [
            exact(0, [5, 6, 9], 0.0, detail=tests, metrics={"speed": 1.0, "same": 2.0}),
            exact(1, [5, 8, 9], 1.0, detail={"tests": {"a": True, "b": True}}, metrics={"speed": 3.0, "same": 2.0}),
        ]
    )
    assert found["reference"] == "000000-sky/1"
    assert [each["token"] for each in found["rollouts"]] == [{"index": 6, "turn": 2, "kind": "sampled"}, None]
    assert found["tests"] == {"b": ["failed", "passed"]}
    assert found["criteria"] == {"speed": [1.0, 3.0]}
    assert siblings([exact(0, [5], 0.0), exact(1, [5], 1.0)], "000000-sky/0")["reference"] == "000000-sky/0"


def test_tests_are_found_in_every_form_of_evidence() -> None:
    detail = {
        "not_passed": ["t::a"],
        "report": {"t::b": "PASSED", "t::c": "skipped"},
        "checks": {"d": True},
        "on": True,
    }
    assert {each.name: each.status for each in listed_tests(detail)} == {
        "t::a": "failed", "t::b": "passed", "t::c": "skipped", "d": "passed",
    }  # fmt: skip
    for form in (
        {"not_passed": {"a": "boom"}},
        {"not_passed": {"a": {"$cut": "/x", "head": "boom", "tail": "", "chars": 4}}},
        {"report": {"failures": {"a": {"message": "boom"}}}},
        {"tests": [{"name": "a", "passed": False, "output": "boom"}]},
        {"failed": [{"nodeid": "a", "longrepr": "boom"}]},
    ):
        (found,) = listed_tests(form)
        assert (found.name, found.status, found.output.strip()) == ("a", "failed", "boom")
    assert not list(
        listed_tests({"error": {"type": "x", "message": "y"}, "output": "failed", "files": [{"name": "a"}]})
    )


def test_the_number_of_tests_is_named_only_if_it_is_known() -> None:
    many = {"not_passed": {f"t{n}": "x" for n in range(20)}}
    found = check_facts(many, {"tests_passed": 5.0, "tests_total": 30.0})
    assert (found["failures"], found["total"], len(found["failed"])) == (25, 30, 20)
    assert check_facts({"not_passed": ["a"]}, {"tests_passed": 0.5})["total"] is None
    assert check_facts({"work_failed": "ValueError: x"}, {})["breaks"] == "ValueError: x"


def test_the_gist_of_an_output_is_what_explains_it() -> None:
    assert gist("def f():\n>   assert 1 == 2\nE   assert 1 == 2\nE    +1\n") == "assert 1 == 2\n+1"
    trace = "Traceback (most recent call last):\n  File 'a', line 1\n    f(x)\n    ~^^^\nValueError: no"
    assert gist(trace) == "File 'a', line 1\nf(x)\nValueError: no"
    assert gist("a\n\nb\nc\nd") == "a\nb\nc"
    assert gist("x" * 999).endswith(" …")


def test_long_arguments_are_cut_where_it_can_be_seen_and_stay_json() -> None:
    made = json.loads(short(json.dumps({"command": "x" * 999, "timeout": 3})))
    assert made["timeout"] == 3
    assert made["command"].endswith("x…")
    assert short("y" * 600) == "y" * 500 + "…"
