"""The command line of environment scripts: `x_env.py process|evaluate|serve [--env.FIELD V] [--openai.FIELD V] …`.

Precedence: field default < the environment's own `config_init` < the command's own defaults < the keys in `.env` <
`--config` files in order < environment variables < the settings of a run that is resumed < flags. Invariants: unless a
command line requests help, no word of it is ignored; an unusable word raises `ConfigError`. An address that `.env`
gives is used only with a key from there.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from palaestra.envs.config.dotenv import DOTENV
from palaestra.envs.config.fields import UNSAID, BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.config.layers import (
    ENVIRONMENT,
    Annotation,
    FileSettings,
    choices,
    describe,
    holds_texts,
    read_environ,
    read_file,
    read_openai_variables,
    read_words,
    takes_mapping,
    takes_sequence,
)
from palaestra.tools.mcp.mcp_config import read_servers
from palaestra_slots.core.config import (
    ARGUMENT,
    COMMAND_LINE,
    DEFAULT,
    OWN_NAMES,
    SHORT_FORMS,
    ConfigLayer,
    Merged,
    all_settings,
    find_setting,
    flat_key,
    flat_settings,
    is_old,
    is_secret,
    local_path,
    merge,
    nearest,
    part_class,
    part_points,
)
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.process_arguments import hide
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.types import JSON

EnvT_co = TypeVar("EnvT_co", bound=BaseModel, covariant=True)
ServerT_co = TypeVar("ServerT_co", bound=BaseModel, covariant=True)

COMMANDS = ("process", "evaluate", "serve")

Variables: TypeAlias = Sequence[tuple[str, Mapping[str, str]]]
"""Variables by their source, lowest precedence first."""

_OTHER_WORDS = {
    "--parallel": "--concurrency", "--workers": "--concurrency", "--limit": "--tasks", "--count": "--tasks",
    "--output": "--out", "--url": "--base-url", "--key": "--openai.api_key",
}  # fmt: skip
"""Flags of other programs, and Palaestra's flags with the same meaning."""

ARGUMENTS = {
    "model": "model_name",
    "task": "only_tasks",
    "tasks": "total_steps",
    "concurrency": "max_num_workers",
    "backend": "tool_pool_mode",
    "out": "data_path_to_save_groups",
}
"""Short names of settings for Python callers."""

logger = logging.getLogger(__name__)

_ON_COMMAND_LINE = (
    "%s was on the command line, where other users of this machine could read it; put it in "
    "a --config file that only you can read, or in an environment variable"
)
SWITCHES = ("--slurm", "--testing", "--show-config", "--dry-run", "--json", "--help", "--help-all", "--keep-workspaces")
"""Flags that take no value."""

_OWN = ("--policy", "--resume", "--failed-of", "--config", "--mcp", *SWITCHES)
GENERAL_FLAGS = (*_OWN, *SHORT_FORMS)
"""Flags that every environment has."""

RECORDED = "the recorded run"
"""The source of a setting that a resumed run keeps from its earlier parts."""

NOT_SAID = frozenset(UNSAID) - {"config_init"}
"""Sources of settings that neither the user nor the environment has set."""

_COMMON = (
    "group_size",
    "total_steps",
    "max_num_workers",
    "max_agent_turns",
    "enabled_toolsets",
    "tool_pool_mode",
    "data_path_to_save_groups",
    "seed",
)
_TOPICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "evaluation": (
        "Evaluations during a run.", ("data_dir_to_save_evals", "eval_", "max_eval_workers", "steps_per_eval"),
    ),
    "feed": (
        "Runs that feed a trainer.",
        ("allow_placeholder_tokens", "inference_weight", "max_batches_", "min_batch_", "rollout_server_"),
    ),
    "recording": ("The replies of tools that reach outside, recorded and replayed.", ("world",)),
    "thinking": ("How the model is asked to think.", ("custom_thinking_", "max_reasoning_", "reasoning_", "thinking_")),
    "trackers": (
        "Metrics, spans and trackers.",
        ("metrics_", "min_items_sent_", "num_rollouts_", "otel_", "tracker_", "use_trackio", "use_wandb", "wandb_"),
    ),
}  # fmt: skip
"""The settings that `--help-all` lists only by the name of their topic: what they are for, and how they begin."""

_WIDTH = 118

_SAID_BY_COMMAND: Mapping[str, Mapping[str, JSON]] = {
    "process": {"ensure_scores_are_not_same": False, "include_messages": True},
    "evaluate": {"ensure_scores_are_not_same": False},
}
"""Defaults that depend on the command. `ensure_scores_are_not_same` is for runs that feed a trainer, which learns
nothing from equal scores."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to `--help` or `--show-config`: write it to stdout and exit with code 0."""

    text: str


