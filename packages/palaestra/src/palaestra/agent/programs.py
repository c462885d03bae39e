"""Third-party agents: programs that run in a slot and call a model at a configured address.

`known_programs.py` lists the known ones (`codex`, `aider`, …); any other text is a command line. A known program is
installed once on this machine, and slots see it read-only. `launch` returns the command, the settings files and the
environment variables of a program. The rollout starts the program, waits for it, ends it and keeps its output
(`rollouts/program_agent.py`). A `HostedAgent` of another library runs in this process instead.

A command line gets the task on its standard input and in the file that `PALAESTRA_PROMPT_FILE` names. It gets the
model's addresses, key and name in `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and
`PALAESTRA_MODEL`.

If the environment has tools, an MCP server offers them. A known program gets the server's address in its settings. A
command line gets the address in the file that `PALAESTRA_MCP_CONFIG` names. A known program without MCP gets a script
(`tool_program.py`) that calls the tools, and a prompt that explains it; `pi` gets an extension (`pi_tools.ts`).
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import platform
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.images.image_folders import default_folder
from palaestra_slots.sandbox.python_call import PACKAGES_DIR
from palaestra_slots.sandbox.slot import Mount, Slot

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

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request to any of the addresses."""
        return {"Authorization": f"Bearer {self.key}"}


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a program: its command, the files to write first (by path in the slot), and environment
    variables."""

    command: str | Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


class AgentProgram(Protocol):
    """One third-party agent that runs in the slot. Implemented by `CommandProgram`, `NpmProgram` and `PipProgram`."""

    @property
    def name(self) -> str: ...

    async def install(self) -> Sequence[Mount]:
        """Install the agent on this machine if necessary, and return the folders to mount into the slots. Raises
        `ConfigError` if the agent cannot be installed."""

    def launch(self, assignment: AgentAssignment) -> Launch: ...


class HostedAgent(ABC):
    """A third-party agent that runs in this process, and works in the slot by commands."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    async def install(self) -> Sequence[Mount]:
        """Prepare the agent on this machine. Raises `ConfigError` if it cannot run."""
        return ()

    @abstractmethod
    async def work(
        self, slot: Slot, here: AgentAssignment, in_slot: AgentAssignment, log: Callable[[bytes], None]
    ) -> None:
        """Work on a task until its end; the rollout cancels the call when it reaches a limit. `here` has the addresses
        for this process, and `in_slot` those for programs in the slot. `log` takes what the rollout's log keeps. An
        error of the agent ends its work, which is graded; raises `InfraError` or `ConfigError` for any other."""


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
    server: JSON = {"type": "http", "url": assignment.tools_url, "headers": assignment.headers}
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
class InstalledProgram(ABC):
    """An agent that is installed on this machine at one version. Its executable `program` (by default `name`) runs with
    `arguments` and `env`, in which `{prompt}`, `{openai_url}` and `{key}` stand for the values of the assignment.
    `files` returns its settings files, by path. If the environment has tools, `tool_arguments` are added; if
    `tools_by_command`, the prompt explains a command that calls them."""

    name: str
    package: str
    version: str
    arguments: Sequence[str]
    files: Settings = mcp_file
    env: Mapping[str, str] = field(default_factory=dict)
    tool_arguments: Sequence[str] = ()
    program: str = ""
    tools_by_command: bool = False

    @property
    def folder(self) -> Path:
        """The folder on this machine where the agent is installed."""
        return Path(default_folder("agents")) / f"{self.name}-{self.version}"

    def launch(self, assignment: AgentAssignment) -> Launch:
        files = dict(self.files(assignment))
        if assignment.tools_url and self.tools_by_command:
            assignment = replace(assignment, prompt=assignment.prompt + _TOOLS_BY_COMMAND)
            files |= mcp_file(assignment)
            files[TOOL_PROGRAM] = importlib.resources.files("palaestra.agent").joinpath("tool_program.py").read_text()
        arguments = [*self.arguments, *(self.tool_arguments if assignment.tools_url else ())]
        env = {name: _filled(value, assignment) for name, value in self.env.items()}
        command = [str(self.binary), *(_filled(each, assignment) for each in arguments)]
        return Launch(command, files, {**model_variables(assignment), **self.path(), **env})

    @property
    @abstractmethod
    def binary(self) -> Path:
        """The agent's executable."""

    @abstractmethod
    async def install(self) -> Sequence[Mount]: ...

    def path(self) -> Mapping[str, str]:
        """Return the search path that the agent needs, as a variable; empty if the slot's own is enough."""
        return {}


def _filled(text: str, assignment: AgentAssignment) -> str:
    """Replace the placeholders of a known program's argument or variable; the prompt itself is taken as it is."""
    values = {each: getattr(assignment, each) for each in ("prompt", "openai_url", "key")}
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


