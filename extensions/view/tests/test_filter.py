"""The filter of the page: its words become conditions of the index, and conditions become words again."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from palaestra_slots.core.types import JSON
from palaestra_view.run_index import FIELDS

FILTER = Path(__file__).parents[3] / "extensions/view/src/palaestra_view/page/filter.js"
CRITERIA = ["right", "answered", "turns"]

CONDITIONS: dict[str, list[list[JSON]]] = {
    "reward<1 outcome:max_turns": [["reward", "<", "1"], ["outcome", ":", "max_turns"]],
    "differs label=none": [["differs", "=", 1], ["label", "=", ""]],
    'reward < 0.5 task : "a b"': [["reward", "<", "0.5"], ["task", ":", "a b"]],
    "right=0 time > 1 a": [["metric.right", "=", "0"], ["seconds", ">", "1"], ["any", ":", "a"]],
    "turns=1 metric.a.b = 2": [["turns", "=", "1"], ["metric.a.b", "=", "2"]],
    '"foo:bar" http://x a.py::test_b x:': [
        ["any", ":", each] for each in ("foo:bar", "http://x", "a.py::test_b", "x:")
    ],
}
PROBLEMS = {
    "right2=0": "there is no field right2",
    "foo:bar": "there is no field foo",
    "task<3": "task is text, so it cannot be compared with <",
    "reward<none": "reward needs a number, not nothing",
    "tokens>0.5k": "tokens needs a number, not 0.5k",
    "reward=0x1": "reward needs a number, not 0x1",
    "reward=1_0": "reward needs a number, not 1_0",
}


def in_node(expression: str) -> JSON:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    program = f"import {{ parse, asText, FIELDS }} from {json.dumps(FILTER.as_uri())};"
    program += f"console.log(JSON.stringify({expression}));"
    words = [node, "--input-type=module", "-e", program]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def test_words_become_conditions_and_words_again() -> None:
    read = f"((text) => parse(text, {json.dumps(CRITERIA)}))"
    found = in_node(f"{json.dumps(list(CONDITIONS))}.map((text) => {read}(text))")
    assert found == [{"where": where, "problems": []} for where in CONDITIONS.values()]
    again = in_node(f"{json.dumps(list(CONDITIONS))}.map((text) => {read}(asText({read}(text).where)).where)")
    assert again == list(CONDITIONS.values())


def test_a_wrong_condition_is_named() -> None:
    assert in_node(f"{json.dumps(list(PROBLEMS))}.map((text) => parse(text).problems)") == [
        [x] for x in PROBLEMS.values()
    ]


def test_the_fields_are_those_of_the_index() -> None:
    assert sorted(in_node("FIELDS")) == sorted(FIELDS)
