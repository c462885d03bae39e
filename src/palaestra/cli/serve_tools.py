"""`palaestra serve tools` and `palaestra serve executor`: tools over HTTP.

Tokens come from a file or from a variable of the environment, never from a flag: other users see a process's flags.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from palaestra.cli.server_shutdown import told_to_stop
from palaestra.core.config import Layer, Settings, has_effect, later, merge, nearest, sent_secret
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON

if TYPE_CHECKING:
    from palaestra.agent.detached_subagents import Delegates
    from palaestra.tools.registry.registry import ToolRegistry
    from palaestra.tools.tool import Tool, ToolSchema

_CONTEXT = {"help_option_names": ["-h", "--help"]}
_PREFIX = "TOOL_EXECUTOR_"
_ON_REQUEST = frozenset({"terminal_stateful", "tmux", "web_crawl"})
"""What an executor service runs besides the tools that models are shown by default."""

_host = click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
_token_file = click.option(
    "--token-file", type=click.Path(path_type=Path, dir_okay=False), help="The file with the token that callers send."
)


@click.command(
    "tools",
    context_settings=_CONTEXT,
    help="""Run external tools for executors elsewhere: those that need no slot.

    \b
      palaestra serve tools my_tools.py --toolset web
      palaestra serve tools --mcp mcp.json
      TOOL_SERVER_TOKEN=… palaestra serve tools my_tools.py --host 0.0.0.0

    FILEs are Python files with tools marked external (@tool(external=True)); the toolsets' external tools and all tools
    of MCP servers are served too. Executors reach them with tool_server_url, and send the token as a bearer. Without a
    token everybody may call who reaches the address.

    POST /execute {trajectory_id?, tool: {name, arguments, uniq_id?}, timeout_s?}, POST /release {trajectory_id},
    GET /tools, GET /health. A trajectory that made no call for --lease-s seconds is forgotten.
    """,
)
@_host
@click.option("--port", type=click.IntRange(0, 65535), default=9002, show_default=True, help="0: a free one.")
@click.option("--toolset", "toolsets", multiple=True, metavar="NAME", help="May be given again.")
@click.option("--mcp", "mcp_files", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help="MCP servers.")
@click.option("--lease-s", type=click.FloatRange(min=1), default=3600.0, show_default=True)
@_token_file
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
def tools(
    host: str,
    port: int,
    toolsets: tuple[str, ...],
    mcp_files: tuple[Path, ...],
    lease_s: float,
    token_file: Path | None,
    files: tuple[Path, ...],
) -> None:
    token = _token(token_file, "TOOL_SERVER_TOKEN")
    asyncio.run(_serve_tools(host, port, toolsets, mcp_files, lease_s, token, files))


async def _serve_tools(
    host: str,
    port: int,
    toolsets: Sequence[str],
    mcp_files: Sequence[Path],
    lease_s: float,
    token: str | None,
    files: Sequence[Path],
) -> None:
    from palaestra.cli.tools import configured_servers, tool_settings
    from palaestra.tools.mcp.run_servers import MCPServers
    from palaestra.tools.registry.registry import build_tool_registry
    from palaestra.tools.serving.tool_server import ToolServer, external

    stop = told_to_stop()
    brought = [tool for file in files for tool in _tools_of(file)]
    async with MCPServers(configured_servers(mcp_files)) as servers:
        brought += [external(tool) for tool in servers.tools()]
        registry = build_tool_registry(toolsets, extra=brought, settings=tool_settings())
        server = ToolServer(registry, token=token, lease_s=lease_s)
        if not server.tools.list_tools():
            unmarked = ", ".join(registry.list_tools())
            problem = f"none of {unmarked} is marked external" if unmarked else "no tools were named"
            raise ConfigError(f"{problem}: name a FILE with @tool(external=True), a --toolset, or --mcp")
        for name, reason in registry.missing.items():
            click.echo(f"note: {name} is left out: {reason}", err=True)
        async with server.serving(host, port) as url:
            click.echo(url)
            click.echo(f"serves {' '.join(server.tools.list_tools())}", err=True)
            _warn_open(host, token)
            await stop.wait()


def _tools_of(file: Path) -> list[Tool]:
    """The tools that a Python file makes or imports."""
    from palaestra.envs.discovery import load_file
    from palaestra.tools.tool import Tool

    found = {id(value): value for value in vars(load_file(file)).values() if isinstance(value, Tool)}
    if not found:
        raise ConfigError(f"{file} has no tool: a typed function with @tool")
    return list(found.values())


class ExecutorSettings(Settings):
    """What TOOL_EXECUTOR_* variables may say. Names and defaults are the contract's."""

    acquire_timeout_s: float = 30.0
    """Seconds to wait for a free slot."""
    allow_network: bool = True
    """Whether commands reach the network."""
    require_sandbox: bool = False
    """Refuse to run below the rung userns."""
    tool_server_url: str | None = None
    """Where external tools run."""
    tool_server_token: str | None = None
    """Its token."""
    token: str | None = None
    """What callers must send."""
    base_url: str | None = None
    """The model server that sub-agents ask (`delegate_task`); None: there are none."""
    model: str = "default"
    """Its model."""
    api_key: str | None = None
    """Its key."""
    world: Literal["live", "record", "replay", "fill"] = "live"
    """What tools that touch the world are told: what it says, which may be recorded, or what was recorded."""
    world_file: str | None = None
    """The recording: a file, or a folder that has or gets one."""
    world_miss: Literal["reply", "fail"] = "reply"
    """A call that the replayed recording lacks: an error that the model reads, or a failed request."""
    nomad_address: str = later("", "Slots are those of this machine.")
    job_id: str = later("", "There is no job.")
    image: str = later("", "Slots are made from this machine's system directories, or from --image.")
    slots: int = later(10, "How many there are is --slots.")
    min_containers: int = later(1, "There are no containers.")
    max_containers: int = later(10, "There are no containers.")
    privileged: bool = later(False, "No slot is ever privileged.")
    batch_window_ms: int = later(20, "Calls are sent one by one, at once.")
    max_batch_size: int = later(200, "Calls are sent one by one, at once.")
    purge_job_on_shutdown: bool = later(True, "Every slot ends with the service.")


