"""Variables of a `.env` file and of the process: what is read, which wins, and where a setting says it comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.core.errors import ConfigError
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.config.layers import read_dotenv, read_environ
from palaestra.inference.config import APIServerConfig


def parsed(*argv: str, environ: dict[str, str], dotenv: dict[str, str]) -> Parsed:
    line = CommandLine(prog="x", env_type=HermesAgentEnvConfig, server_type=APIServerConfig)
    found = line.parse(["process", *argv], environ, dotenv)
    assert isinstance(found, Parsed)
    return found


def test_lines_as_shells_write_them(tmp_path: Path) -> None:
    text = '# a comment\n\nA=one two # and a remark\nexport B=\'$A # kept\'\n C = "x\\n\\"y\\""\nD=\nE=a#b\n'
    (tmp_path / ".env").write_text(text)
    assert read_dotenv(tmp_path) == {"A": "one two", "B": "$A # kept", "C": 'x\n"y"', "D": "", "E": "a#b"}
    assert read_dotenv(tmp_path / "none") == {}


@pytest.mark.parametrize("line", ["no value", "1A=x", "A='open", 'A="a" b', "=x"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / ".env").write_text(f"A=1\n{line}\n")
    with pytest.raises(ConfigError, match=r"\.env, line 2 is not NAME=value"):
        read_dotenv(tmp_path)


def test_which_one_wins_and_where_it_comes_from() -> None:
    dotenv = {"ATROPOS_SERVER_BASE_URL": "http://file/v1", "TERMINAL_TIMEOUT": "7", "ATROPOS_SERVER_MODEL": "file"}
    environ = {"ATROPOS_SERVER_MODEL": "shell", "TERMINAL_LIFETIME_SECONDS": "9"}
    found = parsed("--env.terminal_timeout", "8", environ=environ, dotenv=dotenv)
    (server,) = found.server_configs
    assert (server.base_url, server.model_name) == ("http://file/v1", "shell")
    assert (found.env_config.terminal_timeout, found.env_config.terminal_lifetime) == (8, 9)
    where = {name: found.sources[name] for name in ("openai.base_url", "openai.model_name", "env.terminal_timeout")}
    assert where["openai.base_url"].startswith(".env")
    assert where["openai.model_name"].startswith("environment")
    assert where["env.terminal_timeout"].startswith("command line")


def test_the_contracts_variables_of_slots() -> None:
    variables = {"TERMINAL_ENV": "local", "TERMINAL_NOMAD_SLOTS": "4", "TERMINAL_MODAL_GPU": "T4"}
    assert read_environ(variables, "env", HermesAgentEnvConfig).values == {
        "terminal_backend": "local",
        "slots_per_container": "4",
        "modal_gpu": "T4",
    }
    pool = {"TERMINAL_ENV": "slot_pool", "TERMINAL_SLOT_BACKEND": "local"}
    assert read_environ(pool, "env", HermesAgentEnvConfig).values == {"tool_pool_mode": "local"}
    assert read_environ(variables, "env", BaseEnvConfig).values == {}


@pytest.mark.parametrize(
    ("dotenv", "message"),
    [
        ({"TERMINAL_TIMEOUT": "soon"}, r"TERMINAL_TIMEOUT 'soon': .*\(from \.env\)"),
        (
            {"PALAESTRA_ENV_GRUOP_SIZE": "2"},
            r"\.env: PALAESTRA_ENV_GRUOP_SIZE sets nothing\. Did you mean PALAESTRA_ENV",
        ),
    ],
)
def test_a_variable_that_cannot_be_used_says_where_it_stands(dotenv: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(environ={}, dotenv=dotenv)


def test_the_command_line_reads_the_file_and_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("ATROPOS_SERVER_MODEL=from-the-file\n")
    script = Path(__file__).parents[3] / "environments/count_lines_env.py"
    assert main(["run", str(script), "--show-config"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "model_name" in line]
    assert "from-the-file" in line
    assert ".env" in line


KEYED = """
import os
from palaestra import APIServerConfig, BaseEnv, BaseEnvConfig

AT_THE_TOP = os.getenv("STORED_KEY")

class KeyedEnv(BaseEnv):
    name = "keyed"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(wandb_name=f"{AT_THE_TOP} {os.getenv('STORED_KEY')} {os.getenv('SHELL_KEY')}"), []

    async def setup(self):
        pass

    async def get_next_item(self):
        return None

    async def collect_trajectory(self, item):
        return None, []

    async def evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.mark.parametrize("line", [["run", "keyed_env.py", "--show-config"], ["env", "show", "keyed_env.py"]])
def test_a_script_reads_the_files_variables_and_the_shells_stay(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHELL_KEY", "shell")
    Path(".env").write_text("STORED_KEY=stored\nSHELL_KEY=file\n")
    Path("keyed_env.py").write_text(KEYED)
    assert main(line) == 0
    assert "stored stored shell" in capsys.readouterr().out
    assert "STORED_KEY" not in os.environ


def test_the_variables_of_openais_client_fill_in_what_nobody_sets() -> None:
    variables = {"OPENAI_API_KEY": "sk-shell", "OPENAI_BASE_URL": "http://openai/v1"}
    (server,) = parsed(environ=variables, dotenv={"OPENAI_API_KEY": "sk-file"}).server_configs
    assert (server.api_key, server.base_url) == ("sk-shell", "http://openai/v1")
    (server,) = parsed("--base-url", "http://flag/v1", environ=variables, dotenv={}).server_configs
    assert (server.api_key, server.base_url) == ("sk-shell", "http://flag/v1")
    contract = {"ATROPOS_SERVER_API_KEY": "sk-contract"}
    (server,) = parsed(environ=variables | contract, dotenv={}).server_configs
    assert server.api_key == "sk-contract"
    own = [{"api_key": "sk-own", "base_url": "http://own/v1"}]
    line = CommandLine(prog="x", env_type=BaseEnvConfig, server_type=APIServerConfig, server_values=own)
    found = line.parse(["process"], variables)
    assert isinstance(found, Parsed)
    assert (found.server_configs[0].api_key, found.server_configs[0].base_url) == ("sk-own", "http://own/v1")
