"""Third-party agents: programs that run in a slot and call a model at a configured address.

`program_named` returns a program by name (`codex`, `claude-code`, `opencode`, `pi` or `mini-swe-agent`) or makes one
from a command line. A known program is installed once on this machine, and slots see it read-only. `launch` returns the
command, the settings files and the environment variables of a program. The rollout starts the program, waits for it,
ends it and keeps its output (`rollouts/program_agent.py`).

A command line gets the task on its standard input and in the file that `PALAESTRA_PROMPT_FILE` names. It gets the
model's addresses, key and name in `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and
`PALAESTRA_MODEL`.

If the environment has tools, an MCP server offers them. A known program gets the server's address in its settings. A
command line gets the address in the file that `PALAESTRA_MCP_CONFIG` names. Two known programs do not support MCP: `pi`
gets an extension (`pi_tools.ts`), and `mini-swe-agent` gets a script (`tool_program.py`) that calls the tools.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from palaestra.core.errors import ConfigError
from palaestra.core.io.file_lock import file_lock
from palaestra.core.printable import without_middle
from palaestra.core.types import JSON
from palaestra.sandbox.images.image_store import default_folder
from palaestra.sandbox.slot import Mount

HOME = "/tmp/agent"  # noqa: S108  inside the slot, outside the workspace that is graded
PROMPT_FILE = f"{HOME}/prompt.txt"
MCP_FILE, TOOL_PROGRAM = f"{HOME}/mcp.json", f"{HOME}/tools.py"
INSTALL_S = 900.0
MODEL = "policy"
TOOL_SERVER = "environment"
"""The name of the MCP server with the environment's tools."""
TOOL_S = 3600
"""The time limit of a tool call, in seconds, for agents that have such a setting. The tools' own limits are shorter."""


@dataclass(frozen=True, slots=True)
class AgentAssignment:
    """A program's task and the addresses that it uses. `url` is the model's address for clients of Anthropic's API, and
    `openai_url` for clients of OpenAI's. `tools_url` is the address of the MCP server with the environment's tools; it
    is empty if there are none. Requests to any of them carry `key`."""

    prompt: str
    url: str
    openai_url: str
    key: str
    tools_url: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a program: its command, the files to write first (by path in the slot), and environment
    variables."""

    command: str | Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


class AgentProgram(Protocol):
    """One third-party agent. Implemented by `CommandProgram`, `NpmProgram` and `PipProgram`."""

    @property
    def name(self) -> str: ...

    async def install(self) -> Sequence[Mount]:
        """Install the agent on this machine if necessary, and return the folders to mount into the slots. Raises
        `ConfigError` if the agent cannot be installed."""

    def launch(self, assignment: AgentAssignment) -> Launch: ...


def model_variables(assignment: AgentAssignment) -> dict[str, str]:
    """Return the program's environment variables: its home folder, the model's addresses and key under the names that
    SDKs read, and the `PALAESTRA_*` variables."""
    return {
        "HOME": HOME,
        "OPENAI_BASE_URL": assignment.openai_url,
        "OPENAI_API_BASE": assignment.openai_url,
        "OPENAI_API_KEY": assignment.key,
        "ANTHROPIC_BASE_URL": assignment.url,
        "ANTHROPIC_API_KEY": assignment.key,
        "PALAESTRA_MODEL": MODEL,
        "PALAESTRA_PROMPT_FILE": PROMPT_FILE,
        **({"PALAESTRA_MCP_CONFIG": MCP_FILE} if assignment.tools_url else {}),
    }


def mcp_file(assignment: AgentAssignment) -> dict[str, str]:
    """Return the path and the text of the MCP configuration file, in the format that most programs read. The mapping is
    empty if there are no tools."""
    if not assignment.tools_url:
        return {}
    headers = {"Authorization": f"Bearer {assignment.key}"}
    server: JSON = {"type": "http", "url": assignment.tools_url, "headers": headers}
    return {MCP_FILE: json.dumps({"mcpServers": {TOOL_SERVER: server}})}


@dataclass(frozen=True)
class CommandProgram:
    """A command line, run by the slot's shell in the workspace."""

    command: str

    @property
    def name(self) -> str:
        return Path(shlex.split(self.command)[0]).name

    async def install(self) -> Sequence[Mount]:
        return ()

    def launch(self, assignment: AgentAssignment) -> Launch:
        return Launch(f"{self.command} < {PROMPT_FILE}", mcp_file(assignment), model_variables(assignment))


Settings = Callable[[AgentAssignment], Mapping[str, str]]


