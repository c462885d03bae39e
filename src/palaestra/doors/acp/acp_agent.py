"""`palaestra acp`: the conversations of `palaestra chat` for editors, over the Agent Client Protocol on stdio.

Protocol: agentclientprotocol.com, version 1. The package `agent-client-protocol` implements the transport. A session is
a stored conversation, and its folder (`cwd`) is a shared folder (`workdir.py`). The agent works on a copy. With
`--write ask`, the editor asks the person before changes are written back. Only the MCP servers in the settings are
started, not those that an editor requests.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palaestra import __version__
from palaestra.core.errors import ConfigError, ContextExceeded, PalaestraError
from palaestra.core.types import JSON
from palaestra.doors.acp.editor_session import COMMANDS, EditorSession
from palaestra.doors.chat.config import ChatOptions, chat_service, open_store, prompt
from palaestra.doors.chat.conversation import Conversation
from palaestra.doors.chat.permissions import ABOUT, Mode
from palaestra.doors.chat.service import ChatService
from palaestra.doors.chat.turn_events import INTERRUPTED, NATURAL
from palaestra.doors.chat.workdir import WorkFolder

try:
    import acp
    from acp import schema
except ImportError:
    raise ConfigError("palaestra acp needs agent-client-protocol: pip install 'palaestra[acp]'") from None

logger = logging.getLogger(__name__)

_STOPS: dict[str, str] = {
    NATURAL: "end_turn",
    INTERRUPTED: "cancelled",
    "length": "max_tokens",
    "max_turns": "max_turn_requests",
    "budget": "max_turn_requests",
}


async def serve_acp(options: ChatOptions) -> None:
    """Serve one editor until it closes this process's standard input."""
    with open_store(options.config) as store:
        async with chat_service(options, store) as service:
            await acp.run_agent(ChatAgent(service, options), use_unstable_protocol=True)  # type: ignore[arg-type]


