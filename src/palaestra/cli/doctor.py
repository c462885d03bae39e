"""`palaestra doctor`: what this machine can isolate, and why not more.

The facts come from really making a throw-away slot on every rung (`palaestra.sandbox.ladder`), never from versions or
names. Exit code 5 when not even the lowest protecting rung is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from palaestra.core.errors import IsolationUnavailable
from palaestra.core.types import JSON
from palaestra.sandbox.base import Rung, Step


@click.command(
    "doctor",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Show what this machine can isolate, and why not more.

    \b
      palaestra doctor
      palaestra doctor --json | jq '.ladder[] | select(.available)'

    The rungs, best first: full (all namespaces and cgroup limits; root in a slot is nobody outside), userns (no root
    needed; no cgroup limits), confined (for ordinary containers), none (commands run as you, unprotected; never
    chosen unless asked for by name). The table says which of them this version has.
    """,
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(as_json: bool) -> None:
    from palaestra.sandbox.ladder import probe

    ladder = sorted(asyncio.run(probe()), key=lambda step: -step.rung)
    facts = machine_facts()
    if as_json:
        click.echo(json.dumps({"machine": facts, "ladder": [_plain(step) for step in ladder]}, indent=2))
    elif sys.stdout.isatty():
        _show_table(facts, ladder)
    else:
        for name, value in facts.items():
            click.echo(f"{name}: {value}")
        for step in ladder:
            click.echo(f"{step.rung.label}: {_state(step)}: {step.reason}")
    if not as_json:
        click.echo(verdict(ladder))
    if not any(step.available and step.rung > Rung.NONE for step in ladder):
        raise IsolationUnavailable("no rung of the ladder can be had here; the reasons are above")


def verdict(ladder: Sequence[Step]) -> str:
    """The line that says what a run would use."""
    best = max((step.rung for step in ladder if step.available and step.rung > Rung.NONE), default=None)
    return "runs refuse to start" if best is None else f"runs use: {best.label}"


def machine_facts() -> dict[str, str]:
    """What the ladder depends on, as text."""
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "cpus": str(len(os.sched_getaffinity(0))),
        "cgroup": _cgroup(),
        "git": _version("git"),
    }


def _cgroup() -> str:
    root = Path("/sys/fs/cgroup")
    controllers = root / "cgroup.controllers"
    try:
        if controllers.is_file():
            return f"v2 ({controllers.read_text().strip() or 'no controllers'})"
        found = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return f"v1 ({' '.join(found)})" if found else "not mounted"


def _version(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        return "not found"
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    return answer.stdout.strip() or f"does not answer (exit code {answer.returncode})"


def _plain(step: Step) -> dict[str, JSON]:
    return {
        "rung": step.rung.label,
        "available": step.available,
        "reason": step.reason,
        "covers": list(step.covers),
    }


def _state(step: Step) -> str:
    return "yes" if step.available else "no"


def _show_table(facts: dict[str, str], ladder: Sequence[Step]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for name, value in facts.items():
        console.print(f"[dim]{name:>7}[/]  {escape(value)}", highlight=False)
    table = Table(title="Isolation, best first", title_justify="left")
    for heading in ("rung", "here", "why", "covers"):
        table.add_column(heading, overflow="fold")
    for step in ladder:
        here = "[green]yes[/]" if step.available else "[red]no[/]"
        table.add_row(step.rung.label, here, escape(step.reason), escape(", ".join(step.covers)))
    console.print(table)
