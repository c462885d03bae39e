"""Spans with the names and attributes of OpenTelemetry's conventions for generative AI (extra `otel`).

Each group has its own trace, linked to the run's span, because one trace for a whole run would be too large to display.
Texts (prompts, replies, arguments, results) are put on spans only on request. Attributes without a conventional name
are under `palaestra.`.

Source: OpenTelemetry semantic conventions for generative AI, client and agent spans, status Development, 2026. Messages
have the form of `gen-ai-input-messages.json` and `gen-ai-output-messages.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.util.types import AttributeValue

from palaestra.agent.middleware import Ask, ChatCall, ChatMiddleware
from palaestra.rollouts.events import (
    Alive,
    AttemptDiscarded,
    Graded,
    GroupBegun,
    GroupEnded,
    Handlers,
    RolloutBegun,
    RolloutEnded,
)
from palaestra.rollouts.export.chat_messages import ChatMessage, chat_messages
from palaestra.rollouts.journal.journal import plain
from palaestra.rollouts.records import Trajectory
from palaestra.tools.runtime.runtime import CheckedCall, Next, ToolMiddleware
from palaestra.tools.tool import ToolOutcome
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import ChatCompletion


def messages_text(messages: Sequence[Message], finish_reason: str | None = None) -> str:
    """Return the messages as JSON text. Pass a `finish_reason` if they are the model's reply."""
    ended = {} if finish_reason is None else {"finish_reason": finish_reason}
    return json.dumps([{"role": said.role, "parts": _parts(said)} | ended for said in chat_messages(messages)])


def _parts(said: ChatMessage) -> list[dict[str, JSON]]:
    if said.role == "tool":
        return [{"type": "tool_call_response", "id": said.call_id, "response": said.text}]
    parts: list[dict[str, JSON]] = []
    if said.reasoning:
        parts.append({"type": "reasoning", "content": said.reasoning})
    if said.text:
        parts.append({"type": "text", "content": said.text})
    for call in said.calls:
        arguments = call.parsed()
        written: JSON = call.arguments if arguments is None else arguments
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": written})
    return parts


Attributes = Mapping[str, AttributeValue]

OPERATION, CONVERSATION = "gen_ai.operation.name", "gen_ai.conversation.id"
PROVIDER, MODEL = "gen_ai.provider.name", "gen_ai.request.model"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"
_REQUEST = {name: f"gen_ai.request.{name}" for name in ("temperature", "max_tokens", "top_p", "top_k", "seed")}


