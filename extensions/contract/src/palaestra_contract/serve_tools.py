"""`palaestra serve tools` and `palaestra serve executor`: tools over HTTP.

Tokens come from a file or from an environment variable, never from a flag, because other users can read a process's
arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from palaestra.cli.server_options import address_options, json_option, print_url, read_token, token_file
from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.config import ConfigLayer, Settings, host_path, merge, nearest, old_settings
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import told_to_stop
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra.tools.registry.registry import ToolRegistry
    from palaestra.tools.tool import Tool, ToolSchema
    from palaestra_contract.detached_subagents import Delegates
    from palaestra_slots.sandbox.slot import Backend

_PREFIX = "TOOL_EXECUTOR_"
_ON_REQUEST = frozenset({"terminal_stateful", "tmux", "web_crawl"})
"""Toolsets that an executor service serves in addition to the default toolsets if no `--toolset` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolsOptions:
    """The flags of `serve tools`."""

    host: str
    port: int
    toolsets: tuple[str, ...]
    mcp_files: tuple[Path, ...]
    lease_s: float
    token_file: Path | None
    files: tuple[Path, ...]


@click.command("tools")
@address_options(9002)
@click.option("--toolset", "toolsets", multiple=True, metavar="NAME", help="Serve this toolset. Repeatable.")
@click.option(
    "--mcp",
    "mcp_files",
    type=HostPath(),
    multiple=True,
    metavar="FILE",
    help="Serve the tools of the MCP servers in this file. Repeatable.",
)
@click.option(
    "--lease-s",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="The server forgets a trajectory after this many seconds without a call.",
)
@token_file
@json_option
@click.argument("files", nargs=-1, type=HostPath())
def tools(**options: JSON) -> None:
    """Run external tools, which need no slot, for executors on other machines.

    \b
      palaestra serve tools my_tools.py --toolset web
      palaestra serve tools --mcp mcp.json
      TOOL_SERVER_TOKEN=… palaestra serve tools my_tools.py --host 0.0.0.0

    FILEs are Python files with functions marked @tool(external=True) or subclasses of Tool. The server also offers the
    external tools of the toolsets and all tools of MCP servers. Set an executor's tool_server_url to the server's
    address. To listen on more than the loopback interface, set a token, which executors send as a bearer token.

    POST /execute {trajectory_id?, tool: {name, arguments, uniq_id?}, timeout_s?}, POST /release {trajectory_id},
    GET /tools, GET /health.
    """
    asyncio.run(_serve_tools(_ToolsOptions(**options)))


async def _serve_tools(options: _ToolsOptions) -> None:
    from palaestra.cli.tools import configured_servers, tool_settings
    from palaestra.tools.mcp.run_servers import MCPServers
    from palaestra.tools.registry.build import build_tool_registry
    from palaestra_contract.tools.tool_server import ToolServer, external

    # Before MCP servers are started: a signal then still closes what has been opened.
    token, stop = read_token(options.token_file, "TOOL_SERVER_TOKEN"), told_to_stop()
    brought = [tool for file in options.files for tool in _tools_of(file)]
    async with MCPServers(configured_servers(options.mcp_files)) as servers:
        brought += [external(tool) for tool in servers.tools()]
        registry = build_tool_registry(options.toolsets, extra=brought, settings=tool_settings())
        server = ToolServer(registry, token=token, lease_s=options.lease_s)
        if not server.tools.list_tools():
            unmarked = ", ".join(registry.list_tools())
            problem = f"none of {unmarked} is marked external" if unmarked else "no tools were named"
            raise ConfigError(
                f"{problem}: name a FILE with @tool(external=True) or a subclass of Tool, a --toolset, or --mcp"
            )
        for name, reason in registry.missing.items():
            click.echo(f"note: {name} is left out: {reason}", err=True)
        async with server.serving(options.host, options.port) as url:
            print_url(url)
            click.echo(f"serves {' '.join(server.tools.list_tools())}", err=True)
            await stop.wait()


