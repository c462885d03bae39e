"""A run's status as Prometheus text, and the endpoint GET /metrics that serves it. Source of the format: Prometheus,
text exposition format 0.0.4.

The endpoint listens only on this host unless the settings give a different address and a token, because the text names
the environment and the model. Invariant: counters come from the journal, so they continue in a resumed run; a metric
without a measurement has no line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias

from aiohttp import web

from palaestra.rollouts.observe.status import RunReader, RunStatus
from palaestra.rollouts.observe.status_file import StatusFile
from palaestra_slots.core.io.http_server import guard, listening

Samples = Mapping[tuple[tuple[str, str], ...], float]
"""The values of one metric by their labels."""
Metric: TypeAlias = tuple[str, str, str, Samples]
"""A metric's name, kind, description and values."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(status: RunStatus, now: float) -> str:
    """Return the status as text. `now` is in seconds since the epoch."""
    return exposition_text(_metrics(status, now))


def exposition_text(metrics: Iterable[Metric]) -> str:
    """Return metrics as text. Their names get the prefix `palaestra_`."""
    return "".join(
        f"# HELP palaestra_{name} {about}\n# TYPE palaestra_{name} {kind}\n"
        + "".join(f"palaestra_{name}{_labels(labels)} {value:.17g}\n" for labels, value in samples.items())
        for name, kind, about, samples in metrics
        if samples
    )


def _metrics(status: RunStatus, now: float) -> Iterator[Metric]:
    run = (("run", status.run_id), ("env", status.env), ("model", status.model))
    tokens = {"prompt": status.prompt_tokens, "completion": status.completion_tokens}
    idle = max((now - each.since for each in status.oldest), default=0.0)
    yield "run_info", "gauge", "The run that these metrics describe.", {run: 1.0}
    yield "run_start_time_seconds", "gauge", "Start of the run, in seconds since the epoch.", one(status.started_at)
    yield "groups_total", "counter", "Groups that have ended.", one(status.groups_ended)
    yield "groups_failed_total", "counter", "Groups that ended with an error.", one(status.groups_failed)
    yield "preparations_total", "counter", "Workspaces prepared for groups.", one(status.prepared)
    yield "preparations_from_store_total", "counter", "Workspaces that were already prepared.", one(status.from_store)
    yield "rollouts_total", "counter", "Rollouts that have ended, by outcome.", by("outcome", status.outcomes)
    yield "scored_rollouts_total", "counter", "Rollouts that have a reward.", one(status.scored)
    yield "discarded_attempts_total", "counter", "Attempts that were discarded.", one(status.discarded)
    blamed = {name: rate.count for name, rate in status.blame.items()}
    yield "blamed_rollouts_total", "counter", "Rollouts that did not finish cleanly.", by("blame", blamed)
    shares = {name: rate.share for name, rate in status.blame.items()}
    yield "blame_ratio", "gauge", "Share of rollouts that did not finish cleanly.", by("blame", shares)
    yield "reward_mean", "gauge", "Mean reward of the scored rollouts.", one(status.mean_reward)
    yield (
        "reward_mean_with_unscored",
        "gauge",
        "Mean reward with unscored rollouts as 0.",
        one(status.mean_with_unscored),
    )
    yield "official_mean", "gauge", "Mean official verdict of the scored rollouts.", one(status.official)
    yield "labelled_rollouts_total", "counter", "Rollouts with a label.", by("label", status.labels)
    spent = {name: latency.total_s for name, latency in status.stages.items()}
    yield "stage_seconds_total", "counter", "Time that rollouts spent at a stage.", by("stage", spent)
    stayed = {name: latency.count for name, latency in status.stages.items()}
    yield "stage_rollouts_total", "counter", "Rollouts and preparations that reached a stage.", by("stage", stayed)
    yield "in_flight", "gauge", "Rollouts and preparations in flight.", by("stage", status.in_flight)
    nodes = {f"{each.host}/{each.node[:8]}": each for each in status.nodes if not each.lost}
    slots = {name: each.slots for name, each in nodes.items()}
    busy = {name: each.in_flight for name, each in nodes.items()}
    # A run that uses no cluster has no such metric, rather than one that is always 0.
    lost = sum(each.losses for each in status.nodes) if status.nodes else None
    yield "node_slots", "gauge", "Slots of a node of the cluster.", by("node", slots)
    yield "node_busy_slots", "gauge", "Slots of a node that have a rollout.", by("node", busy)
    yield "nodes_lost_total", "counter", "Times that a node was lost.", one(lost)
    yield "oldest_idle_seconds", "gauge", "Longest time without a sign of life.", one(idle)
    yield "tokens_total", "counter", "Tokens of rollouts, including those in flight.", by("kind", tokens)
    yield "cost_total", "counter", "Cost of the run, in the currency of the prices.", one(status.cost)
    yield "disk_bytes", "gauge", "Size of the run's folder.", one(status.disk_bytes)
    yield "disk_free_bytes", "gauge", "Free space on the file system of the run's folder.", one(status.disk_free_bytes)


def one(value: float | None) -> Samples:
    """Return the samples of a metric without labels; none if there is no value."""
    return {} if value is None else {(): float(value)}


def by(label: str, values: Mapping[str, float]) -> Samples:
    """Return the samples of a metric with one label."""
    return {((label, name),): float(value) for name, value in values.items()}


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    escaped = ((name, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, text in labels)
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped) + "}"


@asynccontextmanager
async def serving_metrics(
    reader: RunReader, inflight: StatusFile, host: str, port: int, token: str | None = None
) -> AsyncIterator[str]:
    """Serve the endpoint while the block runs; yields the URL. Raises `ConfigError` if it cannot listen."""
    reading = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        # Requests may overlap, and the reader keeps its place in the journal between reads.
        async with reading:
            status = await asyncio.to_thread(reader.read)
        # From memory, because the file may be a second old.
        now = inflight.now()
        status.in_flight, status.oldest = now.stages, now.idle
        return web.Response(body=exposition(status, now.at).encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(middlewares=[guard(token)])
    app.router.add_get("/metrics", metrics)
    async with listening(app, host, port, token=token) as url:
        yield f"{url}/metrics"
