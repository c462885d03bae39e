"""`scripts/package_order.py` finds each kind of import that the order of the packages forbids."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from golden_messages import raises

spec = importlib.util.spec_from_file_location("package_order", Path(__file__).parents[2] / "scripts/package_order.py")
assert spec is not None
assert spec.loader is not None
package_order: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package_order)

TREE = {
    "__init__": "if TYPE_CHECKING:\n    from palaestra_contract.base_env import BaseEnv\n",
    "palaestra_slots.core.errors": "",
    "palaestra_contract.__init__": "",
    "palaestra_contract.base_env": "from palaestra_slots.sandbox.pool import SlotPool\n",
    "palaestra_slots.sandbox.pool": "from palaestra_slots.core.errors import SlotLost\n",
    "palaestra_cloud.cluster.worker": "",
    "palaestra_contract.tools.ttl": "",
    "palaestra_toolsets.web.fetch": "",
    "palaestra_view.server": "",
}


def offenders(root: Path, **sources: str) -> set[tuple[str, str]]:
    for module, source in {**TREE, **sources}.items():
        package, _, rest = module.partition(".")
        folder, name = (
            (package_order.FOLDERS[package], rest)
            if rest and package in package_order.FOLDERS
            else (package_order.FOLDERS["palaestra"], module)
        )
        path = root / folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    found: set[tuple[str, str]] = package_order.against_the_order(root)
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("from palaestra_contract.base_env import Item", "palaestra_contract.base_env"),
        ("from palaestra_contract import base_env", "palaestra_contract.base_env"),
        ("import palaestra_contract.base_env as base", "palaestra_contract.base_env"),
        ("from palaestra import BaseEnv", "palaestra_contract.base_env"),
        ("import palaestra\nx = palaestra.BaseEnv", "palaestra_contract.base_env"),
        ("def f():\n    from palaestra_view.server import serve", "palaestra_view.server"),
        ("if TYPE_CHECKING:\n    from palaestra_view.server import serve", "palaestra_view.server"),
        ("x = {'view': 'palaestra_view.server:serve'}", "palaestra_view.server"),
        ("x = import_module(f'palaestra_view.{name}')\ny = ('server:serve',)", "palaestra_view.server"),
        ("x = (sys.executable, '-m', 'palaestra_cloud.cluster.worker')", "palaestra_cloud.cluster.worker"),
    ],
)
def test_a_library_that_imports_an_extension_is_found(tmp_path: Path, source: str, target: str) -> None:
    assert offenders(tmp_path, **{"envs.form": source}) == {("envs.form", target)}


@pytest.mark.parametrize(
    ("module", "source", "forbidden"),
    [
        ("palaestra_contract.old", "import palaestra_cloud.cluster.worker", False),
        ("palaestra_view.page", "import palaestra_cloud.cluster.worker", True),
        ("palaestra_gateway.jobs", "from palaestra_toolsets.web.fetch import get", False),
        ("palaestra_gateway.jobs", "from palaestra_contract.tools.ttl import Expiry", True),
        ("palaestra_tokens.engine", "import palaestra_slots.core.errors", False),
        ("palaestra_tokens.engine", "import palaestra_slots.sandbox.pool", True),
        ("palaestra_slots.sandbox.slot", "import palaestra.envs.form", True),
        ("palaestra_slots.sandbox.slot", "from palaestra_slots.core.errors import SlotLost", False),
        ("envs.run", "SCHEMA = 'palaestra_view'", False),
    ],
)
def test_the_order(tmp_path: Path, module: str, source: str, *, forbidden: bool) -> None:
    assert bool(offenders(tmp_path, **{"envs.form": "", module: source})) == forbidden


def test_a_module_without_a_package_is_refused(tmp_path: Path) -> None:
    with raises(SystemExit, "novelties.new"):
        offenders(tmp_path, **{"novelties.new": ""})


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ([], []),
        (["README.md"], []),
        (["tests/test_package.py"], ["tests"]),
        (["extensions/gateway/src/x.py"], ["extensions/gateway/tests"]),
        (
            ["extensions/toolsets/README.md"],
            [f"extensions/{name}/tests" for name in ("toolsets", "suites", "gateway", "chat", "integrations")],
        ),
    ],
)
def test_tests_of_what_changed_and_of_what_uses_it_come_first(changed: list[str], first: list[str]) -> None:
    found, rest = package_order.tests_in_order(changed)
    assert found == first
    assert not {*found} & {*rest}
    assert {*found, *rest} == {*package_order.tests_in_order([])[1]}


@pytest.mark.parametrize("library", ["slots", "tokens", "palaestra"])
def test_a_change_to_a_library_tests_every_extension_first(library: str) -> None:
    _, rest = package_order.tests_in_order([f"packages/{library}/src/x.py"])
    assert all(path == "tests" or path.startswith("packages/") for path in rest)
    assert f"packages/{library}/tests" not in rest
