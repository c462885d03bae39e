"""Building tasks from a small package of our own, in real slots; the index is a server on the loopback."""

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError, PrepareError, TaskError
from palaestra_suites.swe.authoring import layout
from palaestra_suites.swe.authoring.build_tasks import BuildOptions, build, pick
from palaestra_suites.swe.authoring.manifest import (
    Manifest,
    PinnedMutation,
    PinnedPackage,
    dump_manifest,
    load_manifest,
)
from palaestra_suites.swe.authoring.sdist import PackageIndex, make_repository, open_index, read_sdist
from palaestra_suites.swe.swe_row import SweRow, load_rows
from suites.bench import Bench, RunBench

PACKAGE = {
    "src/mini/__init__.py": (
        "def clamp(value, low=0, high=10):\n"
        "    if value < low:\n        return low\n"
        "    if value > high:\n        return high\n"
        "    return value\n\n\n"
        "def total(values, start=0):\n"
        "    result = start\n"
        "    for value in values:\n        result += value\n"
        "    return result\n"
    ),
    "tests/test_mini.py": (
        "import pytest\nfrom mini import clamp, total\n\n"
        "@pytest.mark.parametrize('value', range(10), ids=lambda n: f'value {n}')\n"
        "def test_inside(value):\n    assert clamp(value) == value\n\n"
        "def test_low():\n    assert clamp(-1) == 0\n\n"
        "def test_high():\n    assert clamp(11) == 10\n\n"
        "def test_total():\n    assert total([1, 2]) == 3\n\n"
        "def test_start():\n    assert total([], 5) == 5\n\n"
        "def test_flaky(tmp_path):\n    import os\n    assert os.urandom(1)[0] < 128 or True\n"
    ),
    "setup.py": "raise SystemExit('never executed')\n",
}


def sdist(files: dict[str, str], name: str = "mini-1.0") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0)


ARCHIVE = sdist(PACKAGE)
SHA256 = hashlib.sha256(ARCHIVE).hexdigest()


def with_index(
    scenario: Callable[[str, list[str]], Awaitable[None]], *, archive: bytes = ARCHIVE, as_json: bool = False
) -> None:
    """Serve an index with one package; `scenario` gets its address and the list of requests made."""
    asked: list[str] = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.path)
        if as_json:
            file = {"filename": "mini-1.0.tar.gz", "url": "../../f/mini-1.0.tar.gz", "hashes": {"sha256": SHA256}}
            return web.json_response({"files": [file]}, content_type="application/vnd.pypi.simple.v1+json")
        links = f'<a href="../../f/mini-1.0.tar.gz#sha256={SHA256}" data-x="&gt;">mini-1.0.tar.gz</a>'
        return web.Response(text=f"<html>{links}</html>", content_type="text/html")

    async def file(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=archive)

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.get("/simple/mini/", page), web.get("/f/mini-1.0.tar.gz", file)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            await scenario(f"http://127.0.0.1:{port}/simple", asked)
        finally:
            await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize("as_json", [True, False])
def test_an_sdist_is_found_checked_and_loaded_once(tmp_path: Path, as_json: bool) -> None:
    async def scenario(url: str, asked: list[str]) -> None:
        async with open_index(tmp_path, url=url) as index:
            found = await index.find("Mini", "1.0")
            assert found.sha256 == SHA256
            assert await index.download_sdist(found) == ARCHIVE
            assert await index.download_sdist(found) == ARCHIVE
            with pytest.raises(ConfigError, match=r"mini==2\.0"):
                await index.find("mini", "2.0")
            with pytest.raises(ConfigError, match="does not know 'nothing'"):
                await index.find("nothing", "1.0")
        assert asked.count("/f/mini-1.0.tar.gz") == 1

    with_index(scenario, as_json=as_json)


def test_bytes_of_another_hash_are_refused(tmp_path: Path) -> None:
    async def scenario(url: str, asked: list[str]) -> None:
        async with open_index(tmp_path, url=url) as index:
            with pytest.raises(PrepareError, match="sha256"):
                await index.download_sdist(await index.find("mini", "1.0"))

    with_index(scenario, archive=ARCHIVE + b"x")


async def test_an_index_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_index(tmp_path, url="http://127.0.0.1:1/simple") as index:
            assert isinstance(index, PackageIndex)
            await index.find("mini", "1.0")

    with pytest.raises(PrepareError, match="cannot be read"):
        await scenario()


def test_an_archive_that_leaves_its_directory_is_refused() -> None:
    with raises(PrepareError):
        read_sdist(sdist({"../../../etc/passwd": "x"}), "evil")
    with raises(PrepareError):
        read_sdist(ARCHIVE[:100], "torn")


def test_links_and_special_files_of_an_archive_are_left_out() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("fifo", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"mini-1.0/{name}")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        tar.addfile(tarfile.TarInfo("/mini-1.0/src/empty.py"))
    assert set(read_sdist(buffer.getvalue(), "mini")) == {"src/empty.py"}


