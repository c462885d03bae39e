"""List the packages that a repository itself declares for its tests, in the order in which they are tried.

`[dependency-groups]` (PEP 735), extras, the groups of poetry, pdm and hatch, requirements files for tests and
development, `deps` of tox.ini, and requirements.txt. Does no I/O: the caller reads the files of `FILES`.

Invariant: each source consists of texts that `is_requirement` accepts; others are left out.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from palaestra_slots.core.config import read_toml
from palaestra_slots.core.types import JSON
from palaestra_slots.images.requirements import is_requirement

_GROUPS = ("test", "tests", "testing", "unittest", "dev", "develop", "development", "all")
_TEST_FILES = (
    "requirements-test.txt", "requirements-tests.txt", "requirements-testing.txt", "test-requirements.txt",
    "test_requirements.txt", "requirements_test.txt", "requirements_tests.txt", "requirements/test.txt",
    "requirements/tests.txt", "requirements/testing.txt", "tests/requirements.txt", "test/requirements.txt",
    "requirements-dev.txt", "dev-requirements.txt", "dev_requirements.txt", "requirements_dev.txt",
    "requirements/dev.txt", "requirements/development.txt",
)  # fmt: skip
_PYPROJECT, _SETUP_CFG, _SETUP_PY, _TOX, _PLAIN = (
    "pyproject.toml", "setup.cfg", "setup.py", "tox.ini", "requirements.txt",
)  # fmt: skip
FILES = (_PYPROJECT, _SETUP_CFG, _SETUP_PY, _TOX)
"""The files whose text `declared` reads."""

_POETRY_VERSION = re.compile(r"\^(\d+(?:\.\d+)*)|(\d+(?:\.\d+)*)|~(\d+(?:\.\d+)*)")


@dataclass(frozen=True, slots=True)
class Declared:
    """A place of the repository that declares packages, and these packages in pip's syntax."""

    place: str
    requirements: tuple[str, ...]


def declared(texts: Mapping[str, str], paths: Collection[str]) -> list[Declared]:
    """Return what a repository declares for its tests. `texts` has the texts of those of `FILES` that exist, and
    `paths` are all files of the repository."""
    project = _toml(texts.get(_PYPROJECT, ""))
    found = [*_groups(project), *_extras(project, texts), *_tool_groups(project)]
    found += [Declared(path, (f"-r{path}",)) for path in _TEST_FILES if path in paths]
    found += _tox(texts.get(_TOX, ""))
    found += [Declared(_PLAIN, (f"-r{_PLAIN}",))] if _PLAIN in paths else []
    kept = (
        Declared(each.place, tuple(name for name in each.requirements if is_requirement(name, in_repository=True)))
        for each in found
    )
    return [each for each in kept if each.requirements]


def required_python(texts: Mapping[str, str]) -> str:
    """Return the versions of Python that a repository requires (`>=3.12`), or an empty string."""
    project = _toml(texts.get(_PYPROJECT, ""))
    told = _table(project, "project").get("requires-python")
    poetry = _table(project, "tool", "poetry", "dependencies").get("python")
    if isinstance(told, str):
        return told
    if isinstance(poetry, str):
        return re.sub(r"\^(\d+\.\d+)(?:\.\d+)*", r">=\1,<4", poetry)
    if (match := re.search(r"^python_requires\s*=\s*(.+)$", texts.get(_SETUP_CFG, ""), re.MULTILINE)) is not None:
        return match[1].strip()
    match = re.search(r"""python_requires\s*=\s*["']([^"']+)["']""", texts.get(_SETUP_PY, ""))
    return match[1] if match else ""


def _groups(project: Mapping[str, JSON]) -> Iterator[Declared]:
    groups = _table(project, "dependency-groups")
    for name in _ordered(groups):
        yield Declared(f"[dependency-groups] {name}", tuple(_members(groups, name, set())))


