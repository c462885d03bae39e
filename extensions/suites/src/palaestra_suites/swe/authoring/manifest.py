"""Read and write the manifest of packages and their bugs, from which tasks are rebuilt without a search.

A package is pinned by the sha256 of its source distribution, and a bug by its file, byte span, old text and
replacement. The manifest contains no other text from a package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from palaestra_slots.core.errors import ConfigError

SCHEMA = "palaestra.swe-manifest/1"


@dataclass(frozen=True, slots=True)
class PinnedMutation:
    """One bug. `tests` are the test files to run, and `fail_to_pass` is the number of tests in them that detect the
    bug."""

    id: str
    path: str
    kind: str
    start: int
    end: int
    before: str
    replacement: str
    tests: tuple[str, ...]
    fail_to_pass: int


@dataclass(frozen=True, slots=True)
class PinnedPackage:
    """One release. `requirements` are needed in addition to the manifest's `requirements`. Rows never name `flaky`
    tests."""

    name: str
    version: str
    sha256: str
    python_path: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    pytest_args: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    mutations: tuple[PinnedMutation, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """All pinned packages. `requirements` is pytest with its dependencies, shared by all packages."""

    requirements: tuple[str, ...]
    packages: tuple[PinnedPackage, ...]


def load_manifest(path: Path | None = None) -> Manifest:
    """Read a manifest; None reads the built-in one. Raises `ConfigError`."""
    name = path or "the built-in manifest"
    try:
        text = path.read_text() if path else resources.files(__package__).joinpath("manifest.json").read_text()
        raw = json.loads(text)
        if raw.get("schema") != SCHEMA:
            raise ConfigError(f"{name}: schema {raw.get('schema')!r} is not {SCHEMA!r}; use a matching version")
        return Manifest(tuple(raw["requirements"]), tuple(_package(entry) for entry in raw["packages"]))
    except OSError as problem:
        raise ConfigError(f"the manifest cannot be read: {problem}") from None
    except (ValueError, TypeError, KeyError) as problem:
        if isinstance(problem, ConfigError):
            raise
        raise ConfigError(f"{name} is not a manifest: {type(problem).__name__}: {problem}") from problem


def dump_manifest(manifest: Manifest) -> str:
    """Return the manifest as text with one line per bug, for readable diffs."""
    head = json.dumps({"schema": SCHEMA, "requirements": list(manifest.requirements)})[:-1]
    packages = ",\n".join(_dump_package(package) for package in manifest.packages)
    return f'{head}, "packages": [\n{packages}\n]}}\n'


def _dump_package(package: PinnedPackage) -> str:
    fields = asdict(package)
    mutations = fields.pop("mutations")
    lines = ",\n".join("  " + json.dumps(mutation) for mutation in mutations)
    return f'{json.dumps(fields)[:-1]}, "mutations": [\n{lines}\n]}}'


def _package(raw: dict[str, object]) -> PinnedPackage:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    mutations = raw.get("mutations", [])
    values["mutations"] = tuple(_mutation(entry) for entry in _objects(mutations))
    return PinnedPackage(**values)  # type: ignore[arg-type]  # wrong keys and shapes raise TypeError, reported above


def _mutation(raw: dict[str, object]) -> PinnedMutation:
    return PinnedMutation(**{key: tuple(v) if isinstance(v, list) else v for key, v in raw.items()})  # type: ignore[arg-type]


def _objects(value: object) -> Iterable[dict[str, object]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise TypeError("mutations must be a list of objects")
    return value
