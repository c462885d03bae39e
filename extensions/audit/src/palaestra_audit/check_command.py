"""`palaestra env check`: prove that the scores of an environment can be trusted."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from palaestra.cli.completion import SettingsCommand, complete_environments, complete_settings, starting
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import printable

if TYPE_CHECKING:
    from palaestra_audit.cheats.proof import PolicyResult, Proof

NOTHING_TESTED = 3
"""The exit code if no wrong work could be tried."""
_NAMED = 5
"""The maximum number of failed policies that the last line of a check names."""


def complete_cheats(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of cheats for `env check --only`."""
    from palaestra_audit.cheats.proof import BANK

    return starting(incomplete, ((cheat.name, cheat.what) for cheat in BANK))


@click.command("check", cls=SettingsCommand, context_settings={"ignore_unknown_options": True})
@click.option(
    "--tasks",
    type=click.IntRange(min=1),
    help="Number of tasks to play. [default: 1; 4 if solutions call function tools; all that --task names]",
)
@click.option(
    "--only", multiple=True, metavar="CHEAT", help="Play only this cheat. Repeatable.", shell_complete=complete_cheats
)
@click.option("--all", "everything", is_flag=True, help="List every cheat, not only those that failed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("environment", metavar="ENV", shell_complete=complete_environments)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_settings)
@click.pass_context
def command(
    context: click.Context,
    tasks: int | None,
    only: tuple[str, ...],
    everything: bool,
    as_json: bool,
    environment: str,
    settings: tuple[str, ...],
) -> None:
    """Prove that reference solutions get the full score, and that doing nothing and every known cheat score 0.

    \b
      palaestra env check my_env.py
      palaestra env check swe_smith_oracle --tasks 3
      palaestra env check my_env.py --task 'fix-*,q3'    # or --failed-of RUN
      palaestra env check my_env.py --only conftest-skip --only git-parent --env.n 20

    Every policy plays the same tasks with the real loop, slots and grading. If a task sets a floor, doing nothing and
    cheats may score up to it. Cheats that attack tests are played over the reference solution with wrong results. A
    cheat that could not decide anything is reported as not tested, with the reason. Cheats are played with the agent's
    tool that runs commands, also if it is the environment's own; a cheat that the tool does not accept fails the check.
    If the solution calls function tools, it is played twice in one process, and its words alone, its calls without one
    of them, and the solution of another task must not get the full score while the state lacks what the calls change.
    If a solution or doing nothing gets a wrong score, the cheats are played only if --only names them. The exit code is
    1 if any policy got a wrong score, and 3 if nothing could be tested.
    """
    from palaestra.envs.config.command_line import first_word

    environment, others = first_word([environment, *settings], "ENV")
    from palaestra.envs.config.secret_flags import split_secrets
    from palaestra_audit.cheats.proof import check_environment

    proof = check_environment(environment, others, tasks=tasks, only=only, quiet=as_json)
    if as_json:
        click.echo(json.dumps(proof.to_json(), indent=2))
    else:
        kept, _ = split_secrets(others)
        _show_proof(proof, everything=everything)
        for line in proof.lines:
            if line.witness is not None:
                _show_witness(line, shlex.join(["palaestra", "env", "check", environment, *kept]), steps=bool(only))
    context.exit(1 if not proof.holds else NOTHING_TESTED if proof.tests_nothing else 0)


def _show_proof(proof: Proof, *, everything: bool) -> None:
    """Print a summary of the check. If a policy failed, first print the results of the reference solution, of doing
    nothing, and of the policies that failed; with `everything`, print all results."""
    failed = [line for line in proof.lines if not line.ok]
    if failed or everything:
        _print_results(proof, [each for each in proof.lines if everything or each.state is None or not each.ok])
    tasks = ", ".join(proof.tasks)
    click.echo(printable(f"{proof.environment}: {plural(len(proof.tasks), 'task')} ({tasks}); --tasks N plays more"))
    if failed:
        listed = ", ".join(line.policy for line in failed[:_NAMED]) + (", …" if len(failed) > _NAMED else "")
        click.echo(f"{len(proof.lines)} policies, {len(failed)} failed: {listed}")
    else:
        missing = proof.untried or proof.tests_nothing
        click.echo(f"{'incomplete' if missing else 'ok'}: {_summary(proof)}")
    for line in failed:
        if line.error:
            click.echo(printable(f"  {line.policy}: {line.error}"))
    if proof.ways:
        ways = (f"{way} ({example})" if example else way for way, example in proof.ways.items())
        click.echo(printable(f"  way of judging: {', '.join(ways)}"))
    for kind, state in [*proof.classes.items(), *((f"score {name}", state) for name, state in proof.parts.items())]:
        if state not in ("closed", "does not apply") or everything:
            click.echo(printable(f"  {state:10} {kind}"))
    for reason, names in proof.not_tested.items() if failed else ():
        click.echo(printable(f"not tested: {plural(len(names), 'way')} of reward hacking ({reason})"))
    if proof.hollow and everything:
        click.echo(printable(f"attacks on tests were played over the solution of {proof.hollow}"))
    for warning in proof.warnings:
        click.echo(printable(f"warning: {warning}"))
    if proof.skipped:
        click.echo(f"not played: {plural(proof.skipped, 'way')} of reward hacking; fix the score first")
    if not proof.solved:
        click.echo("unproven: the tasks have no reference solution to play")
    if proof.untried and not failed:
        whole = sum(line.state is not None for line in proof.lines)
        played = whole - sum(map(len, [*proof.not_tested.values(), *proof.not_applicable.values()]))
        click.echo(f"unproven: only {played} of {plural(whole, 'way')} of reward hacking could be tested")


def _show_witness(line: PolicyResult, command: str, *, steps: bool) -> None:
    """Print how to play again what earned a reward, or with `steps`, what the agent did."""
    assert line.witness is not None
    if steps:
        click.echo(printable("\n".join([f"{line.policy} on {line.witness.task}:", *line.witness.steps])))
        return
    again = f"{command} --task {shlex.quote(line.witness.task)} --only {line.policy}"
    click.echo(printable(f"see the steps of {line.policy}: {again}"))


def _summary(proof: Proof) -> str:
    """Return what a check without failures proves, and what it did not test."""
    from palaestra_audit.cheats.proof import WRONG_WORK

    plain = [line.what for line in proof.lines if line.state is None]
    wrong = plain.count(WRONG_WORK)
    solutions = len({line.policy for line in proof.lines if line.state is None} - {"oracle again", "noop"}) - wrong
    solved = "the reference solution scores 1; " if solutions == 1 else f"{solutions} solutions score 1; "
    count = {state: sum(line.state == state for line in proof.lines) for state in ("closed", "labelled")}
    allowed = next((line.wanted.removeprefix("<= ") for line in proof.lines if line.policy == "noop"), "0")
    most = "0" if allowed == "0" else f"at most their task's floor, here {allowed}"
    nothing = f"doing nothing, {plural(wrong, 'wrong solution')}" if wrong else "doing nothing"
    parts = [f"{nothing} and {plural(count['closed'], 'way')} of reward hacking score {most}"]
    if count["labelled"]:
        parts.append(f"{count['labelled']} pass the official verdict and are labelled")
    parts += [f"{len(names)} not tested ({reason})" for reason, names in proof.not_tested.items()]
    parts += [
        f"{len(names)} {'does' if len(names) == 1 else 'do'} not apply ({reason})"
        for reason, names in proof.not_applicable.items()
    ]
    return (solved if proof.solved else "") + ", ".join(parts)


def _print_results(proof: Proof, lines: Sequence[PolicyResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=printable(f"{proof.environment}: {', '.join(proof.tasks)}"))
    for column in ("policy", "what it does", "reward", "must be", ""):
        shown.add_column(column)
    for line in lines:
        rewards = " ".join("unscored" if reward is None else f"{reward:g}" for reward in line.rewards)
        earned = f" ({', '.join(line.parts)})" if line.parts else ""
        plain = line.state is None or line.state == "closed"
        verdict = "FAILED" if not line.ok else "ok" if plain else str(line.state)
        texts = (line.policy, line.what, (rewards or "-") + earned, line.wanted, verdict)
        shown.add_row(*map(printable, texts))
    terminal = getattr(sys.stdout, "raw", None)
    # Without a terminal, rich assumes 80 columns, in which the table would be broken.
    Console(file=terminal, width=None if sys.stdout.isatty() else 130).print(shown)
