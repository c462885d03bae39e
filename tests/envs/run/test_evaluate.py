"""`evaluate` of both forms: which tasks, how often, what is said of them, and where it is written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from envs import scripts
from golden_messages import check_message, raises
from palaestra.cli.main import main
from palaestra.envs.config.fields import HeldOutConfig
from palaestra.rollouts.journal.reader import Recording
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Outcome
from palaestra_suites.endless_terminals.endless_terminals import EndlessEnvironment, EndlessTerminalsEnvConfig

pytestmark = pytest.mark.slots


def palaestra(*argv: str) -> int:
    return main(list(argv))


def figures(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())["results"]["all"]


@pytest.fixture
def lines_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("lines_env.py").write_text(scripts.COUNT_LINES)
    return "lines_env.py"


def test_a_function_environment_is_evaluated(lines_env: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert palaestra("eval", lines_env, "--samples", "2", "--env.n", "3", "--policy", "oracle") == 0
    (folder,) = Path("runs").glob("*/*/evaluation")
    found = figures(folder)
    assert (found["tasks"], found["attempts"], found["unscored"]) == (3, 6, 0)
    assert (found["pass@1"], found["pass@2"], found["mean_reward"]) == (1.0, 1.0, 1.0)
    assert 0.2 < found["pass@1/low"] < 1.0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(each["task_id"], each["index"], each["passed"]) for each in samples] == [
        (f"lines-{task}", index, True) for task in range(3) for index in range(2)
    ]
    assert "pass@1 1.000 (" in capsys.readouterr().err
    (groups,) = Path("runs").glob("*/*/groups.jsonl")  # those whose scores are all equal, too
    assert [json.loads(line)["scores"] for line in groups.read_text().splitlines()] == [[1.0, 1.0]] * 3


def test_no_task_is_both_trained_on_and_evaluated(lines_env: str) -> None:
    config = HeldOutConfig(held_out=0.4, seed=3)
    wanted = {f"lines-{n}" for n in range(8) if config.is_held_out(f"lines-{n}")}
    assert 0 < len(wanted) < 8
    settings = ["--env.n=8", "--env.held_out=0.4", "--env.seed=3", "--policy=noop"]
    assert palaestra("eval", lines_env, *settings, "--env.data_dir_to_save_evals=evals") == 0
    evaluated = {json.loads(line)["task_id"] for line in Path("evals/samples.jsonl").read_text().splitlines()}
    assert palaestra("run", lines_env, *settings) == 0
    given = {json.loads(line)["task_id"] for line in scripts.groups_file().read_text().splitlines()}
    assert evaluated == wanted
    assert given == {f"lines-{n}" for n in range(8)} - wanted


def test_nothing_held_out_is_one_message(lines_env: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert palaestra("eval", lines_env, "--env.n=2", "--env.held_out=0.001", "--policy=noop") == 2
    assert "held_out is 0.001" in capsys.readouterr().err


def test_what_is_held_out_is_drawn_by_id_and_seed_alone() -> None:
    ids = [f"task-{number}" for number in range(2000)]
    half = {each for each in ids if HeldOutConfig(held_out=0.5).is_held_out(each)}
    assert 900 < len(half) < 1100
    fewer = {each for each in ids if HeldOutConfig(held_out=0.1).is_held_out(each)}
    assert fewer < half
    assert half != {each for each in ids if HeldOutConfig(held_out=0.5, seed=1).is_held_out(each)}
    assert not any(HeldOutConfig().is_held_out(each) for each in ids)


def test_a_class_with_a_list_of_items_keeps_some_back() -> None:
    def items(**settings: object) -> tuple[list[str], list[str], list[str]]:
        env = EndlessEnvironment(EndlessTerminalsEnvConfig(n=30, level=1, **settings))  # type: ignore[arg-type]

        async def drawn() -> tuple[list[str], list[str]]:
            await env.open()
            given, evaluated = env.tasks(), env.evaluating().tasks()
            return [task.id async for task in given], [task.id async for task in evaluated]

        return *asyncio.run(drawn()), [item.id for item in env.items]

    given, evaluated, known = items(held_out=0.3)
    assert sorted(given + evaluated) == sorted(known)
    assert 0 < len(evaluated) < 20
    given, evaluated, known = items()
    assert given == evaluated == known
    with raises(ConfigError, "held_out", "1e-09", "30"):
        items(held_out=1e-9)


@pytest.mark.parametrize(
    ("verb", "says"),
    [("eval", "no environment is called 'process'"), ("feed", "unexpected word 'process' after serve")],
)
def test_a_front_door_has_its_command_already(
    verb: str, says: str, lines_env: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert palaestra(verb, lines_env, "process") == 2
    assert says in capsys.readouterr().err
    assert palaestra(verb, "--samples", lines_env) == 2
    assert "Missing argument 'ENV'" in capsys.readouterr().err


def test_a_class_is_run_without_a_word_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text(scripts.CLASS_ENV)
    assert palaestra("run", "words_env.py", "--policy", "oracle", "--tasks", "1", "--group", "1") == 0
    (line,) = scripts.groups_file().read_text().splitlines()
    assert json.loads(line)["scores"] == [1.0]


def test_a_script_without_a_main_guard_is_run_by_whoever_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text(scripts.CLASS_ENV.replace('if __name__ == "__main__":', "if True:"))
    assert palaestra("run", "words_env.py", "--policy", "oracle", "--tasks", "1", "--group", "1") == 0
    assert len(scripts.groups_file().read_text().splitlines()) == 1


def test_a_run_does_not_go_on_as_an_evaluation(lines_env: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert palaestra("run", lines_env, "--policy", "oracle") == 0
    (folder,) = Path().glob("runs/*/*")
    journal = (folder / "journal.jsonl").read_bytes()
    assert palaestra("eval", lines_env, "--policy", "oracle", "--resume", str(folder)) == 2
    check_message(capsys.readouterr().err, "error: ", folder)
    assert (folder / "journal.jsonl").read_bytes() == journal


@pytest.mark.parametrize("command", ["run", "eval"])
def test_it_does_not_go_on_with_other_tasks(command: str, lines_env: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A group that was under way counts too: the journal would tell of both tasks under one number."""
    said = (command, lines_env, "--policy", "oracle", "--concurrency", "1")
    assert palaestra(*said) == 0
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    until = next(n for n, line in enumerate(lines) if b'"event":"group",' in line)
    journal.write_bytes(b"".join(lines[: until + 1]))
    Path(lines_env).write_text(scripts.COUNT_LINES.replace('f"lines-{i}"', 'f"other-{i}"'))
    assert palaestra(*said, "--resume", str(journal.parent)) == 2
    assert "other-0, but was lines-0" in capsys.readouterr().err


