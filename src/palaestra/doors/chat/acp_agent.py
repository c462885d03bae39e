"""`palaestra acp`: the conversations of `palaestra chat` for editors, over the Agent Client Protocol on stdio.

Protocol: agentclientprotocol.com, version 1. The package `agent-client-protocol` implements the transport. A session is
a stored conversation, and its folder (`cwd`) is a shared folder (`workdir.py`). The agent works on a copy. With
`--write ask`, the editor asks the person before changes are written back. Only the MCP servers in the settings are
started, not those that an editor requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palaestra import __version__
from palaestra.core.errors import ConfigError, ContextExceeded, PalaestraError
from palaestra.core.exits import plural
from palaestra.core.printable import escaped, quoted
from palaestra.core.types import JSON, Message
from palaestra.doors.chat.config import ChatOptions, chat_service, open_store, project, prompt
from palaestra.doors.chat.conversation import Conversation, People
from palaestra.doors.chat.permissions import ABOUT, Mode
from palaestra.doors.chat.project import Project, command_description, command_message
from palaestra.doors.chat.service import ChatService
from palaestra.doors.chat.turn_events import (
    INTERRUPTED,
    NATURAL,
    Event,
    Notice,
    ReasoningDelta,
    TextDelta,
    ToolBegun,
    ToolEnded,
    ToolOutput,
    TurnEnded,
)
from palaestra.doors.chat.workdir import WorkFolder
from palaestra.tools.builtin.session_search import message_text
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest

try:
    import acp
    from acp import schema
except ImportError:
    raise ConfigError("palaestra acp needs agent-client-protocol: pip install 'palaestra[acp]'") from None

logger = logging.getLogger(__name__)

_KINDS: dict[str, str] = {
    "terminal": "execute",
    "execute_code": "execute",
    "process": "execute",
    "read_file": "read",
    "write_file": "edit",
    "patch": "edit",
    "search_files": "search",
    "web_search": "fetch",
    "web_extract": "fetch",
}
_STOPS: dict[str, str] = {
    NATURAL: "end_turn",
    INTERRUPTED: "cancelled",
    "length": "max_tokens",
    "max_turns": "max_turn_requests",
    "budget": "max_turn_requests",
}
_ANSWERS = {
    "once": (ApprovalAnswer.ONCE, "Allow once", "allow_once"),
    "session": (ApprovalAnswer.SESSION, "Allow in this session", "allow_always"),
    "always": (ApprovalAnswer.ALWAYS, "Always allow", "allow_always"),
    "no": (ApprovalAnswer.DENY, "Do not run it", "reject_once"),
}

_COMMANDS = {
    "compact": "Replace the history with a summary",
    "undo": "Remove the last message and its answer, and restore the files of the time before it",
}
"""The commands that the editor offers, which are sent as prompts such as `/undo`."""


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
        self._calls = 0
        self._call_ids: dict[str, str] = {}
        self._told: set[asyncio.Task[None]] = set()

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
        people: list[str] = []
        conversation = Conversation.begin(
            self._service,
            self._people(people),
            key="acp",
            system=prompt(self._options.config, folder),
            settings={"cwd": cwd},
        )
        self._join(conversation, folder, people)
        self._offer_commands(conversation.id)
        return schema.NewSessionResponse(session_id=conversation.id, modes=_modes(conversation))

    async def load_session(self, cwd: str, session_id: str, **_: Any) -> schema.LoadSessionResponse:
        """Open a stored conversation, and show the editor its history."""
        conversation = self._opened(session_id, cwd)
        for message in conversation.history.messages:
            await self._replay(conversation.id, message)
        self._offer_commands(session_id)
        return schema.LoadSessionResponse(modes=_modes(conversation))

    async def resume_session(self, session_id: str, cwd: str, **_: Any) -> schema.ResumeSessionResponse:
        """Open a stored conversation without sending its history, which the editor already has."""
        conversation = self._opened(session_id, cwd)
        self._offer_commands(session_id)
        return schema.ResumeSessionResponse(modes=_modes(conversation))

    async def fork_session(self, session_id: str, cwd: str, **_: Any) -> schema.ForkSessionResponse:
        """Fork a conversation: return a new conversation that begins with the same history."""
        people: list[str] = []
        other = await self._conversation(session_id).fork(people=self._people(people))
        self._join(other, None, people)  # the fork has the folder of the session
        self._offer_commands(other.id)
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
        await self._conversation(session_id).close()

    async def set_session_mode(self, mode_id: str, session_id: str, **_: Any) -> None:
        """Switch the permission mode."""
        if mode_id not in list(Mode):
            raise acp.RequestError.invalid_params({"mode_id": mode_id, "details": f"the modes are {', '.join(Mode)}"})
        self._conversation(session_id).permissions.switch(Mode(mode_id))

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Interrupt the turn."""
        self._conversation(session_id).interrupt()

    async def prompt(self, prompt: Sequence[Any], session_id: str, **_: Any) -> schema.PromptResponse:
        """Answer a message, then write the agent's changes back if the settings allow it. If a killed process left a
        turn open, that turn is finished first."""
        conversation = self._conversation(session_id)
        content: JSON = _content(prompt)
        try:
            if content in [f"/{name}" for name in _COMMANDS]:
                text = await (self._undo(conversation) if content == "/undo" else conversation.compact())
                await self._client.session_update(session_id, acp.update_agent_message_text(text))
                return schema.PromptResponse(stop_reason="end_turn")
            if isinstance(content, str):
                content = self._message(session_id, content)
            if conversation.unfinished:
                await self._play(conversation, conversation.resume())
            ended = await self._play(conversation, conversation.send(content))
            await self._write_back(conversation)
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

    def _offer_commands(self, session_id: str) -> None:
        about = {f"/{name}": text for name, text in _COMMANDS.items()}
        for name, path in self._project(session_id).commands().items():
            about.setdefault(name, command_description(path))
        commands = [schema.AvailableCommand(name=name[1:], description=text) for name, text in about.items()]
        update = schema.AvailableCommandsUpdate(session_update="available_commands_update", available_commands=commands)
        self._update_later(session_id, update)

    async def _undo(self, conversation: Conversation) -> str:
        undone = await conversation.undo()
        return "There is nothing to undo." if undone is None else "The last message was undone."

    async def _play(self, conversation: Conversation, events: AsyncGenerator[Event, None]) -> TurnEnded:
        ended = None
        async for event in events:
            if isinstance(event, TurnEnded):
                ended = event
            elif not isinstance(event, Notice) and (update := self._update(event)) is not None:
                await self._client.session_update(conversation.id, update)
                if isinstance(event, ToolEnded) and (plan := _plan(event)) is not None:
                    await self._client.session_update(conversation.id, plan)
        assert ended is not None
        return ended

    def _update(self, event: Event) -> Any:
        """Convert the event to an update of the protocol, or to None if the protocol has no such update."""
        if isinstance(event, TextDelta):
            return acp.update_agent_message_text(event.text)
        if isinstance(event, ReasoningDelta):
            return acp.update_agent_thought_text(event.text)
        if isinstance(event, ToolBegun):
            self._calls += 1
            self._call_ids[event.call_id] = f"{self._calls}-{event.call_id}"  # a model may reuse its ids
            return acp.start_tool_call(
                self._call_ids[event.call_id],
                f"{event.name}: {event.preview}",
                kind=_KINDS.get(event.name, "other"),  # type: ignore[arg-type]
                status="in_progress",
                raw_input=_decoded(event.arguments),
            )
        if isinstance(event, ToolOutput):
            content = [acp.tool_content(acp.text_block(event.text))]
            return acp.update_tool_call(self._call_ids[event.call_id], status="in_progress", content=content)
        if isinstance(event, ToolEnded):
            reply = _decoded(event.text)
            shown = str(reply.get("output") or event.text) if isinstance(reply, dict) else event.text
            return acp.update_tool_call(
                self._call_ids.pop(event.call_id, event.call_id),
                status="failed" if event.error else "completed",
                content=[acp.tool_content(acp.text_block(shown))],
                raw_output=reply,
            )
        return None

    async def _replay(self, session_id: str, message: Message) -> None:
        role, text = message.get("role"), message_text(message.get("content"))
        if role == "user":
            await self._client.session_update(session_id, acp.update_user_message_text(text))
            return
        if role == "assistant" and text:
            await self._client.session_update(session_id, acp.update_agent_message_text(text))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            begun = ToolBegun(call_id=call["id"], name=function["name"], arguments=function["arguments"], preview="")
            await self._client.session_update(session_id, self._update(begun))
        if role == "tool":
            ended = ToolEnded(call_id=str(message.get("tool_call_id")), name="", text=text)
            await self._client.session_update(session_id, self._update(ended))

    async def _write_back(self, conversation: Conversation) -> None:
        folder, slot = conversation.slots.folder, conversation.seat.slot
        mode = self._options.config.write
        if folder is None or slot is None or mode == "no":
            return
        changes = await folder.changes(slot)
        if not changes:
            return
        offered = [change for change in changes if not change.problem]
        if mode == "ask" and offered:
            content: list[Any] = [
                acp.tool_diff_content(
                    str(folder.root / change.path),
                    (change.after or b"").decode(errors="replace"),
                    None if change.before is None else change.before.decode(errors="replace"),
                )
                for change in offered
            ]
            self._calls += 1
            call = schema.ToolCallUpdate(
                tool_call_id=f"{self._calls}-write", title=f"Write {plural(len(offered), 'file')} to {folder.root}",
                kind="edit", status="pending", content=content,
            )  # fmt: skip
            options = [
                schema.PermissionOption(option_id="yes", name="Write", kind="allow_once"),
                schema.PermissionOption(option_id="no", name="Not now", kind="reject_once"),
            ]
            if await self._ask(conversation.id, call, options) != "yes":
                return
        for change in folder.apply(changes):
            self._tell(conversation.id, f"{change.path} was not written back: {change.problem}")

    async def _ask(
        self, session_id: str, call: schema.ToolCallUpdate, options: list[schema.PermissionOption]
    ) -> str | None:
        reply = await self._client.request_permission(session_id=session_id, tool_call=call, options=options)
        outcome = reply.outcome
        return outcome.option_id if isinstance(outcome, schema.AllowedOutcome) else None

    def _people(self, name: list[str]) -> People:
        """Return callbacks that ask and notify the person through the editor. The caller adds the session's id to
        `name` once it is known."""

        async def approve(request: ApprovalRequest) -> ApprovalAnswer:
            self._calls += 1
            text = escaped(request.command)
            title = f"{escaped(request.question)}: {text}" if request.tool else f"{text} ({', '.join(request.dangers)})"
            call = schema.ToolCallUpdate(
                tool_call_id=f"{self._calls}-approval", kind="other" if request.tool else "execute", status="pending",
                title=title,
                raw_input={"command": request.command} if request.arguments is None else dict(request.arguments),
                content=[acp.tool_content(acp.text_block(quoted(request.command)))],
            )  # fmt: skip
            options = [
                schema.PermissionOption(option_id=key, name=label, kind=kind)  # type: ignore[arg-type]
                for key, (_, label, kind) in _ANSWERS.items()
            ]
            answer = await self._ask(name[0], call, options)
            return ApprovalAnswer.DENY if answer is None else _ANSWERS.get(answer, _ANSWERS["no"])[0]

        return People(approve=approve, notice=lambda notice: self._tell(name[0], notice.text))

    def _tell(self, session_id: str, text: str) -> None:
        """Show the person a notice as a thought of the agent, because the protocol has no notices."""
        self._update_later(session_id, acp.update_agent_thought_text(f"[{text}]\n"))

    def _update_later(self, session_id: str, update: Any) -> None:
        """Send an update without waiting for it."""
        task = asyncio.ensure_future(self._client.session_update(session_id, update))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    def _message(self, session_id: str, text: str) -> str:
        """Return the message of a command of the person or the project, and any other text as it is."""
        word, _, rest = text.partition(" ")
        path = self._project(session_id).commands().get(word)
        return text if path is None else command_message(path, rest.strip())

    def _project(self, session_id: str) -> Project:
        return project(self._conversation(session_id).slots.folder)

    def _folder(self, cwd: str) -> WorkFolder | None:
        if self._options.config.workdir is not None:
            cwd = self._options.config.workdir
        try:
            return WorkFolder(Path(cwd))
        except ConfigError as error:
            raise acp.RequestError.invalid_params({"cwd": cwd, "details": str(error)}) from None

    def _opened(self, session_id: str, cwd: str) -> Conversation:
        known = self._service.conversations.get(session_id)
        if isinstance(known, Conversation):
            return known
        people: list[str] = []
        try:
            conversation = Conversation.open(self._service, session_id, self._people(people))
        except ConfigError as error:
            raise acp.RequestError.invalid_params({"session_id": session_id, "details": str(error)}) from None
        self._join(conversation, self._folder(cwd), people)
        return conversation

    def _join(self, conversation: Conversation, folder: WorkFolder | None, people: list[str]) -> None:
        people.append(conversation.id)
        if folder is not None:
            conversation.slots.share(folder)

    def _conversation(self, session_id: str) -> Conversation:
        found = self._service.conversations.get(session_id)
        if not isinstance(found, Conversation):
            raise acp.RequestError.invalid_params({"session_id": session_id, "details": "no open session has this id"})
        return found


def _modes(conversation: Conversation) -> schema.SessionModeState:
    modes = [schema.SessionMode(id=mode.value, name=mode.value, description=about) for mode, about in ABOUT.items()]
    return schema.SessionModeState(current_mode_id=conversation.permissions.mode.value, available_modes=modes)


def _plan(event: ToolEnded) -> Any:
    """Return the plan of a call of the tool `todo` as an update, or None."""
    reply = _decoded(event.text) if event.name == "todo" and not event.error else None
    steps = reply.get("todos") if isinstance(reply, dict) else None
    if not isinstance(steps, list):
        return None
    states: dict[str, Any] = {"in_progress": "in_progress", "completed": "completed", "cancelled": "completed"}
    entries = [
        acp.plan_entry(str(step.get("content")), status=states.get(str(step.get("status")), "pending"))
        for step in steps
        if isinstance(step, dict)
    ]
    return acp.update_plan(entries)


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


def _decoded(text: str) -> JSON:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
