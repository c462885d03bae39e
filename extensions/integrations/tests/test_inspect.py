"""Inspect's samples in our slots, and Inspect's tasks in our runner, with scores equal to those of Inspect itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="the package inspect-ai is not installed (make faces)")

import anyio
import inspect_ai
import inspect_ai.util._sandbox.self_check as self_check
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, includes, scorer
from inspect_ai.tool import ToolCall
from inspect_ai.util import (
    ComposeConfig,
    OutputLimitExceededError,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandbox,
)
from inspect_ai.util._sandbox.limits import override_max_exec_output_size

import inspect_examples
import palaestra
import tiny_model_runs
from palaestra import ConfigError
from palaestra_integrations.inspect_sandbox import PalaestraSandbox, PalaestraSandboxConfig
from palaestra_integrations.inspect_tasks import inspect_form
from palaestra_slots import Rung
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

pytestmark = pytest.mark.slots

EXAMPLES = Path(inspect_examples.__file__)
ROOT_IGNORES = {
    "test_write_text_file_without_permissions": "the slot's root writes to files that nobody may write, as in Docker",
    "test_write_binary_file_without_permissions": "the slot's root writes to files that nobody may write, as in Docker",
}
PERMIT = "".join(f"{kind} sufficient pam_permit.so\n" for kind in ("auth", "account", "password", "session"))


@asynccontextmanager
async def sandboxes(*configs: PalaestraSandboxConfig | None) -> AsyncIterator[list[PalaestraSandbox]]:
    """The sandboxes of one sample for each configuration."""
    for config in configs:
        await PalaestraSandbox.task_init("test", config)
    made = [await PalaestraSandbox.sample_init("test", config, {}) for config in configs]
    try:
        yield [each["default"] for each in made]
    finally:
        for config, each in zip(configs, made, strict=True):
            await PalaestraSandbox.sample_cleanup("test", config, each, False)
            await PalaestraSandbox.task_cleanup("test", config, True)


def test_inspects_self_check_passes() -> None:
    """All checks in one sandbox, except the two of permissions, which fail in Inspect's Docker sandbox too."""

    async def failures() -> dict[str, str]:
        found = {}
        async with sandboxes(None) as (box,):
            for service in ("chfn", "other"):  # `adduser` needs PAM's files and a skeleton, which Debian has
                await box.write_file(f"/etc/pam.d/{service}", PERMIT)
            await box.exec(["mkdir", "-p", "/etc/skel"])
            for name in self_check.__all__:
                try:
                    await getattr(self_check, name)(box)
                except Exception as error:
                    found[name] = repr(error)
        return found

    found = asyncio.run(failures())
    assert len(self_check.__all__) >= 44
    assert found.keys() == ROOT_IGNORES.keys(), found


def test_a_cancelled_command_leaves_no_process_and_others_go_on() -> None:
    async def main() -> None:
        async with sandboxes(None) as (box,):
            with anyio.move_on_after(0.3) as scope:
                await box.exec(["sh", "-c", "sleep 4711; :"])
            assert scope.cancelled_caught
            assert "4711" not in (await box.exec(["ps", "aux"])).stdout
            results = await asyncio.gather(*(box.exec(["sh", "-c", f"sleep 0.05; echo {n}"]) for n in range(20)))
            assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]

    asyncio.run(main())


def test_samples_neither_see_each_other_nor_the_host() -> None:
    async def main() -> None:
        async with sandboxes(None, PalaestraSandboxConfig(memory="64MB", env={"A": "b"})) as (first, second):
            for name in ("secret", "/tmp/secret", "../../../../etc/secret"):
                await first.write_file(name, "x")
                with pytest.raises(FileNotFoundError):
                    await second.read_file(name)
            assert not Path("/etc/secret").exists()
            assert not Path("/tmp/secret").exists()
            assert (await first.exec(["sh", "-c", "setsid sleep 4712 >/dev/null 2>&1 & echo on"])).stdout == "on\n"
            assert "4712" not in (await second.exec(["ps", "aux"])).stdout
            assert (await second.exec(["sh", "-c", "echo $A"])).stdout == "b\n"
            assert (await second.exec(["python3", "-c", "bytearray(1 << 28)"])).returncode == 137
            reached = await first.exec(["python3", "-c", "import socket; socket.create_connection(('1.1.1.1', 53), 2)"])
            assert "unreachable" in reached.stderr
        with pytest.raises(SandboxUnavailableError):
            await first.exec(["true"])

    asyncio.run(main())
    assert "sleep 4712" not in subprocess.run(["ps", "aux"], capture_output=True, text=True, check=True).stdout