LISTED = """
from palaestra import Score
from palaestra_slots.core.config import setting
from palaestra.envs.api.listed_environment import ListedEnvironment
from palaestra.envs.config.fields import ListedEnvConfig

class ListedConfig(ListedEnvConfig):
    group_size: int = setting(2, "Rollouts per task.")
    total_steps: int = setting(-1, "Maximum number of groups.")

class Listed(ListedEnvironment):
    name = "listed"
    config_class = ListedConfig

    async def load(self):
        return ["alpha", "beta", "gamma"]

    def item_id(self, item):
        return item

    def prompt(self, item):
        return f"Write {item} to word.txt"

    def solution(self, item):
        return f"echo {item} > word.txt"

    async def score(self, rollout, grading):
        slot = await grading.slot()
        return Score(float((await slot.read_text("word.txt")).strip() == rollout.task.data))
"""


@pytest.mark.parametrize("script", [scripts.CLASS_ENV, LISTED], ids=["own-evaluate", "listed"])
@pytest.mark.parametrize(("flags", "played"), [(["--tasks", "2"], 2), ([], 3)], ids=["limited", "all"])
def test_a_class_evaluates_no_more_tasks_than_the_user_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, flags: list[str], played: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("class_env.py").write_text(script)
    assert palaestra("eval", "class_env.py", "--policy", "oracle", *flags) == 0
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    assert [group.task_id for group in Recording(journal)] == ["alpha", "beta", "gamma"][:played]
    if script is LISTED:
        found = figures(journal.parent / "evaluation")
        assert (found["tasks"], found["attempts"], found["pass@1"]) == (played, 2 * played, 1.0)


def test_a_dry_run_of_an_evaluation_counts_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("listed_env.py").write_text(LISTED)
    Path("words_env.py").write_text(scripts.CLASS_ENV)

    def plan(*argv: str) -> tuple[int | None, int | None]:
        assert palaestra("eval", *argv, "--policy", "oracle", "--dry-run", "--json") == 0
        said = json.loads(capsys.readouterr().out)
        return said["tasks"], said["most_tasks"]

    assert plan("listed_env.py") == (3, None)
    assert plan("listed_env.py", "--tasks", "2") == (2, 2)
    assert plan("words_env.py", "--tasks", "2") == (None, 2)
    assert palaestra("eval", "words_env.py", "--policy", "oracle", "--tasks", "2", "--dry-run") == 0
    assert "at most 2" in capsys.readouterr().out


