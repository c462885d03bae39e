"""Load a Python file that a user names by its path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from palaestra.core.errors import ConfigError
from palaestra.core.user_code import place, told

_MODULE = "palaestra_environment_"


def is_loaded(module_name: str) -> bool:
    """Whether `load_file` loaded the module of this name; False for a script that runs itself."""
    return module_name.startswith(_MODULE)


def load_file(path: Path) -> ModuleType:
    """Import a Python file; modules next to it can be imported, too. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    module_name = f"{_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as when Python runs the file as a script
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a script that parses its own command line raises SystemExit
        raise ConfigError(f"{path} cannot be loaded: {told(error)}{place(error)}") from error
    return module
