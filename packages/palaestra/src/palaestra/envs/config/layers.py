"""Reads settings from YAML files and environment variables as layers to merge, and parses values.

A word is parsed according to the type of its field, so a text field can hold `5`, `true` or `-x`.
`palaestra_slots.core.config.merge` validates ranges and required keys. An unknown key is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel

from palaestra.tools.settings import WEB_KEYS, WEB_URLS
from palaestra_slots.core.config import (
    OWN_NAMES,
    ConfigLayer,
    all_settings,
    find_setting,
    is_old,
    nearest,
    read_yaml,
)
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

Annotation: TypeAlias = Any
"""A type in an annotation: a class, a union, or a generic. Python has no common type for these."""

_YES = frozenset({"true", "1", "yes", "y", "on", "t"})
_NO = frozenset({"false", "0", "no", "n", "off", "f"})
_NONE = frozenset({"none", "null"})
_SEQUENCES = (list, tuple, set, frozenset, Sequence)
_MAPPINGS = (dict, Mapping)

_TOP_KEYS = ("env", "openai", "slurm", "testing")

ENVIRONMENT = "environment"
"""The source of a setting that a variable of the process gives."""

_CONTRACT_VARIABLES = {
    "ATROPOS_SERVER_BASE_URL": "base_url",
    "ATROPOS_SERVER_MODEL": "model_name",
    "ATROPOS_SERVER_API_KEY": "api_key",
    "ATROPOS_SERVER_TIMEOUT_S": "timeout",
    "ATROPOS_TOKENIZER_NAME": "tokenizer_name",
}
"""Names that existing scripts and job files export for the model server."""

_OPENAI_VARIABLES = {"OPENAI_API_KEY": "api_key", "OPENAI_BASE_URL": "base_url"}
"""The variables of OpenAI's own client. As in that client, they apply only where nothing else sets a value."""

_SLOT_VARIABLES = {
    "TERMINAL_ENV": "terminal_backend",
    "TERMINAL_TIMEOUT": "terminal_timeout",
    "TERMINAL_LIFETIME_SECONDS": "terminal_lifetime",
    "TERMINAL_CWD": "terminal_cwd",
    "TERMINAL_DOCKER_IMAGE": "docker_image",
    "TERMINAL_SINGULARITY_IMAGE": "singularity_image",
    "TERMINAL_SSH_HOST": "ssh_hosts",
    "TERMINAL_SSH_USER": "ssh_user",
    "TERMINAL_SSH_PORT": "ssh_port",
    "TERMINAL_SSH_KEY": "ssh_key",
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
    "TERMINAL_MODAL_GPU": "modal_gpu",
    "TERMINAL_MODAL_CPU": "modal_cpu",
    "TERMINAL_MODAL_MEMORY": "modal_memory",
    "NOMAD_ADDR": "nomad_address",
    "TERMINAL_NOMAD_ADDRESS": "nomad_address",
    "TERMINAL_NOMAD_IMAGE": "sandbox_image",
    "TERMINAL_NOMAD_DRIVER": "driver",
    "TERMINAL_NOMAD_SLOTS": "slots_per_container",
    "TERMINAL_NOMAD_MIN": "min_containers",
    "TERMINAL_NOMAD_MAX": "max_containers",
    "NOMAD_TOKEN": "nomad_token",
    "NOMAD_NAMESPACE": "nomad_namespace",
    "NOMAD_REGION": "nomad_region",
    "NOMAD_CACERT": "nomad_ca_cert",
    "NOMAD_CLIENT_CERT": "nomad_client_cert",
    "NOMAD_CLIENT_KEY": "nomad_client_key",
    "NOMAD_TLS_SERVER_NAME": "nomad_tls_server_name",
    "TERMINAL_NOMAD_JOB_ID": "sandbox_job_id",
    "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "allow_placeholder_tokens",
}
"""Names that existing scripts and job files export for an environment, mostly for its slots. Some name settings that
have no effect here, which a warning says (`is_old`)."""