def test_items_may_be_evaluated_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    at_once = "import asyncio\n" + scripts.CLASS_ENV.replace(
        "done = await self.evaluate_items(self.items, 2)",
        "each = await asyncio.gather(*(self.evaluate_items([item], 2) for item in self.items)); done = sum(each, [])",
    )
    Path("words_env.py").write_text(at_once)
    assert palaestra("eval", "words_env.py", "--policy", "oracle", "--env.data_dir_to_save_evals", "evals") == 0
    assert figures(Path("evals")) == {"mean": 1.0}
    samples = [json.loads(line)["id"] for line in Path("evals/samples.jsonl").read_text().splitlines()]
    assert samples == ["alpha", "alpha", "beta", "beta", "gamma", "gamma"]
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    assert [group.task_id for group in Recording(journal)] == ["alpha", "beta", "gamma"]


def test_an_evaluation_whose_rollouts_were_cut_short_has_no_figures_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text(scripts.CLASS_ENV.replace("t.reward for", "t.reward or 0.0 for"))
    prices = ("--env.prompt_price", "1", "--env.completion_price", "1")
    said = ("eval", "words_env.py", "--policy", "oracle", "--env.data_dir_to_save_evals", "evals", *prices)
    assert palaestra(*said, "--concurrency", "3", "--max-cost", "0.000001") == 3
    (run,) = Path().glob("runs/*/*")
    ended = [each.outcome for group in Recording(run / "journal.jsonl") for each in group.trajectories]
    assert ended.count(Outcome.CANCELLED) > 0
    assert len(ended) == 6
    assert not Path("evals").exists()
    assert palaestra(*said, "--max-cost", "1", "--resume", str(run)) == 0
    assert figures(Path("evals")) == {"mean": 1.0}


LOGGING = """
import pathlib
from palaestra import BaseEnv

class LoggingEnv(BaseEnv):
    name = "logging"

    async def setup(self): ...

    async def get_next_item(self): ...

    async def collect_trajectory(self, item): ...

    async def evaluate(self, *args, **kwargs):
        samples = [{"path": pathlib.Path("a"), "score": 1.0}, {"score": 0.5}]
        await self.evaluate_log({"mean": 0.75}, "mine", None, 10.0, 12.5, {"temperature": 0.0}, samples, False)
"""


def test_what_an_evaluation_logs_is_kept_in_the_shape_of_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logging_env.py").write_text(LOGGING)
    assert palaestra("eval", "logging_env.py", "--policy", "noop", "--env.data_dir_to_save_evals", "evals") == 0
    assert json.loads(Path("evals/metrics.json").read_text()) == {
        "config_general": {
            "model_name": "noop",
            "total_evaluation_time_seconds": "2.5",
            "generation_parameters": {"temperature": 0.0},
        },
        "results": {"atropos|mine|0": {"mean": 0.75}, "all": {"mean": 0.75}},
    }
    samples = [json.loads(line) for line in Path("evals/samples.jsonl").read_text().splitlines()]
    assert samples == [{"path": "<PosixPath>", "score": 1.0}, {"score": 0.5}]


def test_samples_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logging_env.py").write_text(LOGGING.replace("samples, False", "None"))
    assert palaestra("eval", "logging_env.py", "--policy", "noop", "--env.data_dir_to_save_evals", "evals") == 0
    assert figures(Path("evals")) == {"mean": 0.75}
    assert Path("evals/samples.jsonl").read_text() == ""


def test_an_evaluation_that_logs_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logging_env.py").write_text(LOGGING.partition("        samples = ")[0] + "        return {'mean': 0.75}\n")
    assert palaestra("eval", "logging_env.py", "--policy", "noop") == 0
    assert "logged no metrics" in capsys.readouterr().err


def test_names_of_figures_may_be_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logging_env.py").write_text(LOGGING.replace('"mean": 0.75', '"mean": 0.75, 5: 0.5'))
    assert palaestra("eval", "logging_env.py", "--policy", "noop", "--env.data_dir_to_save_evals", "evals") == 0
    assert figures(Path("evals")) == {"mean": 0.75, "5": 0.5}
