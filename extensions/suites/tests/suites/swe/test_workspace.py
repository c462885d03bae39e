"""A row from its repository into a slot, and out again by its reference solution."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import ToolStep
from palaestra_slots.sandbox.local.local_slot import MAX_STDIN_BYTES
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.repository import REGULAR, RepositoryCache, TreeFile, TreeFiles
from palaestra_suites.swe.solution_steps import solution_steps
from palaestra_suites.swe.swe_row import SweRow, parse_row
from palaestra_suites.swe.workspace import (
    add_tests,
    moved_modules,
    prepare_repository,
    replace_work,
    solution_files,
    unpack,
    with_listed,
    work_paths,
)
from suites.bench import FILES, REPO, Bench, RunBench

CLEAN = FILES["pkg/calc.py"].replace("return a - b", "return a + b")
BUG = unified_diff.between("pkg/calc.py", CLEAN, FILES["pkg/calc.py"])


def make_source(path: Path, calc: str) -> str:
    """A repository with a past and a future around the commit that a task is about. Returns that commit."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=path, check=True, capture_output=True, text=True
        ).stdout

    path.mkdir(parents=True)
    git("init", "-q", "-b", "main")
    for text in ("past = 1\n", calc, "future = 1\n"):
        for name, content in {**FILES, "pkg/calc.py": text}.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(content)
        git("add", "-A")
        git("commit", "-q", "-m", text[:6])
    return git("rev-parse", "HEAD~1").strip()


def row(tmp_path: Path, calc: str = CLEAN, **columns: str) -> SweRow:
    base = {
        "repo": "o/n",
        "problem_statement": "p",
        "instance_id": "i",
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
    }
    commit = make_source(tmp_path / "hub" / "o" / "n", calc)
    return parse_row({**base, "base_commit": commit, **columns})


def cache(tmp_path: Path) -> RepositoryCache:
    return RepositoryCache(tmp_path / "cache", str(tmp_path / "hub"))


@pytest.mark.slots
def test_the_agent_gets_the_bug_and_one_commit(tmp_path: Path, run_bench: RunBench) -> None:
    task = row(tmp_path, patch=BUG)

    async def scenario(bench: Bench) -> None:
        heads = []
        for _ in range(2):
            async with bench.slot() as slot:
                await prepare_repository(slot, cache(tmp_path), task, REPO)
                assert await slot.read_text(f"{REPO}/pkg/calc.py") == FILES["pkg/calc.py"]
                tests = await slot.read_text(f"{REPO}/tests/test_calc.py")
                assert "def test_double" in tests
                assert "def test_add" not in tests, "it decides, so grading brings it"
                log = await slot.execute("git log --all --format=%H; git reflog; git remote; git status -s", cwd=REPO)
                assert len(log.output.split()) == 1, log.output
                objects = await slot.execute("git cat-file --batch-all-objects --batch-check | grep -c blob", cwd=REPO)
                assert objects.output.strip() == str(len(set(FILES.values())))
                heads.append(log.output)
        assert heads[0] == heads[1]

    run_bench(scenario)


@pytest.mark.slots
def test_the_tests_of_a_bench_row_come_at_grading_only(tmp_path: Path, run_bench: RunBench) -> None:
    after = FILES["tests/test_calc.py"] + "\ndef test_more(): pass\n"
    tests = unified_diff.between("tests/test_calc.py", FILES["tests/test_calc.py"], after)
    fix = unified_diff.between("pkg/calc.py", FILES["pkg/calc.py"], CLEAN)
    task = row(tmp_path, FILES["pkg/calc.py"], patch=fix, test_patch=tests)

    async def scenario(bench: Bench) -> None:
        async with bench.slot() as slot:
            await prepare_repository(slot, cache(tmp_path), task, REPO)
            assert await slot.read_text(f"{REPO}/tests/test_calc.py") == FILES["tests/test_calc.py"]
            await slot.write_text(f"{REPO}/tests/test_calc.py", "")
            await add_tests(slot, cache(tmp_path), task, REPO)
            assert await slot.read_text(f"{REPO}/tests/test_calc.py") == after

    run_bench(scenario)


def text(content: str, mode: str = "100644") -> TreeFile:
    return TreeFile(mode, content.encode())


def played(steps: tuple[ToolStep, ...]) -> None:
    """Run the terminal commands among steps."""
    for step in steps:
        assert step.name == "terminal"
        subprocess.run(["bash", "-c", str(step.arguments["command"])], check=True)


