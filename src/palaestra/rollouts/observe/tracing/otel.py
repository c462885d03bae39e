"""Messages in the form that the GenAI conventions give them on spans, as JSON text.

Only for runs that ask for it: what is said here may be anybody's. Source of the form: OpenTelemetry, semantic
conventions for generative AI, `gen-ai-input-messages.json` and `gen-ai-output-messages.json`.

Spans of OpenTelemetry with the names and attributes of its conventions for generative AI (extra `otel`).

A group is a trace of its own, linked to the span of the run: one trace over a night would be too large for anybody to
show. Texts (prompts, replies, arguments, results) are on no span unless asked for. What the conventions have no name
for is under `palaestra.`.

Source: OpenTelemetry semantic conventions for generative AI, client and agent spans, status Development, 2026.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, get_current_span
from opentelemetry.util.types import AttributeValue

from palaestra.agent.tool_calls import reported_error
from palaestra.core.types import JSON, Message, Score
from palaestra.inference.engine import ChatCompletion, ChatServer
from palaestra.rollouts.export.messages import ChatMessage, chat_messages
from palaestra.rollouts.journal.journal import plain
from palaestra.rollouts.observe.tracing.spans import Tracing
from palaestra.rollouts.records import Group, Trajectory
from palaestra.tools.runtime.bound_tools import reply_text
from palaestra.tools.tool import ToolReply


def messages_text(messages: Sequence[Message], finish_reason: str | None = None) -> str:
    """The messages as JSON text. With a `finish_reason` they are what a model answered."""
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


class OtelTracing(Tracing):
    """Spans of one run. `provider` is what kind of server the model is behind; `content` puts texts on spans."""

    def __init__(self, tracer: Tracer, *, env: str, model: str, provider: str, run_id: str, content: bool = False):
        self.content = content
        self.model = {PROVIDER: provider, MODEL: model}
        self._tracer = tracer
        self._env = env
        self._run_id = run_id
        self._links: list[Link] = []

    @contextmanager
    def span(self, name: str, attributes: Attributes, kind: SpanKind = SpanKind.INTERNAL) -> Iterator[Span]:
        """A span in the one that is open. An exception that leaves it is named on it by its class alone."""
        with self._open(name, attributes, kind) as span:
            yield span

    @contextmanager
    def _open(
        self,
        name: str,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        context: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            plain(name),  # a half surrogate pair, as models write them, would cost the whole batch of spans
            context,
            kind=kind,
            attributes=plain(attributes),
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                failed(span, type(error).__name__)
                raise

    @contextmanager
    def run(self) -> Iterator[None]:
        attributes = {"palaestra.run.id": self._run_id, "palaestra.environment": self._env, MODEL: self.model[MODEL]}
        with self._open("run", attributes) as span:
            self._links = [Link(span.get_span_context())]
            yield

    @contextmanager
    def group(self, group: Group) -> Iterator[None]:
        attributes = {
            OPERATION: "invoke_workflow",
            "gen_ai.workflow.name": self._env,
            "palaestra.run.id": self._run_id,
            "palaestra.group.id": group.group_id,
            "palaestra.task.id": group.task_id,
        }
        with self._open(f"invoke_workflow {self._env}", attributes, context=Context(), links=self._links) as span:
            yield
            if group.error:
                failed(span, group.error.partition(":")[0])

    @contextmanager
    def rollout(self, rollout_id: str) -> Iterator[Callable[[Trajectory], None]]:
        with self._open("rollout", {"palaestra.rollout.id": rollout_id}) as span:
            yield lambda trajectory: _ended(span, trajectory)

    def stage(self, name: str, stage: str) -> AbstractContextManager[None]:
        if stage == "tool":  # has spans of its own
            return nullcontext()
        if stage == "agent":
            agent = {OPERATION: "invoke_agent", "gen_ai.agent.name": self._env, CONVERSATION: name}
            return self._stage(f"invoke_agent {self._env}", agent | self.model)
        return self._stage(stage, {"palaestra.stage": stage})

    @contextmanager
    def _stage(self, name: str, attributes: Attributes) -> Iterator[None]:
        with self._open(name, attributes):
            yield

    @contextmanager
    def tool(self, name: str, arguments: Mapping[str, JSON]) -> Iterator[Callable[[ToolReply], None]]:
        attributes = {OPERATION: "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
        if self.content:
            attributes["gen_ai.tool.call.arguments"] = json.dumps(arguments)
        with self._open(f"execute_tool {name}", attributes) as span:
            yield lambda reply: self._answered(span, reply_text(reply))

    def _answered(self, span: Span, text: str) -> None:
        if self.content:
            span.set_attribute("gen_ai.tool.call.result", plain(text))
        if reported_error(text):
            failed(span, "tool_error")

    def graded(self, score: Score) -> None:
        told: dict[str, AttributeValue] = {
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.value": score.reward,
        }
        get_current_span().add_event("gen_ai.evaluation.result", told)

    def served(self, server: ChatServer, rollout_id: str) -> ChatServer:
        return server if isinstance(server, TracedServer) else TracedServer(server, self, rollout_id)


class TracedServer:
    """A chat server with a span over each call. Whatever else it has is the server's own."""

    def __init__(self, server: ChatServer, tracing: OtelTracing, rollout_id: str) -> None:
        self._server = server
        self._tracing = tracing
        self._rollout_id = rollout_id

    def __getattr__(self, name: str) -> JSON:
        return getattr(self._server, name)

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """One reply, as the server's."""
        tracing = self._tracing
        attributes: dict[str, AttributeValue] = {OPERATION: "chat", CONVERSATION: self._rollout_id, **tracing.model}
        asked = {key: request[name] for name, key in _REQUEST.items() if isinstance(request.get(name), int | float)}
        if tracing.content:
            attributes["gen_ai.input.messages"] = messages_text(messages)
        with tracing.span(f"chat {tracing.model[MODEL]}", attributes | asked, SpanKind.CLIENT) as span:
            completion = await self._server.chat_completion(messages=messages, **request)
            with suppress(AttributeError, TypeError, ValueError):  # an environment's own server may answer in any shape
                self._answered(span, completion)
            return completion

    def _answered(self, span: Span, completion: ChatCompletion) -> None:
        choices, usage = completion.choices, completion.usage
        reasons = [plain(choice.finish_reason or "") for choice in choices]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        for key, value in (("gen_ai.response.model", completion.model), ("gen_ai.response.id", completion.id)):
            if value:
                span.set_attribute(key, plain(value))
        if usage is not None:
            span.set_attributes({INPUT_TOKENS: usage.prompt_tokens, OUTPUT_TOKENS: usage.completion_tokens})
        if self._tracing.content:
            said = [msgspec.to_builtins(choice.message) for choice in choices]
            reason = (choices[0].finish_reason or "") if choices else ""
            span.set_attribute("gen_ai.output.messages", messages_text(said, reason))


def _ended(span: Span, trajectory: Trajectory) -> None:
    """What came of a rollout."""
    attributes: dict[str, AttributeValue] = {
        "palaestra.outcome": trajectory.outcome.value,
        "palaestra.turns": len(trajectory.turns),
        INPUT_TOKENS: trajectory.prompt_tokens,
        OUTPUT_TOKENS: trajectory.completion_tokens,
    }
    if trajectory.reward is not None:
        attributes["palaestra.reward"] = trajectory.reward
    if trajectory.cost is not None:
        attributes["palaestra.cost"] = trajectory.cost
    if trajectory.blame is not None:
        attributes["palaestra.blame"] = trajectory.blame.value
    span.set_attributes(attributes)
    if not trajectory.scored:
        failed(span, trajectory.error.partition(":")[0] or trajectory.outcome.value)


def failed(span: Span, kind: str) -> None:
    """Mark a span as one that ended in an error of this kind."""
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR))
