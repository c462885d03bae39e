"""Hidden tests through the real slots and grading: the oracle is paid, nothing else is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_audit.cheats.proof import BANK, check_environment
from palaestra_slots.core.errors import TaskError
from palaestra_slots.sandbox.slot import WORKSPACE, Slot, SlotSpec
from palaestra_suites.grading.falsified import control
from palaestra_suites.grading.harness import TestRun
from palaestra_suites.grading.hidden_tests import errors_of, run_suite
from palaestra_suites.hermes_swe.hermes_swe import HermesSweEnvConfig, HermesSweEnvironment
from palaestra_suites.hermes_swe.programming_task import make_suite
from palaestra_suites.toolchain.toolchain import interpreter

pytestmark = pytest.mark.slots

ENVIRONMENT = str(Path(__file__).parents[5] / "environments/hermes_swe_env.py")
SUITE = make_suite(
    "class TestAdd:\n    def test_small(self): assert add(1, 2) == 3\n\n"
    "def test_big(): assert add(10**20, 1) == 10**20 + 1\nasync def test_later(): assert add(0, 0) == 0\n",
    "add",
)
PYTHON, MOUNTS = interpreter()
COMMAND = (PYTHON, "-I", "-S", "-B")


def in_slot(scenario: Callable[[Slot], Awaitable[None]]) -> None:
    async def main() -> None:
        async with make_pool(HermesAgentEnvConfig()) as pool:
            slot = await pool.acquire("tests", spec=SlotSpec(mounts=MOUNTS))
            try:
                await scenario(slot)
            finally:
                await pool.release(slot)

    asyncio.run(main())


def test_what_becomes_of_each_test() -> None:
    async def scenario(slot: Slot) -> None:
        async def errors(text: str) -> dict[str, str]:
            await slot.write_text("solution.py", text)
            return errors_of(await run_suite(slot, COMMAND, WORKSPACE, SUITE.text, timeout_s=60), SUITE.names)

        assert await errors("def add(a, b): return a + b\n") == {}
        found = await errors("def add(a, b): return int(float(a) + float(b))\n")
        assert set(found) == {"test_big"}
        assert "assert add(10 ** 20, 1) == 10 ** 20 + 1" in found["test_big"]
        assert set(await errors("def add(a, b) return a\n")) == set(SUITE.names)
        await slot.write_text("json.py", "raise RuntimeError\n")
        assert await errors("import json\ndef add(a, b): return a + b\n") == {}
        assert not (await slot.execute(f"grep -rl TestAdd {WORKSPACE} /tmp")).output

    in_slot(scenario)


@pytest.mark.slow
def test_work_that_does_not_end_has_not_passed() -> None:
    async def scenario(slot: Slot) -> None:
        await slot.write_text("solution.py", "import time\ndef add(a, b):\n    time.sleep(1000)\n")
        run = await run_suite(slot, COMMAND, WORKSPACE, SUITE.text, timeout_s=15)
        assert set(errors_of(run, SUITE.names).values()) == {"the test run timed out"}

    in_slot(scenario)


ONLY_LOOKS_RIGHT = {
    "exit": "import os\nos._exit(0)\n",
    "leave": "import sys\nsys.exit(0)\n",
    "patch": "import __main__\n__main__._run_test = lambda names, name: ''\ndef add(a, b): return 0\n",
    "equal": "class Any(int):\n    def __eq__(self, o): return True\n    __hash__ = None\nadd = lambda a, b: Any()\n",
    "forge": 'import os\nos.write(3, b\'{"kind": "test", "name": "test_big", "passed": true}\\n\')\n',
}


FINDS_TEXT = """
import gc, inspect, linecache, os, sys

def found(value, depth=0):
    if isinstance(value, (str, bytes, list, tuple, dict)) and depth < 3:
        if isinstance(value, (str, bytes)):
            return (b"assert ad" + b"d(" if isinstance(value, bytes) else "assert ad" + "d(") in value
        return any(found(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value))

def look():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals is not globals():
            yield found(frame.f_locals) or found(frame.f_globals)
        yield linecache.getline(frame.f_code.co_filename, 2)[:-1] in TEXT
        try:
            yield found(inspect.getsource(frame))
        except OSError:
            pass
        frame = frame.f_back
    yield found(os.pread(0, 100000, 0)) if os.path.isfile("/proc/self/fd/0") else False
    yield any(found(each[2]) for each in linecache.cache.values() if len(each) > 2)

TEXT = ["def test" + "_big(): assert ad" + "d(10**20, 1) == 10**20 + 1"]
SEEN = any(look())

def add(a, b):
    assert not (SEEN or any(look()))
    return a + b
