"""Variables of a `.env` file and of the process: what is read, which wins, and where a setting says it comes from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra.cli.main import main
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.dotenv import read_keys, read_variables
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.config.layers import read_environ
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.config import APIServerConfig


def parsed(*argv: str, environ: dict[str, str], dotenv: dict[str, str]) -> Parsed:
    line = CommandLine(prog="x", env_type=HermesAgentEnvConfig, server_type=APIServerConfig)
    found = line.parse(["process", *argv], environ, dotenv)
    assert isinstance(found, Parsed)
    return found


def test_lines_as_shells_write_them(tmp_path: Path) -> None:
    text = '# a comment\n\nA=one two # and a remark\nexport B=\'$A # kept\'\n C = "x\\n\\"y\\""\nD=\nE=a#b\n'
    (tmp_path / ".env").write_text(text)
    found = {"A": "one two", "B": "$A # kept", "C": 'x\n"y"', "D": "", "E": "a#b"}
    assert read_variables(tmp_path / ".env") == found
    assert read_variables(tmp_path / "none") == {}


@pytest.mark.parametrize("line", ["no value", "1A=x", "A='open", 'A="a" b', "=x"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / ".env").write_text(f"A=1\n{line}\n")
    with raises(ConfigError, "env", "NAME"):
        read_keys(tmp_path)


def test_which_one_wins_and_where_it_comes_from() -> None:
    dotenv = {"ATROPOS_SERVER_BASE_URL": "http://file/v1", "ATROPOS_SERVER_API_KEY": "sk-file"}
    environ = {"ATROPOS_SERVER_MODEL": "shell", "TERMINAL_SSH_PORT": "9"}
    found = parsed("--env.terminal_timeout", "8", environ=environ, dotenv=dotenv)
    (server,) = found.server_configs
    assert (server.base_url, server.api_key, server.model_name) == ("http://file/v1", "sk-file", "shell")
    assert (found.env_config.terminal_timeout, found.env_config.ssh_port) == (8, 9)
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
    Path(".env").write_text("ATROPOS_SERVER_API_KEY=k\nATROPOS_SERVER_BASE_URL=http://from-the-file/v1\n")
    script = Path(__file__).parents[3] / "environments/count_lines_env.py"
    assert main(["run", str(script), "--show-config"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "base_url" in line and "openai" in line]
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


MCP = """PALAESTRA_ENV_MCP_SERVERS='{"x": {"command": "touch", "args": ["started"]}}'"""


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HF_TOKEN", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "STORED_KEY",
        "TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PALAESTRA_OPENAI_API_KEY", "PALAESTRA_ENV_WEB_API_KEYS",
        "ATROPOS_SERVER_API_KEY", "TAVILY_API_KEY", "NOMAD_TOKEN",
    ],
)  # fmt: skip
def test_keys_are_read(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".env").write_text(f"{name}=x\n")
    assert read_keys(tmp_path) == {name: "x"}
    assert not caplog.records


@pytest.mark.parametrize(
    "line",
    [
        MCP, "PALAESTRA_ENV_ISOLATION=none", "PALAESTRA_ENV_ENV_VARS=A=b",
        "PALAESTRA_ENV_SSH_KEY=/x", "PALAESTRA_ENV_SERVER_TOKEN=x", "TERMINAL_ENV=ssh", "TERMINAL_SSH_HOST=h",
        "TERMINAL_SSH_KEY=/x", "NOMAD_CLIENT_KEY=/x", "NOMAD_ADDR=http://x", "SEARXNG_URL=http://x",
        "FIRECRAWL_API_URL=http://x", "OPENAI_BASE_URL=http://x", "HTTPS_PROXY=http://x", "LD_PRELOAD=./x.so",
        "GIT_SSH_COMMAND=./x", "PYTHONPATH=.", "PATH=.", "HOME=.", "XDG_CONFIG_HOME=.", "PALAESTRA_STATE=.",
        "DOCKER_HOST=tcp://x", "KUBECONFIG=./x", "PIP_INDEX_URL=http://x", "HF_ENDPOINT=http://x", "SSLKEYLOGFILE=x",
        "ATROPOS_SERVER_MODEL=m", "PALAESTRA_TOKEN=x", "HF_TOKEN_PATH=/x", "key=x",
    ],
)  # fmt: skip
def test_nothing_else_is_read_and_it_is_named(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not even with a key beside it that would go with an address."""
    (tmp_path / ".env").write_text(f"{line}\nFIRECRAWL_API_KEY=k\nPIP_INDEX_API_KEY=k\nHF_TOKEN=k\n")
    name = line.partition("=")[0]
    assert sorted(read_keys(tmp_path)) == ["FIRECRAWL_API_KEY", "HF_TOKEN", "PIP_INDEX_API_KEY"]
    assert f"{tmp_path}/.env: ignored {name}." in caplog.text
    check_message(caplog.text, "--config")
    read_keys(tmp_path)
    assert len(caplog.records) == 1, "it is said once"


def test_a_long_file_is_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".env").write_text("".join(f"NAME{number}=x\n" for number in range(30)))
    assert read_keys(tmp_path) == {}
    check_message(caplog.text, "NAME7", "22")


START = ("OPENAI", "ATROPOS_SERVER", "PALAESTRA_OPENAI")


