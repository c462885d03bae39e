"""Sampling on a training server: its clients' sampling sessions, the weights they sample from, and the sequences that
are recorded for training.

Weights that were saved under a name are dropped when memory is needed, and loaded again for the next request.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker import types

from palaestra_slots.core.clock import Clock
from palaestra_tokens.engine import Sampled
from palaestra_tokens.tokenizers import Tokenizer, load_tokenizer
from palaestra_train.tinker.checkpoints import Checkpoint, CheckpointFolder
from palaestra_train.tinker.client_sessions import ClientSessions, NotFound
from palaestra_train.tinker.futures import Busy, FutureAnswer, Futures, PendingRequest, failure_answer
from palaestra_train.tinker.model import BaseModel, UserError
from palaestra_train.tinker.sampler import Sampler
from palaestra_train.tinker.wire import Recorded, SamplingCall, read_sampling, sample_output
from palaestra_train.tinker.work import BackgroundWork

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_RECORDED_TOKENS = 1 << 24
"""The maximum number of tokens in all sequences recorded for `stable_reinforce`; beyond this number, the oldest
sequences are forgotten."""

RECORDED_S = 86_400.0
"""Seconds after which a recorded sequence is forgotten, counted from its last use."""

MOST_ROWS_WAITING = 16_384
"""The maximum number of sequences that are being sampled or wait to be sampled."""


@dataclass(slots=True, eq=False)
class InflightWeights:
    """The key of the weights that a model's in-flight samplers share; None before there are any."""

    key: str | None = None


@dataclass(slots=True, eq=False)
class SamplingSession:
    """A client's name for one set of weights. `key` is the weights' key in `SamplerWeights`; `path` is where they can
    be loaded again."""

    sampler_id: str
    session_id: str
    key: str
    path: str | None = None
    inflight: InflightWeights | None = None
    clients: int = 0


class SamplerWeights:
    """The weights in memory that samplers use, by key; at most `most`, without those in use."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()

    async def aclose(self) -> None:
        for sampler in self._samplers.values():
            await sampler.aclose()
        self._samplers.clear()

    def get(self, key: str) -> Sampler | None:
        """Return the sampler of these weights, which become the most recently used; None if they are not in memory."""
        if key in self._samplers:
            self._samplers.move_to_end(key)
        return self._samplers.get(key)

    async def keep(self, key: str, sampler: Sampler) -> None:
        """Add weights. If there are now more than `most`, drop the least recently used ones that are not in use."""
        if self._samplers.get(key) is sampler:
            return
        self._samplers[key] = sampler
        for old in list(self._samplers)[:-1]:
            if len(self._samplers) > self.most:
                await self._drop_sampler(old)

    async def drop_unnamed(self, named: set[str]) -> None:
        """Drop the weights whose keys are not in `named`, except those of the base model and those in use."""
        for key in list(self._samplers):
            if key not in named and key != "base":
                await self._drop_sampler(key)

    async def _drop_sampler(self, key: str) -> None:
        sampler = self._samplers.get(key)  # None if another call has dropped it in the meantime
        if sampler is not None and not sampler.in_use:
            del self._samplers[key]
            await sampler.aclose()


class RecordedSequences:
    """The sampled sequences that clients asked to record, for training with `stable_reinforce`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: OrderedDict[str, tuple[str, float, Recorded]] = OrderedDict()
        self._tokens = 0

    def add(self, sequence_id: str, session_id: str, recorded: Recorded) -> None:
        self._all[sequence_id] = (session_id, self._clock.monotonic(), recorded)
        self._tokens += len(recorded.prompt) + len(recorded.ids)
        while self._tokens > MOST_RECORDED_TOKENS:
            self._forget(next(iter(self._all)))

    def get(self, session_id: str, sequence_id: str) -> Recorded:
        """Return a sequence of a session. Raises `UserError` if it is not recorded."""
        owner, _, recorded = self._all.get(sequence_id, ("", 0.0, None))
        if recorded is None or owner != session_id:
            raise UserError(
                f"sequence {sequence_id} is not recorded in this session: sample with record_stability_info=True."
            )
        self._all[sequence_id] = (owner, self._clock.monotonic(), recorded)
        return recorded

    def end_session(self, session_id: str) -> None:
        """Forget the sequences of a session."""
        for sequence_id in [each for each, (owner, _, _) in list(self._all.items()) if owner == session_id]:
            self._forget(sequence_id)

    def sweep(self) -> None:
        """Forget the sequences that were not used for `RECORDED_S` seconds."""
        now_s = self._clock.monotonic()
        for sequence_id in [each for each, (_, used_s, _) in list(self._all.items()) if now_s - used_s > RECORDED_S]:
            self._forget(sequence_id)

    def _forget(self, sequence_id: str) -> None:
        _, _, recorded = self._all.pop(sequence_id)
        self._tokens -= len(recorded.prompt) + len(recorded.ids)


