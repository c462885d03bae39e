"""The function form: parameters become settings, hooks ask by name, mistakes are told where they are made."""

from __future__ import annotations

import asyncio
import random
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra import Score, Task, environment
from palaestra.cli.main import main
from palaestra.envs.api.function_form import FunctionForm
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import load_environment
from palaestra.rollouts.environment import Environment
from palaestra_slots.core.config import merge
from palaestra_slots.core.errors import ConfigError, GraderError, TaskError
from palaestra_tokens.config import APIServerConfig


def form(*answers: object, weights: tuple[float, ...] = ()) -> FunctionForm:
    """An environment of one task whose scores answer so."""

    @environment
    def toy() -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    for number, answer in enumerate(answers):

        def score(task: Task, answer: object = answer) -> object:
            return answer

        score.__name__ = f"score_{number}"
        toy.score(weight=weights[number] if weights else 1.0)(score)
    return toy


class OnlyTask:
    """A rollout for scores that ask for no more than its task."""

    task = Task(id="one", prompt="?")
    rng = random.Random(0)


class NoView:
    """The grading of a rollout whose scores ask for no sandbox."""

    async def slot(self) -> None:
        raise AssertionError("no hook asked for the sandbox")


def scored(toy: FunctionForm) -> Score:
    """What the environment makes of its scores. None of them asks for a slot or the rollout."""
    built = toy.build(toy.config_type()())
    return asyncio.run(built.score(OnlyTask(), NoView()))  # type: ignore[arg-type]


def tasks_of(built: Environment) -> list[Task]:
    async def main() -> list[Task]:
        return [task async for task in built.tasks()]

    return asyncio.run(main())


def test_parameters_become_settings_with_their_types() -> None:
    @environment(toolsets=["terminal"])
    def lines(n: int = 3, word: str = "x") -> Iterator[Task]:
        for number in range(n):
            yield Task(id=f"{word}-{number}", prompt="?")

    lines.score(lambda task: 1.0)
    config = lines.config_type()(n=2, word="y")
    assert (config.group_size, config.total_steps, config.allow_network) == (1, -1, False)
    assert [task.id for task in tasks_of(lines.build(config))] == ["y-0", "y-1"]
    with pytest.raises(ConfigError, match="n"):
        lines.config_type()(n="many")


def test_an_async_generator_will_do() -> None:
    @environment
    async def toy() -> AsyncIterator[Task]:
        yield Task(id="one", prompt="?")

    toy.score(lambda task: True)
    assert [task.id for task in tasks_of(toy.build(toy.config_type()()))] == ["one"]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [(True, 1.0), (False, 0.0), (0.5, 0.5), (2, 2.0), ((1, {"a": 0.25}), 1.0), (Score(0.75), 0.75)],
)
def test_what_a_score_may_give(answer: object, reward: float) -> None:
    assert scored(form(answer)).reward == reward


@pytest.mark.parametrize("answer", [None, "1.0", [1], (1, 2, 3)])
def test_what_is_no_score_is_the_graders_failure(answer: object) -> None:
    with pytest.raises(GraderError, match="score_0"):
        scored(form(answer))


def test_several_scores_are_a_weighted_mean_and_recorded() -> None:
    score = scored(form(1.0, (0.0, {"found": 3.0}), weights=(3.0, 1.0)))
    assert score.reward == 0.75
    assert score.metrics == {"score_0": 1.0, "score_1": 0.0, "found": 3.0}


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "2", None])
def test_a_weight_that_makes_no_mean_is_refused(weight: float) -> None:
    with raises(ConfigError, "toy", "non-negative"):
        form(1.0, weights=(weight,))


def test_scores_that_only_record_are_no_reward() -> None:
    toy = form(1.0, 0.5, weights=(0.0, 0.0))
    with raises(ConfigError, "toy"):
        toy.build(toy.config_type()())


def test_a_weight_in_the_place_of_a_hook_is_refused() -> None:
    with raises(ConfigError, "2.0"):
        form(1.0).score(2.0)  # type: ignore[call-overload]


def test_parameters_that_can_be_no_settings_are_refused() -> None:
    def private(_n: int = 1) -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    def placed(n: int = 1, /) -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    def taken(model_config: int = 1) -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    def ours(recorded: bool = True) -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    for source, name in ((private, "_n"), (placed, "n"), (taken, "model_config"), (ours, "recorded")):
        with raises(ConfigError, source.__name__, name):
            environment(source).config_type()


def test_a_hook_that_asks_for_what_there_is_not_is_refused_when_declared() -> None:
    toy = form(1.0)
    with raises(ConfigError, "'sandbx'", "sandbox"):

        @toy.score
        async def bad(task: Task, sandbx: object) -> float:
            return 0.0


