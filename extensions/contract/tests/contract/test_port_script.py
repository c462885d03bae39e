"""Contract scripts come here with their imports rewritten, and nothing else changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envs.scripts import CLASS_ENV, groups_file
from golden_messages import check_message, raises
from palaestra.cli.main import main
from palaestra_contract.port_script import port
from palaestra_slots.core.errors import ConfigError

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
import palaestra
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
        (12, "from environments.agent_loop import resize_tool_pool"),
        (13, "from .neighbour import helper"),
    ]
    assert "delete the call" in ported.left[0].advice
    assert port(ported.text, "x.py").text == ported.text


MODULES = """import os, model_tools
import environments.hermes_base_env as base
import tools.registry
from environments import agent_loop
from .neighbour import helper
from atroposlib.envs.base import *
from atropos.envs import EvalHandlingEnum

loop = agent_loop.HermesAgentLoop
reply = model_tools.handle_function_call("terminal", {})
missing = model_tools.no_such_name
tools.registry.ToolSchema
config = APIServerConfig()
"""


def test_modules_stars_and_neighbours_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("helper = 1")
    ported = port(MODULES, str(tmp_path / "x.py"))
    assert (
        ported.text
        == """import os
import palaestra as model_tools
import palaestra as base
import palaestra
import palaestra as agent_loop
from neighbour import helper
from palaestra import APIServerConfig
from palaestra.envs.config.fields import EvalHandlingEnum

loop = agent_loop.HermesAgentLoop
reply = model_tools.handle_function_call("terminal", {})
missing = model_tools.no_such_name
palaestra.ToolSchema
config = APIServerConfig()
"""
    )
    assert [(left.line, left.what) for left in ported.left] == [(11, "model_tools.no_such_name")]
    assert port(ported.text, str(tmp_path / "x.py")).text == ported.text


CANNOT_START = """from atroposlib.envs.base import *
from ..patches import apply_patches
from tools.registry import registry
import no_such_package.part; from typing import Generic
from typing import AnyStr as Kind
try:
    import optional_package
except ImportError:
    optional_package = None

class Theirs(BaseEnv, Generic[Kind]):
    async def setup(self):
        self.items = unknown_everywhere

    async def handle_env(self, item):
        return await super().handle_env(item)

    async def get_next_item(self, index):
        return self.items

    async def evaluate(self):
        self.items, self.config, self.of_nobody
        await self.evaluate_log({}, colour="red")
        ToolContext("t1", 1, 2, 3, 4)
"""


def test_what_cannot_start_or_is_not_called_is_listed() -> None:
    found = {(left.line, left.what): left.advice for left in port(CANNOT_START, "x.py").left}
    assert list(found) == [
        (1, "unknown_everywhere from atroposlib.envs.base import *"),
        (2, "from ..patches import apply_patches"),
        (3, "from tools.registry import registry"),
        (4, "import no_such_package"),
        (15, "Theirs.handle_env"),
        (16, "super().handle_env"),
        (18, "Theirs.get_next_item"),
        (22, "self.of_nobody"),
        (23, "self.evaluate_log(…)"),
        (24, "ToolContext(…)"),
    ]
    assert "@tool" in found[3, "from tools.registry import registry"]
    assert "colour" in found[23, "self.evaluate_log(…)"]


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[4].glob("environments/*.py")), ids=lambda path: path.name
)
def test_nothing_is_listed_for_our_own_environments(path: Path) -> None:
    source = path.read_text()
    ported = port(source, str(path))
    assert (ported.text, ported.left) == (source, [])


def test_what_is_not_python_is_refused_with_the_files_name() -> None:
    with raises(ConfigError, "x.py"):
        port("def", "x.py")


OLD_PATHS = """import sys
import palaestra.compat
from environments import agent_loop
from environments.hermes_base_env import HermesAgentBaseEnv
from atroposlib.envs.base import *
import palaestra

assert agent_loop.HermesAgentLoop is palaestra.HermesAgentLoop
assert HermesAgentBaseEnv is palaestra.HermesAgentBaseEnv
assert BaseEnv is palaestra.BaseEnv
try:
    from tools.registry import registry
except ImportError as error:
    print(error)