class SamplingSessions:
    """The sampling sessions of a server's clients, and their requests. `weights` bounds the weights in memory, and
    `recorded` has the recorded sequences. `seed` makes requests without a seed repeatable."""

    def __init__(
        self,
        base: BaseModel,
        checkpoints: CheckpointFolder,
        clients: ClientSessions,
        futures: Futures,
        work: BackgroundWork,
        *,
        weights: SamplerWeights,
        recorded: RecordedSequences,
        seed: int | None = None,
    ) -> None:
        self.weights, self.recorded = weights, recorded
        self._base, self._checkpoints = base, checkpoints
        self._clients, self._futures, self._work = clients, futures, work
        self._open: dict[str, SamplingSession] = {}
        self._seeds = random.Random(seed)
        self._tokenizer: Tokenizer | None = None
        self._rows = 0

    def create(self, request: types.CreateSamplingSessionRequest) -> SamplingSession:
        """Create a sampling session. Raises `UserError` if the server does not have the weights."""
        session = self._clients.find(request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in self._open:
            return self._open[sampler_id]
        if request.model_path is None:
            self._base.check_name(request.base_model or "")
            return self.add(SamplingSession(sampler_id, session.session_id, "base"))
        found = self._for_sampling(request.model_path)
        return self.add(
            SamplingSession(sampler_id, session.session_id, f"{found.path}#{found.folder}", path=found.path)
        )

    def _for_sampling(self, path: str) -> Checkpoint:
        found = self._checkpoints.find(path)
        if found.digest != self._base.digest:
            raise UserError(f"The checkpoint {path} belongs to a different base model, '{found.base_model}'.")
        return found

    def add(self, sampling: SamplingSession) -> SamplingSession:
        """Add a sampling session to those of its client."""
        self._open[sampling.sampler_id] = sampling
        self._clients.open[sampling.session_id].samplers.append(sampling.sampler_id)
        return sampling

    def find(self, sampler_id: str) -> SamplingSession:
        """Return a sampling session. Raises `NotFound`."""
        found = self._open.get(sampler_id)
        if found is None:
            raise NotFound(f"There is no sampler {sampler_id}: its session has ended, or the server was restarted.")
        self._clients.find(found.session_id)
        return found

    def sample(self, request: types.SampleRequest) -> PendingRequest:
        """Submit a sampling request. Raises `NotFound`, `Busy`, and `UserError` if the request names no sampling
        session; other invalid requests fail through their future."""
        if request.sampling_session_id is None:
            raise UserError("sampling_session_id is missing: create a sampling client first.")
        sampling = self.find(request.sampling_session_id)
        number = uuid.uuid4().hex if request.seq_id is None else request.seq_id
        request_id = f"{sampling.sampler_id}:{number}"
        repeated = self._futures.find(request_id)
        if repeated is not None:
            return repeated
        count = max(1, request.num_samples)
        if self._rows and self._rows + count > MOST_ROWS_WAITING:
            raise Busy(f"{self._rows} sequences are being sampled")
        pending = self._futures.add(request_id, sampling.session_id)
        pending.sequences = [f"{request_id}:{index}" for index in range(request.num_samples)]
        self._rows += count
        task = self._work.start(self._sample(sampling, request, pending, count))
        pending.cancel = task.cancel
        return pending

    async def _sample(
        self, sampling: SamplingSession, request: types.SampleRequest, pending: PendingRequest, count: int
    ) -> None:
        try:
            call = read_sampling(request, self._base, self._base.stop_ids(), self._seeds.getrandbits(63))
            sampler = await self._sampler(sampling)
            sampler.in_use += 1
            try:
                answer = await self._sampled(sampler, call, request, pending)
            finally:
                sampler.in_use -= 1
        except asyncio.CancelledError:
            self._futures.finish(pending, FutureAnswer.failure("The request was cancelled.", "user"))
            raise
        except Exception as error:
            answer = failure_answer(error)
        finally:
            self._rows -= count
        self._futures.finish(pending, answer)

    async def _sampled(
        self, sampler: Sampler, call: SamplingCall, request: types.SampleRequest, pending: PendingRequest
    ) -> FutureAnswer:
        sampling = asyncio.ensure_future(sampler.sample(call.request, self._load_tokenizer))
        try:
            prompt = await sampler.score(call.scoring(call.request.prompt)) if call.scores_prompt else None
            sampled: list[Sampled] = await sampling
        finally:
            sampling.cancel()
        scored = []
        if call.top_sampled:
            whole = [[*call.request.prompt, *each.ids] for each in sampled]
            scored = await asyncio.gather(*(sampler.score(call.scoring(ids)) for ids in whole))
        if request.record_stability_info:
            for sequence_id, each in zip(pending.sequences or [], sampled, strict=True):
                self.recorded.add(
                    sequence_id, pending.session_id, Recorded(call.request.prompt, each.ids, each.logprobs)
                )
        return FutureAnswer(sample_output(call, sampled, prompt, scored), protobuf=True)

    def cancel(self, request_id: str) -> None:
        """Stop sampling for a request. Has no effect on other kinds of requests, or on a request that is done."""
        pending = self._futures.find(request_id)
        if pending is not None and pending.cancel is not None:
            pending.cancel()

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._base.source)
        return self._tokenizer

    async def _sampler(self, sampling: SamplingSession) -> Sampler:
        """Return the sampler of a sampling session. Its weights are loaded again if they were dropped."""
        key = sampling.key
        if sampling.inflight is not None and sampling.inflight.key is not None:
            key = sampling.inflight.key
        found = self.weights.get(key)
        if found is None:
            if key == "base":
                found = Sampler(self._base, self._base.module)
            elif sampling.path is not None:
                module = await self._work.in_thread(lambda: self._loaded(sampling.path or ""))
                found = self.weights.get(key) or Sampler(self._base, module)
            else:
                raise UserError(
                    f"The weights of sampler {sampling.sampler_id} were dropped: the server keeps the weights of only "
                    f"{self.weights.most} samplers. Save them by name (save_weights_for_sampler), or start "
                    "the server with a larger --max-samplers."
                )
            await self.weights.keep(key, found)
        return found

    def _loaded(self, path: str) -> PreTrainedModel:
        return self._checkpoints.load(self._for_sampling(path), self._base, optimizer=False).module.requires_grad_(
            False
        )

    def end_session(self, sampler_ids: Sequence[str]) -> None:
        """Drop the sampling sessions of a client."""
        for sampler_id in sampler_ids:
            self._open.pop(sampler_id, None)

    async def sweep(self) -> None:
        """Drop the weights that no session uses."""
        await self.weights.drop_unnamed({sampling.key for sampling in self._open.values()})
