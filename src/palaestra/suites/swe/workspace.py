"""Prepare a repository in a slot: its files, the task's bug, and a history of one commit.

Unless they are kept, the tests that must start to pass are not in the agent's tree: their functions are removed from
their files, and a file without other tests is left out. Grading writes the complete files.

Invariant: the agent gets one commit with fixed author and dates, without any other object, ref, reflog or remote. The
history therefore does not contain the fix, and preparing twice gives the same commit.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from palaestra.core.errors import TaskError
from palaestra.sandbox.slot import Change, Slot
from palaestra.suites.grading.falsified import named_tests, parse, tests_in, without_tests
from palaestra.suites.slot_commands import check_execute
from palaestra.suites.swe import apply_diff, unified_diff
from palaestra.suites.swe.languages import Language
from palaestra.suites.swe.repository import RepositoryCache
from palaestra.suites.swe.swe_row import RowKind, SweRow, TestNames

_log = logging.getLogger(__name__)

_DATE = "2000-01-01T00:00:00+0000"
_LAST_PART = re.compile(r" - | > |::|/")
_PATCH_BYTES = 100_000
"""The maximum number of bytes of an agent's patch that are recorded."""
_INSTALLED = "*.egg-info"
"""What setuptools writes when it installs a repository. If git had it, a second installation would change the tree, and
a version that is taken from git would not be that of the release."""
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


async def prepare_repository(
    slot: Slot, cache: RepositoryCache, row: SweRow, repo_dir: str, *, keep_tests: bool = False
) -> None:
    """Put the row's commit with its bug into the slot at `repo_dir`, without the tests that must start to pass.

    `keep_tests` keeps those tests. Raises `TaskError` or `PrepareError`.
    """
    await unpack(slot, await cache.export_tree(row), repo_dir)
    await write_texts(slot, repo_dir, await _changed_by(row.bug_patch, cache, row))
    if not keep_tests and row.kind is not RowKind.BENCH:  # a BENCH row's commit does not have its tests
        await write_texts(slot, repo_dir, await _agent_tests(cache, row))
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


async def test_texts(cache: RepositoryCache, row: SweRow) -> dict[str, str]:
    """Return the texts of the test files as grading runs them: the files with the named tests and, for a SWE-bench row,
    the files that its `test_patch` adds or changes."""
    known = set(await cache.list_files(row))
    texts = {
        path: (await cache.read_file(row, path)).decode("utf-8", "surrogateescape")
        for path in row.test_files
        if path in known
    }
    if row.recipe is not None and row.kind is not RowKind.BENCH:
        texts |= await _language_tests(row.recipe.language, cache, row)
    if row.kind is RowKind.BENCH:
        changed = await _changed_by(row.test_patch, cache, row)
        texts |= {path: text for path, text in changed.items() if text is not None}
    return texts


async def add_tests(slot: Slot, cache: RepositoryCache, row: SweRow, repo_dir: str) -> dict[str, str]:
    """Write the test files into a grading slot, and return their texts by path."""
    if row.kind is RowKind.BENCH:
        for path, text in (await _changed_by(row.test_patch, cache, row)).items():
            if text is None:
                await slot.remove(f"{repo_dir}/{path}")
    texts = await test_texts(cache, row)
    await write_texts(slot, repo_dir, texts)
    return texts


async def write_texts(slot: Slot, repo_dir: str, texts: Mapping[str, str | None]) -> None:
    """Write texts to paths in the repository; a path whose text is None is removed. Surrogate escapes stand for bytes
    that are not UTF-8."""
    for path, text in texts.items():
        await _write(slot, f"{repo_dir}/{path}", text)


async def _agent_tests(cache: RepositoryCache, row: SweRow) -> dict[str, str | None]:
    """Return the test files that the agent gets in a different form, with their texts, or with None for files that it
    does not get."""
    found: dict[str, str | None] = {}
    if row.recipe is not None:  # names in a log have no file, so a file that mentions a failing test is left out
        words = [_LAST_PART.split(name)[-1].strip() for name in row.fail_to_pass]
        texts = await test_texts(cache, row)
        return {path: None for path, text in texts.items() if any(word and word in text for word in words)}
    failing = {name.partition("::")[0] for name in row.fail_to_pass}
    for path, text in (await test_texts(cache, row)).items():
        if path not in failing:
            continue
        tree = parse(text)
        if tree is None:
            found[path] = None
            continue
        dropped = named_tests(path, tree, row.fail_to_pass)
        others = [test for owner, test in tests_in(tree.body, "") if f"{owner}{test.name}" not in dropped]
        found[path] = without_tests(text, dropped) if others else None
    return found


async def _language_tests(language: Language, cache: RepositoryCache, row: SweRow) -> dict[str, str]:
    """Return the texts of all test files of a repository in another language than Python."""
    paths = [
        path for path in await cache.list_files(row) if path.endswith(language.suffixes) and language.is_test(path)
    ]
    return {path: (await cache.read_file(row, path)).decode("utf-8", "surrogateescape") for path in paths}