def test_huge_output_unknown_users_and_missing_directories_are_errors_of_the_command() -> None:
    async def main() -> None:
        async with sandboxes(None) as (box,):
            for stream in (1, 2):
                with override_max_exec_output_size(1 << 20), pytest.raises(OutputLimitExceededError) as caught:
                    await box.exec(["sh", "-c", f"yes | head -c 9000000 >&{stream}"])
                assert len(caught.value.truncated_output or "") < 2 << 20
            assert (await box.exec(["pwd"], cwd="/missing")).returncode == 126
            if box.slot.rung is Rung.FULL:
                assert "nobody-here" in (await box.exec(["id"], user="nobody-here")).stderr
                assert "uid=1234" in (await box.exec(["id"], user="1234")).stdout
            else:
                with pytest.raises(SandboxUserUnsupportedError, match="level full"):
                    await box.exec(["id"], user="1234")
            with pytest.raises(NotImplementedError):
                await box.connection()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("Dockerfile", "docker export"),
        ("Dockerfile", "base_image: from"),
        ("my/compose.yaml", "base_image: from"),
        (ComposeConfig(services={}), "docker export"),
        ("no-image.tar", "does not exist"),
        (PalaestraSandboxConfig(memory="many"), "not a size"),
        (PalaestraSandboxConfig(isolation="strong"), "isolation"),
    ],
)
def test_a_configuration_that_slots_cannot_offer_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(PalaestraSandbox.task_init("test", config))


def test_a_yaml_file_configures_the_slots(tmp_path: Path) -> None:
    file = tmp_path / "palaestra-sandbox.yaml"
    file.write_text("env: {COLOUR: red}\nworkdir: /workspace/deep\n")
    task = inspect_ai.Task(
        dataset=[Sample(input="x", target="done", files={"a.txt": "1"}, setup='test "$(cat a.txt)$COLOUR" = 1red')],
        scorer=includes(),
        sandbox=("palaestra", str(file)),
    )
    log = inspect_ai.eval(task, model=mock("done"), display="none", log_dir=str(tmp_path / "logs"))[0]
    assert log.status == "success", log.error
    file.write_text("colour: red")
    with pytest.raises(ConfigError, match="colour"):
        asyncio.run(PalaestraSandbox.task_init("test", str(file)))


def dockerfile(folder: Path, *lines: str) -> str:
    folder.mkdir()
    (folder / "note.txt").write_text("copied")
    file = folder / "Dockerfile"
    file.write_text("\n".join(["FROM debian:12", *lines]))
    return str(file)


def test_a_dockerfile_is_built_in_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "palaestra-sandbox.yaml"
    config.write_text("base_image: host\nenv: {COLOUR: red}\n")
    monkeypatch.setenv("PALAESTRA_INSPECT_CONFIG", str(config))
    monkeypatch.setenv("PALAESTRA_STATE", str(tmp_path / "state"))
    lines = ("ENV SHAPE=round", "WORKDIR /srv/work", "COPY note.txt .", "RUN echo built > /srv/built.txt")
    file = dockerfile(tmp_path / "environment", *lines)
    check = 'test "$(pwd) $COLOUR $SHAPE $(cat note.txt a.txt /srv/built.txt)" = "/srv/work red round copied1built"'
    task = inspect_ai.Task(
        dataset=[
            Sample(input="x", target="done", id=number, files={"a.txt": "1"}, setup=f"#!/bin/sh\n{check}")
            for number in range(2)
        ],
        scorer=includes(),
        sandbox=("palaestra", file),
    )
    log = inspect_ai.eval(task, model=mock("done", "done"), display="none", log_dir=str(tmp_path / "logs"))[0]
    assert log.status == "success", log.error


def test_a_dockerfile_that_cannot_be_built_names_the_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "palaestra-sandbox.yaml"
    config.write_text("base_image: host")
    monkeypatch.setenv("PALAESTRA_INSPECT_CONFIG", str(config))
    file = dockerfile(tmp_path / "environment", "RUN echo no >&2; exit 3")

    async def main() -> None:
        await PalaestraSandbox.task_init("test", file)
        await PalaestraSandbox.sample_init("test", file, {})

    with pytest.raises(palaestra.PalaestraError, match="exit 3"):
        asyncio.run(main())


