"""A stand-in for a Nomad agent. It has the parts of the HTTP API that the nomad backend uses, and runs tasks on this
machine.

Paths, bodies, indexes and error texts follow developer.hashicorp.com/nomad/api-docs. The agent's only node runs the
tasks of jobs as processes of this machine: tasks of the driver `raw_exec`, and tasks of `docker`, without a container,
for the images in a given list. Tests can simulate failing requests (`faults`), missing images, crashing tasks and a
full node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shutil
import signal
import socket
import ssl
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from aiohttp import web

from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON
from stand_ins.fake_nomad_task import SECOND, RunningTask
from stand_ins.served import served_in_thread

_DEPLOYMENT_S = 10.0


@dataclass
class NomadFault:
    """A fault in the next `times` requests whose `METHOD /path` matches: a status with a text, a broken connection, or
    an answer that takes `delay_s` longer."""

    match: str
    status: int | None = None
    text: str = ""
    cut: bool = False
    delay_s: float = 0.0
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)


class _Answer(Exception):
    """A response with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Scheduler:
    """Starts and stops allocations on the one node until they match the jobs."""

    def __init__(self, fake: FakeNomad) -> None:
        self.evaluations: dict[str, JSON] = {}
        self.tasks: dict[str, RunningTask] = {}
        self._fake = fake
        self._stops: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Stop all tasks."""
        await asyncio.gather(*(task.stop() for task in self.tasks.values()))
        await asyncio.gather(*self._stops)

    async def evaluate(self, name: str, trigger: str) -> JSON:
        """Start and stop allocations until they match the job; return the evaluation."""
        job = self._fake.jobs.get(name)
        index = await self._fake.touch()
        evaluation: JSON = {
            "ID": str(uuid.uuid4()), "Type": "service", "TriggeredBy": trigger, "JobID": name, "Namespace": "default",
            "Status": "complete", "StatusDescription": "", "Priority": 50, "FailedTGAllocs": None,
            "QueuedAllocations": {}, "BlockedEval": "", "CreateIndex": index, "ModifyIndex": index,
        }  # fmt: skip
        self.evaluations[evaluation["ID"]] = evaluation
        groups = [] if job is None or job["Stop"] else job["TaskGroups"]
        counts = {group["Name"]: group["Count"] for group in groups}
        for allocation in self.live(name):
            if _number(allocation) >= counts.get(allocation["TaskGroup"], 0):
                allocation.update(DesiredStatus="stop", DesiredDescription="alloc not needed due to job update")
                self.end(allocation, "complete")
        for group in groups:
            used = {_number(each) for each in self.live(name) if each["TaskGroup"] == group["Name"]}
            for number in (each for each in range(group["Count"]) if each not in used):
                failed = self.why_not(job, group)
                if failed is not None:
                    evaluation["FailedTGAllocs"] = {group["Name"]: failed}
                    evaluation["BlockedEval"] = str(uuid.uuid4())
                    break
                await self._place(job, group, number, evaluation["ID"])
        await self._fake.touch(evaluation)
        return evaluation

    def live(self, name: str) -> list[JSON]:
        """Return the allocations of a job that are to run and do not end."""
        live = [
            each for each in self._fake.allocations.values() if each["DesiredStatus"] == "run" and each["JobID"] == name
        ]
        return [each for each in live if each["ClientStatus"] in ("pending", "running")]

    def why_not(self, job: JSON, group: JSON, more: int = 0) -> JSON:
        """Return None if the node can take 1 + `more` allocations of the group, otherwise an AllocationMetric with the
        reason."""
        metric: JSON = {
            "NodesEvaluated": 1, "NodesFiltered": 0, "NodesInPool": 1, "NodesAvailable": {"dc1": 1},
            "ClassFiltered": None, "ConstraintFiltered": None, "NodesExhausted": 0, "ClassExhausted": None,
            "DimensionExhausted": None, "QuotaExhausted": None, "Scores": None, "AllocationTime": 1000,
            "CoalescedFailures": 0, "ScoreMetaData": None,
        }  # fmt: skip
        if self._fake.quota is not None:
            return metric | {"QuotaExhausted": [self._fake.quota]}
        if "dc1" not in job["Datacenters"]:
            none = dict.fromkeys(job["Datacenters"], 0)
            return metric | {"NodesEvaluated": 0, "NodesInPool": 0, "NodesAvailable": none}
        if any(task["Driver"] not in self._fake.drivers for task in group["Tasks"]):
            return metric | {"NodesFiltered": 1, "ConstraintFiltered": {"missing drivers": 1}}
        live = [each for each in self._fake.allocations.values() if each["ClientStatus"] in ("pending", "running")]
        used = sum(each["memory"] for each in live)
        if used + (1 + more) * _memory(group) > self._fake.memory:
            return metric | {"NodesExhausted": 1, "DimensionExhausted": {"memory": 1}}
        return None

    async def _place(self, job: JSON, group: JSON, number: int, evaluation: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            value = free.getsockname()[1]
        label = group["Networks"][0]["DynamicPorts"][0]
        port = {"Label": label["Label"], "Value": value, "To": label.get("To", 0), "HostIP": "127.0.0.1"}
        allocation: JSON = {
            "ID": str(uuid.uuid4()), "EvalID": evaluation, "Name": f"{job['ID']}.{group['Name']}[{number}]",
            "Namespace": "default", "NodeID": "node-1", "NodeName": "here", "JobID": job["ID"], "JobType": job["Type"],
            "JobVersion": job["Version"], "TaskGroup": group["Name"], "DesiredStatus": "run", "DesiredDescription": "",
            "ClientStatus": "pending", "ClientDescription": "No tasks have started", "TaskStates": {},
            "NextAllocation": "", "CreateIndex": self._fake.index + 1, "CreateTime": time.time_ns(),
            "AllocatedResources": {"Shared": {"DiskMB": 300, "Networks": [], "Ports": [port]}, "Tasks": {}},
            "memory": _memory(group),
        }  # fmt: skip
        self._fake.allocations[allocation["ID"]] = allocation
        await self._fake.touch(allocation)
        policy = {"Attempts": 2, "Interval": 1800 * SECOND, "Delay": 15 * SECOND, "Mode": "fail"}
        policy |= group.get("RestartPolicy") or {}
        (task,) = group["Tasks"]
        self.tasks[allocation["ID"]] = RunningTask(self._fake, allocation, task, policy)

    def end(self, allocation: JSON, status: str) -> None:
        """Stop the tasks of an allocation. An allocation of a lost node gets its status immediately."""
        if status == "lost":
            allocation["ClientStatus"] = status
        task = asyncio.create_task(self.tasks[allocation["ID"]].stop())
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)


class FakeNomad:
    """The agent. An async context manager; `url` is its address.

    `images` are the images of its docker driver; `memory` is the node's memory in MB. If `token` is set, every request
    but those below `/v1/status/` must carry it. There is one namespace and one region. With `tls`, the agent speaks
    HTTPS. If `quota` is set, a quota blocks every job, and `quota` is the reason given. `requests` holds `METHOD /path`
    of all requests.
    """

    def __init__(
        self,
        *,
        images: tuple[str, ...] = (),
        drivers: tuple[str, ...] = ("docker", "raw_exec"),
        memory: int = 16384,
        token: str | None = None,
        quota: str | None = None,
        namespace: str = "default",
        region: str = "global",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.images, self.drivers, self.memory, self.token = set(images), drivers, memory, token
        self.namespace, self.region, self._tls = namespace, region, tls
        self.quota = quota
        self.pull_s = 0.05
        self.crashing = False
        self.faults: list[NomadFault] = []
        self.requests: list[str] = []
        self.folder = ""
        self.index = 10
        self._changed = asyncio.Condition()
        self.jobs: dict[str, JSON] = {}
        self.allocations: dict[str, JSON] = {}
        self._deployed: dict[str, float] = {}
        self._scalings: dict[str, list[JSON]] = {}
        self._scheduler = _Scheduler(self)

    async def __aenter__(self) -> FakeNomad:
        self.folder = tempfile.mkdtemp(prefix="palaestra-nomad-")
        app = web.Application(middlewares=[self._outer])
        app.add_routes(
            [
                web.get("/v1/status/leader", self._leader),
                web.get("/v1/jobs", self._list_jobs),
                web.route("*", "/v1/jobs", self._register),
                web.post("/v1/job/{job}/plan", self._plan),
                web.post("/v1/job/{job}/scale", self._scale),
                web.get("/v1/job/{job}/scale", self._scale_status),
                web.get("/v1/job/{job}/allocations", self._job_allocations),
                web.get("/v1/job/{job}/evaluations", self._job_evaluations),
                web.get("/v1/job/{job}", self._job),
                web.post("/v1/job/{job}", self._register),
                web.delete("/v1/job/{job}", self._deregister),
                web.get("/v1/allocation/{allocation}", self._allocation),
                web.get("/v1/evaluation/{evaluation}", self._evaluation),
                web.get("/v1/client/fs/logs/{allocation}", self._logs),
            ]
        )
        self._listening = listening(app, "127.0.0.1", 0, shutdown_s=0.01, tls=self._tls)
        self.url = await self._listening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._scheduler.aclose()
        await self._listening.__aexit__(None, None, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    # Faults that tests inject

    def crash_tasks(self) -> None:
        """Kill the process of every task. The tasks then restart as their policy allows."""
        for task in self._scheduler.tasks.values():
            task.crash()

    async def lose_node(self) -> None:
        """End every allocation as if its node were lost, and place new allocations."""
        for allocation in list(self.allocations.values()):
            if allocation["ClientStatus"] in ("pending", "running"):
                allocation.update(DesiredStatus="stop", DesiredDescription="alloc is lost since its node is down")
                self._scheduler.end(allocation, "lost")
        for name in list(self.jobs):
            await self._scheduler.evaluate(name, "node-update")

    def running(self, job: str | None = None) -> list[JSON]:
        """Return the allocations that run and are not being stopped."""
        wanted = [each for each in self.allocations.values() if each["DesiredStatus"] == "run"]
        found = [each for each in wanted if each["ClientStatus"] == "running"]
        return [each for each in found if job is None or each["JobID"] == job]

    # The scheduler

    async def touch(self, *objects: JSON) -> int:
        """Raise the index, assign it to the objects that have changed, and let blocking queries check again."""
        self.index += 1
        for each in objects:
            each["ModifyIndex"], each["ModifyTime"] = self.index, time.time_ns()
        async with self._changed:
            self._changed.notify_all()
        return self.index

    async def client_status(self, allocation: JSON, status: str) -> None:
        """Set the status that the client reports for an allocation; a lost allocation stays lost."""
        if allocation["ClientStatus"] != "lost":
            allocation["ClientStatus"] = status
        await self.touch(allocation)

    # HTTP

    @web.middleware
    async def _outer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        line = f"{request.method} {request.path}"
        self.requests.append(line)
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.match, line):
                fault.times -= 1
                await asyncio.sleep(fault.delay_s)
                if fault.cut:
                    assert request.transport is not None
                    request.transport.abort()
                if fault.status is not None:
                    return web.Response(status=fault.status, text=fault.text, headers=fault.headers)
        open_to_all = request.path.startswith("/v1/status/")
        if self.token is not None and not open_to_all and request.headers.get("X-Nomad-Token") != self.token:
            return web.Response(status=403, text="Permission denied")
        if request.query.get("region", self.region) != self.region:
            return web.Response(status=500, text="No path to region")
        if not open_to_all and request.query.get("namespace", "default") != self.namespace:
            return web.Response(status=404, text="namespace not found")
        try:
            return await handler(request)
        except _Answer as answer:
            return web.Response(status=answer.status, text=str(answer))

    async def _query(self, request: web.Request, look: Callable[[], tuple[JSON, int]]) -> web.Response:
        """Answer a query; a blocking query is answered once its index has been exceeded. `look` returns the answer and
        its index."""
        after = int(request.query.get("index", "0"))
        wait_s = _duration(request.query.get("wait", "300s"))
        deadline = time.monotonic() + wait_s * (1 + 1 / 16)
        found, index = look()
        while after and index <= after and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())), self._changed:
                    await self._changed.wait()
            found, index = look()
        headers = {"X-Nomad-Index": str(index), "X-Nomad-KnownLeader": "true", "X-Nomad-LastContact": "0"}
        return web.json_response(found, headers=headers)

    async def _leader(self, request: web.Request) -> web.Response:
        return web.json_response("127.0.0.1:4647")

    async def _list_jobs(self, request: web.Request) -> web.Response:
        prefix, meta = request.query.get("prefix", ""), request.query.get("meta") == "true"

        def look() -> tuple[JSON, int]:
            names = ("ID", "Name", "Type", "Status", "Stop", "Priority", "Datacenters", "SubmitTime", "ModifyIndex")
            found = [
                {name: job.get(name) for name in names} | ({"Meta": job.get("Meta")} if meta else {})
                for job in self.jobs.values()
                if job["ID"].startswith(prefix)
            ]
            return found, self.index

        return await self._query(request, look)

    def _known(self, request: web.Request) -> JSON:
        job = self.jobs.get(request.match_info["job"])
        if job is None:
            raise _Answer(404, "job not found")
        return job

    async def _job(self, request: web.Request) -> web.Response:
        return await self._query(request, lambda: (job := self._known(request), job["ModifyIndex"]))

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        job = body.get("Job")
        if not job:
            raise _Answer(400, "Job must be specified")
        if (job.get("Namespace", "default"), job.get("Region", self.region)) != (self.namespace, self.region):
            raise _Answer(400, "mismatched request namespace or region")
        _validate(job)
        old = self.jobs.get(job["ID"])
        if body.get("EnforceIndex"):
            _enforce(int(body.get("JobModifyIndex") or 0), old)
        version = 0 if old is None else old["Version"] + 1
        job = {"Stop": False, "Status": "running", "Version": version, "Namespace": "default", "Meta": None, **job}
        job["SubmitTime"] = time.time_ns()
        self.jobs[job["ID"]] = job
        job["JobModifyIndex"] = await self.touch(job)
        job.setdefault("CreateIndex", job["JobModifyIndex"])
        update = job.get("Update") or {"MaxParallel": 1}
        if job["Type"] == "service" and update.get("MaxParallel", 1):
            self._deployed[job["ID"]] = time.monotonic() + update.get("MinHealthyTime", _DEPLOYMENT_S * SECOND) / SECOND
        return self._written(await self._scheduler.evaluate(job["ID"], "job-register"), job["JobModifyIndex"])

    def _written(self, evaluation: JSON, modify_index: int) -> web.Response:
        body = {
            "EvalID": evaluation["ID"], "EvalCreateIndex": evaluation["CreateIndex"], "JobModifyIndex": modify_index,
            "Warnings": "", "Index": self.index, "LastContact": 0, "KnownLeader": False,
        }  # fmt: skip
        return web.json_response(body, headers={"X-Nomad-Index": str(self.index)})

    async def _plan(self, request: web.Request) -> web.Response:
        body = await request.json()
        job = body.get("Job")
        if not job or job.get("ID") != request.match_info["job"]:
            raise _Answer(400, "Job ID does not match")
        _validate(job)
        old = self.jobs.get(job["ID"])
        failed = {}
        for group in job["TaskGroups"]:
            here = 0 if old is None or old["Stop"] else len(self._scheduler.live(job["ID"]))
            metric = (
                self._scheduler.why_not(job, group, max(0, group["Count"] - here - 1))
                if group["Count"] > here
                else None
            )
            if metric is not None:
                failed[group["Name"]] = metric
        body = {
            "JobModifyIndex": 0 if old is None else old["JobModifyIndex"], "CreatedEvals": None, "Diff": None,
            "Annotations": {"DesiredTGUpdates": {}}, "FailedTGAllocs": failed or None, "Warnings": "",
            "NextPeriodicLaunch": None, "Index": self.index,
        }  # fmt: skip
        return web.json_response(body)

    async def _scale(self, request: web.Request) -> web.Response:
        job, body = self.jobs.get(request.match_info["job"]), await request.json()
        if job is None:
            raise _Answer(404, f'job "{request.match_info["job"]}" not found')
        name = (body.get("Target") or {}).get("Group")
        group = next((each for each in job["TaskGroups"] if each["Name"] == name), None)
        if group is None:
            raise _Answer(400, f'task group "{name}" specified for scaling does not exist in job')
        if body.get("Count") is None:
            raise _Answer(400, "scaling action should have at least one of count or error")
        if time.monotonic() < self._deployed.get(job["ID"], 0.0):
            raise _Answer(400, "job scaling blocked due to active deployment")
        event = {"Count": body["Count"], "PreviousCount": group["Count"], "Message": body.get("Message", "")}
        self._scalings.setdefault(job["ID"], []).insert(0, {**event, "Time": time.time_ns(), "Error": False})
        group["Count"], job["SubmitTime"] = body["Count"], time.time_ns()
        job["JobModifyIndex"] = await self.touch(job)
        return self._written(await self._scheduler.evaluate(job["ID"], "job-scaling"), job["JobModifyIndex"])

    async def _scale_status(self, request: web.Request) -> web.Response:
        job = self._known(request)
        groups = {}
        for group in job["TaskGroups"]:
            running = len([each for each in self.running(job["ID"]) if each["TaskGroup"] == group["Name"]])
            events = self._scalings.get(job["ID"], [])
            groups[group["Name"]] = {
                "Desired": group["Count"], "Placed": len(self._scheduler.live(job["ID"])), "Running": running,
                "Healthy": 0, "Unhealthy": 0, "Events": events,
            }  # fmt: skip
        body = {"JobID": job["ID"], "Namespace": "default", "JobStopped": job["Stop"], "TaskGroups": groups}
        return web.json_response(body | {"JobModifyIndex": job["JobModifyIndex"]})

    async def _deregister(self, request: web.Request) -> web.Response:
        name = request.match_info["job"]
        job = self.jobs.get(name)
        if job is not None:
            job.update(Stop=True, Status="dead")
            await self.touch(job)
            if request.query.get("purge") == "true":
                del self.jobs[name]
        return self._written(await self._scheduler.evaluate(name, "job-deregister"), self.index)

    async def _job_allocations(self, request: web.Request) -> web.Response:
        name = request.match_info["job"]

        def look() -> tuple[JSON, int]:
            found = [each for each in self.allocations.values() if each["JobID"] == name]
            return [_stub(each) for each in found], max([1, *(each["ModifyIndex"] for each in found)])

        return await self._query(request, look)

    async def _job_evaluations(self, request: web.Request) -> web.Response:
        name = request.match_info["job"]

        def look() -> tuple[JSON, int]:
            found = [each for each in self._scheduler.evaluations.values() if each["JobID"] == name]
            return found, max([1, *(each["ModifyIndex"] for each in found)])

        return await self._query(request, look)

    async def _allocation(self, request: web.Request) -> web.Response:
        allocation = self.allocations.get(request.match_info["allocation"])
        if allocation is None:
            raise _Answer(404, "alloc not found")
        full = {name: value for name, value in allocation.items() if name != "memory"}
        return await self._query(request, lambda: (full, allocation["ModifyIndex"]))

    async def _evaluation(self, request: web.Request) -> web.Response:
        found = self._scheduler.evaluations.get(request.match_info["evaluation"])
        if found is None:
            raise _Answer(404, "eval not found")
        return await self._query(request, lambda: (found, found["ModifyIndex"]))

    async def _logs(self, request: web.Request) -> web.Response:
        task = self._scheduler.tasks.get(request.match_info["allocation"])
        if task is None:
            raise _Answer(404, f'Unknown allocation "{request.match_info["allocation"]}"')
        if not task.log.exists():
            raise _Answer(404, "task not started yet. No logs available")
        data = task.log.read_bytes() if request.query.get("type") == "stderr" else b""
        if request.query.get("origin") == "end":
            data = data[-int(request.query.get("offset", "0")) :]
        return web.Response(body=data, content_type="text/plain")


def _stub(allocation: JSON) -> JSON:
    return {name: value for name, value in allocation.items() if name not in ("AllocatedResources", "memory")}


def _validate(job: JSON) -> None:
    """Reject an invalid job, by some of the checks of Nomad's server. Source: nomad/structs, `Validate`."""
    problems = []
    if " " in (job.get("ID") or " "):
        problems.append("Job ID contains a space" if job.get("ID") else "Missing job ID")
    if not job.get("Datacenters"):
        problems.append("Missing job datacenters")
    if not job.get("TaskGroups"):
        problems.append("Missing job task groups")
    for group in job.get("TaskGroups") or ():
        policy = group.get("RestartPolicy")
        if policy and policy["Mode"] not in ("delay", "fail"):
            problems.append(f"Unsupported restart mode: {policy['Mode']!r}")
        if policy and policy["Interval"] < 5 * SECOND:
            problems.append("Interval can not be less than 5s")
        for task in group.get("Tasks") or ():
            if not task.get("Driver"):
                problems.append("Missing task driver")
            if task.get("Driver") == "docker" and not task["Config"].get("image"):
                problems.append("image name required for docker driver")
            resources = task.get("Resources") or {}
            if resources.get("MemoryMB", 300) < 10:
                problems.append(f"minimum MemoryMB value is 10; got {resources['MemoryMB']}")
    if problems:
        lines = "\n".join(f"\t* {problem}" for problem in problems)
        raise _Answer(500, f"{len(problems)} error occurred:\n{lines}\n\n")


