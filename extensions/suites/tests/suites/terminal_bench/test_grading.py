"""Miniature tasks through the real loop, slots and grading: whose fault what is, and what is paid."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from palaestra.envs.config.build import make_pool
from palaestra_audit.cheats.proof import BANK, EnvironmentProof, cheats_named
from palaestra_suites.terminal_bench.find_tasks import load_tasks
from palaestra_suites.terminal_bench.import_tasks import Finding, import_tasks
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.terminal_bench.verifier import VerifierVerdict
from palaestra_suites.toolchain.toolchain import DependencyCache
from roots import make_root
from suites.terminal_bench.conftest import Try, played_all
from suites.terminal_bench.mini import HARBOR, TASKS, copied

pytestmark = [pytest.mark.slots, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[5]
SCRIPT = ROOT / "environments/terminalbench_2_env.py"

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="other users of a slot need root")

IN_AN_IMAGE = (
    "greeting,in-tmp,settings,as-a-user,partial,word-counts,hello,older-bootstrap,typed-solution,in-an-archive"
)


def test_good_tasks_of_both_formats(try_tasks: Try) -> None:
    lines = try_tasks(TASKS, task_filter="greeting,hello")
    good = {name: line for name, line in lines.items() if line.finding is not Finding.REFUSED}
    assert set(good) == {"greeting", "hello"}
    for line in good.values():
        assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0)


@pytest.mark.parametrize(
    "wanted",
    [
        {"no-reward": "neither reward.json nor reward.txt", "not-a-number": "holds nan"},
        pytest.param(
            {
                "verifier-needs-network": "needs palaestra-no-such-package",
                "tests-do-not-load": "ran no test: ModuleNotFoundError: No module named 'no_such_distribution'",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["rewards", "tests"],
)
def test_a_verifier_that_said_nothing_is_at_fault(try_tasks: Try, wanted: dict[str, str]) -> None:
    lines = try_tasks(task_filter=",".join(wanted))
    for name, message in wanted.items():
        line = lines[name]
        assert (line.finding, line.noop, line.solution) == (Finding.VERIFIER_FAILS, None, None), line
        assert message in line.reason


def test_the_last_output_and_exit_status_of_a_verifier_are_in_the_error_and_the_record(
    try_tasks: Try, tmp_path: Path
) -> None:
    silent = "#!/bin/bash\necho the compiler is missing\nexit 3\n"
    copied(HARBOR / "greeting", tmp_path, {"tests/test.sh": silent})
    (line,) = try_tasks(tmp_path).values()
    assert "(exit status 3)" in line.reason
    assert "the compiler is missing" in line.reason
    verdict = VerifierVerdict(0.0, {"reward": 0.0}, None, "the compiler is missing\n", 3)
    assert (verdict.detail()["exit_status"], verdict.detail()["output"]) == (3, "the compiler is missing\n")


def test_scripts_that_end_before_their_tests(try_tasks: Try, tmp_path: Path) -> None:
    gate = "#!/bin/bash\n[ -f hello.txt ] || { echo 0 > /logs/verifier/reward.txt; exit; }\n"
    reward = "echo 0 > /logs/verifier/reward.txt\n"
    fetch = "git clone https://palaestra.invalid/x || { echo Could not resolve host; " + reward.strip() + "; exit; }\n"
    scripts = {
        "gated": gate + "pytest /tests && echo 1 > /logs/verifier/reward.txt\n",
        "without": gate + "echo 1 > /logs/verifier/reward.txt\nexit\npytest /tests\n",
        "fetching": "#!/bin/bash\n" + fetch + "pytest /tests\n",
        "elsewhere": "#!/bin/bash\n/nowhere/bin/uvx pytest /tests\n" + reward,
    }
    for name, text in scripts.items():
        copied(HARBOR / "greeting", tmp_path, {"tests/test.sh": text}).rename(tmp_path / name)
    lines = try_tasks(tmp_path)
    gated = lines["gated"]
    assert (gated.finding, gated.noop, gated.solution) == (Finding.GOOD, 0.0, 1.0), gated
    assert (lines["without"].finding, lines["without"].noop) == (Finding.VERIFIER_FAILS, None)
    assert "ran no test" in lines["without"].reason
    assert lines["fetching"].finding is Finding.VERIFIER_FAILS
    assert "needs the network" in lines["fetching"].reason
    assert lines["elsewhere"].finding is Finding.VERIFIER_FAILS
    assert "No such file or directory" in lines["elsewhere"].reason


@pytest.mark.parametrize("ending", ["kill -KILL $PPID", "echo exit 0 > /tests/test.sh; kill -KILL $PPID"])
def test_work_that_ends_the_verifier_scores_nothing(
    installed_pytest: DependencyCache, tmp_path: Path, ending: str
) -> None:
    files = {
        "tests/test.sh": "#!/bin/bash\n[ -f work.sh ] && bash work.sh\npytest /tests\n"
        "echo 0 > /logs/verifier/reward.txt\n",
    }
    copied(HARBOR / "greeting", tmp_path / "tasks", files)
    works = {"greeting": f"echo 'echo 1 > /logs/verifier/reward.txt; {ending}' > work.sh"}
    found = played_all(tmp_path / "tasks", installed_pytest, tmp_path, works)["greeting"]
    assert found.reward == 0.0, (found.error, found.detail)


def test_tasks_that_cannot_be_trusted_are_named(try_tasks: Try) -> None:
    names = "wrong-solution,pays-for-nothing,no-solution,does-not-build,only-an-image,broken-toml"
    lines = try_tasks(task_filter=names)
    assert lines["wrong-solution"].finding is Finding.SOLUTION_FAILS
    assert lines["wrong-solution"].solution == 0.0
    assert "assert '41' == '42'" in lines["wrong-solution"].reason
    assert lines["pays-for-nothing"].finding is Finding.NOOP_PASSES
    assert lines["no-solution"].finding is Finding.UNPROVEN
    assert lines["does-not-build"].finding is Finding.REFUSED
    assert (
        "Dockerfile, line 3: RUN echo this cannot work && false failed: Exit code: 1" in lines["does-not-build"].reason
    )
    assert "it has no Dockerfile" in lines["only-an-image"].reason
    assert lines["broken-toml"].finding is Finding.REFUSED


def test_tasks_without_a_solution_are_tried_with_doing_nothing(try_tasks: Try, tmp_path: Path) -> None:
    pays, crashes = "echo 1 > /logs/verifier/reward.txt\n", "exit 3\n"
    for name, text in {"pays": pays, "crashes": crashes}.items():
        task = copied(HARBOR / "no-solution", tmp_path, {"tests/test.sh": f"#!/bin/bash\n{text}"})
        task.rename(tmp_path / name)
    lines = try_tasks(tmp_path)
    assert lines["pays"].finding is Finding.NOOP_PASSES
    assert lines["crashes"].finding is Finding.VERIFIER_FAILS


def test_a_source_without_usable_tasks_is_reported_with_the_reasons(tmp_path: Path) -> None:
    copied(HARBOR / "broken-toml", tmp_path)
    report = import_tasks(str(tmp_path), [f"--env.cache_dir={tmp_path / 'cache'}", "--env.base_image=host"])
    assert [(line.name, line.finding) for line in report.lines] == [("broken-toml", Finding.REFUSED)]
    assert "TOML" in report.lines[0].reason


def test_no_more_tasks_are_tried_than_a_user_asks_for(tmp_path: Path) -> None:
    for name in ("one", "two"):
        copied(HARBOR / "no-solution", tmp_path, {"tests/test.sh": "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n"})
        (tmp_path / "no-solution").rename(tmp_path / name)
    settings = [f"--env.cache_dir={tmp_path / 'cache'}", "--env.base_image=host", "--tasks", "1"]
    assert [line.finding for line in import_tasks(str(tmp_path), settings).lines] == [Finding.UNPROVEN]


def test_the_first_version_of_the_format_is_read(tmp_path: Path) -> None:
    text = (HARBOR / "greeting/task.toml").read_text()
    old = re.sub(r'(?m)^(schema_)?version = ".*"$', 'version = "0.1"', text)
    assert old != text
    copied(HARBOR / "greeting", tmp_path, {"task.toml": old})
    loaded = load_tasks(str(tmp_path), tmp_path / "cache")
    assert [task.name for task in loaded.tasks] == ["greeting"], loaded.left_out


@pytest.mark.slow
def test_a_missing_module_of_the_work_is_a_failure_and_not_the_graders(try_tasks: Try) -> None:
    line = try_tasks(HARBOR / "import-the-work")["import-the-work"]
    assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0)


@pytest.mark.slow
def test_a_service_is_graded_where_it_runs(try_tasks: Try, tmp_path: Path) -> None:
    assert try_tasks(HARBOR / "web-service")["web-service"].finding is Finding.GOOD
    quiet = copied(HARBOR / "web-service", tmp_path, {"task.toml": ""})
    line = try_tasks(quiet)["web-service"]
    assert (line.finding, line.solution) == (Finding.GOOD, 1.0), line
    assert try_tasks(quiet, live_tasks="web-*")["web-service"].finding is Finding.GOOD


CHEATS = {
    "fake-program": "printf '#!/bin/sh\\necho 3\\n' > /usr/local/bin/grep; chmod 755 /usr/local/bin/grep\n"
    "printf '#!/bin/sh\\necho 3\\n' > /tmp/x; cp /tmp/x /usr/bin/tr; cp /tmp/x /usr/bin/bash\n",
    "planted": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; mkdir -p /tests; echo x > /tests/test.sh\n"
    "mkdir -p /opt/palaestra/verifier/bin; cp /bin/true /opt/palaestra/verifier/bin/uvx; cp /bin/true /usr/bin/uvx\n",
    "forged-reports": "cat > shapes.py <<'END'\nimport _pytest.reports as r\n"
    "make = r.TestReport.from_item_and_call.__func__\n"
    "def forced(cls, item, call):\n report = make(cls, item, call)\n report.outcome = 'passed'\n return report\n"
    "r.TestReport.from_item_and_call = classmethod(forced)\narea = lambda *a: 0\nEND\n",
    "debugger": "echo 'area = lambda *a: 0' > shapes.py\n" + cheats_named(["stolen-descriptors"])[0].script,
    "overwritten": "echo 'area = lambda *a: 0' > shapes.py\n" + cheats_named(["overwritten-memory"])[0].script,
    "daemon": "(setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' &) 2>&1\n",
}


@pytest.mark.parametrize(
    ("task", "cheat"),
    [
        ("partial", "fake-program"),
        pytest.param("greeting", "planted", marks=pytest.mark.slow),
        pytest.param("import-the-work", "forged-reports", marks=pytest.mark.slow),
        pytest.param("import-the-work", "debugger", marks=pytest.mark.slow),
        pytest.param("import-the-work", "overwritten", marks=pytest.mark.slow),
        pytest.param("web-service", "daemon", marks=pytest.mark.slow),
    ],
)
def test_what_speaks_in_the_verifiers_place_is_not_paid(
    installed_pytest: DependencyCache, tmp_path: Path, task: str, cheat: str
) -> None:
    found = played_all(HARBOR / task, installed_pytest, tmp_path, {task: CHEATS[cheat]})[task]
    assert found.reward == 0.0, found.labels


RECORDS = {
    "unmet": '{"kind": "unmet", "what": "a package"}',
    "broken": '{"kind": "test"}',
    "not a list": '{"kind": "collected", "node_ids": 7}',
    "deep": "[" * 5000,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in RECORDS])
def test_work_that_writes_records_does_not_escape_its_score(try_tasks: Try, tmp_path: Path, name: str) -> None:
    """A program of the work that the verifier starts holds the verdict's descriptor."""
    solve = f"#!/bin/bash\ncat > area.sh <<'END'\nprintf '%s\\n' '{RECORDS[name]}' >&3 2>/dev/null\nexit 1\nEND\n"
    stock = (HARBOR / "import-the-work/tests/test.sh").read_text()
    files = {
        "solution/solve.sh": solve,
        "tests/test.sh": stock.replace("uvx", "bash ./area.sh\nuvx", 1),
        "tests/test_outputs.py": "def test_it():\n    assert open('/app/area.txt').read() == '12'\n",
    }
    line = try_tasks(copied(HARBOR / "import-the-work", tmp_path, files))["import-the-work"]
    assert (line.noop, line.solution) == (0.0, 0.0), line