COMPOSE = """
services:
  web:
    build: .
    command: python3 -m http.server 8000 --directory /srv
    environment: {SHAPE: round}
    working_dir: /srv
  work:
    x-default: true
    build: .
    command: tail -f /dev/null
    depends_on: [web]
    environment: {COLOUR: "${SAMPLE_METADATA_COLOUR}"}
    working_dir: /app
"""


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a compose file, with a Dockerfile for its services."""
    config = tmp_path / "palaestra-sandbox.yaml"
    config.write_text("base_image: host")
    monkeypatch.setenv("PALAESTRA_INSPECT_CONFIG", str(config))
    monkeypatch.setenv("PALAESTRA_STATE", str(tmp_path / "state"))
    return Path(dockerfile(tmp_path / "environment", "RUN mkdir -p /srv; echo built > /srv/page")).with_name(
        "compose.yaml"
    )


def test_services_of_a_compose_file_have_a_sandbox_each(composed: Path, tmp_path: Path) -> None:
    composed.write_text(COMPOSE)
    fetch = (
        "import time, urllib.request as r; time.sleep(0.5); print(r.urlopen('http://web:8000/page').read().decode())"
    )

    @scorer(metrics=[])
    def seen() -> Any:
        async def score(state: Any, target: Any) -> Score:
            page = (await sandbox().exec(["python3", "-c", fetch])).stdout.strip()
            here = (await sandbox("work").exec(["sh", "-c", "echo $(pwd) $COLOUR"])).stdout.strip()
            there = (
                await sandbox("web").exec(["sh", "-c", "echo $(pwd) $SHAPE$COLOUR; cat /app/a.txt"])
            ).stdout.strip()
            return Score(value=f"{page}, {here}, {there}")

        return score

    samples = [Sample(input="x", files={"a.txt": "1"}, metadata={"colour": name}) for name in ("red", "blue")]
    task = inspect_ai.Task(dataset=samples, scorer=seen(), sandbox=("palaestra", str(composed)))
    log = inspect_ai.eval(task, model=mock("a", "b"), display="none", log_dir=str(tmp_path / "logs"))[0]
    assert log.status == "success", log.error
    values = sorted(str((each.scores or {})["seen"].value) for each in log.samples or ())
    assert values == [f"built, /app {colour}, /srv round" for colour in ("blue", "red")]


def test_the_only_service_of_a_compose_file_may_ask_for_no_network(composed: Path, tmp_path: Path) -> None:
    composed.write_text("services: {default: {build: ., init: true, network_mode: none, command: tail -f /dev/null}}")
    sample = Sample(input="x", target="done", setup='test "$(cat /srv/page)" = built')
    task = inspect_ai.Task(dataset=[sample], scorer=includes(), sandbox=("palaestra", str(composed)))
    log = inspect_ai.eval(task, model=mock("done"), display="none", log_dir=str(tmp_path / "logs"))[0]
    assert log.status == "success", log.error


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("services: {default: {image: x, privileged: true}}", "compose.yaml sets services.default.privileged"),
        (
            "services: {default: {image: x, network_mode: none}, web: {image: x}}",
            "compose.yaml sets services.default.network_mode",
        ),
        ("services: {default: {image: x, volumes: ['/etc:/host']}}", "the path '/etc' of the host"),
        ("services: {web: {image: x}}", "no service `default`, and none with `x-default"),
        ("services: [web]", "cannot be read"),
    ],
)
def test_what_slots_lack_in_a_compose_file_is_refused_by_name(composed: Path, text: str, problem: str) -> None:
    composed.write_text(text)

    async def main() -> None:
        await PalaestraSandbox.task_init("test", str(composed))
        await PalaestraSandbox.sample_init("test", str(composed), {})

    with pytest.raises(palaestra.PalaestraError, match=problem):
        asyncio.run(main())


def test_an_image_is_the_root_of_the_slots(tmp_path: Path) -> None:
    """A tar file with bash alone, named by a configuration file beside it."""
    listed = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout.split()
    files = ["/bin/bash", *(each for each in listed if each.startswith("/"))]
    subprocess.run(["tar", "-P", "-h", "-cf", str(tmp_path / "root.tar"), *files], check=True)
    (tmp_path / "palaestra-sandbox.yaml").write_text("image: root.tar\nworkdir: /app\n")

    async def main(config: str) -> None:
        await PalaestraSandbox.task_init("test", config)
        made = await PalaestraSandbox.sample_init("test", config, {})
        result = await made["default"].exec(["/bin/bash", "-c", "pwd; echo /usr/bin/*"])
        assert result.stdout == "/app\n/usr/bin/*\n"
        await PalaestraSandbox.sample_cleanup("test", config, made, False)
        await PalaestraSandbox.task_cleanup("test", config, True)

    asyncio.run(main(str(tmp_path / "palaestra-sandbox.yaml")))


# Inspect's tasks in our runner


def mock(*replies: str | dict[str, str]) -> Any:
    """A model of Inspect that gives these replies; a mapping is a call of `bash`."""
    return saying(
        ModelOutput.from_content("mockllm/model", each)
        if isinstance(each, str)
        else ModelOutput.for_tool_call("mockllm/model", "bash", each)
        for each in replies
    )


def saying(replies: Iterator[ModelOutput]) -> Any:
    outputs = list(replies)
    for output in outputs:
        output.usage = ModelUsage()
    return get_model("mockllm/model", custom_outputs=outputs, memoize=False)


def of_inspect(task: inspect_ai.Task, tmp_path: Path, model: Any) -> dict[str, float]:
    """The scores of Inspect's own run, by sample, in our sandbox. Where a file is missing, Inspect reports an error,
    which counts as 0 here."""
    where: dict[str, Any] = {"sandbox": "palaestra", "display": "none", "log_dir": str(tmp_path)}
    log = inspect_ai.eval(task, model=model, max_samples=1, fail_on_error=False, **where)[0]
    failed = {str(each.id): each.error.message for each in log.samples or () if each.error is not None}
    assert all("No such file" in message for message in failed.values()), failed
    numbers = {"C": 1.0, "I": 0.0, "P": 0.5}
    scores = {str(each.id): list((each.scores or {}).values()) for each in log.samples or () if each.error is None}
    means = {name: sum(numbers[str(each.value)] for each in found) / len(found) for name, found in scores.items()}
    return means | dict.fromkeys(failed, 0.0)


async def ours(name: str, tmp_path: Path, replies: Sequence[str | dict[str, str]], **settings: Any) -> dict[str, float]:
    answers = []
    for number, each in enumerate(replies):
        if isinstance(each, str):
            answers.append(FakeAnswer(completion(each)))
        else:
            function = {"name": "terminal", "arguments": json.dumps(each)}
            call = {"id": f"call{number}", "type": "function", "function": function}
            answers.append(FakeAnswer(completion(None, "tool_calls", tool_calls=[call])))
    async with LoopbackServer(*answers) as server:
        run = await palaestra.run(
            f"inspect:{EXAMPLES}@{name}", model="m", base_url=server.url, folder=tmp_path, concurrency=1, **settings
        )
    trajectories = [each for group in run.groups for each in group.trajectories]
    assert all(each.scored for each in trajectories), [each.error for each in trajectories]
    return {each.task_id: each.reward for each in trajectories}


CASES: list[tuple[Callable[[], inspect_ai.Task], list[str | dict[str, str]]]] = [
    (inspect_examples.sums, ["The answer is 2", "ANSWER: 5", "ANSWER: 6"]),
    (inspect_examples.colours, ["ANSWER: A", "ANSWER: A", "I think ANSWER: C"]),
    (
        inspect_examples.count,
        [{"command": "wc -l < data.txt > answer.txt; cat ready.txt"}, "2", {"command": "echo 4 > answer.txt"}, "5"],
    ),
]


@pytest.mark.parametrize(("task", "replies"), CASES, ids=["sums", "colours", "count"])
def test_scores_equal_those_of_inspect(
    task: Callable[[], inspect_ai.Task], replies: list[str | dict[str, str]], tmp_path: Path
) -> None:
    expected = of_inspect(task(), tmp_path / "logs", mock(*replies))
    assert asyncio.run(ours(task.__name__, tmp_path / "runs", replies)) == expected
    assert 0.0 < sum(expected.values()) < len(expected)


def as_inspect(message: Mapping[str, Any]) -> ModelOutput:
    """A reply of our loop as Inspect's models give it."""
    calls = [as_call(each["id"], **each["function"]) for each in message.get("tool_calls") or ()]
    said = ChatMessageAssistant(content=message.get("content") or "", tool_calls=calls or None, source="generate")
    return ModelOutput.from_message(said, stop_reason="tool_calls" if calls else "stop")


