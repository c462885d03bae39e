"""Lets an existing script that cannot be changed import names by their old module paths. Import `palaestra.compat`
before the script, or run it with `palaestra run SCRIPT.py --compat`.

    import palaestra.compat
    from environments.hermes_base_env import HermesAgentBaseEnv      # palaestra's

Only the command line imports this module. A module that is installed is imported as usual; only missing modules come
from here. Importing a name without a counterpart raises an ImportError that names the alternative. `palaestra env port`
rewrites the imports permanently.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import palaestra
from palaestra.envs.port_script import ELSEWHERE, ROOTS, WITHOUT_EFFECT, advice, counterpart

_SUBMODULES = frozenset(
    {
        "agent", "agent_env", "agent_loop", "atropos_agent", "base", "envs", "hermes_base_env", "pool",
        "process_registry", "server_baseline", "server_handling", "server_manager", "slot", "slots", "terminal_tool",
        "tool_call_parsers", "tool_context", "tool_executor", "tools", "type_definitions",
    }
)  # fmt: skip
"""Submodules that scripts import with `from PACKAGE import NAME`."""


class _OldModule(ModuleType):
    """A stand-in for a module that an existing script imports. It lists the names of the package `palaestra` and those
    in `ELSEWHERE`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__all__ = [*palaestra.__all__, *ELSEWHERE]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if (where := counterpart(name, self.__name__) or WITHOUT_EFFECT.get(name)) is not None:
            value: object = getattr(import_module(where), name)
            return value
        if name in _SUBMODULES:
            raise AttributeError(f"module {self.__name__!r} is not imported yet: {name!r}")
        raise ImportError(f"cannot import {name} from {self.__name__} through palaestra.compat: {advice(name)}")


class _OldModules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ROOTS:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because names are looked up when they are used."""


_FINDER = _OldModules()


def install() -> None:
    """Let imports find the old modules. Importing this module does it too; further calls have no effect."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


install()
