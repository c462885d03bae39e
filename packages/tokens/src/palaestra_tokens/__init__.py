"""What a model saw, token for token: engines, chat templates, tool-call parsers, a ledger and its proof.

    async with ServerGroup(APIServerConfig(server_type="vllm", base_url=..., model_name=...)) as server:
        managed = server.managed_server()
        completion = await managed.chat_completion(messages=messages)
    managed.ledger.rows()

Each public name is loaded when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra_slots.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from palaestra_tokens.config import APIServerConfig, ServerBaseline
    from palaestra_tokens.engine import ChatCompletion, Sampled, TokenEngine
    from palaestra_tokens.engines.function_engine import FunctionEngine
    from palaestra_tokens.engines.openai import OpenAIEngine
    from palaestra_tokens.engines.token_engine import SGLangEngine, TokenChat, VLLMEngine
    from palaestra_tokens.engines.transformers import TransformersEngine
    from palaestra_tokens.ledger import Ledger, LedgerRecord, TokenRow, verify_ledger
    from palaestra_tokens.parsers import ToolCallParser, get_parser, list_parsers, register_parser
    from palaestra_tokens.recording.endpoint import RecordingEndpoint
    from palaestra_tokens.recording.recorded_conversations import Conversations
    from palaestra_tokens.server_group import ServerGroup, ServerManager
    from palaestra_tokens.token_exact.managed_chat import ManagedChat

__version__ = "0.1.0"

_MODULES = {
    "APIServerConfig": "config",
    "ChatCompletion": "engine",
    "Conversations": "recording.recorded_conversations",
    "FunctionEngine": "engines.function_engine",
    "Ledger": "ledger",
    "LedgerRecord": "ledger",
    "ManagedChat": "token_exact.managed_chat",
    "OpenAIEngine": "engines.openai",
    "RecordingEndpoint": "recording.endpoint",
    "SGLangEngine": "engines.token_engine",
    "Sampled": "engine",
    "ServerBaseline": "config",
    "ServerGroup": "server_group",
    "ServerManager": "server_group",
    "TokenChat": "engines.token_engine",
    "TokenEngine": "engine",
    "TokenRow": "ledger",
    "ToolCallParser": "parsers",
    "TransformersEngine": "engines.transformers",
    "VLLMEngine": "engines.token_engine",
    "get_parser": "parsers",
    "list_parsers": "parsers",
    "register_parser": "parsers",
    "verify_ledger": "ledger",
}

__all__ = [
    "APIServerConfig",
    "ChatCompletion",
    "Conversations",
    "FunctionEngine",
    "Ledger",
    "LedgerRecord",
    "ManagedChat",
    "OpenAIEngine",
    "RecordingEndpoint",
    "SGLangEngine",
    "Sampled",
    "ServerBaseline",
    "ServerGroup",
    "ServerManager",
    "TokenChat",
    "TokenEngine",
    "TokenRow",
    "ToolCallParser",
    "TransformersEngine",
    "VLLMEngine",
    "get_parser",
    "list_parsers",
    "register_parser",
    "verify_ledger",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