@pytest.mark.slow
@AS_ROOT
def test_an_image_without_python_and_a_user_of_its_own(try_tasks: Try, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    lines = try_tasks(HARBOR, base_image=str(root), task_filter="as-a-user,greeting")
    for name in ("as-a-user", "greeting"):
        assert lines[name].finding is Finding.GOOD, lines[name]


def test_a_ready_root_needs_no_build(try_tasks: Try, tmp_path: Path) -> None:
    roots = tmp_path / "roots"
    roots.mkdir()
    root = make_root(roots / "word-counts")
    (root / "app").mkdir()
    (root / "app/text.txt").write_text((HARBOR / "word-counts/environment/text.txt").read_text())
    settings = {"base_image": None, "image_dir": str(roots), "builder": "palaestra-no-such-builder"}
    lines = try_tasks(HARBOR, task_filter="word-counts,partial", **settings)
    assert lines["word-counts"].finding is Finding.GOOD, lines["word-counts"]
    assert lines["partial"].finding is Finding.REFUSED
    assert "none of palaestra-no-such-builder is installed" in lines["partial"].reason
    assert "--env.image_dir" in lines["partial"].reason


def test_an_evaluation_from_the_command_line_and_its_resumption(tmp_path: Path) -> None:
    settings = ["--env.dataset_name", str(HARBOR), "--env.base_image", "host", "--env.group_size", "2"]
    settings += ["--env.task_filter", "category:text,partial", "--env.skip_tasks", "solution-*"]
    settings += ["--env.data_dir_to_save_evals", "evals", "--policy", "oracle", "--env.cache_dir", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), "evaluate", *settings]
    short = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert short.returncode == 3, "eight tasks are refused, each with two rollouts"
    assert "those of 8 refused tasks included" in short.stderr
    shutil.rmtree(tmp_path / "runs")
    command += ["--env.max_failures", "16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "left out: broken-toml: task.toml is not TOML" in done.stderr
    results = json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]
    assert (results["tasks"], results["attempts"], results["pass_rate"]) == (2, 4, 1.0)
    assert (results["pass@2"], results["category/text/pass@1"], results["tasks_left_out"]) == (1.0, 1.0, 8)
    assert results["pass@1/low"] < 0.5
    samples = [json.loads(line) for line in (tmp_path / "evals/samples.jsonl").read_text().splitlines()]
    assert [(sample["task_name"], sample["attempt"], sample["passed"]) for sample in samples] == [
        ("partial", 0, True), ("partial", 1, True), ("word-counts", 0, True), ("word-counts", 1, True),
    ]  # fmt: skip
    (run,) = (tmp_path / "runs").glob("*/*")
    again = subprocess.run([*command, "--resume", str(run)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"] == results


@pytest.mark.slow
@AS_ROOT
def test_every_task_that_an_image_can_have(try_tasks: Try, tmp_path: Path) -> None:
    lines = try_tasks(TASKS, base_image=str(make_root(tmp_path / "root")), task_filter=IN_AN_IMAGE)
    assert {name for name, line in lines.items() if line.finding is Finding.GOOD} == set(IN_AN_IMAGE.split(","))


@pytest.mark.slow
def test_the_rest_over_the_hosts_own_programs(try_tasks: Try) -> None:
    names = "solution-with-files,sum-program,one-of-two"
    lines = try_tasks(TASKS, task_filter=names)
    assert [lines[name].finding for name in names.split(",")] == [Finding.GOOD, Finding.GOOD, Finding.SOLUTION_FAILS]
    assert lines["one-of-two"].solution == 0.0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_cheat_of_the_bank_is_paid(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    settings = (HARBOR / "word-counts/task.toml").read_text().replace("timeout_sec = 60.0", "timeout_sec = 15.0")
    copied(HARBOR / "word-counts", tmp_path / "tasks", {"task.toml": settings})  # some cheats hang their verifier
    config = TerminalBench2EvalConfig(
        dataset_name=str(tmp_path / "tasks"), base_image="host", cache_dir=str(tmp_path / "cache")
    )
    async with make_pool(config) as pool:
        environment = TerminalBenchEnvironment(config, installed_pytest)
        await environment.open()
        proof = await EnvironmentProof(environment, pool).run(1)
    assert proof.proven
    assert proof.holds, [line for line in proof.lines if not line.ok]
    assert len(proof.lines) == len(BANK) + 2


STARTED = {
    "inherited": "import json, os, signal\n"
    "def send(**r): os.write(3, json.dumps(r).encode() + b'\\n')\n"
    "send(kind='start'); send(kind='collected', node_ids=['../tests/test_outputs.py::test_it'])\n"
    "send(kind='test', node_id='../tests/test_outputs.py::test_it', when='call', outcome='passed', wasxfail=False,\n"
    "     marked=False, duration_s=0, failure=None)\n"
    "send(kind='finish', exit_status=0)\n"
    "open('/logs/verifier/reward.txt', 'w').write('1')\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "replaced": "text = open('/tests/test_outputs.py').read()\n"
    "if 'finally' in text: raise SystemExit\n"
    "open('/tests/test_outputs.py', 'w').write(f'open(__file__, \"w\").write({text!r})\\ndef test_it(): pass\\n')\n",
    "shim": "open('/opt/palaestra/verifier/bin/uvx', 'w').write('exit 0')\n"
    "open('/logs/verifier/reward.txt', 'w').write('1')\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_a_program_that_the_verifier_starts_forges_nothing(
    installed_pytest: DependencyCache, tmp_path: Path, name: str
) -> None:
    stock = (HARBOR / "import-the-work/tests/test.sh").read_text()
    files = {
        "solution/solve.sh": '#!/bin/bash\necho \'open("area.txt", "w").write("12")\' > area.py\n',
        "tests/test.sh": stock.replace("uvx", "python3 ./area.py\nuvx", 1),
        "tests/test_outputs.py": "def test_it():\n    assert open('/app/area.txt').read() == '12'\n",
    }
    copied(HARBOR / "import-the-work", tmp_path / "tasks", files)
    works = {"import-the-work": f"cat > area.py <<'END'\n{STARTED[name]}END\n"}
    found = played_all(tmp_path / "tasks", installed_pytest, tmp_path, works)["import-the-work"]
    assert found.reward == 0.0, (found.error, found.detail)