@dataclass(frozen=True, slots=True)
class Parsed(Generic[EnvT_co, ServerT_co]):
    """A command line that can be run. `sources` maps `env.group_size` or `openai.base_url` to the source of the value.
    `notices` are sentences for stderr about settings whose value was replaced."""

    command: str
    env_config: EnvT_co
    server_configs: list[ServerT_co]
    policy: str | None = None
    resume: Path | None = None
    slurm: bool = False
    testing: bool = False
    dry_run: bool = False
    as_json: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandLine(Generic[EnvT_co, ServerT_co]):
    """Parses the command line of one environment. `env_values` and `server_values` (one mapping per server) come from
    the environment's `config_init` (see `set_fields`). `command` is the default command; if it is None, the line must
    name one."""

    prog: str
    env_type: type[EnvT_co]
    server_type: type[ServerT_co]
    env_values: Mapping[str, JSON] = field(default_factory=dict)
    server_values: Sequence[Mapping[str, JSON]] = ()
    command: str | None = None
    about: str = ""
    examples: str = ""
    """What the help has in place of the examples of a run; then it describes a program that is no environment."""
    unread: Collection[str] = ()
    """The settings that the program does not read, so that the help leaves them out."""

    def parse(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str] | None = None,
        dotenv: Mapping[str, str] | None = None,
        recorded: Mapping[str, JSON] | None = None,
    ) -> Parsed[EnvT_co, ServerT_co] | Answer:
        """Parse `argv` (without the program's name), with the process's variables and those of a `.env` file, which
        rank lower. The settings of a `recorded` run rank between variables and flags. Raises `ConfigError`."""
        command, flags = self._split_words(argv)
        if any(written in ("--help", "-h", "--help-all") for written, _ in flags):
            named = [word for written, words in flags if written == "--help-all" for word in words]
            if named:
                return Answer("\n".join(_help_of(self, word) for word in named))
            return Answer(_usage(self, everything=any(written == "--help-all" for written, _ in flags)))
        given = _Given()
        if recorded is not None:
            own_servers = said_settings(recorded, "openai", (*UNSAID, DOTENV))  # the file is read again with its key
            given.recorded = (
                _known_here(said_settings(recorded, "env"), self.env_type), _known_here(own_servers, self.server_type)
            )  # fmt: skip
        for written, words in flags:
            self._take_flag(given, written, words)
        env, servers, replaced = self._merge(command, given, environ, dotenv)
        if given.show_config:
            return Answer(_merged(env, servers))
        return self._parsed(command, given, env, servers, replaced)

    def check_flags(self, argv: Sequence[str]) -> None:
        """Raise `ConfigError` for an unknown flag in `argv`, unless `argv` requests help. This check does not need the
        environment's own values."""
        flags = [written for written, _ in self._split_words(argv)[1]]
        if {"--help", "-h", "--help-all"}.isdisjoint(flags):
            for written in flags:
                if written not in _OWN:
                    self._setting(written)

    def take(
        self,
        command: str,
        arguments: Mapping[str, JSON],
        environ: Mapping[str, str] | None = None,
        dotenv: Mapping[str, str] | None = None,
    ) -> Parsed[EnvT_co, ServerT_co]:
        """Do what `parse` does, for the arguments of a Python call. An argument has the name of a setting or a short
        name from `ARGUMENTS`, or is `policy`, `resume`, `failed_of` or `config` (YAML files). An argument that is None
        is not set. Raises `ConfigError`."""
        given = _Given(source=ARGUMENT)
        for written, value in arguments.items():
            if value is None:
                continue
            match written:
                case "policy":
                    given.policy = str(value)
                case "resume":
                    given.resume = Path(value)
                case "failed_of":
                    given.choose(_failed_of(value), written)
                case "config":
                    given.files += [
                        read_file(Path(path)) for path in ([value] if isinstance(value, str | Path) else value)
                    ]
                case _:
                    self._set_argument(given, written, value)
        env, servers, replaced = self._merge(command, given, environ, dotenv)
        return self._parsed(command, given, env, servers, replaced)

    def _set_argument(self, given: _Given, written: str, value: JSON) -> None:
        name = ARGUMENTS.get(written, written)
        if name in self.server_type.model_fields or find_setting(self.env_type, name) is not None:
            group = "openai" if find_setting(self.env_type, name) is None else "env"
            given.values[group][name], given.spelled[group][name] = value, written
            return
        if is_old(self.env_type, name) or name in part_points(self.env_type):
            given.values["env"] |= flat_settings(self.env_type, {name: value})
            return
        known = (
            "policy",
            "resume",
            "failed_of",
            "config",
            *ARGUMENTS,
            *all_settings(self.env_type),
            *self.server_type.model_fields,
        )
        raise ConfigError(f"unknown argument {written}.{nearest(written, known)}")

    def _merge(
        self, command: str, given: _Given, environ: Mapping[str, str] | None, dotenv: Mapping[str, str] | None
    ) -> tuple[Merged[EnvT_co], list[Merged[ServerT_co]], list[str]]:
        """Merge the settings of the environment and of the servers. Returns both, with notices about values that were
        replaced."""
        # In this order, because later layers have precedence.
        variables = ((DOTENV, dotenv or {}), (ENVIRONMENT, environ or {}))
        env = merge(self.env_type, self._env_layers(command, given, variables))
        layers = ([_with_key(layer, variables) for layer in each] for each in self._server_layers(given, variables))
        servers = [merge(self.server_type, _own_address(each)) for each in layers]
        replaced = [*_known_parser(env, "tool_call_parser")]
        replaced += (notice for server in servers for notice in _known_parser(server, "tool_parser"))
        return env, servers, replaced

    def _split_words(self, argv: Sequence[str]) -> tuple[str, list[tuple[str, list[str]]]]:
        """Split the words into the command and the flags, each as written with the words that follow it."""
        rest = list(argv)
        command = self.command
        if rest and not is_flag(rest[0]):
            command = rest.pop(0)
        flags: list[tuple[str, list[str]]] = []
        for word in rest:
            if is_flag(word):
                written, equals, value = word.partition("=")
                flags.append((written, [value] if equals else []))
            # A flag takes all words up to the next flag, so that lists need no repeated flag.
            elif flags:
                flags[-1][1].append(word)
            else:
                raise ConfigError(f"unexpected word {word!r} after {command}; settings start with --")
        if any(written in ("--help", "-h", "--help-all") for written, _ in flags):
            return command or "", flags
        if command is None or command not in COMMANDS:
            problem = "no command was given" if command is None else f"unknown command {command!r}"
            raise ConfigError(f"{problem}; use process, evaluate or serve.{nearest(command or '', COMMANDS)}")
        return command, flags

    def _take_flag(self, given: _Given, written: str, words: list[str]) -> None:
        match written:
            case "--show-config":
                given.show_config = bool(self._read_value(bool, written, words))
            case "--slurm" | "--testing" | "--dry-run" | "--json":
                given.switches[written[2:]] = bool(self._read_value(bool, written, words))
            case "--config":
                given.files += [read_file(Path(word)) for word in words or [self._read_value(str, written, words)]]
            case "--mcp" if "mcp_servers" in self.env_type.model_fields:
                annotation = self.env_type.model_fields["mcp_servers"].annotation
                for word in words or [self._read_value(str, written, words)]:
                    given.add("env", "mcp_servers", read_servers(Path(word)), written, annotation)
            case "--policy":
                given.policy = self._read_value(str, written, words)
            case "--resume":
                given.resume = Path(self._read_value(str, written, words))
            case "--failed-of":
                given.choose(_failed_of(self._read_value(str, written, words)), written)
            case _:
                # Before the value is read, because an error message about it would show it.
                if is_secret(written.replace("-", "_")):
                    _hide_secret(written, words)
                self._set(given, written, words)

    def _set(self, given: _Given, written: str, words: list[str]) -> None:
        """Add a flag that sets a field. The flag is dotted (`--env.FIELD`) or in its short form."""
        group, name, rest, annotation = self._setting(written)
        dot = "." if rest is not None else ""
        if dot and not takes_mapping(annotation):
            raise ConfigError(f"{written}: {group}.{name} is not a mapping, so it has no keys to set")
        key, entry = name + dot + (rest or ""), str if holds_texts(annotation) else JSON
        value = self._read_value(entry if dot else annotation, written, words)
        if written == "--backend" and written in given.spelled["env"].values():
            value = f"{given.values['env'][key]} {value}"  # a repeated `--backend` adds a backend
        given.add(group, key, value, written, annotation)

    def _setting(self, written: str) -> tuple[str, str, str | None, Annotation]:
        """Return the setting that a flag sets: its group, its name, the key if the flag names an entry of a mapping,
        and the setting's type."""
        group, name, rest, found = self._found(written)
        if found is not None:
            return group, name, rest, found.annotation
        if group == "env" and is_old(self.env_type, name):
            return group, name, rest, JSON
        raise ConfigError(f"unknown flag {written}.{_nearest_flag(written, self.known_flags())}")

    def _found(self, written: str) -> tuple[str, str, str | None, FieldInfo | None]:
        """Do what `_setting` does, with the setting itself; None if there is none."""
        group, _, key = SHORT_FORMS.get(written, written.removeprefix("--")).partition(".")
        model_type = self.server_type if group == "openai" else self.env_type
        if group not in ("env", "openai") and key and group in part_points(self.env_type):
            group, key = "env", f"{group}.{key}"
        name, dot, rest = flat_key(model_type, key).partition(".")
        # Both `--env.group-size` and `--env.group_size` are common spellings.
        name = name if name in model_type.model_fields else name.replace("-", "_")
        found = find_setting(model_type, name) if group in ("env", "openai") else None
        return group, name, rest if dot else None, found

    def _read_value(self, annotation: Annotation, written: str, words: Sequence[str]) -> JSON:
        try:
            return read_words(annotation, words)
        except ValueError as error:
            meant = next((word for word in words[1:] if re.fullmatch(r"-[A-Za-z]\w*", word)), None)
            if meant is not None:
                raise ConfigError(f"unknown flag {meant}; flags begin with two dashes") from None
            if words and words[-1] in COMMANDS:
                raise ConfigError(f"{words[-1]} is a command; write it before the settings") from None
            raise ConfigError(f"{written}: {error}") from None

    def known_flags(self) -> Iterator[str]:
        yield from GENERAL_FLAGS
        yield from (f"--env.{name}" for name in all_settings(self.env_type))
        yield from (f"--openai.{name}" for name in self.server_type.model_fields)

    def about_flag(self, written: str) -> str:
        """Return the description of the setting that a flag sets; empty for other flags."""
        found = self._field(written)
        return found.description or "" if found is not None else ""

    def choices(self, written: str) -> list[str]:
        """Return the allowed values of a flag whose setting has a fixed list of values; empty for other flags."""
        found = self._field(written)
        return [each for each in choices(found.annotation) if each not in _not_offered(found)] if found else []

    def _field(self, written: str) -> FieldInfo | None:
        return self._found(written)[-1]

    def _env_layers(self, command: str, given: _Given, variables: Variables) -> Iterator[ConfigLayer]:
        fields = self.env_type.model_fields
        yield ConfigLayer("config_init", self.env_values)
        if said := _SAID_BY_COMMAND.get(command):
            yield ConfigLayer(command, {name: value for name, value in said.items() if name in fields})
        dotenv, environ = (read_environ(values, "env", self.env_type, where) for where, values in variables)
        yield dotenv
        yield from (file.env for file in given.files)
        yield environ
        yield ConfigLayer(RECORDED, given.recorded[0])
        yield ConfigLayer(given.source, given.values["env"], given.spelled["env"])

    def _server_layers(self, given: _Given, variables: Variables) -> list[list[ConfigLayer]]:
        """Return the layers of each server. Only the first server remains if a policy is given, or if a variable, a
        flag or the recorded run sets an address."""
        lowest = [read_openai_variables(values, self.server_type, where) for where, values in variables]
        dotenv, environ = (read_environ(values, "openai", self.server_type, where) for where, values in variables)
        servers = [[*lowest, ConfigLayer("config_init", values), dotenv] for values in self.server_values]
        lowest.append(dotenv)
        servers = servers[: 1 if "base_url" in dotenv.values else None] or [lowest]
        for file in given.files:
            if file.shared:
                servers = [[*layers, *file.servers] for layers in servers]
            else:
                lower = [*servers, *[lowest] * len(file.servers)]
                # The list in the file decides how many servers there are. Further ones begin without the values of a
                # script.
                servers = [[*layers, own] for layers, own in zip(lower, file.servers, strict=False)]
        flags = ConfigLayer(given.source, given.values["openai"], given.spelled["openai"])
        top = [environ, ConfigLayer(RECORDED, _recorded_server(given.recorded[1], flags)), flags]
        if given.policy is not None:
            top.append(_scripted_layer(given.policy, flags))
        if given.policy is not None or any("base_url" in layer.values for layer in top):
            servers = servers[:1]
        return [[*layers, *top] for layers in servers]

    def _parsed(
        self,
        command: str,
        given: _Given,
        env: Merged[EnvT_co],
        servers: list[Merged[ServerT_co]],
        replaced: Sequence[str],
    ) -> Parsed[EnvT_co, ServerT_co]:
        sources = {f"env.{name}": source for name, source in env.sources.items()}
        for index, server in enumerate(servers):
            group = "openai" if len(servers) == 1 else f"openai[{index}]"
            sources |= {f"{group}.{name}": source for name, source in server.sources.items()}
        switches = {key: value for file in given.files for key, value in file.switches.items()} | given.switches
        return Parsed(
            command=command,
            env_config=env.value,
            server_configs=[server.value for server in servers],
            policy=given.policy,
            resume=given.resume,
            slurm=switches.get("slurm", False),
            testing=switches.get("testing", False),
            dry_run=switches.get("dry-run", False),
            as_json=switches.get("json", False),
            sources=sources,
            notices=tuple(replaced),
        )


