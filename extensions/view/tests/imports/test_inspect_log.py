"""Inspect logs: one that `inspect_ai` wrote, the exporter's own, and logs that mean harm.

`logs/sums.eval` was written by inspect_ai 0.3.285 (three samples, two epochs, a tool, two scorers) and packed again
with deflate, because not every Python reads zstd.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from recorded import META, TWO_CALLS, groups, rollout, turns

from golden_messages import check_message, raises
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra.rollouts.export.inspect_log import InspectExporter
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Blame, Label, Outcome
from palaestra_view.imports.files import open_source
from palaestra_view.imports.source import Imported

SUMS = Path(__file__).parent / "logs/sums.eval"


def read(path: Path) -> dict[tuple[str, int], Imported]:
    """The rollouts of a log by sample and index."""
    return {(each.trajectory.task_id, each.trajectory.index): each for each in sound(path)}


def sound(path: Path) -> Iterator[Imported]:
    for each in open_source(path).rollouts():
        assert isinstance(each, Imported), each
        yield each


def as_json(archive: Path, to: Path) -> Path:
    """The same log in Inspect's other form: one JSON object with all samples."""
    with zipfile.ZipFile(archive) as members:
        samples = [json.loads(members.read(name)) for name in members.namelist() if name.startswith("samples/")]
        to.write_text(json.dumps(json.loads(members.read("header.json")) | {"samples": samples}))
    return to


def test_a_log_of_inspect_has_its_messages_calls_scores_and_times() -> None:
    facts = open_source(SUMS).facts()
    assert (facts.env, facts.model, facts.group_size) == ("sums", "mockllm/model", 2)
    assert facts.provenance["scores"]["match accuracy"] is not None
    found = read(SUMS)
    assert sorted(found) == [(name, epoch) for name in ("2", "bad", "one") for epoch in (0, 1)]
    one = found["one", 0].trajectory
    assert [message["role"] for message in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = one.messages[2]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"x": 1, "y": 1})
    assert (one.messages[3]["tool_call_id"], one.messages[3]["content"]) == (call["id"], "2")
    assert (one.messages[4]["reasoning_content"], one.messages[4]["content"]) == ("one and one", "The answer is 2")
    assert (one.reward, one.metrics) == (1.0, {"match": 1.0, "parts/a": 0.5, "parts/b": 1.0})
    assert one.detail["scores"]["parts"]["explanation"] == "because"
    assert [(turn.finish_reason, turn.prompt_tokens, turn.tools) for turn in one.turns] == [
        ("tool_calls", 10, ("add",)),
        ("stop", 10, ()),
    ]
    assert (one.prompt_tokens, one.completion_tokens) == (20, 10)
    assert one.beside.started_at > 0
    assert len(one.beside.turn_s) == 2
    assert found["one", 0].tools[0]["function"]["name"] == "add"


def test_a_picture_comes_from_the_attachments_and_a_failed_call_is_counted() -> None:
    found = read(SUMS)
    parts = found["2", 0].trajectory.messages[1]["content"]
    assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,")
    errors = [error for each in found.values() for error in each.trajectory.tool_errors]
    assert [(error.tool, error.arguments, error.error) for error in errors] == [
        ("add", '{"x": 13, "y": 1}', "unknown: unlucky")
    ] * 3


def test_both_forms_of_a_log_are_read_alike(tmp_path: Path) -> None:
    other = as_json(SUMS, tmp_path / "sums.json")
    assert read(other) == read(SUMS)
    assert open_source(other).facts() == open_source(SUMS).facts()


def log(folder: Path, *samples: Mapping[str, JSON], header: Mapping[str, JSON] | None = None) -> Path:
    path = folder / "made.eval"
    spec = {"task": "t", "model": "m", "created": "2026-01-01T00:00:00+00:00"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, sample in enumerate(samples):
            archive.writestr(f"samples/{number}_epoch_1.json", json.dumps({"epoch": 1, "id": number} | dict(sample)))
        archive.writestr("header.json", json.dumps(header or {"version": 2, "eval": spec, "status": "success"}))
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "caf\ud83d", None])
@pytest.mark.parametrize("place", ["sample", "metric"])
def test_both_forms_of_a_log_are_read_alike_with_values_that_are_no_json(
    value: JSON, place: str, tmp_path: Path
) -> None:
    metrics = {"accuracy": {"value": value if place == "metric" else 1.0}}
    header = {"version": 2, "eval": {"task": "t", "model": "m"}, "status": "success"}
    header["results"] = {"scores": [{"name": "s", "metrics": metrics}]}
    samples = [{"scores": {"s": {"value": 1.0}}}, {"scores": {"s": {"value": value if place == "sample" else 0.0}}}]
    archive = log(tmp_path, *samples, header=header)
    other = as_json(archive, tmp_path / "other.json")
    assert read(other) == read(archive)
    assert open_source(other).facts() == open_source(archive).facts()
    assert [each.trajectory.reward for each in sound(other)] == [1.0, None if place == "sample" else 0.0]


