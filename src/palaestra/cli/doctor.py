"""`palaestra doctor`: what this machine can isolate, or what a model server can do, and why not more.

The machine's facts come from really making a throw-away slot on every rung (`sandbox.isolation`),
never from versions or names. Exit code 5 when not even the lowest protecting rung is there. Of a model server, only
the address that was named is asked (`palaestra.inference.doctor`); exit code 4 when it cannot be reached, 1 when a
check failed.
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

from palaestra.core.errors import ConfigError, IsolationUnavailable
from palaestra.core.exits import FAILED, report
from palaestra.core.printable import printable
from palaestra.core.types import JSON
from palaestra.sandbox.slot import Rung, RungStatus

if TYPE_CHECKING:
    from palaestra.inference.doctor import Diagnosis


@click.command(
    "doctor",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Show what this machine can isolate, or what a model server can do, and why not more.

    \b
      palaestra doctor
      palaestra doctor --json | jq '.ladder[] | select(.available)'
      palaestra doctor http://localhost:8000/v1 --model NAME
      palaestra doctor path/to/model                       # a folder, sampled in this process
      palaestra doctor --backend all                       # where slots can run
      palaestra doctor --backend docker --set docker_image=python:3.11

    Of a model server: can it be reached, what is it, does it take and give token ids with log-probabilities, does the
    chat template show tools and keep history, is the token that ends a turn trained, does the parser read the calls,
    does the tokenizer agree. Naming a model is consent to fetch its tokenizer.

    Of a backend: whether it can be reached, its credentials and isolation level, and the time that its slots take; a
    few slots are made there. Settings come from the environment, .env and --set FIELD=VALUE.

    Of this machine: the rungs, best first: full (all namespaces and cgroup limits; root in a slot is nobody outside),
    userns (no root needed; no cgroup limits), confined (for ordinary containers), none (commands run as you,
    unprotected; never chosen unless asked for by name). The table says which of them this version has.
    """,
)
@click.argument("target", required=False, metavar="[URL | FOLDER]")
@click.option(
    "--model", "-m", help="The model's name at the server; its tokenizer is taken unless --tokenizer names one."
)
@click.option("--api-key", envvar="PALAESTRA_OPENAI_API_KEY", help="Sent as a bearer token.")
@click.option("--tokenizer", help="A folder, or a model's name.")
@click.option(
    "--tool-parser", "--parser", "parser", default="hermes", show_default=True, help="How the model writes tool calls."
)
@click.option("--type", "server_type", type=click.Choice(["vllm", "sglang", "openai"]), help="Do not find out.")
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Check a backend, or `all`. Repeatable.")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="A setting of the backends. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.pass_context
def command(
    context: click.Context,
    target: str | None,
    model: str | None,
    api_key: str | None,
    tokenizer: str | None,
    parser: str,
    server_type: str | None,
    backends: tuple[str, ...],
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    if backends:
        if not _show_backends(backends, settings, as_json):
            context.exit(FAILED)
        return
    if target is None:
        _machine(as_json)
        return
    from palaestra.core.io.process_arguments import hide
    from palaestra.inference.doctor import Target, diagnose

    hide(api_key or "")
    found = asyncio.run(diagnose(Target(target, model, api_key, tokenizer, parser, server_type)))
    _show_diagnosis(found, as_json)
    if found.refusal is not None:
        raise found.refusal
    if not found.ok:
        report("something does not work; the lines above say what, and the way out")
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
    for each in found.checks:
        click.echo(f"{each.state.value:<15} {each.name}: {each.found}")
        if each.way_out:
            click.echo(f"{'':<15} way out: {each.way_out}")


def _show_backends(names: Sequence[str], settings: Sequence[str], as_json: bool) -> bool:
    """Check each backend in turn, and print what was found; whether all work."""
    from palaestra.core.config import ConfigLayer, merge
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.envs.config.layers import DOTENV, read_dotenv, read_environ, read_words
    from palaestra.sandbox.backend_check import BackendFindings, check_backend
    from palaestra.sandbox.backends.registry import backend_names

    fields = HermesAgentEnvConfig.model_fields
    given: dict[str, JSON] = {}
    for word in settings:
        name, _, value = word.partition("=")
        if name not in fields:
            raise ConfigError(f"--set {word}: there is no setting {name!r}")
        given[name] = read_words(fields[name].annotation, [value])
    layers = [
        read_environ(read_dotenv(Path()), "env", HermesAgentEnvConfig, DOTENV),
        read_environ(os.environ, "env", HermesAgentEnvConfig),
        ConfigLayer("--set", given),
    ]
    config = merge(HermesAgentEnvConfig, layers).value
    wanted = backend_names() if "all" in names else names

    async def check() -> list[BackendFindings]:
        return [await check_backend(name, config) for name in wanted]

    findings = asyncio.run(check())
    if as_json:
        click.echo(json.dumps({"backends": [asdict(each) for each in findings]}, indent=2))
    for each in () if as_json else findings:
        if each.problem:
            click.echo(f"{each.name}: no: {printable(each.problem)}")
            continue
        slots = "as many slots as memory allows" if each.capacity is None else f"{each.capacity} slots"
        times = ", ".join(f"{what} {1000 * seconds:.3g} ms" for what, seconds in each.seconds.items())
        click.echo(f"{each.name}: yes: {each.isolation}, {slots}; {times}")
    return not any(each.problem for each in findings)


def _machine(as_json: bool) -> None:
    from palaestra.sandbox.isolation.isolation_probe import probe

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
        raise IsolationUnavailable("no isolation level is available here; the reasons are above")


def verdict(ladder: Sequence[RungStatus]) -> str:
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


def _plain(step: RungStatus) -> dict[str, JSON]:
    return {
        "rung": step.rung.label,
        "available": step.available,
        "reason": step.reason,
        "covers": list(step.covers),
    }


def _state(step: RungStatus) -> str:
    return "yes" if step.available else "no"


def _show_table(facts: dict[str, str], ladder: Sequence[RungStatus]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=getattr(sys.stdout, "raw", None))
    for name, value in facts.items():
        console.print(f"[dim]{name:>7}[/]  {escape(printable(value))}", highlight=False)
    table = Table(title="Isolation, best first", title_justify="left")
    for heading in ("rung", "here", "why", "covers"):
        table.add_column(heading, overflow="fold")
    for step in ladder:
        here = "[green]yes[/]" if step.available else "[red]no[/]"
        table.add_row(step.rung.label, here, escape(printable(step.reason)), escape(", ".join(step.covers)))
    console.print(table)
