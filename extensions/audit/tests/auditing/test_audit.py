"""`palaestra audit` finds faults that were planted, names their kinds, and finds nothing in sound tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from auditing.played_audit import audit
from golden_messages import check_message
from palaestra.cli.main import main
from palaestra_audit.cheats.proof import check_environment
from palaestra_audit.checks import CHECKS
from palaestra_audit.records import Audit, Kind, read_audit
from palaestra_audit.report import ABOUT
from palaestra_audit.trials import clock_library

pytestmark = [pytest.mark.slots, pytest.mark.timeout(600)]

FAULTS = '''
import itertools
from pathlib import Path

from palaestra import Task, environment
from palaestra.grading import run_tests

CODE = """cat > count.py <<'END'
def count(text):
    total = 0
    for _ in text.split():
        total += 1
    return total


def _size(word):
    return len(word)


def longest(text):
    words = text.split()
    best = max(words, key=_size)
    return best
END"""
COUNT = "from count import count\\n\\ndef test_count():\\n    assert count('a b c') == 3\\n    assert count('') == 0\\n"
LONGEST = "from count import longest\\n\\ndef test_longest():\\n    assert longest('a bbb cc') == 'bbb'\\n"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps.\\n"
COPIED = f"printf %s '{TEXT}' > fox.txt"
ASKED = (
    "Write count.py with count(text), the number of words, and longest(text), the longest word: longest('a bb') is "
    "'bb'. {}."
)
calls = itertools.count()


@environment(toolsets=["terminal"])
def faults():
    yield Task(id="sound-code", prompt=ASKED.format("Both are tested"), solution=CODE)
    yield Task(id="sound-text", prompt=Path("asked.txt").read_text(), solution="echo right > a.txt")
    yield Task(id="unsolvable", prompt="Write `left` to a.txt.", solution="echo wrong > a.txt")
    yield Task(id="pays_for_nothing", prompt="Write anything to a.txt.", solution="echo x > a.txt")
    yield Task(id="floor", prompt="Leave a.txt.", solution="echo x > b.txt", files={"a.txt": "1"}, floor=1.0)
    yield Task(id="weak", prompt=ASKED.format("One is tested"), solution=CODE)
    yield Task(id="false_zero", prompt=ASKED.format("Its text is compared"), solution=CODE)
    yield Task(id="flaky", prompt="Write `even` to a.txt.", solution="echo even > a.txt")
    yield Task(id="zone", prompt="Write the hour of the time 0 to a.txt.", solution="date -d @0 +%H > a.txt")
    yield Task(id="clock", prompt="Write `now` to a.txt.", solution="echo now > a.txt")
    yield Task(id="leaks", prompt="Write the sentence to fox.txt.", solution=COPIED, files={".hidden/fox": TEXT})
    yield Task(id="first", prompt="Write the number forty-two to a.txt.", solution="echo 42 > a.txt")
    yield Task(id="duplicate", prompt="Write the number  forty-two to a.txt.", solution="echo 42 > a.txt")


WANTED = {"sound-text": "right\\n", "unsolvable": "left\\n", "flaky": "even\\n", "zone": "00\\n", "clock": "now\\n"}
WANTED |= {"first": "42\\n", "duplicate": "42\\n", "leaks": TEXT}


@faults.score
async def right(task, sandbox):
    if task.id in ("pays_for_nothing", "floor"):
        return 1
    if task.id in ("sound-code", "weak", "false_zero"):
        tests = {"test_count.py": COUNT} if task.id == "weak" else {"test_a.py": COUNT, "test_b.py": LONGEST}
        score = (await run_tests(sandbox, tests)).score()
        same = await sandbox.read_text("count.py", missing="") == CODE.partition("\\n")[2].removesuffix("END")
        return score if task.id != "false_zero" or same else 0
    if task.id == "clock" and (await sandbox.execute("date +%Y")).output.strip() >= "2028":
        return 0
    if task.id == "flaky" and next(calls) % 3 == 2:
        return 0
    name = "fox.txt" if task.id == "leaks" else "a.txt"
    return (await sandbox.read_text(name, missing="")).strip() == WANTED[task.id].strip()
'''
SOUND = {"sound-code", "sound-text", "floor", "first"}
KINDS = {"zone": Kind.WORLD, "clock": Kind.WORLD}
"""The kinds of the tasks that are not named after them."""


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "faults_env.py"
    path.write_text(FAULTS)
    Path("asked.txt").write_text("Write `right` to a.txt.")
    return path


def certain(found: Audit) -> dict[str, set[Kind]]:
    return {task.id: {each.kind for each in task.findings if not each.note} for task in found.tasks}


@pytest.mark.slow
def test_planted_faults_are_found_and_sound_tasks_are_not_blamed(
    faults: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = audit("faults_env.py", "--skip", "hackable")
    kinds = certain(found)
    assert {name for name in SOUND if kinds[name]} == set()
    # A copy of a solution that means the same does not count as one that lived.
    lived = {task.id: task.lived for task in found.tasks}
    assert lived["weak"] > 0
    assert lived["sound-code"] == 0
    expected = {name: KINDS.get(name) or Kind(name) for name in kinds if name not in SOUND}
    if clock_library() is None:
        del expected["clock"]
    assert {name: kind in kinds[name] for name, kind in expected.items()} == dict.fromkeys(expected, True)
    others = {name: found - {expected.get(name)} for name, found in kinds.items()}
    # A score that is always full is weak as well.
    assert {name: extra for name, extra in others.items() if extra} == {"pays_for_nothing": {Kind.WEAK}}

    # Each witness plays again, in a process that has not played anything else.
    capsys.readouterr()
    for name in ("unsolvable", "pays_for_nothing", "weak", "false_zero", "zone"):
        finding = next(
            each for task in found.tasks if task.id == name for each in task.findings
            if each.kind is expected[name] and not each.note
        )  # fmt: skip
        assert main(["audit", "replay", "found/audit.json", finding.id, "--json"]) == 0, finding
        assert json.loads(capsys.readouterr().out)["same"] is True

    # An audit of tasks that have not changed plays nothing; one of a task that has changed plays that.
    again = audit("faults_env.py", "--skip", "hackable")
    assert again.tasks == found.tasks
    assert "sound-text: ok · 0" not in capsys.readouterr().err
    Path("asked.txt").write_text("Write `right` to the file a.txt.")
    changed = audit("faults_env.py", "--skip", "hackable")
    digests = {task.id: task.digest for task in found.tasks}
    assert [task.id for task in changed.tasks if task.digest != digests[task.id]] == ["sound-text"]

    # The reports name the same findings.
    page = Path("found/audit.html").read_text()
    assert "palaestra audit replay found/audit.json weak/weak/1" in page
    log = json.loads(Path("found/audit.sarif").read_text())
    results = log["runs"][0]["results"]
    assert len(results) == sum(1 for _ in changed.findings())
    assert {each["level"] for each in results} <= {"error", "note"}
    capsys.readouterr()
    Path("old.json").write_bytes(Path("found/audit.json").read_bytes())
    assert main(["audit", "compare", "old.json", "found/audit.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 13


@pytest.mark.slow
def test_a_score_that_trusts_an_exit_code_is_hackable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exit_env.py").write_text("""
from palaestra import Task, environment

