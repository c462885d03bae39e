"""`scripts/package_order.py` finds each kind of import that the order of the packages forbids."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

spec = importlib.util.spec_from_file_location("package_order", Path(__file__).parents[2] / "scripts/package_order.py")
assert spec is not None
assert spec.loader is not None
package_order: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package_order)

TREE = {
    "__init__": "if TYPE_CHECKING:\n    from palaestra.contract.base_env import BaseEnv\n",
    "palaestra_slots.core.errors": "",
    "contract.__init__": "",
    "contract.base_env": "from palaestra_slots.sandbox.pool import SlotPool\n",
    "palaestra_slots.sandbox.pool": "from palaestra_slots.core.errors import SlotLost\n",
    "cluster.worker": "",
    "tools.runtime.ttl": "",
    "tools.web.fetch": "",
    "viewer.server": "",
}


def offenders(root: Path, **sources: str) -> set[tuple[str, str]]:
    for module, source in {**TREE, **sources}.items():
        folder = "packages/slots/src" if module.startswith("palaestra_slots.") else "src/palaestra"
        path = root / folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    found: set[tuple[str, str]] = package_order.against_the_order(root)
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("from palaestra.contract.base_env import Item", "contract.base_env"),
        ("from palaestra.contract import base_env", "contract.base_env"),
        ("from palaestra import contract", "contract"),
        ("import palaestra.contract.base_env as base", "contract.base_env"),
        ("from palaestra import BaseEnv", "contract.base_env"),
        ("import palaestra\nx = palaestra.BaseEnv", "contract.base_env"),
        ("def f():\n    from palaestra.viewer.server import serve", "viewer.server"),
        ("if TYPE_CHECKING:\n    from palaestra.viewer.server import serve", "viewer.server"),
        ("x = {'view': 'palaestra.viewer.server:serve'}", "viewer.server"),
        ("x = import_module(f'palaestra.viewer.{name}')\ny = ('server:serve',)", "viewer.server"),
        ("x = (sys.executable, '-m', 'palaestra.cluster.worker')", "cluster.worker"),
    ],
)
def test_a_library_that_imports_an_extension_is_found(tmp_path: Path, source: str, target: str) -> None:
    assert offenders(tmp_path, **{"envs.form": source}) == {("envs.form", target)}


@pytest.mark.parametrize(
    ("module", "source", "forbidden"),
    [
        ("contract.old", "import palaestra.cluster.worker", False),
        ("viewer.page", "import palaestra.cluster.worker", True),
        ("doors.gateway.jobs", "from palaestra.tools.web.fetch import get", False),
        ("doors.gateway.jobs", "from palaestra.tools.runtime.ttl import Expiry", True),
        ("inference.engine", "import palaestra_slots.core.errors", False),
        ("inference.engine", "import palaestra_slots.sandbox.pool", True),
        ("palaestra_slots.sandbox.slot", "import palaestra.envs.form", True),
        ("palaestra_slots.sandbox.slot", "from palaestra_slots.core.errors import SlotLost", False),
        ("envs.run", "SCHEMA = 'palaestra.viewer'", False),
    ],
)
def test_the_order(tmp_path: Path, module: str, source: str, *, forbidden: bool) -> None:
    assert bool(offenders(tmp_path, **{"envs.form": "", module: source})) == forbidden


def test_a_module_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"novelties\.new belongs to no package"):
        offenders(tmp_path, **{"novelties.new": ""})
