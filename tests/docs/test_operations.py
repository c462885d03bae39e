"""Everything on the pages about operations that can be run is run as it is printed there, and every name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from recorded import sky, write_run

from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.rollouts.idle_limits import IDLE_LIMITS
from palaestra.rollouts.observe.prometheus import exposition
from palaestra.rollouts.observe.status import Latency, RunReader
from palaestra_slots.core.config import all_settings

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["operations.md", *(f"operations/{name}.md" for name in ("resume", "limits", "metrics", "alarms"))]
PAGE = "".join(re.sub(r"```\{toctree\}.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL) for page in PAGES)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slots
def test_the_commands_work_one_after_the_other(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    argv = ["bash", "-euc", "\n".join(blocks("bash"))]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "; 12 of 12 rollouts scored" in done.stdout
    assert "rewards       12 of 12 equal" in done.stdout
    assert "; cost 0." in done.stdout
    assert "metrics at http://127.0.0.1:" in done.stderr


def test_every_alarm_asks_for_a_metric_that_there_is_and_has_its_paragraph(tmp_path: Path) -> None:
    status = RunReader(write_run(tmp_path, sky()) / "journal.jsonl").read()
    status.cost = 1.0
    status.stages = {"grade": Latency.of([2.0])}
    served = set(re.findall(r"# TYPE (\w+)", exposition(status, 0.0)))
    (rules,) = (yaml.safe_load(block)["groups"][0]["rules"] for block in blocks("yaml"))
    for rule in rules:
        asked = set(re.findall(r"palaestra_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= served
        assert re.search(rf"^\*\*[^*]*{rule['alert']}", PAGE, re.MULTILINE), f"{rule['alert']} has no paragraph"


def test_every_setting_that_is_named_exists() -> None:
    named = re.findall(r"--env\.(\w+)(?:\.(\w+))?", PAGE)
    for name, stage in named:
        if name != "FIELD":
            assert name in all_settings(HermesAgentEnvConfig)
        assert not stage or stage == "STAGE" or stage in IDLE_LIMITS
    assert len(named) > 8
    assert set(re.findall(r"^```(\w*)$", PAGE, re.MULTILINE)) == {"", "bash", "yaml"}
    assert PAGE.count("```") == 2 * sum(len(blocks(language)) for language in ("bash", "yaml"))
