"""Names under which Atropos environments import model servers, and their helpers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

from palaestra.agent.result import SequenceData
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.token_exact.managed_chat import ManagedChat

APIServer: TypeAlias = ServerEngine
OpenAIServer: TypeAlias = OpenAIEngine
OpenaiConfig: TypeAlias = APIServerConfig
ManagedServer: TypeAlias = ManagedChat
SequenceNode: TypeAlias = SequenceData
"""The tokens of one conversation, as `get_state()["nodes"]` of a managed server has them."""

logger = logging.getLogger(__name__)


class ManagedServerAdapter:
    """The `chat.completions.create` and `completions.create` of an OpenAI client, as calls of a managed server, so that
    the package verifiers samples with exact tokens."""

    def __init__(self, managed_server: ManagedChat, base_url: str) -> None:
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=managed_server.chat_completion))
        self.completions = SimpleNamespace(create=managed_server.completion)

    async def post(self, path: str, body: dict[str, JSON], cast_to: type) -> NoReturn:
        """Raise `NotImplementedError`: a managed server has no further endpoints."""
        raise NotImplementedError(f"a managed server has no endpoint {path}; use chat.completions.create")

    def copy(self, **_: JSON) -> NoReturn:
        """Raise `NotImplementedError`: the tokens belong to one managed server."""
        raise NotImplementedError("the client of a managed server cannot be copied")


async def parse_http_response(resp: Any, logger: logging.Logger = logger) -> JSON:
    """Return the JSON of an aiohttp response. Raises the response's error, which is logged with its text."""
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        status, text = getattr(error, "status", "unknown"), await resp.text()
        logger.error("the server's response cannot be used: status %s, %s, response %s", status, error, text)
        raise
