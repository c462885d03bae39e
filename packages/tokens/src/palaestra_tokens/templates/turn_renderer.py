"""Finds the tokens that a new turn adds to a conversation, without re-encoding any sampled token.

The template is rendered with marks in place of the assistant's words (`probe_template`): once for the prompt of the
last reply, and once for the continued conversation. If the second rendering begins with the first, and still has all
the assistant's words, history is intact, and the text after the end of the reply belongs to the new turn. If not, the
template rewrites history, and the caller decides how to continue.

Rendering a whole conversation costs more with every turn, so the same text is measured on a short conversation: a
stand-in for the head, every kind of step once, the last reply and the new messages. The whole conversation is also
measured until the two results agree for a conversation that is longer than the short one. It is measured again whenever
a conversation is twice as long as the last one for which the results agreed. If the results differ, the template
depends on more than the kinds of steps, and whole conversations are rendered from then on. The short conversation is
rendered only until it has an outline (`outlines`), which is then filled with the texts of later steps of the same kind.

Invariants: a step encodes only text that the template puts after the last sampled token. A control token in the text of
a user, a tool or a system prompt, or in the arguments of a call, is encoded as text: a mark is put into the token
before the template is rendered, and the parts between the marks are encoded one by one. In the assistant's other text,
this applies only to special tokens, because calls and thinking may be written with control tokens.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.templates.control_text import ControlText, replaced
from palaestra_tokens.templates.jinja import (
    MARK,
    NAMED_TOKENS,
    THINK_CLOSE,
    ChatTemplate,
    WrittenOnce,
    for_template,
    template_of,
)
from palaestra_tokens.templates.outlines import Measured, Outlines, traced
from palaestra_tokens.templates.probe import (
    CONTENT,
    StepKind,
    Traits,
    last_stand_in,
    probe_template,
    shape_of,
    stand_ins,
    step_kind,
    step_kinds,
    with_latest,
)
from palaestra_tokens.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_OWN_VARIABLES = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt", "template"})
_STAND_IN = "."
_SHOWN_USER: Message = {"role": "user", "content": _STAND_IN}
_MAX_HEAD = 4
_KEPT_OPENINGS, _LONGEST_KEPT = 32, 1 << 20
"""The maximum number of openings that are kept for the other rollouts of a group, and the maximum length of such an
opening in characters."""

_NEVER = -1

_KEPT_RENDERERS = 64
_LONGEST_OPENING = 32
"""The number of tokens at the end of a prompt in which the tag that opens the thinking is looked for. They hold the tag
and the white space after it, because each token has at least one byte."""


@dataclass(frozen=True, slots=True)
class History:
    """A conversation so far: the prompt of the last reply, and the reply. `kinds` are the kinds of its steps, which
    `Opening` and `TurnStep` returned to the caller."""

    prompt: Sequence[Message]
    reply: Message
    kinds: tuple[StepKind, ...]


@dataclass(frozen=True, slots=True)
class TurnStep:
    """`ids[D]` are the tokens after the last sampled token. `rewrites` describes how the template changes history; it
    is empty if the template keeps history unchanged."""

    ids: array[int]
    kinds: tuple[StepKind, ...]
    rewrites: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """The prompt `ids[T]` of a segment's first turn. Rollouts share this object, so do not change it."""

    ids: array[int]
    kinds: tuple[StepKind, ...]


