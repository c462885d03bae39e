"""What people choose in a chat: the model (`/model`) and the toolsets (`/toolsets`) of their session.

They choose among those of the gateway's configuration. A choice is stored with the conversation, and the next
conversation of the same session begins with it.
"""

from __future__ import annotations

from palaestra_chat.conversation import Conversation
from palaestra_chat.service import ChatService
from palaestra_gateway.config import GatewayConfig
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

DEFAULT = "default"
_CHOSEN = ("model", "toolsets")


def offered_toolsets(config: GatewayConfig, chat: ChatService) -> tuple[str, ...]:
    """Return the toolsets that people may use."""
    return tuple(dict.fromkeys([*chat.settings.toolsets, *config.more_toolsets]))


def carried_over(config: GatewayConfig, chat: ChatService, key: str) -> dict[str, JSON]:
    """Return the choices of the latest conversation of a session, for its next one. Choices that the configuration does
    not offer any more are left out."""
    latest = chat.store.conversations(limit=1, key=key)
    settings = latest[0].settings if latest else {}
    chosen = {name: settings[name] for name in _CHOSEN if settings.get(name)}
    if chosen.get("model") not in chat.settings.models:
        chosen.pop("model", None)
    if not set(chosen.get("toolsets", ())) <= set(offered_toolsets(config, chat)):
        del chosen["toolsets"]
    return chosen


def correct(config: GatewayConfig, chat: ChatService, conversation: Conversation) -> None:
    """Undo choices that the configuration does not offer any more."""
    settings = conversation.history.record.settings
    if settings.get("model") and settings["model"] not in chat.settings.models:
        _use_default(chat, conversation)
    if not set(conversation.toolsets) <= set(offered_toolsets(config, chat)):
        conversation.toolsets = tuple(chat.settings.toolsets)
        conversation.history.change_settings(toolsets=[])


def _use_default(chat: ChatService, conversation: Conversation) -> None:
    conversation.model.use(chat.server)  # type: ignore[arg-type]
    conversation.history.change_settings(model="")


async def choose_model(chat: ChatService, conversation: Conversation, name: str) -> str:
    """Use the model `name` of the configuration from the next message on, or list the models if it is empty. Returns
    the reply."""
    models = chat.settings.models
    if name == DEFAULT:
        _use_default(chat, conversation)
    elif name in models:
        await conversation.use_model(name)
    elif name:
        raise ConfigError(f"there is no model {name!r}.{nearest(name, models)} /model lists the models.")
    current = conversation.history.record.settings.get("model") or DEFAULT
    names = {DEFAULT: chat.model_name(), **{each: chat.model_name(server) for each, server in models.items()}}
    if name:
        return f"The model is {current} ({names[current]}) from your next message on."
    lines = [f"{'→' if each == current else '-'} {each}: {model}" for each, model in names.items()]
    return "\n".join(["Choose one of these models with /model NAME:", *lines])


async def choose_toolsets(config: GatewayConfig, chat: ChatService, conversation: Conversation, words: str) -> str:
    """Change the toolsets by words such as `+web -terminal`, by a list of names, or back to the `default`; list them
    if there are no words. Returns the reply."""
    offered, chosen = offered_toolsets(config, chat), conversation.toolsets
    given = words.replace(",", " ").split()
    for word in given:
        if (name := word.lstrip("+-")) not in (*offered, DEFAULT):
            raise ConfigError(f"there is no toolset {name!r}.{nearest(name, offered)} /toolsets lists the toolsets.")
    if given == [DEFAULT]:
        wanted = list(chat.settings.toolsets)
    elif all(word[0] in "+-" for word in given):
        on, off = ({word[1:] for word in given if word[0] == sign} for sign in "+-")
        wanted = [each for each in offered if (each in chosen or each in on) and each not in off]
    else:
        wanted = [each for each in offered if each in given]
    if given:
        await conversation.use_toolsets(wanted)
        return f"The toolsets are {' '.join(wanted) or 'none'} from your next message on."
    lines = [f"{'→' if each in chosen else '-'} {each}" for each in offered]
    return "\n".join(["Turn toolsets on and off with /toolsets +NAME -NAME:", *lines])
