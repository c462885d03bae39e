"""A rollout as a function of a task and a model's address: rewards, and whose fault it is where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bug_fixing import FIX, fix_calc

from palaestra.envs.run.rollout_function import RolloutFunction, Scored, Unscored
from palaestra_slots.core.types import JSON, Blame
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

pytestmark = pytest.mark.slots

CALL = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": f'{{"command": "{FIX}"}}'}}


def solving() -> LoopbackServer:
    return LoopbackServer(FakeAnswer(completion(None, "tool_calls", tool_calls=[CALL])), FakeAnswer(completion("Done")))


def played(tmp_path: Path, *servers: LoopbackServer, **settings: JSON) -> list[Scored | Unscored]:
    """One rollout with each server, concurrently."""

    async def main() -> list[Scored | Unscored]:
        async with RolloutFunction(fix_calc, folder=tmp_path, infra_retries=0, **settings) as rollout:

            async def one(number: int, server: LoopbackServer) -> Scored | Unscored:
                async with server:
                    result = await rollout("calc", f"{server.url}/v1", f"key-{number}", model=f"m{number}")
                    assert all(seen.headers["Authorization"] == f"Bearer key-{number}" for seen in server.seen)
                    assert all(seen.body["model"] == f"m{number}" for seen in server.seen)
                    return result

            return await asyncio.gather(*(one(number, server) for number, server in enumerate(servers)))

    return asyncio.run(main())


def test_each_rollout_asks_its_own_model(tmp_path: Path) -> None:
    solved, idle = played(tmp_path, solving(), LoopbackServer(FakeAnswer(completion("I did nothing."))))
    assert isinstance(solved, Scored)
    assert isinstance(idle, Scored)
    assert (solved.reward, idle.reward) == (1.0, 0.0)


def test_a_refusing_server_is_the_engines_fault(tmp_path: Path) -> None:
    refused = FakeAnswer({"error": {"message": "wrong key"}}, status=401)
    (result,) = played(tmp_path, LoopbackServer(refused))
    assert isinstance(result, Unscored)
    assert (result.blame, result.kind) == (Blame.ENGINE, "api_error/engine")
