"""The model session of one conversation: its server, its exact tokens, and what its calls cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from palaestra.agent.middleware import Ask, ChatCall
from palaestra_chat.attachments import digest, has_images, images_of, without_images
from palaestra_chat.history import ChatHistory
from palaestra_chat.service import ChatService
from palaestra_chat.store import StoredTurn
from palaestra_chat.turn_events import Notice
from palaestra_slots.core.errors import ContextExceeded, EngineError
from palaestra_slots.core.exits import plural
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
    """Shows a conversation's images to its model, or a text in place of those that its server refuses. The history
    keeps the images, so another model gets them. `report` shows the person a notice."""

    def __init__(self, model: ModelSession, history: ChatHistory, report: Callable[[Notice], None]) -> None:
        self._model = model
        self._history = history
        self._report = report

    def visible(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages as the model may see them."""
        if not has_images(messages):
            return messages
        known = self._known
        return without_images(messages, lambda image: self._takes_any and known.get(digest(image), True))

    @property
    def _takes_any(self) -> bool:
        """Whether the model may take images: it has not refused two requests with images, and taken none."""
        return self._model.name not in (self._history.record.settings.get("no_images") or ())

    @property
    def _known(self) -> Mapping[str, bool]:
        """Which images of this conversation the model has taken, and which it has refused, by their digest."""
        return (self._history.record.settings.get("images") or {}).get(self._model.name) or {}

    def _learn(self, images: Sequence[JSON], *, taken: bool) -> None:
        known = {**self._known, **dict.fromkeys(map(digest, images), taken)}
        others = self._history.record.settings.get("images") or {}
        self._history.change_settings(images={**others, self._model.name: known})

    async def call(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        """Ask the model. If the server refuses the request, and accepts it without the images that it has not taken
        before, the model gets none of those from now on. This is chat middleware."""
        shown = self.visible(call.messages)
        call = ChatCall(call.branch, shown, call.request)
        if not has_images(shown):
            return await ask(call)
        known = self._known
        new = [image for image in images_of(shown) if digest(image) not in known]
        why: EngineError | None = None
        session = self._model.session
        if session is None or "images" in session.features:
            try:
                completion = await ask(call)
            except EngineError as error:
                if not new or isinstance(error, ContextExceeded) or not error.by_request:
                    raise
                why = error
            else:
                if new:
                    self._learn(new, taken=True)
                return completion
        rest = without_images(shown, lambda image: why is not None and digest(image) in known)
        try:
            completion = await ask(ChatCall(call.branch, rest, call.request))
        except EngineError:
            if why is not None:
                raise why from None
            raise
        self._record_refusal(new, why, none_at_all=why is None or (len(known) > 0 and not any(known.values())))
        return completion

    def _record_refusal(self, images: Sequence[JSON], why: EngineError | None, *, none_at_all: bool) -> None:
        name = self._model.name
        self._learn(images, taken=False)
        reason = "its exact-token interface takes only text" if why is None else str(why)
        text = f"The server of {name} refused {plural(len(images), 'image')}, so it answers without: {reason}"
        if none_at_all:
            others = self._history.record.settings.get("no_images") or ()
            self._history.change_settings(no_images=[*others, name])
            text = f"The model {name} does not take images, so it answers without them: {reason}"
        advice = "Use /model to switch to a model that takes images; it gets them from the history."
        self._report(Notice(text=f"{text} {advice}", kind="image"))
