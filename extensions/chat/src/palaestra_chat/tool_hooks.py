"""`ToolHooks`: runs the user's hooks around the tool calls of one conversation, as two pieces of tool middleware.

`before` is the outermost, so a call that a hook refuses has not begun, and a call that it changes is recorded and
approved as changed. `after` is the innermost, so the recorded result is what the model reads. The calls of sub-agents
and programs pass through them as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest, Approvals, Ask, Permit
from palaestra.tools.runtime.runtime import CheckedCall, Next, ToolMiddleware, ToolRuntime
from palaestra.tools.tool import ToolMistake, ToolOutcome, ToolReply
from palaestra_chat.hooks import AFTER, BEFORE, Hook, HookAnswer, Hooks, input_for, run_hook
from palaestra_chat.turn_events import Notice
from palaestra_slots.core.types import JSON

_allowed: ContextVar[bool] = ContextVar("allowed_by_hook", default=False)
"""Whether a hook, or the person whom a hook asked, has allowed the current call. Each inner call begins with False."""


def unless_allowed(ask: Ask) -> Ask:
    """Return `ask`, but a call that a hook has allowed is allowed once, without a question."""

    async def ask_unless_allowed(request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer.ONCE if _allowed.get() else await ask(request)

    return ask_unless_allowed


def around_calls(
    hooks: Hooks | None, context: HookContext, approvals: Approvals, called: ToolMiddleware
) -> Sequence[ToolMiddleware]:
    """Return the middleware of a conversation's tool calls: `called`, with the user's hooks around it."""
    if hooks is None or not (hooks.before or hooks.after):
        return (called,)
    around = ToolHooks(hooks, context, approvals)
    return (around.before, called, around.after)


@dataclass(frozen=True, slots=True)
class HookContext:
    """What hooks learn about the conversation `session`: `project` returns the folder that it is about, `mode` its
    permission mode. `report` shows the person a notice."""

    session: str
    project: Callable[[], Path | None]
    mode: Callable[[], str]
    report: Callable[[Notice], None]


class ToolHooks:
    """The hooks of one conversation. If a hook asks the person, `approvals` does it."""

    def __init__(self, hooks: Hooks, context: HookContext, approvals: Approvals) -> None:
        self._hooks = hooks
        self._context = context
        self._approvals = approvals
        self._reported: set[tuple[str, str]] = set()

    async def before(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Run the hooks before a call, then the call if they allow it. This is tool middleware."""
        token = _allowed.set(False)
        try:
            changed, notes = call, []
            for hook, name in self._matching(self._hooks.before, call):
                answer = await self._run_hook(hook, name, BEFORE, changed)
                notes += [answer.note] if answer.note else []
                if answer.arguments is not None:
                    changed = _with_arguments(changed, answer.arguments)
                refusal = await self._refusal(hook, answer, changed)
                if refusal is not None:
                    return ToolOutcome.refused(refusal, status="blocked")
                if answer.decision in ("allow", "ask"):
                    _allowed.set(True)
            outcome = await then(changed)
        except ToolMistake as mistake:
            return ToolOutcome.refused(f"A hook changed the arguments so that they are invalid: {mistake}")
        finally:
            _allowed.reset(token)
        if changed is not call:
            notes.insert(0, f"A hook changed the arguments to {json.dumps(dict(changed.arguments))}")
        for note in notes:
            outcome = _noted(outcome, note)
        return outcome

    async def after(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Run the call, then the hooks after it, and add their notes to the result. This is tool middleware."""
        outcome = own = await then(call)
        for hook, name in self._matching(self._hooks.after, call):
            answer = await self._run_hook(hook, name, AFTER, call, own)
            notes = [answer.reason if answer.decision == "deny" else "", answer.note]
            for note in filter(None, notes):
                outcome = _noted(outcome, note)
        return outcome

    def _matching(self, hooks: Sequence[Hook], call: CheckedCall) -> list[tuple[Hook, str]]:
        """Return the hooks for a call, each with the tool's name. Tools that no model sees have none."""
        run = call.run
        if isinstance(run, ToolRuntime) and run.registry.get(call.name) is not call.tool:
            return []
        named = ((hook, hook.name_for(call.tool)) for hook in hooks)
        return [(hook, name) for hook, name in named if name is not None]

    async def _run_hook(
        self, hook: Hook, name: str, event: str, call: CheckedCall, outcome: ToolOutcome | None = None
    ) -> HookAnswer:
        project = self._context.project()
        told: dict[str, JSON] = {
            "session_id": self._context.session,
            "hook_event_name": event,
            "cwd": str(project or ""),
            "permission_mode": self._context.mode(),
            "tool_name": name,
            "tool_input": input_for(name, call.arguments),
            "tool_use_id": call.call_id,
        }
        if outcome is not None:
            reply = _as_object(outcome.reply)
            told["tool_response"] = outcome.text if reply is None else dict(reply)
        answer = await run_hook(hook, told, self._hooks.folder, project)
        if answer.message:
            self._report(f"The hook {hook.command:.80} reports: {answer.message}")
        known = hook.command, answer.problem.partition(":")[0]
        if answer.problem and known not in self._reported:
            self._reported.add(known)
            refused = hook.blocks and event == BEFORE
            effect = f"the call of {call.name} was not run" if refused else f"{call.name} went on without it"
            self._report(f"The hook {hook.command:.80} {answer.problem} ({event}; {effect})")
        return answer

    async def _refusal(self, hook: Hook, answer: HookAnswer, call: CheckedCall) -> str | None:
        """Return why a call must not run, or None."""
        if answer.problem and hook.blocks:
            return f"The user's hook that checks this call {answer.problem}. The call was not run."
        if answer.decision == "deny":
            return f"A hook of the user refused this call: {answer.reason}"
        if answer.decision == "ask":
            why = f"a hook asks you about ({answer.reason})" if answer.reason else "a hook asks you about"
            permit = Permit(f"the tool {call.name!r}", f"hook asks about {call.name}", why=why)
            return await self._approvals.refusal_of_call(permit, call.arguments, self._context.session)
        return None

    def _report(self, text: str) -> None:
        self._context.report(Notice(text=text, kind="hook"))


def _with_arguments(call: CheckedCall, arguments: Mapping[str, JSON]) -> CheckedCall:
    """Return the call with other arguments. Raises `ToolMistake` if they do not fit the tool."""
    if isinstance(call.run, ToolRuntime):
        arguments = call.run.registry.argument_schema(call.name).parse(arguments)
    return replace(call, arguments=arguments)


def _noted(outcome: ToolOutcome, note: str) -> ToolOutcome:
    """Return the outcome with a note that the model reads."""
    reply = _as_object(outcome.reply)
    if reply is None:
        return ToolOutcome(f"{outcome.reply}\n\n[{note}]", f"{outcome.text}\n\n[{note}]", outcome.error)
    known = reply.get("hook_notes")
    return ToolOutcome.of({**reply, "hook_notes": [*(known if isinstance(known, list) else ()), note]})


def _as_object(reply: ToolReply) -> Mapping[str, JSON] | None:
    """Return a reply as an object, also if it is one in JSON text; None for other text."""
    if not isinstance(reply, str):
        return reply
    try:
        read = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