@pytest.mark.parametrize(
    ("fields", "outcome", "reward", "error"),
    [
        ({"error": {"message": "ValueError('x')", "traceback": "…"}}, Outcome.INFRA_ERROR, None, "ValueError('x')"),
        ({"limit": {"type": "message", "limit": 30}}, Outcome.MAX_TURNS, None, "the message limit of 30 was reached"),
        ({"limit": {"type": "token", "limit": 9}, "scores": {"s": {"value": "P"}}}, Outcome.LENGTH, 0.5, "the token"),
        ({"limit": {"type": "time", "limit": 9}, "scores": {"s": {"value": True}}}, Outcome.BUDGET, 1.0, "the time"),
        ({"output": {"choices": [{"stop_reason": "max_tokens"}]}}, Outcome.LENGTH, None, ""),
        ({"scores": {"s": {"value": "N"}}}, Outcome.NATURAL, 0.0, ""),
        ({"scores": {"s": {"value": float("nan")}}}, Outcome.NATURAL, None, ""),
        ({"scores": {"s": {"value": [1, "I"]}}}, Outcome.NATURAL, 0.5, ""),
        ({"scores": {"s": {"value": "about right"}}}, Outcome.NATURAL, None, ""),
    ],
)
def test_how_a_sample_ended(
    tmp_path: Path, fields: Mapping[str, JSON], outcome: Outcome, reward: float | None, error: str
) -> None:
    (found,) = read(log(tmp_path, {"input": "do it", **fields})).values()
    one = found.trajectory
    assert (one.outcome, one.reward) == (outcome, reward)
    assert one.error.startswith(error)
    assert bool(one.error) == bool(error)
    assert one.messages == [{"role": "user", "content": "do it"}]


def exported(folder: Path, *found: Group, meta: ExportMeta = META) -> Path:
    path = folder / "ours.eval"
    with path.open("wb") as file:
        InspectExporter().export(found, file, ExportMeta(**{**vars_of(meta), "everything": True}))
    return path


def vars_of(meta: ExportMeta) -> dict[str, JSON]:
    return {name: getattr(meta, name) for name in meta.__slots__}


def test_our_own_log_gives_the_rollouts_back(tmp_path: Path) -> None:
    labelled = rollout(
        4, TWO_CALLS, 0.0, official=1.0, labels=[Label("tests_edited", "tests/x.py", True)], blame=Blame.MODEL,
        outcome=Outcome.MAX_TURNS, turns=turns(("weather", "weather"), ()), detail={"category": "sky"},
        error="SlotLost", cost=0.5, prompt_tokens=7, completion_tokens=3, metrics={"cities": 2.0},
    )  # fmt: skip
    (sky, sea) = groups()
    sky.trajectories.append(labelled)
    found = read(exported(tmp_path, sky, sea))
    for before in sky.trajectories:
        after = found["sky", before.index].trajectory
        for name in ("group_id", "outcome", "reward", "official", "labels", "blame", "error", "metrics", "detail",
                     "prompt_tokens", "completion_tokens", "cost"):  # fmt: skip
            assert getattr(after, name) == getattr(before, name), (before.index, name)
        assert texts(after) == texts(before)
        assert [turn.tools for turn in after.turns] == [turn.tools for turn in before.turns]
    assert open_source(tmp_path / "ours.eval").facts().env == META.env


def texts(one: Trajectory) -> list[JSON]:
    """What was said, asked and returned. Malformed arguments have no place in the format."""
    return [
        (
            message["role"],
            message.get("content") or "",
            message.get("reasoning_content", ""),
            [(call["id"], parsed(call["function"]["arguments"])) for call in message.get("tool_calls", ())],
            message.get("tool_call_id"),
        )
        for message in one.messages
    ]


def parsed(arguments: str) -> JSON:
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def test_the_same_run_gives_the_same_log() -> None:
    made = []
    for _ in range(2):
        out = io.BytesIO()
        InspectExporter().export(groups(), out, META)
        made.append(out.getvalue())
    assert made[0] == made[1]


def test_inspect_reads_our_log_with_equal_content(tmp_path: Path) -> None:
    inspect_log = pytest.importorskip("inspect_ai.log")
    path = exported(tmp_path, *groups())
    found = inspect_log.read_eval_log(str(path))
    assert (found.status, found.eval.task, found.eval.model) == ("success", META.env, META.model)
    samples = {sample.epoch: sample for sample in found.samples}
    for epoch, before in enumerate(groups()[0].trajectories, 1):
        sample = samples[epoch]
        assert len(sample.messages) == len(before.messages)
        assert (sample.scores["reward"].value if before.scored else None) == before.reward
        calls = [call.function for message in sample.messages for call in getattr(message, "tool_calls", None) or ()]
        assert calls == [call["function"]["name"] for m in before.messages for call in m.get("tool_calls", ())]
    assert found.results.scores[0].metrics["mean"].value == pytest.approx(1.25 / 3)
    assert len(inspect_log.read_eval_log_sample_summaries(str(path))) == 4