@dataclass(frozen=True)
class NpmProgram:
    """An agent from npm. It runs with `arguments`, where `{prompt}` stands for the task. `files` returns its settings
    files, by path. `tool_arguments` are added if the environment has tools."""

    name: str
    package: str
    version: str
    arguments: Sequence[str]
    files: Settings = mcp_file
    env: Mapping[str, str] = field(default_factory=dict)
    tool_arguments: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """The folder on this machine where the agent is installed."""
        return Path(default_folder("agents")) / f"{self.name}-{self.version}"

    @property
    def binary(self) -> Path:
        """The agent's executable."""
        return self.folder / "node_modules" / ".bin" / self.name.removesuffix("-code")

    async def install(self) -> Sequence[Mount]:
        node = shutil.which("node")
        if node is None:
            raise ConfigError(f"agent {self.name} needs Node.js 20 or newer on this machine, but node is not installed")
        target = f"{self.package}@{self.version}"
        npm = "npm", "install", "--no-audit", "--no-fund", "--prefix", str(self.folder), target
        await _installed(self.name, self.folder, self.binary, [npm])
        return _mounts(self.folder, Path(node).resolve().parent)

    def launch(self, assignment: AgentAssignment) -> Launch:
        arguments = [each.replace("{prompt}", assignment.prompt) for each in self.arguments]
        arguments += self.tool_arguments if assignment.tools_url else ()
        node = Path(shutil.which("node") or "node").resolve().parent
        path = f"{node}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
        return Launch(
            [str(self.binary), *arguments],
            files=self.files(assignment),
            env={**model_variables(assignment), "PATH": path, **self.env},
        )


@dataclass(frozen=True)
class PipProgram:
    """An agent from PyPI, in a virtual environment made with this Python. The script `program` runs with `arguments`,
    where `{prompt}` stands for the task. `also` lists requirements that the package does not declare, with versions.
    The agent calls the environment's tools with a command that its prompt describes."""

    name: str
    package: str
    version: str
    program: str
    arguments: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    also: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """The folder on this machine where the agent is installed."""
        return Path(default_folder("agents")) / f"{self.name}-{self.version}"

    @property
    def binary(self) -> Path:
        """The agent's executable."""
        return self.folder / "bin" / self.program

    async def install(self) -> Sequence[Mount]:
        venv = sys.executable, "-m", "venv", str(self.folder)
        python, target = str(self.folder / "bin/python"), f"{self.package}=={self.version}"
        pip = python, "-m", "pip", "install", "--quiet", *self.also, target
        await _installed(self.name, self.folder, self.binary, [venv, pip])
        return _mounts(self.folder, Path(sys.base_prefix).resolve() / "bin")

    def launch(self, assignment: AgentAssignment) -> Launch:
        prompt, files = assignment.prompt, mcp_file(assignment)
        if assignment.tools_url:
            prompt += _TOOLS_BY_COMMAND
            files[TOOL_PROGRAM] = importlib.resources.files("palaestra.agent").joinpath("tool_program.py").read_text()
        arguments = [each.replace("{prompt}", prompt) for each in self.arguments]
        return Launch([str(self.binary), *arguments], files, {**model_variables(assignment), **self.env})


_TOOLS_BY_COMMAND = f"""

Besides the shell, there are tools that you call by a command. List them:
python3 {TOOL_PROGRAM}
Call one, with its arguments as JSON:
python3 {TOOL_PROGRAM} NAME '{{"argument": "value"}}'"""


async def _installed(name: str, folder: Path, binary: Path, commands: Sequence[Sequence[str]]) -> None:
    """Run the commands that install an agent in its folder, unless it is already installed. Raises `ConfigError`."""
    if binary.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    async with file_lock(folder / "install.lock"):
        if binary.exists():
            return
        output = b""
        for command in commands:
            output = await _run(name, command)
        if not binary.exists():
            raise ConfigError(f"agent {name} cannot be installed: {_shown(output)}")


async def _run(name: str, command: Sequence[str]) -> bytes:
    """Run one installation command and return its output. Raises `ConfigError`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except FileNotFoundError:
        raise ConfigError(f"agent {name} cannot be installed: install {command[0]} on this machine first") from None
    try:
        async with asyncio.timeout(INSTALL_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise ConfigError(
            f"agent {name} was not installed within {INSTALL_S:g} s; check that the package registry is reachable"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ConfigError(f"agent {name} cannot be installed: {shlex.join(command)} failed: {_shown(output)}")
    return output


def _shown(output: bytes) -> str:
    return without_middle(output.decode(errors="replace").strip(), 1500)


def _mounts(folder: Path, interpreter: Path) -> list[Mount]:
    """Return the folders to mount into the slots: the agent's folder, and the `bin` and `lib` folders of its
    interpreter unless they belong to the system."""
    mounts = [Mount(str(folder), str(folder))]
    if interpreter.parent not in (Path("/"), Path("/usr"), Path("/usr/local")):
        needed = (interpreter, interpreter.with_name("lib"))  # not the parent folder, which may be a user's home
        mounts += [Mount(str(each), str(each)) for each in needed if each.is_dir()]
    return mounts


def _codex(assignment: AgentAssignment) -> Mapping[str, str]:
    return {
        f"{HOME}/.codex/config.toml": f"""\
