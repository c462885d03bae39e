"""The types that Atropos environments import from `atroposlib.type_definitions`, except `Item` and `Message`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Content: TypeAlias = str | list[dict[str, Any]]
"""The content of a message: text, or a list of parts."""

number: TypeAlias = int | float
UUID: TypeAlias = str


class Message(TypedDict):
    """A message of a step, with the reward for it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    reward: float | None


class AgentStep(TypedDict, total=False):
    """One step of an agent: its number, the messages during it, and the reward."""

    step: int
    messages: list[Message]
    reward: float


AgentHistory: TypeAlias = dict[str, list[AgentStep]]
"""The steps of each agent, by the agent's id."""


class Observation(TypedDict):
    """What an agent observes: as data, and as the content of a message."""

    raw: dict[str, Any]
    rendered: Content


class GameStep(TypedDict):
    """One step of a game. With several agents, `reward` maps the agents to their rewards."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


GameHistory: TypeAlias = list[GameStep]


class EvaluationConfigGeneral(TypedDict):
    """How an evaluation was made. The time is in seconds."""

    total_evaluation_time_seconds: str
    model_name: str | None
    generation_parameters: dict[str, Any]


class EvaluationResults(TypedDict):
    """The metrics of an evaluation: `all` over all tasks, and one more entry per task."""

    all: dict[str, float]


class EvaluationMetrics(TypedDict):
    """The content of an evaluation's `metrics.json`."""

    config_general: EvaluationConfigGeneral
    results: EvaluationResults


class EvaluationSample(TypedDict, total=False):
    """One line of an evaluation's `samples.jsonl`."""

    messages: list[dict[str, str]] | None
    question: str | None
    gold_answer: str | None
    gold_parsed: str | None
    model_parsed: str | None
    score: int | None
    correct: bool | None
    finish_reason: str | None
    response_after_think: str | None