def _tools_of(file: Path) -> list[Tool]:
    """Return the tools that a Python file creates or imports, and an instance of each subclass of `Tool`
    that it defines."""
    from palaestra.tools.tool import Tool
    from palaestra_slots.core.user_code import call_hook, load_file

    module = load_file(file)
    found = {id(value): value for value in vars(module).values() if isinstance(value, Tool)}
    made = {type(tool) for tool in found.values()}
    for kind in dict.fromkeys(value for value in vars(module).values() if isinstance(value, type)):
        own = issubclass(kind, Tool) and kind.__module__ == module.__name__
        if own and kind not in made and not inspect.isabstract(kind):
            tool = call_hook(ConfigError, kind, f"{file}: {kind.__name__}() (assign an instance to a name instead)")
            found[id(tool)] = tool
    if not found:
        raise ConfigError(f"{file} defines no tool: mark a function in it with @tool, or define a subclass of Tool")
    return list(found.values())


class ExecutorSettings(Settings, use_attribute_docstrings=True):
    """The settings that TOOL_EXECUTOR_* variables set. The project's interface contract fixes their names and
    defaults."""

    acquire_timeout_s: float = 30.0
    """Seconds to wait for a free slot."""
    allow_network: bool = True
    """Whether commands can reach the network."""
    require_sandbox: bool = False
    """Refuse to run below the isolation level `userns`."""
    tool_server_url: str | None = None
    """The address of the server that runs external tools."""
    tool_server_token: str | None = None
    """The token for the tool server."""
    token: str | None = None
    """The token that callers must send."""
    base_url: str | None = None
    """The model server of sub-agents (`delegate_task`); None disables sub-agents."""
    model: str = "default"
    """The model of sub-agents."""
    api_key: str | None = None
    """The API key of the model server."""
    world: Literal["live", "record", "replay", "fill"] = "live"
    """Whether tools that reach the outside run live, are recorded or are replayed; `fill` also records missing
    calls."""
    world_file: str | None = host_path(None, "The recording: a file, or a folder that contains one.")
    world_miss: Literal["reply", "fail"] = "reply"
    """The result of a call that is not in the recording: an error that the model reads, or a failed request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExecutorOptions:
    """The flags of `serve executor`."""

    host: str
    port: int
    slots: int | None
    isolation: str
    image: str | None
    backend: str | None
    toolsets: tuple[str, ...]
    base_url: str | None
    model: str | None
    lease_s: float
    drain_s: float
    token_file: Path | None


@click.command("executor")
@address_options(9001)
@click.option(
    "--slots", type=click.IntRange(min=1), help="Maximum number of slots. Default: as memory allows, up to 512."
)
@click.option(
    "--isolation", default="best", show_default=True, help="The isolation level: best, full, userns, confined or none."
)
@click.option("--image", help="The root file system of slots: a directory, a tar file or an OCI layout.")
@click.option(
    "--backend", metavar="NAME", help="The backend, as in a run. Default: local, or nomad if NOMAD_ADDRESS is set."
)
@click.option(
    "--toolset", "toolsets", multiple=True, metavar="NAME", help="Serve this toolset. Repeatable. Default: all."
)
@click.option("--base-url", metavar="URL", help="The model server of sub-agents. Default: no sub-agents.")
@click.option("--model", metavar="NAME", help="The model of sub-agents.")
@click.option(
    "--lease-s",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="A trajectory without a call for this many seconds loses its slot. Its calls are refused until POST /release.",
)
@click.option(
    "--drain-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="After SIGTERM, running calls may take this many seconds; then they are ended.",
)
@token_file
@json_option
def executor(**given: JSON) -> None:
    """Serve the tool executor over HTTP: lend slots to other programs and run tools in them.

    \b
      palaestra serve executor --slots 32
      curl -d '{"trajectory_id": "t1", "tool": {"name": "bash", "arguments": {"command": "ls"}}}' \\
          http://127.0.0.1:9001/execute
      TOOL_EXECUTOR_TOKEN=… palaestra serve executor --host 0.0.0.0
      palaestra serve executor --base-url http://127.0.0.1:8000/v1 --model NAME    # the model of sub-agents

    A trajectory has one slot from its first call to its release. After SIGTERM, the service refuses new calls and ends
    every slot. A token is required to listen on more than the loopback interface. docs/tools/servers.md explains all
    routes and the variables that begin with TOOL_EXECUTOR_. Backends are configured as in a run (TERMINAL_*,
    PALAESTRA_ENV_*).

    POST /execute {trajectory_id, tool: {name, arguments, uniq_id?}, timeout_s?}, POST /release {trajectory_id},
    POST /artifacts/read|list|archive {trajectory_id, path, …}, GET /status, GET /health.
    """
    options = _ExecutorOptions(**given)
    settings = executor_settings(os.environ)
    settings.base_url, settings.model = options.base_url or settings.base_url, options.model or settings.model
    settings.token = read_token(options.token_file, f"{_PREFIX}TOKEN")
    asyncio.run(_serve_executor(options, settings))


async def _serve_executor(options: _ExecutorOptions, settings: ExecutorSettings) -> None:
    from palaestra.rollouts.recorded_tools.recording_policy import open_world
    from palaestra_contract.tools.executor import ToolExecutor, ToolExecutorConfig
    from palaestra_contract.tools.executor_service import ExecutorService
    from palaestra_slots.sandbox.isolation.isolation_probe import WARNINGS
    from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra_slots.sandbox.slot import SlotSpec

    stop = told_to_stop()
    backend = _executor_backend(options, settings)
    policy = ToolExecutorConfig(
        **settings.model_dump(include={"allow_network", "require_sandbox", "tool_server_url", "tool_server_token"})
    )
    world = open_world(settings.world, settings.world_file, strict=settings.world_miss == "fail")
    registry = await _executor_tools(options.toolsets, settings)
    with closing(world):
        async with (
            SlotPool(
                SlotPoolConfig(max_slots=options.slots, acquire_timeout=settings.acquire_timeout_s), backend
            ) as pool,
            ToolExecutor(
                pool, registry, policy, spec=SlotSpec(image=options.image), delegates=_delegates(settings), world=world
            ) as running,
        ):
            service = ExecutorService(running, pool, token=settings.token, lease_s=options.lease_s)
            async with service.serving(options.host, options.port) as url:
                print_url(url)
                click.echo(f"slots: {pool.limit}; isolation {pool.rung.label}", err=True)
                if weak := WARNINGS.get(pool.rung):
                    click.echo(f"WARNING: isolation {pool.rung.label}: {weak}", err=True)
                await stop.wait()
                if left := await service.drain(options.drain_s):
                    click.echo(f"{left} calls had not ended after {options.drain_s:g} s and are killed", err=True)


_OF_NOMAD = {
    "nomad_address": "nomad_address", "job_id": "sandbox_job_id", "image": "sandbox_image",
    "slots": "slots_per_container", "min_containers": "min_containers", "max_containers": "max_containers",
    "privileged": "privileged", "purge_job_on_shutdown": "purge_job_on_shutdown",
}  # fmt: skip
"""Maps the endings of the variables for slots in Nomad to the names of a run's settings."""


