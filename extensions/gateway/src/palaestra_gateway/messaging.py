"""The tool `send_message`, with which an agent writes to chats of the gateway.

An agent may write to its own chat, to the home channels, and to the chats of the setting `message_targets`. Other chats
are hidden from the agent, because a person who writes to it could make it write to strangers. When the tool answers,
the message is in the mailbox. Sending is retried until the platform accepts or refuses the message. A call that a crash
cut off is never repeated automatically.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun
from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platform import ChatAddress, Platform
from palaestra_slots.core.types import JSON
from palaestra_toolsets.unavailable import MESSAGING

ORIGIN = "origin"


class Messaging:
    """The chats to which the agents of a gateway may write. `notify` posts a text to a chat."""

    def __init__(
        self,
        config: GatewayConfig,
        platforms: Mapping[str, Platform],
        mailbox: Mailbox,
        notify: Callable[[str, ChatAddress], Awaitable[None]],
    ) -> None:
        self._config, self.platforms, self._mailbox, self._notify = config, platforms, mailbox, notify
        self.tool: FunctionTool = replace(MESSAGING[0], run=self._run, missing=lambda: None, touches_world=True)

    async def targets(self, session_key: str) -> dict[str, tuple[ChatAddress, str]]:
        """Return the chats that a session's agent may write to, by target name, each with a description."""
        found: dict[str, tuple[ChatAddress, str]] = {}
        sessions = await self._mailbox.sessions()
        for row in sessions:
            if row.key == session_key and row.address.platform in self.platforms:
                found[ORIGIN] = row.address, "the chat of this conversation"
        for name, platform in self._config.platforms.items():
            home = self._config.home_channel(name) if platform.home_channel is not None else None
            if platform.enabled and home is not None and home.platform in self.platforms:
                found[name] = home, "home channel"
        known = {target_name(row.address): row.address for row in sessions}
        wanted = self._config.message_targets
        for name, address in known.items():
            if ("*" in wanted or name in wanted) and address.platform in self.platforms:
                found[name] = address, address.chat_type
        for name in wanted:
            kind, _, chat = name.partition(":")
            if chat and kind in self.platforms:
                found.setdefault(name, (ChatAddress(kind, chat), "chat"))
        return found

    async def address(self, session_key: str, target: str) -> ChatAddress:
        """Return the chat that a target names. Raises `ToolMistake`."""
        targets = await self.targets(session_key)
        if target not in targets:
            names = ", ".join(targets) or "none"
            raise ToolMistake(
                f"{target!r} is not a chat that you may write to. You may write to: {names}. The owner of the gateway "
                "adds others with the setting message_targets"
            )
        return targets[target][0]

    async def _run(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        if arguments.get("action") == "list":
            targets = await self.targets(run.session_key)
            return {"success": True, "targets": [{"target": name, "type": kind} for name, (_, kind) in targets.items()]}
        target, message = str(arguments.get("target") or ""), str(arguments.get("message") or "")
        if not target or not message.strip():
            raise ToolMistake("send needs target and message; action list names the targets")
        if len(message.encode("utf-8", "replace")) > self._config.max_message_bytes:
            raise ToolMistake(f"the message is longer than {self._config.max_message_bytes} bytes; send less")
        address = await self.address(run.session_key, target)
        await self._notify(message, address)
        return {"success": True, "target": target, "status": "queued; it is sent as soon as the platform accepts it"}


def target_name(address: ChatAddress) -> str:
    """Return the name of a chat as a target: `PLATFORM:CHAT`, and `PLATFORM:CHAT:THREAD` for a thread."""
    return ":".join(filter(None, (address.platform, address.chat_id, address.thread_id)))