@pytest.mark.parametrize("start", START)
def test_an_address_counts_only_with_its_key(tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in START:
        monkeypatch.delenv(f"{each}_API_KEY", raising=False)
    pair = {f"{start}_BASE_URL": "http://x", f"{start}_API_KEY": "file"}
    other = next(each for each in START if each != start)

    def read(variables: dict[str, str]) -> dict[str, str]:
        (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        return read_keys(tmp_path)

    assert read(pair) == pair
    assert read({f"{start}_BASE_URL": "http://x"}) == {}
    assert read({f"{start}_BASE_URL": "http://x", f"{start}_API_KEY": ""}) == {f"{start}_API_KEY": ""}
    keys = {f"{other}_API_KEY": "file"}
    assert read({f"{start}_BASE_URL": "http://x", **keys}) == keys
    monkeypatch.setenv(f"{start}_API_KEY", "of the user")
    assert read(pair) == {f"{start}_API_KEY": "file"}
    monkeypatch.setenv(f"{start}_API_KEY", "file")  # an outer command has exported it
    assert read(pair) == pair


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("source", ["OPENAI_API_KEY", "PALAESTRA_OPENAI_API_KEY", "flag", "script", "config"])
def test_the_users_key_never_goes_to_an_address_of_the_file(start: str, source: str, tmp_path: Path) -> None:
    dotenv = {f"{start}_BASE_URL": "http://file/v1", f"{start}_API_KEY": "sk-file"}
    environ = {source: "sk-user"} if source.endswith("KEY") else {}
    words = ["--openai.api_key", "sk-user"] if source == "flag" else []
    if source == "config":
        (tmp_path / "c.yaml").write_text("openai: {api_key: sk-user}\n")
        words = ["--config", str(tmp_path / "c.yaml")]
    own = [{"api_key": "sk-user"}] if source == "script" else []
    line = CommandLine(prog="x", env_type=BaseEnvConfig, server_type=APIServerConfig, server_values=own)
    found = line.parse(["process", *words], environ, dotenv)
    assert isinstance(found, Parsed)
    (server,) = found.server_configs
    assert (server.base_url, server.api_key) in {
        (APIServerConfig().base_url, "sk-user"),  # the address of the file is left out,
        ("http://file/v1", "sk-file"),  # or both are the file's
    }


def test_addresses_of_files_that_the_user_names_come_first(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("openai: {base_url: http://mine/v1}\n")
    for start in START:
        dotenv = {f"{start}_BASE_URL": "http://file/v1", f"{start}_API_KEY": "sk-file"}
        found = parsed("--config", str(tmp_path / "c.yaml"), environ={}, dotenv=dotenv)
        assert [server.base_url for server in found.server_configs] == ["http://mine/v1"]


def test_a_resumed_run_reads_the_files_address_again() -> None:
    """Its record names no key, so another key could otherwise be sent to the address."""
    recorded = {"openai": [{"base_url": "http://file/v1"}], "sources": {"openai.base_url": ".env"}}
    line = CommandLine(prog="x", env_type=BaseEnvConfig, server_type=APIServerConfig)
    found = line.parse(["process"], {"OPENAI_API_KEY": "sk-user"}, {}, recorded)
    assert isinstance(found, Parsed)
    assert found.server_configs[0].base_url == APIServerConfig().base_url


@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "folder"])
def test_a_file_that_never_ends_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".env"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "huge":
            path.write_text("#\n" * (1 << 20))
        case "folder":
            path.mkdir()  # as `python -m venv .env` makes it
            assert read_keys(tmp_path) == {}
            return
    with raises(ConfigError, path):
        read_keys(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"#" + "é".encode() * (1 << 20),  # the limit is inside a letter
        "#é".encode("utf-16") * (1 << 19),
        b"\xff" * ((1 << 20) + 1),
        b"#" * (1 << 20) + b"\xff",
        b"#" * ((1 << 20) - 1) + "€".encode(),
    ],
)
def test_a_long_file_is_too_long_in_any_encoding(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".env").write_bytes(data)
    with raises(ConfigError, "MiB"):
        read_keys(tmp_path)


COMMANDS = [
    ["run", "count_lines", "--policy", "noop", "--tasks", "1", "--dry-run"],
    ["run", "count_lines", "--show-config"],
    ["eval", "count_lines", "--policy", "noop", "--dry-run"],
    ["train", "count_lines", "--show-config"],
    ["env", "show", "count_lines"],
    ["tools"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_a_foreign_folder_configures_no_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEARXNG_URL", raising=False)
    Path(".env").write_text(f"{MCP}\nPALAESTRA_ENV_ISOLATION=none\nSEARXNG_URL=http://x\n")
    for name in ("environments/count_lines_env.py", "environments/batch_env.py", "json.py", "palaestra/__init__.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("open('started', 'w').close()\n")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert not Path("started").exists()
    assert ".env" not in shown
    assert "touch" not in shown


@pytest.mark.slow
def test_children_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """Python puts the current folder on the path of `python -m`, unless it is told not to."""
    root = Path(__file__).parents[3]
    folders = (*root.glob("packages/*/src"), *root.glob("extensions/*/src"))
    text = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    assert not re.findall(r'sys\.executable,\s*"-[mc]"', text)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__main__.py").write_text("open('started', 'w').close()\n")
    ask = "import asyncio; from palaestra_slots.images.wheel_install import pip_settings; asyncio.run(pip_settings())"
    subprocess.run([sys.executable, "-P", "-c", ask], cwd=tmp_path, check=True)
    assert not (tmp_path / "started").exists()
