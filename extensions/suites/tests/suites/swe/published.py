"""Small repositories with one bug each, and rows about them in the published schemas; nothing is downloaded."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import run
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON
from palaestra_suites.swe.swe_smith_oracle import SweEnvironment, SweSmithOracleEnvConfig
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.config import APIServerConfig

Files = Mapping[str, str | bytes | None]

CALC = "def add(a, b):\n    return a {} b\n\n\ndef double(a):\n    return 2 * a\n"
BUGGY, RIGHT = CALC.format("-"), CALC.format("+")
TESTS = (
    "from pkg.calc import add, double\n\n\n"
    "def test_add():\n    assert add(1, 2) == 3\n\n\ndef test_double():\n    assert double(2) == 4\n"
)
BASE: Files = {"pkg/__init__.py": "", "pkg/calc.py": BUGGY, "tests/test_calc.py": TESTS}
F2P, P2P = ["tests/test_calc.py::test_add"], ["tests/test_calc.py::test_double"]
FIX: Files = {"pkg/calc.py": RIGHT}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode("utf-8", "surrogateescape")  # as it is, with CRLF


@dataclass(frozen=True)
class Source:
    """A repository whose only commit is the base; `commit` adds one, `diff` is a patch from the base."""

    path: Path
    base: str

    @classmethod
    def make(cls, path: Path, files: Files = BASE) -> Source:
        path.mkdir(parents=True)
        git(path, "init", "-q")
        source = cls(path, "")
        return cls(path, source.commit(files))

    def commit(self, files: Files) -> str:
        _write(self.path, files)
        git(self.path, "add", "-A")
        git(self.path, "commit", "-qm", "c")
        return git(self.path, "rev-parse", "HEAD").strip()

    def diff(self, files: Files) -> str:
        """The patch that makes these changes to what is checked out."""
        _write(self.path, files)
        git(self.path, "add", "-A")
        found = git(self.path, "diff", "--cached", "--binary", "-M50%")
        git(self.path, "reset", "-q", "--hard")
        git(self.path, "clean", "-qfd")
        return found

    def row(self, **columns: JSON) -> dict[str, JSON]:
        """A SWE-bench row, whose patch of the tests changes nothing unless one is given; empty: a SWE-smith row."""
        return {
            "instance_id": f"o__n-{self.path.name}",
            "repo": "o/n",
            "base_commit": self.base,
            "problem_statement": "add subtracts",
            "repo_path": str(self.path),
            "patch": self.diff(FIX),
            "test_patch": self.diff({"tests/note.txt": "a note"}),
            "FAIL_TO_PASS": F2P,
            "PASS_TO_PASS": P2P,
            "install": {"python_path": ["."]},
            **columns,
        }


def _write(folder: Path, files: Files) -> None:
    for name, text in files.items():
        path = folder / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())


class WithoutBaseline(SweEnvironment):
    """Grades rows whose tests cannot run, as they are after the first rollout."""

    async def _baseline(self, work, sandbox):  # type: ignore[no-untyped-def]
        pass


def roll_out(
    rows: Sequence[Mapping[str, JSON]],
    policy: str,
    folder: Path,
    packages: DependencyCache,
    *flags: str,
    kind: type[SweEnvironment] = SweEnvironment,
) -> list[Group]:
    """Run the environment over these rows, one rollout each."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = folder.parent / f"{folder.name}.jsonl"  # above the repositories of the rows
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"dataset_name": tasks, "group_size": 1, "cache_dir": folder / "cache", "max_failures": 100,
                "total_steps": -1, "keep_workspaces": False, "infra_retries": 0}  # fmt: skip
    words = [f"--env.{name}={value}" for name, value in settings.items()]
    words += [f"--env.data_path_to_save_groups={folder / 'g.jsonl'}", *flags]
    line = CommandLine("test", SweSmithOracleEnvConfig, APIServerConfig)
    parsed = line.parse(["process", "--policy", policy, *words])
    assert isinstance(parsed, Parsed)

    class Rows(kind):  # type: ignore[misc,valid-type]
        """The environment with this test session's pytest."""

        def __init__(self, config: SweSmithOracleEnvConfig) -> None:
            super().__init__(config)
            self.dependencies = packages

    report = asyncio.run(run(form_of(Rows), parsed, root=folder / "runs", stream=io.StringIO()))
    return list(Recording(report.journal))