@dataclass(slots=True)
class _Given:
    """The flags read so far."""

    values: dict[str, dict[str, JSON]] = field(default_factory=lambda: {"env": {}, "openai": {}})
    spelled: dict[str, dict[str, str]] = field(default_factory=lambda: {"env": {}, "openai": {}})
    files: list[FileSettings] = field(default_factory=list)
    switches: dict[str, bool] = field(default_factory=dict)
    policy: str | None = None
    resume: Path | None = None
    show_config: bool = False
    source: str = COMMAND_LINE
    recorded: tuple[Mapping[str, JSON], Mapping[str, JSON]] = field(default_factory=lambda: ({}, {}))
    """The recorded run's settings of its environment and of its server."""

    def choose(self, tasks: Sequence[str], written: str) -> None:
        """Add tasks by their ids to the chosen ones."""
        self.add("env", "only_tasks", [*tasks], written, list[str])

    def add(self, group: str, key: str, value: JSON, written: str, annotation: Annotation) -> None:
        target = self.values[group]
        target[key] = _merged_values(target.get(key), value, annotation)
        self.spelled[group][key] = self.spelled[group][key.partition(".")[0]] = written


def _with_key(layer: ConfigLayer, variables: Variables) -> ConfigLayer:
    """Return the layer with the key that its `api_key_variable` names, so that the two have the same precedence. Raises
    `ConfigError` if the variable is not set. A recorded run then has no key, because only a resumed run needs one."""
    if "api_key_variable" not in layer.values or "api_key" in layer.values:
        return layer
    name = layer.values["api_key_variable"]  # None for `none`
    key = next((values[name] for _, values in reversed(variables) if values.get(name)), None)
    if key is None and name is not None and layer.name != RECORDED:
        raise ConfigError(f"openai.api_key_variable is {name}, but this variable is not set ({layer.name})")
    return replace(layer, values={**layer.values, "api_key": key})