def test_the_same_files_give_the_same_commit(tmp_path: Path) -> None:
    files = read_sdist(ARCHIVE, "mini")
    commits = {asyncio.run(make_repository(files, tmp_path / name, "mini 1.0")) for name in ("a.git", "b.git", "a.git")}
    assert len(commits) == 1


def test_the_layout_is_found_from_the_files() -> None:
    files = read_sdist(ARCHIVE, "mini")
    assert layout.python_path(files) == ("src",)
    assert layout.test_files(files) == ("tests/test_mini.py",)
    assert layout.source_files(files) == ("src/mini/__init__.py",)


def test_a_manifest_round_trips_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    bug = PinnedMutation("k__1", "a.py", "k", 1, 2, "<", "<=", ("t.py",), 3)
    manifest = Manifest(("pytest==1",), (PinnedPackage("a", "1", "ff", (".",), mutations=(bug,)),))
    path = tmp_path / "m.json"
    path.write_text(dump_manifest(manifest))
    assert load_manifest(path) == manifest
    path.write_text('{"schema": "palaestra.swe-manifest/99"}')
    with pytest.raises(ConfigError, match="schema"):
        load_manifest(path)


def test_picking_goes_round_the_packages() -> None:
    def package(name: str, count: int) -> PinnedPackage:
        bugs = tuple(PinnedMutation(f"{name}{n}", "a.py", "k", 0, 1, "", "", (), 1) for n in range(count))
        return PinnedPackage(name, "1", "ff", (".",), mutations=bugs)

    packages = [package("a", 3), package("b", 1), package("c", 2)]
    picked = pick(packages, limit=4)
    assert [[bug.id for bug in part.mutations] for part in picked] == [["a0", "a1"], ["b0"], ["c0"]]
    assert [part.name for part in pick(packages, select=["b", "c1"])] == ["b", "c"]
    with pytest.raises(ConfigError, match="nope"):
        pick(packages, select=["nope"])


def test_the_committed_manifest_is_large_and_varied() -> None:
    packages = load_manifest().packages
    bugs = [bug for package in packages for bug in package.mutations]
    assert len(packages) >= 8
    assert len(bugs) >= 30
    assert len({bug.kind for bug in bugs}) >= 8
    assert len({bug.id for bug in bugs}) == len(bugs)
    assert all(len(bytes.fromhex(package.sha256)) == 32 for package in packages)


@pytest.mark.slots
def test_tasks_are_searched_pinned_and_rebuilt_the_same(tmp_path: Path, run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        # The pytest of this test run stands in for installed requirements.
        from palaestra_suites.swe.authoring.build_rows import Repository, make_row
        from palaestra_suites.swe.authoring.build_tasks import find_bugs
        from palaestra_suites.swe.authoring.package_trial import open_trial
        from palaestra_suites.toolchain.toolchain import Install

        files = read_sdist(ARCHIVE, "mini")
        commit = await make_repository(files, tmp_path / "mini.git", "mini 1.0")
        package = PinnedPackage("mini", "1.0", SHA256, ("src",))
        repository = Repository(package, files, "mini.git", commit, Install(python_path=("src",)))
        toolchain = replace(bench.toolchain, python_path=("src",))
        async with open_trial(bench, "mini", files, toolchain) as trial:
            found = await find_bugs(trial, repository, want=2, max_tries=12)
            assert len(found.mutations) == 2
            base = await trial.run(("tests/test_mini.py",), timeout_s=30)
            lines = []
            for bug in found.mutations:
                row = await make_row(trial, repository, bug, base)
                assert len(row["FAIL_TO_PASS"]) == bug.fail_to_pass
                assert not set(row["FAIL_TO_PASS"]) & set(row["PASS_TO_PASS"])
                assert "__init__.py" not in row["problem_statement"]
                assert row == await make_row(trial, repository, bug, base)
                lines.append(json.dumps(row))
            moved = replace(found.mutations[0], start=0, end=1)
            with pytest.raises(TaskError, match="does not contain"):
                await make_row(trial, repository, moved, base)
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
        loaded = list(load_rows(tmp_path / "tasks.jsonl"))
        assert [getattr(row, "repo_path", row) for row in loaded] == [str(tmp_path / "mini.git")] * 2

    run_bench(scenario)


@pytest.mark.slots
@pytest.mark.network
def test_pinned_tasks_of_real_packages_are_built(tmp_path: Path, run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        options = BuildOptions(out=tmp_path / "tasks.jsonl", cache=tmp_path / "cache", limit=2)
        report = await build([], None, bench, options)
        assert report.problems == ()
        loaded = [row for row in load_rows(tmp_path / "tasks.jsonl") if isinstance(row, SweRow)]
        assert len({row.repo for row in loaded}) == 2
        assert all(Path(row.repo_path or "").is_dir() for row in loaded)

    run_bench(scenario)
