"""The settings of `palaestra chat` and `palaestra acp`, and the service built from them.

The sources of a setting, lowest precedence first: its default, `chat.yaml` in the user's folder (`settings_file`), the
files of `--config`, environment variables, and flags. All settings of `palaestra run` that concern a model server,
tools and slots work here too. No file of the current folder is read: a chat is at home in foreign projects.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from palaestra.agent.budget import Budget
from palaestra.doors.chat.folders import settings_file, state_folder
from palaestra.doors.chat.hooks import read_hooks
from palaestra.doors.chat.permissions import Mode
from palaestra.doors.chat.project import Project
from palaestra.doors.chat.service import SYSTEM_PROMPT, TOOLSETS, ChatService, ChatSettings
from palaestra.doors.chat.store import ConversationStore
from palaestra.doors.chat.workdir import WorkFolder
from palaestra.envs.config.build import (
    command_timeout_s,
    extra_body,
    make_pool,
    mcp_servers,
    prices,
    server_settings,
    tools_with,
)
from palaestra.envs.config.command_line import Answer, CommandLine
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.inference.config import APIServerConfig
from palaestra_slots.core.config import host_path, setting
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Limits, Network
from palaestra_slots.sandbox.slot import SlotSpec


class ChatConfig(HermesAgentEnvConfig):
    """The settings of conversations: the common settings of agents, and the shared folder."""

    enabled_toolsets: list[str] | None = setting(
        [*TOOLSETS, "todo", "clarify", "session_search"], "The agent's toolsets."
    )
    max_agent_turns: int = setting(60, "Maximum model calls for one message.", ge=1)
    system_prompt: str | None = setting(SYSTEM_PROMPT, "The system message; the instructions of AGENTS.md are added.")
    image: str | None = host_path(None, "The image of the sandbox. Default: this machine's system directories.")
    workdir: str | None = host_path(None, "The folder that is copied into the sandbox as its workspace.")
    write: Literal["ask", "yes", "no"] = setting(
        "ask", "Whether the agent's changes are written back to the shared folder after each turn."
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


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The settings with which the program starts."""

    config: ChatConfig
    servers: Sequence[APIServerConfig]
    notices: Sequence[str] = ()
    show: str = ""
    """The text to print instead of starting, for example for `--show-config`."""


def read_options(words: Sequence[str], prog: str) -> ChatOptions:
    """Merge the settings from flags, variables and files. Raises `ConfigError`."""
    line = CommandLine(prog=prog, env_type=ChatConfig, server_type=APIServerConfig, command="process")
    file = settings_file()
    known = ["--config", str(file)] if file.is_file() else []
    parsed = line.parse([*known, *words], os.environ)
    if isinstance(parsed, Answer):
        return ChatOptions(ChatConfig(), (), (), parsed.text)
    config: ChatConfig = parsed.env_config
    config.take_variables(os.environ)
    return ChatOptions(config, server_settings(config, parsed.server_configs), parsed.notices)


def open_store(config: ChatConfig) -> ConversationStore:
    """Open the store that the settings name, or the default one. Raises `ConfigError`."""
    return ConversationStore(Path(config.store).expanduser() if config.store else None)


@asynccontextmanager
async def chat_service(options: ChatOptions, store: ConversationStore) -> AsyncIterator[ChatService]:
    """Yield the service for these settings. The MCP servers run until the block
    ends. Raises `ConfigError`, and `ToolServerError` for a required MCP server that does not start."""
    config = options.config
    folder = None if config.workdir is None else WorkFolder(Path(config.workdir).expanduser())
    async with AsyncExitStack() as stack:
        servers = mcp_servers(config)
        about = project(folder)
        skills = () if config.skills_dir else about.skill_tools()
        if servers is not None:
            await stack.enter_async_context(servers)
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
            budget=Budget(tokens=config.max_rollout_tokens, cost=config.max_rollout_cost, prices=prices(config)),
            prices=prices(config),
            spec=spec(config),
            memory=Path(config.memory_dir) if config.memory_dir else state_folder() / "memory",
            workdir=None if folder is None else folder.root,
            checkpoints=config.checkpoints,
            mode=config.mode.value,
            rules_folder=about.folder,
            hooks=read_hooks(about.own),
            models=named_models(config.models, options.servers),
        )
        one = options.servers[0] if len(options.servers) == 1 else options.servers
        yield await stack.enter_async_context(ChatService(one, store, settings, pool=make_pool(config)))


def prompt(config: ChatConfig, folder: WorkFolder | None) -> str | None:
    """Return the system prompt, followed by what the project's folder and the person's own tell the agent."""
    return project(folder).prompt(config.system_prompt)


def project(folder: WorkFolder | None) -> Project:
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


def spec(config: ChatConfig) -> SlotSpec:
    """Return the specification of a conversation's sandbox."""
    return SlotSpec(image=config.image, network=Network.ON if config.allow_network else Network.OFF, limits=Limits())
