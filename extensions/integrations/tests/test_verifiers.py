"""verifiers' own agent plays our taskset with our harness: rewards and errors are on its traces."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("verifiers.v1", reason="the package verifiers is not installed (make faces)")

import bug_fixing
import verifiers.v1 as vf
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from palaestra_integrations import verifiers as integration
from palaestra_tokens.testing.fake_chat_server import LoopbackServer
from rollout_servers import idle, refusing, solving

pytestmark = pytest.mark.slots
ENV = f"{bug_fixing.__file__}:fix_calc"


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    with plugged():
        yield


@contextmanager
def plugged() -> Iterator[None]:
    """What a user's own package exports."""
    module = ModuleType("our_environment")
    module.__all__ = ["EnvironmentHarness", "EnvironmentTaskset"]
    for name in module.__all__:
        setattr(module, name, getattr(integration, name))
    module.__spec__ = sys.modules["bug_fixing"].__spec__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "our_environment", module)
        yield


def traced(tmp_path: Path, server: LoopbackServer, reference: str = ENV) -> vf.Trace:
    async def main() -> vf.Trace:
        settings = {"folder": str(tmp_path), "infra_retries": 0}
        config: EnvConfig = resolve_env_config(
            {
                "taskset": {"id": "our_environment", "env": reference, "settings": {"folder": str(tmp_path / "tasks")}},
                "agent": {
                    "harness": {"id": "our_environment", "settings": settings},
                    "runtime": {"type": "subprocess"},
                    "retries": {"max_retries": 0},
                },
            }
        )
        env = load_environment(config)
        (task,) = env.taskset
        assert (task.data.id, task.key) == ("calc", f"{reference}:calc")
        async with server, env.serving():
            client = vf.EvalClientConfig(base_url=f"{server.url}/v1", api_key_var="NO_KEY")
            episode = await env.run_episode(
                task, vf.ModelContext(model="m", client=client, sampling=vf.SamplingConfig())
            )
        for harness in env._harnesses.values():
            await harness.aclose()
        (trace,) = episode.traces
        return trace

    return asyncio.run(main())


ODD = """
from palaestra import Label, Score, Task, environment

@environment(label_names=["odd"])
def odd():
    yield Task(id="calc", prompt="x")

@odd.score
def labelled(task):
    return Score(0.5, official=1.0, labels=[Label("odd", "it looks odd")])
"""


def test_a_trace_has_the_official_verdict_and_the_labels(tmp_path: Path) -> None:
    (tmp_path / "odd_env.py").write_text(ODD)
    trace = traced(tmp_path, solving(), f"{tmp_path}/odd_env.py:odd")
    assert (trace.reward, trace.info["palaestra"]["official"]) == (0.5, 1.0)
    assert trace.info["palaestra"]["labels"] == [{"name": "odd", "evidence": "it looks odd", "certain": False}]


def test_verifiers_agent_solves_a_task(tmp_path: Path) -> None:
    trace = traced(tmp_path, solving())
    assert (trace.ok, trace.reward, trace.errors, trace.num_turns) == (True, 1.0, [], 2)
    assert trace.info["palaestra"]["outcome"] == "natural"


def test_a_rollout_that_does_nothing_has_the_reward_zero(tmp_path: Path) -> None:
    trace = traced(tmp_path, idle())
    assert (trace.ok, trace.reward, list(trace.rewards)) == (True, 0.0, ["environment"])


def test_an_unscored_rollout_is_an_error_on_the_trace(tmp_path: Path) -> None:
    trace = traced(tmp_path, refusing())
    assert not trace.ok
    assert trace.rewards == {}
    assert trace.errors[-1].type in ("ProviderError", "HarnessError")
