"""A backend that a script names in `config_init` can be replaced, and does not stand in the way of help and checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.cli.main import main

pytestmark = pytest.mark.slots

SCRIPT = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class RemoteEnv(HermesAgentBaseEnv):
    name = "remote"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(FIELD="daytona", enabled_toolsets=["terminal"], group_size=1, total_steps=1)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        pass

    async def get_next_item(self):
        return {"id": "one", "solution": "echo done > done.txt"}

    def format_prompt(self, item):
        return "Write done.txt"

    async def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("cat done.txt")["exit_code"] == 0)

    async def evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.fixture(params=["tool_pool_mode", "terminal_backend"])
def field(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = str(request.param)
    Path("remote_env.py").write_text(SCRIPT.replace("FIELD", name))
    return name


def test_a_flag_a_file_and_a_variable_replace_it(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["run", "remote_env.py", "--policy", "oracle"]
    assert main(run) == 2
    assert main([*run, f"--env.{field}", "local"]) == 0
    Path("run.yaml").write_text(f"env: {{{field}: local}}\n")
    assert main([*run, "--config", "run.yaml"]) == 0
    monkeypatch.setenv(f"PALAESTRA_ENV_{field.upper()}", "local")
    assert main(run) == 0


def test_the_refusal_names_the_setting_and_who_set_it(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "remote_env.py", "--policy", "oracle"]) == 2
    said = capsys.readouterr().err
    assert f"{field} 'daytona' (from config_init)" in said
    assert ("--backend local" if field == "tool_pool_mode" else f"--env.{field} local") in said
    assert not Path("runs").exists()


@pytest.mark.usefixtures("field")
@pytest.mark.parametrize(
    "line",
    [
        ["run", "remote_env.py", "--help"],
        ["run", "remote_env.py", "--show-config"],
        ["env", "show", "remote_env.py"],
        ["env", "check", "--only", "conftest-skip", "remote_env.py"],
    ],
)
def test_help_and_checks_work_whatever_it_names(line: list[str]) -> None:
    assert main(line) == 0
