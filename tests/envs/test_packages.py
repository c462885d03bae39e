"""Python packages that an environment and its tasks declare for their sandboxes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import palaestra
from envs.scripts import need_level, only_wheels, wheel
from golden_messages import raises
from palaestra import ConfigError, Task, TaskError, environment
from palaestra.cli.main import main
from palaestra.grading import run_tests
from palaestra.rollouts.events import RolloutEnded, TurnTaken
from palaestra.rollouts.journal.journal import read_journal
from palaestra_slots.core.types import Blame

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(600)]  # pip starts in sandboxes

WORK = "printf 'import tiny\\ndef f(): return tiny.x\\n' > work.py; python3 -c 'import tiny; print(tiny.x)' > x.txt"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages; the cache is empty."""
    need_level("userns")
    monkeypatch.chdir(tmp_path)
    only_wheels(tmp_path, monkeypatch)
    wheel(tmp_path / "index", "tiny", needs="inner")
    wheel(tmp_path / "index", "inner")
    return tmp_path / "index"


def using(packages: Sequence[str] = (), of_tasks: Sequence[Any] = ((),), solution: str = WORK) -> Any:
    @environment(toolsets=["terminal"], packages=packages)
    def using() -> Iterator[Task]:
        for number, names in enumerate(of_tasks):
            yield Task(f"t{number}", "?", solution=solution, packages=names)

    @using.score
    async def found(sandbox: Any) -> Any:
        called = await sandbox.call("work:f")
        tests = await run_tests(sandbox, "import inner, tiny, work\n\ndef test_x():\n    assert work.f() == tiny.x\n")
        return called == (await sandbox.read_text("x.txt")).strip() == "tiny 1.0" and not tests.failed

    return using


def rewards(made: Any, **settings: Any) -> list[float | None]:
    run = palaestra.run_sync(made, policy="oracle", folder="runs", **settings)
    return [each.reward for group in run.groups for each in group.trajectories]


def test_agents_scores_and_hidden_tests_import_the_packages_which_are_installed_once(index: Path) -> None:
    assert rewards(using(["tiny"], [(), ()])) == [1.0, 1.0]
    for each in index.iterdir():
        each.unlink()
    assert rewards(using(["tiny"])) == [1.0]
    assert rewards(using()) == [0.0]  # no other environment has them
    assert rewards(using([], [["tiny"], ["inner", "tiny"]])) == [1.0]  # the second is a set of its own


def test_another_version_is_installed_next_to_the_first(index: Path) -> None:
    wheel(index, "tiny", needs="inner", version="2.0")
    assert rewards(using(["tiny"], [[]])) == [0.0]
    assert rewards(using(["tiny==1.0"], [[]])) == [1.0]
    assert rewards(using([], [["tiny<2"], ["tiny"]])) == [1.0, 0.0]


def test_the_agent_cannot_change_the_packages() -> None:
    changing = f"echo \"x = 'tiny 1.0' #\" > /opt/palaestra/packages/tiny.py && exit 0; {WORK}; echo kept >> x.txt"
    assert rewards(using(["tiny"], solution=changing)) == [0.0]


PROGRAMS = """
from palaestra import Task, environment

@environment(toolsets=["terminal"], packages=["fast"])
def programs():
    yield Task("one", "?", packages=["tiny"], solution="(run-tiny && run-fast && fast-binary a) > x.txt")

@programs.score
async def found(sandbox):
    again = await sandbox.execute("run-tiny && run-fast && fast-binary a && command -v run-tiny")
    expected = "tiny 1.0\\nfast 1.0\\na\\n"
    return await sandbox.read_text("x.txt", missing="") == expected and again.output.startswith(expected)
"""


@pytest.mark.parametrize("level", ["userns", "full"])
def test_programs_of_packages_are_found_by_name_by_the_agent_the_score_and_the_check(index: Path, level: str) -> None:
    need_level(level)
    echo = shutil.which("echo")
    assert echo is not None
    wheel(index, "fast", binary=Path(echo))
    Path("my_env.py").write_text(PROGRAMS)
    assert main(["env", "check", "my_env.py", "--env.isolation", level]) == 0
    assert main(["run", "my_env.py", "--policy", "oracle", "--env.isolation", level]) == 0
    (folder,) = Path().glob("runs/*/*")
    assert [each.reward for each in palaestra.open_run(folder).trajectories] == [1.0]


def test_a_name_that_cannot_be_installed_ends_the_run_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment using: .*none==3\.0") as raised:
        rewards(using(["tiny", "none==3.0"], [(), ()]))
    assert "\n" not in str(raised.value)
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    assert not [each for each in read_journal(journal) if isinstance(each, TurnTaken | RolloutEnded)]


def test_a_task_whose_packages_cannot_be_installed_fails_alone() -> None:
    run = palaestra.run_sync(using([], [["none"], ["tiny"], "tiny", [1]]), policy="oracle", folder="runs")
    assert [bool(group.error) for group in run.groups] == [True, False, True, True]
    assert {group.blame for group in run.groups if group.error} == {Blame.TASK}
    assert "task t0: cannot install none" in run.groups[0].error


HOSTILE = [
    *(
        "-r/etc/passwd",
        "--pre",
        "tiny @ file:///etc",
        "git+file:///x",
        "/etc",
        "./x",
        "",
        "a b",
    ),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_package_is_a_name_with_versions_and_never_an_address_a_path_or_an_option(name: str) -> None:
    with pytest.raises(TaskError, match=r"using: packages: .* requirement"):
        using([name])
    group = palaestra.run_sync(using([], [[name]]), policy="oracle", folder="runs").groups[0]
    assert "task t0: packages: " in group.error


@pytest.mark.parametrize("packages", ["tiny", [1], {"tiny": "1"}, None])
def test_packages_that_are_no_list_of_names_are_refused_at_once(packages: Any) -> None:
    with pytest.raises(TaskError, match="list of names"):
        using(packages)
    wrong, right = palaestra.run_sync(using([], [packages, []]), policy="oracle", folder="runs").groups
    assert "task t0: packages must" in wrong.error
    assert not right.error


@pytest.mark.parametrize("level", ["none", "confined"])
def test_levels_without_mounts_refuse_packages_in_one_line(level: str) -> None:
    with raises(ConfigError, level):
        rewards(using(["tiny"]), isolation=level)


@pytest.mark.parametrize(("settings", "reason"), [
    ({"tool_pool_mode": "kubernetes"}, "backend kubernetes cannot have packages"),
    ({"tool_pool_mode": "docker"}, "set docker_image"),
])  # fmt: skip
def test_backends_that_cannot_have_packages_refuse_them_before_the_first_task(
    settings: dict[str, Any], reason: str
) -> None:
    from palaestra.envs.api.declared_packages import DeclaredPackages

    made = using(["tiny"])
    config = made.config_type()(**settings)
    with pytest.raises(ConfigError, match=reason):
        DeclaredPackages(made.name, made.packages, config).check()


RECIPE = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def built():
    for name in "ab":
        yield Task(name, "?", setup="touch made", recipe="1", solution="true")

@built.score
def fine():
    return 1
"""


@pytest.mark.parametrize(("level", "told"), [("confined", 1), ("userns", 0)])
def test_a_recipe_without_effect_is_reported_once(level: str, told: int, capfd: pytest.CaptureFixture[str]) -> None:
    need_level(level)

    Path("my_env.py").write_text(RECIPE)
    given = ["--env.isolation", level, "--env.workspace_store", "store"]
    assert main(["run", "my_env.py", "--policy", "oracle", *given]) == 0
    assert capfd.readouterr().err.count("has no effect") == told
