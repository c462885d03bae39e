"""Finds environments by name: entry points of installed packages, and files in the nearest `environments` folder.

A file `environments/NAME_env.py` is the environment NAME, unless a package has installed an environment of that name:
the folder, which may be somebody else's, never decides what an installed name runs. Listing neither imports nor runs an
environment. A reference is a name, `path/to/my_env.py`, `path.py:name`, a folder of
tasks, or `KIND:NAME` for an environment of another library, such as `harbor:NAME@VERSION`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from palaestra.envs.api.function_form import FunctionForm
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.form import Form
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON
from palaestra_slots.core.user_code import load_file, own_folders
from palaestra_tokens.config import APIServerConfig, ServerBaseline

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from palaestra.envs.run.evaluate import EvaluatedEnvironment
    from palaestra_tokens.chat_server import ChatServer

FOLDER = "environments"
GROUP = "palaestra.environments"
OLD_NAMES = "palaestra.old_names"
"""The entry points of names that existing scripts and recorded runs use."""
DOORS = "palaestra.doors"
"""The group of entry points for forms that run like environments, such as a file of prompts. They are loaded by name
but not listed."""

PEERS = "palaestra.peers"
"""The group of entry points that make forms of other libraries' environments. The name of an entry point is the KIND of
a reference `KIND:NAME`; its function takes NAME and returns a form, or raises `ConfigError`."""

CONTRACT_ROOTS = frozenset({
    "atroposlib", "atropos", "atropos_agent", "batch_runner", "environments", "gateway", "model_tools", "run_agent",
    "tools", "toolsets", "toolset_distributions",
})  # fmt: skip
"""Top-level modules from which scripts of Atropos and Hermes import."""

logger = logging.getLogger(__name__)

_ENDING = "_env.py"
_CLASS_FORMS: list[tuple[type, Callable[[type, str], Form]]] = []
"""The base classes of environments as classes, and what makes a form of a subclass."""


def register_class(base: type, make: Callable[[type, str], Form]) -> None:
    """Accept subclasses of `base` as environments; `make` gets the subclass and its reference. The module of a base
    class calls this function, so that only its users load it."""
    _CLASS_FORMS.append((base, make))


_OLD_IMPORTS = threading.Event()
"""Set after `allow_old_imports`."""


def allow_old_imports() -> None:
    """Let scripts import names by their old module paths, as with the flag `--compat`."""
    cast("Callable[[], None]", plugins.load(plugins.installed("palaestra.scripts")["old_modules"]))()
    _OLD_IMPORTS.set()


def old_imports_allowed() -> bool:
    return _OLD_IMPORTS.is_set()


@dataclass(frozen=True, slots=True)
class KnownEnvironment:
    """An environment that can be run by name. `origin` is its file, or its package and object."""

    name: str
    path: Path | None
    origin: str
    summary: str

    @property
    def example_config(self) -> Path | None:
        path = self.path and self.path.with_name(f"{self.name}.yaml")
        return path if path is not None and path.is_file() else None


def known_environments(start: Path) -> dict[str, KnownEnvironment]:
    """Return the environments of the nearest `environments` folder at `start` or above it, then the installed ones. If
    an environment cannot be read, its summary gives the reason."""
    local, installed = _local(start), plugins.installed(GROUP)
    return {
        **{name: KnownEnvironment(name, path, str(path), _summary(path)) for name, path in local.items()},
        **{name: _installed(name, point) for name, point in installed.items()},
    }


def _installed(name: str, point: EntryPoint) -> KnownEnvironment:
    try:
        return KnownEnvironment(
            name, plugins.source_file(point), plugins.origin(point), plugins.entry_point_summary(point)
        )
    except ConfigError as error:
        return KnownEnvironment(name, None, plugins.origin(point), f"({error})")


def _local(start: Path) -> dict[str, Path]:
    for folder in (start, *start.parents):
        if (folder / FOLDER).is_dir():
            files = sorted((folder / FOLDER).glob(f"*{_ENDING}"))
            return {path.name.removesuffix(_ENDING): path for path in files}
    return {}


def _summary(path: Path) -> str:
    """Return the first line of the module's docstring, or the reason why the file cannot be read."""
    try:
        text = ast.get_docstring(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return f"(cannot be read: {error})"
    return text.splitlines()[0] if text else ""


def load_environment(reference: str, start: Path) -> Form:
    """Load the environment that `reference` names. Raises `ConfigError`; if no environment has this name, the error
    lists the known names."""
    path, _, name = reference.partition(":")
    if path.endswith(".py") or "/" in path:
        return tasks_form(start / reference) or _pick(Path(path), name)
    if name and path in (peers := plugins.installed(PEERS)):
        return cast("Callable[[str], Form]", plugins.load_from_extra(peers[path], "environments"))(name)
    # Installed environments win over files here, so that a name means the same in every folder.
    local, installed = _local(start), plugins.installed(GROUP)
    if path in installed:
        if path in local:
            logger.warning("%s is the installed environment; to run %s, give its path", path, local[path])
        value = plugins.load(installed[path])
        if not _is_environment(value):
            raise ConfigError(f"{path} of {plugins.origin(installed[path])} is not an environment")
        return form_of(value, path)
    if path in (doors := plugins.installed(DOORS)):
        return cast("Form", plugins.load(doors[path]))
    if path in local:
        return _pick(local[path], name)
    if (tasks := tasks_form(start / reference)) is not None:
        return tasks
    known = list(dict.fromkeys([*local, *installed]))
    files = [file for file in (f"{path}_env.py", f"{path}.py") if (start / file).is_file()]
    found = "".join(f" {file} exists here; to run it, use the name {file}." for file in files)
    if "@" in path:
        found += f" For a dataset of Harbor, write harbor:{path}."
    raise ConfigError(f"no environment is called {path!r}.{nearest(path, known)} Available: {', '.join(known)}.{found}")


def environment_file(reference: str) -> Path | None:
    """Return the file with the code of the environment that `reference` names: a file, an installed environment, or the
    one that plays a folder of tasks. Returns None if it is not known."""
    path, _, name = reference.partition(":")
    if path.endswith(".py"):
        return Path(path) if Path(path).is_file() else None
    if path in plugins.installed(PEERS):  # another library's file, with the name of a task in it
        file = Path(name.partition("@")[0])
        return file if file.suffix == ".py" and file.is_file() else None
    marked = (env for marker, env in _TASK_FILES.items() if any(Path(path).glob(f"*/{marker}")))
    point = plugins.installed(GROUP).get(next(marked, path) if Path(path).is_dir() else path)
    spec = None if point is None else importlib.util.find_spec(point.module)
    return None if spec is None or spec.origin is None else Path(spec.origin)


_TASK_FILES = {"task.toml": "terminalbench_2", "task.yaml": "terminalbench_2", "task.json": "endless_terminals"}
"""The file that marks a folder as a task, with the environment that plays such tasks."""


def tasks_form(folder: Path) -> Form | None:
    """Return the form that plays a folder which is a task or has tasks as its folders, or None if it has none."""
    for marker, environment in _TASK_FILES.items():
        if folder.is_dir() and ((folder / marker).is_file() or any(folder.glob(f"*/{marker}"))):
            return DatasetForm(load_environment(environment, folder), str(folder.resolve()), str(folder.resolve()))
    return None


class DatasetForm:
    """An environment whose `dataset_name` is `dataset`, unless the settings set it."""

    bound: BaseEnvConfig | None = None

    def __init__(self, form: Form, dataset: str, reference: str) -> None:
        self._form, self._dataset = form, dataset
        self.name, self.reference = form.name, reference

    @property
    def kind(self) -> str:
        return self._form.kind

    @property
    def about(self) -> str:
        return self._form.about

    @property
    def command(self) -> str | None:
        return self._form.command

    def config_type(self) -> type[BaseEnvConfig]:
        return self._form.config_type()

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        config, servers = self._form.defaults()
        config = config or self.config_type()()
        return config.model_copy(update={"dataset_name": self._dataset}), servers

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(
        self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer
    ) -> EvaluatedEnvironment:
        return self._form.build(config, servers, server)


def form_of(environment: object, reference: str = "") -> Form:
    """Return the form of an environment; the form stores `reference`. Raises `ConfigError` for anything else."""
    if isinstance(environment, FunctionForm):
        environment.reference = reference or environment.reference
        return environment
    for base, make in _CLASS_FORMS:
        if inspect.isclass(environment) and issubclass(environment, base):
            return make(environment, reference)
    raise ConfigError(
        f"{environment!r} is not an environment: it must be a function with @environment or a subclass of "
        f"HermesAgentBaseEnv, AgentEnv or BaseEnv"
    )


def _pick(path: Path, name: str) -> Form:
    """Return the environment of this name in a file, or the file's only environment."""
    if not path.is_file() and _was_ours(path) and (moved := _moved(name)):
        return form_of(moved[name], f"{path}:{name}")  # a run recorded a file of ours that this version does not have
    module = _load_with_advice(path)
    found = {key: value for key, value in vars(module).items() if _is_environment(value)}
    # A script may name one of our files for a class that has moved to another of our files since.
    if name not in found and not {*own_folders()}.isdisjoint(path.resolve().parents):
        found |= _moved(name)
    if name and name not in found:
        raise ConfigError(f"{path} has no environment {name!r}.{nearest(name, found)} It has {_found_names(found)}")
    if not name:
        if len(found) > 1:  # environments that the file imports do not count beside its own
            found = {key: value for key, value in found.items() if _module_of(value) == module.__name__} or found
        if len(found) != 1:
            choose = f"; choose one with {path}:NAME" if found else ""
            raise ConfigError(f"{path} has {_found_names(found)}{choose}")
        name = next(iter(found))
    return form_of(found[name], f"{path.resolve()}:{name}")


def _load_with_advice(path: Path) -> ModuleType:
    """Load a file. If it needs an import of Atropos or Hermes, the error names the commands that help."""
    try:
        return load_file(path)
    except ConfigError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or missing.partition(".")[0] not in CONTRACT_ROOTS:
            raise
        raise ConfigError(
            f"{error}. `palaestra env port {path} --write` rewrites the imports of scripts of Atropos and Hermes, and "
            f"`palaestra run {path} --compat` runs them unchanged"
        ) from error.__cause__


def _was_ours(path: Path) -> bool:
    """Return whether a path is that of a module of ours in an installation or a checkout."""
    pairs = zip(path.parts, path.parts[1:], strict=False)
    return any(above in ("src", "site-packages", "dist-packages") and plugins.is_own(name) for above, name in pairs)


def _moved(name: str) -> dict[str, object]:
    """Return the public class of this name, if a package offers it: a run recorded the file in which it was made."""
    points = {point.attr: point for point in plugins.installed(GROUP).values()} | dict(plugins.installed(OLD_NAMES))
    return {name: plugins.load(points[name])} if name in points else {}


def _is_environment(value: object) -> bool:
    """Return whether a value in a file's globals is a function environment or a runnable class environment, even an
    imported one."""
    if isinstance(value, FunctionForm):
        return True
    bases = tuple(base for base, _ in _CLASS_FORMS)
    return inspect.isclass(value) and issubclass(value, bases) and not inspect.isabstract(value)


def _module_of(environment: object) -> str:
    return str((environment.source if isinstance(environment, FunctionForm) else environment).__module__)


def _found_names(found: dict[str, object]) -> str:
    return ", ".join(found) if found else "no environment: neither a function with @environment nor a class"
