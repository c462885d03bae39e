"""Changes that close a finding, each played again before it is offered.

A rule knows a change of a task's own files: of a folder in the form of Harbor, or of the Python file of a function
environment. The changed copy is audited for the same kinds. The change is offered as a patch only if its finding is
gone, no other one has come, and nothing of its kind is left untried that was tried before.

Names in the patches and of the patches are checked, because they may come from a set that somebody else wrote. Files
behind links are never read or changed.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from palaestra.tools.patching.edit_diff import whole_diff
from palaestra_audit.audit import Plan, Progress, audit_environment
from palaestra_audit.records import Audit, Finding, Kind, TaskAudit
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.core.io.durable_files import read_regular, replaced, writing
from palaestra_slots.sandbox.slot import WORKSPACE

_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a task as its author wrote them: its folder or, with `file`, the Python file of its environment."""

    task: str
    folder: Path
    file: str = ""
    prefix: str = ""
    """What stands before the paths in a patch."""

    def text(self, path: str) -> str:
        """Return a file; nothing if there is none, or if it is behind a link or no text."""
        parts = PurePosixPath(path).parts
        if ".." in parts or any(self.folder.joinpath(*parts[:end]).is_symlink() for end in range(1, len(parts))):
            return ""
        try:
            return read_regular(self.folder / path).decode()
        except (OSError, UnicodeDecodeError):
            return ""

    def paths(self, below: str) -> list[str]:
        """Return the regular files below a folder of the task."""
        found = (each for each in (self.folder / below).rglob("*") if each.is_file() and not each.is_symlink())
        return [each.relative_to(self.folder).as_posix() for each in found]


@dataclass(frozen=True, slots=True)
class Change:
    """The new texts of files, None for one that is removed, and the findings that should be gone. A `shared` change is
    one for all tasks of the environment."""

    files: Mapping[str, str | None]
    closes: Sequence[Finding]
    shared: bool = False


Rule = Callable[[Source, Sequence[Finding]], Change | None]


def without_leaked_files(source: Source, findings: Sequence[Finding]) -> Change | None:
    """Take the files that have the solution away from what the task gives to the agent."""
    closes = [each for each in findings if each.places]
    files: dict[str, str | None] = {}
    for place in sorted({place for each in closes for place in each.places}):
        if source.file:
            text = _without_entry(files.get(source.file) or source.text(source.file), source.task, place)
            files |= {source.file: text} if text else {}
        else:
            text = ""
            like = [
                each for each in source.paths("environment") if PurePosixPath(each).name == PurePosixPath(place).name
            ]
            for path in like if len(like) == 1 else ():  # with several, the place does not say which
                dockerfile = files.get(_DOCKERFILE) or source.text(_DOCKERFILE)
                text = re.sub(rf"(?m)^(COPY|ADD) \S*{re.escape(PurePosixPath(path).name)} \S+\n", "", dockerfile)
                files |= {path: None} | ({_DOCKERFILE: text} if text != dockerfile else {})
        if not text:
            return None
    return Change(files, closes) if files else None


_DOCKERFILE = "environment/Dockerfile"


def _without_entry(text: str, task: str, place: str) -> str:
    """Return Python code without a file among the `files` of a task; nothing if there is not exactly one such entry."""
    path, lines = PurePosixPath(place), text.encode()
    own = str(path.relative_to(WORKSPACE)) if path.is_relative_to(WORKSPACE) else place
    entries = [
        (given.value, number)
        for call in _python_calls(text)
        if any(isinstance(each, ast.Constant) and each.value == task for each in _argument_values(call))
        for given in call.keywords
        if given.arg == "files" and isinstance(given.value, ast.Dict)
        for number, key in enumerate(given.value.keys)
        if isinstance(key, ast.Constant) and key.value in (own, place)
    ]
    if len(entries) != 1:
        return ""
    files, number = entries[0]
    key = files.keys[number]
    assert key is not None
    after = files.keys[number + 1] if number + 1 < len(files.keys) else None
    begin, end = _offset(lines, key), _offset(lines, after) if after is not None else 0
    if not end:
        begin = _offset(lines, files.values[number - 1], end=True) if number else begin
        end = _offset(lines, files.values[number], end=True)
    made = (lines[:begin] + lines[end:]).decode()
    return made if any(_python_calls(made)) else ""


