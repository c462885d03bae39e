"""`palaestra env port`: rewrite the imports of a script that was written for Atropos or Hermes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from palaestra.envs.config.host_path import HostPath
from palaestra_contract.port_script import port
from palaestra_slots.core.errors import ConfigError


@click.command("port")
@click.option("--write", is_flag=True, help="Rewrite the file in place.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON instead of the new text.")
@click.option(
    "--run", "trial", is_flag=True, help="Also run one rollout with the oracle, or with noop if there is no solution."
)
@click.argument("file", type=HostPath())
@click.pass_context
def command(context: click.Context, write: bool, as_json: bool, trial: bool, file: Path) -> None:
    """Rewrite the imports of a script that was written for another runtime.

    \b
      palaestra env port their_env.py > my_env.py
      palaestra env port their_env.py --write
      palaestra env port their_env.py --write --run

    Without --write, the new text goes to standard output. The command lists what you must change by hand: names without
    a counterpart, packages that are not installed, overrides that nothing calls, and attributes and arguments that
    differ. The exit code is 1 if there is anything to change, or if the trial run fails.
    """
    try:
        source = file.read_text(encoding="utf-8")
        ported = port(source, str(file))
        if write:
            file.write_text(ported.text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be ported: {error}") from None
    if as_json:
        click.echo(json.dumps({"names": ported.names, "left": [asdict(left) for left in ported.left]}, indent=2))
    elif not write:
        click.echo(ported.text, nl=False)
    count, names = len(ported.names), ", ".join(ported.names)
    came = f"{count} name{'s are' if count > 1 else ' is'} now imported from palaestra: {names}"
    click.echo(f"{file}: {came if names else 'no import was rewritten'}", err=True)
    for left in ported.left:
        click.echo(f"{file}:{left.line}: {left.what}: {left.advice}", err=True)
    works = not trial or _starts(file, ported.text)
    context.exit(0 if works and not ported.left else 1)


def _starts(file: Path, text: str) -> bool:
    """Run one rollout of a ported script in a temporary folder, and report how it ended. Returns whether it worked."""
    beside = file.absolute().with_name(f".{file.stem}_trial.py")  # the script may import its neighbours
    with tempfile.TemporaryDirectory(prefix="palaestra-port-") as folder:
        try:
            beside.write_text(text, encoding="utf-8")
            for policy in ("oracle", "noop"):
                command = [sys.executable, "-P", "-m", "palaestra", "run", str(beside), "process", "--policy", policy]
                flags = ["--tasks", "1", "--group", "1", "--env.ensure_scores_are_not_same", "false"]
                ended = subprocess.run([*command, *flags], cwd=folder, capture_output=True, text=True)
                if ended.returncode == 0 or "no reference solution" not in ended.stderr:
                    break
        finally:
            beside.unlink(missing_ok=True)
    if ended.returncode != 0:
        click.echo(ended.stderr.replace(str(beside), str(file)), err=True, nl=False)
    how = "ran" if ended.returncode == 0 else f"failed with exit code {ended.returncode}"
    click.echo(f"{file}: one rollout with the policy {policy} {how}", err=True)
    return ended.returncode == 0