def _own_address(layers: Sequence[ConfigLayer]) -> Sequence[ConfigLayer]:
    """Leave out the address that `.env` gives if another source gives the key: a folder's file never decides where a
    key of the user is sent."""
    sources = {name: layer.name for layer in layers for name in layer.values}
    if sources.get("base_url") != DOTENV or sources.get("api_key") == DOTENV:
        return layers
    logger.warning(
        "the address in .env is ignored, because the key comes from: %s. Give the address there, too",
        sources.get("api_key", "none"),
    )
    return [
        each if each.name != DOTENV else replace(each, values={k: v for k, v in each.values.items() if k != "base_url"})
        for each in layers
    ]


def said_settings(recorded: Mapping[str, JSON], group: str, unsaid: Sequence[str] = UNSAID) -> dict[str, JSON]:
    """Return the recorded settings of the environment (`env`) or of the server (`openai`) whose source is not in
    `unsaid`, without secrets. If the run had several servers, there are no settings of `openai`."""
    sources, values = recorded.get("sources") or {}, recorded.get(group) or {}
    if isinstance(values, list):
        values = values[0] if len(values) == 1 else {}
    return {
        name: value
        for name, value in values.items()
        if sources.get(f"{group}.{name}", DEFAULT) not in unsaid and not is_secret(name)
    }


