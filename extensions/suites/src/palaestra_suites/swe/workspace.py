"""Prepare a repository in a slot: its files, the task's bug, and a history of one commit.

Unless they are kept, the tests that must start to pass are not in the agent's tree: their functions are removed from
their files, and a file without other tests is left out. Grading writes the complete files.

Invariant: the agent gets one commit with fixed author and dates, without any other object, ref, reflog or remote. The
history therefore does not contain the fix, and preparing twice gives the same commit.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from palaestra_slots.core.errors import TaskError
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.sandbox.slot import Change, Slot
from palaestra_suites.grading.falsified import named_tests, parse, tests_in, without_tests
from palaestra_suites.grading.harness import content_of
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.languages import Language
from palaestra_suites.swe.repository import EXECUTABLE, LINK, REGULAR, RepositoryCache, TreeFile, TreeFiles
from palaestra_suites.swe.swe_row import RowKind, SweRow, TestNames

_log = logging.getLogger(__name__)

_DATE = "2000-01-01T00:00:00+0000"
_LAST_PART = re.compile(r" - | > |::|/")
_PATCH_BYTES = 100_000
"""The maximum number of bytes of an agent's patch that are recorded."""
_SOURCE_BYTES = 1 << 20
"""The maximum number of bytes of a source that may have been moved."""
_INSTALLED = "*.egg-info"
"""What setuptools writes when it installs a repository. If git had it, a second installation would change the tree, and
a version that is taken from git would not be that of the release."""
_PLAIN = re.compile(r"\w[\w./+-]*")
"""A path that a build file can contain as it is."""
_ARCHIVE = "/tmp/.palaestra-tree.tar"  # noqa: S108  in the slot, while the repository is unpacked
_PIECE_BYTES = 16 << 20
"""The number of bytes of an archive that one command takes as its input; slots accept 32 MiB."""
_IDENTITY = {
    "GIT_AUTHOR_NAME": "Palaestra",
    "GIT_AUTHOR_EMAIL": "palaestra@localhost",
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": "Palaestra",
    "GIT_COMMITTER_EMAIL": "palaestra@localhost",
    "GIT_COMMITTER_DATE": _DATE,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


@dataclass(frozen=True, slots=True)
class RowTrees:
    """The trees of a row: its commit, what the agent gets, and the reference solution; None for a row without one."""

    commit: str
    agent: str
    solution: str | None


async def trees_of(cache: RepositoryCache, row: SweRow) -> RowTrees:
    """Return the trees of a row. Raises `TaskError` if its patch does not match the commit.

    A SWE-smith patch is the bug, so the commit is the solution unless it already contains the bug.
    """
    _, commit = await cache.locate_commit(row)
    if not row.patch:
        return RowTrees(commit, commit, None)
    try:
        made = await cache.apply_patch(row, commit, row.patch)
        return RowTrees(commit, made, commit) if row.kind is RowKind.SMITH else RowTrees(commit, commit, made)
    except unified_diff.DiffError as problem:
        if row.kind is RowKind.SMITH:
            with suppress(unified_diff.DiffError):
                return RowTrees(commit, commit, await cache.apply_patch(row, commit, row.patch, backwards=True))
        raise TaskError(f"{row.instance_id}: its patch does not match {row.base_commit}: {problem}") from None


async def solution_files(cache: RepositoryCache, row: SweRow) -> tuple[TreeFiles, TreeFiles]:
    """Return the files that the reference solution changes, as the agent gets them and as the solution has them; both
    are empty for a row without a solution. Raises `TaskError`."""
    trees = await trees_of(cache, row)
    if trees.solution is None:
        return {}, {}
    before = await _difference(cache, row, trees.solution, trees.agent)
    return before, await _difference(cache, row, trees.agent, trees.solution)


async def _difference(cache: RepositoryCache, row: SweRow, before: str, after: str) -> TreeFiles:
    try:
        return await cache.difference(row, before, after)
    except unified_diff.DiffError as problem:
        raise TaskError(f"{row.instance_id}: {problem}") from None


async def prepare_repository(
    slot: Slot, cache: RepositoryCache, row: SweRow, repo_dir: str, *, keep_tests: bool = False
) -> None:
    """Put the row's commit with its bug into the slot at `repo_dir`, without the tests that must start to pass.

    `keep_tests` keeps those tests. Raises `TaskError` or `PrepareError`.
    """
    await unpack(slot, await cache.export_tree(row), repo_dir)
    trees = await trees_of(cache, row)
    await write_files(slot, repo_dir, await _difference(cache, row, trees.commit, trees.agent))
    if not keep_tests and row.kind is not RowKind.BENCH:  # a BENCH row's commit does not have its tests
        await write_files(slot, repo_dir, await _agent_tests(cache, row))
    products = sorted(row.recipe.language.products) if row.recipe is not None else [_INSTALLED]
    await start_history(slot, repo_dir, without=products)


async def without_absent_files(cache: RepositoryCache, row: SweRow) -> SweRow:
    """Return a row without the tests that must keep passing and whose files neither the commit nor a patch has. Logs of
    pytest's own tests name tests that ran inside of a test, and some published rows took these over."""
    if row.kind is not RowKind.BENCH or row.names is not TestNames.PYTEST:
        return row
    changed = (file.path for patch in (row.patch, row.test_patch) for file in unified_diff.parse(patch))
    files = {*await cache.list_files(row), *changed}
    kept = tuple(name for name in row.pass_to_pass if name.partition("::")[0] in files)
    if dropped := [name for name in row.pass_to_pass if name not in kept]:
        text = ", ".join(dropped[:3])
        _log.warning("%s: left out of PASS_TO_PASS: %s, whose file does not exist", row.instance_id, text)
    return replace(row, pass_to_pass=kept)


async def unpack(slot: Slot, tree: bytes, repo_dir: str) -> None:
    """Unpack a tar archive into a directory of the slot, which is created if necessary. Raises `PrepareError`."""
    pieces = [tree[start : start + _PIECE_BYTES] for start in range(0, len(tree), _PIECE_BYTES)]
    steps = [(f"mkdir -p -- {shlex.quote(repo_dir)} && rm -f {_ARCHIVE}", b"")]
    steps += [(f"cat >> {_ARCHIVE}", piece) for piece in pieces]
    steps += [(f"tar -xf {_ARCHIVE} --no-same-owner -C {shlex.quote(repo_dir)} && rm {_ARCHIVE}", b"")]
    for command, stdin in steps:
        await check_execute(slot, command, "cannot unpack the repository", stdin=stdin)


async def start_history(slot: Slot, repo_dir: str, *, without: Sequence[str] = ()) -> None:
    """Commit everything as the only commit of a new repository. If the slot has no git, do nothing.

    `without` are names of directories that an installation or a build makes: they are not committed, and git ignores
    them.
    """
    if not (await slot.execute(["git", "--version"], cwd="/")).success:
        return
    settings = ["-c", "core.logAllRefUpdates=false", "-c", "gc.auto=0", "-c", f"safe.directory={repo_dir}"]
    for command in (
        ["init", "--quiet", "--initial-branch=main", "--template="],
        ["add", "--all", "--force", "--", ".", *(f":(exclude,glob)**/{name}/**" for name in without)],
        ["commit", "--quiet", "--no-verify", "--allow-empty", "--message=Start"],
    ):
        argv = ["git", *settings, *command]
        environment = {**_IDENTITY, "HOME": "/"}
        await check_execute(slot, argv, f"git {command[0]} in the slot failed", cwd=repo_dir, env=environment)
    if without:
        await slot.write_text(f"{repo_dir}/.git/info/exclude", "".join(f"{name}/\n" for name in without))


@asynccontextmanager
async def tagged(slot: Slot, repo_dir: str, release: str | None) -> AsyncIterator[None]:
    """Give the only commit the tag of a release during the block, which installs the repository: many packages take
    their version from git. If there is no release, or the slot has no git, do nothing."""
    argv = ["git", "-c", f"safe.directory={repo_dir}", "tag"]
    made = release is not None and (await slot.execute([*argv, release], cwd=repo_dir)).success
    try:
        yield
    finally:
        if made and release is not None:
            await check_execute(slot, [*argv, "--delete", release], "git tag in the slot failed", cwd=repo_dir)


async def test_files(cache: RepositoryCache, row: SweRow) -> TreeFiles:
    """Return the test files as grading has them: the files with the named tests, for a SWE-bench row those that its
    `test_patch` changes, and all test files of another row in another language than Python. Raises `TaskError`."""
    paths = set(row.test_files)
    if row.kind is RowKind.BENCH:
        _, commit = await cache.locate_commit(row)
        try:
            changed = await cache.difference(row, commit, await cache.apply_patch(row, commit, row.test_patch))
        except unified_diff.DiffError as problem:
            raise TaskError(f"{row.instance_id}: its test_patch does not match {row.base_commit}: {problem}") from None
        return {**await cache.read_files(row, paths), **changed}
    if row.recipe is not None:
        language = row.recipe.language
        paths.update(
            path for path in await cache.list_files(row) if path.endswith(language.suffixes) and language.is_test(path)
        )
    return await cache.read_files(row, paths)


def _naming(names: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    """Return the paths whose texts mention one of the tests."""
    words = [_LAST_PART.split(name)[-1].strip() for name in names]
    return [path for path, text in texts.items() if any(word and word in text for word in words)]


async def with_other_tests(
    cache: RepositoryCache, row: SweRow, language: Language, names: Sequence[str], tests: Mapping[str, str]
) -> Mapping[str, str]:
    """Return `tests` with the prepared test files that mention a test of `names` that `tests` do not mention. A named
    test is in a file that no patch changes if another test ended the session before the fix, for example."""
    lost = [name for name in names if not _naming([name], tests)]
    paths = [
        path for path in await cache.list_files(row) if path.endswith(language.suffixes) and language.is_test(path)
    ]
    others = _texts_by_path(await cache.read_files(row, paths)) if lost else {}
    return {**{path: others[path] for path in _naming(lost, others)}, **tests}


async def add_tests(slot: Slot, cache: RepositoryCache, row: SweRow, repo_dir: str) -> dict[str, str]:
    """Write the test files into a grading slot, and return their texts by path."""
    files = await test_files(cache, row)
    await write_files(slot, repo_dir, files)
    return _texts_by_path(files)


def _texts_by_path(files: TreeFiles) -> dict[str, str]:
    return {path: file.text for path, file in files.items() if file is not None and not file.is_link}


async def write_files(slot: Slot, repo_dir: str, files: TreeFiles) -> None:
    """Write files with their modes to paths in the repository, and make links. A path without a file is removed."""
    for path in sorted(files, key=lambda each: files[each] is not None):
        place, file = f"{repo_dir}/{path}", files[path]
        there = await slot.stat(place)
        if there is not None and (file is None or file.is_link or there.kind != "file"):
            await slot.remove(place)
        if file is not None and file.is_link:
            await slot.make_link(place, file.text)
        elif file is not None:
            await slot.write_bytes(place, file.data, mode=0o755 if file.mode == EXECUTABLE else 0o644)


async def write_texts(slot: Slot, repo_dir: str, texts: Mapping[str, str]) -> None:
    """Write texts to paths in the repository. Surrogate escapes stand for bytes that are not UTF-8."""
    for path, text in texts.items():
        await slot.write_bytes(f"{repo_dir}/{path}", text.encode("utf-8", "surrogateescape"))


async def _agent_tests(cache: RepositoryCache, row: SweRow) -> TreeFiles:
    """Return the test files that the agent gets in a different form, with None for files that it does not get."""
    files = await test_files(cache, row)
    if row.recipe is not None:  # names in a log have no file, so a file that mentions a failing test is left out
        return dict.fromkeys(_naming(row.fail_to_pass, _texts_by_path(files)))
    found: dict[str, TreeFile | None] = {}
    failing = {name.partition("::")[0] for name in row.fail_to_pass}
    for path, file in files.items():
        if path not in failing or file is None or file.is_link:
            continue
        tree = parse(file.text)
        dropped = named_tests(path, tree, row.fail_to_pass) if tree is not None else {}
        tests = tests_in(tree.body, "") if tree is not None else ()
        if any(f"{owner}{test.name}" not in dropped for owner, test in tests):
            data = without_tests(file.text, dropped).encode("utf-8", "surrogateescape")
            found[path] = replace(file, data=data)
        else:
            found[path] = None
    return found


def work_paths(changes: Sequence[Change], without: Collection[str], repo_dir: str) -> list[str]:
    """Return the changed paths relative to the repository, except those in `without`. The path of a directory ends in a
    slash, unless the agent removed the directory and made it again."""
    prefix = f"{repo_dir}/"
    return [
        change.path.removeprefix(prefix) + ("/" if change.kind == "dir" and not change.opaque else "")
        for change in changes
        if change.path.startswith(prefix) and change.path not in without
    ]


async def old_places(
    slot: Slot,
    repo_dir: str,
    gone: TreeFiles,
    changed: Collection[str],
    build_files: Collection[str],
    pristine: Collection[str],
) -> Sequence[TreeFiles]:
    """Return what may belong at the places of the prepared sources `gone`, which the work no longer has: what a build
    made there in the slot, or else a link to the new file among `changed` that the work's `build_files` name, and that
    is the most similar, with links to what is new next to that file, which it may include. In a second way, each new
    file is linked once, and a source that became a part of another one is empty."""
    builds = [text or b"" for path in build_files for text in [await content_of(slot, path, _SOURCE_BYTES)]]
    texts = {path: await content_of(slot, f"{repo_dir}/{path}", _SOURCE_BYTES) for path in {*gone, *changed}}
    made = {path: TreeFile(REGULAR, text) for path in gone if (text := texts[path]) is not None}
    lost = {path: _word_counts(file.data) for path, file in gone.items() if path not in made and file is not None}
    read = {path: text for path in changed if path not in gone and (text := texts[path]) is not None}
    new = {path: _word_counts(text) for path, text in read.items() if b"\0" not in text}  # a program may be left behind
    pairs = [
        (
            any(os.fsencode(os.path.splitext(path)[0]) in text for text in builds),
            (before & now).total() / max(1, (before | now).total()) + (os.path.basename(old) == os.path.basename(path)),
            old,
            path,
        )
        for old, before in lost.items()
        for path, now in new.items()
    ]
    each, once = dict[str, str](), dict[str, str]()
    for named, similar, old, path in sorted(pairs, reverse=True):
        if (named or similar) and old not in each:
            each[old] = path
        if (named or similar) and old not in once and path not in once.values():
            once[old] = path

    added = [path for path in read if path not in pristine]

    def linked(places: Mapping[str, str]) -> TreeFiles:
        links = {**_beside(places, added, pristine), **places}
        return {**made, **{old: _link(old, path) for old, path in links.items()}}

    empty = {old: TreeFile(REGULAR, b"") for old in each if old not in once}
    ways = [linked(each), {**linked(once), **empty}] if empty else [linked(each)]
    return [places for places in ways if places]


def _beside(moved: Mapping[str, str], new: Collection[str], pristine: Collection[str]) -> dict[str, str]:
    """Return the `new` files below the folders to which sources `moved`, by their places below the old folders."""
    folders = {os.path.dirname(path): os.path.dirname(old) for old, path in moved.items()}
    found: dict[str, str] = {}
    for path in new:
        inside = [folder for folder in folders if folder and path.startswith(f"{folder}/")]
        if inside and path not in moved.values():
            folder = max(inside, key=len)
            place = os.path.join(folders[folder], os.path.relpath(path, folder))
            if place not in new and place not in pristine:
                found[place] = path
    return found


def _link(place: str, path: str) -> TreeFile:
    return TreeFile(LINK, os.fsencode(os.path.relpath(path, os.path.dirname(place))))


def with_listed(places: TreeFiles, builds: TreeFiles, hosts: Sequence[str], new: Sequence[str]) -> Iterator[TreeFiles]:
    """Yield `places` with the prepared build files `builds`, in which the `new` sources of the work are named next to a
    source that the work changed (`hosts`), one after the other. A source that a place is a link to is not named."""
    ends = {(os.path.dirname(at), file.text) for at, file in places.items() if file is not None and file.is_link}
    linked = {os.path.normpath(os.path.join(*each)) for each in ends}
    new = [path for path in new if path not in linked and _PLAIN.fullmatch(path)]
    texts = {path: file for path, file in builds.items() if file is not None and not file.is_link}
    for host in hosts if new else ():
        named = {path: _named_next_to(file.text, host, new) for path, file in texts.items()}
        listed = {path: text for path, text in named.items() if text != texts[path].text}
        if listed:
            files = {path: text.encode("utf-8", "surrogateescape") for path, text in listed.items()}
            yield {**places, **{path: replace(texts[path], data=data) for path, data in files.items()}}


def _named_next_to(text: str, host: str, new: Sequence[str]) -> str:
    """Return the text of a build file with the `new` sources: a source after each mention of the source `host`, an
    object after each mention of its object, and a copy of the rule that makes it."""
    folder, (stem, ending) = os.path.dirname(host), os.path.splitext(os.path.basename(host))
    others = [os.path.splitext(os.path.relpath(path, folder or ".")) for path in new]
    word = re.compile(
        rf"(?P<quote>['\"]?)(?P<folder>(?:[\w./-]|\$\(\w+\)|\$\{{\w+\}})*)(?<![\w.-])"
        rf"{re.escape(stem)}(?P<ending>{re.escape(ending)}|\.(?:o|lo|obj))(?P=quote)(?![\w.])"
    )

    def like(found: re.Match[str], other: tuple[str, str]) -> str:
        quote, end = found["quote"], other[1] if found["ending"] == ending else found["ending"]
        return f"{quote}{os.path.normpath(found['folder'] + other[0])}{end}{quote}"

    def list_all(found: re.Match[str]) -> str:
        between = ", " if found["quote"] == "'" else " "  # meson's lists, or those of CMake and make
        return between.join([found[0], *(like(found, other) for other in others)])

    blocks = re.split(r"(?m)^(?=[^\t\n])", text)  # a rule, or a line
    for at, block in enumerate(blocks):
        target, colon, _ = block.partition(":")
        if colon and word.search(target) and not {"(", "="} & set(target):
            rules = [word.sub(functools.partial(like, other=other), block) for other in others]
            blocks[at] = "".join([block.rstrip("\n") + "\n", *rules])
        else:
            blocks[at] = word.sub(list_all, block)
    return "".join(blocks)


def moved_modules(gone: Collection[str], changed: Collection[str], pristine: Collection[str]) -> TreeFiles:
    """Return links at the prepared import roots to the new files below the folders to which the modules `gone` of
    Python moved, where the settings of the work, for example `pythonpath`, find them."""
    new = [path for path in changed if path not in pristine and not path.endswith("/")]
    places: dict[str, TreeFile | None] = {}
    for old in sorted(gone):
        same = {path: _common_end(old, path) for path in sorted(new)}
        best = max(same, key=same.__getitem__, default="")
        if not (depth := same.get(best, 0)):
            continue
        root, moved = ("/".join([*path.split("/")[:-depth], ""]) for path in (old, best))
        for path in new:
            place = root + path.removeprefix(moved)
            if path.startswith(moved) and place not in new and (place in gone or place not in pristine):
                places.setdefault(place, _link(place, path))
    return places


def _common_end(one: str, other: str) -> int:
    """Return how many names the ends of two paths share."""
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _word_counts(text: bytes) -> Counter[bytes]:
    return Counter(re.findall(rb"\w+", text))


async def replace_work(
    slot: Slot, cache: RepositoryCache, row: SweRow, repo_dir: str, changed: Collection[str], *, solved: bool
) -> None:
    """Replace an agent's change in a grading slot with the reference solution (`solved`) or with the bug.

    `changed` are the paths of the change (`work_paths`). Directories of the change that are empty afterwards are
    removed, because Python imports an empty directory as a package.
    """
    folders = [path for path in changed if path.endswith("/")]
    changed = [path for path in changed if not path.endswith("/")]
    for path in changed:
        await slot.remove(f"{repo_dir}/{path}")
    await write_files(slot, repo_dir, await cache.read_files(row, changed) if changed else {})
    for folder in sorted(folders, reverse=True):  # inner directories first
        place = f"{repo_dir}/{folder.rstrip('/')}"
        entry = await slot.stat(place)
        if entry is not None and entry.kind == "dir" and not await slot.list_dir(place):
            await slot.remove(place)
    trees = await trees_of(cache, row)
    await write_files(slot, repo_dir, await _difference(cache, row, trees.commit, trees.agent))
    if solved and trees.solution is not None:
        await write_files(slot, repo_dir, await _difference(cache, row, trees.agent, trees.solution))


async def patch_of(slot: Slot, repo_dir: str, *, tests: Collection[str]) -> str:
    """Return the change of the repository as a diff, without the files `tests`, which grading restores. If git fails or
    is missing, return an empty string."""
    git = ["git", "-c", f"safe.directory={repo_dir}", "-c", "core.fsmonitor=false"]
    await slot.execute([*git, "add", "--all", "--intent-to-add"], cwd=repo_dir)
    without = (f":(exclude,literal){path}" for path in sorted(tests))
    argv = [*git, "diff", "--no-ext-diff", "--", ".", *without]
    done = await slot.execute(argv, cwd=repo_dir, max_output_bytes=_PATCH_BYTES)
    return done.output if done.success else ""
