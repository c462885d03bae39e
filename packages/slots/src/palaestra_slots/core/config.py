"""The base of all configuration classes, and the merging of their layers.

`palaestra.envs.config` reads files, environment variables and the command line. Invariant: for a mistake in a setting,
`merge` raises a `ConfigError` with the key as the user wrote it, the value (hidden if it is a secret) and the value's
source. For an unknown key, the error suggests the nearest known key if one is near.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.redaction import remember_secret
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import yaml

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)
ModelT_co = TypeVar("ModelT_co", bound=BaseModel, covariant=True)

logger = logging.getLogger(__name__)

DEFAULT = "default"
"""The source of a value that no layer set."""

COMMAND_LINE = "command line"
"""The source of a value that a flag sets."""

ARGUMENT = "argument"
"""The source of a value that a Python caller passes."""

_VARIABLE = re.compile(r"\$([A-Za-z_]\w*|\{\w+\})")

OLD_SETTINGS = "palaestra.old_settings"
"""The group of entry points with tables of settings that existing scripts name and that have no effect: the name, the
value that a script reads (a function: a method), and the reason."""


@functools.cache
def old_settings() -> Mapping[str, tuple[JSON, str]]:
    """Return the value and the reason of each setting in the tables of `OLD_SETTINGS`."""
    from palaestra_slots.core.io.plugins import installed, load  # imported here, because most runs name no such setting

    tables = (cast("Mapping[str, tuple[JSON, str]]", load(point)) for point in installed(OLD_SETTINGS).values())
    return {name: found for table in tables for name, found in table.items()}


class Settings(BaseModel):
    """Base of configuration classes: unknown keys are rejected, and a mistake raises `ConfigError`.

    If a class sets `ignores_unknown`, its constructor ignores unknown keys, and one warning per class names them,
    because existing scripts pass settings of other releases. Files, variables and flags are checked by `merge`. Such an
    object also has the attributes of `old_settings`.

    Other packages declare further settings beside what these configure: `parts` names the groups of entry points with
    such classes, such as `web = "my_package.settings:WebSettings"`. An object has an attribute for each of these
    settings; a class is imported when one of its settings is read or set. `web.provider` and `web: {provider: …}` are
    other spellings of `web_provider`.

    A class for the format of other programs lists in `of_others` the keys that only those programs read and that cannot
    change a score. These are left out, with one warning.
    """

    ignores_unknown: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ()
    of_others: ClassVar[frozenset[str]] = frozenset()

    # Validators are built on first use, because a command line that is only checked uses few of the classes.
    model_config = ConfigDict(extra="forbid", validate_default=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: JSON, info: ValidationInfo) -> JSON:
        """Expand `~` and variables in the fields that `host_path` declares, and reject a boolean for a number: YAML
        reads an unquoted yes, no, on or off as a boolean, which Python would treat as 1 or 0."""
        # One validator for both, because the schema has one per field, and building it takes most of a short start.
        name = str(info.field_name)
        if isinstance(value, bool) and cls.model_fields[name].annotation in (int, float, int | None, float | None):
            raise ConfigError("must be a number")
        if isinstance(value, str | Path) and {"~", "$"} & {*str(value)} and _is_host_path(cls, name):
            return str(local_path(value))
        return value

    if not TYPE_CHECKING:  # type checkers derive the constructor from the fields

        def __init__(self, **values):
            if type(self).of_others:
                values = _without_keys_of_others(type(self), values)
            values, parts = _divided(type(self), values) if type(self).parts else (values, {})
            given = values
            if type(self).ignores_unknown and type(self).model_config.get("extra") == "forbid":
                values = _without_unknown(type(self), given)
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_explain(error, type(self), {}, {})) from error
            if len(given) > len(values):  # a script reads what it has set
                self.__dict__.update({name: given[name] for name in given.keys() - values if name in old_settings()})
            for name in filter(is_secret, type(self).model_fields):
                value = getattr(self, name)
                remember_secret(value if isinstance(value, str) else None)
            for part, own in parts.items():
                made = part(**own)
                self.__dict__.update({name: getattr(made, name) for name in own})
                self.__pydantic_fields_set__.update(own)

        def __getattr__(self, name):
            if name.startswith("_"):
                return super().__getattr__(name)
            if (found := _part_of(type(self), name)) is not None:
                # Kept, because a script may change a list or a mapping in place.
                return self.__dict__.setdefault(name, found.model_fields[name].get_default(call_default_factory=True))
            if not type(self).ignores_unknown or name not in old_settings():
                return super().__getattr__(name)
            value, _ = old_settings()[name]
            return functools.partial(value, self) if callable(value) else value

        def __setattr__(self, name, value):
            if name.startswith("_") or name in type(self).model_fields or _part_of(type(self), name) is None:
                super().__setattr__(name, value)
                return
            self.__dict__[name] = value
            self.__pydantic_fields_set__.add(name)

    def recorded(self) -> dict[str, JSON]:
        """Return all values as JSON, for the record; an object that JSON cannot represent becomes the name of its
        type. Of the settings of other packages, only those that were set are included."""
        found = self.model_dump(mode="json", fallback=_type_name)
        others = {name: getattr(self, name) for name in sorted(self.model_fields_set - found.keys())}
        return found | cast("dict[str, JSON]", to_jsonable_python(others, fallback=_type_name)) if others else found


def _type_name(value: object) -> str:
    return f"<{type(value).__name__}>"


def part_points(kind: type[BaseModel]) -> Mapping[str, EntryPoint]:
    """Return the entry points of the packages' settings for a class, by the name of the part, such as `web`."""
    return _part_points(kind.parts) if issubclass(kind, Settings) else {}


