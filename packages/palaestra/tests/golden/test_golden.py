"""Runs recorded by an earlier version are exported, verified, replayed and resumed as that version did it.

`runs` has the journals, `exports` what the commands made of them; `make.py` records both.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from golden.cases import (
    BY_NAME,
    CASES,
    ENVIRONMENTS,
    EXPORTS,
    MODEL,
    RUNS,
    Case,
    copy_run,
    exports,
    load,
    palaestra,
    report,
    summaries,
)
from golden.servers import SCRIPTS, ChatServer, TokenServer, serving

pytest.importorskip("tokenizers", reason="needs the extra 'tokens'")
pytestmark = pytest.mark.timeout(30)

SAME_AS_TWIN = ("atropos.jsonl", "openai.jsonl", "sharegpt.jsonl", "table.csv", "markdown.md")
"""Exports without times and run ids."""


def cases(**fields: Any) -> list[Any]:
    """The cases with these field values, as test parameters."""
    return [
        pytest.param(case, id=case.name)
        for case in CASES
        if all(getattr(case, name) == value for name, value in fields.items())
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the tokenizer and chat template of the token-exact runs."""
    folder = tmp_path_factory.mktemp("model")
    for name, data in load(MODEL).items():
        (folder / name).write_bytes(data)
    return folder


def test_each_case_has_a_run_and_exports() -> None:
    names = {case.name for case in CASES}
    assert {path.name for path in RUNS.iterdir()} == names
    assert {path.name for path in EXPORTS.iterdir()} == names


@pytest.mark.parametrize("case", cases())
def test_exports_are_byte_identical(case: Case, tmp_path: Path) -> None:
    golden = load(EXPORTS / case.name)
    copy_run(case, tmp_path)
    made = {**exports(tmp_path), **summaries(case, tmp_path)}
    for name in sorted(made.keys() & golden.keys()):
        assert_identical(made[name], golden[name], f"{case.name}/{name}")
    assert made.keys() == golden.keys()


@pytest.mark.slots
@pytest.mark.parametrize("case", cases(reports=True, cut_off=False))
def test_the_html_report_has_each_rollout(case: Case, tmp_path: Path, model: Path) -> None:
    pytest.importorskip("palaestra_view")
    copy_run(case, tmp_path)
    ended = {
        event["trajectory"]["rollout_id"]: event["trajectory"]
        for event in events((tmp_path / "run/journal.jsonl").read_bytes())
        if event["event"] == "rollout"
    }
    found = report(case, tmp_path, model)
    assert {row["id"]: row["reward"] for row in found["rows"]} == {name: one["reward"] for name, one in ended.items()}
    for name, one in ended.items():
        assert found["answers"][f"rollout?{name}"]["messages"] == one["messages"]


@pytest.mark.parametrize("case", cases())
def test_status_and_compare_accept_the_run(case: Case, tmp_path: Path) -> None:
    copy_run(case, tmp_path)
    assert palaestra(tmp_path, "status", "run").stdout.startswith((b"run ", b"eval "))
    compared = palaestra(tmp_path, "compare", "run", "run")
    assert (compared.exit_code, compared.stderr) == (0, "")


@pytest.mark.parametrize("name", ["cut_exact", "resumed"])
def test_a_run_compares_equal_to_its_twin(name: str, tmp_path: Path) -> None:
    copy_run(BY_NAME[name], tmp_path)
    copy_run(BY_NAME[BY_NAME[name].twin], tmp_path / "twin")
    compared = palaestra(tmp_path, "compare", "run", "twin/run", "--json").json
    assert compared["pairs"]
    assert all(pair["first"] == pair["other"] for pair in compared["pairs"])
    assert compared["asked_otherwise"] == compared["only_first"] == []


def test_a_resumed_run_has_the_conversations_of_its_twin() -> None:
    resumed, twin = load(EXPORTS / "resumed"), load(EXPORTS / "chat")
    for name in SAME_AS_TWIN:
        assert_identical(resumed[name], twin[name], name)


