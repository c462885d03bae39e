"""Plays rollouts with a third-party agent program, which runs in the rollout's slot and calls the run's model.

The slot reaches the recording endpoint over a forwarded port, so it needs no network. The rollout's limits apply, and
reaching one of them ends the program. The workspace is sealed and graded as for the agent loop.

The environment's own tools and those of MCP servers are offered to the program as one MCP server. Their calls run in
the rollout's registry, are limited like those of the agent loop, and are recorded. The built-in tools are not offered,
since a program has its own.

Failure attribution: a failure of the model server (`engine`) or a lost slot (`sandbox`) ends the rollout without a
score. If the model server fails on a request (HTTP 500, no answer in time) but answers a plain request, the failed
request is the cause. The program then gets the error and continues. A tool's infrastructure failure ends the rollout
with the tool's blame, as in the agent loop. A program that ends by itself without an answer from the model never acted,
so it is not scored either (`tool`). Every other end of the program, with any exit status, is the agent's responsibility
and is scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import msgspec

from palaestra.agent.budget import Used, WallClock
from palaestra.agent.middleware import MiddlewareServer
from palaestra.agent.programs import HOME, PROMPT_FILE, AgentAssignment, AgentProgram, HostedAgent
from palaestra.agent.replies import RequestedCall
from palaestra.agent.result import AgentResult, Subagent, ToolError, Turn
from palaestra.agent.tool_calls import MAX_PARALLEL_CALLS, ToolCalls
from palaestra.rollouts.limits import CutShort
from palaestra.rollouts.resume.recorded_turns import Mismatch
from palaestra.rollouts.rollout import Rollout
from palaestra.tools.inner_calls import InnerCalls
from palaestra.tools.mcp.mcp_endpoint import McpTools
from palaestra.tools.registry.build import BUILTIN_NAMES
from palaestra.tools.tool import ToolOutcome
from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.errors import (
    ConfigError,
    EngineUnavailable,
    InfraError,
    PalaestraError,
    SandboxError,
    SlotEnded,
    TaskError,
    ToolUnavailable,
)
from palaestra_slots.core.io.durable_files import private
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import Blame, Message, Outcome, Usage
from palaestra_slots.sandbox.host_tools import Capture
from palaestra_slots.sandbox.port_forward import forwarded_port
from palaestra_slots.sandbox.slot import Mount, Process, Slot
from palaestra_tokens.chat_server import Engine, SessionContext
from palaestra_tokens.engines.openai import PROBE
from palaestra_tokens.recording import CallLimits, Conversations, RecordingEndpoint, RolloutAddress
from palaestra_tokens.recording.endpoint import ToolService
from palaestra_tokens.recording.recorded_conversations import AnsweredCall, RecordedConversation
from palaestra_tokens.recording.request import Refusal, invalid

logger = logging.getLogger(__name__)

LOG_BYTES = 4 << 20
"""The maximum number of bytes kept of a program's output: its beginning and its end."""

END_S = 5.0
"""How long a program may take to end after SIGTERM."""

CHECK_S = 60.0
"""How long the model may take to answer a plain request after a failure."""

CALLS_OF_A_TURN = 64
"""The maximum number of calls of the environment's tools per reply of the model, because each call is recorded."""

AUXILIARY_SCHEMA = "palaestra.auxiliary/1"