"""


NAMES = """
import palaestra.compat
from atroposlib.envs.reward_fns import registry
from atroposlib.envs.reward_fns.registry import registry as same
from atroposlib.envs.base import APIServer, OpenaiConfig
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.type_definitions import AgentStep, GameHistory, Message, number
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from environments.agent_loop import resize_tool_pool
from environments.patches import apply_patches
from environments.tool_call_parsers import ToolCallParser
from gateway.config import SessionResetPolicy
from tools.process_registry import FINISHED_TTL_SECONDS, MAX_OUTPUT_CHARS, MAX_PROCESSES
from toolsets import TOOLSETS, get_toolset, resolve_toolset, validate_toolset
import palaestra

assert registry is same
assert registry.create("format")(["<think>a</think>"]) == [1.0]
assert AgentStep is not palaestra.AgentStep
assert isinstance(1.5, number)
assert apply_patches() is None is resize_tool_pool(8)
assert (MAX_OUTPUT_CHARS, FINISHED_TTL_SECONDS, MAX_PROCESSES) == (200_000, 1800, 64)
assert resolve_toolset("default") == resolve_toolset("terminal") + resolve_toolset("file")
assert get_toolset("search")["tools"] == ["web_search"]
assert [get_toolset("no"), resolve_toolset("no"), validate_toolset("no")] == [None, [], False]
assert set(resolve_toolset("all")) >= set(TOOLSETS["browser"]["tools"])
try:
    from batch_runner import BatchRunner
except ImportError as error:
    print(error)
"""


def test_the_names_of_atropos_and_hermes_that_scripts_import(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", NAMES], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "palaestra batch FILE" in ended.stdout


def test_the_old_paths_are_there_for_who_asks_by_name(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", OLD_PATHS], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "registry" in ended.stdout
    assert "@tool" in ended.stdout
    without = OLD_PATHS.replace("import palaestra.compat", "import palaestra")
    ended = subprocess.run([sys.executable, "-c", without], cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'environments'" in ended.stderr


@pytest.mark.slots
def test_a_ported_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = CLASS_ENV.replace(
        "from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig",
        "from atroposlib.envs.base import APIServerConfig\n"
        "from environments.hermes_base_env import HermesAgentBaseEnv, HermesAgentEnvConfig",
    )
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text(theirs)
    assert main(["env", "port", "words_env.py", "--write", "--run"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["words_env.py"]
    argv = ["run", "words_env.py", "process", "--policy", "oracle", "--tasks", "1"]
    flags = ["--env.ensure_scores_are_not_same", "false"]
    assert main([*argv, *flags]) == 0
    assert json.loads(groups_file().read_text())["scores"] == [1.0, 1.0]


def test_the_command_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    assert main(["env", "port", str(path), "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["left"][0]["line"] == 10
    check_message(told.err, path, "10", "environments.patches", "import")
    assert path.read_text() == THEIRS
    assert main(["env", "port", str(tmp_path / "no.py")]) == 2
    path.write_text("x = 1")
    assert main(["env", "port", str(path)]) == 0
    check_message(capsys.readouterr().err, "rewritten")


def test_a_trial_that_fails_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs_env.py"
    path.write_text("raise RuntimeError('not today')")
    assert main(["env", "port", str(path), "--run"]) == 1
    told = capfd.readouterr().err
    assert "not today" in told
    assert "failed with exit code 2" in told
    assert [each.name for each in tmp_path.iterdir()] == ["theirs_env.py"]


NESTED = """
import logging
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.reward_fns import registry
import regex_problems
import no_such_module_anywhere

class Env(BaseEnv):
    class Handler(logging.Handler):
        def emit(self, record):
            self.acquire()
            self.flush_all(1, 2)

    async def get_next_item(self):
        return self.no_such_method()
"""


def test_nested_classes_neighbours_and_reward_registries_raise_no_false_alarm(tmp_path: Path) -> None:
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems/regex_problems.py").write_text("")
    left = {each.what: each.advice for each in port(NESTED, str(tmp_path / "x.py")).left}
    assert "self.no_such_method" in left
    assert "self.acquire" not in left
    assert "self.flush_all" not in left
    assert "import regex_problems" not in left
    assert "import no_such_module_anywhere" in left
    assert not any("@tool" in text for what, text in left.items() if what.endswith("import registry"))