"""


def test_the_text_of_the_tests_is_nowhere_in_their_process_and_still_in_their_errors() -> None:
    async def scenario(slot: Slot) -> None:
        await slot.write_text("solution.py", FINDS_TEXT)
        run = await run_suite(slot, COMMAND, WORKSPACE, SUITE.text, timeout_s=60)
        assert errors_of(run, SUITE.names) == {}
        await slot.write_text("solution.py", "def add(a, b): return 3\n")
        errors = errors_of(await run_suite(slot, COMMAND, WORKSPACE, SUITE.text, timeout_s=60), SUITE.names)
        assert "    assert add(0, 0) == 0\nAssertionError" in errors["test_later"], errors

    in_slot(scenario)


def test_work_that_only_looks_right_does_not_pass_or_is_certainly_forged() -> None:
    async def scenario(slot: Slot) -> None:
        found: dict[str, str] = {}
        for name, text in {**ONLY_LOOKS_RIGHT, "reference": "def add(a, b): return a + b\n"}.items():

            async def run(texts: Mapping[str, str], text: str = text) -> TestRun:
                await slot.write_text("solution.py", text)
                return await run_suite(slot, COMMAND, WORKSPACE, texts[""], timeout_s=60)

            async def reference(texts: Mapping[str, str]) -> TestRun:
                await slot.write_text("solution.py", "def add(a, b): return a + b\n")
                return await run_suite(slot, COMMAND, WORKSPACE, texts[""], timeout_s=60)

            first = await run({"": SUITE.text})
            if errors_of(first, SUITE.names):
                found[name] = "did not pass"
                continue
            labels = [*first.labels, *(await control({"": SUITE.text}, SUITE.names, run, reference)).labels]
            found[name] = ", ".join(label.name for label in labels if label.certain)
        assert found == {
            "exit": "did not pass",
            "leave": "did not pass",
            "patch": "falsified_test_passed",
            "equal": "equals_everything",
            "forge": "did not pass",
            "reference": "",
        }

    in_slot(scenario)


def test_the_oracle_is_paid_and_no_cheat_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    proof = check_environment(ENVIRONMENT, [], tasks=1, only=["fake-python", "solution-file"], quiet=True)
    assert proof.proven
    assert proof.holds, [line for line in proof.lines if not line.ok]
    assert proof.ways == {"run_tests": ""}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_of_the_bank_against_built_in_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [cheat.name for cheat in BANK[::2]]  # the other half attacks a task of `swe_smith_oracle`
    proof = check_environment(ENVIRONMENT, [], tasks=2, only=names, quiet=True)
    assert proof.holds, [line for line in proof.lines if not line.ok]


def test_a_rung_without_forks_is_refused_before_a_model_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["run", ENVIRONMENT, "--policy=oracle", "--tasks=1", "--env.isolation=confined"]
    status = main(argv)
    if status == 5:
        pytest.skip("no rung confined here")
    assert status == 3
    journal = next(Path("runs").glob("*/*/journal.jsonl")).read_text()
    assert "use userns or full" in journal
    assert "trajectory" not in journal


def test_a_data_set_with_bad_rows_goes_on_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    good = {
        "id": "one",
        "question": "Write f into solution.py.",
        "entry_point": "f",
        "test": "assert f('\"$') == '\"$'",
    }
    good["solution"] = "def f(x): return x\n"
    rows = [good, {"id": "two"}, {**good, "id": "wrong", "solution": "def f(x): pass\n"}, good]
    rows.append({**good, "id": "idle", "entry_point": "", "test": "assert 1 + 1 == 2"})
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{torn\n")
    argv = ["run", ENVIRONMENT, "process", "--env.dataset_name=tasks.jsonl", "--env.dataset_fields", "prompt=question"]
    argv += ["--env.group_size=1", "--policy=oracle", "--env.data_path_to_save_groups=groups.jsonl"]
    with caplog.at_level(logging.WARNING):
        assert main(argv) == 3
    check_message(caplog.messages, "row 2", "'question'")
    assert "one: another task" in caplog.text
    assert "row 6: not JSON" in caplog.text
    (line,) = [json.loads(line) for line in Path("groups.jsonl").read_text().splitlines()]
    assert (line["task_id"], line["scores"]) == ("one", [1.0])
    journal = next(Path("runs").glob("*/*/journal.jsonl")).read_text()
    assert "wrong: its reference solution" in journal
    assert "idle: its tests pass" in journal


@pytest.mark.parametrize(
    ("most", "found"), [(0, [False, True, False, True]), (1, [False, True]), (2, [False, True, False, True])]
)
async def test_unusable_rows_do_not_count(tmp_path: Path, most: int, found: list[bool]) -> None:
    good = {"prompt": "Write f into solution.py.", "entry_point": "f", "test": "assert f(1) == 1"}
    rows = [{"id": "a"}, {**good, "id": "b"}, {"id": "c"}, {**good, "id": "d"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = HermesSweEnvConfig(dataset_name=str(tmp_path / "rows.jsonl"), max_items=most)
    loaded = await HermesSweEnvironment(config).load()
    assert [not isinstance(each, TaskError) for each in loaded] == found


def test_the_settings_are_those_of_the_environment() -> None:
    config = HermesSweEnvConfig()
    assert (config.dataset_name, config.allow_network, config.held_out) == ("built-in", False, 0.0)
