"""Environments from their command lines: what a user types, what lies on disk afterwards, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded import embedded

from envs import scripts
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

pytestmark = pytest.mark.slots

PYTHON = sys.executable
RUN = [PYTHON, "-m", "palaestra", "run"]


def commands(part: str) -> set[str]:
    """Command lines of all processes that hold this text, those of the tests themselves aside."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if part in line and "pytest" not in line:
            found.add(f"{entry.name} {line[:80]}")
    return found


def descendants(pid: int) -> set[str]:
    """Every process below `pid`, as `pid start-time`, which no later process can be taken for."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = (int(fields[1]), f"{entry.name} {fields[19]}")
    found: set[str] = set()
    generation = {pid}
    while generation:
        generation = {child for child, (parent, _) in parents.items() if parent in generation}
        found |= {parents[child][1] for child in generation}
    return found


def everybody() -> set[str]:
    return descendants(0)


def invoke(folder: Path, argv: Sequence[str], *, check: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def script(folder: Path, text: str, name: str = "my_env.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_function_form_runs_by_path(tmp_path: Path) -> None:
    script(tmp_path, scripts.COUNT_LINES)
    invoke(tmp_path, [*RUN, "my_env.py", "--policy", "oracle", "--env.n", "3", "--group", "2"])
    groups = lines(scripts.groups_file(tmp_path))
    assert [group["task_id"] for group in groups] == ["lines-0", "lines-1", "lines-2"]
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 3
    report = embedded(scripts.groups_file(tmp_path).with_name("report.html"))
    assert "wc -l" in str(report["answers"]["rollout?000002-lines-2/1"]["messages"])

    invoke(tmp_path, [*RUN, "my_env.py", "--policy", "noop", "--env.n", "2"])
    assert [group["scores"] for group in lines(scripts.groups_file(tmp_path))] == [[0.0], [0.0]]
    (metrics,) = (tmp_path / "runs").glob("count_lines--noop/*/metrics.jsonl")
    assert lines(metrics)[-1]["reward/mean"] == 0.0


def test_a_class_environment_runs_with_process(tmp_path: Path) -> None:
    path = script(tmp_path, scripts.CLASS_ENV, "words_env.py")
    done = invoke(tmp_path, [PYTHON, str(path), "process", "--env.use_wandb", "false", "--policy", "oracle"])
    groups = lines(scripts.groups_file(tmp_path))
    assert [group["task_id"] for group in groups] == ["alpha", "beta", "gamma"]
    assert all(group["scores"] == [1.0, 1.0] for group in groups)
    assert groups[0]["token_source"] == "placeholder"
    assert all(mask == -100 for masks in groups[0]["masks"] for mask in masks)  # type: ignore[attr-defined]
    assert str(scripts.groups_file(tmp_path).relative_to(tmp_path)) in done.stderr
    (metrics,) = tmp_path.glob("runs/words--oracle/*/metrics.jsonl")
    assert lines(metrics)[-1]["train/words_seen"] == 3


def test_a_class_environment_evaluates(tmp_path: Path) -> None:
    path = script(tmp_path, scripts.CLASS_ENV, "words_env.py")
    flags = ["--env.data_dir_to_save_evals", "evals", "--policy", "oracle"]
    invoke(tmp_path, [PYTHON, str(path), "evaluate", *flags])
    results = json.loads((tmp_path / "evals/metrics.json").read_text())["results"]
    assert results["all"] == {"mean": 1.0}
    assert len(lines(tmp_path / "evals/samples.jsonl")) == 6


def test_both_shapes_of_exec_tool_in_live_and_sealed_grading(tmp_path: Path) -> None:
    path = script(tmp_path, scripts.HOOKS_ENV.replace("cat seed.txt", "(sleep 987 &) ; cat seed.txt"), "hooks_env.py")
    flags = ["--env.group_size", "2", "--env.enabled_toolsets", "terminal", "--policy", "oracle"]
    for grading, alive in (([], "1"), (["--env.grading", "sealed"], "0")):
        invoke(tmp_path, [PYTHON, str(path), "process", *flags, *grading])
        groups = lines(scripts.groups_file(tmp_path))
        assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
        rollout = groups[0]["rollouts"][0]  # type: ignore[index]
        assert rollout["detail"]["alive"] == alive, "processes of the agent that live during the check"


def test_a_setup_that_fails_leaves_the_rest_and_says_so(tmp_path: Path) -> None:
    script(tmp_path, scripts.BAD_SETUP)
    done = invoke(tmp_path, [*RUN, "my_env.py", "--policy", "oracle"], check=3)
    assert "no such thing" in done.stderr
    assert [group["task_id"] for group in lines(scripts.groups_file(tmp_path))] == ["good"]


def test_ctrl_c_keeps_what_was_finished_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script(tmp_path, scripts.SLEEPER)
    running = subprocess.Popen(
        [*RUN, "my_env.py", "--policy", "oracle", "--concurrency", "1"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    with running, running.stderr:
        try:
            next(line for line in running.stderr if "quick" in line)
            wait_for_command(scripts.PAUSE)
            started = descendants(running.pid)
            assert len(started) > 2
            os.killpg(running.pid, signal.SIGINT)
            rest = running.stderr.read()
            assert running.wait(timeout=30) == 130
        finally:
            running.kill()
    assert "Traceback" not in rest
    assert "error:" not in rest, "the verdict is enough"
    assert "palaestra resume runs/sleeper--oracle/" in rest
    assert [group["task_id"] for group in lines(scripts.groups_file(tmp_path))] == ["quick"]
    assert not started & everybody(), "processes of the run outlived it"
    assert not commands(scripts.PAUSE)


def wait_for_command(part: str) -> None:
    """Until a process with this command line is there."""
    until = time.monotonic() + 30
    while not commands(part):
        assert time.monotonic() < until, f"{part} never started"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--base-url", "http://127.0.0.1:9/v1", "--model", "m"], 4, "127.0.0.1:9"),
        (["--env.gruop_size", "2"], 2, "group_size"),
        (["--polcy", "oracle"], 2, "--policy"),
        (["--policy", "oracl"], 2, "oracle"),
        (["--env.enabled_toolsets", "terminl", "--policy", "oracle"], 2, "terminal"),
        (["--env.isolation", "confined", "--env.require_sandbox", "--policy", "oracle"], 2, "confined"),
        (["--config", "absent.yaml"], 2, "absent.yaml"),
    ],
)
def test_what_cannot_work_is_one_clear_message(tmp_path: Path, flags: list[str], code: int, says: str) -> None:
    script(tmp_path, scripts.COUNT_LINES)
    done = invoke(tmp_path, [*RUN, "my_env.py", *flags], check=code)
    assert says in done.stderr
    assert done.stderr.count("error:") == 1
    assert not (tmp_path / "runs").exists()


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_chat_server_has_a_real_conversation_with_tools(tmp_path: Path) -> None:
    """Four turns: a look, a malformed call beside a good one, the work, the answer."""
    answers = [
        completion(None, "tool_calls", tool_calls=[tool_call("c1", "terminal", '{"command": "wc -l < a.txt"}')]),
        completion(
            "Let me write it.",
            "tool_calls",
            tool_calls=[
                tool_call("c2", "terminal", '{"command": '),
                tool_call("c3", "terminal", '{"command": "wc -l < a.txt > answer.txt"}'),
            ],
        ),
        completion(None, "tool_calls", tool_calls=[tool_call("c4", "terminal", '{"command": "cat answer.txt"}')]),
        completion("Done: 0 lines."),
    ]
    script(tmp_path, scripts.COUNT_LINES)
    async with LoopbackServer(*map(FakeAnswer, answers)) as server:
        process = await asyncio.create_subprocess_exec(
            *RUN,
            *["my_env.py", "--env.n", "1", "--base-url", f"{server.url}/v1", "--model", "m"],
            *["--openai.api_key", "sk-secret"],
            cwd=tmp_path,
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await process.communicate()
        assert process.returncode is not None
        code, stderr, seen = process.returncode, stderr.decode(), server.seen
    assert code == 0, stderr
    (group,) = lines(scripts.groups_file(tmp_path))
    assert group["scores"] == [1.0]
    (messages,) = group["messages"]  # type: ignore[misc]
    assert [message["role"] for message in messages] == [
        *["user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    ]
    replies = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    assert json.loads(replies["c1"])["output"].strip() == "0"
    assert "error" in json.loads(replies["c2"])
    assert json.loads(replies["c4"])["output"].strip() == "0"
    asked = [request for request in seen if request.method == "POST"]
    assert len(asked) == 4
    assert asked[0].body["tools"][0]["function"]["name"] == "terminal"
    assert asked[0].headers["Authorization"] == "Bearer sk-secret"
    written = "".join(path.read_text() for path in tmp_path.glob("runs/*/*/*.json*"))
    assert "sk-secret" not in written


def test_a_slot_that_dies_mid_rollout_is_no_score(tmp_path: Path) -> None:
    """Kill the slot's init from outside while its command runs: the rollout is tried again, then left unscored."""
    script(tmp_path, scripts.SLEEPER)
    running = subprocess.Popen(
        [*RUN, "my_env.py", "--policy", "oracle", "--env.infra_retries", "1"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    with running, running.stderr:
        try:
            for _ in range(2):
                wait_for_command(scripts.PAUSE)
                (sleeper,) = commands(scripts.PAUSE)
                init = int(Path(f"/proc/{sleeper.split()[0]}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(init, signal.SIGKILL)
                while sleeper in commands(scripts.PAUSE):
                    time.sleep(0.02)
            rest = running.stderr.read()
            assert running.wait(timeout=30) == 3, rest
        finally:
            running.kill()
    assert "Traceback" not in rest
    (group,) = lines(scripts.groups_file(tmp_path))
    assert group["task_id"] == "quick"
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    ended = [event["trajectory"] for event in lines(journal) if event["event"] in ("rollout", "discarded")]
    lost = [trajectory for trajectory in ended if trajectory["task_id"] == "slow"]  # type: ignore[index]
    assert [(t["blame"], t.get("reward")) for t in lost] == [("sandbox", None)] * 2  # type: ignore[index]
