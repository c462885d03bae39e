"""`palaestra acp`: serve conversations to editors over the Agent Client Protocol."""

from __future__ import annotations

import click

_HELP = """Serve agents to an editor over the Agent Client Protocol, on stdin and stdout.

\b
  palaestra acp --base-url http://localhost:8000/v1 --model NAME
  palaestra acp --write yes --toolsets terminal file

An editor starts this command. For Zed, in settings.json:

\b
  "agent_servers": {"Palaestra": {"command": "palaestra", "args": ["acp", "--base-url", "…", "--model", "…"]}}

The agent works on a copy of the editor's folder; after each turn the editor asks before changes are written back
(--write ask|yes|no). Settings and sessions are those of palaestra chat: see palaestra chat --help."""


@click.command(
    "acp",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    help=_HELP,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
def command(words: tuple[str, ...]) -> None:
    import asyncio

    from palaestra.chat.acp_agent import serve_acp
    from palaestra.chat.config import read_options
    from palaestra.cli.chat import own_flags
    from palaestra.core.errors import ConfigError

    own, rest = own_flags(words)
    if own:
        raise ConfigError(f"palaestra acp has no {next(iter(own))}: the editor chooses the session")
    options = read_options(rest, "palaestra acp")
    if options.show:
        click.echo(options.show, nl=False)
        return
    for notice in options.notices:
        click.echo(f"note: {notice}", err=True)
    asyncio.run(serve_acp(options))
