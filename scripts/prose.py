"""Count stiff phrases in the documentation and the docstrings, and fail above a limit.

`python scripts/prose.py` checks; `python scripts/prose.py docs/tools.md extensions/chat/src` lists each stiff phrase in
these files. Code blocks and `code` do not count. A single hit can be good English, so the limits apply to the rate.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("extensions/*/src")])

LIMITS = {"README.md": 4.0, "docs": 4.0, "CHANGELOG.md": 5.0, "docstrings": 5.0}
LIMITS |= {str(path.parent.relative_to(ROOT) / "README.md"): 4.0 for path in SOURCES}
"""The maximum number of hits per 1,000 words."""

STIFF = {
    "name the noun": r"\b(?:of|to|for|by|in|with|from|and|but|is|are|on) (?:what|whom|whose|who)\b(?! (?:to|if)\b)"
    r"|(?:^|[.;:] )(?:What|Who|Whom) (?:is|are|was|has|had|a|an|the|it|they|you|comes?|does|must|may)\b(?![^.]*\?)",
    "write if or when": r"\bwhere (?:there|nothing|none|no|nobody|one|anything|something|given)\b",
    "write report, print or record": r"\b(?:tells?|told) (?:what|why|how|who|whether)\b|\b(?:is|are) (?:told|said)\b",
    "name who": r"\b(?:no|some|every|any)body\b|\bwhoever\b",
    "write a modern word": r"\b(?:anew|mends?|mended|beside|besides|hitherto|whereupon|thereof|for ever|way out)\b"
    r"|\bgo(?:es)? on\b(?! the\b)|\bat once\b",
    "negate the verb": r"\b(?:is|are|was|were) no(?:ne)? (?!longer|more\b|less\b|such\b|one\b)[a-z]+\b",
    "write field's term": r"\brungs?\b|\bis paid\b|\bpaid (?:1|0|for)\b|\bthe world\b",
}
_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in STIFF.values()), re.MULTILINE)


def docstrings(path: Path) -> str:
    """Return all docstrings of a module, including the strings that document attributes."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        for each in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                found.append(each.value.value)
    return "\n\n".join(found)


def prose(text: str) -> str:
    """Return the text without code and the targets of links."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "`", text)


def texts(kind: str) -> Iterator[tuple[Path, str]]:
    if kind == "docstrings":
        for path in sorted(path for folder in SOURCES for path in folder.rglob("*.py")):
            yield path, prose(docstrings(path))
    else:
        where = ROOT / kind
        for path in sorted(where.rglob("*.md")) if where.is_dir() else [where]:
            if "_build" not in path.parts:
                yield path, prose(path.read_text())


def places(path: Path) -> Iterator[str]:
    text = docstrings(path) if path.suffix == ".py" else path.read_text()
    for match in _PATTERN.finditer(prose(text)):
        (rule,) = [name for name, pattern in STIFF.items() if re.search(pattern, match[0], re.MULTILINE)][:1] or ["?"]
        line = match.string[max(match.start() - 40, 0) : match.end() + 40].replace("\n", " ")
        yield f"{path}: {rule}: …{line}…"


def main(arguments: list[str]) -> int:
    if arguments:
        for name in arguments:
            given = Path(name)
            for path in sorted([*given.rglob("*.md"), *given.rglob("*.py")]) if given.is_dir() else [given]:
                for place in places(path):
                    print(place)
        return 0
    failed = False
    for kind, limit in LIMITS.items():
        found = {path: (len(_PATTERN.findall(text)), len(text.split())) for path, text in texts(kind)}
        hits, words = (sum(numbers) for numbers in zip(*found.values(), strict=True))
        rate = 1000 * hits / max(words, 1)
        print(f"{kind}: {rate:.1f} stiff phrases per 1,000 words (limit {limit:.0f})")
        if rate > limit:
            failed = True
            worst = sorted(found, key=lambda path: -found[path][0])[:8]
            print("  most in", ", ".join(f"{path.relative_to(ROOT)} ({found[path][0]})" for path in worst))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