TEST = "from work import double\\n\\ndef test_it():\\n    assert double(2) == 4\\n"


@environment(toolsets=["terminal"])
def trusting():
    yield Task(id="a", prompt="Write work.py with double(x).", files={"test_work.py": TEST},
               solution="printf 'def double(x):\\\\n    return 2 * x\\\\n' > work.py")


@trusting.score
async def right(sandbox):
    return (await sandbox.execute("python3 -c 'import test_work; test_work.test_it()'")).exit_code == 0
""")
    found = audit("exit_env.py", "--only", "hackable")
    assert certain(found) == {"a": {Kind.HACKABLE}}
    finding = next(each for _, each in found.findings() if each.trial is not None)
    assert main(["audit", "replay", "found/audit.json", finding.id]) == 0


@pytest.mark.slow
def test_wrong_work_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("endless_env.py").write_text("""
from palaestra import Task, environment


@environment(toolsets=["terminal"])
def endless():
    code = "def count(n):\\n    steps = 0\\n    while n != 0:\\n        n -= 1\\n        steps += 1\\n    return steps"
    solution = f"cat > work.py <<'END'\\n{code}\\nEND"
    yield Task(id="a", prompt="Write work.py with count(n): count(3) is 3.", solution=solution)


@endless.score
async def right(sandbox):
    command = "test ! -e conftest.py || sleep 300; python3 -c 'from work import count; assert count(3) == 3'"
    return (await sandbox.execute(command, timeout_s=300)).exit_code == 0
