"""Terminal tasks in their published formats, over a root file system, played by the oracle and by doing nothing.

    root=$(palaestra images make debian:12 --include python3 --include gcc --include libc6-dev --include make \\
      --include git --include sqlite3 --include xz-utils --include bzip2 --include nginx-light --include procps)
    .venv/bin/python benchmarks/image_tasks.py --root "$root"
    .venv/bin/python benchmarks/image_tasks.py --root "$root" --quick       # three tasks of each form

`image_tasks.toml` contains the tasks. Each task becomes a Harbor folder; some also become Terminal-Bench 1 folders and
packed rows. The instructions of their Dockerfiles run over the root file system. A task is ok if the reference solution
earns 1.0 and doing nothing 0.0.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from real_fixes import Played, report

from palaestra_slots.core.types import JSON
from palaestra_suites.terminal_bench.import_tasks import import_tasks

TASKS = Path(__file__).with_suffix(".toml")
BOOTSTRAP = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then
    echo "Error: No working directory set. Please set a WORKDIR in your Dockerfile before running this script."
    exit 1
fi
"""
HARBOR = f"""{BOOTSTRAP}uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
TERMINAL_BENCH_1 = f"""{BOOTSTRAP}uv init
uv add pytest==8.4.1
uv run pytest $TEST_DIR/test_outputs.py -rA
"""
COMPOSE = """services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
"""


@dataclass(frozen=True)
class ImageTask:
    """A task. `dockerfile`, `solution` and `script` lack their first line; `context` and `tests` map paths to further
    files."""

    name: str
    instruction: str
    dockerfile: str
    solution: str
    test: str = ""
    script: str = ""
    grading: str = ""
    forms: tuple[str, ...] = ()
    context: Mapping[str, str] = field(default_factory=dict)
    tests: Mapping[str, str] = field(default_factory=dict)

    @property
    def verifier(self) -> dict[str, str]:
        script = f"#!/bin/bash\n{self.script}" if self.script else HARBOR
        return {"test.sh": script, **self.tests} | ({"test_outputs.py": self.test} if self.test else {})

    def harbor(self) -> dict[str, str]:
        """Return the files of a Harbor folder."""
        grading = f'grading = "{self.grading}"\n' if self.grading else ""
        toml = (
            f'version = "1.0"\n\n[metadata]\ndifficulty = "medium"\ncategory = "software-engineering"\n{grading}\n'
            "[verifier]\ntimeout_sec = 300.0\n\n[agent]\ntimeout_sec = 300.0\n\n"
            f'[environment]\nbuild_timeout_sec = 600.0\ndocker_image = "tasks/{self.name}:20251031"\n'
            'cpus = 1\nmemory = "2G"\nstorage = "10G"\n'
        )
        files = {"task.toml": toml, "instruction.md": f"{self.instruction}\n", "solution/solve.sh": self.solve}
        files |= {f"environment/{path}": text for path, text in self.build("ubuntu:24.04").items()}
        return files | {f"tests/{path}": text for path, text in self.verifier.items()}

    def terminal_bench_1(self) -> dict[str, str]:
        """Return the files of a Terminal-Bench 1 folder."""
        yaml = f"instruction: |-\n  {self.instruction}\nauthor_email: unknown\ndifficulty: easy\ncategory: files\n"
        yaml += "parser_name: pytest\nmax_agent_timeout_sec: 300.0\nmax_test_timeout_sec: 300.0\n"
        base = "ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624"
        files = {"task.yaml": yaml, "solution.sh": self.solve, "run-tests.sh": TERMINAL_BENCH_1}
        return files | self.build(base) | {"docker-compose.yaml": COMPOSE, "tests/test_outputs.py": self.test}

    def row(self) -> dict[str, JSON]:
        """Return the columns of a packed row."""
        return {
            "task_name": self.name,
            "instruction": self.instruction,
            "category": "files",
            "docker_image": f"tasks/{self.name}:1",
            "environment_tar": packed(self.build("ubuntu:24.04")),
            "tests_tar": packed(self.verifier),
            "test_sh": self.verifier["test.sh"],
            "solution_tar": packed({"solve.sh": self.solve}),
        } | ({"grading": self.grading} if self.grading else {})

    @property
    def solve(self) -> str:
        return f"#!/bin/bash\n{self.solution}"

    def build(self, base: str) -> dict[str, str]:
        return {"Dockerfile": f"FROM {base}\n{self.dockerfile}", **self.context}


def packed(files: Mapping[str, str]) -> str:
    """Return a .tar.gz of the files in base64."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(text.encode()), 0o755 if path.endswith(".sh") else 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return base64.b64encode(buffer.getvalue()).decode()


def write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755 if path.endswith(".sh") else 0o644)


def sources(tasks: Sequence[ImageTask], folder: Path, count: int | None) -> dict[str, Path]:
    """Write at most `count` tasks in each format; returns the source of each format."""
    older = [task for task in tasks if "terminal-bench-1" in task.forms]
    for task in tasks[:count]:
        write(folder / "harbor" / task.name, task.harbor())
    for task in older[:count]:
        write(folder / "terminal-bench-1" / task.name, task.terminal_bench_1())
    rows = [task.row() for task in tasks if "row" in task.forms]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    return {
        "Harbor": folder / "harbor",
        "Terminal-Bench 1": folder / "terminal-bench-1",
        "packed row": folder / "rows.jsonl",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="a root file system, or `host` (on which some of the tasks fail)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only tasks whose names contain a word")
    parser.add_argument("--quick", action="store_true", help="three tasks in each format")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    options = parser.parse_args()
    tasks = [ImageTask(**task) for task in tomllib.loads(TASKS.read_text())["tasks"]]
    tasks = [task for task in tasks if not options.only or any(word in task.name for word in options.only)]
    table: list[Played] = []
    with tempfile.TemporaryDirectory() as folder:
        for form, source in sources(tasks, Path(folder), 3 if options.quick else None).items():
            if not source.exists() or not source.stat().st_size:
                continue
            tried = import_tasks(
                str(source),
                ["--env.base_image", options.root],
                progress=lambda line: print(f"{line.name}: {line.finding.value}", file=sys.stderr, flush=True),
            )
            table += [Played(each.name, form, each.solution, each.noop, each.reason) for each in tried.lines]
    return report("Terminal tasks over a root file system", table, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
