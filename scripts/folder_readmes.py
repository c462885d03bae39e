"""Check that each folder of a package has a README with a line for each file: the first sentence of its docstring.

With --write, write them. The folders are those below `packages/*/src` and `extensions/*/src`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = "README.md"


def line_of(path: Path) -> str:
    """Return the line of a file or folder. Raises `SystemExit` if it has no docstring."""
    name, source = (f"{path.name}/", path / "__init__.py") if path.is_dir() else (path.name, path)
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{source.relative_to(ROOT)} needs a docstring: its first sentence is a line of {README}")
    sentence = re.split(r"(?<=[.:?!])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0].rstrip(".:")
    return f"- `{name}`: {sentence}."


def wanted(folder: Path) -> str:
    """Return the README of a folder with Python files."""
    inner = [path for path in folder.iterdir() if (path / "__init__.py").is_file()]
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    title = folder.name
    return f"# {title}\n\n" + "".join(f"{line_of(path)}\n" for path in (*sorted(inner), *sorted(files)))


def folders() -> Iterator[Path]:
    """Yield the folders that need a README."""
    for source in sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("extensions/*/src")]):
        yield from sorted(path.parent for path in source.rglob("__init__.py"))


def main(arguments: list[str]) -> int:
    """Check or write."""
    stale = []
    for folder in folders():
        path, text = folder / README, wanted(folder)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if arguments == ["--write"]:
                path.write_text(text, encoding="utf-8")
    if stale and arguments != ["--write"]:
        print("run `python scripts/folder_readmes.py --write`, which changes:", *stale, sep="\n  ")
        return 1
    print("each folder of the packages has a line for each file")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
