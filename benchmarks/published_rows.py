"""Rows as data sets publish them, made from releases of real packages, played by the oracle and by doing nothing.

    .venv/bin/python benchmarks/published_rows.py                    # all rows, a minute or two each
    .venv/bin/python benchmarks/published_rows.py --only cjson uuid  # some of them
    .venv/bin/python benchmarks/published_rows.py --root PATH        # with the programs of other languages from a root
    .venv/bin/python benchmarks/published_rows.py --measure          # find the tests of each row again

`published_rows.jsonl` names two releases of a package, the data set whose columns its row has, and the tests that the
change between the releases fixes and keeps. The releases come from the package index, from npm and from Debian's
archive; a row has no list of packages for Python. `--measure` runs the tests before and after the change, with the
packages that the author of a data set would install (`author_packages`), which are not in the row.

A row is ok if the oracle earns 1.0 and doing nothing 0.0. The table ends with the share of such rows, and every other
row has its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from _row_plays import Rewards, play

from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import PalaestraError, TaskError
from palaestra_slots.core.types import JSON, Network
from palaestra_slots.images.build_once import CACHE_DIR
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import WORKSPACE, Slot, SlotSpec
from palaestra_suites.grading.harness import Status
from palaestra_suites.grading.log_parsers import parser
from palaestra_suites.swe.authoring.sdist import open_index, read_sdist
from palaestra_suites.swe.languages import LANGUAGES
from palaestra_suites.swe.swe_row import load_rows
from palaestra_suites.toolchain.interpreters import this_interpreter
from palaestra_suites.toolchain.repository_venv import VENV_DIR, RepositoryVenv
from palaestra_suites.toolchain.toolchain import Install

PACKAGES = Path(__file__).with_suffix(".jsonl")
DEBIAN = "http://deb.debian.org/debian/pool/main"
DROPPED = ("PKG-INFO", ".cargo-checksum.json", "package-lock.json")
MOST_KEPT = 60
TEST_S, INSTALL_S = 900.0, 900.0
"""Time limits of one session of tests and of one installation: generous, because a busy machine is not a finding."""
_MTIME = 1_700_000_000  # wheels cannot hold files from before 1980


@dataclass(frozen=True)
class Package:
    """Two releases of a package, and the row that is made of them.

    `source` is pypi, npm or debian; for debian, `old` and `new` are paths in the pool. `schema` names the data set
    whose columns the row has. `tests` are test files that their names do not show. `install`, `test_cmd` and
    `log_parser` are columns of rows in other languages.
    """

    name: str
    source: str
    old: str
    new: str
    language: str = "python"
    schema: str = "SWE-bench"
    created_at: str = ""
    tests: list[str] = field(default_factory=list)
    install: list[str] = field(default_factory=list)
    test_cmd: list[str] = field(default_factory=list)
    log_parser: str = ""
    author_packages: list[str] = field(default_factory=list)
    fail_to_pass: list[str] = field(default_factory=list)
    pass_to_pass: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"released__{self.name}-1"

    @property
    def repo(self) -> str:
        return f"released/{self.name}"


@dataclass(frozen=True)
class Played:
    """A row with its rewards, and the reason if it is not ok."""

    name: str
    language: str
    schema: str
    oracle: float | None
    noop: float | None
    reason: str
    seconds: float

    @property
    def ok(self) -> bool:
        return (self.oracle, self.noop) == (1.0, 0.0)


def is_test(package: Package, path: str) -> bool:
    if package.language == "python":
        name = PurePosixPath(path).name
        return name.startswith(("test_", "conftest")) or bool({"test", "tests"} & set(PurePosixPath(path).parts[:-1]))
    return path in package.tests or LANGUAGES[package.language].is_test(path)


async def tree(package: Package, version: str, cache: Path) -> dict[str, bytes]:
    """Return the files of a release, without those that the packaging adds."""
    if package.source == "pypi":
        async with open_index(cache) as index:
            archive = await index.download(await index.find(package.name, version))
        files = {path: file.data for path, file in read_sdist(archive, package.name).items()}
    else:
        files = (from_npm if package.source == "npm" else from_debian)(package, version, cache)
    return {path: text for path, text in files.items() if kept(path)}


def from_npm(package: Package, version: str, cache: Path) -> dict[str, bytes]:
    place = cache / f"{package.name}-{version}.tgz"
    if not place.exists():
        argv = ["npm", "pack", "--silent", f"{package.name}@{version}"]
        subprocess.run(argv, cwd=cache, check=True, stdout=subprocess.DEVNULL)
    return unpacked(place.read_bytes())


def from_debian(package: Package, version: str, cache: Path) -> dict[str, bytes]:
    place = cache / PurePosixPath(version).name
    if not place.exists():
        with urllib.request.urlopen(f"{DEBIAN}/{version}", timeout=60) as reply:
            place.write_bytes(reply.read())
    if not version.endswith(".deb"):
        return unpacked(place.read_bytes())
    # The archive keeps old releases of a crate as binary packages only.
    data = subprocess.run(["dpkg-deb", "--fsys-tarfile", place], stdout=subprocess.PIPE, check=True).stdout
    paths = ((path.partition("cargo/registry/")[2], text) for path, text in unpacked(data, strip=0).items())
    return {path.partition("/")[2]: text for path, text in paths if path}


def kept(path: str) -> bool:
    parts = PurePosixPath(path)
    return parts.name not in DROPPED and not any(part.endswith(".egg-info") for part in parts.parts)


def unpacked(data: bytes, strip: int = 1) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {}
        for member in archive:
            path = "/".join(PurePosixPath(member.name).parts[strip:])
            file = archive.extractfile(member) if member.isreg() else None
            if path and file is not None:
                found[path] = file.read()
        return found


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=author", "-c", "user.email=author@example.org", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", "-C", folder, *who, *arguments], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode("utf-8", "surrogateescape")


def commit(folder: Path, files: Mapping[str, bytes], message: str) -> str:
    for path in git(folder, "ls-files", "-z").split("\0")[:-1]:
        (folder / path).unlink()
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text)
        place.chmod(0o755 if text.startswith(b"#!") else 0o644)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD").strip()


async def row_of(package: Package, folder: Path, cache: Path) -> dict[str, JSON]:
    """Make the repository of a package below `folder`, and return its row in the columns of its data set."""
    place = folder / package.repo
    place.mkdir(parents=True)
    git(place, "init", "-q")
    base = commit(place, await tree(package, package.old, cache), "Old")
    git(place, "tag", f"v{package.old}" if package.source == "pypi" else "v1.0.0")
    fixed = commit(place, await tree(package, package.new, cache), "New")
    paths = git(place, "diff", "--name-only", "-z", "--no-renames", base, fixed).split("\0")[:-1]
    tests = [path for path in paths if is_test(package, path)]
    others = sorted(set(paths) - set(tests))
    diff = ("diff", "--binary", "--no-renames", base, fixed, "--")
    row: dict[str, JSON] = {
        "instance_id": package.id, "repo": package.repo, "base_commit": base, "version": "1.0",
        "patch": git(place, *diff, *others), "test_patch": git(place, *diff, *tests) if tests else "",
        "problem_statement": f"Make {package.name} {package.old} behave like {package.new}.",
        "FAIL_TO_PASS": package.fail_to_pass, "PASS_TO_PASS": package.pass_to_pass,
        "created_at": package.created_at, "hints_text": "", "environment_setup_commit": base,
    }  # fmt: skip
    files = [path for path in tests if package.language == "python" or path.endswith(suffixes(package))]
    match package.schema:
        case "SWE-bench" | "SWE-Gym":
            texts = {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
            return row | texts
        case "SWE-bench Live":
            return row | {"test_cmds": package.test_cmd or ["pytest -rA"], "log_parser": package.log_parser or "pytest"}
        case "SWE-bench Pro":
            lists = {name.lower(): repr(row.pop(name)) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
            before = f"git reset --hard {base}\ngit checkout {fixed} -- {' '.join(tests)}"
            return row | lists | {
                "repo_language": package.language, "before_repo_set_cmd": before, "dockerhub_tag": package.id,
                "selected_test_files_to_run": json.dumps(files), "requirements": "Behave so.", "interface": "None",
            }  # fmt: skip
        case "SWE-rebench V2":
            config = {"base_image_name": package.language, "install": package.install, "test_cmd": package.test_cmd,
                      "log_parser": package.log_parser}  # fmt: skip
            return row | {"language": package.language, "interface": "", "install_config": config}
        case "SWE-bench 5":
            script = ["#!/bin/bash", "set -uxo pipefail", "cd /testbed", f"git checkout {base}"]
            script += ["git apply -v - <<'EOF_1'", f"{row['test_patch']}EOF_1", ": '>>>>> Start Test Output'"]
            script += [*package.test_cmd, ": '>>>>> End Test Output'", f"git checkout {base}", ""]
            more = {"log_parser": package.log_parser, "eval_type": "pass_and_fail", "eval_script": "\n".join(script)}
            return row | more
        case "NeMo Gym":
            metadata = {"instance_id": package.id, "instance_dict": json.dumps(row)}
            return {"instance_id": package.id, "responses_create_params": {"input": [], "metadata": metadata}}
    raise ValueError(f"{package.name}: unknown schema {package.schema}")


def suffixes(package: Package) -> tuple[str, ...]:
    return LANGUAGES[package.language].suffixes


async def play_rows(
    file: Path, repositories: Path, packages: Sequence[Package], workers: int, roots: Mapping[str, str]
) -> list[Played]:
    """Play both policies over a file with the rows of these packages."""
    settings = ["--env.dataset_name", str(file), "--env.shuffle", "false", "--env.repo_base_url"]
    settings += [f"file://{repositories}", "--env.test_timeout_s", str(TEST_S)]
    settings += ["--env.install_timeout_s", str(INSTALL_S), "--env.roots", json.dumps(roots)]
    refused = [str(error) for error in load_rows(file) if isinstance(error, TaskError)]
    found = await play("published rows", settings, [package.id for package in packages], workers)

    def played(package: Package) -> Played:
        reason = next((text for text in refused if package.id in text), "the environment skipped this row")
        got = found.get(package.id) or Rewards(None, None, reason)
        kind = package.name, package.language, package.schema
        return Played(*kind, got.oracle, got.noop, got.reason, got.seconds)

    return [played(package) for package in packages]


async def measure(package: Package, cache: Path) -> Package:
    """Return the package with the tests that its change fixes and keeps, as their log names them."""
    old, new = await tree(package, package.old, cache), await tree(package, package.new, cache)
    tested = {path: text for path, text in new.items() if is_test(package, path)}
    before = {path: text for path, text in old.items() if not is_test(package, path)} | tested
    async with SlotPool(SlotPoolConfig(), LocalBackend.from_isolation("best")) as pool:
        slot = await pool.acquire(package.id, spec=SlotSpec(network=Network.ON))
        await fill(slot, before)
        if package.language == "python":
            scm = {"SETUPTOOLS_SCM_PRETEND_VERSION": package.old}  # no history in this slot
            venv = RepositoryVenv(slot, WORKSPACE, this_interpreter(), timeout_s=INSTALL_S, env=scm)
            await venv.make(Install(tuple(package.author_packages), editable=True))
        else:
            done = await slot.execute("\n".join(package.install) or "true", timeout_s=INSTALL_S)
            print(done.output[-300:] if not done.success else "", file=sys.stderr)
        changed = sorted(path for path, text in tested.items() if old.get(path) != text)
        results = []
        for files in (before, new):
            async with slot.fork() as fork:
                await fill(fork, files)
                results.append(await statuses(fork, package, changed))
    first, second = results
    good = {name for name, status in second.items() if status is Status.PASSED}
    fixed = sorted(name for name in good if first.get(name) is not Status.PASSED)
    stays = some_of_each_file(sorted(name for name in good if first.get(name) is Status.PASSED))
    print(f"{package.name}: {len(fixed)} fixed, {len(stays)} kept", file=sys.stderr, flush=True)
    return replace(package, fail_to_pass=fixed[:MOST_KEPT], pass_to_pass=stays)


def some_of_each_file(names: Sequence[str]) -> list[str]:
    """Return the first names of each file, in turn: a test can depend on a module that a test of another file loads."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.partition("::")[0] if "::" in name else "", []).append(name)
    turns = zip_longest(*files.values())
    return sorted([name for turn in turns for name in turn if name is not None][:MOST_KEPT])


