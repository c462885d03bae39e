"""Contract scripts come here with their imports rewritten, and nothing else changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.scripts import CLASS_ENV
from palaestra.cli.main import main
from palaestra.core.errors import ConfigError
from palaestra.envs.port_script import port

THEIRS = '''"""Words. Ünïcode before an import on one line: é"""
import os, sys  # theirs: import atroposlib
from typing import Any
from atroposlib.envs.base import (
    APIServerConfig,  # where the model is
    BaseEnv,
    BaseEnvConfig as Base,
)
from atroposlib.type_definitions import Item; from environments.tool_context import ToolContext
from environments.patches import apply_patches
import atroposlib.utils
from environments.agent_loop import AgentResult, resize_tool_pool
from .neighbour import helper
from ..slots import SlotPool

def late():
	from environments.tool_call_parsers import get_parser
	return get_parser
'''


def test_known_names_come_from_here_and_the_rest_is_listed() -> None:
    ported = port(THEIRS, "x.py")
    assert (
        ported.text
        == '''"""Words. Ünïcode before an import on one line: é"""
import os, sys  # theirs: import atroposlib
from typing import Any
from palaestra import APIServerConfig, BaseEnv, BaseEnvConfig as Base
from palaestra import Item; from palaestra import ToolContext
from environments.patches import apply_patches
import atroposlib.utils
from palaestra import AgentResult
from environments.agent_loop import resize_tool_pool
from .neighbour import helper
from palaestra import SlotPool

def late():
	from palaestra import get_parser
	return get_parser
'''
    )
    assert [(left.line, left.what) for left in ported.left] == [
        (10, "from environments.patches import apply_patches"),
        (11, "import atroposlib.utils"),
        (12, "from environments.agent_loop import resize_tool_pool"),
    ]
    assert "delete the call" in ported.left[0].advice
    assert port(ported.text, "x.py").text == ported.text


def test_what_is_not_python_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"x\.py is not Python: "):
        port("def", "x.py")


@pytest.mark.slots
def test_a_ported_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = CLASS_ENV.replace(
        "from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig",
        "from atroposlib.envs.base import APIServerConfig\n"
        "from environments.hermes_base_env import HermesAgentBaseEnv, HermesAgentEnvConfig",
    )
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text(theirs)
    assert main(["env", "port", "words_env.py", "--write"]) == 0
    argv = ["run", "words_env.py", "process", "--policy", "oracle", "--tasks", "1"]
    flags = ["--env.ensure_scores_are_not_same", "false"]
    assert main([*argv, *flags]) == 0
    assert json.loads(Path("data/words.jsonl").read_text())["scores"] == [1.0, 1.0]


def test_the_command_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    assert main(["env", "port", str(path), "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["left"][0]["line"] == 10
    assert f"{path}:10: from environments.patches import apply_patches: there is nothing to patch" in told.err
    assert path.read_text() == THEIRS
    assert main(["env", "port", str(tmp_path / "no.py")]) == 2