@pytest.mark.parametrize("case", cases(exact=True))
def test_token_runs_verify_against_their_groups(case: Case, tmp_path: Path) -> None:
    run = copy_run(case, tmp_path)
    groups = load(EXPORTS / case.name)["atropos.jsonl"]
    (run / "groups.jsonl").write_bytes(groups)
    verified = palaestra(tmp_path, "verify", "run", "--json")
    assert (verified.exit_code, verified.json["violation"]) == (0, "")
    rows = [len(json.loads(line)["tokens"]) for line in groups.splitlines()]
    assert (verified.json["lines"], verified.json["rows"]) == (len(rows), sum(rows))
    assert verified.json["trained"] > 0


@pytest.mark.slots
@pytest.mark.parametrize("case", cases(replays=True))
def test_a_replay_compares_equal(case: Case, tmp_path: Path) -> None:
    copy_run(case, tmp_path)
    output = palaestra(tmp_path, "replay", "run", "--environment", ENVIRONMENTS / case.environment, "--json")
    assert output.exit_code == 0, output.stdout or output.stderr
    replayed = output.json
    assert (replayed["differences"], replayed["other_ends"]) == ([], [])
    assert replayed["observations"] == replayed["equal"] > 0
    assert replayed["rewards"] == replayed["rewards_equal"] > 0


@pytest.mark.slots
def test_a_killed_token_exact_run_resumes_and_repeats_no_request(tmp_path: Path, model: Path) -> None:
    case = BY_NAME["cut_exact"]
    journal = copy_run(case, tmp_path) / "journal.jsonl"
    before = journal.read_bytes()
    with serving(TokenServer(model)) as server:
        output = palaestra(tmp_path, *case.command(ENVIRONMENTS, server.url, model), "--resume", "run")
    assert output.exit_code == 0, output.stderr
    after = journal.read_bytes()
    assert after.startswith(before)
    recorded = recorded_prompts(events(before))
    assert recorded
    assert recorded + server.engine.prompts == ledger_prompts(events(load(RUNS / case.twin)["journal.jsonl"]))
    assert taken_up(after[len(before) :]) == {"000001-shared/0": (1, 4, ""), "000001-shared/1": (1, 4, "")}
    assert_same_as_twin(case, tmp_path, "rows.jsonl")
    assert palaestra(tmp_path, "verify", "run").exit_code == 0


@pytest.mark.slots
def test_a_killed_chat_with_a_torn_line_resumes_and_repeats_no_request(tmp_path: Path) -> None:
    case = BY_NAME["cut_chat"]
    journal = copy_run(case, tmp_path) / "journal.jsonl"
    whole, newline, torn = journal.read_bytes().rpartition(b"\n")
    assert torn
    with serving(ChatServer(case.server, "after")) as server:
        output = palaestra(tmp_path, *case.command(ENVIRONMENTS, server.url), "--resume", "run")
    assert output.exit_code == case.exit_code, output.stderr
    after = journal.read_bytes()
    assert after.startswith(whole + newline)
    added = after[len(whole) + 1 :]
    assert events(added)[0]["torn"] is True
    assert taken_up(added) == {"000005-delegates/0": (1, 2, "")}
    answers, cut = SCRIPTS[case.server]
    assert len(server.conversations) == len(answers) - cut
    (reply,) = [event["message"] for event in events(whole) if event["event"] == "reply" and event.get("branch")]
    assert server.conversations[0][2] == reply, "the sub-agent continues after its recorded reply"
    assert_same_as_twin(case, tmp_path)


