"""`palaestra gateway`: serve conversations on chat platforms, and manage who may take part."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import told_to_stop

if TYPE_CHECKING:
    from palaestra_gateway.mailbox import Mailbox
    from palaestra_gateway.platforms.devices import DeviceState, KnownDevice

T = TypeVar("T")

_HOME = "~/.palaestra/gateway"

EXAMPLE = """\
# Settings of `palaestra gateway`. docs/gateway.md lists all of them.
server:
  base_url: http://127.0.0.1:8000/v1
  model_name: NAME
toolsets: [terminal, file, todo, clarify]
default_reset_policy: {mode: both, at_hour: 4, idle_minutes: 1440}
limits: {messages_per_hour: 120}
platforms:
  openai:                         # http://127.0.0.1:8643/v1 for any chat program
    token_file: ~/.palaestra/gateway/openai.token     # openssl rand -hex 32 > FILE
  # matrix:
  #   token_file: ~/.palaestra/gateway/matrix.token
  #   extra: {homeserver: https://matrix.example.org}
  #   allowed_users: ["@anna:example.org"]
  #   home_channel: {chat_id: "!room:example.org", chat_type: group}
"""


@click.group(
    "gateway",
    invoke_without_command=True,
    help="""Serve conversations on chat platforms, e-mail and HTTP: one service, a session per chat.

    \b
      mkdir -p ~/.palaestra/gateway
      palaestra gateway example > ~/.palaestra/gateway/gateway.yaml    # then edit it
      openssl rand -hex 32 > ~/.palaestra/gateway/openai.token         # the key for chat programs
      palaestra gateway                                                # serve until Ctrl-C
      palaestra gateway pair K7QX2MPA                                  # allow the person with this code
      palaestra gateway status                                         # platforms, queues, last errors
      palaestra gateway users
      palaestra gateway jobs                                           # what agents have scheduled
      palaestra gateway devices                                        # who reads encrypted rooms

    Each session has its own agent and sandbox, and its messages are answered in order. A person who is not in
    `allowed_users` gets a code in a direct chat; you confirm it with `pair`. In a chat, /help lists the commands, such
    as /stop, /new, /retry, /undo, /status, /approve and /deny.

    Messages, answers, sessions, sandboxes and background processes survive a restart and a crash. The gateway keeps
    all data in the folder --home. Platforms other than openai and webhook need the extra 'gateway'.
    """,
)
@click.option(
    "--home",
    type=HostPath(file_okay=False),
    default=_HOME,
    show_default=True,
    help="The gateway's folder.",
)
@click.option(
    "--config",
    type=HostPath(dir_okay=False),
    help="The configuration file. [default: HOME/gateway.yaml]",
)
@click.option("--base-url", help="The model server, in place of the configured one.")
@click.option("--model", help="The model's name, in place of the configured one.")
@click.pass_context
def command(context: click.Context, home: Path, config: Path | None, base_url: str | None, model: str | None) -> None:
    from palaestra_slots.core.config import local_path

    context.obj = local_path(home)
    if context.invoked_subcommand is None:
        asyncio.run(_run_gateway(context.obj, config, base_url, model))


async def _run_gateway(home: Path, config: Path | None, base_url: str | None, model: str | None) -> None:
    from palaestra_gateway.assembly import assembled
    from palaestra_gateway.config import CONFIG_NAME, read_config
    from palaestra_tokens.config import APIServerConfig

    if (backend := os.environ.get("TERMINAL_ENV", "local")) not in ("", "local", "default"):
        raise ConfigError(f"TERMINAL_ENV is {backend}, but gateway.yaml decides where sandboxes are: set backend there")
    settings = read_config(config or home / CONFIG_NAME)
    if base_url or model:
        changes = {"base_url": base_url, "model_name": model}
        given = {} if settings.server is None else settings.server.model_dump(exclude_unset=True)
        server = APIServerConfig(**given | {name: value for name, value in changes.items() if value})
        settings = settings.model_copy(update={"server": server})
    stop = told_to_stop()
    async with assembled(settings, home) as gateway:
        for platform in gateway.platforms.values():
            click.echo(f"{platform.name} {getattr(platform, 'url', '')}".strip())
        click.echo(f"serving; data is kept in {home}", err=True)
        await stop.wait()
        click.echo("stopping", err=True)


@command.command("example", help="Print an example configuration.")
def example() -> None:
    click.echo(EXAMPLE, nl=False)


@command.command(
    "status", help="Show the platforms, their queues and last errors, and the number of sessions and jobs."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def status(home: Path, as_json: bool) -> None:
    from palaestra_gateway.assembly import is_running
    from palaestra_gateway.observe.gateway_status import read_status, status_lines

    found = _with_mailbox(home, lambda mailbox: read_status(mailbox, time.time()))
    running = is_running(home)
    if as_json:
        click.echo(json.dumps({"running": running, **asdict(found)}, ensure_ascii=False))
    else:
        click.echo("\n".join(status_lines(found, running)))


@command.command("pair", help="Allow the person to whom the gateway sent CODE.")
@click.argument("code")
@click.option("--json", "as_json", is_flag=True, help="Print the person as a JSON object.")
@click.pass_obj
def pair(home: Path, code: str, as_json: bool) -> None:
    platform, user_id, name = _with_mailbox(home, lambda mailbox: mailbox.pairings.add(code, time.time()))
    click.echo(_person(platform, user_id, name) if as_json else f"{platform} {user_id} {name}".strip())


@command.command("unpair", help="Revoke the access that `pair` gave a person.")
@click.argument("platform")
@click.argument("user_id")
@click.option("--json", "as_json", is_flag=True, help="Print the person as a JSON object.")
@click.pass_obj
def unpair(home: Path, platform: str, user_id: str, as_json: bool) -> None:
    if not _with_mailbox(home, lambda mailbox: mailbox.pairings.remove(platform, user_id)):
        raise ConfigError(
            f"user {user_id} of {platform} is not paired; `palaestra gateway users` lists the people who are"
        )
    if as_json:
        click.echo(_person(platform, user_id))


@command.command("users", help="List the people whom `pair` allowed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per person.")
@click.pass_obj
def users(home: Path, as_json: bool) -> None:
    for platform, user_id, name in _with_mailbox(home, lambda mailbox: mailbox.pairings.paired_people()):
        click.echo(_person(platform, user_id, name) if as_json else f"{platform}\t{user_id}\t{name}")


@command.command("refused", help="List messages that a platform refused, with the reason.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per message.")
@click.pass_obj
def list_refused(home: Path, as_json: bool) -> None:
    for message, reason in _with_mailbox(home, lambda mailbox: mailbox.refused_messages()):
        text = message.text or (message.file.name if message.file else "")
        place = {"platform": message.address.platform, "chat_id": message.address.chat_id}
        if as_json:
            click.echo(json.dumps({**place, "text": text, "reason": reason}, ensure_ascii=False))
        else:
            click.echo("\t".join([*place.values(), " ".join(text.split())[:80], reason]))


@command.command("devices", help="List the devices in encrypted Matrix rooms: the gateway's own one, and people's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per device.")
@click.pass_obj
def devices(home: Path, as_json: bool) -> None:
    for platform, device in _with_mailbox(home, _all_devices):
        row = {"platform": platform, **asdict(device)}
        columns = (platform, device.user_id, device.device_id, device.state, device.shown_fingerprint, device.name)
        click.echo(json.dumps(row, ensure_ascii=False) if as_json else "\t".join(columns).rstrip())


async def _all_devices(mailbox: Mailbox) -> list[tuple[str, KnownDevice]]:
    from palaestra_gateway.platforms.devices import known_devices

    query = "select distinct platform from notes order by platform"
    names = await mailbox.do(lambda connection: connection.execute(query).fetchall())
    return [(name, each) for (name,) in names for each in (await known_devices(mailbox.notes(name))).values()]


@command.command(
    "verify",
    help="Trust DEVICE of USER_ID in encrypted rooms, after you compared its fingerprint with the person; or block it.",
)
@click.argument("platform")
@click.argument("user_id")
@click.argument("device")
@click.option("--block", is_flag=True, help="Do not let the device read or write any more.")
@click.option("--json", "as_json", is_flag=True, help="Print the device as a JSON object.")
@click.pass_obj
def decide_device(home: Path, platform: str, user_id: str, device: str, block: bool, as_json: bool) -> None:
    from palaestra_gateway.platforms.devices import decide

    state: DeviceState = "blocked" if block else "verified"
    decided = _with_mailbox(home, lambda mailbox: decide(mailbox.notes(platform), user_id, device, state))
    row = {"platform": platform, **asdict(decided)}
    text = f"{platform} {user_id} {device} {decided.state}: {decided.shown_fingerprint}"
    click.echo(json.dumps(row, ensure_ascii=False) if as_json else text)


@command.command("jobs", help="List the prompts that agents have scheduled, or remove one.")
@click.option("--remove", metavar="JOB", help="Remove the job with this id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per job.")
@click.pass_obj
def jobs(home: Path, remove: str | None, as_json: bool) -> None:
    from palaestra_gateway import jobs as scheduled

    if remove is not None and not _with_mailbox(home, lambda mailbox: scheduled.remove(mailbox, remove)):
        raise ConfigError(f"there is no job {remove}; `palaestra gateway jobs` lists them")
    for job in _with_mailbox(home, scheduled.all_jobs):
        row = {"session": job.session_key, **scheduled.job_json(job)}
        prompt = " ".join(job.prompt.split())[:80]
        columns = (job.id, job.session_key, job.schedule, row["next_run"] or "paused", prompt)
        click.echo(json.dumps(row, ensure_ascii=False) if as_json else "\t".join(columns))


def _person(platform: str, user_id: str, name: str = "") -> str:
    return json.dumps({"platform": platform, "user_id": user_id, "name": name}, ensure_ascii=False)


def _with_mailbox(home: Path, work: Callable[[Mailbox], Awaitable[T]]) -> T:
    """Run `work` on the mailbox of a gateway, which may be running. Raises `ConfigError` if there is no mailbox."""
    from palaestra_gateway.assembly import MAILBOX
    from palaestra_gateway.mailbox import Mailbox

    if not (home / MAILBOX).is_file():
        raise ConfigError(f"there is no gateway in {home}: start it once, or specify its folder with --home")

    async def main() -> T:
        mailbox = Mailbox(home / MAILBOX)
        try:
            return await work(mailbox)
        finally:
            await mailbox.aclose()

    return asyncio.run(main())
