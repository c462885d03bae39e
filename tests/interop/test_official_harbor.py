"""Our official verdict on terminal tasks, next to the rewards of Harbor's own trial of the same task folder.

Every item is one work on one task. Both sides run in slots that our environment has prepared in the same way. Their
side is Harbor's `Trial` with its `Verifier`; ours is a rollout. An item without rewards for Harbor must have no score
here, because a failed grader is never a reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import policy_runs
from palaestra_slots.core.types import ToolStep
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.engines.scripted import Policy
from suites.conftest import installed_pytest as installed_pytest

pytestmark = [pytest.mark.slots, pytest.mark.timeout(900), pytest.mark.xdist_group("harbor")]

Found = dict[str, float] | str | None
"""Rewards by name, or the reason why there are none."""

Judged = dict[str, tuple[Found, Found, str]]


@dataclass(frozen=True)
class Item:
    """The files of a task, and the script of each step's work. `differs` is why the two verdicts differ on purpose."""

    name: str
    files: Mapping[str, str]
    works: Sequence[str] = ("true",)
    differs: str = ""


TOML = 'schema_version = "1.3"\n[verifier]\ntimeout_sec = 20.0\n{verifier}\n[environment]\n{environment}\n{more}\n'
DOCKERFILE = "FROM palaestra-tests/base:1\nWORKDIR /app\n"
LOGS = "/logs/verifier"
TXT, JSON_FILE = f"{LOGS}/reward.txt", f"{LOGS}/reward.json"


def task(
    script: str, verifier: str = "", environment: str = "", more: str = "", docker: str = "", **files: str
) -> dict[str, str]:
    """A task whose verifier is this script."""
    names = {name.replace("__", "/"): text for name, text in files.items()}
    return {
        "task.toml": TOML.format(verifier=verifier, environment=environment, more=more),
        "instruction.md": "Write the word right to /app/answer.txt.\n",
        "environment/Dockerfile": DOCKERFILE + docker,
        "tests/test.sh": script if script.startswith("#!") or not script else f"#!/bin/bash\n{script}\n",
        **names,
    }


def steps(*scripts: str, more: str = "", gates: Sequence[str] = (), **files: str) -> dict[str, str]:
    """A task with a step for each verifier."""
    tables = "".join(
        f'[[steps]]\nname = "s{number}"\n{gates[number] if number < len(gates) else ""}\n'
        for number in range(len(scripts))
    )
    found = task("echo 0 > " + TXT, **files)
    found["task.toml"] = f'schema_version = "1.3"\n{more}\n[environment]\n{tables}'
    del found["instruction.md"]
    for number, script in enumerate(scripts):
        found[f"steps/s{number}/instruction.md"] = "Go on.\n"
        if script:
            found[f"steps/s{number}/tests/test.sh"] = f"#!/bin/bash\n{script}\n"
    return found


def written(name: str, text: str, differs: str = "") -> Item:
    """A verifier that writes this text as its reward."""
    at = JSON_FILE if name.startswith("json") else TXT
    return Item(name, task(f"printf '%b' {text!r} > {at}"), differs=differs)


IF_YES = f"&& echo 1 > {TXT} || echo 0 > {TXT}"
FINAL = 'multi_step_reward_strategy = "final"'
NOTHING = ("true", "true")
BEAT = "while :; do echo 0.5 > /app/new; mv /app/new /app/beat; sleep 0.1; done"
PAID = f"echo 1 > {TXT}"
CHECK = f"cmp -s /tests/expected.txt answer.txt && echo 1 > {TXT} || echo 0 > {TXT}"
EXPECTED = {"tests__expected.txt": "right\n"}
RIGHT, WRONG = "echo right > answer.txt", "echo wrong > answer.txt"
PYTEST = f"pytest -rA /tests/test_outputs.py\nif [ $? -eq 0 ]; then echo 1 > {TXT}; else echo 0 > {TXT}; fi"
OUTPUTS = {
    "tests__test_outputs.py": "from pathlib import Path\n\ndef test_word():\n"
    "    assert Path('/app/answer.txt').read_text() == 'right\\n'\n\ndef test_there():\n"
    "    assert Path('/app/answer.txt').exists()\n"
}
REFUSED = "a reward of a verifier that did not start its tests is a failure of the grader"
EMPTY = "a trial without a reward counts as 0 in Harbor's mean; ours has no score"
FAILED_STEP = "Harbor leaves out a step whose grader or set-up failed; ours has no score"