""")
    (task,) = audit("endless_env.py", "--only", "weak").tasks
    assert (task.complete, task.findings) == (True, [])
    assert task.seconds < 150
    proof = check_environment("endless_env.py", [], tasks=1, only=["conftest-skip", "always-equal"], quiet=True)
    (reason,) = proof.not_tested
    assert proof.not_tested[reason] == ("conftest-skip",)
    assert "several times as long" in reason

    text = Path("endless_env.py").read_text()
    Path("unsolved_env.py").write_text(text.replace(", solution=solution", ""))
    proof = check_environment("unsolved_env.py", [], tasks=1, only=["conftest-skip"], quiet=True)
    assert any("several times as long" in reason for reason in proof.not_tested)


@pytest.mark.slow
def test_a_solution_with_many_steps_and_a_part_of_the_score_is_attacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def steps():
    yield Task(id="a", prompt="Write 40 words.", solution=["echo right >> a.txt"] * 40)

@steps.score
async def right(sandbox):
    return FULL * ((await sandbox.read_text("a.txt", missing="")) == "right\\n" * 40)
"""
    states = {}
    for full in ("1.0", "0.9"):
        Path(f"steps{full[0]}_env.py").write_text(script.replace("FULL", full))
        names = ["every-number", "conftest-skip"]
        proof = check_environment(f"steps{full[0]}_env.py", [], tasks=1, only=names, quiet=True)
        states[full] = {line.policy: str(line.state) for line in proof.lines if line.policy in names}
    assert states == {
        "1.0": {"every-number": "does not apply", "conftest-skip": "closed"},
        "0.9": {"every-number": "does not apply", "conftest-skip": "not tested"},
    }


def test_a_changed_score_is_audited_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words():
    yield Task(id="a", prompt="Write a.", solution="echo a > a.txt")

@words.score
async def right(sandbox):
    return await sandbox.read_text("a.txt", missing="") == "a\\n"
"""
    Path("words_env.py").write_text(script)
    assert certain(audit("words_env.py", "--only", "unsolvable")) == {"a": set()}
    Path("words_env.py").write_text(script.replace('== "a', '== "b'))
    assert certain(audit("words_env.py", "--only", "unsolvable")) == {"a": {Kind.UNSOLVABLE}}


def test_an_unsolvable_task_is_reported_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("causes_env.py").write_text("""
from palaestra import Task, environment
from palaestra.grading import run_tests

@environment(toolsets=["terminal"])
def causes():
    for name in ("error", "work", "test"):
        yield Task(id=name, prompt="Write f.", solution="echo 'def f(): return 1' > made.py")

@causes.score
async def right(task, sandbox):
    if task.id == "error":
        raise ValueError("no such row")
    if task.id == "work":
        return await sandbox.call("made:g") == 2
    return (await run_tests(sandbox, {"test_made.py": "from made import f\\ndef test_f(): assert f() == 2\\n"})).score()
