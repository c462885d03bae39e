"""An engine that sends each rollout to its own model server, for trainers that give every rollout a base URL.

The program passes the address to the context manager `AddressedEngine.at` and starts the rollout inside its block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import ChatServer, ServerEngine, SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.token_exact.managed_chat import ManagedChat

# Tasks copy their context when they start, so rollouts in several blocks can run at the same time.
_SERVER: ContextVar[ServerEngine | None] = ContextVar("addressed_server", default=None)


class AddressedEngine(ServerEngine):
    """Connects each rollout to the server at its address. `make` creates the client for one address; `token_exact` is
    true if the clients continue token ids. `settings` are the `APIServerConfig` settings that all addresses share."""

    def __init__(
        self, make: Callable[[APIServerConfig], ServerEngine], settings: Mapping[str, JSON], *, token_exact: bool
    ) -> None:
        self.config = APIServerConfig(**{"model_name": "policy", **settings})
        self.token_exact = token_exact
        self._make, self._settings = make, settings

    async def start(self) -> None:
        """Do nothing: no server is known yet."""

    async def aclose(self) -> None:
        """Do nothing: each `at` block closes its own client."""

    @asynccontextmanager
    async def at(self, base_url: str, api_key: str, model: str) -> AsyncIterator[None]:
        """Send rollouts that start in the block to this server. Raises the errors of the client's `start`."""
        address = {"base_url": base_url, "model_name": model, "health_check": False}
        key = {"api_key": api_key} if api_key else {}
        server = self._make(APIServerConfig(**{**self._settings, **address, **key}))
        await server.start()
        token = _SERVER.set(server)
        try:
            yield
        finally:
            _SERVER.reset(token)
            await server.aclose()

    def session(self, context: SessionContext) -> ChatServer:
        return self._server().session(context)

    def managed_server(self, *, engine: object = None, **options: JSON) -> ManagedChat:
        """Return token-exact chat with the server at the address. `engine` is accepted because `ServerGroup` passes it,
        and is ignored."""
        managed: ManagedChat = self._server().managed_server(**options)  # type: ignore[attr-defined]
        return managed

    def _server(self) -> ServerEngine:
        server = _SERVER.get()
        if server is None:
            raise ConfigError("this rollout has no model server; start each rollout in a block of AddressedEngine.at")
        return server
