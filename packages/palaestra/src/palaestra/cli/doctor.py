"""`palaestra doctor`: what works on this machine, on a slot backend or on a model server, and how to fix the rest.

Isolation levels are tested by making a throw-away slot at each (`sandbox.isolation`), backends by using a few of their
slots (`sandbox.backend_check`). For a model server, doctor contacts the given address and, if the tokenizer is not on
this machine, the hub (`palaestra_tokens.server_checks`). Exit codes: 5 if no isolation level is available, 4 if the
model server cannot be reached, 1 if a check or a backend failed.
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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable
from palaestra_slots.core.exits import FAILED, report
from palaestra_slots.core.extras import extra_version
from palaestra_slots.core.io import plugins
from palaestra_slots.core.printable import printable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Rung, RungStatus

if TYPE_CHECKING:
    from palaestra_slots.sandbox.backend_check import BackendFindings
    from palaestra_tokens.server_checks import Diagnosis, DoctorCheck

_EXAMPLES = {
    "docker": "docker_image=python:3.11",
    "singularity": "singularity_image=python.sif",
    "ssh": "ssh_hosts=me@big-machine",
    "slurm": "slurm_job=12345",
    "nomad": "nomad_address=http://nomad:4646",
    "kubernetes": "kubernetes_image=python:3.11",
    "modal": "modal_image=python:3.11",
}
"""An example setting for each backend that needs one."""


@click.command(
    "doctor",
    help="""Check this machine, backends or a model server, and report how to fix what does not work.

    \b
      palaestra doctor
      palaestra doctor --json | jq '.ladder[] | select(.available)'
      palaestra doctor http://localhost:8000/v1 --model NAME
      palaestra doctor path/to/model                       # a model folder, loaded here
      palaestra doctor --backend all                       # where slots can run
      palaestra doctor --backend all --set docker_image=python:3.11 --set ssh_hosts=me@big-machine --json

    This machine: doctor tests each isolation level in a throw-away slot. The levels are full (all namespaces and
    control groups; root in a slot is an unprivileged uid outside), userns (needs neither root nor control groups),
    confined (for ordinary containers) and none (commands run as your user; used only if you choose it).

    Backends: doctor uses a few slots of each. The table shows whether the platform can be reached, the credentials,
    the isolation level, the number of slots (- means as many as memory allows), the kinds of images, whether a running
    slot can be forked, and median times. For a backend that does not work, doctor prints the reason and the fix.
    Settings come from environment variables and --set FIELD=VALUE, and keys from .env, too.

    A model server: doctor checks whether the server can be reached, accepts and returns token ids with
    log-probabilities, has a chat template that shows tools and keeps history, returns the token that ends a turn, and
    has the right tokenizer and tool parser. If you name a model, doctor fetches its tokenizer.
    """,
)
@click.argument("target", required=False, metavar="[URL | FOLDER]")
@click.option(
    "--model", "-m", help="The model's name at the server. Its tokenizer is used unless --tokenizer names another."
)
@click.option("--api-key", envvar="PALAESTRA_OPENAI_API_KEY", help="The API key, sent as a bearer token.")
@click.option("--tokenizer", help="The tokenizer: a folder or a model's name.")
@click.option(
    "--tool-parser", "--parser", "parser", default="hermes", show_default=True, help="The parser of tool calls."
)
@click.option(
    "--type",
    "server_type",
    type=click.Choice(["vllm", "sglang", "openai"]),
    help="The kind of server. Default: detected.",
)
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Check this backend, or `all`. Repeatable.")
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Set a setting of the backends. Repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    context: click.Context,
    /,
    target: str | None,
    backends: tuple[str, ...],
    settings: tuple[str, ...],
    as_json: bool,
    **server: JSON,
) -> None:
    if backends:
        if not _show_backends(backends, settings, as_json):
            context.exit(FAILED)
        return
    if target is None:
        _machine(as_json)
        return
    from palaestra_slots.core.io.process_arguments import hide
    from palaestra_tokens.server_checks import Target, diagnose

    hide(server["api_key"] or "")
    found = asyncio.run(diagnose(Target(target, **server)))
    _show_diagnosis(found, as_json)
    if found.refusal is not None:
        raise found.refusal
    if not found.ok:
        report("a check failed; the lines above have the reason and the fix")
        context.exit(FAILED)


def _show_diagnosis(found: Diagnosis, as_json: bool) -> None:
    if as_json:
        checks = [
            {"name": each.name, "state": each.state.value, "found": each.found, "way_out": each.way_out}
            for each in found.checks
        ]
        facts = {"target": found.target, "server": found.server, "model": found.model, "ok": found.ok}
        click.echo(json.dumps({**facts, "checks": checks}, indent=2))
        return
    for state, names, why, way_out in _grouped(found.checks):
        click.echo(f"{state:<15} {names}: {why}")
        if way_out:
            click.echo(f"{'':<15} fix: {way_out}")


def _grouped(checks: Sequence[DoctorCheck]) -> list[tuple[str, str, str, str]]:
    """Return the lines of the checks: state, names, finding and fix. The checks that do not apply share one line."""
    from palaestra_tokens.server_checks import AGREES, DISTRIBUTION, SAMPLING, WRITING, CheckState

    # Checks that do not apply say the same thing many times, so they share a line.
    left_out = [each for each in checks if each.state is CheckState.NOT_APPLICABLE]
    lines = [(each.state.value, each.name, each.found, each.way_out) for each in checks if each not in left_out]
    if left_out:
        names = ", ".join(each.name for each in left_out)
        if len(left_out) > 1 and {each.name for each in left_out} <= {*SAMPLING, DISTRIBUTION, *WRITING, AGREES}:
            names = f"training checks ({names})"
        whys = "; ".join(dict.fromkeys(each.found for each in left_out))
        ways = " ".join(dict.fromkeys(each.way_out for each in left_out if each.way_out))
        lines.append((CheckState.NOT_APPLICABLE.value, names, whys, ways))
    return lines


def _show_backends(names: Sequence[str], settings: Sequence[str], as_json: bool) -> bool:
    """Check each backend in turn and print the findings. Returns whether all of them work."""
    from palaestra.envs.config.dotenv import DOTENV, read_keys
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.envs.config.layers import read_environ
    from palaestra_slots.core.config import ConfigLayer, merge
    from palaestra_slots.sandbox.backend_check import check_backend
    from palaestra_slots.sandbox.backends.registry import BUILTIN, backend_names

    layers = [
        read_environ(read_keys(Path()), "env", HermesAgentEnvConfig, DOTENV),
        read_environ(os.environ, "env", HermesAgentEnvConfig),
        ConfigLayer("--set", _read_settings(settings)),
    ]
    config = merge(HermesAgentEnvConfig, layers).value
    # `all` lists a backend once, even if it has a second name.
    every = {BUILTIN.get(name) or name: name for name in reversed(backend_names())}
    wanted = list(reversed(every.values())) if "all" in names else list(dict.fromkeys(names))

    async def check() -> list[BackendFindings]:
        return [await check_backend(name, config) for name in wanted]

    findings = asyncio.run(check())
    if as_json:
        click.echo(json.dumps({"backends": [asdict(each) for each in findings]}, indent=2))
    else:
        _show_findings(findings)
    return not any(each.problem for each in findings)


def _show_findings(findings: Sequence[BackendFindings]) -> None:
    """Print one table, then the reason and the fix for each backend that does not work."""
    from palaestra_slots.sandbox.backend_check import MEASURED

    heading = ("backend", "works", "reached", "credentials", "isolation", "slots", "images", "fork running")
    rows = [(*heading, *(f"{what.replace('_', ' ')} ms" for what in MEASURED))]
    for each in findings:
        images = None if each.images is None else " ".join(each.images) or "none"
        facts = (each.reachable, each.credentials, each.isolation, each.capacity, images, each.checkpoints)
        times = (_milliseconds(each.seconds.get(what)) for what in MEASURED)
        # Everything a backend lacks has a column, so that two backends can be compared at a glance.
        rows.append((each.name, _word(not each.problem), *map(_word, facts), *times))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for each in findings:
        if each.problem:
            click.echo(f"{each.name} does not work: {printable(each.problem)}")
            if each.name in _EXAMPLES:
                click.echo(f"  example: palaestra doctor --backend {each.name} --set {_EXAMPLES[each.name]}")


def _read_settings(words: Sequence[str]) -> dict[str, JSON]:
    """Return the values of the settings `FIELD=VALUE` or `FIELD.KEY=VALUE`. Raises `ConfigError`."""
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.envs.config.layers import read_words
    from palaestra_slots.core.config import find_setting, flat_key

    given: dict[str, JSON] = {}
    for word in words:
        path, equals, value = word.partition("=")
        name, _, key = flat_key(HermesAgentEnvConfig, path).partition(".")
        field = find_setting(HermesAgentEnvConfig, name)
        if not equals or field is None:
            what = f"unknown setting {name!r}" if equals else "the value is missing"
            raise ConfigError(f"--set {word}: {what}; write --set FIELD=VALUE")
        read = read_words(field.annotation, [f"{key}={value}" if key else value])
        # A dot in a name means an entry of a mapping, and most settings have none.
        if key and not isinstance(read, dict):
            raise ConfigError(f"--set {word}: {name} is not a nested setting; write --set FIELD=VALUE")
        given[name] = {**given.get(name, {}), **read} if key else read
    return given


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.{0 if seconds >= 0.1 else 2}f}"


def _word(fact: JSON) -> str:
    return {True: "yes", False: "no", None: "-"}[fact] if fact is None or isinstance(fact, bool) else str(fact)


def _machine(as_json: bool) -> None:
    from palaestra_slots.sandbox.isolation.isolation_probe import probe

    ladder = sorted(asyncio.run(probe()), key=lambda step: -step.rung)
    facts = machine_facts()
    if as_json:
        click.echo(json.dumps({"machine": facts, "ladder": [_level_json(step) for step in ladder]}, indent=2))
    elif sys.stdout.isatty():
        _show_table(facts, ladder)
    else:
        for name, value in facts.items():
            click.echo(f"{name}: {value}")
        for step in ladder:
            click.echo(f"{step.rung.label}: {'yes' if step.available else 'no'}: {step.reason}")
    # Last, because a person reads the last line first.
    if not as_json:
        click.echo(verdict(ladder))
    if not any(step.available and step.rung > Rung.NONE for step in ladder):
        raise IsolationUnavailable("no isolation level is available here; the reasons are above")


def verdict(ladder: Sequence[RungStatus]) -> str:
    """Return a line that names the isolation level that a run would use, or reports that runs refuse to start."""
    best = max((step.rung for step in ladder if step.available and step.rung > Rung.NONE), default=None)
    return "runs refuse to start" if best is None else f"runs use: {best.label}"


def machine_facts() -> dict[str, str]:
    """Return facts about this machine as text, such as the kernel and the user, on which the isolation levels depend,
    and the libraries whose environments can run."""
    from palaestra.envs.discovery import PEERS  # a slow import

    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        # Those that this process may use, which in a container can be fewer than the machine has.
        "cpus": str(len(os.sched_getaffinity(0))),
        "cgroup": _cgroup(),
        "git": _version("git"),
        "peers": ", ".join(filter(None, map(extra_version, plugins.installed(PEERS)))),
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


def _level_json(step: RungStatus) -> dict[str, JSON]:
    return {
        "rung": step.rung.label,
        "available": step.available,
        "reason": step.reason,
        "covers": list(step.covers),
    }


def _show_table(facts: dict[str, str], ladder: Sequence[RungStatus]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Standard output escapes control sequences, also those of rich, so texts are made printable below.
    console = Console(file=getattr(sys.stdout, "raw", None))
    for name, value in facts.items():
        console.print(f"[dim]{name:>7}[/]  {escape(printable(value))}", highlight=False)
    table = Table(title="Isolation, best first", title_justify="left")
    for heading in ("level", "here", "why", "covers"):
        table.add_column(heading, overflow="fold")
    for step in ladder:
        here = "[green]yes[/]" if step.available else "[red]no[/]"
        table.add_row(step.rung.label, here, escape(printable(step.reason)), escape(", ".join(step.covers)))
    console.print(table)
