"""Where settings come from besides flags: YAML files and environment variables, as layers to merge.

For: reading them into layers for `env` and `openai`. Not for: the command line itself (`flags`) or the precedence
between layers (`flags.CommandLine.parse`). Invariant: a key that nobody reads is refused where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from palaestra.core.config import ConfigLayer, nearest
from palaestra.core.errors import ConfigError
from palaestra.core.literals import read_words, read_yaml
from palaestra.core.types import JSON
from palaestra.tools.settings import WEB_KEYS, WEB_URLS

_TOP_KEYS = ("env", "openai", "slurm", "testing")

_CONTRACT_VARIABLES = {
    "ATROPOS_SERVER_BASE_URL": "base_url",
    "ATROPOS_SERVER_MODEL": "model_name",
    "ATROPOS_SERVER_API_KEY": "api_key",
    "ATROPOS_SERVER_TIMEOUT_S": "timeout",
    "ATROPOS_TOKENIZER_NAME": "tokenizer_name",
}
"""Names that existing scripts and job files export for the model server."""

_SLOT_VARIABLES = {
    "TERMINAL_ENV": "terminal_backend",
    "TERMINAL_TIMEOUT": "terminal_timeout",
    "TERMINAL_LIFETIME_SECONDS": "terminal_lifetime",
    "TERMINAL_SLOT_BACKEND": "tool_pool_mode",
    "TERMINAL_SLOT_APP_NAME": "modal_app_name",
    "TERMINAL_MODAL_IMAGE": "modal_image",
    "TERMINAL_MODAL_SLOTS": "modal_slots_per_sandbox",
    "TERMINAL_MODAL_MIN": "modal_min_sandboxes",
    "TERMINAL_MODAL_MAX": "modal_max_sandboxes",
    "TERMINAL_MODAL_IDLE_TIMEOUT": "modal_idle_timeout",
    "TERMINAL_MODAL_MAX_LIFETIME": "modal_max_lifetime",
    "TERMINAL_MODAL_ACQUIRE_TIMEOUT": "modal_acquire_timeout",
    "TERMINAL_MODAL_EXEC_TIMEOUT": "modal_execution_timeout",
    "TERMINAL_MODAL_WORKSPACE": "modal_workspace_base",
    "TERMINAL_MODAL_GPU": "modal_gpu",
    "TERMINAL_MODAL_CPU": "modal_cpu",
    "TERMINAL_MODAL_MEMORY": "modal_memory",
    "TERMINAL_NOMAD_ADDRESS": "nomad_address",
    "TERMINAL_NOMAD_IMAGE": "sandbox_image",
    "TERMINAL_NOMAD_DRIVER": "driver",
    "TERMINAL_NOMAD_SLOTS": "slots_per_container",
    "TERMINAL_NOMAD_MIN": "min_containers",
    "TERMINAL_NOMAD_MAX": "max_containers",
    "TERMINAL_NOMAD_JOB_ID": "sandbox_job_id",
}
"""Names that they export for slots."""

_SLOT_POOL = ("TERMINAL_ENV", "slot_pool")
"""Says that TERMINAL_SLOT_BACKEND decides, and nothing by itself."""

_PROVIDERS = {variable: f"web_api_keys.{name}" for name, variable in WEB_KEYS.items()} | {
    variable: f"web_urls.{name}" for name, variable in WEB_URLS.items()
}
"""Names under which users of these providers have their keys already."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """One configuration file. `servers` has one layer for a mapping (`shared`), or one per entry for a list."""

    env: ConfigLayer
    servers: tuple[ConfigLayer, ...] = ()
    shared: bool = True
    switches: Mapping[str, bool] = field(default_factory=dict)


def read_file(path: Path) -> FileSettings:
    """Read a YAML file with the keys env, openai, slurm and testing. Raises `ConfigError`."""
    content = _load(path)
    for key in content:
        if key not in _TOP_KEYS:
            raise ConfigError(f"{path}: unknown key {key}; known are {', '.join(_TOP_KEYS)}.{nearest(key, _TOP_KEYS)}")
    servers = content.get("openai") or {}
    shared = not isinstance(servers, list)
    entries = [servers] if shared else servers
    switches = {key: content[key] for key in ("slurm", "testing") if content.get(key) is not None}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} must be true or false, not {value!r}")
    return FileSettings(
        env=_layer(path, "env", content.get("env") or {}),
        servers=tuple(_layer(path, "openai", entry) for entry in entries),
        shared=shared,
        switches=switches,
    )


def read_environ(
    environ: Mapping[str, str], prefix: str, model_type: type[BaseModel], where: str = "environment"
) -> ConfigLayer:
    """The layer of `PALAESTRA_<PREFIX>_<FIELD>` variables and of the contract's; `env` also has the keys of web
    providers. `where` is where the variables stand. Raises `ConfigError`."""
    start = f"PALAESTRA_{prefix.upper()}_"
    named = _known(_CONTRACT_VARIABLES if prefix == "openai" else _SLOT_VARIABLES | _PROVIDERS, model_type)
    if environ.get(_SLOT_POOL[0]) == _SLOT_POOL[1]:
        named.pop(_SLOT_POOL[0], None)
    named |= {variable: variable.removeprefix(start).lower() for variable in environ if variable.startswith(start)}
    values: dict[str, JSON] = {}
    spelled: dict[str, str] = {}
    for variable, name in named.items():
        if not environ.get(variable):
            continue
        field_name, _, entry = name.partition(".")
        if field_name not in model_type.model_fields:
            known = [start + known_name.upper() for known_name in model_type.model_fields]
            raise ConfigError(f"{where}: {variable} sets nothing.{nearest(variable, known)}")
        try:
            annotation = model_type.model_fields[field_name].annotation
            values[name] = environ[variable] if entry else read_words(annotation, [environ[variable]])
        except ValueError as error:
            raise ConfigError(f"{where}: {variable}: {error}") from None
        spelled[name] = variable
    return ConfigLayer(where, values, spelled)


def _known(named: Mapping[str, str], model_type: type[BaseModel]) -> dict[str, str]:
    """Those of the names whose field this configuration has."""
    return {each: name for each, name in named.items() if name.partition(".")[0] in model_type.model_fields}


def _load(path: Path) -> dict[str, JSON]:
    try:
        text = path.read_text(encoding="utf-8")
        content = read_yaml(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if (twice := _twice(text)) is not None:
        raise ConfigError(f"{path}: line {twice[1]}: {twice[0]} is there a second time, and the first would not count")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: expected a mapping with the keys {', '.join(_TOP_KEYS)}")
    return content


def _twice(text: str) -> tuple[str, int] | None:
    """The first key of a YAML document that its mapping has already, and its line."""
    import yaml  # here, because most runs have no file

    nodes, known = [yaml.compose(text, yaml.SafeLoader)], set()
    while nodes:
        node = nodes.pop(0)
        if id(node) in known or not isinstance(node, yaml.CollectionNode):
            continue
        known.add(id(node))  # an alias may lead back to it
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
            continue
        names: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in names:
                return name, key.start_mark.line + 1
            names.add(name)
            nodes.append(value)
    return None


def _layer(path: Path, key: str, values: JSON) -> ConfigLayer:
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {key} must be a mapping, not {type(values).__name__}")
    for name in values:
        if not isinstance(name, str) or "." in name:
            raise ConfigError(f"{path}: {name!r} under {key} is not the name of a setting")
    return ConfigLayer(str(path), values, {name: f"{key}.{name}" for name in values})