model = "{MODEL}"
model_provider = "palaestra"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.palaestra]
name = "palaestra"
base_url = "{assignment.openai_url}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
[analytics]
enabled = false
"""
        + (_CODEX_TOOLS.format(url=assignment.tools_url) if assignment.tools_url else "")
    }


_CODEX_TOOLS = f"""\
[mcp_servers.{TOOL_SERVER}]
url = "{{url}}"
bearer_token_env_var = "OPENAI_API_KEY"
tool_timeout_sec = {TOOL_S}
"""


def _opencode(assignment: AgentAssignment) -> Mapping[str, str]:
    options = {"baseURL": assignment.openai_url, "apiKey": assignment.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "palaestra", "options": options, "models": {MODEL: {}}}
    settings: JSON = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"palaestra": provider},
        "model": f"palaestra/{MODEL}",
        "small_model": f"palaestra/{MODEL}",
        "permission": {"bash": "allow", "edit": "allow", "webfetch": "deny"},
        "autoupdate": False,
        "share": "disabled",
    }
    if assignment.tools_url:
        headers = {"Authorization": f"Bearer {assignment.key}"}
        remote = {"type": "remote", "url": assignment.tools_url, "headers": headers, "enabled": True, "oauth": False}
        settings["mcp"] = {TOOL_SERVER: {**remote, "timeout": TOOL_S * 1000}}
    return {f"{HOME}/.config/opencode/opencode.json": json.dumps(settings)}


def _pi(assignment: AgentAssignment) -> Mapping[str, str]:
    provider = {
        "baseUrl": assignment.openai_url,
        "apiKey": assignment.key,
        "api": "openai-completions",
        "models": [{"id": MODEL, "contextWindow": 128000, "maxTokens": 16000}],
    }
    files = {f"{HOME}/.pi/agent/models.json": json.dumps({"providers": {"palaestra": provider}})}
    if assignment.tools_url:
        extension = importlib.resources.files("palaestra.agent").joinpath("pi_tools.ts").read_text()
        files |= {**mcp_file(assignment), f"{HOME}/.pi/agent/extensions/{TOOL_SERVER}.ts": extension}
    return files


PROGRAMS: Mapping[str, AgentProgram] = {
    "codex": NpmProgram("codex", "@openai/codex", "0.169.0", ["exec", "--skip-git-repo-check", "{prompt}"], _codex),
    "claude-code": NpmProgram(
        "claude-code",
        "@anthropic-ai/claude-code",
        "2.1.197",
        ["-p", "{prompt}", "--dangerously-skip-permissions", "--model", MODEL],
        env={
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "MCP_TOOL_TIMEOUT": str(TOOL_S * 1000),
        },
        tool_arguments=["--mcp-config", MCP_FILE, "--strict-mcp-config"],
    ),
    "opencode": NpmProgram(
        "opencode", "opencode-ai", "1.18.33", ["run", "{prompt}"], _opencode, {"OPENCODE_DISABLE_MODELS_FETCH": "1"}
    ),
    "pi": NpmProgram(
        "pi",
        "@mariozechner/pi-coding-agent",
        "0.73.1",
        ["--provider", "palaestra", "--model", MODEL, "-p", "{prompt}"],
        _pi,
        {"PI_OFFLINE": "1"},
    ),
    "mini-swe-agent": PipProgram(
        "mini-swe-agent",
        "mini-swe-agent",
        "2.4.6",
        "mini",
        ["--yolo", "--exit-immediately", "--cost-limit", "0", "--model", f"openai/{MODEL}", "--task", "{prompt}"],
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{HOME}/mini-swe-agent",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm fetches its price list from the network
        },
        ("litellm[mcp]==1.106.2",),  # litellm imports `mcp` for every request with tools
    ),
}


def program_named(name: str) -> AgentProgram:
    """Return the program with this name; any other text is taken as a command line. Raises `ConfigError` if the text is
    empty or is not a valid command line."""
    if name in PROGRAMS:
        return PROGRAMS[name]
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise ConfigError(f"the agent {name!r} is not a valid command line: {error}") from None
    if not words:
        raise ConfigError(f"the agent is empty: set it to one of {', '.join(PROGRAMS)}, or to a command line")
    return CommandProgram(name)
