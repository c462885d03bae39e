"""`palaestra acp`: the conversations of `palaestra chat` for editors, over the Agent Client Protocol on stdio.

Protocol: agentclientprotocol.com, version 1. The package `agent-client-protocol` implements the transport. A session is
a stored conversation, and its folder (`cwd`) is a shared folder (`workdir.py`). The agent works on a copy. With
`--write ask`, the editor asks the person before changes are written back. The MCP servers of the settings run for all
sessions, and those that an editor names run for one (`editor_servers.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from palaestra import __version__
from palaestra_chat.acp.config_options import MODE, config_options, known_models, set_option
from palaestra_chat.acp.editor_session import COMMANDS, EditorSession
from palaestra_chat.attachments import checked_image, with_pages
from palaestra_chat.config import ChatOptions, chat_service, open_store, prompt
from palaestra_chat.conversation import Conversation
from palaestra_chat.permissions import ABOUT, Mode
from palaestra_chat.service import ChatService
from palaestra_chat.turn_events import INTERRUPTED, NATURAL
from palaestra_chat.workdir import NONE, WorkFolder
from palaestra_slots.core.errors import ConfigError, ContextExceeded, PalaestraError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON

try:
    import acp
    from acp import schema
except ImportError:
    raise ConfigError(f"palaestra acp needs agent-client-protocol: {install_command('acp')}") from None

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
            agent = ChatAgent(service, options)
            try:
                await acp.run_agent(agent, use_unstable_protocol=True)  # type: ignore[arg-type]
            finally:
                await agent.aclose()


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
                mcp_capabilities=schema.McpCapabilities(http=True, sse=False),
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
        folder = self._folder(cwd)
        session = EditorSession(self._client, self._call_numbers)
        conversation = Conversation.begin(
            self._service,
            session.people,
            key="acp",
            system=prompt(self._options.config, folder),
            settings={"cwd": cwd},
        )
        offered = await self._join(session, conversation, folder, mcp_servers)
        session.offer_commands()
        return schema.NewSessionResponse(session_id=conversation.id, modes=_modes(conversation), config_options=offered)

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[object] | None = None, **_: Any
    ) -> schema.LoadSessionResponse:
        """Open a stored conversation, and show the editor its history."""
        session, offered = await self._open_session(session_id, cwd, mcp_servers)
        await session.replay()
        session.offer_commands()
        return schema.LoadSessionResponse(modes=_modes(session.conversation), config_options=offered)

    async def resume_session(
        self, session_id: str, cwd: str, mcp_servers: Sequence[object] | None = None, **_: Any
    ) -> schema.ResumeSessionResponse:
        """Open a stored conversation without sending its history, which the editor already has."""
        session, offered = await self._open_session(session_id, cwd, mcp_servers)
        session.offer_commands()
        return schema.ResumeSessionResponse(modes=_modes(session.conversation), config_options=offered)

    async def fork_session(
        self, session_id: str, cwd: str, mcp_servers: Sequence[object] | None = None, **_: Any
    ) -> schema.ForkSessionResponse:
        """Fork a conversation: return a new conversation that begins with the same history."""
        session = EditorSession(self._client, self._call_numbers)
        other = await self._session(session_id).conversation.fork(people=session.people)
        offered = await self._join(session, other, None, mcp_servers)  # the fork has the folder of the session
        session.offer_commands()
        return schema.ForkSessionResponse(session_id=other.id, modes=_modes(other), config_options=offered)

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
        await session.close_servers()
        del self._sessions[session_id]

    async def aclose(self) -> None:
        """End the MCP servers that the editor named. Idempotent."""
        for session in self._sessions.values():
            await session.close_servers()

    async def set_session_mode(self, mode_id: str, session_id: str, **_: Any) -> None:
        """Switch the permission mode."""
        if mode_id not in list(Mode):
            raise acp.RequestError.invalid_params({"mode_id": mode_id, "details": f"the modes are {', '.join(Mode)}"})
        session = self._session(session_id)
        session.conversation.permissions.switch(Mode(mode_id))
        offered = config_options(session.conversation, await known_models(self._service))
        session.show(schema.ConfigOptionUpdate(session_update="config_option_update", config_options=offered))

    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool, **_: Any
    ) -> schema.SetSessionConfigOptionResponse:
        """Switch the model or the permission mode of a session."""
        session = self._session(session_id)
        try:
            await set_option(session.conversation, config_id, value)
        except ConfigError as error:
            raise acp.RequestError.invalid_params({"config_id": config_id, "details": str(error)}) from None
        if config_id == MODE:
            session.show(schema.CurrentModeUpdate(session_update="current_mode_update", current_mode_id=str(value)))
        offered = config_options(session.conversation, await known_models(self._service))
        return schema.SetSessionConfigOptionResponse(config_options=offered)

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Interrupt the turn."""
        self._session(session_id).conversation.interrupt()

    async def prompt(self, prompt: Sequence[Any], session_id: str, **_: Any) -> schema.PromptResponse:
        """Answer a message, then write the agent's changes back if the settings allow it. If a killed process left a
        turn open, that turn is finished first."""
        session = self._session(session_id)
        conversation = session.conversation
        try:
            folder = conversation.slots.folder
            content: JSON = _chat_content(prompt, None if folder is None else folder.root)
            if content in [f"/{name}" for name in COMMANDS]:
                text = await (self._undo(conversation) if content == "/undo" else conversation.compact())
                await session.answer(text)
                return schema.PromptResponse(stop_reason="end_turn")
            if isinstance(content, str):
                content = session.message(content)
            typed = "\n".join(block.text for block in prompt if isinstance(block, schema.TextContentBlock))
            content = await with_pages(content, typed, self._options.config.hosts_of_pages)
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
        if ended.outcome not in (NATURAL, INTERRUPTED):  # the protocol's reason has no text
            await session.explain(ended.error)
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
        if self._options.config.workdir == NONE:
            return None
        if self._options.config.workdir is not None:
            cwd = self._options.config.workdir
        try:
            return WorkFolder(Path(cwd))
        except ConfigError as error:
            raise acp.RequestError.invalid_params({"cwd": cwd, "details": str(error)}) from None

    async def _open_session(
        self, session_id: str, cwd: str, named: Sequence[object] | None
    ) -> tuple[EditorSession, list[Any]]:
        """Return a stored session, opened, and its options."""
        if (known := self._sessions.get(session_id)) is not None:
            return known, config_options(known.conversation, await known_models(self._service))
        folder = self._folder(cwd)
        session = EditorSession(self._client, self._call_numbers)
        try:
            conversation = Conversation.open(self._service, session_id, session.people)
        except ConfigError as error:
            raise acp.RequestError.invalid_params({"session_id": session_id, "details": str(error)}) from None
        return session, await self._join(session, conversation, folder, named)

    async def _join(
        self,
        session: EditorSession,
        conversation: Conversation,
        folder: WorkFolder | None,
        named: Sequence[object] | None,
    ) -> list[Any]:
        """Let the editor session show the conversation, with the MCP servers that the editor names. Returns the
        session's options. If a server cannot be used, the conversation is closed."""
        session.follow(conversation)
        if folder is not None:
            conversation.slots.share_folder(folder)
        try:
            await session.start_servers(named or (), self._options.config.mcp_servers)
        except ConfigError as error:
            await conversation.close()
            raise acp.RequestError.invalid_params({"details": str(error)}) from None
        self._sessions[conversation.id] = session
        return config_options(conversation, await known_models(self._service))

    def _session(self, session_id: str) -> EditorSession:
        found = self._sessions.get(session_id)
        if found is None:
            raise acp.RequestError.invalid_params({"session_id": session_id, "details": "no open session has this id"})
        return found


