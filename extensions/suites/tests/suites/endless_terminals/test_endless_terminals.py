"""The environment: generated tasks, files of them, and task folders, played through the real loop and graded sealed."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import policy_runs
from palaestra.rollouts.grading.reward import decide
from palaestra_audit.cheats.proof import BANK, check_environment
from palaestra_slots.core.errors import ConfigError, PrepareError, TaskError
from palaestra_slots.core.types import Network
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Mount, SlotSpec
from palaestra_suites.endless_terminals.compose_tasks import TaskSelection, generate
from palaestra_suites.endless_terminals.endless_terminals import (
    EndlessEnvironment,
    EndlessTerminalsEnvConfig,
)
from palaestra_suites.endless_terminals.generated_task import to_line
from palaestra_suites.endless_terminals.task_folders import (
    FolderTask,
    post_script,
    prepare_folder,
    read_folder,
    read_task,
    score_folder,
)
from palaestra_suites.toolchain.toolchain import DEPENDENCIES_DIR, DependencyCache, Toolchain, interpreter
from palaestra_tokens.engines.scripted import OraclePolicy
from suites.endless_terminals.built import DESCRIBED, FINAL, INITIAL, checked

ENVIRONMENT = str(Path(__file__).parents[5] / "environments" / "endless_terminals_env.py")

CHEATS = ["fake-python", "solution-file", "answering-daemon", "answered-probe"]


def run(folder: Path, *argv: str) -> int:
    command = ["run", ENVIRONMENT, "process", f"--env.data_path_to_save_groups={folder / 'groups.jsonl'}", *argv]
    return main(command)


def groups(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]


@pytest.mark.slots
@pytest.mark.parametrize(
    "settings",
    [
        ["--env.level", "2", "--env.seed", "7"],
        ["--env.families=script-cipher", "--env.level=1"],
        ["--env.families=process-daemon", "--env.level=1"],
    ],
)
def test_the_oracle_is_paid_and_no_cheat_is(settings: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    proof = check_environment(ENVIRONMENT, settings, tasks=1, only=CHEATS, quiet=True)
    assert proof.proven
    assert proof.holds, [line for line in proof.lines if not line.ok]
    assert {line.policy for line in proof.lines} == {"oracle", "noop", *CHEATS}
    assert [*proof.ways] == ["exit code" if "script-cipher" in settings[0] else "outside"]


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(600)
def test_half_of_the_bank_against_two_areas(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [cheat.name for cheat in BANK[1::2]]  # the other half attacks `hermes_swe`, and all a terminal task
    proof = check_environment(ENVIRONMENT, ["--env.level", "3"], tasks=2, only=names, quiet=True)
    assert proof.holds, [line for line in proof.lines if not line.ok]


@pytest.mark.slots
def test_a_file_of_tasks_is_played_and_its_bad_rows_are_named(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = list(map(to_line, generate(TaskSelection(1, levels=(1,), families=("text-clean", "mode-rules")), 2)))
    (tmp_path / "tasks.jsonl").write_bytes(rows[0] + b"{}\n" + rows[1])
    with caplog.at_level(logging.WARNING):
        assert run(tmp_path, "--env.dataset_name=tasks.jsonl", "--env.group_size=2", "--policy=oracle") == 0
    check_message(caplog.messages, "row 2")
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0, 1.0]] * 2
    metrics = groups(tmp_path)[0]["rollouts"][0]["metrics"]
    assert metrics == {"checks_held": 1.0, "level_1": 1.0}


@pytest.mark.slots
def test_an_evaluation_tells_what_was_solved_by_level(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = [next(generate(TaskSelection(1, levels=(level,), areas=("text",)), 1)) for level in (1, 2)]
    broken = msgspec.structs.replace(tasks[1], id="broken", solution="true")
    (tmp_path / "tasks.jsonl").write_bytes(b"".join(map(to_line, [*tasks, broken])))
    command = ["run", ENVIRONMENT, "evaluate", "--env.dataset_name=tasks.jsonl", "--env.group_size=1"]
    command += ["--env.data_dir_to_save_evals=evals", "--policy=oracle"]
    assert main(command) == 0
    figures = json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"]
    assert figures["pass_rate"] == figures["eval/percent_correct"] == pytest.approx(2 / 3)
    assert figures["mean_reward/low"] < 2 / 3 < figures["mean_reward/high"]
    assert (figures["level/1/pass_rate"], figures["level/2/pass_rate"]) == (1.0, 0.5)
    assert (figures["attempts"], figures["unscored"]) == (3, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--env.dataset_name=absent.jsonl"], "there is no data set absent.jsonl"),
        (["--env.dataset_name=empty.jsonl"], "no usable task"),
        (["--env.local_tasks_dir=empty"], "empty contains no task"),
        (["--env.level=9"], "level"),
        (["--env.families=text-claen"], "Did you mean text-clean"),
    ],
)
def test_bad_settings_are_one_message(
    settings: list[str], message: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty").mkdir()
    assert run(tmp_path, *settings, "--policy=noop") == 2
    assert message in capsys.readouterr().err


DEFINITION = """Bootstrap: docker
From: ubuntu:22.04