def _argument_values(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _python_calls(text: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from (each for each in ast.walk(tree) if isinstance(each, ast.Call))


def _offset(source: bytes, node: ast.expr, *, end: bool = False) -> int:
    line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
    return sum(map(len, source.splitlines(keepends=True)[: (line or 1) - 1])) + (column or 0)


_PINNED = {"TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}


def pinned_surroundings(source: Source, findings: Sequence[Finding]) -> Change | None:
    """Let the tests' script of a task folder set the time zone, the locale or the hash seed by itself."""
    script = "" if source.file else source.text("tests/test.sh")
    closes = [each for each in findings if each.trial is not None and each.trial.world.env.keys() & _PINNED.keys()]
    names = {name for each in closes if each.trial is not None for name in each.trial.world.env}
    first, newline, rest = script.partition("\n")
    if not first.startswith("#!") or not newline or not closes:
        return None
    lines = "".join(f"export {name}={value}\n" for name, value in _PINNED.items() if name in names)
    return Change({"tests/test.sh": f"{first}\n{lines}{rest}"}, closes)


_EXIT_CODE = re.compile(
    r"return \(await (?P<sandbox>\w+)\.execute\((?P<quote>['\"])(?:python3? -m )?pytest(?: -\w+)* "
    r"(?P<test>test_\w+\.py)(?P=quote)\)\)\.exit_code == 0(?=\s*(?:#.*)?$)",
    re.MULTILINE,
)
_RUN_TESTS = "from palaestra.grading import run_tests\n"


def run_tests_for_exit_code(source: Source, findings: Sequence[Finding]) -> Change | None:
    """Let a score that trusts the exit code of pytest run the same tests with `run_tests`, if a name of the module has
    their text."""
    text = source.text(source.file) if source.file else ""
    found = _EXIT_CODE.search(text)
    if found is None:
        return None
    names = set(re.findall(rf"['\"]{re.escape(found['test'])}['\"](?:: ?|, ?)([A-Za-z_]\w*)\s*[,)}}]", text))
    imported = re.search(r"^from palaestra import [^(\\\n]*\n", text, re.MULTILINE)
    if len(names) != 1 or imported is None or not re.search(rf"(?m)^{min(names)} = ", text):
        return None
    call = f'return (await run_tests({found["sandbox"]}, {{"{found["test"]}": {min(names)}}})).score()'
    made = f"{text[: found.start()]}{call}{text[found.end() :]}"
    if _RUN_TESTS not in made:
        made = f"{made[: imported.end()]}{_RUN_TESTS}{made[imported.end() :]}"
    return Change({source.file: made}, findings, shared=True)


RULES: Mapping[Kind, Sequence[Rule]] = {
    Kind.LEAKS: (without_leaked_files,),
    Kind.WORLD: (pinned_surroundings,),
    Kind.HACKABLE: (run_tests_for_exit_code,),
}
"""The rules by the kind of finding that they close."""


@dataclass(slots=True)
class Patches:
    """Writes the patches of an audit to a folder."""

    audit: Audit
    plan: Plan
    folder: Path
    _tried: dict[str, str] = field(default_factory=dict)
    """Why a change was not offered, by its text; nothing if it was."""

    def write(self) -> Iterator[str]:
        """Write the patches, and yield a line for each finding kind of each task."""
        for task in self.audit.tasks:
            for kind in Kind:
                findings = [each for each in task.findings if each.kind is kind and not each.note]
                if findings:
                    path = self.folder / _file_name(task.id, kind)
                    why = self._write_patch(task, findings, path)
                    yield f"no patch for {task.id}/{kind}: {why}" if why else f"patch for {task.id}/{kind}: {path}"

    def _write_patch(self, task: TaskAudit, findings: Sequence[Finding], path: Path) -> str:
        """Write the first change that holds. Return why there is none; nothing if there is."""
        source, why = _source(self.plan.reference, task.id), "no rule knows a change"
        if source is None:
            return "it is not in a task folder of Harbor or the file of a function environment"
        for rule in RULES.get(findings[0].kind, ()):
            change = rule(source, findings)
            text = "" if change is None else _patch(source, change)
            if change is None or not text:
                continue
            key = text if change.shared else f"{task.id}\0{text}"
            if key not in self._tried:
                self._tried[key] = self._replayed(source, change)
            if not (why := self._tried[key]):
                path.parent.mkdir(parents=True, exist_ok=True)
                with writing(path), replaced(path) as file:
                    file.write(text.encode())
                return ""
        return why

    def _replayed(self, source: Source, change: Change) -> str:
        """Audit the changed copy. Return why the change does not hold; nothing if it does."""
        with tempfile.TemporaryDirectory(prefix="palaestra-patch-") as temporary:
            copy = Path(temporary, "set")
            kinds = frozenset({*self.plan.kinds, Kind.UNSOLVABLE} - {Kind.DUPLICATE})
            ids = [each.id for each in self.audit.tasks] if change.shared else [source.task]
            name = self.plan.reference.partition(":")[2]
            reference = f"{copy / source.file}:{name}".removesuffix(":") if source.file else str(copy)
            plan = replace(self.plan, reference=reference, out=Path(temporary, "audit.json"), budget_s=None, only=kinds,
                           skip=(), against=None, ids=ids)  # fmt: skip
            try:
                _copy_with_change(source, change, copy)
                new = audit_environment(plan, Progress())
            except (OSError, PalaestraError) as error:
                return f"the changed copy cannot be audited: {error}"
        if not new.complete or {each.id for each in new.tasks} != set(ids):
            return "the changed copy could not be audited completely"
        kind = change.closes[0].kind
        had, has = ({(task.id, each.kind, each.what, each.note) for task, each in every.findings()}
                    for every in (self.audit, new))  # fmt: skip
        if left := [each for each in change.closes if (source.task, each.kind, each.what, each.note) in has]:
            return f"a change was tried, after which it is still there: {left[0].what}"
        if come := sorted(has - had):
            return f"a change was tried, which brings another finding: {come[0][0]}: {come[0][1]}: {come[0][2]}"
        before, after = ({(task.id, each.why) for task in every.tasks for each in task.untried if each.kind is kind}
                         for every in (self.audit, new))  # fmt: skip
        lost = sorted(after - before)
        return f"a change was tried, after which this is not tried any more: {lost[0][1]}" if lost else ""


def _source(reference: str, task: str) -> Source | None:
    """Return where a task's author wrote it; None for a set in another form."""
    path = Path(reference.partition(":")[0])
    if path.suffix == ".py" and path.is_file() and not path.with_name("__init__.py").exists():
        return Source(task, path.resolve().parent, path.resolve().name)
    if PurePosixPath(task).name != task or not path.is_dir():
        return None
    for folder, prefix in ((path / task, f"{task}/"), (path.resolve(), "")):
        if folder.name == task and (folder / "task.toml").is_file() and not folder.is_symlink():
            return Source(task, folder, prefix=prefix)
    return None


def _copy_with_change(source: Source, change: Change, to: Path) -> None:
    if source.file:  # what the file imports from its folder, or reads there
        to.mkdir()
        for each in source.folder.iterdir():
            (to / each.name).symlink_to(each)
    else:
        to = to / source.task
        shutil.copytree(source.folder, to, symlinks=True)
    for path, text in change.files.items():
        mode = (source.folder / path).stat().st_mode
        (to / path).unlink()  # never through a link
        if text is not None:
            (to / path).write_bytes(text.encode())
            (to / path).chmod(mode)


def _patch(source: Source, change: Change) -> str:
    """Return a unified diff; nothing if a path has characters that a reader of patches could misunderstand."""
    parts: list[str] = []
    for path, new in sorted(change.files.items()):
        old, name = source.text(path), f"{source.prefix}{path}"
        if not old or not re.fullmatch(r"[\w.+-][\w.+ /-]*", name, re.ASCII):
            return ""
        mode = "deleted file mode 100644\n" if new is None else ""
        parts.append(f"diff --git a/{name} b/{name}\n{mode}{whole_diff(old, new, name)}")
    return "".join(parts)


def _file_name(task: str, kind: Kind) -> str:
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", task).strip(".-")[:_LONGEST_NAME]
    if safe != task:  # two tasks may not share one name
        safe = f"{safe or 'task'}-{hashlib.sha256(task.encode(errors='replace')).hexdigest()[:8]}"
    return f"{safe}-{kind}.patch"