@functools.cache
def _part_points(groups: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    from palaestra_slots.core.io.plugins import installed  # imported here, because most runs name no such setting

    return {name: point for group in groups for name, point in installed(group).items()}


def part_class(kind: type[BaseModel], part: str) -> type[Settings]:
    """Return the class of a part. Raises `ConfigError` if it cannot be imported."""
    return _settings_class(part_points(kind)[part])


@functools.cache
def _settings_class(point: EntryPoint) -> type[Settings]:
    from palaestra_slots.core.io.plugins import load

    return cast("type[Settings]", load(point))


def _part_of(kind: type[BaseModel], name: str) -> type[Settings] | None:
    """Return the class of the part that declares a setting; None if no installed package has it."""
    # Most names begin with that of their part, so that no other part is imported.
    points = sorted(part_points(kind).items(), key=lambda each: not name.startswith(f"{each[0]}_"))
    return next((_settings_class(point) for _, point in points if name in _settings_class(point).model_fields), None)


def find_setting(kind: type[BaseModel], name: str) -> FieldInfo | None:
    """Return the setting of this name of a class or of its parts; None if there is none."""
    if name in kind.model_fields:
        return kind.model_fields[name]
    return part.model_fields[name] if (part := _part_of(kind, name)) is not None else None


def all_settings(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the settings of a class and of its parts."""
    parts = [part_class(kind, part).model_fields for part in part_points(kind)]
    return {name: field for fields in (kind.model_fields, *parts, kind.model_fields) for name, field in fields.items()}


def flat_key(kind: type[BaseModel], key: str) -> str:
    """Return the key with the name of the setting that `PART.NAME` spells: `web.urls.exa` becomes `web_urls.exa`, and
    `nomad.driver` becomes `driver`."""
    part, dot, rest = key.partition(".")
    if not dot or part in kind.model_fields or part not in part_points(kind):
        return key
    name, _, entry = rest.partition(".")
    fields = part_class(kind, part).model_fields
    found = name if name in fields and f"{part}_{name}" not in fields else f"{part}_{name}"
    return f"{found}.{entry}" if entry else found


def flat_settings(kind: type[BaseModel], values: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the values by the names of the settings, without mappings of parts. Raises `ConfigError` for a part that
    is not a mapping."""
    if values.keys() <= kind.model_fields.keys():
        return values
    flat: dict[str, JSON] = {}
    for key, value in values.items():
        if "." in key or key in kind.model_fields or key not in part_points(kind):
            flat[flat_key(kind, key)] = value
        elif isinstance(value, Mapping):
            flat |= {flat_key(kind, f"{key}.{name}"): each for name, each in value.items()}
        else:
            raise ConfigError(f"{key} must be a mapping of settings, not {value!r:.100}")
    return flat


def _divided(
    kind: type[Settings], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[type[Settings], dict[str, Any]]]:
    """Return the values of the class's own fields, and those of each part."""
    own: dict[str, Any] = {}
    parts: dict[type[Settings], dict[str, Any]] = {}
    for name, value in flat_settings(kind, values).items():
        part = None if name in kind.model_fields else _part_of(kind, name)
        (own if part is None else parts.setdefault(part, {}))[name] = value
    return own, parts


_WARNED: set[tuple[str, str]] = set()


def _without_keys_of_others(kind: type[Settings], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the keys that only other programs read; warn once of each."""
    found = [name for name in values if name in kind.of_others]
    if new := [name for name in found if (kind.__qualname__, name) not in _WARNED]:
        _WARNED.update((kind.__qualname__, name) for name in new)
        logger.warning("%s: %s has no effect here, because only other programs read it", kind.__name__, ", ".join(new))
    return {name: value for name, value in values.items() if name not in found} if found else values


def _without_unknown(kind: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the fields; warn once of each other key."""
    fields = kind.model_fields
    # Scripts may use either name of a field.
    names = {*fields, *(field.alias for field in fields.values() if field.alias)}
    unknown = [name for name in values if name not in names]
    if new := [name for name in unknown if (kind.__qualname__, name) not in _WARNED]:
        _WARNED.update((kind.__qualname__, name) for name in new)
        known = all_settings(kind)
        hints = {name: old_settings()[name][1] if name in old_settings() else nearest(name, known) for name in new}
        told = ", ".join(
            f"{name} ({hint[0].lower()}{hint[1:].rstrip('.')})" if (hint := hints[name].strip()) else name
            for name in new
        )
        logger.warning("%s ignores settings that it does not have: %s", kind.__name__, told)
    return {name: value for name, value in values.items() if name not in unknown} if unknown else values


def setting(default: T, description: str, **options: Any) -> T:
    """Return a field with its default and its help. `options` are pydantic's, such as `ge`."""
    declared: T = Field(default=default, description=description, **options)
    return declared


def host_path(default: T, description: str, **options: Any) -> T:
    """Return a field for a path on this machine, in which `~` and `$NAME` are expanded. Its value may also be a name,
    which has neither."""
    return setting(default, description, json_schema_extra={"host_path": True}, **options)


def _is_host_path(model_type: type[BaseModel], name: str) -> bool:
    """Return whether `host_path` declares the field, in this class or in one that it derives from."""
    for each in model_type.__mro__:
        found = each.model_fields.get(name) if issubclass(each, BaseModel) and each is not BaseModel else None
        if found is not None and isinstance(found.json_schema_extra, dict) and found.json_schema_extra.get("host_path"):
            return True
    return False


def is_old(model_type: type[BaseModel], name: str) -> bool:
    """Return whether a configuration of this class ignores a setting of this name, which has no effect, with a
    warning."""
    return issubclass(model_type, Settings) and model_type.ignores_unknown and name in old_settings()


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache: `palaestra/NAME` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palaestra" / name


def local_path(text: str | Path) -> Path:
    """Return the path that a setting gives, with `~` and variables (`$NAME`, `${NAME}`) expanded as a shell does.

    Raises `ConfigError` for a variable that is not set, and if the user has no home directory."""
    for name in _VARIABLE.findall(str(text)):
        if name.strip("{}") not in os.environ:
            raise ConfigError(f"{str(text)!r} cannot be used: the variable {name.strip('{}')} is not set")
    try:
        return Path(os.path.expandvars(text)).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{str(text)!r} cannot be used: there is no home directory; set HOME, or use another path"
        ) from None


def slot_path(text: str) -> str:
    """Return an absolute path in a slot, in which `~` and `$HOME` mean `/root`, the home of its commands. Raises
    `ConfigError` for a path that cannot be meant."""
    path = re.sub(r"^(?:~|\$HOME|\$\{HOME\})(?=/|$)", "/root", text)
    if not path.startswith("/") or "*" in path or "$" in path or ".." in path.split("/"):
        raise ConfigError(
            f"{text!r} is not an absolute path in the sandbox; write for example /data or ~/out, without *, .. and $"
        )
    return posixpath.normpath(path)


def sent_secret(text: str | None, name: str) -> str | None:
    """Return a key or token for a header, stripped, or None if it is empty. If it contains a control character, raises
    `ConfigError` with the setting's name but not the secret."""
    secret = (text or "").strip()
    if not secret.isprintable():
        raise ConfigError(f"{name} contains a control character, such as a newline. Remove it: headers cannot hold it")
    remember_secret(secret)
    return secret or None


@dataclass(frozen=True, slots=True)
class ConfigLayer:
    """Values from one source; later layers win, key by key. A key is a field's name, or `field.entry.entry` for an
    entry of a mapping. `spelled` maps a key to the user's spelling (`--group`), if the two differ."""

    name: str
    values: Mapping[str, JSON]
    spelled: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Merged(Generic[ModelT_co]):
    """A validated configuration, and the source of each field's value."""

    value: ModelT_co
    sources: Mapping[str, str]


def merge(model_type: type[ModelT], layers: Iterable[ConfigLayer]) -> Merged[ModelT]:
    """Merge `layers` in order, so that the last one wins, and validate the result. Raises `ConfigError`."""
    values: dict[str, JSON] = {}
    sources: dict[str, str] = dict.fromkeys(model_type.model_fields, DEFAULT) | getattr(
        model_type, "default_sources", {}
    )
    spelled: dict[str, str] = {}
    for layer in layers:
        for key, value in flat_settings(model_type, layer.values).items():
            name, _, rest = key.partition(".")
            written = layer.spelled.get(key, key)
            known = find_setting(model_type, name) is not None
            if not known and not is_old(model_type, name):
                raise ConfigError(f"{layer.name}: unknown setting {written}.{nearest(name, all_settings(model_type))}")
            values[name] = _assigned(values.get(name), rest, value)
            if not known:
                continue
            shared = rest and sources.get(name, DEFAULT) not in (DEFAULT, layer.name)
            sources[name] = f"{sources[name]}, {layer.name}" if shared else layer.name
            spelled[name] = written
    try:
        return Merged(model_type(**values), sources)
    except ValidationError as error:
        raise ConfigError(_explain(error, model_type, sources, spelled)) from None
    except ConfigError as error:
        # The constructor has explained the mistakes already, but without the sources and the user's spelling.
        if not isinstance(error.__cause__, ValidationError):
            raise
        raise ConfigError(_explain(error.__cause__, model_type, sources, spelled)) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean NAME?` for the closest of `known`, to append to a message, or an empty string. Flags are
    compared by their last part, because many of them share the first part."""
    if word.startswith("--"):
        flags = {_last_part(flag): flag for flag in known}
        near = difflib.get_close_matches(_last_part(word), flags, n=1, cutoff=0.7)
        return f" Did you mean {flags[near[0]]}?" if near else ""
    candidates = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {candidates[found[0]]}?" if found else ""


def _last_part(flag: str) -> str:
    return flag.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


def _assigned(old: JSON, path: str, value: JSON) -> JSON:
    """Return a copy of `old` with `value` at the dotted `path`; mappings missing along the path are created."""
    if not path:
        return value
    name, _, rest = path.partition(".")
    entries = dict(old) if isinstance(old, Mapping) else {}
    entries[name] = _assigned(entries.get(name), rest, value)
    return entries


def _explain(
    error: ValidationError, model_type: type[BaseModel], sources: Mapping[str, str], spelled: Mapping[str, str]
) -> str:
    """Return one line per mistake: the key as written, the value, the problem and the value's source."""
    lines: list[str] = []
    for mistake in error.errors(include_url=False):
        path = [str(part) for part in mistake["loc"]]
        name = path[0] if path else ""
        if mistake["type"] == "extra_forbidden" and len(path) == 1:
            lines.append(f"unknown setting {name} of {model_type.__name__}.{nearest(name, all_settings(model_type))}")
            continue
        where = f" (from {sources[name]})" if sources.get(name, DEFAULT) != DEFAULT else ""
        what = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"] == "missing":
            what = "a value is required"
        written = spelled.get(name, ".".join(path)) or model_type.__name__
        # The input of a mistake without a path, or in nested settings, is all of them, secrets included.
        unseen = mistake["type"] == "missing" or not path or _has_settings(mistake["input"])
        given = "" if unseen else f" {_value_text(name, mistake['input'])}"
        lines.append(f"{written}{given}: {what[:1].lower()}{what[1:]}{where}")
    # Pydantic reports a mistake once for each member of a union.
    return "\n".join(dict.fromkeys(lines))


def _has_settings(value: JSON) -> bool:
    """Return whether a value has settings of its own, some of which may be secrets."""
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_has_settings, value)))


def _value_text(name: str, value: JSON) -> str:
    """Return the value as text for a message: shortened, or hidden if it is a secret."""
    text = "(hidden)" if is_secret(name) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


OWN_NAMES = {
    "tasks": "env.total_steps",
    "group": "env.group_size",
    "concurrency": "env.max_num_workers",
    "backend": "env.tool_pool_mode",
    "out": "env.data_path_to_save_groups",
}
"""Maps Palaestra's own names of settings to the names that the contract gives them. Both can be used; Palaestra prints
its own."""

SHORT_FORMS = {
    "--model": "openai.model_name",
    "--base-url": "openai.base_url",
    "--agent": "env.agent",
    **{f"--{own}": name for own, name in OWN_NAMES.items()},
    "--task": "env.only_tasks",
    "--samples": "env.group_size",
    "--to": "env.rollout_server_url",
    "--tool-parser": "openai.tool_parser",
    "--workspace-store": "env.workspace_store",
    "--slots": "env.slots",
    "--on": "env.on",
    "--max-cost": "env.max_cost",
    "--max-infra-rate": "env.max_infra_rate",
    "--metrics-port": "env.metrics_port",
    "--keep-workspaces": "env.save_workspaces",
    "-m": "openai.model_name",
    "-o": "env.data_path_to_save_groups",
}
"""Maps each short flag to the setting that it abbreviates. `--policy NAME`, which is not in this table, selects a
scripted server with that model name."""

_SETTING = re.compile(r"--(?:env|openai)\.\w+")


def flags_as_typed(message: str, argv: Sequence[str]) -> str:
    """Return the message with each setting named by its flag as typed in `argv`. A setting that is not in `argv` gets
    its short flag, if it has one, unless `argv` has long flags."""
    typed = {word.partition("=")[0] for word in argv}
    long = any(_SETTING.fullmatch(word) for word in typed)

    def flag(found: re.Match[str]) -> str:
        short = [each for each, name in SHORT_FORMS.items() if found[0] == f"--{name}"]
        return next((each for each in short if each in typed), found[0] if long or not short else short[0])

    return _SETTING.sub(flag, message)


_FLAG = re.compile(r"--(?:(?:env|openai)\.(?=\w)|(?=policy\b))")


@contextmanager
def python_names() -> Iterator[None]:
    """While the block runs, make errors name a Python call's arguments instead of the flags for the same settings."""
    try:
        yield
    except PalaestraError as error:
        error.args = tuple(_FLAG.sub("", each) if isinstance(each, str) else each for each in error.args)
        raise


def is_secret(name: str) -> bool:
    """Return whether a setting of this name is a secret, which must not be shown or saved."""
    endings = ("api_key", "api_keys", "secret", "password", "env_vars", "_token", ".token")
    return name == "token" or name.endswith(endings)


_MOST_KEY_PARTS = 32
_TOML_STRING_OR_COMMENT = re.compile(  # a string without an end reaches to the end of the text or of the line
    r'"{3}(?:[^"\\]|\\.|"(?!""))*(?:"{3,5})?'
    r"|'{3}.*?(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\.)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)


def read_toml(text: str) -> dict[str, JSON]:
    """Parse a TOML text. Raises `ValueError` for any other text, and `RecursionError` for a text that is nested too
    deeply or that has a key of more than 32 parts.

    The time and memory that `tomllib` takes for a key grow with the square of the number of its parts, and each line
    below the header of a table takes the time of the header's parts again.
    """
    import tomllib  # imported here, because most runs read no TOML

    rest = _TOML_STRING_OR_COMMENT.sub("", text)  # in what is left, only keys have more than one dot
    if any(part.count(".") >= _MOST_KEY_PARTS for part in re.split(r"[=,\[\]{}\n]", rest)):
        raise RecursionError(f"a key has more than {_MOST_KEY_PARTS} parts")
    return tomllib.loads(text)


_MOST_ENTRIES = 100_000


@functools.cache
def _yaml_loader() -> type[yaml.SafeLoader]:
    import yaml  # imported here, because most runs read no YAML

    class Loader(yaml.SafeLoader):
        entries = 0

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Count the entries of each mapping that is built or merged (`<<`): small mappings that merge each other,
            or many that merge a large one, could multiply the entries without end."""
            super().flatten_mapping(node)
            self.entries += 1 + len(node.value)
            if self.entries > _MOST_ENTRIES:
                raise ValueError(f"its mappings have more than {_MOST_ENTRIES} entries with those that they merge")

    return Loader


def read_yaml(text: str) -> JSON:
    """Parse a text that contains at most one YAML document, and return plain data (None for an empty text). Raises
    `ValueError` for any other text."""
    import yaml

    try:
        return yaml.load(text, _yaml_loader())  # noqa: S506 - it is a safe loader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