@dataclass(frozen=True)
class NpmProgram(InstalledProgram):
    """An agent from npm, run by this machine's Node.js. An agent that needs a newer one than Node.js 20 names it with
    `node`, and an agent that needs Bun names its version with `bun`; that version is then installed beside the agent,
    from npm too."""

    node: str = ""
    bun: str = ""

    @property
    def binary(self) -> Path:
        return self.folder / "node_modules" / ".bin" / (self.program or self.name)

    @property
    def _own_node(self) -> str:
        return f"node-linux-{'arm64' if platform.machine() == 'aarch64' else 'x64'}"

    def _node_folder(self) -> Path | None:
        """Return the folder of the agent's Node.js; None if this machine has none."""
        if self.node:
            return self.folder / "node_modules" / self._own_node / "bin"
        node = shutil.which("node")
        return Path(node).resolve().parent if node else None

    async def install(self) -> Sequence[Mount]:
        node = self._node_folder()
        if node is None:
            raise ConfigError(f"agent {self.name} needs Node.js 20 or newer on this machine, but node is not installed")
        targets = [f"{self.package}@{self.version}", *([f"{self._own_node}@{self.node}"] if self.node else ())]
        targets += [f"bun@{self.bun}"] if self.bun else []
        npm = "npm", "install", "--no-audit", "--no-fund", "--prefix", str(self.folder), *targets
        await _installed(self.name, self.folder, self.binary, [npm])
        return [Mount(str(self.folder), str(self.folder))] if self.node else _mounts(self.folder, node)

    def path(self) -> Mapping[str, str]:
        bun = f"{self.folder / 'node_modules/.bin'}:" if self.bun else ""
        usual = f"{PACKAGES_DIR}/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
        return {"PATH": f"{bun}{self._node_folder()}:{usual}"}


@dataclass(frozen=True)
class PipProgram(InstalledProgram):
    """An agent from PyPI, in a virtual environment made with this Python. An agent that needs a newer one than Python
    3.11 names it with `python`; then the virtual environment is made with this Python if it is new enough, otherwise
    with an installed one of that version. `also` lists requirements that the package does not declare, with
    versions."""

    also: Sequence[str] = ()
    python: str = ""

    @property
    def binary(self) -> Path:
        return self.folder / "bin" / (self.program or self.name)

    async def install(self) -> Sequence[Mount]:
        venv = self._interpreter(), "-m", "venv", str(self.folder)
        python, target = str(self.folder / "bin/python"), f"{self.package}=={self.version}"
        pip = python, "-m", "pip", "install", "--quiet", *self.also, target
        await _installed(self.name, self.folder, self.binary, [venv, pip])
        return _mounts(self.folder, _home(self.folder))

    def _interpreter(self) -> str:
        """Return the Python that makes the virtual environment. Raises `ConfigError`."""
        if not self.python or sys.version_info >= tuple(map(int, self.python.split("."))):
            return sys.executable
        name = f"python{self.python}"
        managed = sorted((Path.home() / ".pyenv/versions").glob(f"{self.python}.*/bin/{name}"))
        # pyenv's shims are on the search path of every version, but only the active versions start.
        on_path = [each for each in (shutil.which(name),) if each and "/shims/" not in each]
        found = [*on_path, *map(str, managed)]
        if not found:
            raise ConfigError(
                f"agent {self.name} needs Python {self.python} on this machine, but {name} is not installed"
            )
        return found[0]


_TOOLS_BY_COMMAND = f"""

Besides the shell, there are tools that you call by a command. List them:
python3 {TOOL_PROGRAM}
Call one, with its arguments as JSON:
python3 {TOOL_PROGRAM} NAME '{{"argument": "value"}}'"""


async def _installed(name: str, folder: Path, binary: Path, commands: Sequence[Sequence[str]]) -> None:
    """Run the commands that install an agent in its folder, unless it is already installed. Raises `ConfigError`."""
    lock, unfinished = folder / "install.lock", folder / "install.unfinished"
    if binary.exists() and not unfinished.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    async with file_lock(lock):
        # Another process may have installed the agent while this one waited for the lock.
        if binary.exists() and not unfinished.exists():
            return
        # Installers take what an interrupted one has left for installed.
        for left in set(folder.iterdir()) - {lock, unfinished} if unfinished.exists() else ():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        unfinished.touch()
        output = b""
        for command in commands:
            output = await _run_installer(name, command, folder)
        if not binary.exists():
            raise ConfigError(f"agent {name} cannot be installed: {_output_excerpt(output)}")
        unfinished.unlink()


async def _run_installer(name: str, command: Sequence[str], folder: Path) -> bytes:
    """Run one installation command in the agent's folder and return its output. Files of the current folder, such as
    an `.npmrc`, have no effect. Raises `ConfigError`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            # An installer that asks a question must end, not wait.
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
        raise ConfigError(f"agent {name} cannot be installed: {shlex.join(command)} failed: {_output_excerpt(output)}")
    return output


def _output_excerpt(output: bytes) -> str:
    return without_middle(output.decode(errors="replace").strip(), 1500)


def _home(venv: Path) -> Path:
    """Return the folder of the interpreter that made a virtual environment."""
    lines = (venv / "pyvenv.cfg").read_text().splitlines()
    (home,) = (line.partition("=")[2].strip() for line in lines if line.startswith("home ="))
    return Path(home).resolve()


def _mounts(folder: Path, interpreter: Path) -> list[Mount]:
    """Return the folders to mount into the slots: the agent's folder, and the `bin` and `lib` folders of its
    interpreter unless they belong to the system."""
    mounts = [Mount(str(folder), str(folder))]
    if interpreter.parent not in (Path("/"), Path("/usr"), Path("/usr/local")):
        needed = (interpreter, interpreter.with_name("lib"))  # not the parent folder, which may be a user's home
        mounts += [Mount(str(each), str(each)) for each in needed if each.is_dir()]
    return mounts