%post
    apt-get update && apt-get install -y \\
        python3 python3-pip && rm -rf /var/lib/apt/lists/*
    pip3 install pytest
    mkdir -p /home/user/data && cd /home/user/data
    cat > numbers.txt <<'END'
1
2
END

%environment
    export LC_ALL=C
"""


def folder_task(place: Path, **changed: str | None) -> Path:
    """A task folder in the native form; a name of None leaves the file out."""
    files = {
        "task.json": json.dumps(DESCRIBED),
        "container.def": DEFINITION,
        "test_initial_state.py": INITIAL,
        "test_final_state.py": FINAL,
    }
    for name, text in {**files, **{key.replace("__", "."): text for key, text in changed.items()}}.items():
        if text is not None:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    return place


def test_a_native_folder_is_read_without_its_truth(tmp_path: Path) -> None:
    task = read_task(folder_task(tmp_path / "one"))
    assert (task.id, task.prompt) == ("one", DESCRIBED["description"])
    assert "it is 3" not in repr(task)
    script = task.setup.splitlines()
    assert [line.strip() for line in script if line.strip()] == [
        "mkdir -p /home/user/data && cd /home/user/data",
        "cat > numbers.txt <<'END'",
        "1",
        "2",
        "END",
    ]


def test_folders_that_cannot_be_used_are_named_and_hide_no_other(tmp_path: Path) -> None:
    folder_task(tmp_path / "a-good")
    folder_task(tmp_path / "b-torn", task__json="{")
    folder_task(tmp_path / "c-empty", task__json='{"description": ""}')
    folder_task(tmp_path / "d-untested", test_final_state__py=None)
    folder_task(tmp_path / "e-files", container__def="Bootstrap: docker\n%files\n  a.txt /a.txt\n%post\n  true\n")
    folder_task(tmp_path / "f-bare", container__def=None)
    harbor = tmp_path / "g-harbor"
    (harbor / "environment").mkdir(parents=True)
    (harbor / "tests").mkdir()
    (harbor / "instruction.md").write_text("# Task\nWrite the sum.\n")
    (harbor / "environment" / "Dockerfile").write_text("FROM ubuntu:22.04\nRUN true\n")
    (harbor / "tests" / "test_final_state.py").write_text(FINAL)
    (tmp_path / "not-a-task").mkdir()

    found = list(read_folder(tmp_path))
    assert [task.id for task in found if isinstance(task, FolderTask)] == ["a-good", "g-harbor"]
    built = found[-1]
    assert isinstance(built, FolderTask)
    assert built.recipe == ImageRecipe(harbor / "environment", harbor / "environment/Dockerfile")
    reasons = [str(each) for each in found if isinstance(each, TaskError)]
    assert reasons[0].startswith("b-torn: ")
    assert "c-empty: task.json.description" in reasons[1]
    assert "test_final_state.py is missing" in reasons[2]
    assert "%files" in reasons[3]
    check_message(reasons[4], "f-bare", "container.def")
    assert len(reasons) == 5

    (tmp_path / "roots" / "g-harbor").mkdir(parents=True)
    ready = read_task(harbor, tmp_path / "roots")
    assert (ready.prompt, ready.setup, ready.recipe) == ("# Task\nWrite the sum.", "", None)
    assert ready.image == str(tmp_path / "roots" / "g-harbor")
    with pytest.raises(ConfigError, match="absent"):
        list(read_folder(tmp_path / "absent"))


def test_a_post_script_keeps_what_stands_beside_an_installer() -> None:
    text = "%post\napt-get install -y jq && mkdir /a && pip install x && touch /a/b\necho apt-get\n%runscript\nexit\n"
    assert post_script(text, "t").split("\n") == ["", "mkdir /a && touch /a/b", "echo apt-get", ""]


@pytest.fixture
def toolchain() -> Toolchain:
    """The pytest that runs these tests, mounted into slots: nothing is installed."""
    python, mounts = interpreter()
    site = Mount(str(Path(pytest.__file__).parent.parent), f"{DEPENDENCIES_DIR}/site")
    plugins = ("-p", "no:xdist", "-p", "no:hypothesispytest", "-p", "no:timeout")
    return Toolchain((python, "-s", "-S", "-B"), (*mounts, site), (site.target,), pytest_args=plugins)


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_a_folders_own_tests_prepare_and_decide(toolchain: Toolchain, in_pool, tmp_path: Path) -> None:
    task = read_task(folder_task(tmp_path / "one"))

    async def scenario(pool: SlotPool) -> None:
        spec = SlotSpec(mounts=toolchain.mounts)
        slot = await pool.acquire("prepare", spec=spec)
        names = await prepare_folder(task, slot, toolchain, 60)
        assert names == {"test_state.py::test_sum"}
        snapshot = await pool.seal(slot)
        plants = "/conftest.py /home/user/conftest.py"
        cheat = f"for f in {plants}; do echo 'import os; os._exit(0)' > $f; done"
        for script, reward in (("echo 3 > /home/user/sum.txt", 1.0), (cheat, 0.0)):
            slot = await pool.acquire("agent", snapshot=snapshot)
            assert not (await slot.execute("find / -xdev -name 'test_*state*' | grep .")).success
            await slot.execute(script)
            sealed = await pool.seal(slot)
            slot = await pool.acquire("grade", spec=spec, snapshot=sealed)
            score = await score_folder(task, names, slot, toolchain, 60)
            assert (score.reward, score.metrics["tests"]) == (reward, 1)
            await pool.release(slot)
            await pool.snapshots.forget(sealed)

    in_pool(scenario)


STARTED = (
    "import importlib.util, subprocess, sys\ndef test_sum():\n"
    "    subprocess.run(['git', '-C', '/home/user/data', 'status'])\n"
    "    shown = subprocess.run(['bash', '-lc', 'cat /home/user/sum.txt'], capture_output=True, text=True)\n"
    "    assert shown.stdout.strip() == '3'\n"
    "def test_words():\n    assert 'three' in open('/home/user/words.txt').read()\n"
    "def test_module():\n    sys.path.append('/home/user')\n    if importlib.util.find_spec('of_source'):\n"
    "        assert __import__('of_source').VALUE == 'source'\n"
)
COMPILED = (
    "import py_compile; open('of_source.py', 'w').write('VALUE = 0'); py_compile.compile('of_source.py', "
    "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
)
WORK = {
    "own tests": ("echo 3 > sum.txt; echo three > words.txt; echo 'import a' > conftest.py", 1.0),
    "settings of git": ("echo 3 > sum.txt; echo three > words.txt; git init -q data; git -C data config a.b c", 1.0),
    "data in opt": ("echo 3 > sum.txt; mkdir /opt/d; echo three > /opt/d/w; ln -s /opt/d/w words.txt", 1.0),
    "program of the image": ("echo three > words.txt; printf '#!/bin/sh\\necho 3\\n' > /usr/bin/cat", 0.0),
    "compiled file of another source": (
        f'echo 3 > sum.txt; echo three > words.txt; python3 -c "{COMPILED}"; echo "VALUE = \'source\'" > of_source.py',
        1.0,
    ),
    "honest": ("echo 3 > sum.txt; echo three > it; ln -s it words.txt; echo 'set -u' > .pro''file", 1.0),
    "link to the tests": ("echo 3 > sum.txt; ln -s /tmp/palaestra-tests/test_state.py words.txt", 0.0),
    "link through a directory": (
        "echo 3 > sum.txt; ln -s /tmp d; ln -s d/palaestra-tests/test_state.py words.txt",
        0.0,
    ),
}


@pytest.mark.slots
async def test_settings_and_links_do_not_answer_for_the_work(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    for name, (script, _) in WORK.items():
        place = folder_task(tmp_path / "tasks" / name, test_final_state__py=STARTED)
        (place / "solution").mkdir()
        (place / "solution/solve.sh").write_text(f"cd ~; {script}\n")
    config = EndlessTerminalsEnvConfig(local_tasks_dir=str(tmp_path / "tasks"), cache_dir=str(tmp_path / "cache"))
    async with make_pool(config) as pool:
        environment = EndlessEnvironment(config, installed_pytest)
        await environment.open()
        async with policy_runs(environment, pool) as runs:
            played = [await runs.play(OraclePolicy(), task) async for task in environment.tasks()]
    found = {group.task_id: group.trajectories[0] for group in played}
    assert {name: each.reward for name, each in found.items()} == {name: reward for name, (_, reward) in WORK.items()}
    causes = {name: [label.name for label in each.labels] for name, each in found.items() if each.reward == 0.0}
    assert causes == {
        "program of the image": ["programs_replaced"],
        "link to the tests": ["links_to_checks"],
        "link through a directory": ["links_to_checks"],
    }


IMPORTING = """
import sys
sys.path.insert(0, "/home/user")
import work
def test_sum():
    assert work.add(123, 877) == 1000
"""
FORCED = """
import _pytest.reports as r
make = r.TestReport.from_item_and_call.__func__
def forced(cls, item, call):
    report = make(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
r.TestReport.from_item_and_call = classmethod(forced)
"""


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_a_folders_tests_that_import_the_work_have_controls(toolchain: Toolchain, in_pool, tmp_path: Path) -> None:
    task = replace(read_task(folder_task(tmp_path / "one")), final_tests=IMPORTING)
    names = frozenset({"test_state.py::test_sum"})

    async def scenario(pool: SlotPool) -> None:
        for code, reward, label in (
            ("def add(a, b): return a + b\n", 1.0, []),
            ("def add(a, b): return {(123, 877): 1000}[a, b]\n", 1.0, ["answers_copied"]),
            (f"def add(a, b): return 0\n{FORCED}", 0.0, ["falsified_test_passed"]),
        ):
            slot = await pool.acquire("grade", spec=SlotSpec(mounts=toolchain.mounts))
            await slot.write_text("/home/user/work.py", code)
            score = decide(await score_folder(task, names, slot, toolchain, 60))
            assert (score.reward, score.metrics["passed"]) == (reward, 1)
            assert [each.name for each in score.labels if each.certain or reward] == label
            assert score.detail["uncontrolled"] == []
            await pool.release(slot)

    in_pool(scenario)


@pytest.mark.slots
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"container__def": "%post\nexit 3\n"}, PrepareError, "%post"),
        ({"container__def": "%post\ntrue\n"}, PrepareError, "test_state.py::test_num"),
        pytest.param({"test_final_state__py": "import absent\n"}, PrepareError, "cannot run", marks=pytest.mark.slow),
        pytest.param({"test_final_state__py": INITIAL}, TaskError, "pass before", marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_does_not_hold_here_is_refused(
    changed: dict[str, str], error: type[Exception], message: str, toolchain: Toolchain, in_pool, tmp_path: Path
) -> None:
    task = read_task(folder_task(tmp_path / "one", **changed))

    async def scenario(pool: SlotPool) -> None:
        slot = await pool.acquire("prepare", spec=SlotSpec(mounts=toolchain.mounts))
        with pytest.raises(error, match=message):
            await prepare_folder(task, slot, toolchain, 60)
        await pool.release(slot)

    in_pool(scenario)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.slots
def test_task_folders_are_played(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder_task(tmp_path / "tasks" / "one")
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text("echo 3 > ~/sum.txt\n")
    settings = ["--env.local_tasks_dir=tasks", f"--env.cache_dir={tmp_path}", "--env.group_size=2"]
    assert run(tmp_path, *settings, "--policy=oracle") == 0
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0, 1.0]]


@pytest.mark.slots
@pytest.mark.skipif(os.geteuid() != 0, reason="other users of a slot need root")
def test_a_folder_with_a_dockerfile_is_built_and_played(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    assert checked(tmp_path, installed_pytest, image="host").holds


@pytest.mark.parametrize(("build", "prepare"), [(True, Network.ON), (False, Network.OFF)])
async def test_only_building_over_an_image_reaches_the_network(
    installed_pytest: DependencyCache, tmp_path: Path, build: bool, prepare: Network
) -> None:
    folder = tmp_path / "tasks" / "built"
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("# Task\nWrite the sum.\n")
    (folder / "tests" / "test_final_state.py").write_text(FINAL)
    (folder / "environment" / "Dockerfile").write_text("FROM ubuntu:22.04\nRUN true\n")
    config = EndlessTerminalsEnvConfig(
        dataset_name=str(tmp_path / "tasks"), image="host", build_network=build, cache_dir=str(tmp_path / "cache")
    )
    environment = EndlessEnvironment(config, installed_pytest)
    await environment.sort_out()
    assert environment.items, environment.left_out
    network = (await environment.resolve(environment.task(environment.items[0]))).network
    assert (network.prepare, network.agent) == (prepare, Network.OFF)
