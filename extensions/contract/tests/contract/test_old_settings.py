"""Settings of existing scripts that have no effect are accepted from every source, each with one warning."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import palaestra
from golden_messages import check_message
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_contract.agent_env import AgentEnvConfig
from palaestra_contract.helpers.teacher_distillation import TeacherDistillationConfig
from palaestra_contract.without_effect import SETTINGS
from palaestra_slots.core import config as core
from palaestra_slots.core.config import ConfigLayer, merge, old_settings
from palaestra_slots.core.errors import ConfigError
from palaestra_suites.endless_terminals.endless_terminals import EndlessTerminalsEnvConfig
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBench2EvalConfig
from palaestra_tokens.config import APIServerConfig

CLASSES = (
    HermesAgentEnvConfig, AgentEnvConfig, APIServerConfig, EndlessTerminalsEnvConfig, TeacherDistillationConfig,
    TerminalBench2EvalConfig,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _each_warns() -> Iterator[None]:
    core._WARNED.clear()
    yield
    core._WARNED.clear()


@pytest.mark.parametrize("kind", CLASSES)
def test_a_script_may_set_and_read_each(kind: type[BaseModel], caplog: pytest.LogCaptureFixture) -> None:
    names = [name for name in SETTINGS if name not in kind.model_fields]
    assert {name: old_settings()[name][1] for name in names} == {name: SETTINGS[name][1] for name in names}
    values = [name for name in names if not callable(SETTINGS[name][0])]
    assert {name: getattr(kind(), name) for name in values} == {name: SETTINGS[name][0] for name in values}
    with caplog.at_level(logging.WARNING):
        made = kind(**dict.fromkeys(values, "mine"))
    (warning,) = caplog.messages
    assert all(f"{name} ({SETTINGS[name][1]})" in warning for name in values)
    for each in (made, made.model_copy(), pickle.loads(pickle.dumps(made))):
        assert {getattr(each, name) for name in values} == {"mine"}
    assert not made.model_dump().keys() & set(values)
    with pytest.raises(AttributeError):
        getattr(made, "of_nobody")  # noqa: B009


def test_an_agent_env_names_the_settings_in_place_of_two(caplog: pytest.LogCaptureFixture) -> None:
    AgentEnvConfig(agent_max_steps=7)
    assert not caplog.messages
    AgentEnvConfig(max_agent_turns=7)
    (warning,) = caplog.messages
    assert "set agent_max_steps" in warning


@pytest.mark.parametrize("source", ["flag", "short flag", "file", "variable", "argument"])
def test_every_source_may_name_one(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = CommandLine("run", HermesAgentEnvConfig, APIServerConfig, command="process")
    (tmp_path / "a.yaml").write_text("env: {terminal_lifetime: 5}\n")
    words = {
        "flag": ["--env.terminal_lifetime", "5"], "short flag": ["--env.terminal-lifetime=5"],
        "file": ["--config", str(tmp_path / "a.yaml")],
    }.get(source, [])  # fmt: skip
    variables = {"PALAESTRA_ENV_TERMINAL_LIFETIME": "5"} if source == "variable" else {}
    if source == "argument":
        parsed = line.take("process", {"terminal_lifetime": 5})
    else:
        found = line.parse(words, variables)
        assert isinstance(found, Parsed)
        parsed = found
    assert str(parsed.env_config.terminal_lifetime) == "5"  # type: ignore[attr-defined]
    assert parsed.sources.keys() >= {"env.group_size"}
    (warning,) = caplog.messages
    check_message(warning, "terminal_lifetime", "rollout")


def test_other_unknown_names_stay_errors() -> None:
    with pytest.raises(ConfigError, match="unknown setting terminal_lifetim"):
        merge(HermesAgentEnvConfig, [ConfigLayer("a.yaml", {"terminal_lifetim": 5})])
    line = CommandLine("run", HermesAgentEnvConfig, APIServerConfig, command="process")
    with pytest.raises(ConfigError, match=r"unknown flag --env\.branches"):
        line.parse(["--env.branches", "3"])
    assert palaestra.HermesAgentEnvConfig is HermesAgentEnvConfig


def test_settings_of_a_recorded_run_that_are_gone_are_named(caplog: pytest.LogCaptureFixture) -> None:
    line = CommandLine("run", HermesAgentEnvConfig, APIServerConfig, command="process")
    sources = {"env.branches": "command line", "env.terminal_lifetime": "a.yaml", "env.seed": "command line"}
    recorded = {"sources": sources, "env": {"branches": 3, "terminal_lifetime": 5, "seed": 4}}
    found = line.parse([], {}, recorded=recorded)
    assert isinstance(found, Parsed)
    assert found.env_config.seed == 4
    (warning,) = caplog.messages
    assert warning.endswith("branches, terminal_lifetime")
