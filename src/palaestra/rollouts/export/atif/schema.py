"""The Agent Trajectory Interchange Format: its records, and `read_document`, which checks them.

Source: RFC 0001 of the Harbor project and its published models (0.25), versions ATIF-v1.0 to v1.8: later versions only
added fields, so one set of records reads them all; v1.8 added audio, which `WRITE_VERSION` v1.7 does not have.
Invariant: an unknown key, a step out of order, a field on the wrong kind of step and a result without a call are
rejected, with the place.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON

READ_VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
WRITE_VERSION = "ATIF-v1.7"

IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
AUDIO_TYPES = tuple(f"audio/{kind}" for kind in ("wav", "mpeg", "mp4", "aac", "ogg", "flac", "webm", "aiff"))
_AUDIO_SPELLINGS = {
    **dict.fromkeys(("audio/mp3", "audio/mpga", "audio/x-mpeg"), "audio/mpeg"),
    **dict.fromkeys(("audio/x-wav", "audio/wave", "audio/vnd.wave"), "audio/wav"),
    **dict.fromkeys(("audio/x-m4a", "audio/m4a"), "audio/mp4"),
    **{f"audio/x-{kind}": f"audio/{kind}" for kind in ("aac", "flac", "aiff")},
}
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")

Extra = dict[str, JSON]


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown keys are rejected; fields that are not set are not written."""


class AtifSource(_Record, kw_only=True):
    """Where an image or a sound is. `duration_sec` is for sounds."""

    media_type: str
    path: str
    duration_sec: float | None = None


class AtifPart(_Record, kw_only=True):
    """A part of a message: a text, or an image or a sound by reference."""

    type: str
    text: str | None = None
    source: AtifSource | None = None


Content = str | list[AtifPart]


class AtifToolCall(_Record, kw_only=True):
    tool_call_id: str
    function_name: str
    arguments: dict[str, JSON]
    extra: Extra | None = None


class SubagentRef(_Record, kw_only=True):
    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Extra | None = None


class AtifResult(_Record, kw_only=True):
    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentRef] | None = None
    extra: Extra | None = None


class Observation(_Record, kw_only=True):
    results: list[AtifResult]


class Metrics(_Record, kw_only=True):
    """Of one step. `completion_token_ids[T]` and `logprobs[T]` are the sampled ones."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Extra | None = None


class AtifStep(_Record, kw_only=True):
    step_id: int
    timestamp: str | None = None
    source: str
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: Extra | None = None


class AtifAgent(_Record, kw_only=True):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, JSON]] | None = None
    extra: Extra | None = None


class FinalMetrics(_Record, kw_only=True):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: Extra | None = None


class Document(_Record, kw_only=True):
    """One trajectory. `subagent_trajectories` are whole documents in themselves."""

    schema_version: str = msgspec.field(default=READ_VERSIONS[-1])
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: list[AtifStep]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Extra | None = None
    subagent_trajectories: list[Document] | None = None


_decoder = msgspec.json.Decoder(Document)


def read_document(raw: bytes | str) -> Document:
    """One document, of any version from 1.0 to 1.8. Raises `ConfigError` with the first place that is wrong."""
    try:
        document = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"not an ATIF trajectory: {error}") from None
    check(document)
    return document


def check(document: Document) -> None:
    """Check the rules that the types do not express. Raises `ConfigError`."""
    problem = next(_problems(document, "$"), "")
    if problem:
        raise ConfigError(f"not an ATIF trajectory: {problem}")


def _problems(document: Document, at: str) -> Iterator[str]:
    if document.schema_version not in READ_VERSIONS:
        known = f"{READ_VERSIONS[0]} to {READ_VERSIONS[-1]}"
        yield f"{at}.schema_version is {document.schema_version!r}; this version reads {known}"
    if not document.steps:
        yield f"{at}.steps is empty"
    if document.final_metrics is not None and (document.final_metrics.total_steps or 0) < 0:
        yield f"{at}.final_metrics.total_steps is negative"
    for number, step in enumerate(document.steps, 1):
        yield from _step_problems(step, number, f"{at}.steps[{number - 1}]")
    ids: set[str] = set()
    for number, inner in enumerate(document.subagent_trajectories or ()):
        place = f"{at}.subagent_trajectories[{number}]"
        if inner.trajectory_id is None or inner.trajectory_id in ids:
            yield f"{place}.trajectory_id is missing or stands twice: {inner.trajectory_id!r}"
        ids.add(inner.trajectory_id or "")
        yield from _problems(inner, place)


def _step_problems(step: AtifStep, number: int, at: str) -> Iterator[str]:
    if step.step_id != number:
        yield f"{at}.step_id is {step.step_id}, not {number}: steps count from 1"
    if step.source not in ("system", "user", "agent"):
        yield f"{at}.source is {step.source!r}, not system, user or agent"
    if step.source != "agent" and (wrong := [name for name in _AGENT_ONLY if getattr(step, name) is not None]):
        yield f"{at}.{wrong[0]} is for steps of the agent, and this one is of the {step.source}"
    if step.timestamp is not None and not _is_time(step.timestamp):
        yield f"{at}.timestamp is not ISO 8601: {step.timestamp!r}"
    if (step.llm_call_count or 0) < 0:
        yield f"{at}.llm_call_count is negative"
    if step.llm_call_count == 0 and step.source == "agent" and (step.metrics or step.reasoning_content is not None):
        yield f"{at} made no model call, so it has neither metrics nor reasoning_content"
    yield from _content_problems(step.message, f"{at}.message")
    calls = {call.tool_call_id for call in step.tool_calls or ()}
    for place, result in enumerate(step.observation.results if step.observation else ()):
        where = f"{at}.observation.results[{place}]"
        if result.source_call_id is not None and result.source_call_id not in calls:
            yield f"{where}.source_call_id {result.source_call_id!r} is not a call of this step"
        yield from _content_problems(result.content or "", f"{where}.content")
        for ref in result.subagent_trajectory_ref or ():
            if ref.trajectory_id is None and ref.trajectory_path is None:
                yield f"{where}.subagent_trajectory_ref has neither trajectory_id nor trajectory_path"


def _content_problems(content: Content, at: str) -> Iterator[str]:
    for place, part in enumerate(content if isinstance(content, list) else ()):
        types = {"image": IMAGE_TYPES, "audio": AUDIO_TYPES}.get(part.type)
        where = f"{at}[{place}]"
        if part.type == "text":
            if part.text is None or part.source is not None:
                yield f"{where} is a text: it has text and no source"
        elif types is None:
            yield f"{where}.type is {part.type!r}, not text, image or audio"
        elif part.source is None or part.text is not None:
            yield f"{where} is an {part.type}: it has a source and no text"
        elif audio_type(part.source.media_type) not in types:
            yield f"{where}.source.media_type {part.source.media_type!r} is not an {part.type} type"
        elif (part.source.duration_sec is not None) and (part.type == "image" or part.source.duration_sec < 0):
            yield f"{where}.source.duration_sec does not fit"


def audio_type(media_type: str) -> str:
    """The registered spelling of a sound's type; any other type as it is."""
    plain = media_type.strip().lower()
    return _AUDIO_SPELLINGS.get(plain, plain) if plain.startswith("audio/") else media_type


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
