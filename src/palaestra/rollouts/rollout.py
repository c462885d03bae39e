"""One rollout while it lives: its task, its session with the engine, its tools, its slot.

The slot is leased when something first needs it and given back exactly once, whatever happens. Environments' hooks
get the rollout by the name `rollout`; what is left of it afterwards is a `Trajectory`. One that was cut off in another
process has a `recall`, which answers for the model as far as its answers are known.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from palaestra.agent.loop import HermesAgentLoop
from palaestra.agent.result import AgentResult, Turn
from palaestra.agent.subagents import Agent, Subagents
from palaestra.agent.wall_clock import WallClock
from palaestra.core.clock import uncharged
from palaestra.core.seeded_random import Seeded
from palaestra.core.types import JSON, Message, Task
from palaestra.inference.engine import ChatServer
from palaestra.inference.ledger import Ledger, SampledTurn
from palaestra.rollouts.admission import AdmittedSlots
from palaestra.rollouts.branches import BranchChat, Branches, BranchReply
from palaestra.rollouts.environment import AgentSettings, Kit
from palaestra.rollouts.freezing import FreezingServer
from palaestra.rollouts.limits import CutShort, Stops
from palaestra.rollouts.observe.tracing.spans import NO_TRACING, Tracing
from palaestra.rollouts.recorded_tools.recorded_session import RolloutWorld
from palaestra.rollouts.resume.recorded_chat import Anew, Recall
from palaestra.rollouts.watchdog import Stages, Tell
from palaestra.sandbox.slot import Rung, Slot, SlotSpec, Snapshot, View
from palaestra.tools.memory.notes import Notes
from palaestra.tools.memory.past_conversations import Sessions
from palaestra.tools.runtime.bound_tools import SlotTools
from palaestra.tools.runtime.delegation import Delegation
from palaestra.tools.runtime.inner_calls import InnerCall, Inside
from palaestra.tools.tool import ToolReply


@dataclass(slots=True)
class TakenTurn:
    """One turn as it is written down, with what was sampled in it. `known`: the journal has it already; `recalled`: it
    has the reply, and not the turn."""

    turn: Turn
    messages: list[Message]
    sampled: list[SampledTurn]
    known: bool = False
    recalled: bool = False


TurnRecorder = Callable[["Rollout", TakenTurn], None]
ReplyRecorder = Callable[["Rollout", BranchReply], None]

RolloutTool = Callable[[str, Mapping[str, JSON], str | None], Awaitable[str]]
"""Runs one call, given the tool's name, its arguments and the rollout's id; gives the text that the model reads."""


class Rollout:
    """A rollout in flight. `meta` is whatever the environment wants to carry from set-up to scoring.

    `world` answers for the tools that touch the world; an environment that binds tools itself passes it on.
    """

    def __init__(
        self,
        *,
        rollout_id: str,
        group_id: str,
        index: int,
        task: Task,
        seeded: Seeded,
        server: ChatServer,
        kit: Kit,
        slots: AdmittedSlots,
        spec: SlotSpec,
        snapshot: Snapshot | None,
        settings: AgentSettings,
        on_turn: TurnRecorder | None = None,
        on_reply: ReplyRecorder | None = None,
        on_stage: Tell | None = None,
        idle_limits: Mapping[str, float] | None = None,
        world: RolloutWorld | None = None,
        tracing: Tracing = NO_TRACING,
        recall: Recall | None = None,
        stops: Stops | None = None,
    ) -> None:
        self.recall = recall
        self._wall: WallClock | None = None
        self.rollout_id = rollout_id
        self.group_id = group_id
        self.index = index
        self.task = task
        self.server = server
        self.kit = kit
        self.slots = slots
        self.spec = spec
        self.snapshot = snapshot
        self.settings = settings
        self.world = world
        self.meta: dict[str, JSON] = {}
        self.result: AgentResult | None = None
        self.at = Stages(rollout_id, on_stage, idle_limits, tracing)
        self.tracing = tracing
        self.rung: Rung | None = None
        self.inner_calls: list[InnerCall] = []
        self._subagents = itertools.count(1)
        self._seeded = seeded
        self._on_turn = on_turn
        self._on_reply = on_reply
        self._branches = Branches(recall, self._newly_sampled, self._replied)
        self._stops = stops or Stops()
        self._begun = False
        self._calls = 0
        self._asked: ChatServer = self.server
        self._kept_turns = self._noted_turns = 0
        self._slot: Slot | None = None
        self._leasing = asyncio.Lock()
        self._tools: SlotTools | None = None
        self._others: list[SlotTools] = []

    @property
    def server(self) -> ChatServer:
        """Whom the agent asks; where the rollout was cut off, with what it had said already."""
        return self._server

    @server.setter
    def server(self, server: ChatServer) -> None:
        self._server = self._asked = server if self.recall is None else self.recall.over(server)

    @property
    def rng(self) -> random.Random:
        """The rollout's own generator, which the run's seed decides."""
        return self._seeded()

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self.result.messages if self.result is not None else []

    @property
    def final_response(self) -> str:
        """The agent's last words."""
        return self.result.final_response if self.result is not None else ""

    @property
    def stages(self) -> Mapping[str, float]:
        """Seconds spent at each stage so far."""
        return self.at.seconds

    def stage(self, name: str, shown: str = "") -> AbstractContextManager[None]:
        """Time a part of the rollout and tell the display about it."""
        return self.at.stage(name, shown)

    async def sandbox(self) -> Slot:
        """The rollout's slot, leased at the first call: a fork of the group's prepared workspace."""
        async with self._leasing:
            if self._slot is None:
                self._slot = await self.lease(self.rollout_id, self.spec, self.snapshot)
                self.rung = self._slot.rung
            return self._slot

    async def lease(self, name: str, spec: SlotSpec, snapshot: Snapshot | None) -> Slot:
        """A slot for this rollout, its own or the one that grades it. Waiting and forking are timed apart, and neither
        is the agent's time."""
        with uncharged():
            with self.stage("admit"):
                await self.slots.admit()
            try:
                self.check_begin()
            except CutShort:
                self.slots.give_up()
                raise
            with self.stage("acquire"):
                return await self.slots.lease(name, spec=spec, snapshot=snapshot)

    @property
    def tools(self) -> SlotTools:
        """The group's tools, bound to this rollout's slot."""
        if self._tools is None:
            self._tools = SlotTools(
                self.kit.registry,
                self.sandbox,
                task_id=self.rollout_id,
                user_task=_first_user_text(self.task.messages()),
                timeout_s=self.settings.tool_timeout_s,
                world=self.world,
            )
            self._tools.share(Notes(self.settings.memory))
            self._tools.share(Sessions(self.settings.sessions))
        return self._tools

    def opening(self) -> list[Message]:
        """The messages the agent starts from: the system prompt, if there is one, and the task's."""
        messages = self.task.messages()
        if self.settings.system_prompt:
            messages.insert(0, {"role": "system", "content": self.settings.system_prompt})
        return messages

    def go_on_from(self, snapshot: Snapshot) -> None:
        """Let the next slot be a fork of a snapshot; tools remember nothing of the one before."""
        if self._tools is not None:
            self.closes(self._tools)
        self.snapshot, self._tools = snapshot, None

    async def run_agent(
        self,
        messages: list[Message] | None = None,
        *,
        server: ChatServer | None = None,
        tool_handler: RolloutTool | None = None,
    ) -> AgentResult:
        """Run the one agent loop over this rollout's conversation. `result` is kept even when the call is cancelled."""
        loop = self.loop(server=server, tool_handler=tool_handler)
        opening = self.opening() if messages is None else messages
        self.record(None, opening)
        try:
            return await loop.run(opening)
        finally:
            self.ended(loop.result)

    async def go_on(
        self, message: Message, *, server: ChatServer | None = None, tool_handler: RolloutTool | None = None
    ) -> AgentResult:
        """Say something more to an agent that has ended, and let it go on; the limits are those of a new rollout."""
        assert self.result is not None
        messages = self.result.messages
        messages.append(message)
        self.record(None, [message])
        loop = self.loop(server=server, tool_handler=tool_handler)
        try:
            return await loop.run(messages, after=self.result)
        finally:
            self.ended(loop.result)

    def ended(self, result: AgentResult) -> None:
        """Take what a conversation of the agent has come to, however it ended."""
        self.result = result
        self._note_inside(result.turns_used)
        for tools in self._every_tools():
            tools.share(Delegation())  # it holds the loop, which holds the tools

    def loop(
        self,
        *,
        server: ChatServer | None = None,
        tool_handler: RolloutTool | None = None,
    ) -> HermesAgentLoop:
        """The agent loop, set up for this rollout."""
        settings, registry = self.settings, self.kit.registry
        self._asked = self.server
        if server is not None:
            self._asked = server if self.recall is None else self.recall.over(server)
        loop = HermesAgentLoop(
            self.served(self._asked),
            self.kit.definitions,
            set(registry.list_tools()),
            max_turns=settings.max_turns,
            task_id=self.rollout_id,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            extra_body=settings.extra_body,
            tool_handler=self._told(tool_handler or self.tools.handle),
            max_context_tokens=settings.max_context_tokens,
            parallel_safe=self.tools.parallel_safe,
            on_turn=self.record,
            budget=settings.budget,
            beyond=settings.beyond,
        )
        bound = next((tools for tools in self._others if tools.handle == tool_handler), self.tools)
        self.attend(loop, tools=bound)
        return loop

    def attend(self, loop: HermesAgentLoop, agent: Agent | None = None, *, tools: SlotTools | None = None) -> None:
        """Make this loop's clock the rollout's, and let its agent give work away, where it has the tool for it; `agent`
        where it is not the loop."""
        self._wall = loop.wall
        given = self.tools if tools is None else tools
        Subagents(loop, given, self.at.moved, self.served, numbers=self._subagents, agent=agent).offer()

    def served(self, server: ChatServer, branch: int = 0) -> ChatServer:
        """The server as the agent asks it, or the sub-agent of this number: traced, and its replies taken note of."""
        if not isinstance(server, BranchChat):
            if self.settings.freeze:
                server = FreezingServer(server, lambda: None if self._calls else self._slot)
            server = self.tracing.served(server, self.rollout_id)
        return self._branches.chat(server, branch)

    def _replied(self, said: BranchReply) -> None:
        self.at.moved()
        if self._on_reply is not None:
            self._on_reply(self, said)

    def _told(self, handler: RolloutTool) -> RolloutTool:
        """The handler of tool calls, with the stage told while a call is under way."""

        async def call(name: str, arguments: Mapping[str, JSON], task_id: str | None) -> str:
            expected = self.recall.expected(name, arguments) if self.recall is not None else None
            with self.calling(name, arguments) as answered:
                text = await handler(name, arguments, task_id)
                answered(text)
            return text if self.recall is None or expected is None else self.recall.observed(expected, text)

        return call

    @contextmanager
    def calling(self, name: str, arguments: Mapping[str, JSON]) -> Iterator[Callable[[ToolReply], None]]:
        """Time one tool call and tell the display; the block says what the tool answered."""
        self._calls += 1
        try:
            with self.stage("tool"), self.tracing.tool(name, arguments) as answered:
                yield answered
        finally:
            self._calls -= 1

    def record(self, turn: Turn | None, messages: list[Message]) -> Awaitable[None] | None:
        """Note the messages that were added, in the journal. What it returns must be awaited, where that is not None.

        Raises `CannotGoOn` where something else is recorded in their place.
        """
        self.at.moved()
        known = self._branches.turned()
        taken = TakenTurn(turn or Turn(0, None, 0, 0, 0.0, 0.0), messages, self._new_tokens(), recalled=known)
        self._note_inside(taken.turn.number)
        if self.recall is not None and self.recall.took(turn, messages, taken.sampled):
            taken.known = True
            if turn is not None:
                return self._checked(self.recall, taken)
        self._tell(taken)
        return None

    async def _checked(self, recall: Recall, taken: TakenTurn) -> None:
        """A recorded turn counts only where nothing of it goes on beside the agent: that could not be as it was."""
        for process in await self._slot.processes() if self._slot is not None else ():
            if (await process.status()).running:
                raise recall.fail(Anew.BACKGROUND)
        if recall.caught_up and self._wall is not None:
            self._wall.charge(recall.seconds)
        self._tell(taken)

    def check_begin(self) -> None:
        """Raises `CutShort` where the rollout has said nothing yet, and its run begins nothing any more."""
        if not self._begun:
            self._stops.check(begun=False)

    def _tell(self, taken: TakenTurn) -> None:
        """Raises `CutShort` after a turn that another would follow, where that may not be."""
        self._begun = self._begun or taken.turn.number > 0
        if self._on_turn is not None:
            self._on_turn(self, taken)
        if taken.turn.number and taken.messages and taken.messages[-1].get("role") != "assistant":
            self._stops.check(begun=True)

    def _new_tokens(self) -> list[SampledTurn]:
        """What was sampled since this was last asked, where the server keeps a ledger."""
        ledger = getattr(self._asked, "ledger", None)
        if not isinstance(ledger, Ledger):
            return []
        before, self._kept_turns = self._kept_turns, len(ledger.turns)
        self._noted_turns = self._kept_turns
        return ledger.sampled_since(before)

    def _newly_sampled(self) -> list[SampledTurn]:
        """What was sampled since a turn or a reply was last taken note of."""
        ledger = getattr(self._asked, "ledger", None)
        if not isinstance(ledger, Ledger):
            return []
        before, self._noted_turns = self._noted_turns, len(ledger.turns)
        return ledger.sampled_since(before)

    def _note_inside(self, turn: int) -> None:
        """Take what programs did in the turn into the record."""
        for tools in self._every_tools():
            self.inner_calls += tools.state(Inside).taken(turn)

    def _every_tools(self) -> list[SlotTools]:
        """The rollout's tools, and those that its environment has bound otherwise."""
        return [*self._others, *(() if self._tools is None else (self._tools,))]

    @property
    def ledger(self) -> Ledger | None:
        """The exact tokens so far: those of the server that the agent really used, which may be a hook's own.

        None where the server gives no tokens, or nothing was sampled.
        """
        state = (self.result.managed_state if self.result is not None else None) or {}
        ledger = state.get("ledger", getattr(self.server, "ledger", None))
        return ledger if isinstance(ledger, Ledger) and ledger.turns else None

    async def seal(self, view: View | None = None) -> Snapshot | None:
        """End the agent's slot; its change becomes a layer. None where no slot was ever leased."""
        await self._end_tools()
        slot, self._slot = self._slot, None
        if slot is None:
            return None
        with self.stage("seal"):
            return await self.slots.seal(slot, view)

    async def aclose(self) -> None:
        """End what the tools hold and give the slot back, if one is held."""
        slot, self._slot = self._slot, None
        try:
            await self._end_tools()
        finally:
            if slot is not None:
                await self.slots.release(slot)

    def let_go(self) -> None:
        """It has ended for good: what holds it lets go of it. Only its record is asked for after that."""
        self._branches.let_go()

    def closes(self, tools: SlotTools) -> None:
        """Close these too when the agent has ended: tools that an environment has bound otherwise."""
        self._others.append(tools)

    async def _end_tools(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            self._others.append(tools)
        while self._others:
            await self._others.pop().aclose()


def _first_user_text(messages: list[Message]) -> str:
    for message in messages:
        if message.get("role") == "user":
            return str(message.get("content") or "")
    return ""
