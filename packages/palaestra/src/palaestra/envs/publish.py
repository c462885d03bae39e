"""Makes a wheel of an environment that is one file, so that others can install it and run it by name.

Source of the format: https://packaging.python.org/en/latest/specifications/binary-distribution-format
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from palaestra.envs.discovery import load_environment
from palaestra.rollouts.export.csv_rows import UnixRows
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import replaced, writing

_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of all files, the earliest that a zip file can have: the same environment gives the same wheel."""


@dataclass(frozen=True, slots=True)
class Published:
    """A wheel. `name` runs the environment once it is installed. `ours` are the packages of Palaestra that it needs,
    which the wheel does not declare, because a package index may have other packages of these names."""

    path: Path
    name: str
    ours: Sequence[str]
    requires: Sequence[str]


def publish(reference: str, folder: Path, *, version: str = "0.1.0", data: Sequence[Path] = ()) -> Published:
    """Write the wheel of the environment `FILE.py` or `FILE.py:NAME` to a folder. `data` are files that the environment
    reads beside its own file. Raises `ConfigError` for what would not work on another machine, and `DiskError`."""
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"{version!r} is not a version: write one such as 0.1.0")
    path = Path(reference.partition(":")[0])
    if path.suffix != ".py":
        raise ConfigError(f"{reference} is no file: write FILE.py or FILE.py:NAME")
    form = load_environment(reference, Path.cwd())
    name, package = form.reference.rpartition(":")[2], path.stem
    if not package.isidentifier() or package in sys.stdlib_module_names or package.startswith("palaestra"):
        raise ConfigError(f"{path.name} cannot be the name of a package: rename the file, for example to {name}_env.py")
    source = path.read_bytes()
    roots = _imported(path, tree := ast.parse(source))
    _refuse_paths(path, tree)
    ours = ["palaestra", *sorted({each.replace("_", "-") for each in roots if each.startswith("palaestra_")})]
    if form.kind != "function" and "palaestra-contract" not in ours:
        ours.append("palaestra-contract")  # the classes can also be imported from `palaestra`
    files = {f"{package}/__init__.py": source}
    for each in data:
        if not each.is_file() or each.name == "__init__.py":
            raise ConfigError(f"{each} is no file that can be beside {path.name} in a package")
        files[f"{package}/{each.name}"] = each.read_bytes()
    # The versions with which the author has tried it; later ones most likely work too.
    requires = [f"{each}>={metadata.version(each)}" for each in _distributions(roots)]
    files |= _dist_info(package, version, name, form.about, requires)
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    content = _zipped(files, f"{package}-{version}.dist-info/RECORD")
    _check_import(content, package)
    with writing(wheel):
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(wheel) as file:
            file.write(content)
    return Published(wheel, name, ours, requires)


def _refuse_paths(path: Path, tree: ast.Module) -> None:
    """Raise `ConfigError` if a text in a file is a path that only this machine has."""
    own = {Path.home().resolve(), path.resolve().parent} - {Path("/")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/"):
            named = Path(node.value.partition("\n")[0])
            if not own.isdisjoint([named, *named.parents]):
                raise ConfigError(
                    f"{path}, line {node.lineno} names {named}, which only this machine has: make it a parameter"
                )


def _imported(path: Path, tree: ast.Module) -> set[str]:
    """Return the top-level packages that a file imports. Raises `ConfigError` if it imports a file beside it."""
    roots = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    # A run by path finds such a file because its folder is on the import path. An installed package would not.
    beside = [each for each in sorted(roots) if (path.parent / f"{each}.py").is_file() and each != path.stem]
    if beside:
        raise ConfigError(
            f"{path} imports {beside[0]}.py, which is beside it: put both into one file, or make a package of your own "
            'with an entry point in "palaestra.environments"'
        )
    return roots


def _distributions(roots: set[str]) -> list[str]:
    """Return the distributions of these packages, without the standard library and Palaestra."""
    names = metadata.packages_distributions()
    found = {names[root][0] for root in roots - sys.stdlib_module_names if root in names}
    return sorted(each for each in found if each.partition("-")[0] != "palaestra")


def _dist_info(
    package: str, version: str, name: str, about: str, requires: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    folder = f"{package}-{version}.dist-info"
    summary = " ".join(about.split("\n\n")[0].split())
    lines = ["Metadata-Version: 2.1", f"Name: {package.replace('_', '-')}", f"Version: {version}"]
    lines += [f"Summary: {summary}"] if summary else []
    lines += ["Requires-Python: >=3.11", *(f"Requires-Dist: {each}" for each in requires)]
    yield f"{folder}/METADATA", "\n".join([*lines, ""]).encode()
    yield f"{folder}/WHEEL", b"Wheel-Version: 1.0\nGenerator: palaestra\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    yield f"{folder}/entry_points.txt", f"[palaestra.environments]\n{name} = {package}:{name}\n".encode()


def _check_import(wheel: bytes, package: str) -> None:
    """Raise `ConfigError` if the package cannot be imported where only the wheel is."""
    with tempfile.TemporaryDirectory(prefix="palaestra-") as folder:
        zipfile.ZipFile(io.BytesIO(wheel)).extractall(folder)
        environ = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-P", "-c", f"import {package}"]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise ConfigError(
            f"the installed environment could not be imported: {reason}. If it reads a file, name the file with "
            "--data, and find it with Path(__file__)"
        )


def _zipped(files: Mapping[str, bytes], record: str) -> bytes:
    """Return the files as a zip file, with a record of their hashes."""
    rows, text = io.StringIO(), io.BytesIO()
    writer = csv.writer(UnixRows(rows))
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(content)])
    writer.writerow([record, "", ""])
    with zipfile.ZipFile(text, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, record: rows.getvalue().encode()}.items():
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, content)
    return text.getvalue()