def set_fields(config: BaseModel) -> dict[str, JSON]:
    """Return the fields that were set when `config` was made. Use this for `env_values` and `server_values`."""
    return {name: getattr(config, name) for name in config.model_fields_set}


def _known_here(recorded: Mapping[str, JSON], model_type: type[BaseModel]) -> dict[str, JSON]:
    """Return the recorded settings that this version has. A warning names the others: an earlier version made the
    run."""
    if gone := sorted(name for name in recorded if find_setting(model_type, name) is None):
        logger.warning("settings of the recorded run that this version does not have: %s", ", ".join(gone))
    return {name: value for name, value in recorded.items() if name not in gone}


def _known_parser(config: Merged[BaseModel], field_name: str) -> Iterator[str]:
    """If a script names an unknown tool-call parser, use `hermes` instead and yield a notice. Raises `ConfigError` for
    an unknown parser that a user names."""
    source = config.sources.get(field_name, DEFAULT)
    name = getattr(config.value, field_name, "none")
    if source == DEFAULT or name in ("hermes", "none"):
        return
    from palaestra_tokens.parsers import list_parsers  # imported here, because most runs name no parser

    if name in list_parsers():
        return
    problem = f"{field_name} {name!r} ({source}) is not a tool-call parser.{nearest(name, list_parsers())}"
    if source != "config_init":
        raise ConfigError(f"{problem} Known: {', '.join(list_parsers())}")
    setattr(config.value, field_name, "hermes")
    yield f"{problem} hermes is used instead"