async def fill(slot: Slot, files: Mapping[str, bytes]) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(text), 0o755 if text.startswith(b"#!") else 0o644
            member.mtime = _MTIME
            archive.addfile(member, io.BytesIO(text))
    await slot.execute(["tar", "-x", "--no-same-owner", "-C", WORKSPACE], cwd="/", stdin=data.getvalue())


async def statuses(slot: Slot, package: Package, changed: Sequence[str]) -> Mapping[str, Status]:
    if package.language == "python":
        files = [path for path in changed if path.endswith(".py") and "test" in PurePosixPath(path).name]
        command = f"{VENV_DIR}/bin/python -m pytest -rA -p no:cacheprovider {' '.join(files)}"
    else:
        command = "\n".join(package.test_cmd) or LANGUAGES[package.language].test
    env = {"HOME": "/tmp", **(LANGUAGES[package.language].env if package.language != "python" else {})}
    done = await slot.execute(command, env=env, timeout_s=TEST_S, max_output_bytes=16 << 20, spill=False)
    name = package.log_parser or ("pytest" if package.language == "python" else LANGUAGES[package.language].parser)
    found = parser(name)(done.output)
    if not found:
        print(f"{package.name}: no tests in\n{done.output[-1500:]}", file=sys.stderr, flush=True)
    return found