async def restore_files(slot: Slot, cache: RepositoryCache, row: SweRow, repo_dir: str, paths: Sequence[str]) -> None:
    """Write files back with their content in the row's commit, for example the files from `Protected.hidden`."""
    for path in paths:
        await slot.write_bytes(f"{repo_dir}/{path}", await cache.read_file(row, path))


def work_paths(changes: Sequence[Change], without: Collection[str], repo_dir: str) -> list[str]:
    """Return the changed paths relative to the repository, except those in `without`. The path of a directory ends in a
    slash, unless the agent removed the directory and made it again."""
    prefix = f"{repo_dir}/"
    return [
        change.path.removeprefix(prefix) + ("/" if change.kind == "dir" and not change.opaque else "")
        for change in changes
        if change.path.startswith(prefix) and change.path not in without
    ]


async def replace_work(
    slot: Slot, cache: RepositoryCache, row: SweRow, repo_dir: str, changed: Collection[str], *, solved: bool
) -> None:
    """Replace an agent's change in a grading slot with the reference solution (`solved`) or with the bug.

    `changed` are the paths of the change (`work_paths`). Directories of the change that are empty afterwards are
    removed, because Python imports an empty directory as a package.
    """
    pristine = await cache.list_files(row)
    folders = [path for path in changed if path.endswith("/")]
    changed = [path for path in changed if not path.endswith("/")]
    for path in changed:
        await slot.remove(f"{repo_dir}/{path}")
        for known in pristine:
            if known == path or known.startswith(f"{path}/"):
                await slot.write_bytes(f"{repo_dir}/{known}", await cache.read_file(row, known))
    for folder in sorted(folders, reverse=True):  # inner directories first
        place = f"{repo_dir}/{folder.rstrip('/')}"
        entry = await slot.stat(place)
        if entry is not None and entry.kind == "dir" and not await slot.list_dir(place):
            await slot.remove(place)
    texts = await agent_texts(cache, row)
    await write_texts(slot, repo_dir, texts)
    if solved:
        await write_texts(slot, repo_dir, apply_diff.apply(unified_diff.parse(row.fix_patch), texts))


async def patch_of(slot: Slot, repo_dir: str, *, tests: Collection[str]) -> str:
    """Return the change of the repository as a diff, without the files `tests`, which grading restores. If git fails or
    is missing, return an empty string."""
    git = ["git", "-c", f"safe.directory={repo_dir}", "-c", "core.fsmonitor=false"]
    await slot.execute([*git, "add", "--all", "--intent-to-add"], cwd=repo_dir)
    without = (f":(exclude,literal){path}" for path in sorted(tests))
    argv = [*git, "diff", "--no-ext-diff", "--", ".", *without]
    done = await slot.execute(argv, cwd=repo_dir, max_output_bytes=_PATCH_BYTES)
    return done.output if done.success else ""


async def source_texts(cache: RepositoryCache, row: SweRow, patch: str) -> dict[str, str]:
    """Return the texts of the files that a diff changes, as they are in the row's commit. Bytes that are not UTF-8
    become surrogate escapes."""
    known = set(await cache.list_files(row))
    paths = {file.old_path for file in unified_diff.parse(patch)} - {None}
    return {
        path: (await cache.read_file(row, path)).decode("utf-8", "surrogateescape")
        for path in sorted(path for path in paths if path is not None)
        if path in known
    }


async def agent_texts(cache: RepositoryCache, row: SweRow) -> dict[str, str]:
    """Return the texts of the files that the reference solution or the bug changes, as the agent gets them: with the
    bug."""
    texts = await source_texts(cache, row, row.fix_patch or row.bug_patch) if row.patch else {}
    buggy = await _changed_by(row.bug_patch, cache, row)
    return {path: text for path, text in {**texts, **buggy}.items() if text is not None}


async def _changed_by(patch: str, cache: RepositoryCache, row: SweRow) -> Mapping[str, str | None]:
    """Return the new texts of the files that a patch changes in the row's commit, with None for deleted files. If the
    commit already contains the patch, the result is empty. Raises `TaskError` if the patch does not match."""
    if not patch:
        return {}
    files = unified_diff.parse(patch)
    try:
        return apply_diff.apply(files, await source_texts(cache, row, patch))
    except unified_diff.DiffError as problem:
        backwards = unified_diff.reverse(patch)
        try:
            apply_diff.apply(unified_diff.parse(backwards), await source_texts(cache, row, backwards))
        except unified_diff.DiffError:
            raise TaskError(f"{row.instance_id}: its patch does not match {row.base_commit}: {problem}") from None
        return {}


async def _write(slot: Slot, path: str, text: str | None) -> None:
    if text is None:
        await slot.remove(path)
    else:
        await slot.write_bytes(path, text.encode("utf-8", "surrogateescape"))