def _hide_secret(written: str, words: Sequence[str]) -> None:
    """Keep a secret out of the run's record. Other users of this machine see it in the list of processes."""
    if words:
        logger.warning(_ON_COMMAND_LINE, written)
    for word in words:
        hide(word)


def _recorded_server(recorded: Mapping[str, JSON], flags: ConfigLayer) -> Mapping[str, JSON]:
    """Return the settings of a recorded server that count beside the flags. An address takes the place of a scripted
    policy, whose name is no model's."""
    is_replaced = recorded.get("server_type") == "scripted" and "base_url" in flags.values
    return {} if is_replaced else recorded


def _scripted_layer(policy: str, flags: ConfigLayer) -> ConfigLayer:
    clash = {"server_type", "model_name", "base_url"} & flags.values.keys()
    if clash:
        flag = "policy" if flags.name == ARGUMENT else "--policy"
        raise ConfigError(f"{flag} and {flags.spelled[min(clash)]} are mutually exclusive")
    scripted = {"server_type": "scripted", "model_name": _with_run(policy)}
    return ConfigLayer(flags.name, scripted, dict.fromkeys(scripted, "--policy"))


def _with_run(policy: str) -> str:
    """Return the policy. In `replay:RUN`, a run's id or `last` is replaced by the path of that run's journal."""
    name, _, run = policy.partition(":")
    if name == "replay" and run and not local_path(run).exists():
        from palaestra.rollouts.journal.reader import journal_of  # imported here, because most policies replay nothing

        with contextlib.suppress(ConfigError):  # the policy reports a missing file
            return f"replay:{journal_of(run)}"
    return policy


def _failed_of(run: str | Path) -> list[str]:
    """Return the ids of the tasks of a run that earned less than the full reward, or have no score, none of them as a
    pattern."""
    from palaestra.rollouts.finished_run import open_run  # imported here, because most runs choose no tasks
    from palaestra.rollouts.schedule import escaped

    if failed := open_run(run).failed_tasks():
        return [escaped(each) for each in failed]
    raise ConfigError(f"every rollout of {run} earned the full reward, so no task of it has failed (--failed-of)")