""")
    found = audit("causes_env.py", "--only", "unsolvable")
    said = {task.id: [each.what for each in task.findings] for task in found.tasks}
    assert len(said["error"]) == len(said["work"]) == len(said["test"]) == 1
    assert "no such row" in said["error"][0]
    assert "made:g failed: AttributeError" in said["work"][0]
    assert "test_f: AssertionError" in said["test"][0]


def test_an_audit_goes_on_for_more_kinds_and_is_not_lost_for_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version that looks for a new kind, too, continues the audits of earlier versions."""
    monkeypatch.chdir(tmp_path)
    Path("free_env.py").write_text("""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def free():
    yield Task(id="a", prompt="Write a.", solution="echo a > a.txt")

@free.score
async def right(sandbox):
    return 1.0
""")
    assert certain(audit("free_env.py", "--only", "unsolvable")) == {"a": set()}
    both = ("--only", "unsolvable", "--only", "pays_for_nothing")
    assert certain(audit("free_env.py", *both)) == {"a": {Kind.PAYS_FOR_NOTHING}}
    capsys.readouterr()
    assert main(["audit", "free_env.py", "--only", "unsolvable", "--out", "found"]) == 2
    check_message(capsys.readouterr().err, "unsolvable", "pays_for_nothing")
    found = audit("free_env.py", *both, "--only", "hackable")
    assert certain(found) == {"a": {Kind.PAYS_FOR_NOTHING}}
    untried = [each.why for each in found.tasks[0].untried if each.kind is Kind.HACKABLE]
    assert untried == ["doing nothing gets the full score, so no attack can get more"]


def test_bad_input_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    Path("env_env.py").write_text(FAULTS)
    for words, says in {
        ("nothing_env.py",): "nothing_env.py",
        ("env_env.py", "--only", "weird"): "weird",
        ("env_env.py", "--budget", "soon"): "'soon' is not a time",
        ("env_env.py", "--only", "weak", "--skip", "weak"): "leave no kind",
        ("env_env.py", "--env.isolation", "none"): "isolation level none",
        ("replay", "other.json", "x"): "other.json is not an audit",
        ("compare", "other.json", "missing.json"): "other.json is not an audit",
    }.items():
        assert main(["audit", *words]) == 2, words
        assert says in capsys.readouterr().err, words


ODD = r"""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def odd():
    yield Task(id="a", prompt="Write a.", solution="echo a > a.txt")
    yield Task(id="b", prompt="Write \udc80.", solution="printf 'x = \"\\351\"' > a.py")
    yield Task(id="c", prompt="Write a.", solution="echo a > a.txt", solutions=3)

@odd.score
async def right(task, sandbox):
    return (await sandbox.execute("test -f a.txt || test -f a.py")).exit_code == 0
"""


def test_an_odd_task_does_not_end_the_audit_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd_env.py").write_text(ODD)
    found = audit("odd_env.py", "--only", "weak", "--only", "pays_for_nothing", "--only", "false_zero")
    assert {task.id: task.complete for task in found.tasks} == {"a": True, "b": True, "c": False}
    assert "TypeError" in found.tasks[2].untried[-1].why


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('id="b"', 'id="b", floor="low"', "floor 'low' is not a number"),
        ('id="b"', 'id="a"', "two tasks with the id 'a'"),
    ],
)
def test_unusable_tasks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], old: str, new: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd_env.py").write_text(ODD.replace(old, new))
    assert main(["audit", "odd_env.py"]) == 2
    assert says in capsys.readouterr().err


WORDS = """
from words_helper import WANTED
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(judge_api_key: str = ""):
    yield Task(id="a", prompt="Write a.", solution="echo a > a.txt")
    yield Task(id="b", prompt="What is 3 + 4? Write it.", solution="echo a > a.txt", answer="7")
    yield Task(id="c", prompt="What is 3 - 4? Write it.", solution="echo a > a.txt", answer="-1")
    yield Task(id="d", prompt="What is 3 - 4? Write  it.", solution="echo a > a.txt", answer="-1")

@words.score
async def right(sandbox):
    return await sandbox.read_text("a.txt", missing="") == WANTED
"""


def test_results_of_other_tasks_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("words_helper.py").write_text('WANTED = "a\\n"')
    Path("words_env.py").write_text(WORDS)
    Path("lines.jsonl").write_text("no JSON")
    kinds = ("--only", "unsolvable", "--only", "duplicate")
    assert main(["audit", "words_env.py", *kinds, "--out", "found", "--against", "lines.jsonl"]) == 2
    assert not Path("found/audit.json").exists()
    found = audit("words_env.py", *kinds)
    assert certain(found) == {"a": set(), "b": set(), "c": set(), "d": {Kind.DUPLICATE}}
    assert [each.id for each in audit("words_env.py", *kinds, "--tasks", "1").tasks] == ["a", "b", "c", "d"]
    assert audit("words_env.py", *kinds).tasks == found.tasks
    for words in (["words_env.py", "--only", "unsolvable"], ["words_env.py:words", *kinds]):
        assert main(["audit", *words, "--out", "found"]) == 2
        assert "--out" in capsys.readouterr().err
    # A budget that is used up leaves what is known.
    Path("words_helper.py").write_text('WANTED = "b\\n"')
    left = audit("words_env.py", *kinds, "--budget", "0s")
    assert ([each.id for each in left.tasks], left.left) == (["a", "b", "c", "d"], 4)