def test_two_scores_of_one_name_are_refused() -> None:
    toy = form(1.0)
    with raises(ConfigError, "toy", "score_0"):
        toy.score(toy.scores[0].hook.function)


def test_a_default_that_is_no_data_is_recorded_by_its_type() -> None:
    @environment
    def drawing(rng: object = random.Random(0), n: int = 1) -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    recorded = drawing.config_type()().recorded()
    assert (recorded["rng"], recorded["n"]) == ("<Random>", 1)


def test_no_score_and_clashing_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no score"):
        form().build(form().config_type()())

    @environment
    def clash(group_size: int = 3) -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    with raises(ConfigError, "group_size"):
        clash.config_type()


@pytest.mark.parametrize("produced", [["one"], [Task(id="a", prompt="?"), Task(id="a", prompt="?")]])
def test_tasks_that_are_none_or_share_an_id_are_refused(produced: list[object]) -> None:
    @environment
    def toy() -> Iterator[Task]:
        yield from produced  # type: ignore[misc]

    toy.score(lambda task: 1.0)
    with pytest.raises(TaskError):
        tasks_of(toy.build(toy.config_type()()))


def test_a_function_that_waits_for_its_rows_holds_nobody_up() -> None:
    """All of it runs in one thread, as what it reads from may ask for, and the loop goes on meanwhile."""
    asked, may_go_on, threads = threading.Event(), threading.Event(), set()

    @environment
    def slow() -> Iterator[Task]:
        for number in range(3):
            threads.add(threading.get_ident())
            asked.set()
            assert may_go_on.wait(10)
            yield Task(id=f"{number}", prompt="?")
        threads.add(threading.get_ident())

    slow.score(lambda task: 1.0)

    async def main() -> list[str]:
        async def look() -> None:
            await asyncio.to_thread(asked.wait, 10)
            may_go_on.set()

        looking = asyncio.create_task(look())
        found = [task.id async for task in slow.build(slow.config_type()()).tasks()]
        await looking
        return found

    assert asyncio.run(main()) == ["0", "1", "2"]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("answers_later", [False, True])
def test_plain_scores_that_wait_hold_nobody_up(answers_later: bool) -> None:
    """Each waits for the other, whether it answers at once or returns what is to be awaited."""
    both = threading.Barrier(2, timeout=30)

    def waiting(task: Task) -> object:
        both.wait()
        return asyncio.sleep(0, 0.5) if answers_later else 0.5

    forms = form(), form()
    for toy in forms:
        toy.score(waiting)
    built = [toy.build(toy.config_type()()) for toy in forms]

    async def main() -> list[Score]:
        return await asyncio.gather(*(each.score(OnlyTask(), NoView()) for each in built))  # type: ignore[arg-type]

    assert [score.reward for score in asyncio.run(main())] == [0.5, 0.5]


def test_a_function_that_breaks_says_at_which_task() -> None:
    @environment
    def toy() -> Iterator[Task]:
        yield Task(id="one", prompt="?")
        raise KeyError("prompt")

    toy.score(lambda task: True)
    with raises(ConfigError, "toy", "KeyError", "prompt"):
        tasks_of(toy.build(toy.config_type()()))


def test_a_score_is_recorded_under_its_name_whatever_another_calls_a_metric() -> None:
    found = scored(form(Score(0.25, {"score_1": 9.0, "more": 2.0}), (0.75, {"score_0": 7.0})))
    assert (found.reward, found.metrics) == (0.5, {"score_0": 0.25, "score_1": 0.75, "more": 2.0})


def test_a_parameter_whose_default_is_a_text_is_one() -> None:
    @environment
    def versions(version="3.9", ratio=1, given=None) -> Iterator[Task]:  # type: ignore[no-untyped-def]
        yield Task(id=version, prompt="?")

    settings = versions.config_type()
    line = CommandLine("versions", settings, APIServerConfig)
    words = ["process", "--env.version", "3.10", "--env.ratio", "0.5", "--env.given", "null"]
    parsed = line.parse(words)
    assert isinstance(parsed, Parsed)
    own = parsed.env_config.model_dump(include={"version", "ratio", "given"})
    assert own == {"version": "3.10", "ratio": 0.5, "given": None}


def test_what_a_newcomer_forgets_is_told() -> None:
    def toy(n: int) -> None:
        Task(id="one", prompt="?")

    made = environment(toy)  # type: ignore[arg-type]
    made.score(lambda task: True)
    settings = made.config_type()
    with raises(ConfigError):
        merge(settings, [])
    with raises(ConfigError, "NoneType"):
        tasks_of(made.build(settings(n=1)))
    with raises(ConfigError):
        environment(toolsets="terminal")(toy)  # type: ignore[arg-type]


