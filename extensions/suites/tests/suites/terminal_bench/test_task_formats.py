"""Task directories of both formats: what is read of a good one, and the one message of each bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import AllowList, Network
from palaestra_slots.images.task_files import Unsupported
from palaestra_suites.terminal_bench import harbor_task, terminal_bench_1
from palaestra_suites.terminal_bench.find_tasks import load_tasks, read_folder
from palaestra_suites.terminal_bench.terminal_task import Format, TaskMetadata
from suites.terminal_bench.mini import HARBOR, LEGACY, copied

MINUTE = 60.0


def test_a_task_of_the_first_schema() -> None:
    task = harbor_task.read_task(HARBOR / "greeting")
    assert task.format is Format.HARBOR
    assert (task.name, task.metadata) == ("greeting", TaskMetadata("files", "easy", ("mini",)))
    assert (task.limits.memory_bytes, task.limits.disk_bytes, task.limits.cpus) == (1 << 30, 1 << 30, 1.0)
    assert (task.agent.timeout_s, task.verifier.timeout_s) == (2 * MINUTE, MINUTE)
    assert task.agent.network is Network.ON
    assert task.solution is not None
    assert task.solution.files == ("solve.sh",)
    assert not task.live


def test_variables_of_each_part_stay_apart() -> None:
    task = harbor_task.read_task(HARBOR / "settings")
    assert task.solution is not None
    assert task.env == {"COLOUR": "green"}
    assert task.verifier.env == {"WANTED": "green"}
    assert task.solution.env == {"DEBIAN_FRONTEND": "noninteractive", "NOTE": "noted"}


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("", Network.ON),
        ("[environment]\nallow_internet = false\n", Network.OFF),
        ('[environment]\nnetwork_mode = "no-network"\n', Network.OFF),
        ('[environment]\nnetwork_mode = "ALLOWLIST"\nallowed_hosts = ["a.example"]\n', AllowList(("a.example",))),
        ('[environment]\nallow_internet = false\n[agent]\nnetwork_mode = "public"\n', Network.ON),
    ],
)
def test_the_network_that_a_task_asks_for(tmp_path: Path, text: str, network: Network | AllowList) -> None:
    assert harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text})).agent.network == network


@pytest.mark.parametrize(
    ("size", "wanted"), [("512M", 512 << 20), ("1.5G", 3 << 29), ("2Gi", 2 << 30), ("10gb", 10 << 30)]
)
def test_sizes_as_text(tmp_path: Path, size: str, wanted: int) -> None:
    task = copied(HARBOR / "greeting", tmp_path, {"task.toml": f'[environment]\nmemory = "{size}"\n'})
    assert harbor_task.read_task(task).limits.memory_bytes == wanted


def test_a_default_for_a_variable_of_the_host_is_taken(tmp_path: Path) -> None:
    text = '[environment]\nenv = { KEY = "${SOME_KEY:-none} and ${OTHER:-}" }\n'
    assert harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text})).env == {"KEY": "none and "}


def test_variables_of_the_host_that_a_setting_gives(tmp_path: Path) -> None:
    text = """
