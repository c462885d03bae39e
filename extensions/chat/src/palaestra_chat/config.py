"""The settings of `palaestra chat` and `palaestra acp`, and the service built from them.

The sources of a setting, lowest precedence first: its default, `chat.yaml` in the user's folder (`settings_file`), the
files of `--config`, environment variables, and flags. All settings of `palaestra run` that concern a model server,
tools and slots work here too. No file of the current folder is read: a chat is at home in foreign projects.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pydantic import ValidationError

from palaestra.envs.config.build import (
    budget,
    command_timeout_s,
    extra_body,
    make_pool,
    mcp_servers,
    prices,
    server_settings,
    system_prompt,
    tools_with,
)
from palaestra.envs.config.command_line import NOT_SAID, Answer, CommandLine
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.tools.mcp.mcp_config import TOOLSET_PREFIX
from palaestra_chat.folders import settings_file, state_folder
from palaestra_chat.hooks import read_hooks
from palaestra_chat.model_servers import with_model, with_provider_key
from palaestra_chat.path_tools import PathTools, tool_variables, tools_from
from palaestra_chat.permissions import Mode
from palaestra_chat.project import Project
from palaestra_chat.service import SYSTEM_PROMPT, TOOLSETS, ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.workdir import NONE, WorkFolder
from palaestra_slots.core.config import COMMAND_LINE, host_path, setting
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Limits, Network
from palaestra_slots.sandbox.slot import WORKSPACE, SlotSpec
from palaestra_tokens.config import APIServerConfig

if TYPE_CHECKING:
    from palaestra.tools.mcp.run_servers import MCPServers

logger = logging.getLogger(__name__)

OF_RUNS = frozenset(BaseEnvConfig.model_fields) - {
    "acquire_timeout_s", "completion_price", "custom_thinking_prompt", "host_ports", "isolation",
    "max_reasoning_tokens", "max_token_length", "prompt_price", "reasoning_effort", "require_sandbox", "slots",
    "thinking_mode", "tokenizer_name",
} | {
    "dataset_name", "dataset_split", "distribution", "freeze_slots", "graded_paths", "graded_programs", "grading",
    "live", "prompt_field", "sessions_dir", "share_setup", "slot_prices",
}  # fmt: skip
"""The settings that have no meaning in a conversation: those of groups, rewards, recordings, trackers and trainers."""


class ChatConfig(HermesAgentEnvConfig):
    """The settings of conversations: the common settings of agents, and the shared folder."""

    enabled_toolsets: list[str] | None = setting(
        [*TOOLSETS, "todo", "clarify", "session_search"], "The agent's toolsets."
    )
    max_agent_turns: int = setting(60, "Maximum model calls for one message.", ge=1)
    system_prompt: str | None = setting(SYSTEM_PROMPT, "The system message; the instructions of AGENTS.md are added.")
    image: str | None = host_path(None, "The image of the sandbox. Default: this machine's system directories.")
    workdir: str | None = host_path(
        None,
        "The folder that is copied into the sandbox as its workspace, or none for an empty one. Default in a terminal: "
        "the current folder, if it is a project.",
    )
    tools_from_path: bool = setting(
        True,
        "Whether a sandbox on this machine sees the programs of your PATH, read-only: those in folders of toolchains "
        "such as ~/.local/bin, ~/.cargo/bin, ~/.pyenv, ~/.nvm and /opt/NAME. /sandbox lists them.",
    )
    write: Literal["ask", "yes", "no"] = setting(
        "ask",
        "Whether the agent's changes are written back to the shared folder after each turn. A chat remembers it for "
        "the folder.",
    )
    store: str | None = host_path(None, "The file that stores conversations. Default: one in your state folder.")
    mode: Mode = setting(
        Mode.AUTO, "The permission mode: plan (only tools that read), ask (asks before each change) or auto."
    )
    models: dict[str, dict[str, JSON]] = setting(
        {}, "Further models for /model: a name, and the settings of its server (base_url, model_name, api_key, …)."
    )
    checkpoints: int = setting(
        100, "The maximum number of turns whose files /undo, /rewind and /fork can restore; 0 keeps none.", ge=0
    )
    context_tokens: int | None = setting(
        None, "The size of the model's context window in tokens. Default: what the server reports.", gt=0
    )

    def check_runnable(self, sources: Mapping[str, str] | None = None) -> None:
        """Raise `ConfigError` also for a flag that no conversation reads."""
        for name in self._given_for_this_run(sources or {}):
            if name in OF_RUNS:
                raise ConfigError(f"{name} is a setting of runs, which conversations do not read: leave it out")
        super().check_runnable(sources)

    @property
    def hosts_of_pages(self) -> Sequence[str]:
        """The private hosts whose pages a message may name: `web_allow`, a setting of the package with the tools."""
        return cast("Sequence[str]", getattr(self, "web_allow", ()))


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The settings with which the program starts."""

    config: ChatConfig
    servers: Sequence[APIServerConfig]
    notices: Sequence[str] = ()
    flags: frozenset[str] = frozenset()
    """The names of the settings that are on the command line."""
    show: str = ""
    """The text to print instead of starting, for example for `--show-config`."""