def as_call(number: str, name: str, arguments: str) -> ToolCall:
    function = {"terminal": "bash"}.get(name, name)
    try:
        return ToolCall(id=number, function=function, arguments=json.loads(arguments))
    except ValueError as error:
        return ToolCall(id=number, function=function, arguments={}, parse_error=str(error))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny_model_runs.TinyModel]:
    said = ["The answer is 2", "ANSWER: 4", "ANSWER: 6", "ANSWER: A", "ANSWER: B", "I think ANSWER: C", "2", "5"]
    commands = ["wc -l < data.txt > answer.txt", "wc -l < data.txt > answer.txt; cat ready.txt", "echo 5 > answer.txt"]
    called = [tiny_model_runs.call("terminal", command=each) for each in commands]
    with tiny_model_runs.served(tmp_path_factory.mktemp("model"), [*said, *called * 3]) as model:
        yield model


@pytest.mark.parametrize("task", [case[0] for case in CASES], ids=["sums", "colours", "count"])
def test_a_tiny_model_gets_the_scores_of_inspect(
    task: Callable[[], inspect_ai.Task], tiny: tiny_model_runs.TinyModel, tmp_path: Path
) -> None:
    """Exact tokens in a run that is killed and resumed; its replies in Inspect's own runner."""
    run = tiny_model_runs.killed_and_resumed(f"inspect:{EXAMPLES}@{task.__name__}", tmp_path / "ours", tiny)
    rewards = []
    for index in range(tiny_model_runs.GROUP):
        rollouts = [group.trajectories[index] for group in run.groups]
        rewards.append({each.task_id: each.reward for each in rollouts})
        said = (as_inspect(message) for each in rollouts for message in tiny_model_runs.played(each))
        assert of_inspect(task(), tmp_path / f"logs{index}", saying(said)) == rewards[-1]
    tiny_model_runs.report(f"inspect {task.__name__}", run, [each for found in rewards for each in found.values()])


