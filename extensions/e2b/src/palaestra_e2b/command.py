"""`palaestra serve e2b`: the API of E2B over this machine's slots."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click

from palaestra.cli.server_options import address_options, json_option, print_url
from palaestra.envs.config.host_path import HostPath
from palaestra_e2b.api_keys import ApiKeys, own_key, read_keys
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import told_to_stop
from palaestra_slots.core.types import JSON, Limits, Network
from palaestra_slots.images.debian_root import ROOTS, roots
from palaestra_slots.images.dockerfile import ImageConfig
from palaestra_slots.images.image_builder import known_config
from palaestra_slots.sandbox.sandbox import size_in_bytes

HOST, PORT, TLS_PORT = "127.0.0.1", 3000, 3443
_DOMAIN = "e2b.localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of `serve e2b`."""

    host: str = HOST
    port: int = PORT
    keys: Path | None = None
    sandboxes: int | None = None
    isolation: str = "best"
    image: str | None = None
    templates: tuple[str, ...] = ()
    images: str = ROOTS
    network: bool = True
    memory: str | None = None
    disk: str | None = None
    cpus: float | None = None
    domain: str | None = None
    tls_port: int = TLS_PORT
    state: Path | None = None
    env: bool = False

    @property
    def folder(self) -> Path:
        """The server's folder, for its key, certificates, templates and the record of ended sandboxes."""
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return self.state or Path(base) / "palaestra" / "e2b"

    @property
    def limits(self) -> Limits:
        """The limits of each sandbox."""
        usual = Limits()
        return Limits(
            memory_bytes=size_in_bytes(self.memory) if self.memory else usual.memory_bytes,
            disk_bytes=size_in_bytes(self.disk) if self.disk else usual.disk_bytes,
            cpus=self.cpus,
        )

    def read_keys(self) -> ApiKeys:
        """Return the API keys. Raises `ConfigError`."""
        return read_keys(self.keys) if self.keys is not None else own_key(self.folder / "keys")


@click.command(
    "e2b",
    help="""Serve sandboxes to programs that use the E2B SDK for Python or JavaScript, unchanged.

    \b
      palaestra serve e2b                           # in one terminal
      eval "$(palaestra serve e2b --env)"           # in another: E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL
      python -c 'from e2b import Sandbox; print(Sandbox.create().commands.run("id").stdout)'
      palaestra serve e2b --domain e2b.localhost    # HTTPS with a certificate of its own, for E2B_DOMAIN

    A template is an image by name: `base` (this machine's system directories, or --image), the roots that
    `palaestra images make` made, and --template NAME=PATH. Without --keys, the server makes one key in its folder. With
    --keys FILE, each line of FILE is `NAME KEY [sandboxes=N] [kept=N]`. Every sandbox ends with its timeout, and all
    end with the server. docs/e2b.md lists what is there and what is refused.
    """,
)
@address_options(PORT)
@click.option("--keys", type=HostPath(dir_okay=False), help="The file of API keys.")
@click.option(
    "--sandboxes", type=click.IntRange(min=1), help="Maximum number of sandboxes. Default: as memory allows, up to 512."
)
@click.option(
    "--isolation", default="best", show_default=True, help="The isolation level: best, full, userns or confined."
)
@click.option("--image", help="The root file system of `base`: a directory, a tar file or an OCI layout.")
@click.option("--template", "templates", multiple=True, metavar="NAME=PATH", help="A further template. Repeatable.")
@click.option("--images", default=ROOTS, show_default=True, help="The folder of root file systems to offer.")
@click.option(
    "--network/--no-network", default=True, show_default=True, help="Whether sandboxes can reach the network."
)
@click.option("--memory", help="The memory of each sandbox, such as 2GB.")
@click.option("--disk", help="The disk space of each sandbox, such as 2GB.")
@click.option("--cpus", type=click.FloatRange(min=0.01), help="The processors of each sandbox. Default: all.")
@click.option("--domain", help=f"Also serve HTTPS for this domain, such as {_DOMAIN}.")
@click.option(
    "--tls-port", type=click.IntRange(0, 65535), default=TLS_PORT, show_default=True, help="The port of HTTPS."
)
@click.option("--state", type=HostPath(file_okay=False), help="The server's folder. Default: in ~/.local/state.")
@click.option("--env", is_flag=True, help="Print the variables for programs that use the server, and exit.")
@json_option
def command(**given: JSON) -> None:
    options = Options(**given)
    if options.isolation == "none":
        raise ConfigError("sandboxes of others need isolation: use best, full, userns or confined")
    if options.env:
        _print_environment(options)
    else:
        asyncio.run(_serve_sandboxes(options))


