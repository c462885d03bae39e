"""Check the imports of the tree against the order of the packages that it is split into.

`slots` imports nothing of ours, `tokens` the core of slots, and the runtime both. Extensions import these three, and
the other extensions that `EXTENSIONS` names. Imports inside functions, imports for types, names of `palaestra` itself,
and modules that strings name, such as `"palaestra.cluster.worker"`, count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = {"slots": "", "tokens": "slots/core", "runtime": "slots tokens"}
EXTENSIONS = {
    "contract": "tools cloud",
    "suites": "tools",
    "integrations": "suites",
    "chat": "tools",
    "gateway": "tools chat",
}
EXTENSIONS |= dict.fromkeys(("train", "view", "cloud", "e2b", "tools"), "")
ALLOWED = {name: words.split() for name, words in LIBRARIES.items()}
ALLOWED |= {name: [*LIBRARIES, *words.split()] for name, words in EXTENSIONS.items()}
"""What each package may import: packages, or a top folder of a package."""
PLACES = {
    "slots": "palaestra_slots",
    "tokens": "inference",
    "runtime": "__main__ agent cli envs rollouts testing tools tools.net.host_policy tools.serving.mcp_endpoint",
    "contract": """agent.detached_subagents agent.hermes_text cli.serve_tools compat contract
        suites.examples.terminal_test tools.builtin.terminal_stateful tools.builtin.tmux tools.registry.catalog
        tools.runtime.executor tools.runtime.function_calls tools.runtime.session_tasks tools.runtime.ttl tools.serving
        tools.tool_server_client""",
    "suites": "grading suites",
    "train": "cli.serve_trainers cli.train envs.run.feed_trainer envs.run.train trainers",
    "integrations": "integrations",
    "view": "cli.annotate cli.view rollouts.imports viewer",
    "chat": "doors",
    "gateway": "doors.gateway",
    "cloud": "cloud cluster",
    "e2b": "doors.e2b",
    "tools": """tools.browser tools.builtin.browser tools.builtin.generated_media tools.builtin.memory
        tools.builtin.mixture_of_agents tools.builtin.rl_training tools.builtin.session_search tools.builtin.skills
        tools.builtin.vision tools.builtin.web tools.builtin.web_crawl tools.net tools.registry.unavailable
        tools.training tools.web""",
}
"""The files and folders of each package. Of the names that fit a module, the longest counts."""
PACKAGES = {place: package for package, names in PLACES.items() for place in names.split()}
FOLDERS = {"palaestra": "src/palaestra", "palaestra_slots": "packages/slots/src/palaestra_slots"}
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
    folders = {text for text in strings if text.partition(".")[0] in FOLDERS and "." in text}
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


def main() -> int:
    """Print a line for each import that breaks the order."""
    found = sorted(against_the_order(ROOT))
    for module, target in found:
        print(
            f"{module} imports {target}, but {package_of(module)} must not import {package_of(target)}: move what both "
            "need to the lower package, or let the lower package declare a protocol or read an entry point"
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