_SLOT_POOL = ("TERMINAL_ENV", "slot_pool")
"""If this variable has this value, TERMINAL_SLOT_BACKEND names the backend."""

_PROVIDERS = {variable: f"web_api_keys.{name}" for name, variable in WEB_KEYS.items()} | {
    variable: f"web_urls.{name}" for name, variable in WEB_URLS.items()
}
"""The variables in which users of web providers usually keep the keys and the addresses of these providers."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """One configuration file. `servers` has one layer if the file gives a mapping (then `shared` is true), or one layer
    for each entry of a list."""

    env: ConfigLayer
    servers: tuple[ConfigLayer, ...] = ()
    shared: bool = True
    switches: Mapping[str, bool] = field(default_factory=dict)


def read_file(path: Path) -> FileSettings:
    """Read a YAML file with the keys env, openai, slurm and testing, and with settings by their own names
    (`OWN_NAMES`). Raises `ConfigError`."""
    content = _read_settings(path)
    known = (*_TOP_KEYS, *OWN_NAMES)
    for key in content:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}; known keys are {', '.join(known)}.{nearest(key, known)}")
    servers = content.get("openai") or {}
    shared = not isinstance(servers, list)
    entries = [servers] if shared else servers
    switches = {key: content[key] for key in ("slurm", "testing") if content.get(key) is not None}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} must be true or false, not {value!r}")
    return FileSettings(
        env=_with_own_names(path, _layer(path, "env", content.get("env") or {}), content),
        servers=tuple(_layer(path, "openai", entry) for entry in entries),
        shared=shared,
        switches=switches,
    )


def read_openai_variables(environ: Mapping[str, str], model_type: type[BaseModel], where: str) -> ConfigLayer:
    """Return a layer with the variables that OpenAI's own client reads."""
    named = {
        name: variable
        for variable, name in _known_settings(_OPENAI_VARIABLES, model_type).items()
        if environ.get(variable)
    }
    return ConfigLayer(where, {name: environ[variable] for name, variable in named.items()}, named)


def read_environ(
    environ: Mapping[str, str], prefix: str, model_type: type[BaseModel], where: str = ENVIRONMENT
) -> ConfigLayer:
    """Return a layer with the `PALAESTRA_<PREFIX>_<FIELD>` variables and the variables that existing scripts export.
    For `env`, the layer includes the API keys and addresses of web providers. `where` names the source. Raises
    `ConfigError`."""
    start = f"PALAESTRA_{prefix.upper()}_"
    exported = _CONTRACT_VARIABLES if prefix == "openai" else _SLOT_VARIABLES | _PROVIDERS
    named = _known_settings(
        {variable: name for variable, name in exported.items() if environ.get(variable)}, model_type
    )
    if environ.get(_SLOT_POOL[0]) == _SLOT_POOL[1]:
        named.pop(_SLOT_POOL[0], None)
    # Added last: of two variables for one setting, the later one counts, which is the one with our name.
    named |= {variable: variable.removeprefix(start).lower() for variable in environ if variable.startswith(start)}
    values: dict[str, JSON] = {}
    spelled: dict[str, str] = {}
    for variable, name in named.items():
        if not environ.get(variable):
            continue
        field_name, _, entry = name.partition(".")
        found = find_setting(model_type, field_name)
        if found is None and is_old(model_type, field_name):
            values[name] = environ[variable]
            continue
        if found is None:
            known = [start + known_name.upper() for known_name in all_settings(model_type)]
            raise ConfigError(f"{where}: {variable} sets nothing.{nearest(variable, known)}")
        try:
            values[name] = environ[variable] if entry else read_words(found.annotation, [environ[variable]])
        except ValueError as error:
            raise ConfigError(f"{where}: {variable}: {error}") from None
        spelled[name] = variable
    return ConfigLayer(where, values, spelled)


def _known_settings(named: Mapping[str, str], model_type: type[BaseModel]) -> dict[str, str]:
    return {
        each: name
        for each, name in named.items()
        if find_setting(model_type, name.partition(".")[0]) is not None or is_old(model_type, name)
    }