def _executor_backend(options: _ExecutorOptions, settings: ExecutorSettings) -> Backend:
    """Return the backend that `--backend` names. Without it, the backend is `nomad` if TOOL_EXECUTOR_NOMAD_ADDRESS is
    set, or else that of a run's settings. Raises `ConfigError`."""
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.envs.config.layers import read_environ
    from palaestra_slots.sandbox.backends.registry import make_backend

    own: dict[str, JSON] = {"isolation": options.isolation, "require_sandbox": settings.require_sandbox}
    spelled = {there: f"{_PREFIX}{name.upper()}" for name, there in _OF_NOMAD.items()}
    nomad = {there: os.environ[variable] for there, variable in spelled.items() if os.environ.get(variable)}
    layers = [
        read_environ(os.environ, "env", HermesAgentEnvConfig),
        ConfigLayer("environment", nomad, spelled),
        ConfigLayer("executor", own),
    ]
    config = merge(HermesAgentEnvConfig, layers).value
    return make_backend(options.backend or ("nomad" if "nomad_address" in nomad else config.slot_backend), config)


async def _executor_tools(toolsets: Collection[str], settings: ExecutorSettings) -> ToolRegistry:
    """Return the tools of the toolsets, and the tools that only the tool server has.

    If `toolsets` is empty, return all tools that work here, including the tools of `_ON_REQUEST`. The registry then
    also records the reason for each missing tool, and a call to such a tool returns it.
    """
    from palaestra.cli.tools import tool_settings
    from palaestra.tools.registry.build import RunConditions, build_tool_registry, builtin_tools
    from palaestra_contract.tools.tool_server_client import elsewhere

    allowed = settings.allow_network
    conditions = RunConditions(allowed, replayed=settings.world == "replay")
    registry = build_tool_registry(toolsets or None, settings=tool_settings(), conditions=conditions)
    if not toolsets:
        names = _ON_REQUEST if allowed else _ON_REQUEST - {"web_crawl"}
        others = [tool for tool in builtin_tools(registry.settings) if registry.get(tool.name) is None]
        reasons = {tool.name: tool.missing_in(replayed=registry.replayed) for tool in others}
        for tool in others:
            if tool.name in names and reasons[tool.name] is None:
                registry.register(tool)
        registry.missing = {**registry.missing, **{name: why for name, why in reasons.items() if why is not None}}
    for schema in await _offered(settings):
        if registry.get(schema.name) is None:
            registry.register(elsewhere(schema, settings.tool_server_url or ""))
    return registry