class ChatAgent:
    """Implements `acp.Agent` on top of a `ChatService`."""

    def __init__(self, service: ChatService, options: ChatOptions) -> None:
        self._service = service
        self._options = options
        self._client: acp.Client
        self._sessions: dict[str, EditorSession] = {}
        self._call_numbers = itertools.count(1)

    def on_connect(self, conn: acp.Client) -> None:
        """Keep the connection to the editor."""
        self._client = conn

    async def initialize(self, protocol_version: int, **_: Any) -> schema.InitializeResponse:
        """Report the agent's capabilities."""
        return schema.InitializeResponse(
            protocol_version=min(protocol_version, acp.PROTOCOL_VERSION),
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(image=True, embedded_context=True),
                session_capabilities=schema.SessionCapabilities(
                    list=schema.SessionListCapabilities(),
                    fork=schema.SessionForkCapabilities(),
                    resume=schema.SessionResumeCapabilities(),
                    close=schema.SessionCloseCapabilities(),
                ),
            ),
            agent_info=schema.Implementation(name="palaestra", title="Palaestra", version=__version__),
        )

    async def authenticate(self, method_id: str, **_: Any) -> None:
        """Do nothing: keys are settings, so the editor need not authenticate."""

    async def new_session(
        self, cwd: str, mcp_servers: Sequence[object] | None = None, **_: Any
    ) -> schema.NewSessionResponse:
        """Begin a conversation about a folder."""
        if mcp_servers:
            logger.warning("the editor's MCP servers are not started; list them in the settings instead (--mcp FILE)")
        folder = self._folder(cwd)
        session = EditorSession(self._client, self._call_numbers)
        conversation = Conversation.begin(
            self._service,
            session.people,
            key="acp",
            system=prompt(self._options.config, folder),
            settings={"cwd": cwd},
        )
        self._join(session, conversation, folder)
        session.offer_commands()
        return schema.NewSessionResponse(session_id=conversation.id, modes=_modes(conversation))

    async def load_session(self, cwd: str, session_id: str, **_: Any) -> schema.LoadSessionResponse:
        """Open a stored conversation, and show the editor its history."""
        session = self._opened(session_id, cwd)
        await session.replay()
        session.offer_commands()
        return schema.LoadSessionResponse(modes=_modes(session.conversation))

    async def resume_session(self, session_id: str, cwd: str, **_: Any) -> schema.ResumeSessionResponse:
        """Open a stored conversation without sending its history, which the editor already has."""
        session = self._opened(session_id, cwd)
        session.offer_commands()
        return schema.ResumeSessionResponse(modes=_modes(session.conversation))

    async def fork_session(self, session_id: str, cwd: str, **_: Any) -> schema.ForkSessionResponse:
        """Fork a conversation: return a new conversation that begins with the same history."""
        session = EditorSession(self._client, self._call_numbers)
        other = await self._session(session_id).conversation.fork(people=session.people)
        self._join(session, other, None)  # the fork has the folder of the session
        session.offer_commands()
        return schema.ForkSessionResponse(session_id=other.id, modes=_modes(other))

    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: Any
    ) -> schema.ListSessionsResponse:
        """Return the stored conversations that editors began, or only those about the folder `cwd`."""
        found = []
        for record in self._service.store.conversations(key="acp", limit=200):
            where = str(record.settings.get("cwd") or "")
            if cwd in (None, where):
                updated = datetime.fromtimestamp(record.updated_at, UTC).isoformat()
                title = record.title or self._service.store.turns.first_words(record.id)
                found.append(schema.SessionInfo(session_id=record.id, cwd=where, title=title, updated_at=updated))
        return schema.ListSessionsResponse(sessions=found)

    async def close_session(self, session_id: str, **_: Any) -> None:
        """Close a conversation, but keep it in the store."""
        session = self._session(session_id)
        await session.conversation.close()
        del self._sessions[session_id]

    async def set_session_mode(self, mode_id: str, session_id: str, **_: Any) -> None:
        """Switch the permission mode."""
        if mode_id not in list(Mode):
            raise acp.RequestError.invalid_params({"mode_id": mode_id, "details": f"the modes are {', '.join(Mode)}"})
        self._session(session_id).conversation.permissions.switch(Mode(mode_id))

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Interrupt the turn."""
        self._session(session_id).conversation.interrupt()

    async def prompt(self, prompt: Sequence[Any], session_id: str, **_: Any) -> schema.PromptResponse:
        """Answer a message, then write the agent's changes back if the settings allow it. If a killed process left a
        turn open, that turn is finished first."""
        session = self._session(session_id)
        conversation = session.conversation
        content: JSON = _content(prompt)
        try:
            if content in [f"/{name}" for name in COMMANDS]:
                text = await (self._undo(conversation) if content == "/undo" else conversation.compact())
                await session.answer(text)
                return schema.PromptResponse(stop_reason="end_turn")
            if isinstance(content, str):
                content = session.message(content)
            if conversation.unfinished:
                await session.play(conversation.resume())
            ended = await session.play(conversation.send(content))
            await session.write_back(self._options.config.write)
        except PalaestraError as error:
            raise acp.RequestError.internal_error({"details": str(error)}) from None
        if ended.outcome not in _STOPS:
            full = isinstance(conversation.failure, ContextExceeded)
            advice = ". /undo removes the message, /compact replaces the history with a summary" if full else ""
            raise acp.RequestError.internal_error({"details": f"{ended.error or ended.outcome}{advice}"})
        return schema.PromptResponse(stop_reason=_STOPS[ended.outcome])  # type: ignore[arg-type]

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Reject every method: there are no extensions."""
        raise acp.RequestError.method_not_found(method)

    async def ext_notification(self, method: str, params: dict[str, Any]) -> None:
        """Ignore notifications: there are no extensions."""

    # Internal

    async def _undo(self, conversation: Conversation) -> str:
        undone = await conversation.undo()
        return "There is nothing to undo." if undone is None else "The last message was undone."

    def _folder(self, cwd: str) -> WorkFolder | None:
        if self._options.config.workdir is not None:
            cwd = self._options.config.workdir
        try:
            return WorkFolder(Path(cwd))
        except ConfigError as error:
            raise acp.RequestError.invalid_params({"cwd": cwd, "details": str(error)}) from None

    def _opened(self, session_id: str, cwd: str) -> EditorSession:
        if (known := self._sessions.get(session_id)) is not None:
            return known
        session = EditorSession(self._client, self._call_numbers)
        try:
            conversation = Conversation.open(self._service, session_id, session.people)
        except ConfigError as error:
            raise acp.RequestError.invalid_params({"session_id": session_id, "details": str(error)}) from None
        self._join(session, conversation, self._folder(cwd))
        return session

    def _join(self, session: EditorSession, conversation: Conversation, folder: WorkFolder | None) -> None:
        session.follow(conversation)
        self._sessions[conversation.id] = session
        if folder is not None:
            conversation.slots.share(folder)

    def _session(self, session_id: str) -> EditorSession:
        found = self._sessions.get(session_id)
        if found is None:
            raise acp.RequestError.invalid_params({"session_id": session_id, "details": "no open session has this id"})
        return found


def _modes(conversation: Conversation) -> schema.SessionModeState:
    modes = [schema.SessionMode(id=mode.value, name=mode.value, description=about) for mode, about in ABOUT.items()]
    return schema.SessionModeState(current_mode_id=conversation.permissions.mode.value, available_modes=modes)


def _content(blocks: Sequence[Any]) -> JSON:
    """Convert the protocol's content blocks to the content of a chat message."""
    texts: list[str] = []
    images: list[JSON] = []
    for block in blocks:
        if isinstance(block, schema.TextContentBlock):
            texts.append(block.text)
        elif isinstance(block, schema.ImageContentBlock):
            images.append({"type": "image_url", "image_url": {"url": f"data:{block.mime_type};base64,{block.data}"}})
        elif isinstance(block, schema.ResourceContentBlock):
            texts.append(f"[{block.name}]({block.uri})")
        elif isinstance(block, schema.EmbeddedResourceContentBlock):
            resource = block.resource
            if isinstance(resource, schema.TextResourceContents):
                texts.append(f'<file name="{resource.uri}">\n{resource.text}\n</file>')
        else:
            raise acp.RequestError.invalid_params({"details": f"content of type {block.type} cannot be sent"})
    text = "\n\n".join(texts)
    return [{"type": "text", "text": text}, *images] if images else text
