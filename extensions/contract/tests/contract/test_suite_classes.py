"""The class names that existing scripts use for the environments of the suites."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra
from envs.scripts import groups_file
from palaestra.cli.main import main
from palaestra_audit.cheats.proof import check_environment
from palaestra_suites import hermes_swe

NAMES = ("EndlessTerminalsEnv", "HermesSweEnv", "SweSmithOracleEnv", "TerminalBench2EvalEnv")

OWN = """
from palaestra import APIServerConfig, HermesSweEnv

class OwnConfig(HermesSweEnv.env_config_cls):
    least: int = 2

class OwnEnv(HermesSweEnv):
    name = "own"
    env_config_cls = OwnConfig

    @classmethod
    def config_init(cls):
        return OwnConfig(max_items=3, group_size=2), [APIServerConfig()]
#
if __name__ == "__main__":
    OwnEnv.cli()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_class_is_one_of_the_contract_with_the_settings_of_its_suite(name: str) -> None:
    kind = getattr(palaestra, name)
    config, servers = kind.config_init()
    assert issubclass(kind, palaestra.HermesAgentBaseEnv)
    assert isinstance(config, kind.env_config_cls)
    assert kind(config, servers).as_environment().name == kind.name == kind.suite.name


@pytest.mark.slots
def test_a_subclass_keeps_its_name_and_settings(capfd: pytest.CaptureFixture[str]) -> None:
    Path("own_env.py").write_text(OWN)
    flags = ["process", "--policy", "oracle", "--env.least", "1", "--env.include_messages", "true"]
    done = subprocess.run([sys.executable, "own_env.py", *flags], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert [(line["env"], line["scores"]) for line in lines] == [("own", [1.0, 1.0])] * 3
    assert all(len(tokens) == len(masks) for tokens, masks in zip(lines[0]["tokens"], lines[0]["masks"], strict=True))
    assert {*lines[0]["masks"][0]} == {-100}, "a server without tokens gives placeholders, which train nothing"


@pytest.mark.parametrize(
    "hook",
    [
        "async def compute_reward(self, item, result, ctx):\n        return 1.0",
        "def format_prompt(self, item):\n        return '?'",
        "async def collect_trajectory(self, item):\n        return None, []",
    ],
)
def test_a_hook_that_the_suite_would_not_call_is_refused(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_env.py").write_text(OWN.replace("#", f"    {hook}"))
    assert main(["run", "own_env.py", "--policy", "noop"]) == 2
    name = hook.partition("(")[0].split()[-1]
    assert f"OwnEnv overrides {name}, which HermesSweEnvironment never calls" in capsys.readouterr().err


@pytest.mark.slots
@pytest.mark.parametrize("moved", ["", "in the suite's module", "of a version with other folders"])
def test_a_run_of_a_public_class_resumes(moved: str) -> None:
    palaestra.run_sync(palaestra.HermesSweEnv, policy="oracle", tasks=2, group_size=1)
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    assert json.loads(lines[0])["config"]["environment"].endswith("suite_classes.py:HermesSweEnv")
    module = Path(str(hermes_swe.__file__)).with_name("hermes_swe.py")
    if moved == "of a version with other folders":
        module = Path("/usr/lib/python3/site-packages/palaestra/suites/hermes_swe/hermes_swe.py")
    found = ["--environment", f"{module}:HermesSweEnv"] if moved else []
    until = next(number for number, line in enumerate(lines) if '"event":"group_end"' in line)
    journal.write_text("".join(lines[: until + 1]))
    assert main(["resume", str(journal.parent), "--policy", "oracle", *found]) == 0
    assert len((journal.parent / "groups.jsonl").read_text().splitlines()) == 2


@pytest.mark.slots
def test_the_check_of_a_public_class_uses_its_suites_values(tmp_path: Path) -> None:
    path = tmp_path / "bench_env.py"
    path.write_text("from palaestra import TerminalBench2EvalEnv\n")
    proof = check_environment(str(path), [], tasks=1, only=["stale-reward"], quiet=True)
    assert proof.holds, [line for line in proof.lines if not line.ok]