@pytest.mark.slots
def test_an_interrupted_chat_resumes_and_asks_again_what_the_server_refused(tmp_path: Path) -> None:
    case = BY_NAME["interrupted"]
    journal = copy_run(case, tmp_path) / "journal.jsonl"
    before = journal.read_bytes()
    with serving(ChatServer(case.server, "after")) as server:
        output = palaestra(tmp_path, *case.command(ENVIRONMENTS, server.url), "--resume", "run")
    assert output.exit_code == 0, output.stderr
    after = journal.read_bytes()
    assert after.startswith(before)
    assert taken_up(after[len(before) :]) == {"000002-lines-2/0": (1, 0, "")}
    assert sorted(map(len, server.conversations)) == [1, 3, 3, 5], "the third task continues after its first turn"
    groups = [json.loads(line) for line in exports(tmp_path)["atropos.jsonl"].splitlines()]
    assert [(group["task_id"], group["scores"], len(group["messages"][0])) for group in groups] == [
        ("lines-0", [1.0], 4),
        ("lines-1", [1.0], 4),
        ("lines-2", [1.0], 6),
    ]


def assert_identical(made: bytes, golden: bytes, name: str) -> None:
    """Fail with the first line that differs, cut to the bytes around the difference."""
    if made == golden:
        return
    new, old = made.splitlines(), golden.splitlines()
    number = next(
        (n for n, pair in enumerate(zip(new, old, strict=False)) if pair[0] != pair[1]), min(len(new), len(old))
    )
    new_line, old_line = (lines[number] if number < len(lines) else b"" for lines in (new, old))
    place = next((n for n, pair in enumerate(zip(new_line, old_line, strict=False)) if pair[0] != pair[1]), 0)
    around = slice(max(0, place - 60), place + 120)
    pytest.fail(f"{name}, line {number + 1}, byte {place}: {new_line[around]!r} instead of {old_line[around]!r}")


def assert_same_as_twin(case: Case, folder: Path, *more: str) -> None:
    """The resumed run has each rollout of the undisturbed run once, with the same conversation and score.

    The sentences of errors may differ: the undisturbed run was recorded with those of its version."""
    made, golden = exports(folder), load(EXPORTS / case.twin)
    for name in (*SAME_AS_TWIN, *more):
        new, old = (re.sub(rb'"error":"[^"]+"', b'"error":"E"', files[name]) for files in (made, golden))
        assert_identical(new, old, f"{case.name} after the resume: {name}")
    ended = [
        Counter(event["trajectory"]["rollout_id"] for event in events(journal) if event["event"] == "rollout")
        for journal in ((folder / "run/journal.jsonl").read_bytes(), load(RUNS / case.twin)["journal.jsonl"])
    ]
    assert ended[0] == ended[1]


def events(journal: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.splitlines()]


def taken_up(added: bytes) -> dict[str, tuple[int, int, str]]:
    """For each rollout that was continued: its recorded turns and replies, and why it started again, if it did."""
    return {
        event["rollout_id"]: (event["turns"], event.get("replies", 0), event.get("anew", ""))
        for event in events(added)
        if event["event"] == "taken_up"
    }


def recorded_prompts(journal: list[dict[str, Any]]) -> Counter[int]:
    """The checksums of the prompts whose answers a journal has: those of turns, and those of replies in open turns.

    A model call is stored as `[finish_reason, [[ids, logprobs, version, prompt_checksum], …]]`.
    """
    calls: list[Any] = []
    open_turns: dict[str, list[Any]] = {}
    for event in journal:
        if event["event"] == "reply":
            open_turns.setdefault(event["rollout_id"], []).extend(event["sampled"])
        elif event["event"] == "messages":
            open_turns.pop(event["rollout_id"], None)
            calls += event.get("sampled", [])
    calls += [call for replies in open_turns.values() for call in replies]
    return Counter(piece[3] for _, pieces in calls for piece in pieces)


def ledger_prompts(journal: list[dict[str, Any]]) -> Counter[int]:
    """The checksums of all prompts in the ledgers of a finished run.

    A span is stored as `[kind, start, stop, turn, digest, version, prompt_checksum, reason]`.
    """
    ledgers = [event["trajectory"]["ledger"] for event in journal if event["event"] == "rollout"]
    spans = [span for ledger in ledgers for segment in ledger["segments"] for span in segment["spans"]]
    return Counter(span[6] for span in spans if span[0] == "sampled")