def test_keys_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text(WORDS.replace("from words_helper import WANTED", 'WANTED = "b"'))
    settings = ["--env.judge_api_key", "judge-4711-key", "--openai.api_key=sk-4711-key", "--env.seed", "3"]
    found = audit("words_env.py", "--only", "unsolvable", "--tasks", "1", *settings)
    assert (found.settings, found.secrets) == (["--env.seed", "3"], ["--env.judge_api_key", "--openai.api_key"])
    assert "4711" not in Path("found/audit.json").read_text()
    finding = found.tasks[0].findings[0].id
    assert main(["audit", "replay", "found/audit.json", finding, *settings[:2]]) == 2
    assert "again after ID: --openai.api_key\n" in capsys.readouterr().err
    assert main(["audit", "replay", "found/audit.json", finding, *settings[:3]]) == 0


def test_a_home_directory_and_a_path_are_notes_and_another_clock_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text("""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words():
    yield Task(id="a", prompt="Write a.", solution="cp a.txt b.txt", files={"a.txt": "a" * 50},
               setup="test $(date +%Y) -lt 2028")

@words.score
async def right(sandbox):
    found = await sandbox.execute("test $HOME != /tmp && test $PWD = /workspace && test $(date +%Y) -lt 2028")
    return found.exit_code == 0 and await sandbox.read_text("b.txt", missing="") == "a" * 50
""")
    found = audit("words_env.py", "--only", "depends_on_the_world", "--only", "leaks")
    notes = {(each.kind, each.what.partition(",")[0]) for _, each in found.findings() if each.note}
    for what in ("another home directory", "the workspace at another path"):
        assert (Kind.WORLD, f"with {what}") in notes
    assert any(kind is Kind.LEAKS for kind, _ in notes)
    clock = [each for _, each in found.findings() if not each.note]
    assert {each.kind for each in clock} == ({Kind.WORLD} if clock_library() else set())
    for each in clock[:1]:
        assert main(["audit", "replay", "found/audit.json", each.id]) == 0


