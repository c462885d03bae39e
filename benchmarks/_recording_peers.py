"""The recording proxies of other packages, in front of one model server. Each proxy runs in a separate interpreter that
has its package. This module imports nothing from Palaestra.

    python _recording_peers.py NAME UPSTREAM ROLLOUTS

prints the process id, then an address with a key for each rollout, as JSON, and serves until standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys

Addresses = list[tuple[str, str]]


async def openenv(upstream: str, rollouts: int) -> Addresses:
    """Start the capture proxy of OpenEnv 0.10, at its level `tokens`."""
    from openenv.core.harness.capture.runner import CaptureServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = CaptureServer(llm_url=upstream, model="m", port=port)
    await asyncio.to_thread(server.start)
    sessions = [server.registry.create() for _ in range(rollouts)]
    return [(f"http://127.0.0.1:{port}/v1", each.session_id) for each in sessions]


async def verifiers(upstream: str, rollouts: int) -> Addresses:
    """Start the interception server of verifiers 0.4 with the client for evaluations, which records messages but no
    tokens."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.interception import InterceptionServer
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import SamplingConfig

    server = await InterceptionServer().__aenter__()
    client = EvalClientConfig(base_url=f"{upstream}/v1", api_key_var="NO_KEY")

    def session() -> RolloutSession:
        trace = Trace(task=TraceTask(type="Task", data=TaskData(prompt="")), agent=AgentInfo.model_construct())
        return RolloutSession(ctx=ModelContext(model="m", client=client, sampling=SamplingConfig()), trace=trace)

    return [(f"{server.base_url}/v1", server.register(session())[0]) for _ in range(rollouts)]


async def agent_lightning(upstream: str, rollouts: int) -> Addresses:
    """Start the proxy of Agent-Lightning 1.0.2, which records the token ids and log-probabilities that the server
    sends."""
    import httpx
    import uvicorn
    from agentlightning.server.app import create_app

    proxy = {"model_name": "m", "train": {"temperature": 1}, "val": {"temperature": 1}}
    server = uvicorn.Server(uvicorn.Config(create_app({"key": "k", "default_proxy": proxy}), port=0, log_level="error"))
    asyncio.get_running_loop().create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer k"}) as client:
        await client.post("/api/models", json=[{"model": "m", "endpoint": f"{upstream}/v1"}])
        names = [f"r{number}" for number in range(rollouts)]
        made = await client.post("/api/rollouts", json=[{"input": "t", "rollout_id": name} for name in names])
        made.raise_for_status()
    return [(f"{url}/proxy/rollout/{name}/attempt/0/mode/train/openai/v1", "k") for name in names]


async def main(name: str, upstream: str, rollouts: str) -> None:
    logging.disable(logging.WARNING)
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: ASYNC230, SIM115 - some log to standard output
    addresses = await globals()[name](upstream, int(rollouts))
    print(json.dumps([os.getpid(), *addresses]), file=out, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
