"""Puts the parts of a server together, for the command line, tests and benchmarks."""

from __future__ import annotations

import fcntl
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.core.types import Limits, Network
from palaestra.doors.e2b.api_keys import ApiKeys
from palaestra.doors.e2b.control_api import ControlApi
from palaestra.doors.e2b.endings import Endings
from palaestra.doors.e2b.envd import Envd
from palaestra.doors.e2b.file_transfer import MOST_UPLOAD_BYTES, FileTransfer
from palaestra.doors.e2b.sandboxes import Sandboxes
from palaestra.doors.e2b.server import E2BServer, serving
from palaestra.doors.e2b.template_api import TemplateApi
from palaestra.doors.e2b.template_builds import TemplateBuilds
from palaestra.doors.e2b.templates import Templates
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra.suites.images.dockerfile import ImageConfig

BASE_IMAGES: Mapping[str, tuple[str | None, ImageConfig]] = {"base": (None, ImageConfig())}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers. `notes` are lines for whoever started it."""

    url: str
    secure_url: str | None
    pool: SlotPool
    sandboxes: Sandboxes
    notes: tuple[str, ...]


@asynccontextmanager
async def running_server(
    keys: ApiKeys,
    images: Mapping[str, tuple[str | None, ImageConfig]] = BASE_IMAGES,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    isolation: str = "best",
    most_sandboxes: int | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    network: Network = Network.ON,
    folder: Path | None = None,
    domain: str | None = None,
    tls: ssl.SSLContext | None = None,
    tls_port: int = 0,
    most_upload_bytes: int = MOST_UPLOAD_BYTES,
) -> AsyncIterator[RunningServer]:
    """Run a server during the block, at whose end every sandbox ends.

    `images` maps the names of templates to root file systems with their configurations; `base` must be among them.
    `folder` keeps templates and the record of ended sandboxes. With `tls`, the server also answers HTTPS for `domain`.
    Raises `ConfigError`, also if another server uses the folder, and `IsolationUnavailable`.
    """
    with _only_server(folder), Endings(None if folder is None else folder / "sandboxes.jsonl") as endings:
        backend = LocalBackend.from_isolation(isolation)
        async with SlotPool(SlotPoolConfig(max_slots=most_sandboxes, acquire_timeout=10.0), backend) as pool:
            templates = Templates(pool, images)
            builds = TemplateBuilds(pool, templates, None if folder is None else folder / "templates", network)
            notes = builds.read_saved()
            template_api = TemplateApi(templates, builds, limits)
            try:
                async with Sandboxes(pool, templates, endings, limits=limits, network=network) as sandboxes:
                    tls_port = tls_port or _free_port(host)  # sandboxes are told the port before it is opened
                    secure_domain = None if domain is None else f"{domain}:{tls_port}"
                    control = ControlApi(sandboxes, template_api, domain=secure_domain)
                    envd = Envd(sandboxes, FileTransfer(most_upload_bytes=most_upload_bytes))
                    server = E2BServer(keys, control, envd, template_api, sandboxes)
                    async with serving(server, keys, host, port, tls=tls, tls_port=tls_port) as (url, secure):
                        notes += [f"sandboxes: {pool.limit}; isolation {pool.rung.label}"]
                        if secure is not None:
                            notes.append(f"HTTPS at {secure} for api.{secure_domain} and PORT-ID.{secure_domain}")
                        if endings.recovered:
                            notes.append(f"{endings.recovered} sandboxes had ended with a server that was killed")
                        yield RunningServer(url, secure, pool, sandboxes, tuple(notes))
            finally:
                await builds.aclose()


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.bind((host, 0))
        return int(trial.getsockname()[1])


@contextmanager
def _only_server(folder: Path | None) -> Iterator[None]:
    """Keep other servers out of the folder. Raises `ConfigError` if one uses it."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another server uses the folder {folder}: end it, or choose one with --state") from None
        yield