def _delegates(settings: ExecutorSettings) -> Delegates | None:
    """Return the sub-agents for delegated work, or None if no model server is set."""
    if settings.base_url is None:
        return None
    from palaestra_contract.detached_subagents import Delegates
    from palaestra_tokens.config import APIServerConfig

    return Delegates(APIServerConfig(base_url=settings.base_url, model_name=settings.model, api_key=settings.api_key))


async def _offered(settings: ExecutorSettings) -> list[ToolSchema]:
    """Return the schemas of the tool server's tools. If a recording is made, store the schemas next to it, so that a
    replay does not contact the server."""
    from palaestra.rollouts.recorded_tools.recording_file import recording_in
    from palaestra.tools.tool import ToolSchema
    from palaestra_contract.tools.tool_server_client import ToolServerLink
    from palaestra_slots.core.io.durable_files import replaced

    if settings.tool_server_url is None:
        return []
    kept = None if settings.world_file is None else recording_in(Path(settings.world_file)).with_suffix(".tools.json")
    if settings.world == "replay" and kept is not None and kept.is_file():
        return [ToolSchema.from_dict(each, external=True) for each in json.loads(kept.read_text(encoding="utf-8"))]
    link = ToolServerLink(settings.tool_server_url, settings.tool_server_token)
    try:
        offered = await link.offered()
    finally:
        await link.aclose()
    if settings.world in ("record", "fill") and kept is not None:
        with replaced(kept) as file:
            file.write(json.dumps([schema.to_dict() for schema in offered]).encode())
    return offered


def executor_settings(environ: Mapping[str, str]) -> ExecutorSettings:
    """Read the TOOL_EXECUTOR_* variables, and report variables without effect on stderr. Raises `ConfigError`."""
    given = {name: value for name, value in environ.items() if name.startswith(_PREFIX) and value}
    variables = {name.removeprefix(_PREFIX).lower(): name for name in given}
    for name, variable in variables.items():
        if name in _OF_NOMAD and "nomad_address" not in variables:
            click.echo(f"note: {variable} has no effect without {_PREFIX}NOMAD_ADDRESS", err=True)
        elif name in ExecutorSettings.model_fields or name in _OF_NOMAD:
            continue
        elif name in old_settings():
            click.echo(f"note: {variable} has no effect: {old_settings()[name][1]}", err=True)
        else:
            known = (_PREFIX + each.upper() for each in (*ExecutorSettings.model_fields, *_OF_NOMAD))
            raise ConfigError(f"environment: {variable} is not a setting.{nearest(variable, known)}")
    values = {name: given[variable] for name, variable in variables.items() if name in ExecutorSettings.model_fields}
    return merge(ExecutorSettings, [ConfigLayer("environment", values, variables)]).value
