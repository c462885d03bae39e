"""The configuration options of a session: its model and its permission mode.

Editors that know options (`session/set_config_option`) show these in place of the session modes, so the mode is an
option, too. Source: the schema of the package `agent-client-protocol`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from palaestra_chat.conversation import Conversation
from palaestra_chat.permissions import ABOUT, Mode
from palaestra_chat.service import ChatService
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command

try:
    from acp import schema
except ImportError:
    raise ConfigError(f"palaestra acp needs agent-client-protocol: {install_command('acp')}") from None

MODEL, MODE = "model", "mode"
_LIST_S = 3.0
"""The maximum seconds to wait for the model server's list; a session must also begin while the server is away."""
_MOST_MODELS = 200


async def known_models(service: ChatService) -> list[str]:
    """Return the models of the settings, and those that the model server lists if it answers soon."""
    try:
        async with asyncio.timeout(_LIST_S):
            listed = await service.models()
    except TimeoutError:
        listed = []
    return list(dict.fromkeys([*service.settings.models, *listed]))[:_MOST_MODELS]


def config_options(conversation: Conversation, models: Sequence[str]) -> list[Any]:
    """Return the options with their current values. `models` are the models to choose from; the current one is
    added."""
    now = str(conversation.history.record.settings.get("model") or conversation.model.name)
    names = models if now in models else [now, *models]
    return [
        schema.SessionConfigOptionSelect(
            id=MODEL, type="select", name="Model", category="model", current_value=now,
            options=[schema.SessionConfigSelectOption(value=name, name=name) for name in names],
        ),
        schema.SessionConfigOptionSelect(
            id=MODE, type="select", name="Mode", category="mode", current_value=conversation.permissions.mode.value,
            description="What the agent may do without a question",
            options=[
                schema.SessionConfigSelectOption(value=mode.value, name=mode.value, description=about)
                for mode, about in ABOUT.items()
            ],
        ),
    ]  # fmt: skip


async def set_option(conversation: Conversation, option: str, value: object) -> None:
    """Change an option. Raises `ConfigError` for an unknown option or value."""
    if option == MODEL and isinstance(value, str):
        await conversation.use_model(value)
    elif option == MODE and value in list(Mode):
        conversation.permissions.switch(Mode(str(value)))
    elif option == MODE:
        raise ConfigError(f"the modes are {', '.join(Mode)}, not {value!r}")
    else:
        raise ConfigError(f"the options are {MODEL} and {MODE}, not {option!r} = {value!r}")
