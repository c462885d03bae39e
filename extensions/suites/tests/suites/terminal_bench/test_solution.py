"""Reference solutions as tool calls. No slots."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from golden_messages import check_message
from palaestra_slots.core.types import ToolStep
from palaestra_suites.terminal_bench import harbor_task, terminal_bench_1
from palaestra_suites.terminal_bench.task_environment import solution_steps
from suites.terminal_bench.mini import HARBOR, LEGACY, copied


def commands(steps: tuple[ToolStep, ...] | None) -> list[str]:
    assert steps is not None
    return [str(step.arguments["command"]) for step in steps]


def written(lines: list[str], path: str) -> bytes:
    """What the commands write to a path."""
    writing = rf"printf %s (\S+) \| base64 -d >>? {re.escape(path)}(?: && chmod .*)?$"
    found = re.findall(writing, "\n".join(lines), re.MULTILINE)
    return b"".join(base64.b64decode(piece) for piece in found)


def test_files_of_any_bytes_and_size_arrive_whole(tmp_path: Path) -> None:
    task = copied(HARBOR / "greeting", tmp_path)
    data = bytes(range(256)) * 1000
    (task / "solution/data.bin").write_bytes(data)
    (task / "solution/empty").write_bytes(b"")
    lines = commands(solution_steps(harbor_task.read_task(task), "root", 60))
    assert written(lines, "/solution/data.bin") == data
    check_message("\n".join(lines), "/solution/empty")
    assert max(map(len, lines)) < 100_000
    assert lines[-1] == "env DEBIAN_FRONTEND=noninteractive bash /solution/solve.sh"


def test_programs_of_a_solution_can_run(tmp_path: Path) -> None:
    task = copied(HARBOR / "greeting", tmp_path)
    for name, mode in {"helper": 0o755, "data.txt": 0o644, "large": 0o700}.items():
        (task / "solution" / name).write_bytes(b"x" * (200_000 if name == "large" else 1))
        (task / "solution" / name).chmod(mode)
    lines = commands(solution_steps(harbor_task.read_task(task), "root", 60))
    assert written(lines, "/solution/large") == b"x" * 200_000
    running = [line.partition(" && chmod +x ")[2] for line in lines if "chmod" in line]
    assert {"/solution/helper", "/solution/large"} <= {*running}
    assert "/solution/data.txt" not in running


def test_somebody_without_root_has_a_place_of_his_own() -> None:
    lines = commands(solution_steps(harbor_task.read_task(HARBOR / "greeting"), "ada", 60))
    assert lines[-1].endswith("bash /tmp/palaestra-solution/solve.sh")


def test_a_long_solution_is_waited_for() -> None:
    steps = solution_steps(harbor_task.read_task(HARBOR / "greeting"), "", 1800)
    assert steps is not None
    lines = commands(steps)
    assert lines[-5].endswith("& echo $! > /solution/ended.pid")
    assert lines[-4:] == [lines[-1]] * 4
    assert all(step.arguments["timeout"] <= 600 for step in steps)


def test_typed_commands_are_a_script() -> None:
    task = terminal_bench_1.read_task(LEGACY / "typed-solution")
    lines = commands(solution_steps(task, "root", 60))
    assert written(lines, "/solution/solution.sh") == b"seq 1 5 > numbers.txt\n"


def test_without_one_there_are_no_steps() -> None:
    assert solution_steps(harbor_task.read_task(HARBOR / "no-solution"), "root", 60) is None