def _read_settings(path: Path) -> dict[str, JSON]:
    try:
        text = path.read_text(encoding="utf-8")
        content = read_yaml(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if (twice := _twice(text)) is not None:
        raise ConfigError(
            f"{path}: line {twice[1]}: {twice[0]} is a duplicate key, so its first value would be ignored"
        )
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: expected a mapping with the keys {', '.join(_TOP_KEYS)}")
    return content


def _twice(text: str) -> tuple[str, int] | None:
    """Return the first duplicate key of a YAML document, and its line; None if no key is duplicate."""
    import yaml  # imported here, because most runs have no file

    nodes, known = [yaml.compose(text, yaml.SafeLoader)], set()
    while nodes:
        node = nodes.pop(0)
        if id(node) in known or not isinstance(node, yaml.CollectionNode):
            continue
        known.add(id(node))  # an alias may point back to it
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
            raise ConfigError(f"{path}: {name!r} under {key} is not a setting")
    return ConfigLayer(str(path), values, {name: f"{key}.{name}" for name in values})


def _with_own_names(path: Path, env: ConfigLayer, content: Mapping[str, JSON]) -> ConfigLayer:
    """Return the layer with the settings that the file gives by their own names. Raises `ConfigError` for a setting
    that the file gives by both names."""
    own = {OWN_NAMES[key].removeprefix("env."): key for key in content if key in OWN_NAMES}
    for name, key in own.items():
        if name in env.values:
            raise ConfigError(f"{path}: {key} and env.{name} are the same setting; give only one of them")
    values = {name: content[key] for name, key in own.items()}
    return ConfigLayer(env.name, {**env.values, **values}, {**env.spelled, **own})


def read_words(annotation: Annotation, words: Sequence[str]) -> JSON:
    """Parse the value of a field from the `words` after its flag, which may be empty. Raises `ValueError`."""
    kinds = members(annotation)
    is_none = len(words) == 1 and words[0].lower() in _NONE
    if takes_mapping(annotation) and words and not is_none:
        return _read_mapping(words, texts=holds_texts(annotation))
    if takes_sequence(annotation) and not (is_none and type(None) in kinds):
        return _read_sequence(kinds, words)
    if not words:
        if bool in kinds or Any in kinds:
            return True
        raise ValueError(f"needs a value ({describe(annotation)})")
    # Nothing tells text from JSON here, so a word that is JSON counts as JSON.
    if Any in kinds:
        return read_json(words[0]) if len(words) == 1 else [read_json(word) for word in words]
    if len(words) > 1:
        raise ValueError(f"takes one value, got {len(words)}: {' '.join(words)}")
    return _read_scalar(kinds, words[0])


def members(annotation: Annotation) -> list[Annotation]:
    """Return the types of a union, or the one type. `Annotated` and PEP 695 aliases are resolved."""
    origin = _origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in members(part)]
    return [annotation]


def takes_sequence(annotation: Annotation) -> bool:
    """Return whether a field of this type accepts a list, made from the words after its flag."""
    return any((_origin(kind) or kind) in _SEQUENCES for kind in members(annotation))


def takes_mapping(annotation: Annotation) -> bool:
    """Return whether a field of this type accepts a mapping, from `k=v` words or dotted flags."""
    return any((_origin(kind) or kind) in _MAPPINGS for kind in members(annotation))


def holds_texts(annotation: Annotation) -> bool:
    """Return whether a field of this type accepts a mapping whose values are strings."""
    return any((_origin(kind) or kind) in _MAPPINGS and get_args(kind)[1:] == (str,) for kind in members(annotation))


def describe(annotation: Annotation) -> str:
    names = []
    for kind in members(annotation):
        origin = _origin(kind) or kind
        if kind is type(None):
            names.append("None")
        elif origin is Literal:
            names.extend(str(choice) for choice in get_args(kind))
        elif isinstance(kind, type) and issubclass(kind, Enum):
            names.extend(str(member.value) for member in kind)
        elif origin in _SEQUENCES:
            names.append("list")
        elif origin in _MAPPINGS:
            names.append("mapping")
        else:
            names.append({str: "text", Any: "JSON"}.get(kind, getattr(kind, "__name__", str(kind))))
    # Two types may have the same name for a user, such as list and tuple.
    return "|".join(dict.fromkeys(names))


