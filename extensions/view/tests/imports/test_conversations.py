"""ATIF documents and lines with conversations: what exporters and others write comes back; damage is named."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from recorded import META, TWO_CALLS, groups, histories, rollout, turns

from golden_messages import check_message
from palaestra.rollouts.export.atif import AtifExporter, atif_document
from palaestra.rollouts.export.atropos import AtroposExporter
from palaestra.rollouts.export.chat_messages import chat_messages
from palaestra.rollouts.export.exporter import Exporter, ExportMeta
from palaestra.rollouts.export.openai import OpenAIExporter
from palaestra.rollouts.export.sharegpt import ShareGPTExporter, alternating
from palaestra.rollouts.export.token_rows import RowsExporter
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message, Outcome
from palaestra_view.imports import atif
from palaestra_view.imports.conversations import messages_of
from palaestra_view.imports.files import open_source, sources_below
from palaestra_view.imports.source import NEXT, Imported

EVERYTHING = ExportMeta(run_id="run-1", env="weather", model="m", everything=True, placeholders=True)


def exported(folder: Path, exporter: Exporter) -> Path:
    out = io.BytesIO()
    exporter.export(groups(), out, EVERYTHING)
    path = folder / f"{exporter.name}.jsonl"
    path.write_bytes(out.getvalue())
    return path


def read(path: Path) -> list[Trajectory]:
    found = list(open_source(path).rollouts())
    assert all(isinstance(each, Imported) for each in found), found
    return [each.trajectory for each in found if isinstance(each, Imported)]


@pytest.mark.parametrize("exporter", [OpenAIExporter(), ShareGPTExporter(), AtifExporter()], ids=lambda each: each.name)
def test_a_byte_order_mark_is_no_part_of_a_file(exporter: Exporter, tmp_path: Path) -> None:
    path = exported(tmp_path, exporter)
    plain = [each.messages for each in read(path)]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [each.messages for each in read(path)] == plain


@given(histories())
def test_an_atif_document_gives_the_messages_back(messages: list[Message]) -> None:
    document, _ = atif_document(rollout(0, messages), [], META)
    assert atif.messages_of(atif.read_document(msgspec.json.encode(document))) == messages


@pytest.mark.parametrize(
    ("value", "index"),
    [(True, NEXT), (False, NEXT), (2, 2), ("2", NEXT), (2.0, NEXT), (None, NEXT), ([2], NEXT)],
)
@pytest.mark.parametrize("exporter", [AtifExporter(), AtroposExporter(), RowsExporter()])
def test_an_index_is_a_whole_number(exporter: Exporter, value: JSON, index: int, tmp_path: Path) -> None:
    def changed(found: JSON) -> JSON:
        if isinstance(found, dict):
            return {name: value if name == "index" else changed(each) for name, each in found.items()}
        return [changed(each) for each in found] if isinstance(found, list) else found

    path = exported(tmp_path, exporter)
    first = path.read_text().splitlines()[0]
    path.write_text(json.dumps(changed(json.loads(first))))
    # Rollouts of a group without a valid index are numbered by their place in it.
    placed = isinstance(exporter, AtroposExporter) and index == NEXT
    assert read(path)[0].index == (0 if placed else index)


@pytest.mark.parametrize("exporter", [AtifExporter(), OpenAIExporter(), ShareGPTExporter(), AtroposExporter()])
def test_our_exports_give_the_rollouts_back(exporter: Exporter, tmp_path: Path) -> None:
    before = {each.index: each for each in groups()[0].trajectories}
    found = read(exported(tmp_path, exporter))
    assert found
    for after in found:
        given = before[after.index]
        assert (after.group_id, after.task_id, after.outcome, after.reward) == (
            given.group_id, given.task_id, given.outcome, given.reward,
        )  # fmt: skip
        if exporter.name in ("atif", "atropos"):
            assert (after.metrics, after.blame, after.error) == (given.metrics, given.blame, given.error)
        if exporter.name != "atropos" or given.scored:
            assert calls(after.messages) == calls(given.messages)
    facts = open_source(tmp_path / f"{exporter.name}.jsonl").facts()
    assert (facts.format, facts.env, facts.model) == (exporter.name, "weather", "m")


def calls(messages: list[Message]) -> list[JSON]:
    """The well-formed calls of a conversation. Malformed ones have no equal in some formats."""
    found = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [(each["name"], json.loads(each["arguments"])) for each in found if each["arguments"].endswith("}")]


def test_groups_and_rows_have_their_tokens(tmp_path: Path) -> None:
    own = groups()[0].trajectories[2]
    found = {each.index: each for each in read(exported(tmp_path, AtroposExporter()))}
    assert found[2].row is not None
    assert own.row is not None
    assert (found[2].row.tokens, found[2].row.masks) == (own.row.tokens, own.row.masks)
    assert found[3].row is None
    rows = read(exported(tmp_path, RowsExporter()))
    assert [each.row.tokens for each in rows if each.row][:2] == [[1, 2, 3, 10, 11, 9], [1, 5, 12, 9]]
    assert rows[0].row is not None
    assert rows[0].row.masks == [-100, -100, -100, 10, 11, 9]


@given(histories())
def test_turns_in_the_sharegpt_form_keep_texts_and_calls(messages: list[Message]) -> None:
    conversation = chat_messages(messages)
    turns, _ = alternating(conversation, [])
    found = messages_of(turns)
    assert all(message["role"] in ("system", "user", "assistant", "tool") for message in found)
    clean = not any("<tool_" in turn["value"].replace("<tool_call>\n{", "") for turn in turns if turn["from"] == "gpt")
    if clean and all(call.parsed() is not None for message in conversation for call in message.calls):
        assert len(calls(found)) == sum(len(message.calls) for message in conversation)


SOUND = {"media_type": "audio/wav", "path": "a.wav"}
REFS = [{"trajectory_id": "s"}]


def document(**fields: JSON) -> dict[str, JSON]:
    """A document as Harbor writes it, with values that our exporter does not."""
    steps = [
        {"step_id": 1, "source": "user", "message": "fix it", "timestamp": "2026-01-01T00:00:00Z"},
        {
            "step_id": 2,
            "source": "agent",
            "message": [{"type": "text", "text": "look"}, {"type": "audio", "source": SOUND}],
            "model_name": "m",
            "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": None, "subagent_trajectory_ref": REFS}]},
            "metrics": {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 3, "cost_usd": 0.25},
            "timestamp": "2026-01-01T00:00:30Z",
        },
    ]  # fmt: skip
    sub = {"schema_version": "ATIF-v1.8", "trajectory_id": "s", "agent": {"name": "s", "version": "1"},
           "steps": [{"step_id": 1, "source": "user", "message": "help"}]}  # fmt: skip
    agent = {"name": "terminus", "version": "2", "model_name": "m"}
    return {"schema_version": "ATIF-v1.8", "session_id": "one", "agent": agent,
            "steps": steps, "subagent_trajectories": [sub], "final_metrics": None, "notes": "n", **fields}  # fmt: skip


def test_a_folder_of_harbors_trials_has_its_rewards_and_errors(tmp_path: Path) -> None:
    failure = {"exception_type": "AgentTimeoutError", "exception_message": "900 s"}
    for trial, result in {
        "fix__1": {"task_name": "fix", "verifier_result": {"rewards": {"reward": 1.0, "style": 0.5}}},
        "fix__2": {"task_name": "fix", "exception_info": failure},
    }.items():
        folder = tmp_path / "job" / trial
        (folder / "agent").mkdir(parents=True)
        (folder / "agent/trajectory.json").write_text(json.dumps(document(), indent=2))
        (folder / "result.json").write_text(json.dumps(result))
    assert sources_below(tmp_path) == [tmp_path]
    one, two = read(tmp_path)
    assert (one.task_id, one.reward, one.metrics) == ("fix", 1.0, {"reward": 1.0, "style": 0.5})
    assert (two.reward, two.outcome, two.error) == (None, Outcome.INFRA_ERROR, "AgentTimeoutError: 900 s")
    assert (one.cost, one.prompt_tokens, one.beside.duration_s) == (0.25, 10, 30.0)
    assert [message["role"] for message in one.messages] == ["user", "assistant", "tool"]
    assert one.messages[1]["reasoning_content"] == "hm"
    assert (one.subagents[0].turn, one.subagents[0].goal) == (1, "help")


def test_the_published_models_accept_what_we_write_and_we_read_what_they_write() -> None:
    models = pytest.importorskip("atif")
    ours, _ = atif_document(rollout(0, TWO_CALLS, turns=turns(("weather", "weather"), ())), [], META)
    checked = models.Trajectory.model_validate(msgspec.to_builtins(ours))
    assert atif.messages_of(atif.read_document(checked.model_dump_json().encode())) == TWO_CALLS
    theirs = models.Trajectory.model_validate(document())
    (found,) = atif.read(theirs.model_dump_json().encode())
    assert found.trajectory.turns[0].completion_tokens == 4


LINES: list[tuple[JSON, str]] = [
    ([1, 2], "neither messages nor conversations"),
    ({"messages": []}, "it has no messages"),
    ({"tokens": [["x"]], "scores": [1.0]}, "its token ids are not numbers"),
    ({"tokens": [[1 << 40]], "scores": [1.0]}, "its token ids are not numbers"),
    ({"schema": "palaestra.row/1", "prompt_ids": [1], "completion_ids": [2], "mask": []}, "differ in length"),
    ({"schema_version": "ATIF-v2.0", "steps": []}, "'ATIF-v2.0' is not a version of ATIF"),
    ({"schema_version": "ATIF-v1.4", "agent": {}, "steps": [{"step_id": 1}]}, "source"),
]


@pytest.mark.parametrize(("line", "reason"), LINES)
def test_a_record_that_cannot_be_read_is_named(line: JSON, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = {"messages": [{"role": "user", "content": "hi"}]}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n{json.dumps(good)}\n")
    first, second, third = open_source(path).rollouts()
    assert isinstance(first, Imported)
    assert str(second).startswith("record 2: ")
    assert reason in str(second)
    assert isinstance(third, Imported)


def test_lines_of_others_and_a_list_in_one_file(tmp_path: Path) -> None:
    chats = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "<think>\nx\n</think>\nyo"}]},
        {"messages": [{"role": "user", "content": "hi"}], "score": 0.5, "tools": '[{"type": 1}]', "source": "web"},
    ]
    (tmp_path / "list.json").write_text(json.dumps(chats, indent=1))
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(each)}\n\n" for each in chats))
    listed, lines = read(tmp_path / "list.json"), read(tmp_path / "lines.jsonl")
    assert listed == lines
    assert listed[0].messages[1] == {"role": "assistant", "content": "yo", "reasoning_content": "x"}
    assert (listed[1].reward, listed[1].detail) == (0.5, {"source": "web"})


def test_bytes_that_are_not_utf8_lone_surrogates_and_deep_values(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [
        b'{"messages": [{"role": "user", "content": "caf\xe9 \\ud800"}], "reward": NaN}',
        b'{"messages": [{"role": "user", "content": ' + b"[" * 200_000 + b"]" * 200_000 + b"}]}",
        b'{"messages": [{"role": "user", "content": "' + b"x" * 5_000_000 + b'"}]}',
    ]
    path.write_bytes(b"\n".join(lines))
    odd, deep, long = open_source(path).rollouts()
    assert isinstance(odd, Imported)
    assert odd.trajectory.messages[0]["content"] == "caf� ?"
    assert odd.trajectory.reward is None
    check_message(deep, "record")
    assert isinstance(long, Imported)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("x.csv", b"a,b\n1,2\n", "is in no format that can be shown"),
        ("x.jsonl", b"", "is in no format that can be shown"),
        ("x.json", b'{"a": 1}', "is in no format that can be shown"),
        ("x.eval", b"not a zip", "is not a whole zip file"),
        ("x.bin", b"\0\1\2", "is in no format that can be shown|cannot be read"),
    ],
)
def test_other_files_are_refused_with_what_can_be_read(name: str, data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=reason):
        open_source(path).facts()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "linked.jsonl").symlink_to(tmp_path / "real.jsonl")
    assert sources_below(folder) == []
    with pytest.raises(OSError, match="linked"):
        open_source(folder / "linked.jsonl")