def environment(options: Options, url: str, keys: ApiKeys, domain: str | None) -> dict[str, str]:
    """Return the variables of the SDKs for a server: by its address or, with a domain, by that."""
    key = {"E2B_API_KEY": keys.first.secret}
    if domain is None:
        return {**key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
    trust = {"SSL_CERT_FILE": str(options.folder / "bundle.pem"), "NODE_EXTRA_CA_CERTS": str(options.folder / "ca.pem")}
    return {**key, "E2B_DOMAIN": domain, **trust}


def _printing_command(options: Options, url: str) -> str:
    """Return the command that prints the variables of a running server."""
    words = ["palaestra", "serve", "e2b", "--env"]
    given: dict[str, JSON] = {
        "--host": options.host if options.host != HOST else None,
        "--port": port if (port := urlsplit(url).port) != PORT else None,
        "--state": options.state, "--keys": options.keys, "--domain": options.domain,
        "--tls-port": options.tls_port if options.domain and options.tls_port != TLS_PORT else None,
    }  # fmt: skip
    for name, value in given.items():
        words += [] if value is None else [name, str(value)]
    return shlex.join(words)


def _print_environment(options: Options) -> None:
    if options.port == 0:
        raise ConfigError("--env needs the port of the server, which the server prints: --port N")
    keys = options.read_keys()
    host = f"[{options.host}]" if ":" in options.host else options.host
    domain = None if options.domain is None else f"{options.domain}:{options.tls_port}"
    for name, value in environment(options, f"http://{host}:{options.port}", keys, domain).items():
        click.echo(f"export {name}={shlex.quote(value)}")
    if domain is not None:
        click.echo("unset E2B_API_URL E2B_SANDBOX_URL")


def _images(options: Options) -> Mapping[str, tuple[str | None, ImageConfig]]:
    """Return the images of the templates by name. Raises `ConfigError`."""
    found: dict[str, tuple[str | None, ImageConfig]] = {
        root.name: (root.path, known_config(Path(root.path)) or ImageConfig())
        for root in roots(local_path(options.images))
    }
    given = [("base", options.image)] if options.image else []
    for text in options.templates:
        name, separator, path = text.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f"--template {text!r} is not NAME=PATH")
        given.append((name, path))
    for name, path in given:
        place = local_path(path)
        if not place.exists():
            raise ConfigError(f"the root file system {place} of the template {name} does not exist")
        found[name] = (str(place.absolute()), known_config(place) or ImageConfig())
    return {"base": (None, ImageConfig()), **found}


async def _serve_sandboxes(options: Options) -> None:
    from palaestra_e2b import certificate
    from palaestra_e2b.server import ServerAddress, running_server
    from palaestra_slots.sandbox.isolation.isolation_probe import WARNINGS

    stop, keys = told_to_stop(), options.read_keys()
    tls = None
    if options.domain is not None:
        chain, _ = await certificate.certificate(options.folder, options.domain)
        tls = certificate.context(chain)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_server(
                keys,
                _images(options),
                address=ServerAddress(options.host, options.port, options.domain, tls, options.tls_port),
                isolation=options.isolation,
                most_sandboxes=options.sandboxes,
                limits=options.limits,
                network=Network.ON if options.network else Network.OFF,
                folder=options.folder,
            )
        )
        print_url(running.url)
        for line in running.notes:
            click.echo(line, err=True)
        if weak := WARNINGS.get(running.pool.rung):
            click.echo(f"WARNING: isolation {running.pool.rung.label}: {weak}", err=True)
        click.echo(f'variables for programs: eval "$({_printing_command(options, running.url)})"', err=True)
        if options.domain is not None and not _resolves(f"49983-x.{options.domain}"):
            click.echo(
                f"WARNING: this machine does not resolve *.{options.domain}: install libnss-myhostname for names below "
                f"localhost, or let your resolver answer them (dnsmasq: address=/{options.domain}/127.0.0.1)",
                err=True,
            )
        await stop.wait()


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False