class Spans:
    """The spans of one run: a subscriber to its events, and middleware for its model and tool calls.

    `provider` is the kind of model server; if `content` is true, texts are put on spans. `start` opens the run's span,
    and `end` closes all open spans.
    """

    def __init__(self, tracer: Tracer, *, env: str, model: str, provider: str, run_id: str, content: bool = False):
        self.content = content
        self.model = {PROVIDER: provider, MODEL: model}
        self._tracer = tracer
        self._env = env
        self._run_id = run_id
        self._run: Span | None = None
        self._open: dict[str, list[tuple[str, Span]]] = {}
        """The open spans of each group and rollout, outermost first, each with its stage; the stage "" is the group's
        or rollout's own span."""

    def start(self) -> None:
        attributes = {"palaestra.run.id": self._run_id, "palaestra.environment": self._env, MODEL: self.model[MODEL]}
        self._run = self._tracer.start_span("run", Context(), attributes=attributes)

    def end(self) -> None:
        for name in list(self._open):
            self._end_spans(name)
        if self._run is not None:
            self._run.end()

    def handlers(self) -> Handlers:
        return {
            Alive: self._on_alive,
            GroupBegun: self._on_group_begun,
            GroupEnded: self._on_group_ended,
            RolloutBegun: self._on_rollout,
            Graded: self._on_graded,
            RolloutEnded: self._on_rollout_ended,
            AttemptDiscarded: self._on_rollout_ended,
        }

    def _on_group_begun(self, event: GroupBegun) -> None:
        group = event.group
        attributes = {
            OPERATION: "invoke_workflow",
            "gen_ai.workflow.name": self._env,
            "palaestra.run.id": self._run_id,
            "palaestra.group.id": group.group_id,
            "palaestra.task.id": group.task_id,
        }
        links = [Link(self._run.get_span_context())] if self._run is not None else []
        # An empty context begins a trace. Without one, the span that is current would become the parent.
        self._begin_span(group.group_id, "", f"invoke_workflow {self._env}", attributes, Context(), links)

    def _on_group_ended(self, event: GroupEnded) -> None:
        self._end_spans(event.group_id, event.error.partition(":")[0])

    def _on_rollout(self, event: RolloutBegun) -> None:
        self._end_spans(event.rollout_id)
        parent = self._context(event.rollout_id.rpartition("/")[0])
        self._begin_span(event.rollout_id, "", "rollout", {"palaestra.rollout.id": event.rollout_id}, parent)

    def _on_rollout_ended(self, event: RolloutEnded | AttemptDiscarded) -> None:
        trajectory = event.trajectory
        if spans := self._open.get(trajectory.rollout_id):
            _describe(spans[0][1], trajectory)
            self._end_spans(trajectory.rollout_id)

    def _on_alive(self, event: Alive) -> None:
        if event.entered:
            self._begin_stage(event.name, event.entered)
        if event.left:
            self._end_stage(event.name, event.left, event.error)

    def _begin_stage(self, name: str, stage: str) -> None:
        if stage == "tool":  # tool calls have their own spans
            return
        if stage == "agent":
            agent = {OPERATION: "invoke_agent", "gen_ai.agent.name": self._env, CONVERSATION: name}
            self._begin_span(name, stage, f"invoke_agent {self._env}", agent | self.model, self._context(name))
        else:
            self._begin_span(name, stage, stage, {"palaestra.stage": stage}, self._context(name))

    def _end_stage(self, name: str, stage: str, error: str) -> None:
        spans = self._open.get(name, [])
        for place in reversed(range(len(spans))):
            if spans[place][0] == stage:
                _end_span(spans.pop(place)[1], error)
                return

    def _on_graded(self, event: Graded) -> None:
        told: dict[str, AttributeValue] = {
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.value": event.reward,
        }
        if spans := self._open.get(event.rollout_id):
            spans[0][1].add_event("gen_ai.evaluation.result", told)

    def _begin_span(
        self, name: str, stage: str, title: str, attributes: Attributes, context: Context, links: Sequence[Link] = ()
    ) -> None:
        # a lone surrogate, which models sometimes write, would make the SDK lose the whole batch of spans
        span = self._tracer.start_span(plain(title), context, attributes=plain(attributes), links=links)
        self._open.setdefault(name, []).append((stage, span))

    def _end_spans(self, name: str, error: str = "") -> None:
        for place, (_, span) in reversed(list(enumerate(self._open.pop(name, ())))):
            # The outermost span is that of the group or rollout. The inner ones were only cut short by its end.
            _end_span(span, error if place == 0 else "")

    def _context(self, name: str) -> Context:
        """Return the context in which a span of this group or rollout opens."""
        spans = self._open.get(name)
        return set_span_in_context(spans[-1][1], Context()) if spans else Context()

    @contextmanager
    def _call_span(self, rollout_id: str, name: str, attributes: Attributes, kind: SpanKind) -> Iterator[Span]:
        """Open a span for a call, inside the span of the tool call that made it (`delegate_task`) or, otherwise, inside
        the span of the rollout's stage."""
        outer, within = get_current_span(), self._context(rollout_id)
        same = outer.get_span_context().trace_id == get_current_span(within).get_span_context().trace_id
        with self._tracer.start_as_current_span(
            plain(name),
            None if same and outer.is_recording() else within,
            kind=kind,
            attributes=plain(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                mark_failed(span, type(error).__name__)
                raise

    def tool(self, rollout_id: str) -> ToolMiddleware:
        """Return tool middleware that puts a span around each call that the rollout's agent makes itself. Calls in
        other conversations, such as those of sub-agents, get no span."""

        async def traced(call: CheckedCall, then: Next) -> ToolOutcome:
            if not call.by_agent or call.conversation:
                return await then(call)
            attributes = {OPERATION: "execute_tool", "gen_ai.tool.name": call.name, "gen_ai.tool.type": "function"}
            if self.content:
                attributes["gen_ai.tool.call.arguments"] = json.dumps(call.arguments)
            with self._call_span(rollout_id, f"execute_tool {call.name}", attributes, SpanKind.INTERNAL) as span:
                outcome = await then(call)
                if self.content:
                    span.set_attribute("gen_ai.tool.call.result", plain(outcome.text))
                if outcome.failed:
                    mark_failed(span, "tool_error")
                return outcome

        return traced

    def chat(self, rollout_id: str) -> ChatMiddleware:
        """Return chat middleware that puts a span around each model call of the rollout."""

        async def traced(call: ChatCall, ask: Ask) -> ChatCompletion:
            attributes: dict[str, AttributeValue] = {OPERATION: "chat", CONVERSATION: rollout_id, **self.model}
            numbers = ((name, key, call.request.get(name)) for name, key in _REQUEST.items())
            attributes |= {key: value for _, key, value in numbers if isinstance(value, int | float)}
            if self.content:
                attributes["gen_ai.input.messages"] = messages_text(call.messages)
            with self._call_span(rollout_id, f"chat {self.model[MODEL]}", attributes, SpanKind.CLIENT) as span:
                completion = await ask(call)
                with suppress(AttributeError, TypeError, ValueError):  # a custom server may answer in any shape
                    self._describe_reply(span, completion)
                return completion

        return traced

    def _describe_reply(self, span: Span, completion: ChatCompletion) -> None:
        choices, usage = completion.choices, completion.usage
        reasons = [plain(choice.finish_reason or "") for choice in choices]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        for key, value in (("gen_ai.response.model", completion.model), ("gen_ai.response.id", completion.id)):
            if value:
                span.set_attribute(key, plain(value))
        if usage is not None:
            span.set_attributes({INPUT_TOKENS: usage.prompt_tokens, OUTPUT_TOKENS: usage.completion_tokens})
        # Prompts and replies may contain data that a collector must not have, so a run sends them only if asked to.
        if self.content:
            said = [msgspec.to_builtins(choice.message) for choice in choices]
            reason = (choices[0].finish_reason or "") if choices else ""
            span.set_attribute("gen_ai.output.messages", messages_text(said, reason))


def _end_span(span: Span, error: str = "") -> None:
    if error:
        mark_failed(span, error)
    span.end()


def _describe(span: Span, trajectory: Trajectory) -> None:
    """Put a rollout's result on its span."""
    attributes: dict[str, AttributeValue] = {
        "palaestra.outcome": trajectory.outcome.value,
        "palaestra.turns": len(trajectory.turns),
        INPUT_TOKENS: trajectory.prompt_tokens,
        OUTPUT_TOKENS: trajectory.completion_tokens,
    }
    if trajectory.reward is not None:
        attributes["palaestra.reward"] = trajectory.reward
    if trajectory.official is not None:
        attributes["palaestra.official"] = trajectory.official
    if trajectory.labels:
        attributes["palaestra.labels"] = [label.name for label in trajectory.labels]
    if (cost := trajectory.whole_cost) is not None:
        attributes["palaestra.cost"] = cost
    if trajectory.blame is not None:
        attributes["palaestra.blame"] = trajectory.blame.value
    span.set_attributes(attributes)
    # A reward of 0 is a result; only a rollout without a reward is an error for a tracing tool.
    if not trajectory.scored:
        mark_failed(span, trajectory.error.partition(":")[0] or trajectory.outcome.value)


def mark_failed(span: Span, kind: str) -> None:
    """Mark a span as failed with an error of this kind."""
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR))