@click.command(
    "executor",
    context_settings=_CONTEXT,
    help="""Lend slots and run tools in them for programs elsewhere: the tool executor over HTTP.

    \b
      palaestra serve executor --slots 32
      curl -d '{"trajectory_id": "t1", "tool": {"name": "bash", "arguments": {"command": "ls"}}}' \\
          http://127.0.0.1:9001/execute
      TOOL_EXECUTOR_TOKEN=… palaestra serve executor --host 0.0.0.0
      palaestra serve executor --base-url http://127.0.0.1:8000/v1 --model NAME    # whom sub-agents ask

    A trajectory has one slot from its first call to its release. One that made no call for --lease-s seconds is
    released, and refused until it is released by name. SIGTERM ends new calls and waits --drain-s seconds for those
    under way; then every slot ends. Without a token everybody may run commands who reaches the address.

    POST /execute {trajectory_id, tool: {name, arguments, uniq_id?}, timeout_s?}, POST /release {trajectory_id},
    POST /artifacts/read|list|archive {trajectory_id, path, …}, GET /status, GET /health.

    Variables: TOOL_EXECUTOR_ and ACQUIRE_TIMEOUT_S, ALLOW_NETWORK, REQUIRE_SANDBOX, TOOL_SERVER_URL, TOOL_SERVER_TOKEN,
    TOKEN, BASE_URL, MODEL, API_KEY, WORLD (live, record, replay, fill), WORLD_FILE, WORLD_MISS (reply, fail). Those of
    other backends are accepted and named as without effect.
    """,
)
@_host
@click.option("--port", type=click.IntRange(0, 65535), default=9001, show_default=True, help="0: a free one.")
@click.option("--slots", type=click.IntRange(min=1), help="At most at once. Default: four per processor.")
@click.option("--isolation", default="best", show_default=True, help="best, full, userns, confined or none.")
@click.option("--image", help="The root file system of slots: a directory, a tar file or an OCI layout.")
@click.option("--toolset", "toolsets", multiple=True, metavar="NAME", help="May be given again. Default: all.")
@click.option("--base-url", metavar="URL", help="The model server that sub-agents ask. Default: there are none.")
@click.option("--model", metavar="NAME", help="Its model.")
@click.option("--lease-s", type=click.FloatRange(min=1), default=1800.0, show_default=True)
@click.option("--drain-s", type=click.FloatRange(min=0), default=60.0, show_default=True)
@_token_file
def executor(
    host: str,
    port: int,
    slots: int | None,
    isolation: str,
    image: str | None,
    toolsets: tuple[str, ...],
    base_url: str | None,
    model: str | None,
    lease_s: float,
    drain_s: float,
    token_file: Path | None,
) -> None:
    settings = executor_settings(os.environ)
    settings.base_url, settings.model = base_url or settings.base_url, model or settings.model
    settings.token = _token(token_file, f"{_PREFIX}TOKEN")
    asyncio.run(_serve_executor(host, port, slots, isolation, image, toolsets, lease_s, drain_s, settings))


