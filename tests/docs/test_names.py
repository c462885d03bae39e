"""The docs name only what exists: files, modules, imports, links, commands and make targets."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import click

from palaestra.cli.main import cli

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in (*ROOT.glob("packages/*/src/*"), *ROOT.glob("extensions/*/src/*"))}
PROJECTS = [ROOT, *ROOT.glob("packages/*"), *ROOT.glob("extensions/*")]
FOLDERS = [
    *PROJECTS,
    *PACKAGES.values(),
    *(package.parent for package in PACKAGES.values()),
    *(path for package in PACKAGES.values() for path in package.rglob("*") if path.is_dir()),
]
OURS = {path.name for path in (*ROOT.iterdir(), *FOLDERS) if path.is_dir() and path not in PROJECTS} - {".git"}
"""First parts of a path in this repository; one that starts otherwise is a file of a workspace or of a run."""
PLACEHOLDER = re.compile(r"\b[A-Z]+(_|\.|/|$)")

PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("extensions/*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
]


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """The code in single backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))


def shell_lines(page: Path) -> list[str]:
    """The code in backticks, and the lines of all blocks that are not Python."""
    text = "\n".join(text for language, text in blocks(page) if language != "python")
    return [*spans(page), *text.splitlines()]


def imported(code: str) -> set[str]:
    """`module.name` of everything that the code imports from our packages."""
    froms = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in froms if node.module and node.module.split(".")[0] in PACKAGES]
    return {f"{node.module}.{alias.name}" for node in ours for alias in node.names}


def exists(name: str) -> bool:
    """Whether a dotted name is a module or a module's attribute; of a module that needs a package which is not here,
    whether its source defines it."""
    module, _, attribute = name.rpartition(".")
    for candidate in (name, module):
        try:
            found = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            package = PACKAGES[candidate.partition(".")[0]]
            source = package.parent / f"{candidate.replace('.', '/')}.py"
            if str(error.name).startswith("palaestra") or not source.is_file():
                continue
            return attribute in {getattr(node, "name", None) for node in ast.parse(source.read_text()).body}
        return candidate == name or hasattr(found, attribute)
    return False


def test_paths_exist() -> None:
    for page in PAGES:
        paths = [span for span in spans(page) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) and "/" in span]
        ours = [path for path in paths if path.split("/")[0] in OURS and not PLACEHOLDER.search(path)]
        assert [path for path in ours if not any((folder / path).exists() for folder in FOLDERS)] == [], page


def test_modules_and_imports_exist() -> None:
    for page in PAGES:
        names = {span for span in spans(page) if re.fullmatch(r"palaestra(_[a-z]+)?(\.\w+)+", span)}
        for language, code in blocks(page):
            if language == "python":
                names |= imported(code)
        assert sorted(name for name in names if not exists(name)) == [], page


def test_links_lead_to_files() -> None:
    for page in PAGES:
        targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def test_commands_exist() -> None:
    for page in PAGES:
        context = click.Context(cli)
        for line in shell_lines(page):
            words = re.match(r"(?:\.venv/bin/)?palaestra ([a-z-]+)(?: ([a-z][a-z0-9-]*)(?![\w./:]))?", line)
            if words is None:
                continue
            command = cli.get_command(context, words[1])
            assert command is not None, line
            if isinstance(command, click.Group) and words[2]:
                assert command.get_command(context, words[2]) is not None, line


def test_make_targets_exist() -> None:
    for page in PAGES:
        targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = {found[1] for line in shell_lines(page) if (found := re.match(r"make ([a-z0-9-]+)", line))}
        assert named <= targets, page