class ProgramAgent:
    """A program as the agent of a run. It is an async context manager that installs the program and opens the endpoint.
    `logs` is a folder for the programs' output."""

    def __init__(self, program: AgentProgram | HostedAgent, engine: Engine, logs: Path | None = None) -> None:
        self.program = program
        self.mounts: tuple[Mount, ...] = ()
        self._engine, self._logs = engine, logs
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.mounts = tuple(await self.program.install())
        self._endpoint = await self._stack.enter_async_context(RecordingEndpoint())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def name(self) -> str:
        return self.program.name

    async def play(self, rollout: Rollout, messages: list[Message]) -> AgentResult:
        """Let the program work on a task, and return the result. The rollout keeps the result even if this call is
        cancelled."""
        if rollout.log.recorded is not None:
            raise rollout.log.recorded.fail(Mismatch.CONVERSATION, f"agent {self.name} cannot repeat its turns")
        rollout.log.record(None, messages)
        play = _Play(self, rollout, messages)
        try:
            return await play.run()
        finally:
            rollout.ended(play.result())
            await asyncio.shield(self._write_logs(rollout.rollout_id, b"".join(play.log.parts()), play.auxiliary()))

    async def check_engine(self) -> None:
        """Send a plain request to the model, outside any rollout. Raises `EngineError`."""
        session = self._engine.session(SessionContext())
        try:
            async with asyncio.timeout(CHECK_S):
                await session.chat_completion(messages=[PROBE], max_tokens=16)
        except TimeoutError:
            raise EngineUnavailable(f"Model '{self._engine.name}' did not answer within {CHECK_S:g} s.") from None

    def open(
        self, conversations: Conversations, tools: ToolService | None
    ) -> contextlib.AbstractContextManager[RolloutAddress]:
        """Return a context manager that serves the conversations and the tools of a rollout."""
        return self._endpoint.open(conversations, tools)

    async def _write_logs(self, rollout_id: str, log: bytes, auxiliary: bytes) -> None:
        """Write the program's output, and its model calls that are not trained on, to files named after the rollout."""
        if self._logs is None:
            return
        folder, name = self._logs, rollout_id.replace("/", "-")

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for ending, data in (("log", log), ("auxiliary.json", auxiliary)):
                with open(folder / f"{name}.{ending}", "wb", opener=private) as file:
                    file.write(data)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            logger.warning("cannot keep the agent's log of %s: %s", rollout_id, error)


