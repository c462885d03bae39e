"""Make a virtual environment with a repository and pytest in it, for rows of the public data sets.

It is made inside the preparation slot, with a network, and outside the repository. Packages are resolved as of a date,
with uv (`--exclude-newer`); if uv or an index without dates makes this impossible, pip installs the newest versions.

Invariant: no installer and no code of a repository is executed on the host, and every requirement has passed
`check_requirements`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from palaestra_slots.core.errors import PrepareError
from palaestra_slots.images.requirements import check_requirements
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.sandbox.slot import ExecutionResult, Slot
from palaestra_suites.toolchain.interpreters import Interpreter, this_interpreter
from palaestra_suites.toolchain.toolchain import Install, Toolchain

_log = logging.getLogger(__name__)

VENV_DIR = "/opt/palaestra/venv"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PUBLIC_TEST_REQUIREMENTS = ("pytest",)

_PYTHON = f"{VENV_DIR}/bin/python"
_UV_DIR = "/opt/palaestra/uv"
_UV_S = 120.0
_PIP = (_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet")
_BACKENDS = ("setuptools", "flit-core", "poetry-core")
_BACKENDS_OF = "2022-12-31"
"""Older releases of the build backends cannot install a repository in the editable form of PEP 660 that uv requires."""
_INDEXES = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL": "UV_INDEX", "PIP_FIND_LINKS": "UV_FIND_LINKS"}


@dataclass(frozen=True, slots=True)
class RepositoryVenv:
    """The virtual environment of the repository at `repo_dir` of a slot.

    `before` is the date (YYYY-MM-DD) that packages must be older than, or an empty string for the newest versions.
    `env` are environment variables for the installer, such as PIP_INDEX_URL. Methods raise `TaskError` for a text that
    is not a requirement, and `PrepareError` with the end of the installer's output.
    """

    slot: Slot
    repo_dir: str
    python: Interpreter
    before: str = ""
    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)

    async def make(self, install: Install) -> None:
        """Make the environment with pytest, the repository and the row's own packages."""
        check_requirements(install.requirements, in_repository=True)
        await self._run_in_venv([self.python.path, "-m", "venv", "--symlinks", VENV_DIR], "/", await self._variables())
        await self.add([*PUBLIC_TEST_REQUIREMENTS, *install.requirements])

    async def add(self, requirements: Sequence[str]) -> None:
        """Install the repository again, with these packages: requirements, `.[extra]` and `-rFILE`."""
        check_requirements(requirements, in_repository=True)
        extras = [name[2:-1] for name in requirements if name.startswith(".[")]
        repository = f"{self.repo_dir}[{','.join(extras)}]" if extras else self.repo_dir
        files = [name for name in requirements if name.startswith("-r")]
        named = [name for name in requirements if name[0] not in ".-"]
        words = ["-e", repository, *files, "--", *named]
        variables = await self._variables()
        if self.before and await self._dated(words, variables):
            return
        await self._run_in_venv([*_PIP, *words], self.repo_dir, variables)

    async def _dated(self, words: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Install packages of the date with uv. Return False if that is not possible here."""
        if not await self.slot.stat(f"{_UV_DIR}/bin/uv"):
            command = [*_PIP, "--target", _UV_DIR, "uv"]
            if not (await self.slot.execute(command, cwd="/", env=variables, timeout_s=_UV_S)).success:
                return False
        settings = {uv: variables[pip] for pip, uv in _INDEXES.items() if pip in variables}
        settings |= {"UV_NO_CACHE": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_COMPILE_BYTECODE": "1"}
        settings |= {"SSL_CERT_FILE": variables["PIP_CERT"]} if "PIP_CERT" in variables else {}
        argv = [f"{_UV_DIR}/bin/uv", "pip", "install", "--python", _PYTHON, "--exclude-newer", self.before, "--quiet"]
        for name in _BACKENDS if self.before < _BACKENDS_OF else ():
            argv += ["--exclude-newer-package", f"{name}={_BACKENDS_OF}"]
        environment = {**variables, **settings}
        done = await self._quiet([*argv, *words], environment)
        if not done.success and "build_editable" in done.output:  # the repository pins an old build backend
            whole = await self._quiet([*argv, *words[1:]], environment)
            editable = [*_PIP, "--no-deps", "-e", self.repo_dir]
            done = await self._quiet(editable, environment) if whole.success else whole
        if not done.success:
            what = f"the packages of {self.before} cannot be installed, so pip installs the newest ones"
            _log.warning("%s: %s: %s", self.slot.slot_id, what, done.output[-1000:].strip())
        return done.success

    async def _quiet(self, argv: Sequence[str], env: Mapping[str, str]) -> ExecutionResult:
        return await self.slot.execute(
            argv, cwd=self.repo_dir, env=env, timeout_s=self.timeout_s, max_output_bytes=10_000
        )

    async def _variables(self) -> dict[str, str]:
        # Use the host's certificates if the slot has them, so that pip trusts an index with a privately signed one.
        trust = {"PIP_CERT": CERTIFICATES} if await self.slot.stat(CERTIFICATES) else {}
        return {"PIP_NO_CACHE_DIR": "1", **trust, **self.env}

    async def _run_in_venv(self, argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
        problem = f"{' '.join(argv[:6])} … failed"
        await check_execute(
            self.slot, list(argv), problem, cwd=cwd, timeout_s=self.timeout_s, env=env, shown=3000, error=PrepareError
        )


def venv_toolchain(install: Install, python: Interpreter | None = None) -> Toolchain:
    """Return the toolchain of a slot over a snapshot in which `RepositoryVenv` was made."""
    return Toolchain(
        command=(_PYTHON, "-s", "-B"),
        mounts=(python or this_interpreter()).mounts,
        python_path=install.python_path,
        pytest_args=install.pytest_args,
        bin_dir=f"{VENV_DIR}/bin",
    )
