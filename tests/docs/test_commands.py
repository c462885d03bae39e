"""Each flag of a printed command exists, and each page with commands either runs in a test as printed, or says here why
not."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from envs.scripts import COUNT_LINES
from palaestra.cli.main import cli
from palaestra.envs.config.command_line import GENERAL_FLAGS
from palaestra.envs.discovery import known_environments, load_environment
from palaestra_slots.core.config import all_settings
from palaestra_tokens.config import APIServerConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

CLUSTER = "needs a cluster, an account or a daemon; the backend's tests start it"
MODEL = "needs a model server that the reader names; tests of the command use one of their own"
NOT_RUN = {
    "agents.md": "installs agents from npm and PyPI: `make agents`",
    "atropos.md": "ports the printed script: test_atropos.py",
    "backends.md": CLUSTER,
    "backends/docker.md": CLUSTER,
    "backends/kubernetes.md": CLUSTER,
    "backends/modal.md": CLUSTER,
    "backends/nomad.md": CLUSTER,
    "backends/singularity.md": CLUSTER,
    "backends/slurm.md": CLUSTER,
    "backends/ssh.md": CLUSTER,
    "batch.md": MODEL,
    "chat.md": MODEL,
    "e2b.md": "starts a server in one of two terminals: `make e2b`",
    "environments/auditing.md": "audits folders and data sets that the reader names; the extension's tests run it",
    "environments/writing.md": "the printed environments run: test_printed_environments.py",
    "gateway.md": MODEL,
    "gateway/platforms.md": "needs accounts of chat platforms",
    "harbor.md": "needs Harbor's data sets: `make faces`",
    "inspect.md": "needs Inspect: `make faces`",
    "migration.md": "ports scripts and tasks that the reader has; the tests of both commands run them",
    "sandboxes/images.md": "pulls images from registries",
    "sandboxes/lifetimes.md": "asks a person before it removes what other runs left",
    "scaling.md": CLUSTER,
    "tinker.md": "the program runs: test_tinker.py",
    "tools/mcp.md": MODEL,
    "tools/recordings.md": MODEL,
    "tools/servers.md": "starts servers that do not end",
    "tools/training_models.md": MODEL,
    "view.md": "opens a browser",
}
"""Pages whose commands run in no test as they are printed, with the reason."""

RUN = {
    "environments/checking.md",
    "environments/endless_terminals.md",
    "environments/evaluating.md",
    "environments/hermes_swe.md",
    "environments/recipes.md",
    "environments/swe_smith_oracle.md",
    "environments/terminal_test.md",
    "environments/terminalbench_2.md",
    "operations.md",
    "operations/alarms.md",
    "operations/resume.md",
    "train.md",
    "train/small_models.md",
    "training.md",
    *(f"tutorial/{page.name}" for page in (DOCS / "tutorial").glob("*.md")),
}
"""Pages whose commands run in a test of this folder."""


def written() -> Iterator[Path]:
    return (page for page in sorted(DOCS.rglob("*.md")) if not {"_build", "reference"} & set(page.parts))


def commands(page: Path) -> list[list[str]]:
    """The words of each `palaestra` command in a block of a page, with continued lines joined."""
    found = re.findall(r"^```(\S*).*?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "\n".join(text for language, text in found if language != "python").replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("palaestra ")]


@pytest.fixture(scope="module")
def settings() -> set[str]:
    """The flags of the settings of every shipped environment and of model servers."""
    models: list[type[BaseModel]] = [APIServerConfig]
    flags = {f"--openai.{name}" for name in APIServerConfig.model_fields}
    for name in known_environments(ROOT):
        form = load_environment(name, ROOT)
        models.append(form.env_config_cls if hasattr(form, "env_config_cls") else form.config_type())
        flags |= {f"--env.{field}" for field in all_settings(models[-1])}
    return flags


def known(words: list[str]) -> set[str]:
    """The flags of a command: its options, and those that its help names."""
    context = click.Context(cli, info_name="palaestra", **cli.context_settings)
    command = cli.get_command(context, words[1])
    inner = 2
    while isinstance(command, click.Group) and inner < len(words):
        found = command.get_command(context, words[inner])
        if found is None:  # a group that is a command, too
            break
        command, inner = found, inner + 1
    assert command is not None, words
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    text = command.get_help(click.Context(command, parent=context)) + (command.help or "")
    return options | set(re.findall(r"--[a-z][\w.-]*", text)) | {"--help", "--help-all", *GENERAL_FLAGS}


@pytest.mark.parametrize("page", list(written()), ids=lambda page: page.stem)
def test_each_flag_exists(page: Path, settings: set[str]) -> None:
    unknown = []
    for words in commands(page):
        flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        groups = {".".join(flag.split(".")[:2]) for flag in flags if flag.startswith(("--env.", "--openai."))}
        own = {f"--env.{name}" for name in re.findall(r"^def \w+\((\w+)", page.read_text(), re.MULTILINE)} | {"--env.n"}
        if not any(re.match(r"(harbor|inspect|nemo-gym|verifiers):", word) for word in words):  # they have their own
            unknown += [(flag, words) for flag in groups - settings - own]
        unknown += [(flag, words) for flag in flags - known(words) if not flag.startswith(("--env.", "--openai."))]
    assert unknown == []


def test_each_page_with_commands_runs_or_has_a_reason() -> None:
    pages = {str(page.relative_to(DOCS)) for page in written() if commands(page)}
    assert pages == RUN | set(NOT_RUN)
    assert RUN.isdisjoint(NOT_RUN)


@pytest.mark.slots
@pytest.mark.slow
def test_the_commands_of_the_page_on_checks_run(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(COUNT_LINES)
    for words in commands(DOCS / "environments/checking.md"):
        # tests of each environment play every cheat, so one is enough here
        added = ["--only", "stale-reward"] if words[1:3] == ["env", "check"] and "--only" not in words else []
        argv = [str(Path(sys.executable).with_name("palaestra")), *words[1:], *added]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
