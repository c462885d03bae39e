"""`ChatModel`: a model that an environment asks, to play a user or to judge an answer.

    customer = ChatModel("NAME", base_url="http://127.0.0.1:8000/v1", prices=Prices(0.1, 0.4))

In a rollout, the replies are recorded in the run's folder like those of tools that reach outside of this machine, so a
resumed rollout and a replay call no model for them. A score gets the same verdict on the same question everywhere in a
run and in `palaestra grade`, which asks only new questions. The rollout's metrics have the tokens and the cost, which
counts for `max_cost`. Elsewhere, a call is only a call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from palaestra.rollouts.export.chat_messages import chat_messages
from palaestra.rollouts.recorded_tools.recorded_session import MODEL
from palaestra.rollouts.rollout import CURRENT
from palaestra.tools.tool import FunctionTool, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import (
    ConfigError,
    ContextExceeded,
    EngineError,
    EngineRefused,
    EngineReplyError,
    ReplyWithheld,
    TaskError,
    ToolUnavailable,
)
from palaestra_slots.core.types import JSON, Message, Prices
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.finish_reasons import read_finish_reason
from palaestra_tokens.server_group import ServerGroup

STOP = "###STOP###"
"""What a model that plays a user writes to end the conversation."""

_RULES = """\
You play a user who talks to an assistant. Write only what the user says next, in one short message. Do not reveal \
everything at once, and do not do the assistant's work. Once the user has what they want, or the assistant cannot \
help, write {stop} and nothing else.

The user:"""


class _Servers:
    """The open connections of a run, by settings."""

    def __init__(self) -> None:
        self._open: dict[ChatModel, ServerGroup] = {}
        self._starting: dict[ChatModel, asyncio.Lock] = {}

    async def of(self, model: ChatModel) -> ServerGroup:
        """Return the started connection. A failed start is not kept, so the next call tries again."""
        # Not under the lock, which lets only one waiting call through in each round of the event loop.
        if (started := self._open.get(model)) is not None:
            return started
        async with self._starting.setdefault(model, asyncio.Lock()):
            if model not in self._open:
                server = model.server()
                try:
                    await server.start()
                except BaseException:
                    await server.aclose()
                    raise
                self._open[model] = server
            return self._open[model]

    async def aclose(self) -> None:
        while self._open:
            await self._open.popitem()[1].aclose()


@dataclass(frozen=True)
class ChatModel:
    """A model on a server with chat completions. `prices` are per million tokens."""

    model: str
    base_url: str = field(kw_only=True)
    api_key: str | None = field(default=None, kw_only=True, repr=False)
    temperature: float = field(default=0.0, kw_only=True)
    max_tokens: int | None = field(default=2048, kw_only=True)
    prices: Prices | None = field(default=None, kw_only=True)

    async def ask(self, prompt: str | Sequence[Message]) -> str:
        """Return the model's reply to a question or to a conversation. Raises `EngineError` after the retries or if
        `max_tokens` leaves no room for an answer, `ToolUnavailable` in a replay whose recording has no such reply, and
        `TaskError` in another event loop than that of the rollout."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        asked = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        rollout = CURRENT.get()
        if rollout is None:
            with self._named_in_errors():
                async with self.server() as server:
                    return str((await self._ask_model(server, asked))["text"])
        # The connection and the recording belong to the loop of the rollout, and a call from another loop would wait
        # forever.
        if not rollout.stages.in_own_loop:
            raise TaskError(
                f"a hook of {rollout.rollout_id} asked the model {self.model} in an event loop of its own, for example "
                "with asyncio.run: declare the hook with `async def`, and write `await model.ask(...)`"
            )
        outcome = await rollout.tools.call_tool(FunctionTool(_SCHEMA, self._run, touches_world=True), asked)
        reply = outcome.reply
        if outcome.failed or not isinstance(reply, Mapping):
            raise ToolUnavailable(f"the model {self.model} gave no reply: {outcome.error or outcome.text:.500}")
        if reply.get("cached"):
            rollout.log.count_known_reply()
        else:
            rollout.log.count_model_call(reply["tokens"], self.prices)
        return str(reply["text"])

    async def play_user(
        self, persona: str, messages: Sequence[Message], *, rules: str = "", stop: str | Sequence[str] = STOP
    ) -> str | None:
        """Return what a user says next in a conversation with an assistant, or None once the model writes `stop`, or
        one of several such texts. `persona` describes the user and what they want. `rules` replace the instructions
        that the model gets before it. The model sees the text of the conversation, without system prompts, tool calls
        and their results."""
        stops = [stop] if isinstance(stop, str) else [*stop]
        turns = [each for each in chat_messages(messages) if each.role in ("user", "assistant") and each.text]
        other = {"user": "assistant", "assistant": "user"}
        shown: list[Message] = [{"role": other[each.role], "content": each.text} for each in turns]
        if not shown or shown[0]["role"] != "user":  # templates want the conversation to begin with the other side
            shown.insert(0, {"role": "user", "content": "(You open the conversation.)"})
        rules = rules or _RULES.format(stop=stops[0])
        reply = await self.ask([{"role": "system", "content": f"{rules}\n{persona}"}, *shown])
        return None if any(each in reply for each in stops) else reply

    def server(self) -> ServerGroup:
        """Return a connection to the server, not open yet."""
        return ServerGroup(APIServerConfig(model_name=self.model, base_url=self.base_url, api_key=self.api_key))

    async def _run(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        with self._named_in_errors():
            return await self._ask_model(await run.shared.get(_Servers).of(self), arguments)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Let errors of the server name this model and its fields, because they name the run's settings."""
        try:
            yield
        except (EngineError, ConfigError) as error:
            text = _OTHER_KEY.sub("--openai.api_key", str(error)).replace("Raise --openai.timeout or lower", "Lower")
            text = _SETTING.sub(lambda found: f"{_FIELDS.get(found[1], found[1])} of ChatModel", text)
            error.args = (f"The ChatModel '{self.model}' of the environment: {text}",)
            raise

    async def _ask_model(self, server: ServerGroup, asked: Mapping[str, JSON]) -> dict[str, JSON]:
        request = {name: value for name, value in asked.items() if name != "model" and value is not None}
        try:
            completion = await server.chat_completion(**request)
            choice = completion.choices[0]
            ending = read_finish_reason(choice.finish_reason, f"the model {self.model}")
        except (ContextExceeded, ReplyWithheld) as error:  # of this model, and not of the one that plays the rollout
            raise EngineRefused(f"the model {self.model}: {error}") from error
        usage, text = completion.usage, choice.message.content or ""
        tokens = (usage.prompt_tokens, usage.completion_tokens) if usage is not None else (0, 0)
        if ending == "length" and not text:  # its reasoning took all of the tokens
            raise EngineReplyError(
                f"the model {self.model} reached the limit of its reply before it wrote any text: raise max_tokens of "
                f"ChatModel, which is {self.max_tokens}"
            )
        return {"text": text, "tokens": msgspec.to_builtins(tokens)}


_SETTING = re.compile(r"--openai\.(\w+)")
_OTHER_KEY = re.compile(r"(the variable )?OPENAI_API_KEY \(or [^)]*\)( or --openai\.api_key)?")
_FIELDS = {"model_name": "model"}
_SCHEMA = ToolSchema(MODEL, "Ask a model.")
