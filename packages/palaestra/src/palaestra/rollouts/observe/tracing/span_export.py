"""Sends spans to a collector with OTLP over HTTP, in batches, from a thread of the SDK.

If the collector is slow, unreachable or full, spans are lost, one warning is printed, and the run waits at most
`GRACE_S` seconds at its end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from palaestra.rollouts.observe.tracing.otel import Spans

EXPORT_S = 5.0
"""The time limit for sending one batch."""

GRACE_S = 10.0
"""The maximum time that the end of a run waits for the last batches."""

Note = Callable[[str], None]


@asynccontextmanager
async def traced(
    endpoint: str, note: Note, *, env: str, model: str, provider: str, run_id: str, content: bool = False
) -> AsyncIterator[Spans | None]:
    """Yield the spans of a run, which are sent to `endpoint`. Yields None, with a warning, if the extra `otel` is not
    installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from palaestra.rollouts.observe.tracing.otel import Spans
    except ImportError as error:
        from palaestra_slots.core.extras import install_command  # a slow import, for this message only

        missing = f"{error}; {install_command('otel')}"
        note(f"WARNING: tracing was requested but is not installed ({missing}); the run continues without spans")
        yield None
        return
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # it logs every lost batch; we warn once
    loop = asyncio.get_running_loop()

    def lost(text: str) -> None:
        with suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(note, text)

    exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_S)
    # The SDK's own hook at exit would wait for an unreachable collector once more.
    tracers = TracerProvider(resource=Resource.create({"service.name": "palaestra"}), shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(_warning_once(exporter, endpoint, lost)))
    tracer = tracers.get_tracer("palaestra")
    spans = Spans(tracer, env=env, model=model, provider=provider, run_id=run_id, content=content)
    spans.start()
    try:
        yield spans
    finally:
        spans.end()
        # A daemon, because Python waits for worker threads of asyncio when it ends, and an unreachable collector could
        # then hold up the process.
        sending = threading.Thread(target=tracers.shutdown, name="spans", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, GRACE_S)


def traces_url(endpoint: str) -> str:
    """Return the URL for spans: the endpoint, to which the protocol's path is added if the endpoint has no path."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


def _warning_once(exporter: SpanExporter, endpoint: str, note: Note) -> SpanExporter:
    """Wrap the exporter so that it warns the first time that spans are lost."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class WarningExporter(SpanExporter):
        warned = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception:  # whatever error the HTTP client raises, the batch is lost
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS and not self.warned:
                self.warned = True
                note(f"WARNING: spans cannot be sent to {endpoint} and are lost; the run continues")
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return WarningExporter()