ODD = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def odd():
    yield Task(id="file", prompt="?", files={"a": "x", "b": 3})
    yield Task(id="toolsets", prompt="?", toolsets="terminal")
    yield Task(id="setup", prompt="?", setup=b"true")
    yield Task(id="recipe", prompt="?", recipe=1)
    yield Task(id="image", prompt="?", image="--privileged")

odd.score(lambda task: 1.0)
"""


@pytest.mark.parametrize(
    ("marker", "environment"),
    [("task.toml", "terminalbench_2"), ("task.yaml", "terminalbench_2"), ("task.json", "endless_terminals")],
)
def test_a_folder_of_tasks_is_played_by_the_environment_for_such_tasks(
    marker: str, environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("palaestra_suites")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tb/one").mkdir(parents=True)
    (tmp_path / "tb/one" / marker).touch()
    (tmp_path / "empty").mkdir()
    for folder in ("tb/one", "tb", f"{tmp_path}/tb"):
        form = load_environment(folder, tmp_path)
        config, _ = form.defaults()
        assert config is not None
        path = str((tmp_path / folder).resolve())
        assert (form.name, form.reference, config.dataset_name) == (environment, path, path)
        assert load_environment(form.reference, tmp_path).name == environment  # as `palaestra resume` does
    assert main(["run", "./empty"]) == 2
    check_message(capsys.readouterr().err, "empty")
    assert main(["run", "./"]) == 2  # a folder above
    assert re.search(r"Did you mean (\S*/)?tb\?", capsys.readouterr().err)


def test_an_environment_of_a_library_that_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("palaestra_integrations")
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    assert main(["run", "inspect:inspect_evals/humaneval"]) == 2
    assert re.search(r"need the extra 'inspect': pip install .*\[inspect\]", capsys.readouterr().err)


@pytest.mark.slots
def test_a_task_that_cannot_be_meant_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd_env.py").write_text(ODD)
    assert main(["run", "odd_env.py", "--policy", "noop"]) == 3
    shown = capsys.readouterr().err
    for task, wrong in (
        ("file", "'b' is 3"),
        ("toolsets", "['terminal']"),
        ("setup", "b'true'"),
        ("recipe", "1"),
        ("image", "'--privileged'"),
    ):
        check_message(shown, "1 group failed", f"task {task}: ", wrong)


BARE = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def bare():
    yield Task(id="bare", prompt="?", toolsets=[], solution="echo done > done")

@bare.score
async def done(sandbox):
    return await sandbox.stat("done") is not None
"""


@pytest.mark.slots
def test_a_task_with_an_empty_list_of_toolsets_has_no_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bare_env.py").write_text(BARE)
    assert main(["run", "bare_env.py", "--policy", "oracle"]) == 3
    check_message(capsys.readouterr().err, "terminal")


FORGETFUL = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def forgetful():
    yield Task(id="score", prompt="?", files={"a": "1"}, solution="true")
    yield Task(id="prepare", prompt="?", files={"a": "1"}, solution="true")
    yield Task(id="attribute", prompt="?", files={"a": "1"}, solution="true")

@forgetful.prepare
def prepared(task, sandbox):
    if task.id == "prepare":
        sandbox.write_text("b", "2")

@forgetful.score
async def there(task, rollout, sandbox):
    if task.id == "attribute":
        return sandbox.execute("true").success
    return sandbox.stat("nowhere") is not None or (await sandbox.read_text("a")) == "1"
"""


@pytest.mark.slots
def test_a_call_of_the_slot_that_is_not_awaited_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("forgetful_env.py").write_text(FORGETFUL)
    assert main(["run", "forgetful_env.py", "--policy", "oracle"]) == 3
    shown = capsys.readouterr().err
    for name in ("sandbox.stat", "sandbox.write_text", "sandbox.execute"):
        assert f"NotAwaited: {name} was called" in shown


def test_loading_by_path_and_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from palaestra import Task, environment\n"
        "@environment\ndef first():\n    yield Task(id='a', prompt='?')\n"
        "@environment\ndef second():\n    yield Task(id='b', prompt='?')\n"
    )
    assert isinstance(load_environment(f"{path}:second", tmp_path), FunctionForm)
    with pytest.raises(ConfigError, match="first, second"):
        load_environment(str(path), tmp_path)
    with raises(ConfigError, "second"):
        load_environment(f"{path}:secnd", tmp_path)
    with raises(ConfigError):
        load_environment(str(tmp_path / "absent.py"), tmp_path)
    path.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_environment(str(path), tmp_path)
