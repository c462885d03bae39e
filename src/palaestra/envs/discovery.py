"""Which environments there are by name: the files of an `environments` folder.

For: `palaestra env list`, and finding `palaestra run NAME`. Not for: importing environments (`running`). A file
`environments/<name>_env.py` is the environment `<name>`; its docstring's first line is its summary. Invariant: nothing
is imported or run to list it.

Finding an environment by what a user types: `path/to/my_env.py`, `path.py:name`, or a name of the catalogue.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError
from palaestra.core.user_code import place, told
from palaestra.envs.api.base_env import BaseEnv
from palaestra.envs.api.function_env import FunctionForm

FOLDER = "environments"
_ENDING = "_env.py"


@dataclass(frozen=True, slots=True)
class KnownEnvironment:
    """One environment that can be run by name."""

    name: str
    path: Path
    summary: str


def known_environments(start: Path) -> dict[str, KnownEnvironment]:
    """The environments of the nearest `environments` folder at `start` or above it, by name in order."""
    for folder in (start, *start.parents):
        if (folder / FOLDER).is_dir():
            files = sorted((folder / FOLDER).glob(f"*{_ENDING}"))
            found = (KnownEnvironment(path.name.removesuffix(_ENDING), path, _summary(path)) for path in files)
            return {each.name: each for each in found}
    return {}


def _summary(path: Path) -> str:
    """The first line of the module's docstring, or why there is none."""
    try:
        text = ast.get_docstring(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return f"(cannot be read: {error})"
    return text.splitlines()[0] if text else ""


_MODULE = "palaestra_environment_"


def is_loaded(module_name: str) -> bool:
    """Whether the module of this name is a file that `load_file` loaded, and not the script that is run."""
    return module_name.startswith(_MODULE)


def load_environment(reference: str, start: Path) -> object:
    """The environment that `reference` means. Raises `ConfigError` that says what there is instead."""
    path, _, name = reference.partition(":")
    if path.endswith(".py") or "/" in path:
        return _pick(load_file(Path(path)), name, path)
    known = known_environments(start)
    if path not in known:
        there_is = f" There are {', '.join(known)}." if known else " No `environments` folder is here or above."
        files = [name for name in (f"{path}_env.py", f"{path}.py") if (start / name).is_file()]
        there_is += "".join(f" {name} is here: say {name}." for name in files)
        raise ConfigError(f"no environment is called {path!r}.{nearest(path, known)}{there_is}")
    return _pick(load_file(known[path].path), name, path)


def reference_of(environment: object) -> str:
    """What names this environment again, for `load_environment`: the file that offers it, and its name there.

    The empty string where it was made by hand, in no file that was run or loaded.
    """
    for module_name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and (module_name == "__main__" or is_loaded(module_name)):
            for name, value in vars(module).items():
                if value is environment:
                    return f"{Path(path).resolve()}:{name}"
    return ""


def load_file(path: Path) -> ModuleType:
    """The module that a Python file makes, its neighbours importable. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    module_name = f"{_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))  # a script's neighbours are importable, as when it is run
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a script that parses its own command line ends so
        raise ConfigError(f"{path} cannot be loaded: {told(error)}{place(error)}") from error
    return module


def _pick(module: ModuleType, name: str, path: str) -> object:
    found = {key: value for key, value in vars(module).items() if isinstance(value, FunctionForm) or _is_class(value)}
    if name:
        if name not in found:
            raise ConfigError(f"{path} has no environment {name!r}.{nearest(name, found)} It has {_list(found)}")
        return found[name]
    if len(found) != 1:
        raise ConfigError(
            f"{path} has {_list(found)}; say which one as {path}:NAME" if found else f"{path} has {_list(found)}"
        )
    return next(iter(found.values()))


def _is_class(value: object) -> bool:
    """Whether it is a class environment that can be run, defined here or imported by a thin script."""
    return inspect.isclass(value) and issubclass(value, BaseEnv) and not inspect.isabstract(value)


def _list(found: dict[str, object]) -> str:
    return ", ".join(found) if found else "no environment: a function with @environment, or a class"
