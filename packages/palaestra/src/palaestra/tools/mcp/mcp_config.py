"""Settings of MCP servers: `MCPServerConfig`, in the `mcpServers` format of other programs.

    mcpServers:
      files: {command: npx, args: [-y, "@modelcontextprotocol/server-filesystem", /data]}
      tickets: {url: "https://tickets.example.org/mcp", headers: {Authorization: "Bearer ${TICKETS_TOKEN}"}}

`${NAME}` and `${NAME:-default}` stand for environment variables. They are replaced when a server opens, with the values
that the command line or a session passes (`take_variables`). So a run records the name of a variable and never its
value. Durations are in seconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_serializer, model_validator

from palaestra_slots.core.config import Settings, read_yaml
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.redaction import HIDDEN, redacted, redacted_arguments, remember_named, remember_secret
from palaestra_slots.core.types import JSON

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
TOOLSET_PREFIX = "mcp-"
_HEADINGS = ("mcpServers", "mcp_servers")


class MCPToolChoice(Settings):
    """The choice of a server's tools for an agent, by the names that the server gives them."""

    include: list[str] | None = Field(default=None, description="Offer only these tools. Default: all.")
    exclude: list[str] = Field(default_factory=list, description="Do not offer these tools.")
    allow: list[str] = Field(
        default_factory=list, description="Do not ask a person before calls of these tools. See also `ask`."
    )

    def has(self, name: str) -> bool:
        """Return whether the agent gets the tool with this name."""
        return (self.include is None or name in self.include) and name not in self.exclude


