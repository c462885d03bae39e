"""The first start of the chat, or `--setup`: asks which model server and which model, tests them with one message, and
writes both to the person's settings. It uses plain lines, before the prompt of the chat is there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import click
import yaml

from palaestra_chat.folders import settings_file
from palaestra_chat.model_servers import (
    ONCE,
    FoundServer,
    first_reply,
    local_servers,
    models_at,
    provider_servers,
    with_provider_key,
)
from palaestra_chat.terminal.styles import BOLD, DIM, GREEN, PLAIN, YELLOW
from palaestra_slots.core.errors import ConfigError, EngineError
from palaestra_slots.core.io.durable_files import private
from palaestra_slots.core.printable import one_line, printable
from palaestra_tokens.config import APIServerConfig

_SHOWN = 20
_YES = ("y", "yes")

TOUR = (
    "1. Start the chat in a project. The agent works on a copy of the folder: try\n"
    "       What does this project do, and how do I run its tests?",
    "2. Ask for a change. After the turn you see it as a diff, and nothing is written to your folder before you\n"
    "   answer y (all), o (one by one) or a (always here). /undo takes a turn back, with its changes to your files.",
    "3. Esc stops the agent; what you type while it works reaches it at its next step. Tomorrow, `palaestra chat -c`\n"
    "   in the same folder continues the conversation. /help lists everything else.",
)


def set_up() -> None:
    """Ask, test, and write the settings. Raises `ConfigError` if the person ends it."""
    try:
        server = _server()
        while not (_works(server) or _typed_answer("Use it anyway? y: yes, n: choose again [n] ").lower() in _YES):
            server = _server()
        _save_server(server)
        if _typed_answer("A tour in three steps? y: yes, n: no [y] ").lower() in ("", *_YES):
            for step in TOUR:
                _typed_answer(f"\n{step}\n{DIM}   Enter goes on{PLAIN} ")
    except (EOFError, KeyboardInterrupt):
        click.echo()
        raise ConfigError("the setup was ended; palaestra chat --setup begins it again") from None


def _server() -> APIServerConfig:
    click.echo(f"{BOLD}Which model server?{PLAIN} {DIM}Looking on the usual ports of this machine …{PLAIN}")
    found = [*asyncio.run(local_servers()), *provider_servers(os.environ)]
    for number, each in enumerate(found, 1):
        models = f": {len(each.models)} model{'s' if len(each.models) > 1 else ''}" if each.models else ""
        click.echo(f"  {number}: {each.about}{models}")
    if not found:
        click.echo("  none found, and no key of a provider is in a variable such as OPENAI_API_KEY")
    while True:
        typed = _typed_answer(f"A number, or the address of a server{' [1]' if found else ''}: ")
        chosen = _entered_server(typed, found)
        if chosen is None:
            click.echo(f"{YELLOW}type one of the numbers, or an address such as http://127.0.0.1:8000/v1{PLAIN}")
            continue
        # A server that was found on this machine answered without a key, so it gets none.
        key = os.environ.get("OPENAI_API_KEY") if chosen.models is None else None
        try:
            server = with_provider_key(APIServerConfig(base_url=chosen.base_url, api_key=key), os.environ)
            listed = chosen.models if chosen.models is not None else asyncio.run(models_at(server, ONCE))
        except (EngineError, ValueError) as error:  # a ConfigError too, and an address that is none
            click.echo(f"{YELLOW}{printable(str(error))}{PLAIN}")
            continue
        return server.model_copy(update={"model_name": _model(listed)})


def _entered_server(typed: str, found: Sequence[FoundServer]) -> FoundServer | None:
    if (typed.isascii() and typed.isdigit()) or not typed:
        number = int(typed or 1)
        return found[number - 1] if 0 < number <= len(found) else None
    typed = typed if "://" in typed else f"http://{typed}"
    return FoundServer("", typed)


def _model(models: Sequence[str]) -> str:
    """Return the model that the person chooses, by its number, its name, or a part of it. Only one is taken at once."""
    if len(models) == 1:
        click.echo(f"It has one model: {printable(models[0])}")
        return models[0]
    if not models:
        while not (typed := _typed_answer("The server lists no models. The name of the model: ")):
            pass
        return typed
    shown = list(models)
    while True:
        for number, name in enumerate(shown[:_SHOWN], 1):
            click.echo(f"  {number}: {printable(name)}")
        if len(shown) > _SHOWN:
            click.echo(f"  and {len(shown) - _SHOWN} more")
        typed = _typed_answer(f"{BOLD}Which model?{PLAIN} A number, or a part of its name: ")
        if typed.isascii() and typed.isdigit() and 0 < int(typed) <= min(len(shown), _SHOWN):
            return shown[int(typed) - 1]
        near = [name for name in models if typed.lower() in name.lower()]
        if typed in models or len(near) == 1:
            return typed if typed in models else near[0]
        if not near:
            click.echo(f"{YELLOW}no model has {printable(typed)!r} in its name{PLAIN}")
        shown = near or list(models)


def _works(server: APIServerConfig) -> bool:
    """Send one message, and print what came of it."""
    click.echo(f"{DIM}Asking {printable(server.model_name)} for one word …{PLAIN}")
    try:
        reply = asyncio.run(first_reply(server))
    except EngineError as error:
        click.echo(f"{YELLOW}{printable(str(error))}{PLAIN}")
        return False
    click.echo(f"{GREEN}It answers:{PLAIN} {one_line(reply, 80)}")
    return True


def _save_server(server: APIServerConfig) -> None:
    """Add the server to the settings; an older file is kept beside them. Raises `ConfigError`."""
    path = settings_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = (yaml.safe_load(path.read_text()) if path.is_file() else None) or {}
        if path.is_file() and not path.with_suffix(".yaml.old").exists():
            path.replace(path.with_suffix(".yaml.old"))
            click.echo(f"{DIM}The earlier settings, with their comments, are now in {path}.old{PLAIN}")
        known["openai"] = {"base_url": server.base_url, "model_name": server.model_name}
        with open(path, "w", opener=private) as file:
            file.write("# The settings of palaestra chat; palaestra chat --help-all lists them.\n")
            yaml.safe_dump(known, file, sort_keys=False)
    except (OSError, yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    click.echo(f"{GREEN}Written to {path}.{PLAIN} `palaestra chat --setup` asks again.")


def _typed_answer(question: str) -> str:
    return input(question).strip()
