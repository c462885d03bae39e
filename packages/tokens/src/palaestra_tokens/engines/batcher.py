"""Samples concurrent requests to one model in one batch, in the thread that owns the model.

Between two tokens, new requests join the batch, and finished and cancelled requests leave it. After an idle period, the
first request waits `WINDOW_S` seconds for others. Invariant: every request is answered exactly once, even if the model
fails, the weights change or the thread ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from palaestra_slots.core.errors import EngineUnavailable
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.sampling import Sampling

if TYPE_CHECKING:
    from palaestra_tokens.engines.torch_decoder import TorchDecoder

WINDOW_S = 0.002
CLOSE_TIMEOUT_S = 60.0


@dataclass(slots=True, eq=False)
class _Request:
    """One row: prompt and settings, the tokens so far, and the future for the answer."""

    prompt: Sequence[int]
    sampling: Sampling
    most: int
    answer: Future[Sampled]
    ended: Callable[[Sequence[int]], bool] | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def sampled(self, token: int, logprob: float) -> str:
        """Add one token. Returns the finish reason, or an empty string while the row continues."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self.sampling.stop_ids or (self.ended is not None and self.ended(self.ids)):
            return "stop"
        return "length" if len(self.ids) >= self.most else ""

    def finish(self, reason: str, version: str) -> None:
        _set_result(self.answer, Sampled(self.ids, self.logprobs, reason, version))


@dataclass(slots=True, eq=False)
class _NewWeights:
    load: Callable[[TorchDecoder], None]
    version: str
    answer: Future[None]


class _End:
    """The message that ends the thread."""


_Message: TypeAlias = "_Request | _NewWeights | _End"


