"""Changed copies of what a reference solution leaves: mutants, which are wrong, and variants, which are as right.

A mutant that still gets the full score shows what the score does not see. A variant that does not get it shows right
work that is refused. Does no I/O; code is only parsed.
"""

from __future__ import annotations

import ast
import copy
import itertools
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePosixPath

from palaestra_audit.cheats.hollow_work import (
    MOST_BYTES,
    Module,
    hollow_functions,
    hollows,
    hunks,
    is_code,
    parsed,
    without_objects,
)
from palaestra_audit.cheats.replies import is_hexadecimal

Files = Mapping[str, bytes | None]
"""Contents by path. None is a file that is removed."""

_DOCUMENTS = (".md", ".rst", ".adoc")
_PROSE = (".md", ".rst", ".txt", ".adoc", ".cfg", ".toml", ".ini", ".yaml", ".yml")
_MOST_PLACES = 40
"""The maximum number of places of a solution at which an operator is changed."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Changed files, and what the change is. `certain` mutants are wrong for every reader; of the others, some may not
    change any result. `certain` variants keep the meaning in every environment, and `names` variants differ only in
    names that the prompt does not have."""

    what: str
    files: Files
    certain: bool
    names: bool = False


def mutants(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Iterator[Changed]:
    """Yield mutants of the files `after` of a solution, the coarsest first. `before` has the contents of those files,
    as far as they exist, in the prepared workspace."""
    left = {path: data for path, data in after.items() if data != before.get(path) and len(data) <= MOST_BYTES}
    work = {path for path in left if not _is_beside(path)}
    for hollow in hollows(before, after):
        files = without_objects(hollow.files)
        beside = bool(work) and work.isdisjoint(files)
        yield Changed(hollow.what, files, certain=not (beside or hollow.prints or hollow.helpers))
    for path, data in left.items():
        if (ended := _other_end(path, data)) is not None:
            yield Changed(f"other letters and digits in the last line of {path}", {path: ended}, certain=path in work)
    parts = [path for path in left if not _is_beside(path)]
    for path in parts if len(parts) > 1 else ():
        yield Changed(f"{path} left out", {path: before.get(path)}, certain=not _same_code(path, before, left))
    modules = [each for path in left if is_code(path) and (each := parsed(path, before.get(path, b""), left[path]))]
    for module in modules:
        for hollow in hollow_functions(module):
            yield Changed(hollow.what, hollow.files, certain=not (hollow.prints or hollow.helpers))
    yield from _without_hunks(before, left)
    yield from itertools.islice(itertools.chain.from_iterable(map(_other_operators, modules)), _MOST_PLACES)


def _is_beside(path: str) -> bool:
    """Return whether a file is a test or is read by people only, so that a score need not see it."""
    place = PurePosixPath(path)
    tested = place.name.startswith(("test", ".")) or any(part.startswith("test") for part in place.parts)
    return tested or place.suffix in _DOCUMENTS


def _other_end(path: str, data: bytes) -> bytes | None:
    """Return a text of several lines whose last one is wrong; None if it is none, or is code."""
    lines = data.splitlines(keepends=True)
    if path.endswith(_CODE) or b"\0" in data or data.startswith(b"#!") or len(lines) < _LEAST_LINES:
        return None
    if lines[-1].lstrip().startswith(_COMMENTS):
        return None
    made = lines[-1].translate(_OTHER_SIGNS)
    return b"".join([*lines[:-1], made]) if made != lines[-1] else None


_CODE = (".py", ".sh", ".js", ".ts", ".c", ".h", ".cc", ".cpp", ".go", ".rs", ".java", ".rb")
_COMMENTS = (b"#", b"//", b";", b"--", b"<!--", b"*")
_LEAST_LINES = 3
_OTHER_SIGNS = bytes.maketrans(b"0123456789abcdefghijklmnopqrstuvwxyz", b"1234567898bcdefghijklmnopqrstuvwxyza")


def _same_code(path: str, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bool:
    return path.endswith(".py") and _meaning(before.get(path, b"")) == _meaning(after[path]) != ""


def _meaning(source: bytes) -> str:
    """Return code without its layout, comments and docstrings; nothing if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [
                each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
    return ast.dump(tree)


def _without_hunks(before: Mapping[str, bytes], left: Mapping[str, bytes]) -> Iterator[Changed]:
    """Leave out one hunk of a file that was changed in several places."""
    for path, data in left.items():
        old, new = before.get(path, b"").splitlines(keepends=True), data.splitlines(keepends=True)
        if not old or _is_beside(path) or path.endswith(_PROSE):
            continue
        changes = hunks(old, new)
        for first, last, begin, end in changes if len(changes) > 1 else ():
            made = b"".join([*new[:begin], *old[first:last], *new[end:]])
            if path.endswith(".py") and _meaning(made) in ("", _meaning(data)):
                continue
            yield Changed(f"{path} without the change at line {begin + 1}", {path: made}, certain=False)


_OTHER: Mapping[type[ast.AST], ast.AST] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.In: ast.NotIn(), ast.NotIn: ast.In(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(),
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Add(), ast.FloorDiv: ast.Mult(), ast.Mod: ast.Mult(),
    ast.And: ast.Or(), ast.Or: ast.And(), ast.BitAnd: ast.BitOr(), ast.BitOr: ast.BitAnd(),
}  # fmt: skip
"""The operators that mutation testing exchanges: relational, arithmetic and logical ones (DeMillo and others, 1978)."""


_LEFT_OUT = ("sorted", "set", "abs", "round", "reversed", "int", "str", "float")
"""Functions in whose place mutation testing puts their argument."""
_OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _other_operators(module: Module) -> Iterator[Changed]:
    """Change one operator, constant or call in the lines that the solution changed."""
    text = module.source.decode()
    lines = module.source.splitlines(keepends=True)  # as Python counts them; texts have other line ends too
    told = _told(module.tree)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.expr) or node.lineno not in module.lines or node in told:
            continue
        made, old = _mutated(node), ast.get_source_segment(text, node)
        # In a formatted string, Python before 3.12 gives wrong places.
        if made is None or old is None or _meaning(f"({old})".encode()) != _meaning(f"({ast.unparse(node)})".encode()):
            continue
        first = lines[node.lineno - 1][: node.col_offset]
        last = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
        top, rest = lines[: node.lineno - 1], lines[node.end_lineno or node.lineno :]
        new = b"".join([*top, first, f"({ast.unparse(made)})".encode(), last, *rest])
        if _meaning(new):
            what = f"{module.path}:{node.lineno}: {ast.unparse(made)} for {old}"
            yield Changed(" ".join(what.split()), {module.path: new}, certain=False)


def _told(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes of texts that only people read: docstrings, messages of errors and of `assert`, and the
    comparison of `__name__`."""
    texts: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Raise):
            parts = [node]
        elif isinstance(node, ast.Assert) and node.msg is not None:
            parts = [node.msg]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts = [node.value]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "__name__":
            parts = [node]
        texts |= {each for part in parts for each in ast.walk(part)}
    return texts


def _mutated(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and (op := _OTHER.get(type(node.ops[0]))) is not None:
        return ast.Compare(node.left, [op], node.comparators)  # type: ignore[list-item]
    if isinstance(node, ast.BinOp) and (op := _OTHER.get(type(node.op))) is not None:
        return ast.BinOp(node.left, op, node.right)  # type: ignore[arg-type]
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(_OTHER[type(node.op)], node.values)  # type: ignore[arg-type]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is str and node.value:
        return ast.Constant(f"{node.value}x")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OPPOSITE:
        return ast.Call(ast.Name(_OPPOSITE[node.func.id], ast.Load()), node.args, node.keywords)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LEFT_OUT:
        return node.args[0] if len(node.args) == 1 and not node.keywords else None
    return None


def variants(before: Mapping[str, bytes], after: Mapping[str, bytes], asked: str = "") -> Iterator[Changed]:
    """Yield variants of the files `after` of a solution that are as right. What the prompt `asked` names stays."""
    left = {path: data for path, data in after.items() if data != before.get(path) and len(data) <= MOST_BYTES}
    modules = [each for path in left if is_code(path) and (each := parsed(path, before.get(path, b""), left[path]))]
    changes: Mapping[str, Callable[[Module], bytes | None]] = {
        "a comment at the end of": lambda module: module.source.rstrip(b"\n") + b"\n\n# the end\n",
        "a blank line at the end of": lambda module: module.source + b"\n",
        "the code laid out anew in": lambda module: (ast.unparse(module.tree) + "\n").encode(),
        "local names renamed in": _renamed,
        "other equal expressions in": lambda module: _reexpressed(module, asked),
    }
    for what, change in changes.items():
        made = {each.path: new for each in modules if (new := change(each)) is not None and new != each.source}
        if made:
            yield Changed(f"{what} {', '.join(made)}", made, certain=True, names=change is _renamed)
    for private in (True, False):
        if renamed := _other_names(before, left, modules, asked, private=private):
            kind = "helpers with private names" if private else "functions that the prompt does not name"
            yield Changed(f"{kind} renamed in {', '.join(renamed)}", renamed, certain=private, names=private)
    worded = {each.path: new for each in modules if (new := _other_messages(each, asked)) is not None}
    if worded:
        yield Changed(f"other words in the messages of errors in {', '.join(worded)}", worded, certain=False)
    texts = {path: data for path, data in left.items() if not path.endswith(".py") and b"\0" not in data and data}
    toggled = {path: data[:-1] if data.endswith(b"\n") else data + b"\n" for path, data in texts.items()}
    if toggled:
        yield Changed(f"another last newline in {', '.join(toggled)}", toggled, certain=False)
    laid_out = {path: new for path, data in texts.items() if (new := _other_layout(data)) is not None}
    if laid_out:
        yield Changed(f"the JSON laid out anew in {', '.join(laid_out)}", laid_out, certain=False)
    crlf = {each.path: b"\r\n".join(each.source.splitlines()) + b"\r\n" for each in modules if b"\r" not in each.source}
    if crlf:
        yield Changed(f"lines that end with CRLF in {', '.join(crlf)}", crlf, certain=False)


def _other_layout(data: bytes) -> bytes | None:
    """Return a JSON list or object with other blanks; None if it is none, or has what a reader may see differently."""
    try:
        value = json.loads(data)
        old = json.dumps(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list | dict) or "".join(data.decode().split()) != "".join(old.split()):
        return None  # such as a key twice, or a number in another form
    return json.dumps(value, indent=None if b"\n" in data.strip() else 2).encode() + data[len(data.rstrip()) :]


def _renamed(module: Module) -> bytes | None:
    """Rename the local variables of the functions that the solution changed; None if there are none, or if code could
    ask for their names."""
    text = module.source.decode()
    if any(word in text for word in ("locals(", "vars(", "eval(", "exec(", "inspect", "nonlocal", "global ")):
        return None
    tree = copy.deepcopy(module.tree)
    count = 0
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or not module.changes(function):
            continue
        # Not the decorators, defaults and annotations, whose names are those of the scope around the function.
        nodes = [each for statement in function.body for each in ast.walk(statement)]
        if any(isinstance(each, _SCOPES) for each in nodes):
            continue
        arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
        names = [each for each in nodes if isinstance(each, ast.Name)]
        stored = {each.id for each in names if isinstance(each.ctx, ast.Store)} - arguments
        if any(f"{each}_value" in text for each in stored):
            continue
        for name in names:
            if name.id in stored:
                name.id, count = f"{name.id}_value", count + 1
    return (ast.unparse(tree) + "\n").encode() if count else None


def _reexpressed(module: Module, asked: str) -> bytes | None:
    """Write some expressions of the functions that the solution changed in another way, with the same values; None if
    there are none. Calls of built-in functions that the prompt does not name go through another name."""
    tree = copy.deepcopy(module.tree)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {name for node in ast.walk(tree) if isinstance(name := getattr(node, "name", None), str)}
    bound |= {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    known = bound | set(re.findall(r"\w+", asked))
    calls = {name for name in _BUILT_IN - known if f"{name}_of" not in known and "*" not in bound}
    writer = _Reexpressed(calls)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and module.changes(function):
            function.body = [writer.visit(statement) for statement in function.body]
    if not writer.count:
        return None
    heads = (ast.Import, ast.ImportFrom, ast.Expr)
    place = len([*itertools.takewhile(lambda each: isinstance(each, heads), tree.body)])
    tree.body[place:place] = [
        ast.Assign([ast.Name(f"{name}_of", ast.Store())], ast.Name(name, ast.Load())) for name in sorted(writer.used)
    ]
    return (ast.unparse(ast.fix_missing_locations(tree)) + "\n").encode()


_BUILT_IN = frozenset(("sorted", "min", "max", "sum", "any", "all", "len", "enumerate", "zip", "reversed", "range"))
_MIRRORED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq,
}  # fmt: skip


class _Reexpressed(ast.NodeTransformer):
    """Writes expressions in another way, and counts them; `used` are the built-in functions that got another name."""

    def __init__(self, calls: Set[str]) -> None:
        self.calls, self.used, self.count = calls, set[str](), 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.calls:
            self.used.add(node.func.id)
            self.count += 1
            node.func = ast.Name(f"{node.func.id}_of", ast.Load())
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        right, mirrored = node.comparators[0], _MIRRORED.get(type(node.ops[0]))
        # A constant has no effect and no order of its own, so it can be asked first.
        if len(node.ops) == 1 and mirrored and isinstance(right, ast.Constant) and isinstance(right.value, int):
            self.count += 1
            return ast.Compare(right, [mirrored()], [node.left])
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        self.count += 1
        return ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body)


def _other_names(
    before: Mapping[str, bytes], left: Mapping[str, bytes], modules: Sequence[Module], asked: str, *, private: bool
) -> dict[str, bytes]:
    """Return the files of the solution with other names of the functions that it added to its modules, unless the
    prompt or an earlier content of these files names them. Methods keep their names, which a class elsewhere may
    call."""
    known = f"{asked}\n{b' '.join(before.values()).decode(errors='replace')}"
    added = {
        node.name
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("_") is private
        and not node.name.startswith("__")
        and node.name not in ("main", *_called_by_name(module))
        and re.search(rf"\b{re.escape(node.name)}\b", known) is None
    }
    if not added:
        return {}
    name = re.compile(rf"\b({'|'.join(map(re.escape, sorted(added)))})\b".encode())
    made = {path: name.sub(rb"\1_other", data) for path, data in left.items() if path.endswith(".py")}
    return {path: data for path, data in made.items() if data != left[path]}


def _called_by_name(module: Module) -> set[str]:
    """Return the names of functions with a decorator, which may register them by name."""
    return {
        node.name
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.decorator_list
    }


def _joined_texts(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts of which an expression consists beside its values: that of an f-string, or of a sum."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    elif isinstance(node, ast.JoinedStr):
        yield from (each for each in node.values if isinstance(each, ast.Constant))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _joined_texts(node.left)
        yield from _joined_texts(node.right)


def _other_messages(module: Module, asked: str) -> bytes | None:
    """Return code whose raised errors have other messages; None if there are none. A message that the prompt quotes
    stays."""
    tree, count = copy.deepcopy(module.tree), 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not module.changes(node) or not isinstance(node.exc, ast.Call):
            continue
        texts = [(each, each.value) for each in ast.walk(node.exc) if isinstance(each, ast.Constant)]
        words = [(each, text) for each, text in texts if isinstance(text, str) and re.search(r"\w", text)]
        if any(text.strip(" :.,") in asked for _, text in words):
            continue
        for each, text in words[:1]:
            joined = next((found for one in node.exc.args if each in (found := [*_joined_texts(one)])), None)
            for part in joined or ():  # no word of the old message is left, but its values are
                part.value = " "
            each.value, count = "cannot be used: " if joined else f"cannot be used: {text}", count + 1
    return (ast.unparse(tree) + "\n").encode() if count else None


_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ExceptHandler, ast.Import, ast.ImportFrom,
    ast.MatchAs, ast.MatchStar, ast.MatchMapping,
)  # fmt: skip
"""Statements that bind names in another way than as `ast.Name`, or in another scope."""


_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w.])")


