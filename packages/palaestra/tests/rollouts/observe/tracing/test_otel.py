"""The spans of real runs, as an exporter gets them: in memory, and over HTTP by a collector that is there or not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from toy import add

from golden_messages import check_message
from palaestra.tools.runtime.runtime import CheckedCall
from palaestra.tools.tool import FunctionTool, ToolOutcome, ToolRun, ToolSchema

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from aiohttp import web
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from toy import Sums, changed, services

from palaestra.agent.middleware import MiddlewareServer
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.observe.tracing.otel import Spans, messages_text
from palaestra.rollouts.observe.tracing.span_export import traced, traces_url
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import Middleware, RunContext
from palaestra_slots.core.types import JSON

Kept = Sequence[ReadableSpan]


def spans_of(environment: Environment, shared: RunContext, *, content: bool = False) -> Kept:
    """What an exporter has of a run, in the order in which the spans began."""
    kept, tracers = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(kept))
    tracing = Spans(
        tracers.get_tracer("test"), env="sums", model="oracle", provider="scripted", run_id="run-1", content=content
    )

    tracing.start()
    asyncio.run(Runner(environment, traced_by(tracing, shared)).run())
    tracing.end()
    shared.events.journal.close()
    tracers.shutdown()
    return sorted(kept.get_finished_spans(), key=lambda span: span.start_time or 0)


def traced_by(spans: Spans, shared: RunContext) -> RunContext:
    return changed(shared, spans, middleware=Middleware((spans.chat,), (spans.tool,)))


def named(spans: Kept, name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def parents(spans: Kept, span: ReadableSpan) -> list[str]:
    """The names of the spans around it, from the inside out."""
    by_id = {each.context.span_id: each for each in spans if each.context}
    names = []
    while span.parent is not None:
        span = by_id[span.parent.span_id]
        names.append(span.name)
    return names


def facts(span: ReadableSpan) -> dict[str, JSON]:
    return dict(span.attributes or {})


def test_a_run_is_told_in_the_words_of_the_conventions(tmp_path: Path) -> None:
    spans = spans_of(Sums(2), services(tmp_path, group_size=2))
    assert len(named(spans, "rollout")) == 4
    chats = named(spans, "chat oracle")
    assert len(chats) == 8
    assert parents(spans, chats[0]) == ["invoke_agent sums", "rollout", "invoke_workflow sums"]
    assert chats[0].kind is SpanKind.CLIENT
    told = facts(chats[0])
    assert told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.provider.name"], told["gen_ai.request.model"]) == ("scripted", "oracle")
    assert (told["gen_ai.conversation.id"], told["gen_ai.request.temperature"]) == ("000000-sum-0/0", 1.0)
    assert told["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert told["gen_ai.usage.input_tokens"] > 0
    assert told["gen_ai.usage.output_tokens"] > 0
    call = named(spans, "execute_tool add")[0]
    assert parents(spans, call) == parents(spans, chats[0])
    assert facts(call) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.type": "function",
    }
    agent = facts(named(spans, "invoke_agent sums")[0])
    assert (agent["gen_ai.operation.name"], agent["gen_ai.agent.name"]) == ("invoke_agent", "sums")
    rollout = facts(named(spans, "rollout")[0])
    assert (rollout["palaestra.outcome"], rollout["palaestra.reward"], rollout["palaestra.turns"]) == ("natural", 1, 2)
    (scored,) = named(spans, "rollout")[0].events
    assert scored.name == "gen_ai.evaluation.result"
    assert scored.attributes == {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 1.0}
    assert all(span.status.status_code is not StatusCode.ERROR for span in spans)


def test_every_group_is_a_trace_of_its_own_linked_to_the_run(tmp_path: Path) -> None:
    spans = spans_of(Sums(3), services(tmp_path))
    (run,) = named(spans, "run")
    groups = named(spans, "invoke_workflow sums")
    assert len({span.context.trace_id for span in [run, *groups] if span.context}) == 4
    assert [[link.context for link in group.links] for group in groups] == [[run.context]] * 3
    assert [facts(group)["palaestra.task.id"] for group in groups] == ["sum-0", "sum-1", "sum-2"]


def test_texts_are_on_spans_only_where_they_were_asked_for(tmp_path: Path) -> None:
    silent = spans_of(Sums(1), services(tmp_path / "a", group_size=1))
    assert "What is 0 + 1?" not in str([(span.attributes, span.events, span.status.description) for span in silent])
    spans = spans_of(Sums(1), services(tmp_path / "b", group_size=1), content=True)
    first, last = (facts(span) for span in named(spans, "chat oracle"))
    assert json.loads(first["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "What is 0 + 1?"}]}
    ]
    (answer,) = json.loads(first["gen_ai.output.messages"])
    (part,) = answer["parts"]
    assert (answer["role"], answer["finish_reason"]) == ("assistant", "tool_calls")
    assert (part["type"], part["name"], part["arguments"]) == ("tool_call", "add", {"a": 0, "b": 1})
    response = json.loads(last["gen_ai.input.messages"])[-1]
    assert response["parts"] == [{"type": "tool_call_response", "id": part["id"], "response": '{"result": 1}'}]
    call = facts(named(spans, "execute_tool add")[0])
    assert json.loads(call["gen_ai.tool.call.arguments"]) == {"a": 0, "b": 1}
    assert call["gen_ai.tool.call.result"] == '{"result": 1}'


def test_reasoning_and_malformed_arguments_are_said_as_they_are() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{not json"}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    (said,) = json.loads(messages_text([message]))
    assert said["parts"] == [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "id": "c", "name": "add", "arguments": "{not json"},
    ]


def test_what_fails_is_marked_by_its_kind_and_says_whose_fault_it_was(tmp_path: Path) -> None:
    async def broken(rollout: Rollout) -> float:
        raise KeyError("a secret of the task")

    spans = spans_of(Sums(1, score=broken), services(tmp_path, group_size=1))
    (rollout,), (grade,) = named(spans, "rollout"), named(spans, "grade")
    assert facts(grade)["error.type"] == "GraderError"
    assert (facts(rollout)["error.type"], facts(rollout)["palaestra.blame"]) == ("GraderError", "grader")
    assert "palaestra.reward" not in facts(rollout)
    assert {grade.status.status_code, rollout.status.status_code} == {StatusCode.ERROR}
    assert "a secret" not in str([(span.attributes, span.events, span.status.description) for span in spans])


def test_each_attempt_has_a_span(tmp_path: Path) -> None:
    tried = 0

    async def flaky(rollout: Rollout) -> float:
        nonlocal tried
        tried += 1
        if tried <= 2:  # the first attempt, and its repetition over the prepared workspace
            raise OSError("the disk")
        return 1.0

    spans = spans_of(Sums(1, score=flaky), services(tmp_path, group_size=1, infra_retries=1))
    assert [facts(span).get("palaestra.reward") for span in named(spans, "rollout")] == [None, 1.0]


async def test_a_server_that_answers_in_another_shape_is_traced_all_the_same() -> None:
    class Own:
        async def chat_completion(self, **request: JSON) -> JSON:
            return {"choices": [{"message": {"content": "hi"}}]}

    kept, tracers = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(kept))
    tracing = Spans(tracers.get_tracer("t"), env="e", model="m", provider="p", run_id="r")
    server = MiddlewareServer(Own(), [tracing.chat("x/0")])
    assert (await server.chat_completion(messages=[]))["choices"]  # type: ignore[index]
    assert [span.name for span in kept.get_finished_spans()] == ["chat m"]


async def sent_to(endpoint: str, shared: RunContext) -> list[str]:
    """A small run whose spans go to a collector; what was said of it."""
    notes: list[str] = []
    async with traced(endpoint, notes.append, env="sums", model="m", provider="p", run_id="r") as tracing:
        assert tracing is not None
        await Runner(Sums(2), traced_by(tracing, shared)).run()
    await asyncio.sleep(0)
    shared.events.journal.close()
    return notes


async def test_a_collector_gets_every_span_over_http(tmp_path: Path, unused_tcp_port: int) -> None:
    names: list[str] = []

    async def collect(request: web.Request) -> web.Response:
        batch = ExportTraceServiceRequest()
        batch.ParseFromString(await request.read())
        names.extend(span.name for each in batch.resource_spans for scope in each.scope_spans for span in scope.spans)
        return web.Response(content_type="application/x-protobuf")

    async def main() -> list[str]:
        app = web.Application()
        app.router.add_post("/v1/traces", collect)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        try:
            return await sent_to(f"http://127.0.0.1:{unused_tcp_port}", services(tmp_path, group_size=1))
        finally:
            await runner.cleanup()

    assert await main() == []
    assert (names.count("chat m"), names.count("execute_tool add"), names.count("rollout")) == (4, 2, 2)


async def test_half_a_surrogate_pair_costs_no_spans() -> None:
    """Models write them in calls; a batch with one in a name could not be encoded."""
    kept, tracers = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(kept))
    tracing = Spans(tracers.get_tracer("test"), env="e", model="m", provider="p", run_id="r", content=True)

    async def odd(call: CheckedCall) -> ToolOutcome:
        return ToolOutcome({}, '{"output": "a\ud83db"}')

    call = CheckedCall(FunctionTool(ToolSchema("x\ud83dy", ""), add), {}, ToolRun(), by_agent=True)
    await tracing.tool("r/0")(call, odd)  # type: ignore[arg-type]
    encoded = encode_spans(kept.get_finished_spans()).SerializeToString()
    assert b"execute_tool x?y" in encoded
    assert b"a?b" in encoded
    tracers.shutdown()


async def test_a_collector_that_refuses_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=400)

    async def main() -> list[str]:
        app = web.Application()
        app.router.add_post("/spans", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        try:
            return await sent_to(f"http://127.0.0.1:{unused_tcp_port}/spans", services(tmp_path, group_size=1))
        finally:
            await runner.cleanup()

    (note,) = await main()
    check_message(note, "WARNING", "//127.0.0.1", unused_tcp_port, "/spans")


def test_the_path_of_the_protocol_is_added_where_there_is_none() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/traces") == "https://c/otlp/traces"


async def test_without_the_extra_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    notes: list[str] = []
    endpoint = "http://127.0.0.1:9"
    async with traced(endpoint, notes.append, env="e", model="m", provider="p", run_id="r") as tracing:
        pass
    assert tracing is None
    (note,) = notes
    assert "[otel]'" in note
