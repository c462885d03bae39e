"""Assembles a gateway from its configuration: locks, mailbox, conversations and platforms.

A gateway keeps all its files in one folder, its home:

    gateway.yaml          the settings              conversations.db   conversations and their journal
    gateway.db            the mailbox               processes.json     background processes, for the next start
    gateway.lock          held while it runs

Invariant: running gateways never share a folder, and running gateways of one user on one machine never share a
platform's token.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

from palaestra.envs.config.build import command_timeout_s, make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_chat.config import named_models
from palaestra_chat.service import SYSTEM_PROMPT, ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_gateway.choices import offered_toolsets
from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platforms.registry import make_platform
from palaestra_gateway.service import Gateway
from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.config import all_settings, nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Network, Prices
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.backends.registry import is_of_backends, require_read
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.service.service_client import default_directory
from palaestra_slots.sandbox.slot import SlotSpec

logger = logging.getLogger(__name__)

MAILBOX, CONVERSATIONS, PROCESSES, LOCK = "gateway.db", "conversations.db", "processes.json", "gateway.lock"


@asynccontextmanager
async def assembled(config: GatewayConfig, home: Path) -> AsyncIterator[Gateway]:
    """Yield a gateway that serves while the block runs. Raises `ConfigError` and `IsolationUnavailable`, and what
    `Gateway.running` raises."""
    if config.server is None:
        raise ConfigError("server.base_url is not set: set the model server in the configuration, or with --base-url")
    enabled = {name: each for name, each in config.platforms.items() if each.enabled}
    if not enabled:
        raise ConfigError("no platform is enabled: add one below `platforms`, such as openai or webhook")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    platforms = [make_platform(name, each) for name, each in enabled.items()]
    with ExitStack() as locks:
        locks.enter_context(_held(home / LOCK, f"a gateway is already running in {home}; stop it first"))
        for name, each in enabled.items():
            if token := each.secret(name):
                problem = f"another gateway on this machine uses the token of platforms.{name}; stop it first"
                locks.enter_context(_held(_token_lock(name, token), problem))
        store = locks.enter_context(closing(ConversationStore(home / CONVERSATIONS)))
        mailbox = Mailbox(home / MAILBOX)
        try:
            pool = _pool(config, home)
            settings = _chat_settings(config)
            async with ChatService(config.server, store, settings, pool=pool, checkpoint=home / PROCESSES) as chat:
                gateway = Gateway(config, platforms, mailbox, chat)
                chat.registry(
                    list(offered_toolsets(config, chat))
                )  # raises for an unknown toolset now, not at the first use
                async with gateway.running(), _status_page(config, mailbox):
                    yield gateway
        finally:
            await mailbox.aclose()


@asynccontextmanager
async def _status_page(config: GatewayConfig, mailbox: Mailbox) -> AsyncIterator[None]:
    if config.status_port is None:
        yield
        return
    from palaestra_gateway.observe.metrics_page import serving_status

    async with serving_status(mailbox, SystemClock(), config.status_port) as url:
        logger.info("%s/metrics and %s/status", url, url)
        yield


def is_running(home: Path) -> bool:
    """Return whether a gateway runs in this folder."""
    try:
        with _held(home / LOCK, ""):
            return False
    except ConfigError:
        return True


def _chat_settings(config: GatewayConfig) -> ChatSettings:
    prices = None if config.prices is None else Prices(config.prices.prompt, config.prices.completion)
    return ChatSettings(
        system_prompt=config.system_prompt or SYSTEM_PROMPT,
        toolsets=config.toolsets,
        tool_settings=config.tools,
        max_turns=config.max_turns,
        context_tokens=config.context_tokens,
        prices=prices,
        models=named_models(config.models, [] if config.server is None else [config.server]),
        tool_timeout_s=command_timeout_s(_slot_settings(config)),
        spec=SlotSpec(config.image, Network(config.network)),
    )


def _pool(config: GatewayConfig, home: Path) -> SlotPool:
    """Return the pool of the sandboxes. Only those on this machine can outlive the gateway. Raises `ConfigError` for
    settings that the backend does not read or rejects."""
    if config.isolation == "none" and config.network == "off" and "network" in config.model_fields_set:
        raise ConfigError("network off has no effect with isolation none: request another level, or set network: on")
    if config.backend == "local":
        if config.backend_settings:
            raise ConfigError("backend_settings has no effect on local sandboxes: set backend, or leave it out")
        rung, require = levels(config.isolation)
        service = service_name(home) if config.keep_sandboxes else None
        limits = SlotPoolConfig(max_slots=config.max_sandboxes)
        return SlotPool(limits, LocalBackend(rung=rung, require=require, service=service))
    if config.keep_sandboxes and "keep_sandboxes" in config.model_fields_set:
        raise ConfigError(f"sandboxes of the backend {config.backend} end with the gateway: set keep_sandboxes: false")
    settings = _slot_settings(config)
    require_read(config.backend, config.backend_settings, settings)
    return make_pool(settings)


def _slot_settings(config: GatewayConfig) -> HermesAgentEnvConfig:
    """Return the settings of the sandboxes as a run would have them. Raises `ConfigError`."""
    known = [name for name in all_settings(HermesAgentEnvConfig) if is_of_backends(name)]
    for name in config.backend_settings:
        if name not in known:
            raise ConfigError(f"backends have no setting {name}, which is in backend_settings.{nearest(name, known)}")
    return HermesAgentEnvConfig(
        isolation=config.isolation, tool_pool_mode=config.backend, slots=config.max_sandboxes, **config.backend_settings
    )


def service_name(home: Path) -> str:
    """Return the name of the slot service that keeps the sandboxes of a gateway (`palaestra slots list` shows it)."""
    return f"gateway-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]}"


def _token_lock(name: str, token: str) -> Path:
    folder = default_directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = name.partition("-")[0]
    return folder / f"token-{hashlib.sha256(f'{kind}{token}'.encode()).hexdigest()[:24]}.lock"


@contextmanager
def _held(path: Path, problem: str) -> Iterator[None]:
    """Hold a lock file during the block; the kernel also releases it when this process dies. Raises `ConfigError` with
    `problem` if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for attempt in range(3):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 2:
                    raise ConfigError(problem) from None
                time.sleep(0.05)  # `is_running` holds it for a moment
        yield
    finally:
        os.close(descriptor)