def wrong_replies(reply: str) -> Iterator[tuple[str, str]]:
    """Yield other replies than the right one, with what they are."""
    if numbers := [*_NUMBER.finditer(reply)]:
        last = numbers[-1]
        yield "the next number", f"{reply[: last.start()]}{int(last[0]) + 1}{reply[last.end() :]}"
    made = reply[:-1] + reply[-1:].translate({**{code: code + 1 for code in range(ord("a"), ord("z"))}, ord("z"): "a"})
    if made != reply:
        yield "another last letter", made
    if len(half := reply[: len(reply) // 2].rstrip()) > 1:
        yield "the first half of the reply", half
    if re.fullmatch(r"-?\w+(\.\w+)?", reply):
        others = [other for turn in range(1, _AMONG + 1) if (other := _turned(reply, turn)) != reply]
        # In the middle, because a score may rightly take the first or the last word.
        yield "the reply among others of its form", ", ".join([*others[: _AMONG // 2], reply, *others[_AMONG // 2 :]])


_AMONG = 8
"""The number of wrong answers among which the right one is given."""
_ALPHABETS = ("0123456789", string.ascii_lowercase, string.ascii_uppercase)
_HEXADECIMAL_ALPHABETS = ("0123456789", "abcdef", "ABCDEF")


def _turned(word: str, turn: int) -> str:
    """Return a word of the same form, whose characters stand so many places further in their alphabets."""
    prefix = "0x" if word[:2].lower() == "0x" else ""
    table: dict[int, int] = {}
    for alphabet in _HEXADECIMAL_ALPHABETS if is_hexadecimal(word) else _ALPHABETS:
        place = turn % len(alphabet)
        table |= str.maketrans(alphabet, alphabet[place:] + alphabet[:place])
    return f"{word[: len(prefix)]}{word[len(prefix) :].translate(table)}"


def reply_variants(reply: str) -> Iterator[tuple[str, str]]:
    """Yield other forms of the right reply, with what they are."""
    yield "with a newline at its end", f"{reply}\n"
    if reply.endswith("."):
        yield "without its full stop", reply[:-1]
    if _SIGNS.fullmatch(reply) and (close := re.sub(r"[ \t]*([^\d\s])[ \t]*", r"\1", reply)) != reply:
        yield "without the blanks between its numbers and signs", close
    if (laid_out := _other_layout(reply.encode())) is not None:
        yield "with its JSON laid out anew", laid_out.decode()


_SIGNS = re.compile(r"[\d \t/,.:;=+*()-]+")
"""A reply of numbers and signs. A blank between two numbers stays."""
