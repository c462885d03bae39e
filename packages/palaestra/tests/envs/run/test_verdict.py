"""What a run prints at its end: one verdict with the score, its coverage, the causes of failures and what to do."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from recorded import embedded

from palaestra.cli.main import main
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

pytestmark = pytest.mark.slots

ENV = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 3):
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p", solution="true")

@words.score
def right(task):
    if task.id == "w1":
        raise ValueError("no such column")
    return 1
"""

CLASS_ENV = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class Own(HermesAgentBaseEnv):
    name = "own"

    async def setup(self): pass
    async def get_next_item(self): return None
    def format_prompt(self, item): return "p"
    async def compute_reward(self, item, result, ctx): return 1.0

    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({"eval/pct": 0.25})
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)


def test_the_verdict_comes_once_with_coverage_and_causes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "oracle", "--group", "2"]) == 3
    said = capsys.readouterr().err
    assert [line.partition(" after ")[0] for line in said.splitlines() if " after " in line] == ["done"]
    assert "mean reward 1.000 (0.342 to 1.000), 4 of 6 rollouts scored" in said
    assert "2 rollouts failed (grader), first 000001-w1/0: " in said
    assert said.count("no such column") == 2, "in the group's line and in the verdict"
    assert "--resume" not in said


def test_function_environments_show_their_total_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ENV.replace("def right(task):", "def right(task):\n    import time; time.sleep(0.2)")
    Path("my_env.py").write_text(slow)
    main(["run", "my_env.py", "--policy", "oracle", "--group", "1", "--env.n", "4"])
    assert "[1/4] " in capsys.readouterr().err


def test_the_figures_of_an_own_evaluation_are_in_the_verdict_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_env.py").write_text(CLASS_ENV)
    assert main(["eval", "own_env.py", "--policy", "oracle"]) == 0
    said = capsys.readouterr()
    assert "  pct 0.25\n" in said.err
    assert "no reward" not in said.err
    (report,) = Path(said.out.strip()).glob("*.html")
    assert embedded(report)["answers"]["run"]["own"]["eval/pct"] == 0.25


def served(server: LoopbackServer, *flags: str) -> tuple[int, str]:
    """The exit code and stderr of a run against a server."""

    async def run() -> tuple[int, str]:
        async with server:
            environ = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
            words = ["run", "my_env.py", "--base-url", f"{server.url}/v1", "--concurrency", "1", *flags]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "palaestra", *words, env=environ, stderr=asyncio.subprocess.PIPE
            )
            _, said = await process.communicate()
            return process.returncode or 0, said.decode()

    return asyncio.run(run())


def error(status: int, message: str, *, retry_after: str = "") -> FakeAnswer:
    headers = {"Retry-After": retry_after} if retry_after else {}
    return FakeAnswer({"error": {"message": message}}, status=status, headers=headers)


def test_a_server_that_dies_fails_the_run_with_its_own_exit_code() -> None:
    code, said = served(LoopbackServer(error(500, "boom", retry_after="0")), "--model", "m", "--env.n", "1")
    assert code == 4
    assert "failed after" in said
    assert "1 rollout failed (engine)" in said
    assert "palaestra resume runs/" in said


def test_a_server_that_refuses_tools_is_known_before_any_slot_is_made() -> None:
    refusal = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    server = LoopbackServer(FakeAnswer(completion()), probe=error(400, refusal))
    code, said = served(server, "--model", "m")
    assert code == 4
    assert said.count("--enable-auto-tool-choice") == 1, "once, and not rollout by rollout"
    assert "--openai.server_type vllm" in said, "the setting that fixes it"
    assert (len(server.probes), server.seen[1:]) == (1, [])
    assert [tool["function"]["name"] for tool in server.probes[0]["tools"]][:1] == ["terminal"]
    assert not Path("runs").exists()


def test_a_wrong_key_is_refused_with_the_variable_that_holds_it() -> None:
    code, said = served(LoopbackServer(FakeAnswer(completion()), models=error(401, "Incorrect API key")))
    assert code == 4
    assert "Set the variable OPENAI_API_KEY" in said


def test_a_server_with_one_model_is_asked_for_it() -> None:
    server = LoopbackServer(FakeAnswer(completion()), models=FakeAnswer({"object": "list", "data": [{"id": "only"}]}))
    served(server, "--env.n", "1", "--group", "1")
    assert {seen.body["model"] for seen in server.seen if seen.body} == {"only"}
    assert server.probes[0]["model"] == "only"
    assert list(Path("runs").glob("words--only/*"))


def test_retries_report_what_they_wait_for_and_not_each_time() -> None:
    server = LoopbackServer(error(500, "out of memory"), error(500, "out of memory"), FakeAnswer(completion()))
    code, said = served(server, "--model", "m", "--env.n", "1", "--group", "1")
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("retry ")]
    assert len(lines) == 1
    assert lines[0].startswith("retry 1 of 7 in ")
    assert "HTTP 500" in lines[0]
    assert "out of memory" in lines[0]
