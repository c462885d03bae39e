"""Tasks of several steps: what is read of them, and one rollout through all of them in real slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra import Session
from palaestra_audit.cheats.proof import check_environment
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import Blame, Label, Score, ToolStep
from palaestra_slots.images.task_files import Unsupported
from palaestra_suites.terminal_bench import harbor_task
from palaestra_suites.terminal_bench.import_tasks import Finding
from palaestra_suites.terminal_bench.rewards import combine_scores, falls_short, official_rewards
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.engines.scripted import Policy
from sandbox.processes import share_memory_with_inits
from suites.terminal_bench.conftest import StepScripts, Try, played, played_all
from suites.terminal_bench.mini import HARBOR, copied, written

STEPS = HARBOR / "several-steps"


def test_what_is_read_of_steps() -> None:
    task = harbor_task.read_task(STEPS)
    assert [step.name for step in task.steps] == ["count", "sort"]
    assert task.instruction == task.steps[0].instruction
    first, second = task.steps
    assert (first.verifier.timeout_s, second.verifier.timeout_s) == (30.0, 60.0)
    assert first.verifier.env == {"WANTED": "from the task"}
    files = second.verifier.files()
    assert files["helper.sh"] == STEPS / "tests/helper.sh"
    assert files["test.sh"] == STEPS / "steps/sort/tests/test.sh"
    assert second.workdir == STEPS / "steps/sort/workdir"
    gated = harbor_task.read_task(HARBOR / "gated-steps")
    assert gated.reward_strategy == "final"
    assert [step.min_reward for step in gated.steps] == [{"reward": 1.0}, {"reward": 0.5}]
    assert gated.of_step(gated.steps[0]).agent.timeout_s == 60.0
    assert gated.steps[1].verifier.files()["test.sh"] == HARBOR / "gated-steps/tests/test.sh"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('[[steps]]\nname = "../x"\n', TaskError, r"steps\[0\].name must be a folder name"),
        ('[[steps]]\nname = "count"\n[[steps]]\nname = "Count"\n', TaskError, "Count"),
        ('[[steps]]\nname = "none"\n', TaskError, "step none: instruction.md is missing"),
        ('[[steps]]\nname = "count"\nmin_reward = "much"\n', TaskError, "min_reward must be a table|must be a number"),
        ('multi_step_reward_strategy = "sum"\n[[steps]]\nname = "count"\n', TaskError, "must be mean or final"),
        ("", TaskError, "task.toml"),
        ('[[steps]]\nname = "count"\n[steps.healthcheck]\nretries = 1\n', TaskError, "healthcheck.*command"),
        ('[[steps]]\nname = "count"\n[steps.agent]\nuser = "ada"\n', Unsupported, "a rollout has one slot"),
    ],
)
def test_steps_that_cannot_be_used(tmp_path: Path, text: str, error: type[TaskError], message: str) -> None:
    with pytest.raises(error, match=message):
        harbor_task.read_task(copied(STEPS, tmp_path, {"task.toml": text}))


def test_the_rewards_of_steps_become_one() -> None:
    def scored(**rewards: float) -> Score:
        return Score(rewards.get("reward", 0.0), {}, {"rewards": rewards})

    mean, final = harbor_task.read_task(STEPS), harbor_task.read_task(HARBOR / "gated-steps")
    scores = [scored(reward=1.0, tidy=0.5), scored(reward=0.5)]
    assert combine_scores(mean, scores).detail["rewards"] == {"reward": 0.75, "tidy": 0.25}
    assert combine_scores(mean, scores).reward == 0.75
    assert combine_scores(final, scores).reward == 0.5
    assert combine_scores(mean, scores[:1]).metrics["steps_verified"] == 1.0
    gate = final.steps[1]
    assert not falls_short(gate, official_rewards(scored(reward=0.5)))
    assert falls_short(gate, official_rewards(scored(reward=0.4)))
    assert falls_short(gate, official_rewards(scored(tidy=1.0)))
    forged = Label("falsified_test_passed", "test_a", certain=True)
    cheated = Score(1.0, {}, {"rewards": {"reward": 1.0}}, official=1.0, labels=[forged])
    assert not falls_short(gate, official_rewards(cheated)), "the official reward decides whether the next step follows"
    combined = combine_scores(mean, [cheated, scores[0]])
    assert (combined.reward, combined.official) == (0.5, 1.0)
    assert [label.evidence for label in combined.labels] == ["step count: test_a"]
    broken = Score(0.0, {}, {"official_rewards": {}})  # the work breaks the set-up of the step
    assert [(each.reward, each.official) for each in (combine_scores(mean, [scores[0], broken]),)] == [(0.5, 1.0)]
    assert combine_scores(final, [scores[0], broken]).official == 0.0


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_the_solution_passes_every_step_and_nothing_none(try_tasks: Try) -> None:
    lines = try_tasks(task_filter="several-steps,gated-steps")
    assert (lines["gated-steps"].finding, lines["gated-steps"].noop) == (Finding.GOOD, 0.0), lines["gated-steps"]
    assert (lines["several-steps"].finding, lines["several-steps"].noop) == (Finding.GOOD, 0.0), lines["several-steps"]


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_a_conversation_goes_on_from_step_to_step(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    fake = '#!/bin/sh\n[ "$1" = -d ] && echo 22 || printf "apple fig pear "\n'
    plant = f"cat > /usr/bin/tr <<'END'\n{fake}END\nchmod 755 /usr/bin/tr\n"
    solve = (STEPS / "steps/count/solution/solve.sh").read_text() + plant
    second = "#!/bin/bash\ntouch sorted.txt\n"
    files = {"steps/count/solution/solve.sh": solve, "steps/sort/solution/solve.sh": second}
    (rollout,) = played(copied(STEPS, tmp_path, files), installed_pytest, tmp_path).trajectories
    said = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert [text.split(",")[0] for text in said] == [
        "Write the number of lines of fruit.txt to count.txt",
        "There is more fruit in more.txt. Write all of it",
    ]
    assert [turn.number for turn in rollout.turns] == list(range(1, len(rollout.turns) + 1))
    calls = [call["id"] for message in rollout.messages for call in message.get("tool_calls") or ()]
    assert len(calls) == len(set(calls))
    assert (rollout.reward, rollout.metrics["tidy"], rollout.metrics["steps_verified"]) == (0.5, 1.0, 2.0)
    assert [step["reward"] for step in rollout.detail["steps"]] == [1.0, 0.0]


COMPARE = "#!/bin/bash\n. /tests/helper.sh\ncmp -s /tests/expected.txt answer.txt && pay 1 || pay 0\n"
INLINE = "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\npython3 -c 'import colorsys'\n"
PAID = "open('/logs/verifier/reward.txt', 'w').write('1')"
SPOILED = {
    "link-of-an-earlier-step": (
        "ln -s /tests/expected.txt answer.txt",
        {"steps/sort/tests/test.sh": COMPARE, "steps/sort/tests/expected.txt": "right\n"},
    ),
    "module-of-an-earlier-step": (
        f'echo "{PAID}" > color""sys.py',
        {"steps/sort/tests/test.sh": INLINE},
    ),
    "directory-in-place-of-the-set-up": ("mkdir setup.sh", {}),
    "set-up-that-fails": ("mkdir -p /app/more.txt/late.txt/x", {"steps/count/tests/test.sh": COMPARE}),
    "verifier-that-hangs": (
        "mkfifo count.txt",
        {
            "steps/count/tests/test.sh": "#!/bin/bash\n. /tests/helper.sh\ncat count.txt\npay 0\n",
            "steps/sort/tests/test.sh": COMPARE,
        },
    ),
}
"""What the first of two steps leaves for the second one, and other files of the task."""


@pytest.mark.slots
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "hangs" in name else []) for name in SPOILED]
)
def test_work_of_an_earlier_step_does_not_decide_a_later_one(
    name: str, installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    left, more = SPOILED[name]
    brief = (STEPS / "task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 3.0")
    copied(STEPS, tmp_path / "tasks", {"task.toml": brief, **more})
    rollout = played_all(tmp_path / "tasks", installed_pytest, tmp_path, {STEPS.name: [left, "true"]})[STEPS.name]
    assert (rollout.reward, [step["reward"] for step in rollout.detail["steps"]]) == (0.0, [0.0, 0.0]), rollout.error


TXT = "/logs/verifier/reward.txt"
PAID = f"echo 1 > {TXT}"
BEAT = "while :; do echo 1 > /app/new; mv /app/new /app/beat; sleep 0.1; done"


def steps_of(folder: Path, *scripts: str, solutions: Sequence[str] = (), **files: str) -> Path:
    """A task with a step for each of these verifiers; paths of other files have `__` for `/`."""
    tables = "".join(f'[[steps]]\nname = "s{number}"\n' for number in range(len(scripts)))
    found = {"task.toml": f'schema_version = "1.4"\n{tables}'}
    found |= {"environment/Dockerfile": "FROM palaestra-tests/base:1\nWORKDIR /app\n"}
    found |= {name.replace("__", "/"): text for name, text in files.items()}
    for number, script in enumerate(scripts):
        found[f"steps/s{number}/instruction.md"] = "Go on.\n"
        found[f"steps/s{number}/tests/test.sh"] = f"#!/bin/bash\n{script}\n"
    for number, script in enumerate(solutions):
        found[f"steps/s{number}/solution/solve.sh"] = f"#!/bin/bash\n{script}\n"
    return written(folder / "task", found)


HANDED: dict[str, tuple[Sequence[str], Sequence[str], float | None, float, int]] = {
    "file": ([f"echo 0.5 > handed; {PAID}", f"cat handed > {TXT}"], ["true", "true"], 0.75, 0.75, 2),
    "file-over-a-step": (
        [f"echo 0.5 > handed; {PAID}", f"cat handed > {TXT}", f"cat handed made > sum; head -n 1 sum > {TXT}"],
        ["true", "cp handed made", "[ -s made ] && echo 0.25 > handed"],
        7 / 12,
        7 / 12,
        3,
    ),
    "removed-work": (
        [f"rm work; {PAID}", f"[ -e work ]; echo $? > {TXT}"],
        ["touch work", "[ ! -e work ] || touch work"],
        1,
        1,
        2,
    ),
    "modes": (
        [f"chmod 640 work; {PAID}", f"[ $(stat -c %a work) = 640 ] && {PAID} || echo 0 > {TXT}"],
        ["touch work; chmod 600 work", "true"],
        1,
        1,
        2,
    ),
    "process-of-the-verifier": (
        [f"({BEAT}) > /dev/null 2>&1 & {PAID}", f"rm -f beat; sleep 1; cat beat > {TXT} || echo 0 > {TXT}"],
        ["true", "true"],
        1,
        0.5,
        2,
    ),
    "folders-of-the-verifier": (
        [f"touch /tests/x /logs/verifier/x /logs/agent/x; {PAID}", f"cat seen > {TXT}"],
        ["true", "ls -A /tests /logs/verifier /logs/agent | grep -c '^[^/]' > seen"],
        0.5,
        0.5,
        2,
    ),
    "no-verdict": ([PAID, "true", PAID], ["true"] * 3, None, 0, 0),
}
"""The verifiers and works of the steps, the official and the guarded reward, and the number of verified steps. The
official ones are those of Harbor (`interop/test_official_harbor.py`)."""


@pytest.mark.slots
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HANDED)
def test_the_next_step_begins_where_the_verifier_left_the_slot(
    name: str, installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    scripts, works, official, reward, verified = HANDED[name]
    (rollout,) = played(steps_of(tmp_path, *scripts), installed_pytest, tmp_path, StepScripts(works)).trajectories
    if official is None:
        assert (rollout.reward, rollout.blame) == (None, Blame.GRADER), rollout.detail
        return
    assert (rollout.official, rollout.reward) == (pytest.approx(official), pytest.approx(reward)), rollout.detail
    assert rollout.metrics["steps_verified"] == verified


SET_UP = {"steps__s1__workdir__setup.sh": "mv handed made\n"}


@pytest.mark.slots
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hands", "works", "rewards"),
    [
        (f"cp work handed; {PAID}", ["touch work", "true"], [1.0, 1.0]),
        (f"cp work handed && {PAID} || echo 0 > {TXT}", ["true", "true"], [0.0, 0.0]),
        (f"cp work handed; {PAID}", ["touch work; mkdir -p made/handed", "true"], [1.0, 0.0]),
        (
            f"cp work handed; {PAID}",
            ["touch work; mkdir made; chattr +i made 2> /dev/null; rm -r /app", "true"],
            [1.0, 0.0],
        ),
    ],
    ids=["right", "nothing-was-done", "in-the-way", "directory-removed"],
)
def test_a_set_up_that_needs_work_of_an_earlier_step_fails_by_the_work(
    hands: str, works: Sequence[str], rewards: Sequence[float], installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """Over the prepared workspace it fails too, but not after the solution of the first step."""
    task = steps_of(tmp_path, hands, f"[ -f made ] && {PAID} || echo 0 > {TXT}", solutions=["touch work", ""], **SET_UP)
    (rollout,) = played(task, installed_pytest, tmp_path, StepScripts(works)).trajectories
    assert rollout.detail.get("steps") is not None, rollout.error
    assert [step["reward"] for step in rollout.detail["steps"]] == rewards, rollout.detail
    assert [label.name for label in rollout.labels] == ([] if rewards[1] else ["set_up_failed"])


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_a_verifier_that_needs_a_handed_file_fails_by_the_work(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """The second verifier gives no verdict without `handed`, so over the prepared workspace neither."""
    needs = f"cat handed || exit 1; [ -d /app/made ] && exit 1; [ -f made ] && {PAID} || echo 0 > {TXT}"
    task = steps_of(tmp_path, f"cp work handed; {PAID}", needs, solutions=["touch work", "touch made"])
    (rollout,) = played(task, installed_pytest, tmp_path, StepScripts(["touch work", "mkdir made"])).trajectories
    assert rollout.detail.get("steps") is not None, rollout.error
    assert [step["reward"] for step in rollout.detail["steps"]] == [1.0, 0.0], rollout.detail


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_a_set_up_that_always_fails_is_the_tasks_fault(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    task = steps_of(tmp_path, PAID, PAID, solutions=["", ""], **SET_UP)
    (rollout,) = played(task, installed_pytest, tmp_path, StepScripts(["true", "true"])).trajectories
    assert (rollout.reward, rollout.blame) == (None, Blame.TASK)
    check_message(rollout.error, "setup.sh", "failed")


ENDINGS = {
    "logs-is-a-file": "rm -rf /logs; echo > /logs",
    "opt-is-a-file": "rm -rf /opt; echo > /opt",
    "no-shell": "touch work; rm -f /bin/sh",
    "shell-that-fails": "cp $(command -v false) /bin/sh",
    "no-tar": "rm -f $(command -v tar)",
    "mkdir-that-fails": "rm -f $(command -v mkdir); ln -s $(command -v false) /usr/local/bin/mkdir",
    "kills-what-starts": "(while :; do pkill -9 -f verifier || killall -9 bash sh tar; done) > /dev/null 2>&1 &",
    "sandbox-ended": "kill -9 -1",
    "next-set-up-fails": "mkdir -p later.txt/x",
}
"""Ways to end the steps with the first one, which is done."""


@pytest.mark.slots
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["mean", "final"])
@pytest.mark.parametrize("name", ENDINGS)
def test_ending_the_steps_pays_no_more_than_the_steps_that_are_done(
    name: str, strategy: str, installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    more = {f"steps__s{number}__workdir__later.txt": "later\n" for number in (1, 2)}
    task = steps_of(
        tmp_path, *[f"[ -e work{n} ] && {PAID} || echo 0 > {TXT}" for n in range(3)], solutions=["true"] * 3, **more
    )
    toml = f'multi_step_reward_strategy = "{strategy}"\n{(task / "task.toml").read_text()}'
    (task / "task.toml").write_text(toml)
    works = StepScripts([f"touch work0; {ENDINGS[name]}", "true", "true"])
    (rollout,) = played(task, installed_pytest, tmp_path, works).trajectories
    assert rollout.reward == (pytest.approx(1 / 3) if strategy == "mean" else 0.0), rollout.error or rollout.labels
    assert [step["reward"] for step in rollout.detail["steps"]] == [1.0, 0.0, 0.0]


FILL = "mkdir {0}; for d in /app /tmp /dev/shm; do cat /dev/zero > $d/fill{0}; : > $d/{0}/x; done"
"""Uses up the memory that a slot's first process may share with its commands, if it is repeated."""


