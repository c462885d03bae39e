"""What the real shells complete, with the scripts that `palaestra completion` prints."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class

from palaestra.cli.main import cli, main

ENV = """
from palaestra import Task, environment

@environment(toolsets=[])
def words(number_of_words: int = 1):
    yield Task(id="w", prompt="p")

@words.score
def right(task): return 1
"""
TIMEOUT_S = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment and a run of it, and `palaestra` on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    Path("my_env.py").write_text(ENV)
    assert main(["run", "my_env.py", "--policy", "noop"]) == 0
    return tmp_path


class Terminal:
    """An interactive shell in a terminal."""

    def __init__(self, *argv: str) -> None:
        self.fd, shell = pty.openpty()
        environ = {**os.environ, "TERM": "dumb", "HISTFILE": "/dev/null"}
        self.process = subprocess.Popen(
            argv, stdin=shell, stdout=shell, stderr=shell, env=environ, start_new_session=True
        )
        os.close(shell)
        self.said = ""

    def type(self, text: str) -> None:
        self.said = ""
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Read until the screen shows it."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.said):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern} is not in {self.said!r}"
            if select.select([self.fd], [], [], left)[0]:
                self.said += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self.fd, 4096).decode(errors="replace"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


TYPED = [
    ("palaestra resu", r"palaestra resume"),
    ("palaestra run terminal_t", r"terminal_test"),
    ("palaestra run my_", r"my_env\.py"),
    ("palaestra run my_env.py --env.number_", r"--env\.number_of_words"),
    ("palaestra run my_env.py --policy or", r"oracle"),
    ("palaestra run my_env.py --env.short_groups wh", r"whole"),
    ("palaestra env check my_env.py --env.number_", r"--env\.number_of_words"),
    ("palaestra status la", r"last"),
    ("palaestra resume last --env.number_", r"--env\.number_of_words"),
    ("palaestra export last --to shar", r"sharegpt"),
]


@pytest.mark.parametrize(
    ("argv", "setup"),
    [
        (("bash", "--norc", "-i"), "PS1='READY> '; set +o history; bind 'set enable-bracketed-paste off'; "),
        (("zsh", "-f", "-i"), "PS1='READY> '; autoload -Uz compinit && compinit -u -D; unsetopt zle_bracketed_paste; "),
    ],
)
def test_an_interactive_shell_completes_what_is_typed(argv: tuple[str, ...], setup: str, folder: Path) -> None:
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    terminal = Terminal(*argv)
    try:
        terminal.type(f'{setup}eval "$(palaestra completion {argv[0]})"; echo LOA""DED\n')
        terminal.wait_for("LOADED")
        for typed, wanted in TYPED:
            terminal.type("\x15" + typed + "\t")
            terminal.wait_for(wanted)
    finally:
        terminal.close()


def test_fish_completes_what_is_typed(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    asked = "; ".join(f"complete -C '{typed}'; echo ----" for typed, _ in TYPED)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"palaestra completion fish | source; {asked}"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    answers = done.stdout.split("----\n")
    for (typed, wanted), answer in zip(TYPED, answers, strict=False):
        assert re.search(wanted.removeprefix("palaestra "), answer), (typed, answer)


def completed(typed: str) -> list[str]:
    """What is offered in place of the last word."""
    *words, incomplete = typed.split(" ")
    kind = get_completion_class("bash")
    assert kind is not None
    return [item.value for item in kind(cli, {}, "palaestra", "_PALAESTRA_COMPLETE").get_completions(words, incomplete)]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("compare la", ["last"]),
        ("compare last la", ["last"]),
        ("report la", ["last"]),
        ("batch --run-n", ["--run-name"]),
        ("batch p.jsonl --max-tu", ["--max-turns"]),
        ("batch p.jsonl --distribution browser_o", ["browser_only"]),
        ("batch p.jsonl --toolsets terminal_s", ["terminal_stateful"]),
        ("run --policy ora", ["oracle"]),
        ("run --policy oracle my_", ["my_env.py"]),
        ("run --policy oracle my_env.py eva", ["evaluate"]),
        ("run --policy oracle my_env.py --env.number_o", ["--env.number_of_words"]),
        ("run my_env.py --env.isolation use", ["userns"]),
        ("run my_env.py --backend docker_", ["docker_direct"]),
        ("run --backend sing", ["singularity"]),
        ("run --max-c", ["--max-cost"]),
        ("env check --only conftest-s", ["conftest-skip"]),
        ("env check my_env.py --only conftest-s", ["conftest-skip"]),
        ("resume --max-c", ["--max-cost"]),
        ("resume --tasks 3 la", ["last"]),
    ],
)
def test_every_place_of_a_command_line_completes(typed: str, wanted: list[str], folder: Path) -> None:
    assert completed(typed) == wanted


@pytest.mark.parametrize(
    "words", ["palaestra run broken_env.py --", "palaestra status nothing", "palaestra run no --env."]
)
def test_what_cannot_be_read_completes_nothing(words: str, folder: Path) -> None:
    Path("broken_env.py").write_text("def (")
    asked = {"_PALAESTRA_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(["palaestra"], env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "env." not in done.stdout