def first_word(words: Sequence[str], name: str) -> tuple[str, list[str]]:
    """Return the first word that is neither a flag nor a flag's value, and the other words, because settings may also
    come before ENV or RUN. Before that word, a flag takes one value and a switch none. Raises `ConfigError` if there is
    no such word."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 1 if "=" in words[place] or words[place] in SWITCHES else 2
    if place >= len(words):
        raise ConfigError(f"Missing argument {name!r}")
    before, after = list(words[:place]), list(words[place + 1 :])
    return words[place], [*after, *before]


def check_general_flags(argv: Sequence[str]) -> None:
    """Raise `ConfigError` for a flag that looks like a misspelling of one that every environment has. The check does
    not load the environment, because that may take long."""
    general, written = GENERAL_FLAGS, {word.partition("=")[0] for word in argv if is_flag(word)}
    if not written.isdisjoint(("--help", "-h", "--help-all")):
        return
    for flag in sorted(written.difference(general)):
        if "." not in flag and (hint := _nearest_flag(flag, general)):
            raise ConfigError(f"unknown flag {flag}.{hint}")


def _nearest_flag(written: str, known: Iterable[str]) -> str:
    """Return the suggestion that ends a message about an unknown flag: Palaestra's flag with the same meaning if other
    programs have this flag, otherwise the nearest flag, if any is near."""
    meant = _OTHER_WORDS.get(written)
    return f" Did you mean {meant}?" if meant is not None else nearest(written, known)


def is_flag(word: str) -> bool:
    """Return whether the word is a flag: `--name…`, `-h`, `-m` or `-o`. `-1` and `- text` are values."""
    return word in ("-h", "-m", "-o") or re.match(r"--[A-Za-z]", word) is not None


def has_settings(word: str) -> bool:
    """Return whether a word is a name with settings after it, such as `"my_env.py --env.n 20"`."""
    try:
        return any(map(is_flag, shlex.split(word)[1:]))
    except ValueError:
        return False


def flags_of(words: Sequence[str]) -> list[list[str]]:
    """Return each flag of a command line with the words that follow it."""
    flags: list[list[str]] = []
    for word in words:
        if is_flag(word) or not flags:
            flags.append([])
        flags[-1].append(word)
    return flags


def setting_of(flag: str) -> str:
    """Return the setting that a flag sets, such as `env.seed`, without the key of an entry. The environment may not
    have this setting."""
    group, _, name = SHORT_FORMS.get(flag, flag.removeprefix("--")).partition(".")
    if name and group not in ("env", "openai"):
        group, name = "env", f"{group}.{name}"
    name = flat_key(HermesAgentEnvConfig, name) if group == "env" else name
    return f"{group}.{name.partition('.')[0].replace('-', '_')}" if name else flag


def _merged_values(old: JSON, new: JSON, annotation: Annotation) -> JSON:
    """Join lists and mappings of repeated flags; for other types, the last value wins."""
    if takes_sequence(annotation) and isinstance(old, list) and isinstance(new, list):
        return old + new
    if takes_mapping(annotation) and isinstance(old, dict) and isinstance(new, dict):
        return old | new
    return new


def _usage(line: CommandLine[BaseModel, BaseModel], *, everything: bool) -> str:
    """Return the help text: examples, then the environment's own fields, then the common fields or, if `everything`,
    all fields."""
    run = line.prog if line.command else f"{line.prog} process"
    parts = [
        f"usage: {line.prog} {'[process|evaluate|serve]' if line.command else 'process|evaluate|serve'} "
        "[--env.FIELD VALUE] [--openai.FIELD VALUE] [--config FILE.yaml]",
        *([line.about.strip().splitlines()[0]] if line.about.strip() else []),
        "",
        f"  {run} --policy oracle --tasks 2 --group 4          # play the reference solutions",
        f"  {run} --base-url http://localhost:8000/v1 --model NAME   # sample from a model server",
        f"  {run} --config run.yaml --show-config              # print every setting with its source",
        f"  {run} … --dry-run                                  # print what would run; writes nothing",
        "",
        "  process writes groups of rollouts; evaluate scores once and reports; serve feeds a trainer.",
        "  Short: --policy oracle|noop|patch:FILE|replay:RUN  --model  --base-url  --config FILE  --resume RUN",
        "         --task ID[,ID|PATTERN] (env.only_tasks)  --failed-of RUN  --tasks (env.total_steps)  -q  -v  --json",
        "         --group (env.group_size)  --concurrency (env.max_num_workers)  --slots (env.slots)  --on (env.on)",
        "         --backend (env.tool_pool_mode)  --mcp FILE (mcp_servers)  --out FILE (env.data_path_to_save_groups)",
        "         --max-cost (env.max_cost)  --max-infra-rate (env.max_infra_rate)  --metrics-port (env.metrics_port)",
        "  Lists: `a b`, `a,b` or JSON. Mappings: `k=v`, JSON or --env.field.key V. A boolean without a value is true.",
    ]
    parts = [line.examples] if line.examples else parts
    for title, fields in _sections(line, everything):
        parts += ["", f"{title}:", *fields]
    if not everything:
        parts += ["", f"  {line.prog} --help-all lists every setting."]
    elif more := _more(line):
        parts += ["", "Further settings; `--help-all NAME` lists them:"]
        parts += [f"  {name:<14} {about}" for name, (about, _) in sorted(more.items())]
    return "\n".join(parts) + "\n"


def _more(line: CommandLine[BaseModel, BaseModel]) -> dict[str, tuple[str, list[str]]]:
    """Return the settings that only `--help-all NAME` lists, by this name, with what they are for: those of topics and
    those of other packages."""
    kind, common = line.env_type, HermesAgentEnvConfig.model_fields
    found = {name: (about, [each for each in common if each.startswith(start)])
             for name, (about, start) in _TOPICS.items()}  # fmt: skip
    parts = {name: part_class(kind, name) for name in part_points(kind)}
    found |= {name: (part.__doc__ or "", [*part.model_fields]) for name, part in parts.items()}
    kept = {
        name: (about, [each for each in names if each not in line.unread and find_setting(kind, each) is not None])
        for name, (about, names) in found.items()
    }
    return {name: each for name, each in kept.items() if each[1]}


def _help_of(line: CommandLine[BaseModel, BaseModel], name: str) -> str:
    """Return the help of the settings of a topic or a package. Raises `ConfigError` for an unknown name."""
    more = _more(line)
    if name not in more:
        raise ConfigError(f"--help-all {name}: there are no settings of this name.{nearest(name, more)}")
    about, names = more[name]
    rows = [_field("env", line.env_type, each, line.env_values.get(each)) for each in names]
    return "\n".join([about, *rows]) + "\n"


def _merged(env: Merged[BaseModel], servers: Sequence[Merged[BaseModel]]) -> str:
    """Return every value with its source, one per line: `env.seed = 4 # command line`. Settings with an own name come
    first, by that name."""
    rows = sorted(_setting_rows("env", env), key=lambda row: row[0].startswith("env."))
    for index, server in enumerate(servers):
        rows += _setting_rows("openai" if len(servers) == 1 else f"openai[{index}]", server)
    width = min(max(len(left) for left, _ in rows), 70)
    return "".join(f"{left:<{width}}  # {source}\n" for left, source in rows)


def _setting_rows(group: str, config: Merged[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, source in config.sources.items():
        own = _own_name(f"{group}.{name}")
        shown = f"{own or f'{group}.{name}'} = {_value_text(name, getattr(config.value, name))}"
        yield shown, f"{source} (env.{name})" if own else source


def _own_name(setting: str) -> str:
    """Return Palaestra's own name of a setting, or an empty text if it has no other name than this."""
    return next((own for own, name in OWN_NAMES.items() if name == setting), "")


