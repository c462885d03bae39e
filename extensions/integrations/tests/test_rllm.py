"""rLLM's flow and runtime: rewards in its own types, and rollouts without a reward that it can leave out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rllm.types", reason="rLLM is not on the path (make faces RLLM=FOLDER)")

from bug_fixing import fix_calc
from rllm.engine.remote_runtime.protocol import TaskSubmission
from rllm.trainer.algorithms.config import CompactFilteringConfig
from rllm.types import AgentConfig, run_agent_flow
from rllm.workflows.workflow import TerminationReason

from palaestra_integrations.blame import Dropped
from palaestra_integrations.rllm import EnvironmentFlow, EnvironmentRuntime, evaluate
from palaestra_tokens.testing.fake_chat_server import LoopbackServer
from rollout_servers import idle, refusing, solving

pytestmark = pytest.mark.slots
SETTINGS: dict[str, Any] = {"infra_retries": 0}


def flown(tmp_path: Path, server: LoopbackServer) -> Any:
    async def main() -> Any:
        flow = EnvironmentFlow(fix_calc, folder=tmp_path, **SETTINGS)
        try:
            async with server:
                config = AgentConfig(base_url=f"{server.url}/v1", model="m", session_uid="calc:0")
                return await run_agent_flow(flow, {"task_id": "calc"}, config)
        finally:
            await flow.aclose()

    return asyncio.run(main())


def test_rllms_flow_has_the_reward(tmp_path: Path) -> None:
    episode = flown(tmp_path / "a", solving())
    assert episode.termination_reason is TerminationReason.ENV_DONE
    judged = evaluate(None, episode)
    assert (judged.reward, judged.is_correct) == (1.0, True)
    assert evaluate(None, flown(tmp_path / "b", idle())).reward == 0.0
    with pytest.raises(Dropped):
        flown(tmp_path / "c", refusing())


def test_a_remote_runtime_gives_a_result_per_task(tmp_path: Path) -> None:
    async def main() -> list[Any]:
        runtime = EnvironmentRuntime(fix_calc, folder=tmp_path, **SETTINGS)
        runtime.initialize()
        try:
            async with solving() as good, refusing() as bad:
                asked = [
                    TaskSubmission({"task_id": "calc"}, f"s{number}", "calc", f"{server.url}/v1")
                    for number, server in enumerate((good, bad))
                ]
                return await runtime.execute_tasks(asked, timeout=60)
        finally:
            await runtime.aclose()
            runtime.shutdown()

    solved, failed = asyncio.run(main())
    assert (solved.finished, solved.session_id, solved.reward) == (True, "s0", 1.0)
    assert (failed.finished, failed.session_id, failed.reward) == (False, "s1", None)
    assert failed.metadata == {"blame": "engine"}
    filtering = CompactFilteringConfig(enable=True, mask_error=True)
    assert filtering.should_mask(failed.termination_reason)
    assert not filtering.should_mask(solved.termination_reason)