class _Play:
    """Runs one rollout's program, answers its calls, and ends it."""

    def __init__(self, agent: ProgramAgent, rollout: Rollout, messages: list[Message]) -> None:
        self.log = Capture(LOG_BYTES)
        self._agent, self._rollout, self._messages = agent, rollout, messages
        self._end: tuple[Outcome, str, Blame | None] = (Outcome.CANCELLED, "cancelled", None)
        self._cut: CutShort | None = None
        self._limit: tuple[Outcome, str] | None = None
        self._stop = asyncio.Event()
        self._wall = WallClock(SystemClock())
        self._calls = 0
        self._usage = Usage()
        self._tools = _OfferedTools(rollout, self._stop.set)
        settings = rollout.settings
        middleware = [make(rollout.rollout_id) for make in rollout.run_context.middleware.chat]
        self._conversations = Conversations(
            MiddlewareServer(rollout.server, middleware),
            sampling={"temperature": settings.temperature, **(settings.extra_body or {})},
            limits=CallLimits(max_tokens=settings.max_tokens),
            admit=self._admit,
            answered=self._answered,
            check_engine=agent.check_engine,
        )

    async def run(self) -> AgentResult:
        """Start the program, wait until it ends or reaches a limit, and return the result."""
        rollout, agent = self._rollout, self._agent
        slot = await rollout.sandbox()
        self._wall.start()
        with agent.open(self._conversations, self._tools.service()) as address:
            try:
                async with self._wall.limited(rollout.settings.budget.wall_s) as limit:
                    exit_code = await self._run_in(slot, address)
            except TimeoutError:
                if not limit.expired():
                    raise
                self._end = Outcome.BUDGET, f"budget of {rollout.settings.budget.wall_s:g} seconds used up", None
            # The program's own commands ended the sandbox, which is the work of the agent, and no infrastructure
            # failure.
            except SlotEnded:
                rollout.calls.end_slot()
                self._end = self._ending(None)
            except InfraError as error:
                self._end = Outcome.INFRA_ERROR, f"{type(error).__name__}: {error}", error.blame
                raise
            else:
                self._end = self._ending(exit_code)
        if self._cut is not None:
            raise self._cut
        if (failure := self._tools.failure or self._conversations.failure) is not None:
            raise failure
        return self.result()

    async def _run_in(self, slot: Slot, address: RolloutAddress) -> int | None:
        """Run the program in the slot. Returns its exit status, or None if it had to be ended."""
        host, _, port = address.url.split("/")[2].rpartition(":")
        async with forwarded_port(slot, host, int(port)) as slot_port:
            prompt, program = _prompt(self._messages), self._agent.program
            in_slot = _assignment(prompt, address.at(f"http://127.0.0.1:{slot_port}"))
            if isinstance(program, HostedAgent):
                try:
                    return await self._wait_for_end(self._hosted(program, slot, _assignment(prompt, address), in_slot))
                finally:
                    self._conversations.end()
            launch = program.launch(in_slot)
            await slot.make_dir(HOME)
            for path, text in {PROMPT_FILE: prompt, **launch.files}.items():
                await slot.write_text(path, text)
            process = await slot.spawn(launch.command, env=launch.env, stdin=False)
            try:
                return await self._wait_for_end(self._exit_code(process), self._log_output(process))
            finally:
                with contextlib.suppress(ProcessLookupError, SandboxError):
                    # A program that reached a limit is scored, so it gets time to write its files. One that ended by
                    # itself has left only processes behind.
                    await asyncio.shield(process.kill(END_S if self._stop.is_set() else 0.0))
                self._conversations.end()

    async def _exit_code(self, process: Process) -> int | None:
        return (await process.wait()).exit_code

    async def _log_output(self, process: Process) -> None:
        async for piece in process.output():
            self.log.add(piece.data)

    async def _hosted(
        self, agent: HostedAgent, slot: Slot, here: AgentAssignment, in_slot: AgentAssignment
    ) -> int | None:
        """Let an agent in this process work. Its errors are its own: they stand for an exit status other than 0."""
        try:
            await agent.work(slot, here, in_slot, self.log.add)
        except (InfraError, ConfigError):
            raise
        except Exception as error:
            self.log.add(f"{type(error).__name__}: {error}\n".encode(errors="replace"))
            logger.info("agent %s failed", agent.name, exc_info=True)
            return 1
        return 0

    async def _wait_for_end(
        self, work: Coroutine[None, None, int | None], output: Coroutine[None, None, None] | None = None
    ) -> int | None:
        """Wait until the program ends, a limit is reached, or a tool or the model server fails. Returns the exit status
        of a program that ended by itself, otherwise None. Processes that the program left running can make no more
        calls; after a limit, only calls already under way are still answered."""
        ended = asyncio.create_task(work)
        following = [] if output is None else [asyncio.create_task(output)]
        stops = [asyncio.create_task(event.wait()) for event in (self._stop, self._conversations.failed)]
        ends: list[asyncio.Task[Any]] = [ended, *following, *stops]
        try:
            await asyncio.wait([ended, *stops], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                return None
            self._conversations.end()
            await asyncio.gather(*following)
            return ended.result()
        finally:
            if not self._stop.is_set():
                self._conversations.end()
            for task in ends:
                task.cancel()
            # An agent of others in this process may not end when it is cancelled.
            await asyncio.wait([asyncio.gather(*ends, return_exceptions=True)], timeout=END_S)

    def _admit(self, replies: int) -> None:
        """Refuse a call once the rollout has reached a limit, and end the program. Also refuse a call for more replies
        than are left; it can be retried if only calls under way are the reason. Refused requests count as calls,
        because each is work for the run."""
        rollout, settings = self._rollout, self._rollout.settings
        # Refused requests count too, or a program that repeats one without end would never reach the limit.
        left = settings.max_turns - self._calls - self._conversations.refused
        if self._limit is None and left <= 0:
            self._limit = Outcome.MAX_TURNS, ""
        tokens = self._usage.prompt_tokens, self._usage.completion_tokens
        used = Used(self._calls, *tokens, self._tools.output_bytes, self._wall.elapsed_s)
        if self._limit is None and (reached := settings.budget.used_up(used)):
            self._limit = Outcome.BUDGET, reached
        try:
            rollout.run_context.limits.check(begun=True)
        except CutShort as error:
            self._cut = error
        if self._limit is not None or self._cut is not None:
            self._stop.set()
            raise Refusal(403, "This rollout has reached its limit; no further call is answered.", code="limit_reached")
        if replies > left:
            raise invalid("n", f"n is {replies}, but this rollout has only {left} replies left.")
        if replies and replies + self._conversations.replies_under_way > left:
            raise Refusal(429, f"This rollout has {left} replies left.", code="rate_limit_exceeded")

    def _answered(self, conversation: RecordedConversation, call: AnsweredCall) -> None:
        self._calls += 1
        self._tools.answered(conversation)
        self._usage.add(call.prompt_tokens, call.completion_tokens)
        self._rollout.log.record(_turn_of(self._calls, call), [conversation.messages[-1]])

    def _ending(self, exit_code: int | None) -> tuple[Outcome, str, Blame | None]:
        failed = self._conversations.failure is not None or self._tools.failure is not None
        never_answered = not self._calls and not failed and self._cut is None
        if self._limit is not None and not (never_answered and self._conversations.refused):
            return *self._limit, None
        if never_answered:
            told = without_middle(b"".join(self.log.parts()).decode(errors="replace").strip(), 1500)
            # 127 is the shell's status for a command that was not found. Source: POSIX, Shell Command Language, 2.8.2.
            missing = exit_code == 127 or "No such file" in told
            if self._conversations.refused:
                told = f"{told}\nRefused requests: {self._conversations.refused}. The last was refused with: "
                told += self._conversations.refusal
            hint = ". The sandbox has no files of this machine; add the program to the task's `files` or its image"
            raise ToolUnavailable(
                f"agent {self._agent.program.name} ended with exit status {exit_code} without an answer "
                f"from the model: {told or 'it printed nothing'}{hint if missing else ''}"
            )
        error = f"the agent's program ended with exit status {exit_code}" if exit_code else ""
        return Outcome.NATURAL, error, None

    def result(self) -> AgentResult:
        """Return the result of the rollout so far."""
        recorded = self._conversations.recorded()
        outcome, error, blame = self._end
        own = recorded.own
        result = _conversation_result(own, self._messages)
        result.outcome, result.error, result.blame = outcome, error, blame
        result.finished_naturally = outcome is Outcome.NATURAL
        result.usage = self._usage
        result.managed_state = None if recorded.ledger is None else {"nodes": [], "ledger": recorded.ledger}
        result.subagents = [
            Subagent(number, 1, each.system[:200], _conversation_result(each, []), segments=each.segments)
            for number, each in enumerate(recorded.subagents, 1)
        ]
        result.tool_errors = self._tools.errors
        result.metadata = {"agent": self._agent.program.name}
        return result

    def auxiliary(self) -> bytes:
        """Return the conversations that are not trained on, with their tokens, and the request fields that had no
        effect."""
        recorded = self._conversations.recorded()
        ledger = recorded.auxiliary_ledger
        return msgspec.json.encode(
            {
                "schema": AUXILIARY_SCHEMA,
                "conversations": [
                    {"messages": each.messages, "calls": len(each.calls), "segments": each.segments}
                    for each in recorded.auxiliary
                ],
                "ledger": ledger.record() if ledger is not None and ledger.turns else None,
                "ignored_fields": dict(recorded.ignored),
            }
        )


class _OfferedTools:
    """The tools of a rollout that its program may call, and their calls. `failure` is a tool failure that ends the
    rollout; the function `failed` is called after `failure` is set."""

    def __init__(self, rollout: Rollout, failed: Callable[[], None]) -> None:
        self.output_bytes = 0
        self.errors: list[ToolError] = []
        self.failure: PalaestraError | None = None
        self._rollout, self._failed = rollout, failed
        self._names = [name for name in rollout.seat.kit.names if name not in BUILTIN_NAMES]
        self._one_at_a_time = asyncio.Lock()
        self._turn = self._calls_of_turn = 0
        self._places = asyncio.Semaphore(MAX_PARALLEL_CALLS)

    def service(self) -> ToolService | None:
        """Return the service that answers the program's MCP client; None if there are no tools."""
        shown = [each for each in self._rollout.seat.kit.definitions if each["function"]["name"] in self._names]
        return McpTools(shown, self._run_call) if shown else None

    def answered(self, conversation: RecordedConversation) -> None:
        """Register a reply of the model, after which the program may call tools."""
        self._calls_of_turn = 0
        if conversation.tools or not self._turn:
            self._turn = len(conversation.calls)

    async def _run_call(self, name: str, arguments: str) -> ToolOutcome:
        """Run one call, record it, and return its outcome. Calls that may not run concurrently wait for each other."""
        self._calls_of_turn += 1
        if self.failure is not None:
            return ToolOutcome.refused("This rollout has ended.")
        if self._calls_of_turn > CALLS_OF_A_TURN:
            return ToolOutcome.refused(f"At most {CALLS_OF_A_TURN} calls may follow one reply of the model.")
        tools, turn = self._rollout.tools, self._turn
        calls = ToolCalls(tools, self._names, tools.parallel_safe, self._rollout.settings.beyond)
        (answer,) = calls.check([RequestedCall(f"mcp_{turn}_{self._calls_of_turn}", name, arguments)], cut_off=False)
        try:
            async with self._places if name in tools.parallel_safe else self._one_at_a_time:
                await calls.run([answer])
        except (InfraError, ConfigError) as error:
            self.failure = self.failure or error
            self._failed()
            return ToolOutcome.refused(str(error))
        finally:
            # In `finally`, because a call that was cut off has had its effects too.
            self.output_bytes += len(answer.text.encode(errors="replace"))
            if answer.error:
                self.errors.append(answer.tool_error(turn))
            made = InnerCalls()
            made.called(name, answer.checked.arguments if answer.checked is not None else arguments, answer.text)
            self._rollout.log.inner_calls.extend(made.taken(turn))
        return answer.outcome or ToolOutcome.of(answer.text)


def _assignment(prompt: str, address: RolloutAddress) -> AgentAssignment:
    return AgentAssignment(prompt, address.url, address.openai_url, address.key, address.tools_url)


def _conversation_result(own: RecordedConversation | None, opening: list[Message]) -> AgentResult:
    if own is None:
        return AgentResult(messages=opening)
    usage = Usage()
    for call in own.calls:
        usage.add(call.prompt_tokens, call.completion_tokens)
    return AgentResult(
        messages=own.messages,
        turns_used=len(own.calls),
        turns=[_turn_of(number, call) for number, call in enumerate(own.calls, 1)],
        reasoning_per_turn=[None] * len(own.calls),
        tool_calls_attempted=sum(call.attempted for call in own.calls),
        tool_calls_schema_valid=sum(call.attempted for call in own.calls),
        usage=usage,
    )


def _turn_of(number: int, call: AnsweredCall) -> Turn:
    return Turn(
        number, call.finish_reason, call.prompt_tokens, call.completion_tokens, call.seconds, 0.0, call.tool_names
    )


def _prompt(messages: Sequence[Message]) -> str:
    """Return the task as one text, because programs take one prompt and have their own system prompt."""
    if any(message.get("role") not in ("system", "user") for message in messages):
        raise TaskError("a program cannot start from a conversation with replies: use the agent loop for this task")
    return "\n\n".join(str(message["content"]) for message in messages)
