"""Check the imports of the tree against the order of the packages that it is split into.

`slots` imports nothing of ours, `tokens` the core of slots, and the runtime both. Extensions import these three, and
the other extensions that `EXTENSIONS` names. Imports inside functions, imports for types, names of `palaestra` itself,
and modules that strings name, such as `"palaestra_cloud.cluster.worker"`, count.

With --tests, print the folders of tests in the order in which `.ci/run` runs them. The first line has those of packages
that differ from the first parent of the last commit, and of the packages that use them; the second line has the others.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = {"slots": "", "tokens": "slots/core", "runtime": "slots tokens"}
EXTENSIONS = {
    "contract": "cloud",
    "suites": "toolsets",
    "train": "audit",
    "integrations": "suites",
    "chat": "toolsets",
    "gateway": "toolsets chat",
}
EXTENSIONS |= dict.fromkeys(("audit", "view", "cloud", "e2b", "toolsets"), "")
ALLOWED = {name: words.split() for name, words in LIBRARIES.items()}
ALLOWED |= {name: [*LIBRARIES, *words.split()] for name, words in EXTENSIONS.items()}
"""What each package may import: packages, or a top folder of a package."""
PLACES = {
    "slots": "palaestra_slots",
    "tokens": "palaestra_tokens",
    "runtime": "__main__ agent cli envs rollouts tools",
    "contract": "palaestra_contract compat",
    "suites": "palaestra_suites grading",
    "audit": "palaestra_audit",
    "train": "palaestra_train",
    "integrations": "palaestra_integrations",
    "view": "palaestra_view",
    "chat": "palaestra_chat",
    "gateway": "palaestra_gateway",
    "cloud": "palaestra_cloud",
    "e2b": "palaestra_e2b",
    "toolsets": "palaestra_toolsets",
}
"""The files and folders of each package. Of the names that fit a module, the longest counts."""
PACKAGES = {place: package for package, names in PLACES.items() for place in names.split()}
FOLDERS = {
    path.name: str(path.relative_to(ROOT))
    for kind in ("packages", "extensions")
    for path in sorted(ROOT.glob(f"{kind}/*/src/palaestra*"))
}
"""The folders that have been split so far. Names of modules in `palaestra` are written without it."""


def places(module: str) -> list[str]:
    """Return a module and the folders that contain it, the innermost first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def package_of(module: str) -> str:
    """Return the package that a module will belong to."""
    return next((PACKAGES[place] for place in places(module) if place in PACKAGES), "")


def imported(tree: ast.Module, files: set[str]) -> Iterator[str]:
    """Yield what a module imports, and the files that its strings name, as `palaestra` and a dotted name."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    strings = {text.partition(":")[0].rstrip(".") for text in constants if isinstance(text, str) and " " not in text}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
    # A folder and a relative name make a name together, as in `import_module(f"palaestra.cli.{module}")`.
    folders = {text for text in strings if text.partition(".")[0] in FOLDERS and text != "palaestra"}
    named = folders | {f"{folder}.{text}" for folder in folders for text in strings}
    yield from (name for name in named if name.removeprefix("palaestra.") in files)


def against_the_order(root: Path) -> set[tuple[str, str]]:
    """Return the pairs of modules of the tree at `root` of which the first must not import the second."""
    trees = {
        ".".join((name, *path.relative_to(root / folder).with_suffix("").parts)).removeprefix("palaestra."): path
        for name, folder in FOLDERS.items()
        for path in (root / folder).rglob("*.py")
    }
    files = set(trees)
    names = [
        node for node in ast.walk(ast.parse(trees.pop("__init__").read_bytes())) if isinstance(node, ast.ImportFrom)
    ]
    public = {alias.asname or alias.name: str(node.module) for node in names for alias in node.names}
    found = set()
    trees.pop("palaestra_contract.moved_modules", None)  # a table of old names, like the public names of `palaestra`
    for module, path in trees.items():
        if not (package := package_of(module)):
            raise SystemExit(f"{module} belongs to no package: add it, or its folder, to PLACES in {__file__}")
        for full_name in imported(ast.parse(path.read_bytes()), files):
            root_name, _, name = full_name.partition(".")
            if root_name not in FOLDERS or not name:
                continue
            full_name = public.get(name.partition(".")[0], full_name) if root_name == "palaestra" else full_name
            name = full_name.removeprefix("palaestra.")
            target = next((place for place in places(name) if {place, f"{place}.__init__"} & files), "")
            needed = package_of(target)
            folder = target.removeprefix("palaestra_slots.").partition(".")[0]
            if needed not in ("", package) and not {needed, f"{needed}/{folder}"} & {*ALLOWED[package]}:
                found.add((module, target))
    return found


def tests_in_order(changed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the folders of tests of packages with a changed file and of those that use them, and the other folders."""

    def owner(path: str) -> str:
        top, _, rest = path.partition("/")
        return rest.partition("/")[0].replace("palaestra", "runtime") if top in ("packages", "extensions") else top

    first, size = {owner(path) for path in changed}, 0
    while size < (size := len(first)):
        first |= {name for name, used in ALLOWED.items() if {each.partition("/")[0] for each in used} & first}
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["testpaths"]
    return [path for path in paths if owner(path) in first], [path for path in paths if owner(path) not in first]


def main() -> int:
    """Print a line for each import that breaks the order."""
    if "--tests" in sys.argv:  # a checkout without the previous commit has no output here: then the order is as ever
        names = subprocess.run(["git", "diff", "--name-only", "HEAD^"], cwd=ROOT, capture_output=True, text=True)
        for paths in tests_in_order(names.stdout.splitlines()):
            print(*paths)
        return 0
    found = sorted(against_the_order(ROOT))
    for module, target in found:
        print(
            f"{module} imports {target}, but {package_of(module)} must not import {package_of(target)}: move what both "
            "need to the lower package, or let the lower package declare a protocol or read an entry point"
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