def chosen(wanted: Sequence[str]) -> list[Package]:
    packages = [Package(**json.loads(line)) for line in PACKAGES.read_text().splitlines()]
    return [package for package in packages if not wanted or any(word in package.name for word in wanted)]


async def measure_all(packages: Sequence[Package], cache: Path) -> None:
    for package in packages:
        try:
            measured = await measure(package, cache)
        except PalaestraError as error:
            print(f"{package.name}: {error}", file=sys.stderr, flush=True)
            continue
        found = {each.name: each for each in chosen(())} | {package.name: measured}
        lines = [json.dumps({k: v for k, v in asdict(each).items() if v}) for each in found.values()]
        PACKAGES.write_text("".join(f"{line}\n" for line in lines))


async def play_all(packages: Sequence[Package], cache: Path, workers: int, roots: Mapping[str, str]) -> list[Played]:
    with tempfile.TemporaryDirectory() as folder:
        repositories = Path(folder)
        rows = [await row_of(package, repositories, cache) for package in packages]
        file = repositories / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return await play_rows(file, repositories, packages, workers, roots)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only packages whose names have a word")
    options.add_argument("--measure", action="store_true", help="find the tests of each row, and write them down")
    options.add_argument(
        "--cache", type=Path, default=local_path(CACHE_DIR) / "published_rows", help="the folder of releases"
    )
    options.add_argument("--workers", type=int, default=2, help="the number of concurrent rows (default 2)")
    options.add_argument(
        "--root", type=Path, metavar="PATH", help="a root file system with the programs of every language but Python"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    given = options.parse_args()
    cache = given.cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    packages = chosen(given.only)
    if given.measure:
        asyncio.run(measure_all(packages, cache))
        return 0
    packages = [each for each in packages if each.fail_to_pass]
    languages = sorted({each.language for each in packages} - {"python"}) if given.root else []
    roots = dict.fromkeys(languages, str(given.root))
    table = asyncio.run(play_all(packages, cache, given.workers, roots))
    for played in table:
        reason = played.reason.strip().splitlines()[0] if played.reason.strip() else ""
        kind = f"{played.name:<20} {played.language:<11} {played.schema:<15}"
        end = "" if played.ok else f"  {reason}"
        print(f"{kind} oracle {played.oracle}, noop {played.noop}, {played.seconds:.0f} s{end}")
    good = sum(played.ok for played in table)
    print(f"{good} of {len(table)} rows as published ({good / max(1, len(table)):.0%})")
    if given.json:
        given.json.write_text(json.dumps([asdict(played) for played in table], indent=1))
    return 0 if good == len(table) else 1


if __name__ == "__main__":
    raise SystemExit(main())
