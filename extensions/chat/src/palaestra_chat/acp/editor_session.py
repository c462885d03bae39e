"""`EditorSession`: one conversation as an editor shows it, over the Agent Client Protocol."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from typing import Any

from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra_chat.acp.editor_servers import editor_servers, opened_servers
from palaestra_chat.config import conversation_project
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.project import command_description, command_message
from palaestra_chat.turn_events import (
    Event,
    Notice,
    ReasoningDelta,
    ReplyRestarted,
    TextDelta,
    ToolBegun,
    ToolEnded,
    ToolOutput,
    TurnEnded,
)
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.printable import escaped, quoted
from palaestra_slots.core.types import JSON, Message
from palaestra_toolsets.tools.session_search import message_text

try:
    import acp
    from acp import schema
except ImportError:
    raise ConfigError(f"palaestra acp needs agent-client-protocol: {install_command('acp')}") from None

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
_ANSWERS = {
    "once": (ApprovalAnswer.ONCE, "Allow once", "allow_once"),
    "session": (ApprovalAnswer.SESSION, "Allow in this session", "allow_always"),
    "always": (ApprovalAnswer.ALWAYS, "Always allow", "allow_always"),
    "no": (ApprovalAnswer.DENY, "Do not run it", "reject_once"),
}
COMMANDS = {
    "compact": "Replace the history with a summary",
    "undo": "Remove the last message and its answer, and restore the files of the time before it",
}
"""The commands that the editor offers, which are sent as prompts such as `/undo`."""


class EditorSession:
    """Shows a conversation to the editor `client`, and asks the person there. `people` are the callbacks that the
    conversation needs when it is made; `follow` then says which one it is. `numbers` makes the ids of calls unique."""

    def __init__(self, client: acp.Client, numbers: Iterator[int]) -> None:
        self._client, self._numbers = client, numbers
        self._conversation: Conversation | None = None
        self._call_ids: dict[str, str] = {}
        self._servers: MCPServers | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self.people = People(approve=self._approve, notice=lambda notice: self._tell(notice.text))

    def follow(self, conversation: Conversation) -> None:
        """Show this conversation from now on."""
        self._conversation = conversation

    async def start_servers(self, named: Sequence[object], taken: Collection[str]) -> None:
        """Start the MCP servers that the editor names, and give the conversation their tools. Raises `ConfigError` for
        a server that cannot be used."""
        servers = editor_servers(named, taken, self._tell)
        if servers:
            self._servers = await opened_servers(servers, self._tell)
            self.conversation.tools = self._servers.tools()

    async def close_servers(self) -> None:
        """End the editor's MCP servers. Idempotent."""
        if self._servers is not None:
            await self._servers.aclose()

    @property
    def conversation(self) -> Conversation:
        """The conversation that is shown."""
        assert self._conversation is not None
        return self._conversation

    @property
    def _id(self) -> str:
        return self.conversation.id

    def offer_commands(self) -> None:
        """Show the editor which commands there are: ours, and those of the person and the project."""
        about = {f"/{name}": text for name, text in COMMANDS.items()}
        for name, path in conversation_project(self.conversation.slots.folder).commands().items():
            about.setdefault(name, command_description(path))
        commands = [schema.AvailableCommand(name=name[1:], description=text) for name, text in about.items()]
        update = schema.AvailableCommandsUpdate(session_update="available_commands_update", available_commands=commands)
        self._send_later(update)

    def message(self, text: str) -> str:
        """Return the message of a command of the person or the project, and any other text as it is."""
        word, _, rest = text.partition(" ")
        path = conversation_project(self.conversation.slots.folder).commands().get(word)
        return text if path is None else command_message(path, rest.strip())

    def show(self, update: Any) -> None:
        """Send the editor this update of the session."""
        self._send_later(update)

    async def answer(self, text: str) -> None:
        """Show a text as the agent's answer."""
        await self._send_update(acp.update_agent_message_text(text))

    async def explain(self, text: str) -> None:
        """Show why the turn ended, as a notice, before the protocol's answer."""
        await self._send_update(_notice(text))

    async def play(self, events: AsyncGenerator[Event, None]) -> TurnEnded:
        """Show a turn as it happens, and return its end."""
        ended = None
        async for event in events:
            if isinstance(event, TurnEnded):
                ended = event
            elif not isinstance(event, Notice) and (update := self._protocol_update(event)) is not None:
                await self._send_update(update)
                if isinstance(event, ToolEnded) and (plan := _plan_update(event)) is not None:
                    await self._send_update(plan)
        assert ended is not None
        return ended

    async def replay(self) -> None:
        """Show the history of the conversation."""
        for message in self.conversation.history.messages:
            await self._replay(message)

    async def write_back(self, mode: str) -> None:
        """Write the agent's changes back to the shared folder. `mode` is the setting `write`: if it is `ask`, the
        person decides first."""
        folder, slot = self.conversation.slots.folder, self.conversation.seat.slot
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
            call = schema.ToolCallUpdate(
                tool_call_id=f"{next(self._numbers)}-write",
                title=f"Write {plural(len(offered), 'file')} to {folder.root}",
                kind="edit", status="pending", content=content,
            )  # fmt: skip
            options = [
                schema.PermissionOption(option_id="yes", name="Write", kind="allow_once"),
                schema.PermissionOption(option_id="no", name="Not now", kind="reject_once"),
            ]
            if await self._request_permission(call, options) != "yes":
                return
        for change in folder.apply(changes):
            self._tell(f"{change.path} was not written back: {change.problem}")

    async def _replay(self, message: Message) -> None:
        role, text = message.get("role"), message_text(message.get("content"))
        if role == "user":
            await self._send_update(acp.update_user_message_text(text))
            return
        if role == "assistant" and text:
            await self._send_update(acp.update_agent_message_text(text))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            begun = ToolBegun(call_id=call["id"], name=function["name"], arguments=function["arguments"], preview="")
            await self._send_update(self._protocol_update(begun))
        if role == "tool":
            ended = ToolEnded(call_id=str(message.get("tool_call_id")), name="", text=text)
            await self._send_update(self._protocol_update(ended))

    def _protocol_update(self, event: Event) -> Any:
        """Convert the event to an update of the protocol, or to None if the protocol has no such update."""
        if isinstance(event, TextDelta):
            return acp.update_agent_message_text(event.text)
        if isinstance(event, ReplyRestarted):  # the protocol cannot take text back
            return acp.update_agent_message_text(f"\n\n{event.text}\n\n")
        if isinstance(event, ReasoningDelta):
            return acp.update_agent_thought_text(event.text)
        if isinstance(event, ToolBegun):
            self._call_ids[event.call_id] = f"{next(self._numbers)}-{event.call_id}"  # a model may reuse its ids
            return acp.start_tool_call(
                self._call_ids[event.call_id],
                f"{event.name}: {event.preview}",
                kind=_KINDS.get(event.name, "other"),  # type: ignore[arg-type]
                status="in_progress",
                raw_input=_json_or_text(event.arguments),
            )
        if isinstance(event, ToolOutput):
            content = [acp.tool_content(acp.text_block(event.text))]
            return acp.update_tool_call(self._call_ids[event.call_id], status="in_progress", content=content)
        if isinstance(event, ToolEnded):
            reply = _json_or_text(event.text)
            shown = str(reply.get("output") or event.text) if isinstance(reply, dict) else event.text
            return acp.update_tool_call(
                self._call_ids.pop(event.call_id, event.call_id),
                status="failed" if event.error else "completed",
                content=[acp.tool_content(acp.text_block(shown))],
                raw_output=reply,
            )
        return None

    async def _request_permission(
        self, call: schema.ToolCallUpdate, options: list[schema.PermissionOption]
    ) -> str | None:
        reply = await self._client.request_permission(session_id=self._id, tool_call=call, options=options)
        outcome = reply.outcome
        return outcome.option_id if isinstance(outcome, schema.AllowedOutcome) else None

    async def _approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        text = escaped(request.command)
        title = f"{escaped(request.question)}: {text}" if request.tool else f"{text} ({', '.join(request.dangers)})"
        call = schema.ToolCallUpdate(
            tool_call_id=f"{next(self._numbers)}-approval",
            kind="other" if request.tool else "execute", status="pending", title=title,
            raw_input={"command": request.command} if request.arguments is None else dict(request.arguments),
            content=[acp.tool_content(acp.text_block(quoted(request.command)))],
        )  # fmt: skip
        options = [
            schema.PermissionOption(option_id=key, name=label, kind=kind)  # type: ignore[arg-type]
            for key, (_, label, kind) in _ANSWERS.items()
        ]
        answer = await self._request_permission(call, options)
        return ApprovalAnswer.DENY if answer is None else _ANSWERS.get(answer, _ANSWERS["no"])[0]

    def _tell(self, text: str) -> None:
        self._send_later(_notice(text), text)

    def _send_later(self, update: Any, text: str = "") -> None:
        """Send an update without waiting for it. If the editor is gone, its log gets the text."""

        async def send() -> None:
            try:
                await self._send_update(update)
            except (ConnectionError, asyncio.CancelledError):
                if text:
                    logger.warning("%s", text)

        task = asyncio.ensure_future(send())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_update(self, update: Any) -> None:
        await self._client.session_update(self._id, update)


def _plan_update(event: ToolEnded) -> Any:
    """Return the plan of a call of the tool `todo` as an update, or None."""
    reply = _json_or_text(event.text) if event.name == "todo" and not event.error else None
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


def _json_or_text(text: str) -> JSON:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _notice(text: str) -> Any:
    """Return a notice for the person as a thought of the agent, because the protocol has no notices."""
    return acp.update_agent_thought_text(f"[{text}]\n")
