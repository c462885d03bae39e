"""Lets an existing script that cannot be changed import names by their old module paths. Import `palaestra.compat`
before the script, or run it with `palaestra run SCRIPT.py --compat`.

    import palaestra.compat
    from environments.hermes_base_env import HermesAgentBaseEnv      # palaestra's

The modules in `_OURS` come from here, also where Atropos or Hermes is
installed or the script lies in its repository. Other modules are imported as usual, and come from here only if they are
missing. Importing a name without a counterpart raises an ImportError that names the alternative. `palaestra env port`
rewrites the imports permanently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from palaestra.envs.config.dotenv import DOTENV, read_variables
from palaestra.envs.discovery import CONTRACT_ROOTS
from palaestra_contract.port_script import WITHOUT_EFFECT, advice, counterpart, elsewhere, public_names

_OURS = (
    "atroposlib", "atropos.agent", "atropos.api", "atropos.backends", "atropos.envs.agent_env", "atropos.slots",
    "atropos.tools", "environments.agent_loop", "environments.hermes_base_env", "environments.patches",
    "environments.tool_call_parsers", "environments.tool_context", "gateway.config", "model_tools",
    "tools.budget_config", "tools.process_registry", "tools.rl_training_tool", "tools.terminal_tool",
    "toolset_distributions", "toolsets",
)  # fmt: skip
"""The modules of Atropos and Hermes that this package replaces, with the modules inside them."""

_PARENTS = frozenset(each.rpartition(".")[0] for each in _OURS if "." in each) | {"atropos"}
"""Packages that also contain other modules, such as scripts."""

_SUBMODULES = frozenset(
    {
        "agent", "agent_env", "agent_loop", "atropos_agent", "base", "envs", "hermes_base_env", "pool",
        "process_registry", "server_baseline", "server_handling", "server_manager", "slot", "slots", "terminal_tool",
        "tool_call_parsers", "tool_context", "tool_executor", "tools", "type_definitions",
    }
)  # fmt: skip
"""Submodules that scripts import with `from PACKAGE import NAME`."""


def load_dotenv(dotenv_path: str | Path | None = None, *, override: bool = False, **options: object) -> bool:
    """Set the variables of a `.env` file, for scripts that import this from the package dotenv where it is missing. By
    default, as in that package, the file is the next one in or above the script's folder. Returns whether there are
    any variables."""
    if dotenv_path is None:
        above = Path(sys._getframe(1).f_code.co_filename).resolve().parents
        dotenv_path = next((folder / DOTENV for folder in above if (folder / DOTENV).is_file()), DOTENV)
    found = read_variables(Path(dotenv_path))
    os.environ.update({name: text for name, text in found.items() if override or name not in os.environ})
    return bool(found)


class _OldModule(ModuleType):
    """A stand-in for a module that an existing script imports. It lists the names of the package `palaestra` and those
    of `elsewhere`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__all__ = [*public_names(), *elsewhere()]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if (where := counterpart(name, self.__name__) or WITHOUT_EFFECT.get(name)) is not None:
            value: object = getattr(import_module(where), name)
            return value
        if name in _SUBMODULES or PathFinder.find_spec(f"{self.__name__}.{name}", self.__path__) is not None:
            raise AttributeError(f"module {self.__name__!r} is not imported yet: {name!r}")
        real = self.__dict__.get("_real") or self._load_real()
        if real is not None and hasattr(real, name):
            return getattr(real, name)
        raise ImportError(f"cannot import {name} from {self.__name__} through palaestra.compat: {advice(name)}")

    def _load_real(self) -> ModuleType | None:
        """Load the module that this one stands in for, if it is installed."""
        spec = _installed(self.__name__)
        if spec is None or spec.loader is None:
            return None
        self._real = module_from_spec(spec)
        spec.loader.exec_module(self._real)
        return self._real


def _installed(name: str) -> ModuleSpec | None:
    parent = sys.modules.get(name.rpartition(".")[0])
    return PathFinder.find_spec(name, None if parent is None else list(parent.__path__))


class _OldModules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "dotenv":
            return ModuleSpec(fullname, self) if PathFinder.find_spec(fullname) is None else None
        if fullname.partition(".")[0] not in CONTRACT_ROOTS:
            return None
        real = PathFinder.find_spec(fullname, path)
        ours = fullname in _PARENTS or any(f"{fullname}.".startswith(f"{each}.") for each in _OURS)
        if real is not None and not ours:
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        if real is not None and real.submodule_search_locations is not None and fullname in _PARENTS:
            spec.submodule_search_locations = list(real.submodule_search_locations)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if spec.name == "dotenv" else _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing for most modules, because names are looked up when they are used."""
        if not isinstance(module, _OldModule):
            module.load_dotenv = load_dotenv  # type: ignore[attr-defined]


_FINDER = _OldModules()


def install() -> None:
    """Let imports find the old modules; further calls have no effect."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
