"""Real bug fixes from public repositories, as rows in the published schemas, played by the oracle and by doing nothing.

    git clone https://github.com/pallets/click clones/pallets/click         # and so on
    .venv/bin/python benchmarks/real_fixes.py --clones clones               # all fixes, about a minute each
    .venv/bin/python benchmarks/real_fixes.py --clones clones --quick       # one fix of each schema

`real_fixes.jsonl` names repositories, commits and tests; patches and messages come from the clones in
`CLONES/OWNER/NAME`. Packages come from the package index. A row is ok if the oracle earns 1.0 and doing nothing 0.0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

import _measure as measure
from _row_plays import Rewards, play

from palaestra_slots.core.types import JSON

FIXES = Path(__file__).with_suffix(".jsonl")
TEST_FOLDERS = {"test", "tests", "testing", "test_data"}
SCHEMAS = ("SWE-bench", "SWE-smith", "SWE-rebench V2", "SWE-bench 5")


@dataclass(frozen=True)
class Fix:
    """A commit that fixes a bug, with the tests that start to pass with the fix and those that keep passing."""

    repository: str
    commit: str
    schema: str
    requirements: list[str]
    fail_to_pass: list[str]
    pass_to_pass: list[str]

    @property
    def name(self) -> str:
        return f"{self.repository.replace('/', '__')}-{self.commit[:8]}"


@dataclass(frozen=True)
class Played:
    """A row with its rewards. A reward is None if the rollout has no score."""

    name: str
    schema: str
    oracle: float | None
    noop: float | None
    error: str

    @property
    def ok(self) -> bool:
        return (self.oracle, self.noop) == (1.0, 0.0)


def git(folder: Path, *arguments: str, data: bytes | None = None) -> bytes:
    """Return the output of git in a repository. Raises `CalledProcessError`; git prints its message on stderr."""
    who = ["-c", "user.name=author", "-c", "user.email=author@example.org", "-c", "safe.directory=*"]
    return subprocess.run(
        ["git", "-C", folder, *who, *arguments], input=data, stdout=subprocess.PIPE, check=True
    ).stdout


def text(folder: Path, *arguments: str) -> str:
    return git(folder, *arguments).decode("utf-8", "surrogateescape")


def is_test(path: str) -> bool:
    file = PurePath(path)
    named = file.stem in ("test", "tests") or file.stem.startswith("test_") or file.stem.endswith("_test")
    return named or bool(TEST_FOLDERS & set(file.parts[:-1]))


def row_of(fix: Fix, clone: Path, mirrors: Path) -> dict[str, JSON]:
    """Return the row of a fix in the schema of its dataset. SWE-smith needs a separate repository below `mirrors`."""
    base = text(clone, "rev-parse", f"{fix.commit}^").strip()
    paths = text(clone, "diff", "--name-only", "-z", base, fix.commit).split("\0")[:-1]
    tests = [path for path in paths if is_test(path)]
    changes = [text(clone, "diff", "--binary", base, fix.commit, "--", *sorted(set(paths) - set(tests)))]
    changes.append(text(clone, "diff", "--binary", base, fix.commit, "--", *tests))
    row: dict[str, JSON] = {
        "instance_id": fix.name, "repo": fix.repository, "base_commit": base, "patch": changes[0],
        "test_patch": changes[1], "problem_statement": text(clone, "log", "-1", "--format=%B", fix.commit),
        "FAIL_TO_PASS": fix.fail_to_pass, "PASS_TO_PASS": fix.pass_to_pass,
        "created_at": text(clone, "log", "-1", "--format=%cI", fix.commit).strip(),
    }  # fmt: skip
    packages = shlex.join(["pytest", *fix.requirements])
    run = shlex.join(["pytest", "--no-header", "-rA", "--tb=line", *(path for path in tests if path.endswith(".py"))])
    match fix.schema:
        case "SWE-bench":
            lists = {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
            return row | lists | {"hints_text": "", "version": "1.0", "environment_setup_commit": base}
        case "SWE-rebench V2":
            install = ["pip install -e .", f"pip install {packages}"]
            recipe = {"install": install, "log_parser": "parse_log_pytest", "test_cmd": run}
            image = f"docker.io/swerebenchv2/{fix.name}:latest"
            return row | {"language": "python", "interface": "", "image_name": image, "install_config": recipe}
        case "SWE-bench 5":
            script = ["#!/bin/bash", "set -uxo pipefail", "cd /testbed", f"git checkout {base} {shlex.join(tests)}"]
            script += ["python -m pip install -e .", f"python -m pip install {packages}", "git apply -v - <<'EOF_1'"]
            script += [changes[1] + "EOF_1", ": '>>>>> Start Test Output'", run, ": '>>>>> End Test Output'", ""]
            return row | {"log_parser": "parse_log_pytest_v2", "eval_script": "\n".join(script)}
        case "SWE-smith":
            repository = mirror(fix, clone, changes[0], mirrors)
            patch = text(mirrors.parent / repository, "diff", "main", f"{fix.name}~")
            kept = {name: row[name] for name in ("problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS", "created_at")}
            return kept | {"instance_id": fix.name, "repo": repository, "patch": patch}
    raise ValueError(f"{fix.name}: its schema is not one of {', '.join(SCHEMAS)}")


def mirror(fix: Fix, clone: Path, patch: str, mirrors: Path) -> str:
    """Make a repository like SWE-smith: the fixed tree on `main`, and a branch with the bug and without its tests."""
    made = mirrors / fix.name
    made.mkdir(parents=True)
    subprocess.run(["tar", "-x"], cwd=made, input=git(clone, "archive", fix.commit), check=True)
    for words in ("init -q -b main", "add -Af", "commit -qm Initial", f"checkout -qb {fix.name}"):
        git(made, *words.split())
    git(made, "apply", "-R", "--index", "-", data=patch.encode("utf-8", "surrogateescape"))
    git(made, "commit", "-qm", "Bug Patch")
    git(made, "rm", "-q", *{test.partition("::")[0] for test in fix.fail_to_pass})
    git(made, "commit", "-qm", "Remove F2P Tests")
    git(made, "checkout", "-q", "main")
    return f"{mirrors.name}/{fix.name}"


async def play_fixes(rows: Path, repositories: Path, fixes: Sequence[Fix], workers: int) -> list[Played]:
    """Play both policies over a file with the rows of these fixes."""
    packages = {fix.repository: fix.requirements for fix in fixes if fix.schema == "SWE-bench"}
    packages |= {f"swesmith/{fix.name}": fix.requirements for fix in fixes if fix.schema == "SWE-smith"}
    settings = ["--env.dataset_name", str(rows), "--env.shuffle", "false"]
    settings += ["--env.repo_base_url", f"file://{repositories}", "--env.repo_requirements", json.dumps(packages)]
    found = await play("real fixes", settings, [fix.name for fix in fixes], workers)
    skipped = Rewards(None, None, "the environment skipped this row")
    table = [(fix, found.get(fix.name, skipped)) for fix in fixes]
    return [Played(fix.name, fix.schema, got.oracle, got.noop, got.reason) for fix, got in table]


def chosen(wanted: Sequence[str], quick: bool) -> list[Fix]:
    """Return the fixes whose names contain one of the words; with `quick`, the first fix of each schema."""
    fixes = [Fix(**json.loads(line)) for line in FIXES.read_text().splitlines()]
    fixes = [fix for fix in fixes if not wanted or any(word in fix.name for word in wanted)]
    return list({fix.schema: fix for fix in reversed(fixes)}.values()) if quick else fixes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clones", type=Path, required=True, help="a folder with the clones, as OWNER/NAME")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only fixes whose names contain a word")
    parser.add_argument("--workers", type=int, default=2, help="the number of concurrent rows (default 2)")
    parser.add_argument("--quick", action="store_true", help="one fix of each schema")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    options = parser.parse_args()
    fixes = chosen(options.only, options.quick)
    if missing := sorted({fix.repository for fix in fixes if not (options.clones / fix.repository).exists()}):
        parser.error(f"{options.clones} has no clone of {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        repositories = Path(folder)
        for name in sorted({fix.repository for fix in fixes}):
            (repositories / name).parent.mkdir(exist_ok=True)
            (repositories / name).symlink_to((options.clones / name).resolve())
        rows = [row_of(fix, repositories / fix.repository, repositories / "swesmith") for fix in fixes]
        file = repositories / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = asyncio.run(play_fixes(file, repositories, fixes, options.workers))
    return report("Real fixes", table, options.json)


def report(title: str, table: Sequence[Played], file: Path | None) -> int:
    """Print the table and write the JSON. Return 1 if a row is not ok, else 0."""
    print(f"{title}\n{measure.machine()}\n\n| name | schema | oracle | noop | |\n|---|---|---:|---:|---|")
    for row in table:
        print(f"| {row.name} | {row.schema} | {row.oracle} | {row.noop} | {'ok' if row.ok else 'FAILED'} |")
    for row in table:
        if not row.ok:
            print(f"{row.name}: {row.error[:2000]}")
    print(f"{sum(row.ok for row in table)} of {len(table)} are ok")
    if file is not None:
        rows = [asdict(row) | {"ok": row.ok} for row in table]
        file.write_text(json.dumps({"title": title, "machine": measure.machine(), "rows": rows}, indent=1))
    return 0 if all(row.ok for row in table) else 1


if __name__ == "__main__":
    raise SystemExit(main())