async def test_the_reference_solution_is_patch_calls_that_fit(tmp_path: Path) -> None:
    task = row(tmp_path, patch=BUG)
    before, after = await solution_files(cache(tmp_path), task)
    (step,) = solution_steps(before, after, REPO)
    assert step.name == "patch"
    old, new = str(step.arguments["old_string"]), str(step.arguments["new_string"])
    assert FILES["pkg/calc.py"].count(old) == 1
    assert FILES["pkg/calc.py"].replace(old, new) == CLEAN


def test_new_and_deleted_files_modes_and_links_are_steps_too() -> None:
    before: TreeFiles = {"n.py": None, "d d.py": text("x\n"), "o.py": text("x\n"), "l": None, "s/run": None}
    after: TreeFiles = {
        "n.py": text("x = 1\n"), "d d.py": None, "o.py": text("x\n", "100755"), "l": TreeFile("120000", b"o.py"),
        "s/run": text("#!/bin/sh\n", "100755"),
    }  # fmt: skip
    assert solution_steps(before, after, "/r") == (
        ToolStep("terminal", {"command": "rm -- '/r/d d.py'"}),
        ToolStep("write_file", {"path": "/r/n.py", "content": "x = 1\n"}),
        ToolStep("terminal", {"command": "chmod +x -- /r/o.py"}),
        ToolStep("terminal", {"command": "mkdir -p -- /r && ln -sfn -- o.py /r/l"}),
        ToolStep("write_file", {"path": "/r/s/run", "content": "#!/bin/sh\n"}),
        ToolStep("terminal", {"command": "chmod +x -- /r/s/run"}),
    )


def test_a_long_reference_solution_is_packed_into_few_commands(tmp_path: Path) -> None:
    """An agent has 30 turns by default, and the reference solution must not fail for want of turns."""
    before: dict[str, TreeFile | None] = {
        f"d d/f{number}.py": text("".join(f"{line}\n" for line in range(100))) for number in range(12)
    }
    after: dict[str, TreeFile | None] = {
        path: text(file.text.replace("5\n", "five\n") + "ä" * 40_000) for path, file in before.items() if file
    }
    before |= {"d d/run.sh": text("x\n", "100755"), "d d/moved.sh": None, "gone.py": text("x\n"), "to": text("x")}
    before |= {"ln": TreeFile("120000", b"to"), "stop": text("x", "100755")}
    after |= {"d d/run.sh": None, "d d/moved.sh": text("x\n", "100755"), "gone.py": None, "ln": text("file")}
    after |= {"to": TreeFile("120000", b"ln"), "stop": text("x")}
    for path, file in before.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        if file is not None and file.is_link:
            (tmp_path / path).symlink_to(file.text)
        elif file is not None:
            (tmp_path / path).write_bytes(file.data)
            (tmp_path / path).chmod(0o755 if file.mode == "100755" else 0o644)
    steps = solution_steps(before, after, str(tmp_path))
    assert len(steps) < 30
    played(steps)
    found: dict[str, TreeFile | None] = {}
    for path in after:
        place = tmp_path / path
        if place.is_symlink():
            found[path] = TreeFile("120000", str(place.readlink()).encode())
        elif place.exists():
            found[path] = TreeFile("100755" if place.stat().st_mode & 0o100 else "100644", place.read_bytes())
        else:
            found[path] = None
    assert found == after


async def test_a_commit_that_has_the_bug_already_is_left_as_it_is(tmp_path: Path) -> None:
    task = row(tmp_path, FILES["pkg/calc.py"], patch=BUG)
    before, after = await solution_files(cache(tmp_path), task)
    assert (before, after) == ({"pkg/calc.py": text(FILES["pkg/calc.py"])}, {"pkg/calc.py": text(CLEAN)})


async def test_a_patch_that_fits_neither_way_is_the_rows_fault(tmp_path: Path) -> None:
    task = row(tmp_path, "something = 'else'\n", patch=BUG)
    with pytest.raises(TaskError, match="does not match"):
        await solution_files(cache(tmp_path), task)


@pytest.mark.slots
def test_a_repository_larger_than_the_input_of_a_command_is_unpacked(tmp_path: Path, run_bench: RunBench) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        member = tarfile.TarInfo("large.bin")
        member.size = MAX_STDIN_BYTES
        archive.addfile(member, io.BytesIO(bytes(member.size)))

    async def scenario(bench: Bench) -> None:
        slot = await bench.acquire("prepare")
        await unpack(slot, data.getvalue(), REPO)
        found = await slot.stat(f"{REPO}/large.bin")
        assert found is not None
        assert found.size == MAX_STDIN_BYTES

    run_bench(scenario)