async def _serve_executor(
    host: str,
    port: int,
    slots: int | None,
    isolation: str,
    image: str | None,
    toolsets: Sequence[str],
    lease_s: float,
    drain_s: float,
    settings: ExecutorSettings,
) -> None:
    from palaestra.cli.tools import tool_settings
    from palaestra.rollouts.recorded_tools.recording_policy import open_world
    from palaestra.sandbox.backends.local import LocalBackend
    from palaestra.sandbox.isolation.isolation_probe import warning
    from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra.sandbox.slot import SlotSpec
    from palaestra.tools.registry.registry import build_tool_registry
    from palaestra.tools.runtime.executor import ToolExecutor, ToolExecutorConfig
    from palaestra.tools.serving.executor_service import ExecutorService
    from palaestra.tools.serving.tool_server_client import elsewhere

    stop = told_to_stop()
    limits: dict[str, JSON] = {} if slots is None else {"max_slots": slots}
    backend = LocalBackend.from_isolation(isolation, require_sandbox=settings.require_sandbox)
    policy = ToolExecutorConfig(
        allow_network=settings.allow_network,
        require_sandbox=settings.require_sandbox,
        tool_server_url=settings.tool_server_url,
        tool_server_token=settings.tool_server_token,
    )
    allowed, replayed = settings.allow_network, settings.world == "replay"
    world = open_world(settings.world, settings.world_file, strict=settings.world_miss == "fail")
    registry = build_tool_registry(toolsets or None, settings=tool_settings(), world=allowed, replayed=replayed)
    if not toolsets:
        registry = _with_more(registry, _ON_REQUEST if allowed else _ON_REQUEST - {"web_crawl"}, replayed)
    for schema in await _offered(settings):
        if registry.get(schema.name) is None:
            registry.register(elsewhere(schema))
    with closing(world):
        async with (
            SlotPool(SlotPoolConfig(acquire_timeout=settings.acquire_timeout_s, **limits), backend) as pool,
            ToolExecutor(
                pool, registry, policy, spec=SlotSpec(image=image), delegates=_delegates(settings), world=world
            ) as running,
        ):
            service = ExecutorService(running, pool, token=settings.token, lease_s=lease_s)
            async with service.serving(host, port) as url:
                click.echo(url)
                click.echo(f"{pool.total_slots} slots, isolation {pool.rung.label}", err=True)
                if weak := warning(pool.rung):
                    click.echo(f"WARNING: isolation {pool.rung.label}: {weak}", err=True)
                _warn_open(host, settings.token)
                await stop.wait()
                if left := await service.drain(drain_s):
                    click.echo(f"{left} calls had not ended after {drain_s:g} s and are killed", err=True)


def _with_more(registry: ToolRegistry, names: Collection[str], replayed: bool) -> ToolRegistry:
    """Besides, tools that a model is not shown unasked; and of all that is missing why, so that calls are told."""
    from palaestra.tools.registry.registry import ToolRegistry, builtin_tools

    others = {tool.name: tool for tool in builtin_tools(registry.settings) if registry.get(tool.name) is None}
    missing = {
        name: why
        for name, tool in others.items()
        if (why := None if replayed and tool.touches_world else tool.missing()) is not None
    }
    more = [tool for name, tool in others.items() if name in names and name not in missing]
    return ToolRegistry([*registry.tools(), *more], {**registry.missing, **missing}, registry.settings, registry.shared)


def _delegates(settings: ExecutorSettings) -> Delegates | None:
    """Who does delegated work, where a model server was named."""
    if settings.base_url is None:
        return None
    from palaestra.agent.detached_subagents import Delegates
    from palaestra.inference.config import APIServerConfig

    return Delegates(APIServerConfig(base_url=settings.base_url, model_name=settings.model, api_key=settings.api_key))


async def _offered(settings: ExecutorSettings) -> list[ToolSchema]:
    """What the tool server says that it has. It is kept beside a recording: a replay does not ask the server."""
    from palaestra.rollouts.recorded_tools.recording_file import recording_in
    from palaestra.tools.serving.tool_server_client import ToolServerLink
    from palaestra.tools.tool import ToolSchema

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
        kept.write_text(json.dumps([schema.to_dict() for schema in offered]), encoding="utf-8")
    return offered


def executor_settings(environ: Mapping[str, str]) -> ExecutorSettings:
    """What TOOL_EXECUTOR_* variables say; those without effect are named on stderr. Raises `ConfigError`."""
    given = {name: value for name, value in environ.items() if name.startswith(_PREFIX) and value}
    fields = {name: name.removeprefix(_PREFIX).lower() for name in given}
    for variable, name in fields.items():
        if name not in ExecutorSettings.model_fields:
            known = (_PREFIX + each.upper() for each in ExecutorSettings.model_fields)
            raise ConfigError(f"environment: {variable} sets nothing.{nearest(variable, known)}")
        if not has_effect(ExecutorSettings, name):
            why = str(ExecutorSettings.model_fields[name].description).removesuffix(" (no effect yet)")
            click.echo(f"note: {variable} has no effect: {why}", err=True)
    layer = Layer("environment", {fields[name]: value for name, value in given.items()}, _spelled(fields))
    return merge(ExecutorSettings, [layer]).value


def _spelled(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: variable for variable, name in fields.items()}


def _token(file: Path | None, variable: str) -> str | None:
    if file is None:
        return sent_secret(os.environ.get(variable), variable)
    try:
        token = sent_secret(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token from {file}: {error}") from None
    if token is None:
        raise ConfigError(f"{file} holds no token")
    return token


def _warn_open(host: str, token: str | None) -> None:
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        click.echo(f"WARNING: {host} without a token: whoever reaches it may call. Give it a --token-file.", err=True)
