"""Bad data sets, in every environment that has one: one clear message, exit code 2, and no run folder.

That a run goes on with the rest and says what it left out is tested beside each environment.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.rollouts.journal.reader import Recording
from palaestra_slots.core.types import Blame

pytestmark = pytest.mark.slots

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
WITH_A_DATA_SET = ("swe_smith_oracle", "terminalbench_2", "endless_terminals", "hermes_swe")
HUB = pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the extra `hub` is here")


def told(name: str, source: str, *flags: str) -> None:
    """Start a run that must not begin."""
    command = ["run", str(ENVIRONMENTS / f"{name}_env.py"), "process", "--env.dataset_name", source, *flags]
    assert main([*command, "--policy", "noop"]) == 2
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", WITH_A_DATA_SET)
def test_a_source_without_a_usable_row_is_one_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("\n")
    Path("bad.csv").write_text("colour\nred\n")
    wanted = {
        "absent.jsonl": "there is no data set absent.jsonl",
        "empty.jsonl": "no (usable )?task",
        "bad.csv": "1 left out",
    }
    for source, message in wanted.items():
        told(name, source)
        shown = capsys.readouterr().err
        (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
        assert re.search(message, line), (source, line)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("terminalbench_2", "base_image", "the root file system absent does not exist"),
        ("terminalbench_2", "images.fix", "the root file system absent does not exist"),
        ("terminalbench_2", "image_dir", "the folder of root file systems absent does not exist"),
        ("endless_terminals", "image", "the root file system absent does not exist"),
    ],
)
def test_a_root_file_system_that_no_task_can_have(
    name: str,
    setting: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "none" if name == "endless_terminals" else "built-in"
    told(name, source, f"--env.{setting}", "absent")
    assert f"error: {message}" in capsys.readouterr().err


@HUB
@pytest.mark.parametrize("name", WITH_A_DATA_SET)
def test_a_name_of_the_hub_without_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told(name, "somebody/something")
    assert "no file or folder 'somebody/something'" in capsys.readouterr().err


def test_a_column_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"quest": "x"}\n')
    told("hermes_swe", "rows.jsonl", "--env.dataset_fields", "prompt=question")
    check_message(caplog.messages, "row 1", "'question'", "quest?")


UNEVEN = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig


class UnevenEnv(HermesAgentBaseEnv):
    name = "uneven"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["todo"], group_size=1, total_steps=4)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.items = iter([{"prompt": "a"}, {"question": "b"}, {"prompt": None}, {"prompt": "d"}])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return item["prompt"]

    async def compute_reward(self, item, result, ctx):
        return 1.0

    async def evaluate(self, *args, **kwargs):
        return None
"""


def test_an_item_that_is_no_task_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("uneven_env.py").write_text(UNEVEN)
    command = ["run", "uneven_env.py", "process", "--policy", "noop"]
    assert main(command) == 3
    groups = [group for run in Path().glob("runs/*/*/journal.jsonl") for group in Recording(run)]
    assert [(group.task_id, group.blame, len(group.scored)) for group in groups[1:3]] == [
        ("item-1", Blame.TASK, 0),
        ("item-2", Blame.TASK, 0),
    ]
    assert [len(group.scored) for group in groups] == [1, 0, 0, 1]
    check_message(groups[1].error, "item 1", "KeyError: 'prompt'", "uneven_env.py, line 20")
    assert "format_prompt returned None" in groups[2].error
    assert "4 groups (2 failed)" in capsys.readouterr().err


def test_an_item_that_cannot_be_had_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("uneven_env.py").write_text(UNEVEN.replace("next(self.items, None)", "self.nothing[0]"))
    command = ["run", "uneven_env.py", "process", "--policy", "noop"]
    assert main(command) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    check_message(line, "item 0", "get_next_item", "AttributeError")
    assert line.endswith("(uneven_env.py, line 17)")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("x = 1\ny = z\n", "an_env.py cannot be loaded: NameError: name 'z' is not defined (an_env.py, line 2)"),
        ("import json\njson.loads('{')\n", "(an_env.py, line 2)"),
        (
            "from palaestra import environment\n@environment\ndef x(n: 'Nothing' = 1): ...\n",
            "environment x: its parameters cannot be read: name 'Nothing' is not defined",
        ),
        ("import sys\n\nsys.exit(3)\n", "an_env.py cannot be loaded: SystemExit: 3 (an_env.py, line 3)"),
    ],
    ids=["name", "library", "annotation", "exit"],
)
def test_a_script_that_cannot_be_loaded_says_where(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("an_env.py").write_text(script)
    assert main(["run", "an_env.py", "--policy", "noop"]) == 2
    assert said in capsys.readouterr().err
    assert main(["run", "an", "--policy", "noop"]) == 2
    assert "the name an_env.py" in capsys.readouterr().err


BROKEN = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig


class BrokenEnv(HermesAgentBaseEnv):
    name = "broken"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["todo"], group_size=1, total_steps=1)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    def __init__(self, *given, **named):
        super().__init__(*given, **named)

    def setup(self):
        self.items = [{"id": "one"}]

    def get_next_item(self):
        return self.items.pop() if self.items else None

    def format_prompt(self, item):
        return "?"

    async def compute_reward(self, item, result, ctx):
        return 1.0

    async def evaluate(self, *args, **kwargs):
        await self.evaluate_items(self.items)