class MCPServerConfig(Settings):
    """One server: a `command` to run on this machine (stdio), or the `url` of a running server (streamable HTTP)."""

    of_others: ClassVar[frozenset[str]] = frozenset({
        "alwaysAllow", "always_allow", "autoApprove", "auto_approve", "trust",  # whom other clients ask, and when
        "name", "displayName", "title", "icon", "iconPath", "category", "homepage", "version", "gallery", "notes",
        "$schema", "_comment", "comment", "metadata", "source", "fromGalleryId",
    })  # fmt: skip

    command: str | None = Field(default=None, description="The program to run. It talks over stdin and stdout.")
    args: list[str] = Field(default_factory=list, description="The program's arguments.")
    env: dict[str, str] = Field(
        default_factory=dict,
        description="The program's variables, in addition to HOME, LOGNAME, PATH, SHELL, TERM and USER.",
    )
    cwd: str | None = Field(
        default=None,
        description="The program's working directory. Default: the directory where palaestra was started.",
        json_schema_extra={"host_path": True},
    )
    url: str | None = Field(default=None, description="The address of a running server.")
    headers: dict[str, str] = Field(default_factory=dict, description="Headers of every request to the url.")
    type: Literal["stdio", "http", "streamable-http", "streamable_http"] | None = Field(
        default=None, description="The transport, as other programs write it. It must agree with command or url."
    )
    description: str = Field(default="", description="What the toolset is for; not shown to models.")
    enabled: bool = Field(default=True, description="Whether the server is used at all.")
    disabled: bool = Field(default=False, description="The opposite of enabled, as other programs write it.")
    required: bool = Field(
        default=True,
        description="Whether a run fails if the server cannot be opened. If not, the run continues without the server. "
        "A conversation fails only if this is set to true.",
    )
    connect_timeout: float = Field(
        default=60, gt=0, description="Maximum seconds for the server to start, and to list its tools."
    )
    timeout: float = Field(default=120, gt=0, description="Maximum seconds of one call.")
    max_reply_chars: int = Field(default=50_000, ge=100, description="Maximum characters of a reply.")
    parallel: bool = Field(
        default=False, description="Whether calls in one turn may run concurrently even if they are not read-only."
    )
    ask: Literal["changes", "always", "never"] = Field(
        default="changes",
        description="Before which calls chat, acp and gateway ask the person. `changes`: before calls of tools that "
        "the server does not declare read-only, or declares destructive.",
    )
    tools: MCPToolChoice = Field(default_factory=MCPToolChoice, description="Which of the server's tools are offered.")

    _variables: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ConfigError("set either command (a program to run) or url (a running server)")
        if self.type is not None and (self.type == "stdio") != (self.command is not None):
            raise ConfigError(f"type {self.type} cannot be used with {'command' if self.command else 'url'}")
        unused = ("headers",) if self.command else ("args", "env", "cwd")
        for name in unused:
            if getattr(self, name):
                raise ConfigError(f"{name} has no effect for a server with {'command' if self.command else 'url'}")
        named = self.env | self.headers
        # A text with a variable is not yet the secret; `resolved` remembers the text with its value.
        remember_named({name: value for name, value in named.items() if not _VARIABLE.search(value)})
        return self

    @field_serializer("args")
    def _without_keys(self, values: list[str]) -> list[str]:
        shown = redacted_arguments(values)
        return [value if _VARIABLE.search(value) else each for value, each in zip(values, shown, strict=True)]

    @field_serializer("url")
    def _without_user(self, value: str | None) -> str | None:
        return None if value is None else redacted(value)

    @field_serializer("env", "headers")
    def _without_values(self, values: dict[str, str]) -> dict[str, str]:
        """Return the mapping as it is recorded: every value that contains no `${NAME}` is hidden."""
        return {name: value if _VARIABLE.search(value) else HIDDEN for name, value in values.items()}

    def __repr_args__(self) -> Iterable[tuple[str | None, JSON]]:
        return self.model_dump(exclude_unset=True).items()

    def asks(self, tool: str, *, reads: bool) -> bool:
        """Return whether a person is asked before a call of the tool with this name. `reads` is true if the server
        declares that the tool changes nothing."""
        return tool not in self.tools.allow and (self.ask == "always" or (self.ask == "changes" and not reads))

    @property
    def target(self) -> str:
        """A short identifier of the program or address, before variables are replaced. An approval that lasts does not
        cover a server of the same name with another target."""
        identity = "\0".join([self.command or "", *self.args, self.cwd or "", self.url or ""])
        return hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:16]

    @property
    def used(self) -> bool:
        """Whether the run should use the server."""
        return self.enabled and not self.disabled

    def take_variables(self, environ: Mapping[str, str]) -> None:
        """Remember the variables that the settings refer to. Raises `ConfigError` for a variable that is not set and
        has no default."""
        for name, default in _VARIABLE.findall("\n".join(self._texts())):
            if name in environ:
                self._variables[name] = environ[name]
            # `findall` returns an empty text both for an empty default and for none.
            elif f"${{{name}:-{default}}}" not in "\n".join(self._texts()):
                raise ConfigError(
                    f"${{{name}}} is not set in the environment: export it, or write ${{{name}:-default}}"
                )

    def resolved(self) -> MCPServerConfig:
        """Return a copy with every variable replaced. Raises `ConfigError` for a variable that was not passed and has
        no default."""
        env = {name: self._value(value) for name, value in self.env.items()}
        headers = {name: self._value(value) for name, value in self.headers.items()}
        # Before a server starts, because it may print these values, for example in an error message.
        remember_named({**self._variables, **env, **headers})
        arguments = [self._value(each) for each in self.args]
        for each, shown in zip(arguments, redacted_arguments(arguments), strict=True):
            remember_secret(each if shown == HIDDEN else None)
        return self.model_copy(
            update={
                "command": self._value(self.command) if self.command else None,
                "args": arguments,
                "env": env,
                "cwd": self._value(self.cwd) if self.cwd else None,
                "url": self._value(self.url) if self.url else None,
                "headers": headers,
            }
        )

    def _texts(self) -> list[str]:
        single = [each for each in (self.command, self.cwd, self.url) if each is not None]
        return [*single, *self.args, *self.env.values(), *self.headers.values()]

    def _value(self, text: str) -> str:
        def variable_value(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            if name in self._variables:
                return self._variables[name]
            if default is None:
                raise ConfigError(f"${{{name}}} has no value here: no variables were passed")
            return default

        return _VARIABLE.sub(variable_value, text)


def read_servers(path: Path) -> dict[str, JSON]:
    """Return the servers of a JSON or YAML file by name, unchecked. Raises `ConfigError`."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))  # JSON is also YAML
    except OSError as error:
        raise ConfigError(f"cannot read the MCP servers in {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from None
    return _by_name(content, str(path))


def servers_of(
    told: str | Path | Mapping[str, JSON], variables: Mapping[str, str] | None = None
) -> dict[str, MCPServerConfig]:
    """Return the servers that a file, or a mapping with a file's content, defines, with their variables. Servers that
    have their variables already are returned unchanged. Raises `ConfigError`, for example if a variable is not set."""
    if isinstance(told, Mapping) and all(isinstance(each, MCPServerConfig) for each in told.values()):
        return dict(told)
    written = _by_name(told, "mcp") if isinstance(told, Mapping) else read_servers(Path(told))
    servers = configured(written)
    checked_names(servers)
    hand_over(variables or {}, servers)
    return servers


def _by_name(content: JSON, where: str) -> dict[str, JSON]:
    if isinstance(content, Mapping):
        content = next((content[heading] for heading in _HEADINGS if heading in content), content)
    if not isinstance(content, Mapping) or not all(isinstance(value, Mapping) for value in content.values()):
        raise ConfigError(f"{where}: expected servers by name under {_HEADINGS[0]}, each with a command or a url")
    return dict(content)


def configured(servers: Mapping[str, Mapping[str, JSON]]) -> dict[str, MCPServerConfig]:
    """Check the settings of the servers, and return them. Raises a `ConfigError` that names the server."""
    made: dict[str, MCPServerConfig] = {}
    for name, written in servers.items():
        try:
            made[name] = MCPServerConfig(**written)
        except ConfigError as error:
            raise ConfigError(f"MCP server '{name}': {error}") from None
    return made


def hand_over(environ: Mapping[str, str], servers: Mapping[str, MCPServerConfig]) -> None:
    """Pass every enabled server the variables that its settings refer to. Raises a `ConfigError` that names the server
    if a variable is not set and has no default."""
    for name, server in servers.items():
        if server.used:
            try:
                server.take_variables(environ)
            except ConfigError as error:
                raise ConfigError(f"MCP server '{name}': {error}") from None


def checked_names(servers: Mapping[str, MCPServerConfig]) -> None:
    """Raise `ConfigError` for a server name that a tool's name could not contain."""
    for name in servers:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be a server's name: use at most 40 letters, digits, -, _ and .")


def toolset_of(server: str) -> str:
    """Return the name of the toolset that contains a server's tools."""
    return TOOLSET_PREFIX + server
