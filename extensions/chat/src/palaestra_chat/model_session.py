"""The model session of one conversation: its server, its exact tokens, and what its calls cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from palaestra.agent.middleware import Ask, ChatCall
from palaestra_chat.attachments import has_images, without_images
from palaestra_chat.history import ChatHistory
from palaestra_chat.service import ChatService
from palaestra_chat.store import StoredTurn
from palaestra_chat.turn_events import Notice
from palaestra_slots.core.errors import ContextExceeded, EngineError
from palaestra_slots.core.types import JSON, Message, Usage
from palaestra_tokens.chat_server import ChatServer, SessionContext
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.server_group import Server, ServerGroup


class ModelSession:
    """The calls of one conversation to a model server. The first call of `opened` connects to the server."""

    def __init__(self, service: ChatService, conversation: str, server: Server | Sequence[Server]) -> None:
        self.engine: ServerGroup | None = None
        """The client of the server, once it is connected."""
        self._service = service
        self._id = conversation
        self._server = server
        self._session: ChatServer | None = None
        self._part = 0
        self._part_from = 0

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._service.model_name(self._server)

    @property
    def session(self) -> ChatServer | None:
        """The session, if it is open."""
        return self._session

    @property
    def window_tokens(self) -> int | None:
        """The size of the model's context window, from the settings or the server, or None if it is unknown."""
        reported = None if self.engine is None else self.engine.window_tokens
        known = [each for each in (self._service.settings.context_tokens, reported) if each is not None]
        return min(known, default=None)

    def use(self, server: Server) -> None:
        """Use `server`, another model server or another model, from the next call of `opened` on."""
        self._server, self._session, self.engine = server, None, None

    async def opened(self) -> ChatServer:
        """Return the session. Raises `EngineError` if the server cannot be reached."""
        if self._session is None:
            self.engine = await self._service.engine(self._server)
            self._session = self.engine.session(SessionContext(rollout_id=self._id))
            self._part = len(self._service.store.ledgers.of(self._id)) + 1
            self._part_from = 0
        return self._session

    def save_ledger(self, turn: StoredTurn) -> None:
        """Store the exact tokens up to this turn, if the server returns tokens."""
        ledger = None if self._session is None else self._session.ledger
        if ledger is not None and len(ledger):
            self._part_from = self._part_from or turn.number
            record = msgspec.msgpack.encode(ledger.record())
            self._service.store.ledgers.save(self._id, self._part, (self._part_from, turn.number), record)

    def spent(self, usage: Usage) -> dict[str, JSON]:
        """Return the figures of a report on model calls."""
        report: dict[str, JSON] = {
            "model_calls": usage.calls,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "model": self.name,
        }
        prices = self._service.settings.prices
        if prices is not None:
            report["cost"] = prices.cost(usage.prompt_tokens, usage.completion_tokens)
        return report


class ModelImages:
    """Shows a conversation's images to its model, or a text in their place if the model's server does not take them.
    The history keeps the images, so another model gets them. `report` shows the person a notice."""

    def __init__(self, model: ModelSession, history: ChatHistory, report: Callable[[Notice], None]) -> None:
        self._model = model
        self._history = history
        self._report = report

    def visible(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages as the model may see them."""
        return without_images(messages) if self._model.name in self._refusing and has_images(messages) else messages

    @property
    def _refusing(self) -> Sequence[str]:
        """The models that have refused images of this conversation."""
        return self._history.record.settings.get("no_images") or ()

    async def call(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        """Ask the model. If the server refuses the request, and accepts it without its images, the model gets none of
        this conversation's images from now on. This is chat middleware."""
        if not has_images(call.messages):
            return await ask(call)
        plain = ChatCall(call.branch, without_images(call.messages), call.request)
        if self._model.name in self._refusing:
            return await ask(plain)
        why: EngineError | None = None
        session = self._model.session
        if session is None or "images" in session.features:
            try:
                return await ask(call)
            except EngineError as error:
                if isinstance(error, ContextExceeded) or not error.by_request:
                    raise
                why = error
        try:
            completion = await ask(plain)
        except EngineError:
            if why is not None:
                raise why from None
            raise
        name = self._model.name
        self._history.change_settings(no_images=[*self._refusing, name])
        reason = "its exact-token interface takes only text" if why is None else str(why)
        text = (
            f"The model {name} does not take images, so it answers without them: {reason} "
            "Use /model to switch to a model that takes images; it gets them from the history."
        )
        self._report(Notice(text=text, kind="image"))
        return completion