class TurnRenderer:
    """A template with one set of tools and one set of template variables. All rollouts with the same template, tools
    and variables share the renderer. Raises `ConfigError` for invalid tools or variables, and if the template hides the
    tools, drops their results, or has no recognisable token that ends a turn."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, JSON]] = (),
        variables: Mapping[str, JSON] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        for tool in tools:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not function.get("name"):
                raise ConfigError(f"A tool is {tool!r:.100}, but it must be an object with a function that has a name.")
        if taken := _OWN_VARIABLES.intersection(variables or {}):
            raise ConfigError(f"The template variable '{min(taken)}' is reserved; remove it from chat_template_kwargs.")
        self.tools = list(tools)
        self.variables = dict(variables or {})
        self._template = template
        self._tokenizer = tokenizer
        self._control = ControlText(tokenizer)
        self._shown = {
            # `bos_token` and the like are meant as control tokens.
            name: value if name in NAMED_TOKENS else self._control.marked(value)
            for name, value in self.variables.items()
        }
        self._written = self._written_tools([self._control.marked(tool) for tool in tools])
        marked: list[Mapping[str, JSON]] = list(self._written or ())
        self.traits: Traits = probe_template(self._render, tokenizer, marked, stop_ids)
        ends = (*self.traits.closers, *self.traits.openers)
        self._ends = [tokenizer.decode([number], skip_special_tokens=False) for number in ends]
        self._stand_ins: dict[object, tuple[list[Message], str]] = {}
        self._outlines = Outlines(self._render, lambda: functools.partial(self._render, template=traced(template)))
        self._proved: dict[object, int] = {}
        self._opened: dict[str, array[int]] = {}
        self._orders: dict[StepKind, bool] = {}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.traits.stop_ids

    def renders_like(self, other: TurnRenderer) -> bool:
        return self is other or (self.tools == other.tools and self.variables == other.variables)

    def opening(self, messages: Sequence[Message]) -> Opening:
        """Return the prompt of a segment's first turn, rendered and encoded as a whole."""
        text = self._render(self._ready(messages))
        ids = self._opened.get(text)
        if ids is None:  # the rollouts of a group begin with the same text
            ids = self._encoded(text)
            if len(text) > _LONGEST_KEPT:
                return Opening(ids, step_kinds(messages))
            # A new dict and not a changed one: long requests are rendered in
            # another thread, which may be reading this one.
            self._opened = {**dict(list(self._opened.items())[-_KEPT_OPENINGS:]), text: ids}
        return Opening(ids, step_kinds(messages))

    def thinks_at_once(self, delta: Sequence[int]) -> bool:
        """Return whether the new prompt tokens `delta[D]` end by opening the thinking, so that the reply begins inside
        it. This differs from turn to turn in some templates."""
        end = self._tokenizer.decode(list(delta[-_LONGEST_OPENING:]), skip_special_tokens=False)
        return end.rstrip().endswith(self.traits.think_open)

    def step(self, history: History, new: Sequence[Message], last_token: int | None) -> TurnStep:
        """Return the tokens that `new` messages and the prompt for a reply add after `last_token`. Raises `ConfigError`
        if the template refuses the conversation or does not show the reply."""
        latest = step_kind(history.reply, new)
        text, rewrites = self._measure(history, new, latest)
        kinds = with_latest(history.kinds, latest)
        if text is None:
            if rewrites:
                return TurnStep(array("i"), kinds, rewrites)
            raise ConfigError(
                "The chat template does not show the assistant's reply at all, so the conversation cannot continue."
            )
        ids = self._encoded(text)
        ended = bool(ids) and last_token in self.traits.stop_ids
        if ended and (ids[0] == last_token or ids[0] in self.traits.closers):
            del ids[0]  # the model has already sampled it
        return TurnStep(ids, kinds, rewrites)

    def written(self, prompt: Sequence[Message], reply: Message) -> array[int]:
        """Return the tokens of a reply that no model sampled, as the template writes it after `prompt`, with the token
        that ends its turn. Raises `ConfigError` if the template does not write the reply after that prompt."""
        head, (ready,) = self._ready(prompt), self._ready([*prompt, reply])[len(prompt) :]
        ended = self._through_end(self._after_prompt(head, [ready]))
        if ended is None:  # the role token of the next message ends the turn
            calls = ready.get("tool_calls") or ()
            results = [{"role": "tool", "tool_call_id": call["id"], "content": _STAND_IN} for call in calls]
            ended = self._through_end(self._after_prompt(head, [ready, *(results or [_SHOWN_USER])]))
        if ended is None:
            raise ConfigError("The chat template writes no token that ends a reply.")
        return self._encoded(ended)

    def _after_prompt(self, head: list[Message], new: list[Message]) -> str:
        """Return what the template writes after the prompt `head` for a reply and the messages after it."""
        before, after = self._render(head), self._render([*head, *new], add_generation_prompt=False)
        if after.startswith(before):
            return after[len(before) :]
        # The prompt may open the thinking, which a reply without thinking lacks, and earlier messages may be written
        # differently. The opening of the reply's own turn then shows where it begins.
        alone, opens = self._render(head, add_generation_prompt=False), self.traits.think_open
        opening = before[len(alone) :].rstrip() if before.startswith(alone) else ""
        place = after.rfind(opening.removesuffix(opens)) if opening else -1
        if place < 0:
            raise ConfigError("The chat template does not write a reply after the prompt for it.")
        rest = after[place + len(opening.removesuffix(opens)) :]
        if not opening.endswith(opens):
            return rest
        return rest.lstrip().removeprefix(opens) if rest.lstrip().startswith(opens) else f"{THINK_CLOSE}\n\n{rest}"

    def _through_end(self, text: str) -> str | None:
        """Return the text up to and including the first token that ends a turn, or None if there is none."""
        found = [at + len(end) for end in self._ends if (at := text.find(end)) >= 0]
        return text[: min(found)] if found else None

    def _encoded(self, text: str) -> array[int]:
        if MARK not in text:
            return array("i", self._tokenizer.encode(text, add_special_tokens=False))
        ids = array("i")
        for part in filter(None, text.split(MARK)):
            ids.extend(self._tokenizer.encode(part, add_special_tokens=False))
        return ids

    def _measure(self, history: History, new: Sequence[Message], latest: StepKind) -> Measured:
        if not self._in_order(latest):
            return None, "a part of the assistant's reply is written after the messages that followed it"
        roles = _head_roles(history.prompt)
        case = roles, history.kinds, latest
        shape = shape_of(history.reply)
        proved_at = self._proved.get(case, 0)
        if proved_at < 0:
            return self._in_full(history, new)
        try:
            head, before = self._stand_in(roles, history.kinds)
            ready = self._ready([shape.message(), *new])
            short = self._outlines.measured(case, head, ready, lambda after: self._look(after, before, shape.marks()))
        except ConfigError:  # the template refuses the stand-in, but may accept the conversation
            self._proved[case] = _NEVER
            return self._in_full(history, new)
        # A proof holds for conversations up to twice as long: templates may depend on the length, but checking each
        # time would cost what the short way saves.
        if proved_at and len(history.prompt) < 2 * proved_at:
            return short
        full = self._in_full(history, new)
        if full[0] != short[0] or bool(full[1]) != bool(short[1]):
            if proved_at:
                logger.warning(
                    "After %d messages the chat template writes a %s step differently than in short conversations. "
                    "Such steps are rendered in full from now on, which is correct but slower.",
                    *(len(history.prompt), "/".join(latest[1])),
                )
            self._proved[case] = _NEVER
        elif len(history.prompt) > len(head) or not history.kinds:  # at equal length, no step was repeated
            self._proved[case] = len(history.prompt)
        return full

    def _in_order(self, latest: StepKind) -> bool:
        """Return whether the template renders a step of this kind in its original order. Gemma's template writes the
        content of a message with a call after the call's result."""
        if latest not in self._orders:
            self._orders[latest] = self._look_at_order(latest)
        return self._orders[latest]

    def _look_at_order(self, latest: StepKind) -> bool:
        reply, *after = stand_ins(latest, self._tool_name)
        marked = [{**message, "content": CONTENT} for message in after]
        try:
            text = self._render(self._ready([_SHOWN_USER, reply, *marked]))
        except ConfigError:
            return True  # rendering the whole conversation will report the error
        return CONTENT not in text or last_stand_in(text) < text.index(CONTENT)

    def _in_full(self, history: History, new: Sequence[Message]) -> Measured:
        """Measure on the whole conversation, in which only the last reply is marked."""
        head = self._ready(history.prompt)
        return self._compare(head, history.reply, new, self._render(head))

    def _compare(self, head: list[Message], reply: Message, new: Sequence[Message], before: str) -> Measured:
        shape = shape_of(reply)
        ready = self._ready([shape.message(), *new])
        return self._look(self._render([*head, *ready]), before, shape.marks())

    def _look(self, after: str, before: str, marks: Sequence[str]) -> Measured:
        """Return the text after the last of the marks in `after`, which begins with `before` if history is intact."""
        rewrites, shared = "", len(before)
        if not after.startswith(before):
            rewrites, shared = "an earlier part of the conversation is rendered differently", 0
        ends = [at + len(mark) for mark in marks if (at := after.find(mark, shared)) >= 0]
        if len(ends) < len(marks):
            rewrites = rewrites or "a part of the assistant's reply is left out"
        return (self._tail(after, max(ends)) if ends else None), rewrites

    def _tail(self, after: str, said: int) -> str:
        """Return the text from the end of the turn on; `said` is where the assistant's last words end."""
        # The first end after the reply: a later one belongs to the messages that follow.
        found = [at for end in self._ends if (at := after.find(end, said)) >= 0]
        return after[min(found, default=said) :]

    def _stand_in(self, roles: tuple[str, ...], kinds: tuple[StepKind, ...]) -> tuple[list[Message], str]:
        """Return a short conversation, as messages and rendered: a head, and one step of each of the `kinds`."""
        case = roles, kinds
        if case not in self._stand_ins:
            messages = [{"role": role, "content": _STAND_IN} for role in roles]
            messages += [message for kind in kinds for message in stand_ins(kind, self._tool_name)]
            ready = self._ready(messages)
            self._stand_ins[case] = ready, self._render(ready)
        return self._stand_ins[case]

    @property
    def _tool_name(self) -> str:
        name: str = self.tools[0].get("function", self.tools[0]).get("name", "f") if self.tools else "f"
        return name

    def _ready(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages for the template, with a mark in each control token that must stay text."""
        ready = []
        for message in for_template(messages, self.traits.reasoning_field, joined=self.traits.joined):
            written = message.get("role") == "assistant"  # by the model, except the calls, which are parsed
            marked = {}
            for key, value in message.items():
                marked[key] = self._control.marked(value, own=written and key != "tool_calls")
            ready.append(marked)
        return ready

    def _written_tools(self, tools: list[Mapping[str, JSON]]) -> list[WrittenOnce] | None:
        """Return the tools, with a mark also in each text that the template completes to a control token, because some
        templates write a name as `<name>`."""
        for text, split in self._control.parts(tools).items():
            apart: list[Mapping[str, JSON]] = replaced(tools, {text: split})
            try:
                before, after = (self._render([_SHOWN_USER], tools=each) for each in (tools, apart))
            except ConfigError:
                continue  # either the probe will report the error, or the template compares this text
            same = before.replace(MARK, "") == after.replace(MARK, "")
            if same and self._control.count(after) < self._control.count(before):
                tools = apart
        return [WrittenOnce(tool) for tool in tools] or None

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, JSON]] | None = None,
    ) -> str:
        return (template or self._template).render(
            messages, tools=tools or self._written, add_generation_prompt=add_generation_prompt, **self._shown
        )


def _head_roles(prompt: Sequence[Message]) -> tuple[str, ...]:
    """Return the roles of the messages before the first reply, at most `_MAX_HEAD` of them."""
    roles: list[str] = []
    for message in prompt[:_MAX_HEAD]:
        role = str(message.get("role"))
        if role in ("assistant", "tool"):
            break
        roles.append(role)
    return tuple(roles) or ("user",)


class ChatFormat:
    """A model's tokenizer with a chat template: `chat_template`, or the tokenizer's own if that is None. `stop_ids` are
    additional tokens that end a turn. Each set of tools is probed once. Raises `ConfigError` for a missing or
    unreadable template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._template = template_of(tokenizer, chat_template)
        self._stop_ids = tuple(stop_ids)
        self._renderers: list[TurnRenderer] = []

    def renderer(
        self, tools: Sequence[Mapping[str, JSON]] = (), variables: Mapping[str, JSON] | None = None
    ) -> TurnRenderer:
        """Return the renderer for these tools and template variables (`enable_thinking`, …). Raises `ConfigError`."""
        wanted_tools, wanted_variables = list(tools), dict(variables or {})
        for renderer in reversed(self._renderers):
            if renderer.tools == wanted_tools and renderer.variables == wanted_variables:
                return renderer
        renderer = TurnRenderer(
            self._template, self.tokenizer, tools=wanted_tools, variables=wanted_variables, stop_ids=self._stop_ids
        )
        self._renderers = [*self._renderers[-_KEPT_RENDERERS + 1 :], renderer]
        return renderer