def _members(groups: Mapping[str, JSON], name: str, seen: set[str]) -> Iterator[str]:
    """Yield the requirements of a group and of the groups that it includes."""
    if name in seen:
        return
    seen.add(name)
    members = groups.get(name)
    for member in members if isinstance(members, list) else []:
        if isinstance(member, str):
            yield member
        elif isinstance(member, Mapping) and isinstance(member.get("include-group"), str):
            yield from _members(groups, str(member["include-group"]), seen)


def _extras(project: Mapping[str, JSON], texts: Mapping[str, str]) -> Iterator[Declared]:
    names = dict.fromkeys(_table(project, "project", "optional-dependencies"))
    names |= dict.fromkeys(_table(project, "tool", "poetry", "extras"))
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(texts.get(_SETUP_CFG, ""))
        names |= dict.fromkeys(
            parser.options("options.extras_require") if parser.has_section("options.extras_require") else ()
        )
    except configparser.Error:
        pass
    body = re.search(r"extras_require\s*=\s*(?:dict\(|\{)(.*)", texts.get(_SETUP_PY, ""), re.DOTALL)
    told = re.findall(r"""["']?(\w[\w-]*)["']?\s*[:=]\s*[\[(\w]""", body[1]) if body else []
    names |= {name: None for name in told if name in _GROUPS}
    for name in _ordered(names):
        yield Declared(f"extra {name}", (f".[{name}]",))


def _tool_groups(project: Mapping[str, JSON]) -> Iterator[Declared]:
    poetry = _table(project, "tool", "poetry", "group")
    for name in _ordered(poetry):
        packages = _table(poetry, name, "dependencies")
        yield Declared(f"poetry group {name}", tuple(_poetry(packages)))
    old = _table(project, "tool", "poetry", "dev-dependencies")
    yield Declared("poetry dev-dependencies", tuple(_poetry(old)))
    pdm = _table(project, "tool", "pdm", "dev-dependencies")
    for name in _ordered(pdm):
        yield Declared(f"pdm group {name}", _strings(pdm[name]))
    hatch = _table(project, "tool", "hatch", "envs")
    for name in (*_ordered(hatch), "default"):
        environment = _table(hatch, name)
        more = (*_strings(environment.get("dependencies")), *_strings(environment.get("extra-dependencies")))
        features = (f".[{feature}]" for feature in _strings(environment.get("features")))
        yield Declared(f"hatch environment {name}", (*features, *more))


def _tox(text: str) -> Iterator[Declared]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    for section in parser.sections():
        if section in ("testenv", "testenv:test", "testenv:tests", "testenv:py"):
            lines = [line.strip() for line in parser.get(section, "deps", fallback="").splitlines()]
            extras = [f".[{name.strip()}]" for name in re.split(r"[,\s]+", parser.get(section, "extras", fallback=""))]
            names = [re.sub(r"^-r\s+", "-r", line).partition(" #")[0].strip() for line in lines]
            yield Declared(f"tox.ini [{section}]", (*(extra for extra in extras if extra != ".[]"), *names))


def _poetry(packages: Mapping[str, JSON]) -> Iterator[str]:
    for name, told in packages.items():
        version = told if isinstance(told, str) else told.get("version") if isinstance(told, Mapping) else None
        match = _POETRY_VERSION.fullmatch(version) if isinstance(version, str) else None
        yield f"{name}>={next(filter(None, match.groups()))}" if match else name


def _ordered(names: Collection[str]) -> list[str]:
    """Return the names of groups for tests, the likeliest first, then further ones with `test` in their names."""
    first = [name for name in _GROUPS if name in names]
    return first + [name for name in names if "test" in name.lower() and name not in first]


def _toml(text: str) -> Mapping[str, JSON]:
    try:
        return read_toml(text)
    except (ValueError, RecursionError):
        return {}


def _table(values: Mapping[str, JSON], *names: str) -> Mapping[str, JSON]:
    for name in names:
        found = values.get(name)
        values = found if isinstance(found, Mapping) else {}
    return values


def _strings(value: JSON) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