def read_options(words: Sequence[str], prog: str) -> ChatOptions:
    """Merge the settings from flags, variables and files. Raises `ConfigError`."""
    line = CommandLine(
        prog=prog, env_type=ChatConfig, server_type=APIServerConfig, command="process", unread=OF_RUNS,
        examples=f"usage: {prog} [FLAGS]\n\n  {prog} --help has the flags; these settings are flags, too, and keys of "
        f"{settings_file()}",
    )  # fmt: skip
    file = settings_file()
    known = ["--config", str(file)] if file.is_file() else []
    parsed = line.parse([*known, *words], os.environ)
    if isinstance(parsed, Answer):
        return ChatOptions(ChatConfig(), (), show=parsed.text)
    config: ChatConfig = parsed.env_config
    config.check_runnable(parsed.sources)
    config.take_variables(os.environ)
    if config.workdir is None and parsed.sources["env.workdir"] not in NOT_SAID:
        config.workdir = NONE  # in a flag and in a variable, the word means that there is no value
    flags = frozenset(name.removeprefix("env.") for name, source in parsed.sources.items() if source == COMMAND_LINE)
    servers = [with_provider_key(server, os.environ) for server in server_settings(config, parsed.server_configs)]
    return ChatOptions(config, servers, parsed.notices, flags)


def open_store(config: ChatConfig) -> ConversationStore:
    """Open the store that the settings name, or the default one. Raises `ConfigError`."""
    return ConversationStore(Path(config.store).expanduser() if config.store else None)


def _report_problems(servers: MCPServers, config: ChatConfig) -> None:
    for each in servers.installed():
        settings = config.mcp_servers[each.toolset.removeprefix(TOOLSET_PREFIX)]
        if each.problem and settings.required and "required" in settings.model_fields_set:
            raise ConfigError(each.problem)
        if each.problem:
            logger.warning("%s. The conversation goes on without its tools.", each.problem.rstrip("."))


@asynccontextmanager
async def chat_service(options: ChatOptions, store: ConversationStore) -> AsyncIterator[ChatService]:
    """Yield the service for these settings. The MCP servers run until the block
    ends; one that does not start is left out with a warning. Raises `ConfigError`, also for an MCP server that does not
    start and whose settings say that it is required."""
    config = options.config
    found = [await with_model(server) for server in options.servers]
    folder = None if config.workdir in (None, NONE) else WorkFolder(Path(config.workdir).expanduser())
    async with AsyncExitStack() as stack:
        servers = mcp_servers(config, forgiving=True)
        about = conversation_project(folder)
        tools = path_tools(config, folder)
        skills = () if getattr(config, "skills_dir", None) else about.skill_tools()
        if servers is not None:
            await stack.enter_async_context(servers)
            _report_problems(servers, config)
        settings = ChatSettings(
            system_prompt=prompt(config, folder),
            toolsets=tuple(config.enabled_toolsets or ()),
            build_tools=lambda toolsets: tools_with(servers, list(toolsets), config, skills),
            max_turns=config.max_agent_turns,
            temperature=config.agent_temperature,
            max_tokens=config.max_token_length if "max_token_length" in config.model_fields_set else None,
            context_tokens=config.context_tokens,
            extra_body=extra_body(config),
            tool_timeout_s=command_timeout_s(config),
            budget=replace(budget(config), wall_s=None),  # a person may let a message take its time
            prices=prices(config),
            spec=spec(config, tools),
            missing_tools=tools.missing,
            memory=Path(getattr(config, "memory_dir", None) or state_folder() / "memory"),
            workdir=None if folder is None else folder.root,
            checkpoints=config.checkpoints,
            mode=config.mode.value,
            rules_folder=about.folder,
            hooks=read_hooks(about.own),
            models=named_models(config.models, found),
        )
        one = found[0] if len(found) == 1 else found
        yield await stack.enter_async_context(ChatService(one, store, settings, pool=make_pool(config)))


def prompt(config: ChatConfig, folder: WorkFolder | None) -> str | None:
    """Return the system prompt, followed by what the project's folder and the person's own tell the agent."""
    system = system_prompt(config)
    if system and folder is not None and folder.place != WORKSPACE:
        system += f" Commands start in {folder.place}, a copy of the user's folder; {WORKSPACE} is the same folder."
    return conversation_project(folder).prompt(system)


def conversation_project(folder: WorkFolder | None) -> Project:
    """Return the project that a conversation is about: the shared folder or, without one, the current folder."""
    return Project((folder.root if folder is not None else Path.cwd()).resolve(), settings_file().parent)


def named_models(
    models: Mapping[str, Mapping[str, JSON]], servers: Sequence[APIServerConfig]
) -> dict[str, APIServerConfig]:
    """Return the servers of the setting `models` by name. What a model does not set is as in the first server. Raises
    `ConfigError`."""
    found = {}
    for name, given in models.items():
        base = {"model_name": name, **given}
        if "base_url" not in given and servers:
            base = {**servers[0].model_dump(exclude_unset=True), **base}
        try:
            found[name] = APIServerConfig.model_validate(base)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise ConfigError(f"the setting models.{name}.{where} is wrong: {problem['msg']}") from None
    return found


def path_tools(config: ChatConfig, folder: WorkFolder | None) -> PathTools:
    """Return the programs of the person's PATH that a sandbox gets: none with an image, and on other machines."""
    if not config.tools_from_path or config.image is not None or config.slot_backend != "local":
        return PathTools()
    return tools_from(os.environ.get("PATH", ""), Path.home(), None if folder is None else folder.root)


def spec(config: ChatConfig, tools: PathTools) -> SlotSpec:
    """Return the specification of a conversation's sandbox."""
    network = Network.ON if config.allow_network else Network.OFF
    env = tool_variables(tools, Path.home())
    return SlotSpec(image=config.image, network=network, limits=Limits(), mounts=tuple(tools.mounts), env=env)