def choices(annotation: Annotation) -> list[str]:
    """Return the words that a field of this type allows; empty if it has no fixed list."""
    found: list[str] = []
    for kind in members(annotation):
        if _origin(kind) is Literal:
            found.extend(str(choice) for choice in get_args(kind))
        elif isinstance(kind, type) and issubclass(kind, Enum):
            found.extend(str(member.value) for member in kind)
        elif kind is bool:
            found += ["true", "false"]
    return found


def read_json(word: str) -> JSON:
    """Parse the word as JSON (Python's None, True, False too); if that fails, return the word."""
    if word in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[word]
    try:
        # By default, Python's parser accepts NaN and Infinity.
        return json.loads(word, parse_constant=_refuse_constant)
    except ValueError:
        return word


def _origin(annotation: Annotation) -> Annotation:
    return get_origin(annotation)


def _refuse_constant(name: str) -> JSON:
    raise ValueError(f"{name} is not JSON")


def _read_scalar(kinds: Sequence[Annotation], word: str) -> JSON:
    lowered = word.lower()
    if type(None) in kinds and lowered in _NONE:
        return None
    for kind in kinds:
        choice = _choice(kind, word)
        if choice is not None:
            return choice
    # Where a field also takes numbers, 0 and 1 are numbers.
    if bool in kinds and lowered in _YES | _NO and not (int in kinds and lowered in "01"):
        return lowered in _YES
    if str in kinds and (int in kinds or float in kinds):
        number = read_json(word)
        return number if type(number) in (int, float) else word
    if {bool} == {*kinds} - {type(None)}:
        raise ValueError(f"{word!r} is neither true nor false")
    return word  # numbers, unknown enum values and other text: the field's validation reads or rejects them


def _choice(kind: Annotation, word: str) -> JSON:
    """Return the member of an enum or Literal that `word` names, by value, or by name in any case; None if there is
    none."""
    if _origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == word), None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        named = (member for member in kind if word.lower() in (str(member.value).lower(), member.name.lower()))
        return next(named, None)
    return None


def _read_sequence(kinds: Sequence[Annotation], words: Sequence[str]) -> JSON:
    if len(words) == 1 and str in kinds:
        return words[0]  # fields of type "text or list" split the text themselves
    kind = next(kind for kind in kinds if (_origin(kind) or kind) in _SEQUENCES)
    element = next(iter(get_args(kind)), Any)
    if len(words) == 1 and words[0].lstrip().startswith("["):
        try:
            return json.loads(words[0])
        except ValueError as error:
            raise ValueError(f"{words[0]!r} is not a JSON list: {error}") from None
    split = words[0].split(",") if len(words) == 1 else words
    return [read_words(element, [word.strip()]) for word in split if word.strip()]


def _read_mapping(words: Sequence[str], *, texts: bool) -> JSON:
    """Parse `k=v` words, a JSON list of them, or a JSON object. With `texts`, the values of `k=v` words stay strings,
    as in `X=1`."""
    if len(words) == 1 and words[0].lstrip().startswith(("{", "[")):
        try:
            read = json.loads(words[0])
        except ValueError as error:
            raise ValueError(f"{words[0]!r} is neither a JSON object nor a JSON list: {error}") from None
        if not isinstance(read, list):
            return read
        # A list of `k=v` texts is what YAML and JSON writers produce from repeated options.
        pairs: Sequence[str] = list(map(str, read))
    else:
        pairs = words[0].split(",") if len(words) == 1 else words
    entries: dict[str, JSON] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{pair!r} is neither JSON nor key=value")
        entries[key.strip()] = value.strip() if texts else read_json(value.strip())
    return entries