def _modes(conversation: Conversation) -> schema.SessionModeState:
    modes = [schema.SessionMode(id=mode.value, name=mode.value, description=about) for mode, about in ABOUT.items()]
    return schema.SessionModeState(current_mode_id=conversation.permissions.mode.value, available_modes=modes)


def _chat_content(blocks: Sequence[Any], folder: Path | None) -> JSON:
    """Convert the protocol's content blocks to the content of a chat message, with paths as the sandbox has them, where
    the agent starts in the `folder`. Raises `ConfigError` for data that is not an image."""
    texts: list[str] = []
    images: list[JSON] = []
    for block in blocks:
        if isinstance(block, schema.TextContentBlock):
            texts.append(block.text)
        elif isinstance(block, schema.ImageContentBlock):
            images.append(checked_image(block.data))
        elif isinstance(block, schema.ResourceContentBlock):
            texts.append(f"[{block.name}]({_path_of(block.uri, folder)})")
        elif isinstance(block, schema.EmbeddedResourceContentBlock):
            resource = block.resource
            if isinstance(resource, schema.TextResourceContents):
                texts.append(f'<file name="{_path_of(resource.uri, folder)}">\n{resource.text}\n</file>')
            elif (resource.mime_type or "image/").startswith("image/"):
                images.append(checked_image(resource.blob))
            else:
                texts.append(f"[{_path_of(resource.uri, folder)}] ({resource.mime_type}, which the model cannot read)")
        else:
            raise acp.RequestError.invalid_params({"details": f"content of type {block.type} cannot be sent"})
    text = "\n\n".join(texts)
    return [{"type": "text", "text": text}, *images] if images else text


def _path_of(uri: str, folder: Path | None) -> str:
    """Return the path of a `file:` address, relative to the folder if it is in it; other addresses as they are. Editors
    append the lines that are meant, such as `#L10:20`."""
    if not uri.startswith("file:"):
        return uri
    address, mark, lines = uri.partition("#")
    path = Path(unquote(urlsplit(address).path))
    for root in () if folder is None else (folder, folder.resolve()):
        if path.is_relative_to(root):
            return f"{path.relative_to(root)}{mark}{lines}"
    return f"{path}{mark}{lines} (not in the sandbox)"