def test_inspects_own_compression_is_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = bytearray()
    directory = bytearray()
    with zipfile.ZipFile(SUMS) as archive:
        for name in archive.namelist():
            data = zstandard.ZstdCompressor().compress(archive.read(name))
            sizes = archive.getinfo(name)
            fields = (sizes.CRC.to_bytes(4, "little") + len(data).to_bytes(4, "little")
                      + sizes.file_size.to_bytes(4, "little") + len(name).to_bytes(2, "little") + b"\0\0")  # fmt: skip
            place = len(packed)
            packed += b"PK\x03\x04\x3f\0\0\0\x5d\0\0\0\x21\0" + fields + name.encode() + data
            directory += (b"PK\x01\x02\x3f\0\x3f\0\0\0\x5d\0\0\0\x21\0" + fields + bytes(10)
                          + place.to_bytes(4, "little") + name.encode())  # fmt: skip
        count = len(archive.namelist()).to_bytes(2, "little")
    end = b"PK\x05\x06" + bytes(4) + count * 2 + len(directory).to_bytes(4, "little")
    path = tmp_path / "zstd.eval"
    path.write_bytes(packed + directory + end + len(packed).to_bytes(4, "little") + bytes(2))
    assert read(path) == read(SUMS)


def test_a_log_of_a_run_that_was_killed_has_the_samples_so_far(tmp_path: Path) -> None:
    path = tmp_path / "killed.eval"
    with zipfile.ZipFile(SUMS) as whole, zipfile.ZipFile(path, "w") as archive:
        for name in ("_journal/start.json", "samples/one_epoch_1.json"):
            archive.writestr(name, whole.read(name))
    assert open_source(path).facts().env == "sums"
    (found,) = read(path).values()
    assert found.trajectory.reward == 1.0, "without a headline, the first score counts"


def test_an_unknown_version_and_a_log_without_a_header_are_refused(tmp_path: Path) -> None:
    newer = log(tmp_path, header={"version": 3, "eval": {"task": "t", "model": "m"}})
    with raises(ConfigError):
        open_source(newer).facts()
    with zipfile.ZipFile(tmp_path / "empty.eval", "w") as archive:
        archive.writestr("other.txt", "x")
    with pytest.raises(ConfigError, match=r"neither header\.json nor"):
        open_source(tmp_path / "empty.eval").facts()
    (tmp_path / "torn.eval").write_bytes(SUMS.read_bytes()[:5000])
    with raises(ConfigError):
        open_source(tmp_path / "torn.eval").facts()


def test_a_sample_that_grows_without_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(tmp_path, {"input": "x" * 3_000_000}, {"input": "short"})
    monkeypatch.setattr("palaestra_view.imports.documents._MEMBER_BYTES", 1 << 20)
    first, second = open_source(path).rollouts()
    assert isinstance(first, str)
    check_message(first, "MiB")
    assert isinstance(second, Imported)


def test_an_archive_that_grows_in_all_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(tmp_path, *({"input": "x" * 300_000} for _ in range(10)))
    monkeypatch.setattr("palaestra_view.imports.documents._FREE_BYTES", 0)
    found = list(open_source(path).rollouts())
    assert 0 < sum(isinstance(each, Imported) for each in found) < 10


def test_names_in_an_archive_are_no_paths(tmp_path: Path) -> None:
    path = tmp_path / "evil.eval"
    spec = {"version": 2, "eval": {"task": "../../t", "model": "/etc/passwd"}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps(spec))
        archive.writestr("samples/../../../etc/cron.d/x.json", json.dumps({"id": "../../../x", "input": "hi"}))
    before = sorted(tmp_path.rglob("*"))
    (found,) = read(path).values()
    assert found.trajectory.task_id == "../../../x"
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_and_deep_samples_are_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"task": "t", "model": "m"}}))
        archive.writestr("samples/deep.json", '{"id": 1, "metadata": ' + "[" * 100_000 + "]" * 100_000 + "}")
        archive.writestr("samples/half.json", '{"id": 2, "input": "x')
        archive.writestr("samples/latin.json", b'{"id": 3, "input": "caf\xe9"}')
    deep, half, latin = open_source(path).rollouts()
    check_message(str(deep), "samples/deep.json")
    assert "samples/half.json: " in str(half)
    assert isinstance(latin, Imported)
    assert latin.trajectory.messages[0]["content"] == "caf�"


def test_references_to_one_long_attachment_do_not_multiply_it(tmp_path: Path) -> None:
    name = "a" * 32
    text = f"attachment://{name} " * 1000
    path = log(tmp_path, {"input": text, "attachments": {name: "x" * 1_000_000}})
    (found,) = read(path).values()
    assert len(found.trajectory.messages[0]["content"]) < 70_000_000
