"""`AgentEnv` as users write it: from its command line, over a chat server that writes calls as text, token-exact."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.agent_script import WITH_META, WITHOUT_META
from envs.scripts import groups_file
from golden_messages import raises
from palaestra.agent.result import AgentResult
from palaestra.agent.subagents import SYSTEM_PROMPT
from palaestra.cli.main import main
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import run
from palaestra.rollouts.events import ReplyReceived
from palaestra.rollouts.export.token_rows import exported_rows
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.journal.verify import verify_run
from palaestra_contract import AgentEnv, AgentEnvConfig
from palaestra_contract.exec_tool import ExecTool
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens import APIServerConfig
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, Seen, completion
from palaestra_tokens.testing.fake_engine import ToyEngine
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer

LOCAL = ["--env.tool_pool_mode", "local", "--env.use_wandb", "false"]
CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "cp seed.txt word.txt"}}\n</tool_call>'


def lines(path: Path) -> list[JSON]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def script(folder: Path, text: str) -> Path:
    path = folder / "word_agent_env.py"
    path.write_text(text)
    return path


@pytest.mark.slots
@pytest.mark.parametrize(("text", "seeded"), [(WITH_META, "alpha"), (WITHOUT_META, None)])
def test_a_script_of_the_contract_runs_with_the_oracle(tmp_path: Path, text: str, seeded: str | None) -> None:
    argv = [sys.executable, str(script(tmp_path, text)), "process", *LOCAL, "--policy", "oracle"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    alpha, beta = lines(groups_file(tmp_path))
    assert [alpha["scores"], beta["scores"]] == [[1.0, 1.0]] * 2
    detail = alpha["rollouts"][0]["detail"]
    assert (detail["calls"], detail["steps"], detail["success"], detail.get("seeded")) == (1, 2, True, seeded)
    assert detail["final"] == "The reference solution has been carried out."
    system, task, said, seen, _ = alpha["messages"][0]
    assert "<tools>" in system["content"]
    assert task["content"] == "Write alpha to word.txt"
    assert said["content"].startswith("<tool_call>")
    assert seen["content"].startswith('<tool_response>{"success": true')


def test_a_place_of_slots_that_is_not_there_is_refused_with_the_way_out(tmp_path: Path) -> None:
    argv = [sys.executable, str(script(tmp_path, WITH_META)), "process", "--policy", "oracle"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--backend local" in done.stderr
    assert "Traceback" not in done.stderr


async def over_chat(folder: Path, answers: Sequence[JSON], *flags: str) -> tuple[int, str, list[Seen]]:
    async with LoopbackServer(*map(FakeAnswer, answers)) as server:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, str(script(folder, WITH_META)), "process", *LOCAL],
            *["--env.group_size", "1", "--env.total_steps", "1", "--openai.base_url", f"{server.url}/v1", *flags],
            cwd=folder,
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await process.communicate()
        assert process.returncode is not None
        return process.returncode, stderr.decode(), server.seen


@pytest.mark.slots
async def test_a_chat_server_that_writes_its_calls_as_text(tmp_path: Path) -> None:
    broken = '<tool_call>{"name": "terminal", "arguments": {"command": </tool_call>'
    answers = [completion(f"Let me look.\n{broken}\n{CALL}"), completion("It is done: alpha.")]
    code, stderr, seen = await over_chat(tmp_path, answers)
    assert code == 0, stderr
    (group,) = lines(groups_file(tmp_path))
    assert group["scores"] == [1.0]
    assert group["rollouts"][0]["detail"]["final"] == "It is done: alpha."
    first, second = [request.body for request in seen if request.method == "POST"]
    assert "tools" not in first
    assert first["temperature"] == 0.5
    assert second["messages"] == group["messages"][0][:-1]
    assert second["messages"][2]["content"] == f"Let me look.\n{broken}\n{CALL}"
    malformed, done = second["messages"][3]["content"].split("\n")
    assert json.loads(malformed[15:-16])["success"] is False
    assert json.loads(done[15:-16]) == {"success": True, "output": "", "metadata": {"exit_code": 0}}


@pytest.mark.slots
def test_a_rollout_at_its_step_limit_is_scored_and_one_that_lost_its_server_is_not(tmp_path: Path) -> None:
    code, stderr, _ = asyncio.run(over_chat(tmp_path, [completion(CALL)]))
    assert code == 0, stderr
    (group,) = lines(groups_file(tmp_path))
    (rollout,) = group["rollouts"]
    assert (group["scores"], rollout["outcome"], rollout["detail"]["success"]) == ([1.0], "max_turns", False)
    assert len(group["messages"][0]) == 2 + 2 * 4

    code, _, _ = asyncio.run(over_chat(tmp_path, [completion(CALL), completion("x", "error")]))
    assert code == 4
    (journal,) = [path for path in tmp_path.glob("runs/*/*/*journal*") if "api_error" in path.read_text()]
    ended = [event["trajectory"] for event in lines(journal) if "trajectory" in event][-1]
    assert ended.get("reward") is None
    assert [message["role"] for message in ended["messages"]] == ["system", "user", "assistant", "user"]


class Copying(AgentEnv[AgentEnvConfig]):
    """Two items, scored by the last answer; `evaluate` asks the agent directly."""

    name = "copying"

    async def setup_agent_env(self) -> None:
        self.items = iter(["one", "two"])

    async def get_next_item(self) -> JSON:
        return next(self.items, None)

    def build_task(self, item: JSON) -> str:
        return f"Copy {item}."

    async def setup_trajectory_workspace(
        self, item: JSON, *, trajectory_id: str, exec_tool: ExecTool
    ) -> dict[str, JSON]:
        await exec_tool("write_file", {"path": "seed.txt", "content": item})
        return {}

    async def score_trajectory(self, item: JSON, final_response: str) -> float:
        return float(final_response == "Copied.")

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        answer, debug = await self.run_agent("Copy nothing.")
        held = self._pool.acquired_slots if self._pool else None
        await self.evaluate_log({"answer": answer, "held": held, **debug})


class Collecting(Copying):
    """Evaluates as scripts of the contract do."""

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        scored, backlog = await self.collect_trajectory("one")
        group, _ = await self.collect_trajectories("two")
        assert scored is not None
        assert group is not None
        seen = [message["role"] for message in scored["messages"] or []]
        await self.evaluate_log({"one": scored["scores"], "two": group["scores"], "seen": seen, "backlog": backlog})


class Looking(Copying):
    """Looks at the row that the hook is given."""

    async def verify_and_score_trajectory(self, item: JSON, final_response: str, **more: JSON) -> tuple[float, JSON]:
        row = more["agent_result"].to_scored_data(1.0)
        return 1.0, {"trained": [mask for mask in row["masks"] if mask != -100]}


class Checking(Copying):
    """Looks at what the hook is given."""

    async def verify_and_score_trajectory(
        self,
        item: JSON,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
        agent_result: AgentResult | None = None,
        **more: JSON,
    ) -> tuple[float, dict[str, JSON]]:
        assert agent_result is not None
        row = agent_result.to_scored_data(0.5)
        assert row is not None
        assert len(row["tokens"]) == len(row["masks"]) == len(row["inference_logprobs"])
        assert agent_result.trajectory_data is agent_result.steps[-1].sequence_data
        return 0.5, {"trained": sum(mask != -100 for mask in row["masks"]), **more["workspace_meta"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(), out)
    return out


def parsed(env: type[AgentEnv[AgentEnvConfig]], argv: Sequence[str]) -> Parsed[AgentEnvConfig, APIServerConfig]:
    form = form_of(env)
    line = CommandLine(
        prog="test", env_type=form.config_type(), server_type=APIServerConfig, env_values={}, server_values=[],
        command="process", about="",
    ).parse(argv, {})  # fmt: skip
    assert isinstance(line, Parsed)
    return line


def exact_lines(env: type[AgentEnv[AgentEnvConfig]], folder: Path, out: Path, said: Sequence[str], *flags: str) -> JSON:
    async def scenario() -> None:
        tokenizer = load_tokenizer(str(folder))
        engine = ToyEngine(tokenizer, itertools.cycle(said), rate=0.2)
        async with TokenLoopback(engine, tokenizer) as server:
            argv = [
                *["process", "--openai.server_type", "vllm", "--openai.base_url", server.url],
                *["--openai.tokenizer_name", str(folder), "--openai.model_name", "toy"],
                *["--env.data_path_to_save_groups", str(out / "groups.jsonl"), "--env.total_steps", "2"],
                *["--env.group_size", "1", "--env.max_num_workers", "1", "--env.include_messages", "true", *flags],
            ]
            with (out / "log").open("w") as stream:
                report = await run(form_of(env), parsed(env, argv), root=out / "runs", stream=stream)
            assert report.exit_code == 0, (out / "log").read_text()

    asyncio.run(scenario())
    return lines(out / "groups.jsonl")


@pytest.mark.slots
@pytest.mark.parametrize("env", [Copying, Checking])
def test_what_was_sampled_is_what_is_trained(folder: Path, tmp_path: Path, env: type[Copying]) -> None:
    odd = CALL.replace('": "', '":   "').replace("\n", "")
    groups = exact_lines(env, folder, tmp_path, [odd, "Copied."])
    tokenizer = load_tokenizer(str(folder))
    for group in groups:
        trained = [mask for mask in group["masks"][0] if mask != -100]
        assert tokenizer.decode(trained) == f"{odd}<|im_end|>Copied.<|im_end|>"
        assert group["token_source"] == "engine"
        assert group["scores"] == [1.0 if env is Copying else 0.5]
    (journal,) = tmp_path.glob("runs/*/*/journal*")
    verdict = verify_run(journal, tmp_path / "groups.jsonl")
    assert (verdict.ok, verdict.rollouts, verdict.turns, verdict.rows) == (True, 2, 4, 2)


@pytest.mark.slots
def test_the_tokens_of_an_over_long_rollout_are_kept(folder: Path, tmp_path: Path) -> None:
    groups = exact_lines(Copying, folder, tmp_path, [CALL], "--env.agent_max_steps", "3")
    tokenizer = load_tokenizer(str(folder))
    assert [group["scores"] for group in groups] == [[0.0], [0.0]]
    for group in groups:
        trained = [mask for mask in group["masks"][0] if mask != -100]
        assert tokenizer.decode(trained) == f"{CALL}<|im_end|>" * 3


def call(name: str, **arguments: JSON) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


DELEGATE = ["--env.enabled_toolsets", "terminal", "delegation", "--env.agent_max_steps", "4"]
GIVES, LOOKS, TELLS = call("delegate_task", goal="Find out"), call("terminal", command="cat seed.txt"), "I found it."


@pytest.mark.slots
def test_sub_agents_write_their_calls_as_the_agent_does_and_their_tokens_are_trained(
    folder: Path, tmp_path: Path
) -> None:
    groups = exact_lines(Copying, folder, tmp_path, [GIVES, LOOKS, TELLS, "Copied."], *DELEGATE)
    (journal,) = tmp_path.glob("runs/*/*/journal*")
    verdict = verify_run(journal, tmp_path / "groups.jsonl")
    assert (verdict.violation, verdict.turns, verdict.segments, verdict.reasons) == ("", 8, 4, {"subagent": 2})
    (one, two) = [each for group in Recording(journal) for each in group.trajectories]
    assert (one.reward, two.reward) == (1.0, 1.0)
    assert '"summary": "I found it."' in json.loads(one.messages[3]["content"][15:-16])["output"]
    (work,) = one.subagents
    assert [message["role"] for message in work.messages] == ["system", "user", "assistant", "user", "assistant"]
    system, goal, looks, seen, tells = [message["content"] for message in work.messages]
    assert system.startswith(SYSTEM_PROMPT)
    assert '"name": "terminal"' in system
    assert "delegate_task" not in system
    assert (goal, looks, tells) == ("Find out", LOOKS, TELLS)
    assert json.loads(seen[15:-16])["output"] == "one", "what the agent's own workspace holds"
    tokenizer = load_tokenizer(str(folder))
    rows = [[token for token, on in zip(row.completion_ids, row.mask, strict=True) if on] for row in exported_rows(one)]
    assert [tokenizer.decode(row) for row in rows] == [
        f"{GIVES}<|im_end|>Copied.<|im_end|>",
        f"{LOOKS}<|im_end|>{TELLS}<|im_end|>",
    ]
    assert len(groups) == 2


@pytest.mark.slots
def test_the_row_of_an_agent_with_sub_agents_is_its_own(folder: Path, tmp_path: Path) -> None:
    exact_lines(Looking, folder, tmp_path, [GIVES, LOOKS, TELLS, "Copied."], *DELEGATE)
    (journal,) = tmp_path.glob("runs/*/*/journal*")
    one, _ = [each for group in Recording(journal) for each in group.trajectories]
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(one.detail["trained"]) == f"{GIVES}<|im_end|>Copied.<|im_end|>"
    assert one.latest_row is not None
    assert [mask for mask in one.latest_row.masks if mask != -100] == one.detail["trained"]


@pytest.mark.slots
@pytest.mark.parametrize("heard", [1, 2, 3])
def test_one_that_was_cut_off_while_its_sub_agent_worked_goes_on(tmp_path: Path, heard: int) -> None:
    said = [GIVES, LOOKS, TELLS, "Copied."]

    async def part(answers: Sequence[str], *flags: str) -> int:
        async with LoopbackServer(*(FakeAnswer(completion(text)) for text in answers)) as server:
            argv = ["process", "--openai.base_url", server.url, *DELEGATE, "--env.group_size", "1", *flags]
            argv += ["--env.total_steps", "1", "--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
            with (tmp_path / "log").open("w") as stream:
                report = await run(form_of(Copying), parsed(Copying, argv), root=tmp_path / "runs", stream=stream)
            assert report.exit_code == 0, (tmp_path / "log").read_text()
            return sum(request.method == "POST" for request in server.seen)

    assert asyncio.run(part(said)) == 4
    (journal,) = tmp_path.glob("runs/*/*/journal*")
    (was,) = [each for group in Recording(journal) for each in group.trajectories]
    lines = journal.read_bytes().splitlines(keepends=True)
    places = [place for place, event in enumerate(read_journal(journal), 1) if isinstance(event, ReplyReceived)]
    journal.write_bytes(b"".join(lines[: places[heard - 1]]))
    assert asyncio.run(part(said[heard:], "--resume", str(journal.parent))) == 4 - heard
    (now,) = [each for group in Recording(journal) for each in group.trajectories]
    assert (now.messages, now.subagents[0].messages) == (was.messages, was.subagents[0].messages)


@pytest.mark.slots
async def test_run_agent_has_sub_agents_in_its_own_slot(tmp_path: Path) -> None:
    said = [call("terminal", command="echo 42 > seed.txt"), GIVES, LOOKS, TELLS, "Done."]
    async with LoopbackServer(*(FakeAnswer(completion(text)) for text in said)) as server:
        argv = ["evaluate", "--openai.base_url", server.url, *DELEGATE]
        argv += ["--env.data_dir_to_save_evals", str(tmp_path / "evals")]
        with (tmp_path / "log").open("w") as stream:
            await run(form_of(Copying), parsed(Copying, argv), root=tmp_path / "runs", stream=stream)
        asked = [request.body for request in server.seen if request.method == "POST"]
        assert '"output": "42\\n"' in asked[3]["messages"][-1]["content"]
        assert "I found it." in asked[4]["messages"][-1]["content"]
    found = json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]
    assert found == {"answer": "Done.", "held": 0, "success": True, "error": "", "tool_calls": 2}


@pytest.mark.slots
async def test_run_agent_gives_its_slot_back(tmp_path: Path) -> None:
    look = CALL.replace("cp seed.txt word.txt", "echo $((40 + 2))")
    async with LoopbackServer(FakeAnswer(completion(look)), FakeAnswer(completion("42"))) as server:
        argv = [
            "evaluate",
            "--openai.base_url",
            server.url,
            "--env.data_dir_to_save_evals",
            str(tmp_path / "evals"),
        ]
        with (tmp_path / "log").open("w") as stream:
            await run(form_of(Copying), parsed(Copying, argv), root=tmp_path / "runs", stream=stream)
        asked = [request.body for request in server.seen if request.method == "POST"]
        seen = asked[1]["messages"][-1]["content"]
        assert '"output": "42\\n"' in seen
        assert "stdout" not in seen  # the text of a rollout, not of the tool executor
    found = json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]
    assert found == {"answer": "42", "held": 0, "success": True, "error": "", "tool_calls": 1}


@pytest.mark.slots
async def test_an_evaluation_collects_what_it_names(tmp_path: Path) -> None:
    async with LoopbackServer(FakeAnswer(completion("Copied."))) as server:
        argv = [
            "evaluate",
            "--openai.base_url",
            server.url,
            "--env.data_dir_to_save_evals",
            str(tmp_path / "evals"),
        ]
        with (tmp_path / "log").open("w") as stream:
            await run(form_of(Collecting), parsed(Collecting, argv), root=tmp_path / "runs", stream=stream)
    found = json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]
    assert found == {"one": 1.0, "two": [1.0] * 4, "seen": ["system", "user", "assistant"], "backlog": []}


def test_settings_of_the_contract() -> None:
    config = AgentEnvConfig()
    assert (config.agent_max_steps, config.agent_temperature, config.agent_max_tokens) == (50, 0.7, None)
    assert (config.enabled_toolsets, config.disabled_toolsets, config.allow_network) == (["default"], [], True)
    assert config.sandbox_job_id == "atropos-sandbox-agent-env"
    assert AgentEnvConfig(require_stateful_sandbox=True).require_sandbox
    with pytest.raises(ConfigError, match="daytona"):
        AgentEnvConfig(tool_pool_mode="daytona").check_runnable()
    with raises(ConfigError, "tool_server_url", "inprocess"):
        Copying(AgentEnvConfig(tool_server_url="port 9"), [])
    assert Copying(config, []).build_agent_config("one").max_steps == 50


def test_an_empty_list_of_toolsets_is_no_tools() -> None:
    assert Copying(AgentEnvConfig(enabled_toolsets=[]), []).tools.list_tools() == []
    assert "terminal" in Copying(AgentEnvConfig(enabled_toolsets=None), []).tools.list_tools()


@pytest.mark.parametrize("own", [True, False])
def test_a_class_without_an_evaluation_is_not_evaluated_with_success(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[4] / "examples/sum_env.py").read_text()
    evaluate = "    async def evaluate(self, *args, **kwargs):\n        return {}\n\n    @classmethod\n"
    Path("sum_env.py").write_text(text.replace("    @classmethod\n", evaluate, 1) if own else text)
    assert main(["eval", "sum_env.py", "--policy", "oracle"]) == (0 if own else 2)
    assert ("defines no evaluation" in capsys.readouterr().err) != own