def _value_text(name: str, value: JSON) -> str:
    if value and is_secret(name):
        return "(hidden)"
    return redacted(str(getattr(value, "value", value))) if value != "" else '""'


def _sections(line: CommandLine[BaseModel, BaseModel], everything: bool) -> Iterator[tuple[str, list[str]]]:
    env, server = line.env_type, line.server_type
    # What a person most likely looks for comes first: the settings that only this environment has.
    inherited = {*BaseEnvConfig.model_fields, *HermesAgentEnvConfig.model_fields}
    own = [name for name in env.model_fields if name not in inherited]
    here, everywhere = "This environment", "All environments"
    if line.examples:
        here, everywhere = f"Settings of {line.prog}", "Settings of tools and sandboxes"
    if own:
        yield here, [_field("env", env, name, line.env_values.get(name)) for name in own]
    shown = _general(line, own, everything)
    yield everywhere, [_field("env", env, name, line.env_values.get(name)) for name in shown]
    first = line.server_values[0] if line.server_values else {}
    names = [n for n in server.model_fields if everything or n in ("base_url", "model_name", "api_key", "server_type")]
    yield "The model server", [_field("openai", server, name, first.get(name)) for name in names]


def _general(line: CommandLine[BaseModel, BaseModel], own: Sequence[str], everything: bool) -> list[str]:
    """Return the settings of all environments that the help lists: the common ones or, for `everything`, those that
    have no list of their own."""
    rest = [name for name in line.env_type.model_fields if name not in own and name not in line.unread]
    if not everything:
        return [name for name in _COMMON if name in rest]
    elsewhere = {each for _, names in _more(line).values() for each in names}
    return [name for name in rest if name not in elsewhere]


def _not_offered(info: FieldInfo) -> Sequence[JSON]:
    """Return the values of a field that existing scripts may use but that do not work in this version."""
    values = info.json_schema_extra.get("not_offered") if isinstance(info.json_schema_extra, dict) else None
    return values if isinstance(values, list) else []


def _field(group: str, model_type: type[BaseModel], name: str, own_default: JSON) -> str:
    info = find_setting(model_type, name)
    assert info is not None
    default = own_default if own_default is not None else info.get_default(call_default_factory=True)
    shown = "" if default is PydanticUndefined else f" [{_value_text(name, default)}]"
    kinds = [each for each in describe(info.annotation).split("|") if each not in _not_offered(info)]
    own = _own_name(f"{group}.{name}")
    flag = f"{f'--{own}, ' if own else ''}--{group}.{name} {'|'.join(kinds)}"
    text = f"  {flag:<48} {info.description or ''}{shown}"
    return textwrap.fill(text, 160, subsequent_indent=" " * 51, break_long_words=False, break_on_hyphens=False)