@pytest.mark.slots
def test_the_reference_solution_replaces_the_whole_work(tmp_path: Path, run_bench: RunBench) -> None:
    task = row(tmp_path, patch=BUG)

    async def scenario(bench: Bench) -> None:
        slot = await bench.acquire("prepare")
        await prepare_repository(slot, cache(tmp_path), task, REPO)
        async with bench.slot(await bench.seal(slot)) as slot:
            await slot.make_dir(f"{REPO}/numpy/core")
            await slot.write_text(f"{REPO}/pkg/extra/more.py", "")
            await slot.write_text(f"{REPO}/pkg/calc.py", "wrong = 1")
            await slot.execute("rm -r tests && mkdir -p tests/gone", cwd=REPO)
            work = work_paths(await slot.changes(), (), REPO)
            await replace_work(slot, cache(tmp_path), task, REPO, work, solved=True)
            assert await slot.read_text(f"{REPO}/pkg/calc.py") == CLEAN
            names = {each.path.removeprefix(f"{REPO}/") for each in await slot.list_dir(REPO)}
            assert names == {".git", "pkg", "tests"}, "an empty folder is a package that the reference could import"
            assert await slot.stat(f"{REPO}/pkg/extra") is None

    run_bench(scenario)


@pytest.mark.parametrize(
    ("text", "host", "new", "named"),
    [
        ("t: a.o b.o\n", "a.c", ["n.c"], "t: a.o n.o b.o\n"),
        ("O = a.o \\\n\tb.o\n", "b.c", ["n.c"], "O = a.o \\\n\tb.o n.o\n"),
        ("a.o: a.c a.h\n\tcc -c -o a.o a.c\nx: y\n", "a.c", ["n.c"],
         "a.o: a.c a.h\n\tcc -c -o a.o a.c\nn.o: n.c a.h\n\tcc -c -o n.o n.c\nx: y\n"),
        ("t: $(OUT)/a.o\n\tgcc src/a.c main.c\n", "src/a.c", ["src/n.c", "lib/m.c"],
         "t: $(OUT)/a.o $(OUT)/n.o lib/m.o\n\tgcc src/a.c src/n.c lib/m.c main.c\n"),
        ("add_executable(t main.cc a.cc)\n", "a.cc", ["n.cpp"], "add_executable(t main.cc a.cc n.cpp)\n"),
        ('set(S "${D}/a.c")\n', "a.c", ["n.c"], 'set(S "${D}/a.c" "${D}/n.c")\n'),
        ("executable('t', 'a.c', 'b.c')\n", "a.c", ["n.c"], "executable('t', 'a.c', 'n.c', 'b.c')\n"),
        ("t: main_a.o a.c.in a.cpp\n", "a.c", ["n.c"], None),
        ("t: a.o\n", "a.c", ["-n.c", "$(shell x).c", "n n.c", "a;b.c"], None),
    ],
)  # fmt: skip
def test_new_sources_are_named_next_to_a_changed_one(text: str, host: str, new: list[str], named: str | None) -> None:
    ways = list(with_listed({}, {"Makefile": TreeFile(REGULAR, text.encode())}, [host], new))
    assert [file.text for places in ways for file in places.values() if file] == [named] * (named is not None)


@pytest.mark.parametrize(
    ("gone", "changed", "places"),
    [
        (["a.py"], ["a.py", "src/", "src/a.py"], {"a.py": "src/a.py"}),
        (["a.py"], ["src/a.py", "src/b.py", "own/c.py"], {"a.py": "src/a.py", "b.py": "src/b.py"}),
        (["p/__init__.py", "p/a.py"], ["src/p/__init__.py", "src/p/a.py", "src/p/new/b.py"],
         {"p/__init__.py": "../src/p/__init__.py", "p/a.py": "../src/p/a.py", "p/new/b.py": "../../src/p/new/b.py"}),
        (["lib/a.py"], ["python/a.py"], {"lib/a.py": "../python/a.py"}),
        (["src/pkg/a.py"], ["pkg/a.py"], {"src/pkg/a.py": "../../pkg/a.py"}),
        (["a.py"], ["src/b.py"], {}),
        (["a.py"], ["src/a.py", "src/kept.py"], {"a.py": "src/a.py"}),
    ],
)  # fmt: skip
def test_moved_modules_are_linked_where_they_were(gone: list[str], changed: list[str], places: dict[str, str]) -> None:
    found = moved_modules(gone, changed, [*gone, "kept.py"])
    assert {path: link.text for path, link in found.items() if link} == places