class Batcher:
    """Runs a decoder in a thread of its own. Thread-safe; `close` is idempotent and waits up to `CLOSE_TIMEOUT_S`
    seconds for the thread to end. `make` builds the decoder inside the thread. `most_rows` and the decoder's
    memory limit the batch; further requests wait in order."""

    def __init__(
        self,
        make: Callable[[], TorchDecoder],
        *,
        name: str,
        most_rows: int = 64,
        version: str = "0",
    ) -> None:
        self.ready: Future[None] = Future()
        self.version = version
        self.most_at_once = 0
        self._make = make
        self._most_rows = most_rows
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._waiting: list[_Request] = []
        self._rows: list[_Request] = []
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run_batches, name=name, daemon=True)

    def start(self) -> Future[None]:
        """Start the thread. The returned future completes when the model is loaded, or fails with the error."""
        self._thread.start()
        return self.ready

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        most: int,
        ended: Callable[[Sequence[int]], bool] | None = None,
    ) -> Future[Sampled]:
        """Request up to `most` tokens. Sampling stops early after a stop token, or when `ended` returns True for the
        tokens sampled so far. Cancelling the future cancels the request."""
        request = _Request(prompt, sampling, most, Future(), ended)
        self._queue_message(request)
        return request.answer

    def load(self, folder: str, version: str) -> Future[None]:
        """Change the weights to those in `folder`, as `change` does."""
        return self.change(lambda decoder: decoder.load(folder), version)

    def change(self, load: Callable[[TorchDecoder], None], version: str) -> Future[None]:
        """Change the weights: the thread calls `load` between two tokens. Requests in the batch end with `abort` and
        their tokens so far; waiting requests are sampled with the new weights."""
        message = _NewWeights(load, version, Future())
        self._queue_message(message)
        return message.answer

    def close(self) -> None:
        """End the thread. Unanswered requests get `EngineUnavailable`."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._thread.ident is not None:
            # `_queue_message` reads `_closed` under the same lock, so nothing follows this
            # message, and `_drain` answers what precedes it.
            self._inbox.put(_End())
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _queue_message(self, message: _Request | _NewWeights) -> None:
        with self._lock:
            if self._closed:
                raise EngineUnavailable("The engine is closed.")
            self._inbox.put(message)

    # In the thread

    def _run_batches(self) -> None:
        try:
            decoder = self._make()
        except BaseException as error:  # whoever waits for `ready` gets every kind of error
            _set_exception(self.ready, error)
            self._drain(EngineUnavailable(f"The model could not be loaded: {error}"))
            return
        _set_result(self.ready, None)
        while self._take_messages(decoder):
            try:
                self._admit(decoder)
                if self._rows:
                    self._step(decoder)
            except Exception as error:  # requests in the batch get the error; later requests find an empty batch
                self._fail_rows(decoder, error)
        self._drain(EngineUnavailable("The engine was closed before the request was answered."))

    def _take_messages(self, decoder: TorchDecoder) -> bool:
        """Take all messages from the queue; wait only if there is no other work. Returns False once the thread must
        end."""
        idle = not self._rows and not self._waiting
        try:
            message = self._inbox.get(block=idle)
            while True:
                if isinstance(message, _End):
                    return False
                if isinstance(message, _NewWeights):
                    self._change_weights(decoder, message)
                else:
                    self._waiting.append(message)
                # After a pause, requests often come together. Those that come a moment later get into the same batch.
                window = idle and len(self._waiting) < self._most_rows
                message = self._inbox.get(timeout=WINDOW_S) if window else self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _admit(self, decoder: TorchDecoder) -> None:
        """Move waiting requests into the batch as far as there is room."""
        self._remove_ended_rows(decoder)
        room = self._most_rows - len(self._rows)
        waiting = [request for request in self._waiting if not request.answer.cancelled()]
        if waiting:  # most steps have none
            room = min(room, decoder.room([request.prompt for request in waiting[:room]]))
        coming, self._waiting = waiting[:room], waiting[room:]
        if coming:
            self._rows += coming
            self.most_at_once = max(self.most_at_once, len(self._rows))
            decoder.admit([request.prompt for request in coming], [request.sampling for request in coming])

    def _remove_ended_rows(self, decoder: TorchDecoder) -> None:
        """Remove rows whose request was cancelled or answered."""
        staying = [row for row, request in enumerate(self._rows) if not request.answer.done()]
        if len(staying) < len(self._rows):
            self._rows = [self._rows[row] for row in staying]
            decoder.keep(staying)

    def _step(self, decoder: TorchDecoder) -> None:
        for request, (token, logprob) in zip(self._rows, decoder.step(), strict=True):
            if reason := request.sampled(token, logprob):
                request.finish(reason, self.version)

    def _change_weights(self, decoder: TorchDecoder, message: _NewWeights) -> None:
        # The rows' cached keys and values come from the old weights, so the rows end here. The
        # client resumes them with their tokens so far.
        for request in self._rows:
            request.finish("abort", self.version)
        self._remove_ended_rows(decoder)
        try:
            message.load(decoder)
        except Exception as error:
            _set_exception(message.answer, error)
            return
        self.version = message.version
        _set_result(message.answer, None)

    def _fail_rows(self, decoder: TorchDecoder, error: Exception) -> None:
        rows, self._rows = self._rows, []
        for request in rows:
            _set_exception(request.answer, error)
        # A step that failed may have consumed the last tokens already
        # (`TorchDecoder._advance`), so no row can continue.
        decoder.keep([])

    def _drain(self, error: Exception) -> None:
        with self._lock:
            # First, because nobody would answer a message that is sent after the loop below.
            self._closed = True
        messages: list[_Message] = [*self._rows, *self._waiting]
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        for message in messages:
            if not isinstance(message, _End):
                _set_exception(message.answer, error)


def _set_result(future: Future[Sampled] | Future[None], value: Sampled | None) -> None:
    with suppress(InvalidStateError):  # cancelled in the meantime
        future.set_result(value)  # type: ignore[arg-type]


def _set_exception(future: Future[Sampled] | Future[None], error: BaseException) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