class Greedy(Policy):
    """Ends its slot in the second step, after it has written n."""

    def __init__(self) -> None:
        self._commands = ["echo 0.5 > n", *(FILL.format(number) for number in range(150))]

    def act(self, context, messages):  # type: ignore[no-untyped-def]
        asked = sum(message.get("role") == "user" for message in messages)
        if asked == 1 or not self._commands or "sandbox has ended" in str(messages[-1].get("content")):
            return "Done."
        return [ToolStep("terminal", {"command": self._commands.pop(0), "timeout": 5})]


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sandbox_that_the_agent_ends_ends_the_steps(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    """What it wrote up to then is verified in a copy. A full disk makes the verifier fail in the agent's slot."""
    task = steps_of(tmp_path, PAID, f"cat n > {TXT} || echo 0 > {TXT}", PAID)
    toml = (task / "task.toml").read_text().replace("[[steps]]", "[environment]\nmemory_mb = 64\n[[steps]]", 1)
    (task / "task.toml").write_text(toml.replace("memory_mb = 64", "memory_mb = 64\nstorage_mb = 40"))
    (rollout,) = played(task, installed_pytest, tmp_path, policy=Greedy(), begun=share_memory_with_inits).trajectories
    assert [step["reward"] for step in rollout.detail["steps"]] == [1.0, 0.5, 0.0], rollout.error
    assert "official_failed" in {label.name for label in rollout.labels}


SCRIPT = str(Path(__file__).parents[5] / "environments/terminalbench_2_env.py")


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_the_tasks_of_the_package_are_checked_without_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    proof = check_environment(SCRIPT, [], tasks=2, only=["fake-python"], quiet=True)
    assert proof.tasks == ("releases", "stock")
    assert proof.proven
    assert proof.holds, proof.lines
    assert proof.ways["exit code"] == "test.sh"


def test_what_a_user_says_is_checked_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no task"):
        check_environment(SCRIPT, ["--env.dataset_name", str(tmp_path)], tasks=1, quiet=True)


@pytest.mark.slots
@pytest.mark.timeout(60)
def test_a_caller_that_finishes_goes_through_the_steps_that_are_left(tmp_path: Path) -> None:
    task = steps_of(tmp_path, f"[ -e made ]; echo $((! $?)) > {TXT}", f"[ -e more ]; echo $((! $?)) > {TXT}")
    with Session("terminalbench_2", policy="caller", dataset_name=str(task), base_image="host") as session:
        assert "terminal" in {each["function"]["name"] for each in session.tools(session.tasks()[0])}
        play = session.play(session.tasks()[0])
        play.call("terminal", {"command": "touch made"})
        trajectory = play.finish("Done.")
    assert (trajectory.reward, trajectory.error, trajectory.messages[-1]["content"]) == (0.5, "", "Done.")
