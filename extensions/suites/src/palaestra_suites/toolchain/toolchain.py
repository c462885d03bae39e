"""Install the toolchain of tests: an interpreter, pytest, and the packages that tests import in addition to the
repository.

`DependencyCache` installs pinned requirements once, in a slot (`wheel_install.py`), and keeps the files on the host, in
a folder named by its content. Slots mount it read-only, so no rollout can change it. Rows of the public data sets are
installed by `repository_venv.py` instead.

Invariant: no installer and no code of a repository is executed on the host, and every requirement has passed
`check_requirements`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.images.build_once import build_once
from palaestra_slots.images.requirements import check_requirements
from palaestra_slots.images.task_files import RowFields
from palaestra_slots.images.wheel_install import install_wheels
from palaestra_slots.sandbox.slot import Mount
from palaestra_suites.toolchain.interpreters import this_interpreter

DEPENDENCIES_DIR = "/opt/palaestra/dependencies"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Install:
    """The installation that the tests of a repository need.

    `requirements` are pinned, and mounted read-only. If `editable` is true, they may be any pip requirements, including
    `.[extra]` of the repository and `-rFILE` for a file in the repository. `python_path` are importable directories of
    the repository; `pytest_args` precede the tests. `editable` requests a virtual environment in which the repository
    is installed, made once per commit; rows of the public data sets run this way.
    """

    requirements: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    pytest_args: tuple[str, ...] = ()
    editable: bool = False

    @classmethod
    def parse(cls, raw: JSON) -> Install:
        """Parse the decoded `install` column of a row; None gives the default for public rows. Raises `TaskError`."""
        if raw is None:
            return cls(editable=True)
        if not isinstance(raw, Mapping) or set(raw) - {"requirements", "python_path", "pytest_args", "editable"}:
            raise TaskError(
                "install must be an object whose keys are among requirements, python_path, pytest_args and editable"
            )
        fields = RowFields(raw)
        editable = bool(raw.get("editable", False))
        requirements = fields.texts("requirements")
        check_requirements(requirements, in_repository=editable)
        return cls(requirements, fields.texts("python_path"), fields.texts("pytest_args"), editable=editable)

    def to_json(self) -> dict[str, JSON]:
        """Return the column that `parse` reads."""
        return {
            "requirements": list(self.requirements),
            "python_path": list(self.python_path),
            "pytest_args": list(self.pytest_args),
            "editable": self.editable,
        }

    def digest(self) -> str:
        """Return a short name for this installation."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The way to start the tests of a repository in a slot.

    `command` is the argv of the interpreter. `dependencies` are directories of the slot that go at the end of
    `sys.path`; `python_path` are directories relative to the repository. The slot's spec must contain `mounts`.
    `variables` are environment variables of the tests and of the agent's commands.
    """

    command: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()
    dependencies: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    pytest_args: tuple[str, ...] = ()
    bin_dir: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, repo_dir: str) -> dict[str, str]:
        """Return environment variables for an agent's commands, so that the agent uses the `python` and `pytest` that
        grade its work."""
        path = [f"{repo_dir}/{part}".removesuffix("/.") for part in self.python_path] + list(self.dependencies)
        found = {"PATH": f"{self.bin_dir}:{DEFAULT_PATH}" if self.bin_dir else DEFAULT_PATH, **self.variables}
        return {**found, "PYTHONPATH": ":".join(path)} if path else found


def interpreter() -> tuple[str, tuple[Mount, ...]]:
    """Return the path of this Python in slots, and the mount that it needs if it is outside the system directories."""
    own = this_interpreter()
    return own.path, own.mounts


class DependencyCache:
    """Folders of installed wheels on the host, one per set of pinned requirements. Safe across processes."""

    def __init__(self, root: Path, *, timeout_s: float = 600.0) -> None:
        self.root = root
        self._timeout_s = timeout_s

    async def toolchain(self, install: Install, *, closed: bool = True) -> Toolchain:
        """Return the toolchain for an installation. The requirements are installed only once. If `closed` is true,
        packages that the requirements depend on are not installed.

        Raises `TaskError` for a text that is not a requirement, and `PrepareError` with the end of the installer's
        output.
        """
        python, mounts = interpreter()
        place = await self._ensure(install.requirements, python, mounts, closed)
        return Toolchain(
            command=(python, "-s", "-S", "-B"),
            mounts=(*mounts, Mount(str(place), DEPENDENCIES_DIR)),
            dependencies=(f"{DEPENDENCIES_DIR}/site",),
            python_path=install.python_path,
            pytest_args=install.pytest_args,
            bin_dir=f"{DEPENDENCIES_DIR}/bin",
        )

    async def _ensure(self, requirements: Sequence[str], python: str, mounts: Sequence[Mount], closed: bool) -> Path:
        facts = [python, sys.version, *sorted(requirements), *([] if closed else ["and what they depend on"])]
        key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]

        async def install(fresh: Path) -> None:
            site = fresh / "site"
            site.mkdir()
            if requirements:
                await install_wheels(requirements, site, python, mounts, closed=closed, timeout_s=self._timeout_s)
            _write_commands(fresh / "bin", python)

        return await build_once(self.root / key, install, timeout_s=self._timeout_s)


def _write_commands(bin_dir: Path, python: str) -> None:
    """Write `python`, `python3` and `pytest` for the agent's shell."""
    bin_dir.mkdir(parents=True)
    for name, tail in (("python", ""), ("python3", ""), ("pytest", " -m pytest")):
        script = bin_dir / name
        script.write_text(f'#!/bin/sh\nexec "{python}"{tail} "$@"\n')
        script.chmod(0o755)