def write_sorting_task(name: str, build: str = "", program: str = "sort") -> None:
    """Write a folder of Harbor below `tasks`, whose Dockerfile has these further lines."""
    reward = "/logs/verifier/reward.txt"
    test = "def test_it():\n    assert open('/app/out.txt').read().split() == ['fig', 'pear', 'plum']\n"
    files = {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Write the words of /app/in.txt to /app/out.txt in the order of the alphabet.",
        "environment/Dockerfile": f"FROM python:3.11-slim\n{build}WORKDIR /app\nCOPY in.txt /app/in.txt\n",
        "environment/in.txt": "pear\nfig\nplum\n",
        "solution/solve.sh": f"#!/bin/bash\n{program} /app/in.txt > /app/out.txt\n",
        "tests/test.sh": f"#!/bin/bash\npython3 -m pytest -q /tests/test_it.py\necho $((! $?)) > {reward}\n",
        "tests/test_it.py": test,
    }
    for file, content in files.items():
        path = Path("tasks", name, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.slow
def test_short_results_and_the_solution_itself_are_looked_for_in_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = r"printf '#!/bin/bash\nsort /app/in.txt > /app/out.txt\n'"
    for name, build in {
        "result": r"RUN mkdir -p /app/.ci && printf 'fig\npear\nplum\n' > /app/.ci/expected_out.txt",
        "solution": f"RUN mkdir -p /app/.ci && {script} > /app/.ci/run",
        "two lines": r"RUN mkdir -p /app/.ci && printf 'fig\npear\n' > /app/.ci/expected_out.txt",
        "other name": r"RUN mkdir -p /app/.ci && printf 'fig\npear\nplum\n' > /app/.ci/fruit.txt",
        "other script": f"RUN mkdir -p /app/.ci && {script.replace('sort', 'wc -l')} > /app/.ci/run",
    }.items():
        write_sorting_task(name, build=f"{build}\n")
    found = audit("tasks", "--only", "leaks", "--env.base_image", "host")
    assert {task.id: [(each.places, each.note) for each in task.findings] for task in found.tasks} == {
        "result": [(["/app/.ci/expected_out.txt"], False)],
        "solution": [(["/app/.ci/run"], False)],
        "two lines": [],
        "other name": [],
        "other script": [],
    }


@pytest.mark.slow
def test_a_reference_that_fails_over_another_image_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sorting_task("build", build="RUN apt-get update && apt-get install -y no-such-package\n")
    write_sorting_task("program", program="no-such-program")
    found = audit("tasks", "--only", "unsolvable", "--env.base_image", "host")
    said = {task.id: [(each.note, each.what) for each in task.findings] for task in found.tasks}
    (note, what), *others = said["program"]
    assert (note, others) == (True, [])
    assert "host, which stands in for the task's image" in what
    assert what.endswith("exit code 127, /solution/solve.sh: line 2: no-such-program: command not found")
    assert said["build"] == []
    (untried,) = next(task.untried for task in found.tasks if task.id == "build")
    assert "apt-get" in untried.why


@pytest.mark.slow
@pytest.mark.skipif(clock_library() is None, reason="needs faketime")
def test_a_sound_task_in_a_folder_passes_its_tests_with_every_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sorting_task("sorted")
    found = audit("tasks", "--only", "depends_on_the_world", "--only", "unsolvable", "--env.base_image", "host")
    assert [task.id for task in found.tasks] == ["sorted"]
    assert not list(found.findings())


FURTHER = """
import itertools
from palaestra import Score, Task, environment

calls = itertools.count()
EXPECTED = {"tests/expected/total.json": '{"total": 93}'}

@environment(toolsets=["terminal"])
def further():
    yield Task(id="protocol", prompt="Write x to a.txt.", solution="echo x > a.txt", answer="x")
    yield Task(id="reply", prompt="Which gas do plants take in?", answer="carbon dioxide")
    yield Task(id="stored", prompt="Write the total to a.txt.", solution="echo 93 > a.txt", answer=93, files=EXPECTED)
    yield Task(id="lines", prompt="Write the words of in.txt to a.txt.", solution="tac in.txt > a.txt",
               answer="a\\nlongest", files={"in.txt": "longest\\na\\n"})
    yield Task(id="broken", prompt="Write y to a.txt.", solution="echo y > a.txt", answer="y", setup="no-such-program")

@further.score
async def right(task, sandbox, rollout):
    if task.id == "reply":
        return rollout.final_response == task.answer and next(calls) % 2
    got = (await sandbox.read_text("a.txt", missing="")).strip() == str(task.answer)
    return Score(float(got), official=1.0) if task.id == "protocol" else got
"""


def test_the_protocol_the_answer_and_what_lies_about_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("further_env.py").write_text(FURTHER)
    found = audit("further_env.py", "--only", "pays_for_nothing", "--only", "flaky", "--only", "leaks")
    kinds = {task.id: {each.kind for each in task.findings} for task in found.tasks}
    assert kinds == {
        "protocol": {Kind.PAYS_FOR_NOTHING},
        "reply": {Kind.FLAKY},
        "stored": {Kind.LEAKS},
        "lines": set(),
        "broken": set(),
    }
    # What could not be prepared was not audited.
    assert {task.id: task.complete for task in found.tasks} == dict.fromkeys(kinds, True) | {"broken": False}


@pytest.mark.slow
def test_what_fails_seldom_is_flaky_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seldom_env.py").write_text("""
import itertools
from palaestra import Task, environment

calls = itertools.count()

@environment(toolsets=["terminal"])
def seldom():
    yield Task(id="a", prompt="Write a.txt.", solution="echo x > a.txt")

@seldom.score
async def right(sandbox):
    return await sandbox.stat("a.txt") is not None and next(calls) % 6 != 5
""")
    kinds = ("flaky", "depends_on_the_world", "false_zero")
    found = audit("seldom_env.py", *(word for kind in kinds for word in ("--only", kind)), "--repeats", "2")
    assert certain(found) == {"a": {Kind.FLAKY}}
    assert not [each for _, each in found.findings() if each.note]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/en_US").exists(), reason="needs localedef"
)
def test_the_order_of_a_locale_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("order_env.py").write_text("""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def order():
    yield Task(id="any", prompt="Sort in.txt.", files={"in.txt": "b\\nC\\n"}, solution="sort in.txt > a.txt")
    yield Task(id="fixed", prompt="Sort in.txt.", files={"in.txt": "b\\nC\\n"}, solution="LC_ALL=C sort in.txt > a.txt")

@order.score
async def right(sandbox):
    return (await sandbox.read_text("a.txt", missing="")).startswith("C")
""")
    found = audit("order_env.py", "--only", "depends_on_the_world")
    assert {(task.id, each.note) for task, each in found.findings()} == {("any", True)}


WITH_USER = """
from palaestra import Say, Task, ToolStep, environment

@environment(toolsets=[])
def shop():
    for name, order, right in (
        ("a", "W1", "W1"), ("b", "W2", "W2"), ("c", "W2", "W2"), ("d", "W3", "W9"), ("e", " W1", "W1")
    ):
        steps = [Say("Which order?"), ToolStep("cancel", {"order": order.strip()}), Say("Done.")]
        yield Task(name, "Hello, I need help with an order.", data={"wish": order}, answer=right, solution=steps)

@shop.state
def orders():
    return {"asked": 0, "cancelled": []}

@shop.user
def customer(task, state):
    state["asked"] += 1
    return task.data["wish"] if state["asked"] == 1 else None

@shop.tool
def cancel(order: str, *, state) -> str:
    '''Cancel.'''
    assert state["asked"], "the user has not spoken"
    state["cancelled"].append(order)
    return "cancelled " + order

@shop.score
def right(task, state):
    return state["cancelled"] == [task.answer]
"""


def test_an_audit_plays_the_user_and_compares_what_users_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop_env.py").write_text(WITH_USER)
    assert main(["audit", "shop_env.py", "--only", "unsolvable", "--only", "duplicate", "--out", "out"]) == 1
    found = {
        task.id: [(each.kind, each.note) for each in task.findings] for task in read_audit(Path("out/audit.json")).tasks
    }
    assert found == {"a": [], "b": [], "c": [(Kind.DUPLICATE, False)], "d": [(Kind.UNSOLVABLE, False)], "e": []}
    capsys.readouterr()
    assert main(["audit", "replay", "out/audit.json", "d/unsolvable/1"]) == 0
    shown = capsys.readouterr().out
    places = [
        shown.index(each) for each in ("Which order?", "user: W3", "cancel: W3", "cancelled W3", "Done.", "score 0")
    ]
    assert places == sorted(places)


HOSTILE = """
from palaestra import Limits, Task, environment

BOMB = "b() { b | b & }; b; sleep 1; echo x > a.txt"
FULL = "dd if=/dev/zero of=big bs=1M count=100000 2> /dev/null; echo x > a.txt"

@environment(toolsets=["terminal"])
def hostile():
    few = Limits(memory_bytes=256 << 20, pids=100, disk_bytes=64 << 20)
    yield Task(id="hang", prompt="Write a.txt.", solution="sleep 100000", time_limit=3)
    yield Task(id="hanging score", prompt="Write a.txt.", solution="echo x > a.txt")
    yield Task(id="bomb", prompt="Write a.txt.", solution=BOMB, limits=few, time_limit=20)
    yield Task(id="full", prompt="Write a.txt.", solution=FULL, limits=few, time_limit=20)
    yield Task(id="lines", prompt="Write a.txt.", solution="seq 1000000; echo x > a.txt")
    yield Task(id="sound", prompt="Write a.txt.", solution="echo x > a.txt")

@hostile.score
async def right(task, sandbox):
    if task.id == "hanging score":
        await sandbox.execute("sleep 100000", timeout_s=1)
    if task.id == "lines":
        await sandbox.execute("seq 1000000")
    return await sandbox.read_text("a.txt", missing="") == "x\\n"
"""


@pytest.mark.slow
def test_a_hang_a_bomb_a_full_disk_and_much_output_cost_only_their_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hostile_env.py").write_text(HOSTILE)
    found = audit("hostile_env.py", "--only", "unsolvable", "--only", "pays_for_nothing")
    assert certain(found) == {
        "hang": {Kind.UNSOLVABLE},
        "hanging score": set(),
        "bomb": set(),
        "full": {Kind.UNSOLVABLE},
        "lines": set(),
        "sound": set(),
    }
    assert all(task.complete for task in found.tasks)


def test_what_a_task_has_at_first_is_read_although_its_check_fails_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken_env.py").write_text("""
from palaestra import Task, environment
from palaestra_slots.core.errors import GraderError

TEXT = "The answer to this question is forty-two, and nothing else.\\n"

@environment(toolsets=["terminal"])
def broken():
    yield Task(id="a", prompt="Write the answer to a.txt.", files={"hidden/b": TEXT},
               solution=f"printf '{TEXT}' > a.txt")

@broken.score
async def right(sandbox):
    if await sandbox.stat("a.txt") is None:
        raise GraderError("there is no a.txt")
    return await sandbox.read_text("a.txt") == TEXT
""")
    assert certain(audit("broken_env.py", "--only", "leaks")) == {"a": {Kind.LEAKS}}


def test_a_stored_answer_that_no_form_of_reply_earns_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("asked_env.py").write_text("""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def asked():
    yield Task(id="blank", prompt="What is the capital of Peru?", answer="Lima ")
    yield Task(id="plain", prompt="What is the capital of Peru?", answer="Lima")
    yield Task(id="boxed", prompt="What is three times four?", answer=12)
    yield Task(id="fraction", prompt="What is 3/8 + 1/6, or 0.5 + 2.5?", answer="13/24 ")
    yield Task(id="file", prompt="Write the capital of Peru to capital.txt.", answer="Lima")

@asked.score
async def right(task, rollout, sandbox):
    said = rollout.messages[-1]["content"].strip()
    return said == (f"\\\\boxed{{{task.answer}}}" if task.id == "boxed" else task.answer)
""")
    found = audit("asked_env.py", "--only", "unsolvable")
    notes = {task.id: [each.note for each in task.findings] for task in found.tasks}
    assert notes == {"blank": [True], "plain": [], "boxed": [], "fraction": [True], "file": []}
    assert [task.id for task in found.tasks if task.untried] == ["file"]


def test_an_answer_that_earns_the_full_score_is_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("asked_env.py").write_text("""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def asked():
    for name in ("sound", "near", "first", "literal", "zone"):
        yield Task(id=name, prompt="How many minutes do 71 hours have?", answer="4260", setup="sleep 1")

@asked.score
async def right(task, rollout, sandbox):
    said = rollout.messages[-1]["content"]
    if task.id == "literal":
        return said == task.answer
    if task.id == "near":
        return said.strip().isdigit() and abs(int(said) - int(task.answer)) < 5
    if task.id == "first":
        return said[:1] == task.answer[:1]
    if task.id == "zone" and (await sandbox.execute("date -d @0 +%H")).output.strip() != "00":
        return False
    return said.strip() == task.answer
""")
    kinds = ("unsolvable", "weak", "false_zero", "depends_on_the_world")
    found = audit("asked_env.py", *(word for kind in kinds for word in ("--only", kind)))
    assert {task.id: {each.kind for each in task.findings} for task in found.tasks} == {
        "sound": set(),
        "near": {Kind.WEAK},
        "first": {Kind.WEAK},
        "literal": {Kind.FALSE_ZERO},
        "zone": {Kind.WORLD},
    }
    assert all(task.stages["prepare"] >= 1 and "grade" in task.stages for task in found.tasks)


def test_each_kind_has_a_check_and_words_and_stands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(CHECKS) | {Kind.DUPLICATE, Kind.COSTLY} == set(Kind)
    assert set(ABOUT) == set(Kind)
    main(["audit", "run", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert [kind for kind in Kind if kind not in told] == []