[environment.env]
KEY = "${SOME_KEY}"
OTHER = "${OTHER:-default}"
[[environment.mcp_servers]]
name = "mail"
url = "http://mail/mcp"
headers = { authorization = "Bearer ${SOME_KEY}" }
[[steps]]
name = "one"
[steps.verifier.env]
JUDGE = "${SOME_KEY}"
"""
    files = {"task.toml": text, "steps/one/instruction.md": "do it", "cheat/solve.sh": "true"}
    task = copied(HARBOR / "greeting", tmp_path, files)
    loaded = harbor_task.read_task(task, {"SOME_KEY": "k", "OTHER": "o"})
    assert loaded.env == {"KEY": "k", "OTHER": "o"}
    assert loaded.agent.servers[0].headers == {"authorization": "Bearer k"}
    assert loaded.steps[0].verifier.env == {"JUDGE": "k"}
    with pytest.raises(Unsupported, match=r"--env\.task_env_vars SOME_KEY=VALUE"):
        harbor_task.read_task(task, {"OTHER": "o"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken-toml", r"task.toml is not TOML: .*line 2"),
        ("bad-size", r"environment.memory must be a size such as 2G or 512M, not 'lots'"),
        ("two-sizes", r"environment.memory and environment.memory_mb"),
        ("no-tests", r"test.sh is missing"),
        ("no-instruction", r"instruction.md is missing"),
    ],
)
def test_a_broken_task_is_one_message(name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_folder(HARBOR / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two-containers", r"services\.db\.network_mode"),
        ("needs-gpu", r"it needs GPUs"),
        ("host-secret", r"environment.env.KEY .*SOME_API_KEY"),
    ],
)
def test_what_slots_cannot_do_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        read_folder(HARBOR / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[agent]\ntimeout_sec = 0\n", r"agent.timeout_sec must be a number above 0, not 0"),
        ("[agent]\ntimeout_sec = true\n", r"agent.timeout_sec must be a number above 0, not True"),
        ("metadata = 3\n", r"metadata must be a table, not int"),
        ("[metadata]\ntags = [1]\n", r"metadata.tags must be a list of strings"),
        ("[environment]\nenv = { A = [1] }\n", r"environment.env.A must be text"),
        ('[environment]\nnetwork_mode = "some"\n', r"environment.network_mode must be public, no_network or allowlist"),
        ('[environment]\nenv = { "A=B" = "x" }\n', r"environment.env.A=B' cannot be an environment variable"),
        ('[environment]\nenv = { "" = "x" }\n', r"cannot be an environment variable"),
        ('[environment]\nenv = { A = "x\\u0000" }\n', r"environment.env.A' cannot be an environment variable"),
        ('[environment]\nos = "windows"\n', r"it needs the system 'windows'"),
        ('[verifier]\nenvironment_mode = "apart"\n', r"verifier.environment_mode must be shared or separate"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\n', r"verifier.environment needs"),
        ('[verifier.environment]\nskills_dir = "/x"\n', r"verifier.environment.skills_dir"),
        ('[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\n', r"verifier.collect\[0\].command"),
        ('[[verifier.collect]]\ncommand = "true"\nservice = "db"\n', r"names the service 'db'"),
        ('artifacts = ["../x"]\n[verifier]\nenvironment_mode = "separate"\n', r"artifacts.source must be an absolute"),
        ('artifacts = [{ source = "/x", service = "db" }]\n[verifier.environment]\n', r"names the service 'db'"),
        ("[environment.healthcheck]\ninterval_sec = 1\n", r"environment.healthcheck.command"),
        ('[verifier.environment.healthcheck]\ncommand = "true"\n', r"verifier.environment.healthcheck"),
        ('[[environment.mcp_servers]]\nname = "x"\n', r"environment.mcp_servers\[0\].url"),
    ],
)
def test_a_wrong_value_names_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text}))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ('[environment]\ntpu = { type = "v6e", topology = "2x2" }\n', "environment.tpu"),
        ('[[steps]]\nname = "a"\n[steps.agent]\nallowed_hosts = ["a.example"]\n', r"steps[0].agent.allowed_hosts"),
    ],
)
def test_a_key_that_would_change_the_score_rejects_the_task(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(Unsupported) as caught:
        harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text}))
    assert f"({key})" in str(caught.value)
    assert "Remove the key" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ('artifacts = [{ source = "/a", excludes = ["b"] }]\n', "artifacts.excludes", "artifacts.exclude"),
        ('[verifier]\nenvironment_mod = "separate"\n', "verifier.environment_mod", "verifier.environment_mode"),
        ("[agent]\ntimeout = 5\n", "agent.timeout", "agent.timeout_sec"),
        ("verifer = {}\n", "verifer", "verifier"),
    ],
)
def test_a_misspelt_key_is_named_with_the_right_one(tmp_path: Path, text: str, key: str, meant: str) -> None:
    task = harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text}))
    assert task.ignored == (f"{key} (did you mean {meant}?)",)


@pytest.mark.parametrize(
    "text", ['version = "2.0"', "version = 2", 'schema_version = "2.0"', 'schema_version = "next"', 'version = "1.0.0"']
)
def test_the_number_of_a_version_changes_nothing(tmp_path: Path, text: str) -> None:
    brief = (HARBOR / "greeting" / "task.toml").read_text()
    plain = harbor_task.read_task(HARBOR / "greeting")
    task = copied(HARBOR / "greeting", tmp_path, {"task.toml": f"{text}\n{brief.partition(chr(10))[2]}"})
    found = harbor_task.read_task(task)
    assert found.ignored == (text.replace('"', ""),)
    assert (found.agent, found.limits, found.metadata) == (plain.agent, plain.limits, plain.metadata)


MISSPELT = "artefacts (did you mean artifacts?)"


def test_keys_that_the_format_does_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = 'slug = "x"\nartefacts = ["b"]\n[solution]\nargs = [1]\n[verifier.environment]\nlabel = "a"\n'
    task = copied(HARBOR / "greeting", tmp_path, {"task.toml": text})
    assert harbor_task.read_task(task).ignored == ("slug", MISSPELT, "solution.args", "verifier.environment.label")
    steps = copied(HARBOR / "several-steps", tmp_path)
    toml = (steps / "task.toml").read_text()
    (steps / "task.toml").write_text(toml.replace('name = "sort"', 'name = "sort"\ndependencies = ["count"]'))
    assert harbor_task.read_task(steps).ignored == ("steps[1].dependencies",)
    assert len(load_tasks(str(tmp_path), tmp_path / "cache").tasks) == 2
    check_message(caplog.text, "steps.dependencies")
    check_message(caplog.text, "artefacts", "artifacts")


def test_keys_that_ask_for_nothing_or_cannot_change_a_score_are_read(tmp_path: Path) -> None:
    text = """
        schema_version = "1.4"
        source = "somewhere"
        artifacts = ["/app/out.txt"]
        [task]
        name = "a/b"
        version = "2"
        anything = 1
        [metadata]
        collect = "free text"
        [agent]
        timeout_sec = 5
        [verifier]
        environment_mode = "shared"
        network_mode = "no-network"
        restart_environment = false
        collect = []
        [verifier.env]
        [environment]
        os = "Linux"
        gpus = 0
        gpu_types = ["H100"]
        mcp_servers = []
        [solution.env]
    """
    assert harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text})).agent.timeout_s == 5.0


def test_hosts_without_a_list_mode_are_an_error(tmp_path: Path) -> None:
    text = '[environment]\nallowed_hosts = ["a.example"]\n'
    with pytest.raises(TaskError, match=r'environment.allowed_hosts needs environment.network_mode = "allowlist"'):
        harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text}))


def test_a_terminal_bench_1_task() -> None:
    task = terminal_bench_1.read_task(LEGACY / "hello")
    assert task.format is Format.TERMINAL_BENCH_1
    check_message(task.instruction, "Create", "/app/hello.txt", "Hello")
    assert (task.agent.timeout_s, task.verifier.timeout_s) == (2 * MINUTE, MINUTE)
    assert task.verifier.env["TEST_DIR"] == "/tests"
    assert task.solution is not None
    assert task.solution.files == ()


def test_typed_steps_are_commands_or_no_solution(tmp_path: Path) -> None:
    typed = LEGACY / "typed-solution"
    assert terminal_bench_1.commands(typed / "solution.yaml") == ["seq 1 5 > numbers.txt"]
    keys = "- command: i\n  append_enter: false\n- command: ':wq'\n"
    assert terminal_bench_1.read_task(copied(typed, tmp_path, {"solution.yaml": keys})).solution is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken-yaml", r"task.yaml is not YAML"),
        ("other-parser", r"parser_name 'swebench'"),
        ("two-services", r"services\.server\.privileged"),
    ],
)
def test_bad_tasks_of_the_older_format(name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_folder(LEGACY / name)


@pytest.mark.parametrize("missing", ["run-tests.sh", "Dockerfile"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    task = copied(LEGACY / "hello", tmp_path)
    (task / missing).unlink()
    with pytest.raises(TaskError, match=f"{missing} is missing"):
        read_folder(task)