ITEMS = [
    written("txt-one", "1\\n"),
    written("txt-zero", "0"),
    written("txt-share", " 0.25 \\n\\n"),
    written("txt-negative", "-1.5"),
    written("txt-exponent", "1e-3"),
    written("txt-underscore", "1_0"),
    written("txt-empty", ""),
    written("txt-blank", " \\n"),
    written("txt-nan", "nan"),
    written("txt-infinite", "-inf"),
    written("txt-overflow", "1e309"),
    written("txt-word", "passed"),
    written("txt-two", "1 0"),
    written("txt-hex", "0x1"),
    written("txt-comma", "0,5"),
    written("txt-bytes", "1\\0377"),
    written("json-one", '{"reward": 1}'),
    written("json-several", '{"reward": 0.5, "style": 1, "speed": 0.25}'),
    written("json-other-names", '{"a": 1, "b": 0}'),
    written("json-true", '{"reward": true}'),
    written("json-empty", ""),
    written("json-empty-object", "{}", EMPTY),
    written("json-list", "[1]"),
    written("json-number", "1"),
    written("json-null", "null"),
    written("json-null-reward", '{"reward": null}'),
    written("json-text", '{"reward": "1"}'),
    written("json-nested", '{"reward": {"a": 1}}'),
    written("json-nan", '{"reward": NaN}'),
    written("json-overflow", '{"reward": 1e309}'),
    written("json-torn", '{"reward": 1'),
    written("json-twice", '{"reward": 0, "reward": 1}'),
    written("json-mark", '\\0357\\0273\\0277{"reward": 1}'),
    Item("no-reward", task("true")),
    Item("both-files", task(f"echo 1 > {TXT}; echo '{{\"reward\": 0.5}}' > {JSON_FILE}")),
    Item("bad-json-good-txt", task(f"echo 1 > {TXT}; echo x > {JSON_FILE}")),
    Item("json-is-a-folder", task(f"echo 1 > {TXT}; mkdir {JSON_FILE}")),
    Item("txt-is-a-folder", task(f"mkdir {TXT}")),
    Item("link-to-nothing", task(f"ln -s /nowhere {TXT}")),
    Item("exit-status", task(f"echo 1 > {TXT}; exit 7")),
    Item("exit-zero", task(f"echo 0 > {TXT}; exit 0")),
    Item("killed", task(f"echo 1 > {TXT}; kill -KILL $$")),
    Item("killed-before", task(f"kill -KILL $$; echo 1 > {TXT}")),
    Item("wrong-syntax", task(f"echo 1 > {TXT}\nif then fi (")),
    Item("no-first-line", {**task(""), "tests/test.sh": f"[[ a == a* ]] && echo 1 > {TXT}\n"}),
    Item("sh", task(f"#!/bin/sh\necho 1 > {TXT}\n")),
    Item("times-out", task("sleep 60") | {"task.toml": 'schema_version = "1.3"\n[verifier]\ntimeout_sec = 2.0\n'}),
    Item("right", task(CHECK, **EXPECTED), (RIGHT,)),
    Item("wrong", task(CHECK, **EXPECTED), (WRONG,)),
    Item("nothing", task(CHECK, **EXPECTED)),
    Item("old-txt", task("true"), (f"mkdir -p {LOGS}; echo 1 > {TXT}",)),
    Item("old-json", task(f"echo 0 > {TXT}"), (f"mkdir -p {LOGS}; echo '{{\"reward\": 1}}' > {JSON_FILE}",)),
    Item("old-log", task(f"cat {LOGS}/note > {TXT} || echo 0 > {TXT}"), (f"mkdir -p {LOGS}; echo 1 > {LOGS}/note",)),
    Item(
        "planted-test-file",
        task(f"cat /tests/extra.txt > {TXT} || echo 0 > {TXT}"),
        ("mkdir -p /tests; echo 1 > /tests/extra.txt",),
    ),
    Item(
        "overwritten-test-file",
        task(CHECK, **EXPECTED),
        (f"mkdir -p /tests; echo wrong > /tests/expected.txt; {WRONG}",),
    ),
    Item(
        "test-files-of-the-image",
        task(
            f"cat /tests/data/value > {TXT} || echo 0 > {TXT}",
            docker="RUN mkdir -p /tests/data && echo 1 > /tests/data/value\n",
        ),
    ),
    Item("folder-of-tests", task(f"bash /tests/lib/check.sh > {TXT}", **{"tests__lib__check.sh": "echo 0.5\n"})),
    Item(
        "running-service",
        task(f"cat /app/beat > {TXT}"),
        ("(while :; do echo 1 > /app/new; mv /app/new /app/beat; sleep 0.1; done) > /dev/null 2>&1 & sleep 0.3",),
    ),
    Item("home", task(f"cat ~/word > {TXT}"), ("echo 1 > ~/word",)),
    Item(
        "system-files",
        task(f"word > {TXT}"),
        ("printf '#!/bin/sh\\necho 1\\n' > /usr/local/bin/word; chmod 755 /usr/local/bin/word",),
    ),
    Item("replaced-program", task(CHECK, **EXPECTED), (f"{WRONG}; cp /bin/true /usr/bin/cmp",)),
    Item("removed-directory", task(f"[ -d /app ] {IF_YES}"), ("echo x > /app/x",)),
    Item("variables", task(f"echo $SHARE > {TXT}", verifier='env = { SHARE = "0.75" }')),
    Item("variables-of-the-task", task(f"echo $SHARE > {TXT}", environment='env = { SHARE = "0.5" }')),
    Item("user-of-the-verifier", task(f"[ $(id -un) = nobody ] {IF_YES}", verifier='user = "nobody"')),
    Item(
        "user-of-the-agent",
        task(f"[ $(stat -c %U /tmp/mine) = nobody ] {IF_YES}", more='[agent]\nuser = "nobody"'),
        ("touch /tmp/mine",),
    ),
    Item("work-directory", task(f"pwd > {LOGS}/pwd; [ $(pwd) = /srv ] {IF_YES}", environment='workdir = "/srv"')),
    Item("pytest-right", task(PYTEST, **OUTPUTS), (RIGHT,)),
    Item("pytest-wrong", task(PYTEST, **OUTPUTS), (WRONG,)),
    Item("pytest-nothing", task(PYTEST, **OUTPUTS)),
    Item(
        "pytest-share",
        task(f"pytest /tests/test_outputs.py | grep -c passed > {LOGS}/n; echo 0.5 > {TXT}", **OUTPUTS),
        (WRONG,),
    ),
    Item(
        "pytest-not-started", task(f"echo 1 > {TXT}; exit; pytest /tests/test_outputs.py", **OUTPUTS), (WRONG,), REFUSED
    ),
    Item("steps-mean", steps(PAID, f"echo 0 > {TXT}"), NOTHING),
    Item("steps-keys", steps(f'echo \'{{"reward": 1, "a": 1}}\' > {JSON_FILE}', f"echo 0.5 > {TXT}"), NOTHING),
    Item("steps-final", steps(PAID, f"echo 0.25 > {TXT}", more=FINAL), NOTHING),
    Item("steps-gate", steps(f"echo 0.4 > {TXT}", PAID, gates=["min_reward = 0.5"]), NOTHING),
    Item("steps-gate-final", steps(f"echo 0.4 > {TXT}", PAID, more=FINAL, gates=["min_reward = 0.5"]), NOTHING),
    Item("steps-gate-passed", steps(f"echo 0.5 > {TXT}", PAID, gates=["min_reward = { reward = 0.5 }"]), NOTHING),
    Item("steps-gate-other-name", steps(PAID, PAID, gates=["min_reward = { tidy = 0.5 }"]), NOTHING),
    Item("steps-shared-verifier", steps("", f"cat n > {TXT}"), ("true", "echo 1 > n")),
    Item(
        "steps-old-files",
        steps(
            f"echo 1 > {TXT}; touch {LOGS}/x /tests/y",
            f"[ -e {LOGS}/x -o -e /tests/y ] && echo 0 > {TXT} || echo 1 > {TXT}",
        ),
        NOTHING,
    ),
    Item("steps-work-stays", steps(f"cat n > {TXT}", f"cat n > {TXT}"), ("echo 1 > n", "true")),
    Item("steps-hand-a-file-on", steps(f"echo 0.5 > handed; {PAID}", f"cat handed > {TXT}"), NOTHING),
    Item("steps-hand-a-file-on-in-tmp", steps(f"echo 0.5 > /tmp/handed; {PAID}", f"cat /tmp/handed > {TXT}"), NOTHING),
    Item(
        "steps-hand-a-file-to-the-agent",
        steps(f"echo 0.5 > handed; {PAID}", f"cat made > {TXT}"),
        ("true", "cp handed made"),
    ),
    Item(
        "steps-hand-a-file-over-a-step",
        steps(
            f"mkdir -p kept && echo 0.5 > kept/x; {PAID}", f"echo 0.25 >> kept/x; {PAID}", f"tail -n 1 kept/x > {TXT}"
        ),
        ("true",) * 3,
    ),
    Item(
        "steps-remove-work",
        steps(f"rm -r work; {PAID}", f"[ ! -e work ] {IF_YES}"),
        ("mkdir work; touch work/x", "[ ! -e work ] || touch again"),
    ),
    Item(
        "steps-change-modes",
        steps(f"chmod 640 work; chown nobody work; {PAID}", f"[ $(stat -c %a%U work) = 640nobody ] {IF_YES}"),
        ("touch work; chmod 600 work", "true"),
    ),
    Item(
        "steps-replace-a-link",
        steps(f"rm link; echo 0.5 > link; {PAID}", f"cat link > {TXT}"),
        ("ln -s /etc/passwd link", "[ ! -h link ] || rm link"),
    ),
    Item(
        "steps-leave-a-process",
        steps(
            f"({BEAT}) > /dev/null 2>&1 & sleep 0.3; {PAID}",
            f"rm -f beat; sleep 0.5; cat beat > {TXT} || echo 0 > {TXT}",
        ),
        NOTHING,
    ),
    Item(
        "steps-process-of-the-agent-stays",
        steps(PAID, f"rm -f beat; sleep 0.5; cat beat > {TXT} || echo 0 > {TXT}"),
        (f"({BEAT}) > /dev/null 2>&1 & sleep 0.3", "true"),
    ),
    Item(
        "steps-install-a-program",
        steps(
            f"printf '#!/bin/sh\\necho 0.5\\n' > /usr/local/bin/word; chmod 755 /usr/local/bin/word; {PAID}",
            f"word > {TXT}",
        ),
        NOTHING,
    ),
    Item(
        "steps-folders-of-the-verifier",
        steps(f"touch /tests/x {LOGS}/x {LOGS}/.y; mkdir /tests/z; {PAID}", f"cat seen > {TXT}"),
        ("true", f'[ -d /tests -a -d {LOGS} ] && [ -z "$(ls -A /tests {LOGS} | grep -v :)" ] && echo 0.5 > seen'),
    ),
    Item(
        "steps-folder-of-tests-is-a-link",
        steps(f"rm -r /tests; ln -s /app /tests; touch kept; {PAID}", f"[ -e kept ] {IF_YES}"),
        ("true", "[ ! -h /tests ] || rm kept"),
    ),
    Item("steps-logs-of-the-agent", steps(f"touch /logs/agent/x; {PAID}", f"[ ! -e /logs/agent/x ] {IF_YES}"), NOTHING),
    Item(
        "steps-set-up-uses-a-handed-file",
        {**steps(f"echo 0.5 > handed; {PAID}", f"cat made > {TXT}"), "steps/s1/workdir/setup.sh": "mv handed made\n"},
        NOTHING,
    ),
    Item(
        "steps-verifier-without-verdict-ends-them",
        steps(PAID, "true", PAID),
        ("true",) * 3,
        FAILED_STEP,
    ),
    Item("steps-first-without-reward", steps("true", PAID), NOTHING),
    Item("steps-second-without-reward", steps(PAID, "true"), NOTHING, FAILED_STEP),
    Item(
        "steps-set-up", {**steps(PAID, f"cat made > {TXT}"), "steps/s1/workdir/setup.sh": "echo 0.5 > made\n"}, NOTHING
    ),
    Item("steps-set-up-fails", {**steps(PAID, PAID), "steps/s1/workdir/setup.sh": "exit 3\n"}, NOTHING, FAILED_STEP),
    Item(
        "steps-set-up-broken",
        {**steps(PAID, PAID), "steps/s1/workdir/setup.sh": "[ ! -e bad ]\n"},
        ("touch bad", "true"),
    ),
    Item(
        "steps-set-up-broken-final",
        {**steps(PAID, PAID, more=FINAL), "steps/s1/workdir/setup.sh": "[ ! -e bad ]\n"},
        ("touch bad", "true"),
        "a last step without a reward counts as 0",
    ),
]


