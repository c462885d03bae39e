"""`palaestra acp`: serve conversations to editors over the Agent Client Protocol."""

from __future__ import annotations

import click

from palaestra_chat.command import FLAGS_OF_CHAT, options_or_answer, own_flags

_HELP = """Serve agents to an editor over the Agent Client Protocol, on stdin and stdout.

\b
  palaestra acp --base-url http://localhost:8000/v1 --model NAME
  palaestra acp --write yes --toolsets terminal file

The editor starts this command. For Zed, add to settings.json:

\b
  "agent_servers": {"Palaestra": {"command": "palaestra", "args": ["acp", "--base-url", "…", "--model", "…"]}}

The agent works on a copy of the editor's folder. After each turn, the editor asks you before the changes are written
back (--write ask|yes|no). The settings and sessions are the same as in palaestra chat: see palaestra chat --help."""


@click.command("acp", context_settings=FLAGS_OF_CHAT, help=_HELP)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
def command(words: tuple[str, ...]) -> None:
    import asyncio

    from palaestra_slots.core.errors import ConfigError

    own, rest = own_flags(words)
    if own:
        raise ConfigError(f"palaestra acp does not accept {next(iter(own))}: the editor chooses the session")
    options = options_or_answer(rest, "palaestra acp")
    if options is None:
        return
    from palaestra_chat.acp.acp_agent import serve_acp

    asyncio.run(serve_acp(options))