def _enforce(index: int, old: JSON) -> None:
    prefix = "Enforcing job modify index"
    if old is None and index:
        raise _Answer(500, f"{prefix} {index}: job does not exist")
    if old is not None and index == 0:
        raise _Answer(500, f"{prefix} 0: job already exists")
    if old is not None and index != old["JobModifyIndex"]:
        raise _Answer(500, f"{prefix} {index}: job exists with conflicting job modify index: {old['JobModifyIndex']}")


def _memory(group: JSON) -> int:
    return sum(int((task.get("Resources") or {}).get("MemoryMB", 300)) for task in group["Tasks"])


def _number(allocation: JSON) -> int:
    return int(allocation["Name"].rsplit("[", 1)[1].rstrip("]"))


def _duration(text: str) -> float:
    """Return the seconds in a Go duration that has a single unit."""
    found = re.fullmatch(r"([0-9.]+)(ms|s|m)", text)
    if found is None:
        raise _Answer(400, "Invalid wait time")
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[found[2]]


def fake_nomad(**settings: JSON) -> AbstractContextManager[FakeNomad]:
    """Run the stand-in in its own thread, for programs without a running event loop."""
    return served_in_thread(lambda: FakeNomad(**settings), "fake-nomad")


def main() -> None:
    """Serve until interrupted, and print the variable for the client."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--image", action="append", default=[], metavar="NAME",
        help="an image that the driver `docker` has; its tasks run as processes on this machine; repeatable",
    )  # fmt: skip
    with fake_nomad(images=tuple(parser.parse_args().image)) as nomad:
        print(f"export NOMAD_ADDR={nomad.url}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