def test_a_scorer_that_fails_on_the_work_scores_0(tmp_path: Path) -> None:
    assert asyncio.run(ours("count", tmp_path, ["2", "5"])) == {"n2": 0.0, "n5": 0.0}


def test_parameters_of_the_task_are_settings(tmp_path: Path) -> None:
    form = inspect_form(f"{EXAMPLES}@sums")
    assert {"n", "task_seed", "task_name", "image", "grader"} <= form.config_type().model_fields.keys()
    assert form.reference == f"inspect:{EXAMPLES}@sums"
    assert asyncio.run(ours("sums", tmp_path, ["2"], n=1, task_seed=2)) == {"1": 1.0}


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("tool", "web_search of refused cannot be carried over"),
        ("scorer", "model_graded_fact .* needs a model"),
        ("image", "set `image`"),
        ("model", "cannot be carried over"),
        ("file", "outside of the folder"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(why: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(ours("refused", tmp_path, ["y"], why=why))


def test_solvers_with_two_calls_or_random_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another prompt"):
        asyncio.run(ours("colours", tmp_path, ["y"], shuffle=True))
    with pytest.raises(ConfigError, match="more than once"):
        asyncio.run(ours("refused", tmp_path, ["y"], why="twice"))


def test_a_scorer_can_ask_a_model(tmp_path: Path) -> None:
    assert asyncio.run(ours("judged", tmp_path, ["y", "z"], grader="judge/x")) == {"1": 1.0, "2": 0.0}


def test_the_agent_plays_the_part_of_react(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    form = inspect_form(f"{EXAMPLES}@agent")
    form.build(form.config_type()())
    (task,) = form._ready().tasks()
    assert [(each["role"], each["content"]) for each in task.messages()] == [("system", "Be brief."), ("user", "x")]
    assert task.toolsets == ("terminal",)
    assert "runs without the solver react" in caplog.text


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "palaestra", "run", f"inspect:{EXAMPLES}@slow", "--policy", "noop"]
    command += ["--concurrency", "2"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    journal: list[Path] = []
    while time.monotonic() < deadline and not (journal and journal[0].read_text().count("\n") > 3):
        journal = list(tmp_path.rglob("groups.jsonl"))
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    folder = journal[0].parent
    before = journal[0].read_text().count("\n")
    assert 3 < before < 12
    resumed = subprocess.run(
        [sys.executable, "-m", "palaestra", "resume", str(folder)], cwd="/", capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert journal[0].read_text().count("\n") == 12