class Scripts(Policy):
    """Runs one script in the terminal after each message of the user."""

    def __init__(self, scripts: Sequence[str]) -> None:
        self._scripts = scripts

    def act(self, context, messages):  # type: ignore[no-untyped-def]
        if messages[-1].get("role") != "user":
            return "Done."
        asked = sum(message.get("role") == "user" for message in messages)
        return [ToolStep("terminal", {"command": self._scripts[asked - 1], "timeout": 60})]


@pytest.fixture(scope="session")
def judged(installed_pytest: DependencyCache, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """The rewards of each item for Harbor and for us, and what else we say."""
    pytest.importorskip("harbor", reason="needs .venv-graders: run `make official`")
    from interop.harbor_in_slots import Place, rewards_of

    folder = tmp_path_factory.mktemp("harbor")
    for item in ITEMS:
        for name, text in item.files.items():
            path = folder / "tasks" / item.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    config = TerminalBench2EvalConfig(
        dataset_name=str(folder / "tasks"), base_image="host", cache_dir=str(folder / "cache"), controls=False
    )
    found: dict[str, tuple[Found, Found, str]] = {}

    async def main() -> None:
        items = {item.name: item for item in ITEMS}
        async with make_pool(config) as pool:
            environment = TerminalBenchEnvironment(config, installed_pytest)
            await environment.open()
            async with policy_runs(environment, pool) as runs:
                async for each in environment.tasks():
                    works = tuple(items[each.id].works)
                    place = Place(environment, pool, each, works)
                    theirs = await rewards_of(place, folder / "tasks" / each.id, folder / "trials")
                    group = await runs.play(Scripts(works), each)
                    ours: Found = group.error or "no rollout"
                    said = str(group.error)
                    if group.trajectories:
                        (rollout,) = group.trajectories
                        said = f"{rollout.error} {rollout.reward} {rollout.labels} {rollout.detail}"
                        if rollout.official_reward is not None:
                            ours = dict(rollout.detail.get("official_rewards", {"reward": rollout.official_reward}))
                        else:
                            ours = str(rollout.error)
                    found[each.id] = theirs, ours, said

    asyncio.run(main())
    return found


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_the_official_rewards_are_those_of_harbor(item: Item, judged: Judged) -> None:
    theirs, ours, said = judged[item.name]
    print(f"theirs: {theirs}\nours: {ours}\n{said}")
    same = theirs == ours if isinstance(theirs, dict) else not isinstance(ours, dict)
    assert same is not bool(item.differs)