"""


@pytest.mark.parametrize("command", ["process", "evaluate"])
@pytest.mark.parametrize(
    ("line", "said", "begun"),
    [
        ("        config = ", "BrokenEnv.config_init failed with KeyError: 'rows' (broken_env.py, line 10)", False),
        ("        super()", "BrokenEnv(config, servers) failed with KeyError: 'rows' (broken_env.py, line 14)", False),
        (
            "        self.items = ",
            "broken cannot begin: setup failed with KeyError: 'rows' (broken_env.py, line 17)",
            False,
        ),
        (
            "        await self.evaluate_items",
            "cannot evaluate broken: evaluate failed with KeyError: 'rows' (broken_env.py, line 29)",
            True,
        ),
    ],
)
def test_what_fails_in_a_class_is_one_message(
    line: str,
    said: str,
    begun: bool,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken_env.py").write_text(BROKEN.replace(line, f"        {{}}['rows']\n{line}"))
    arguments = ["run", "broken_env.py", command, "--policy", "noop"]
    ended = main(arguments)
    if begun and command == "process":
        assert ended == 0
        return
    assert ended == 2
    assert f"error: {said}" in capsys.readouterr().err
    assert not Path("runs").exists()


VERIFYING = """
from palaestra import HermesAgentBaseEnv, HermesAgentEnvConfig, Score

ANSWERS = {"number": 0.5, "nothing": (1, None), "detail": (True, {"a": 2, "b": "c"}), "score": Score(0.25, {"m": 3.0}),
           "none": None, "one": (1.0,), "text": ("1.0", {})}

class VerifyingEnv(HermesAgentBaseEnv):
    name = "verifying"

    @classmethod
    def config_init(cls):
        return HermesAgentEnvConfig(enabled_toolsets=["todo"], group_size=1, total_steps=len(ANSWERS)), []

    def setup(self):
        self.items = iter(ANSWERS)

    def get_next_item(self):
        return {"id": name} if (name := next(self.items, None)) else None

    def format_prompt(self, item):
        return "?"

    async def compute_reward(self, item, result, ctx): ...

    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        return ANSWERS[item["id"]]

    async def evaluate(self, *args, **kwargs): ...
"""


def test_what_a_class_scores_is_read_as_what_a_function_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("verifying_env.py").write_text(VERIFYING)
    line = ["run", "verifying_env.py", "--policy", "noop", "--env.infra_retries", "0"]
    assert main(line) == 3
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    found = {group.task_id: group.trajectories[0] for group in Recording(journal)}
    assert {name: each.reward for name, each in found.items() if each.scored} == {
        "number": 0.5,
        "nothing": 1.0,
        "detail": 1.0,
        "score": 0.25,
    }
    assert (found["detail"].metrics, found["detail"].detail) == ({"a": 2.0}, {"a": 2, "b": "c"})
    assert found["score"].metrics == {"m": 3.0}
    for name in ("none", "one", "text"):
        assert found[name].blame is Blame.GRADER
        assert "verifying.verify_and_score_trajectory returned " in found[name].error
        assert "Score or (number, metrics)" in found[name].error


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("config, [APIServerConfig(model_name='mine')]", None),
        ("config, APIServerConfig(model_name='mine')", None),
        ("config, ServerBaseline(model_name='mine')", None),
        ("config", "UnevenEnv.config_init must return (HermesAgentEnvConfig, [APIServerConfig, …]), but returned "),
        ("config, [{}]", "UnevenEnv.config_init must return (HermesAgentEnvConfig, [APIServerConfig, …]), but "),
        (
            "__import__('palaestra').BaseEnvConfig(), []",
            "UnevenEnv.config_init returns BaseEnvConfig, which is not a HermesAgentEnvConfig",
        ),
    ],
)
def test_what_a_class_says_of_itself(
    gives: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    start = UNEVEN.index("        return config, [")
    script = UNEVEN[:start] + f"        return {gives}\n" + UNEVEN[UNEVEN.index("\n", start) :]
    Path("uneven_env.py").write_text(script.replace("import APIS", "import ServerBaseline, APIS"))
    line = ["run", "uneven_env.py", "process", "--show-config"]
    assert main(line) == (0 if said is None else 2)
    shown = capsys.readouterr()
    assert said in shown.err if said is not None else "openai.model_name = mine" in shown.out
