"""Keeps the state of a training server (sessions, models in training, samplers), and orders their work.

One thread trains; samplers have their own threads, and all take turns on the device. Invariants: a model's requests run
once each, in the order of their sequence numbers. An invalid request consumes its number and fails with the reason, so
no number is missing. A step is never taken with only part of a batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker import types

from palaestra.core.clock import Clock
from palaestra.core.errors import DiskError, EngineError
from palaestra.core.types import JSON
from palaestra.inference.engine import Sampled
from palaestra.inference.tokenizers import Tokenizer, load_tokenizer
from palaestra.trainers.tinker.checkpoints import Checkpoint, CheckpointFolder, CheckpointPath, checked_name
from palaestra.trainers.tinker.futures import Busy, FutureAnswer, Futures, PendingRequest
from palaestra.trainers.tinker.model import Adam, BaseModel, LoraSettings, TrainedModel, UserError
from palaestra.trainers.tinker.sampler import Sampler
from palaestra.trainers.tinker.wire import (
    DatumBatch,
    Recorded,
    SamplingCall,
    batch_output,
    read_sampling,
    rows,
    sample_output,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

GAP_S = 60.0
"""Seconds that later requests of a model wait for a missing sequence number."""

SESSION_S = 900.0
"""Seconds without a heartbeat (the SDK sends one every 10 s) after which a session ends."""

SILENT_S = 30.0
"""Seconds without a heartbeat after which a session loses its models to a client that needs the room, because a client
that was killed cannot end its session."""

MOST_RECORDED_TOKENS = 1 << 24
"""The maximum number of tokens in all sequences recorded for `stable_reinforce`; beyond this number, the oldest
sequences are forgotten."""

RECORDED_S = 86_400.0
"""Seconds after which a recorded sequence is forgotten, counted from its last use."""

MOST_ROWS_WAITING = 16_384
"""The maximum number of sequences that are being sampled or wait to be sampled."""


class NotFound(Exception):
    """The session, model, sampler or request does not exist on this server, or no longer exists."""


@dataclass(slots=True, eq=False)
class ClientSession:
    session_id: str
    heard_s: float
    user_metadata: dict[str, JSON] | None = None
    display_name: str | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Job:
    pending: PendingRequest
    run: Callable[[TrainedModel], FutureAnswer]


@dataclass(slots=True, eq=False)
class ModelTraining:
    """One model and the queue of its requests. `failed` is true if a batch failed, or a request did not arrive, since
    the last step."""

    model_id: str
    session_id: str
    model: TrainedModel
    started_s: float
    user_metadata: dict[str, JSON] | None = None
    expected: int = 1
    failed: bool = False
    waiting: dict[int, _Job] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None
    inflight: str | None = None
    """The key of the weights that the model's in-flight samplers share."""


@dataclass(slots=True, eq=False)
class SamplingSession:
    """A client's name for one set of weights. `key` is the weights' key in `TinkerService._samplers`; `path` is where
    they can be loaded again."""

    sampler_id: str
    session_id: str
    key: str
    path: str | None = None
    training: ModelTraining | None = None
    clients: int = 0


class TinkerService:
    """The server without its HTTP routes. Used by one event loop. `most_models` and `most_samplers` bound the weights
    in memory."""

    def __init__(
        self,
        base: BaseModel,
        checkpoints: CheckpointFolder,
        clock: Clock,
        *,
        most_models: int = 16,
        most_samplers: int = 16,
        seed: int | None = None,
    ) -> None:
        self.base = base
        self.checkpoints = checkpoints
        self.futures = Futures(clock)
        self.sessions: dict[str, ClientSession] = {}
        self.trainings: dict[str, ModelTraining] = {}
        self.sampling: dict[str, SamplingSession] = {}
        self._clock = clock
        self._most_models, self._most_samplers = most_models, most_samplers
        self._seeds = random.Random(seed)
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self._recorded: OrderedDict[str, tuple[str, float, Recorded]] = OrderedDict()
        self._recorded_tokens = 0
        self._rows = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-trainer")
        self._tokenizer: Tokenizer | None = None
        self._placing = asyncio.Lock()

    async def aclose(self) -> None:
        """End all work. Idempotent."""
        for session_id in list(self.sessions):
            self.end_session(session_id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sampler in self._samplers.values():
            await sampler.aclose()
        self._samplers.clear()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # Sessions

    def create_session(self, user_metadata: dict[str, JSON] | None, display_name: str | None) -> ClientSession:
        session = ClientSession(str(uuid.uuid4()), self._clock.monotonic(), user_metadata, display_name)
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: str) -> ClientSession:
        """Return the session; looking it up counts as a heartbeat. Raises `NotFound`."""
        found = self.sessions.get(session_id)
        if found is None:
            raise NotFound(f"There is no session {session_id}: it has ended, or the server was restarted.")
        found.heard_s = self._clock.monotonic()
        return found

    def end_session(self, session_id: str) -> None:
        """Stop the session's work, and free its models and weights; saved checkpoints stay. Idempotent."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.models:
            training = self.trainings.pop(model_id, None)
            if training is not None and training.worker is not None:
                training.worker.cancel()
        for sampler_id in session.samplers:
            self.sampling.pop(sampler_id, None)
        self.futures.end_session(session_id)
        for sequence_id in [each for each, (owner, _, _) in list(self._recorded.items()) if owner == session_id]:
            self._forget(sequence_id)

    async def sweep(self) -> None:
        """End silent sessions, and drop expired answers, expired sequences and unused weights."""
        now_s = self._clock.monotonic()
        for session in list(self.sessions.values()):
            if now_s - session.heard_s > SESSION_S:
                self._end_silent(session)
        self.futures.sweep()
        for sequence_id in [
            each for each, (_, used_s, _) in list(self._recorded.items()) if now_s - used_s > RECORDED_S
        ]:
            self._forget(sequence_id)
        await self._evict(0)

    # Models in training

    def create_model(self, request: types.CreateModelRequest) -> PendingRequest:
        model_id = f"{self.session(request.session_id).session_id}:train:{request.model_seq_id}"
        return self._create(
            model_id, request.session_id, request.user_metadata, "create_model", lambda: self._new(request)
        )

    def _new(self, request: types.CreateModelRequest) -> tuple[TrainedModel, str | None]:
        self._check_base(request.base_model)
        _check_optimizer(request.optimizer_config)
        asked = request.lora_config
        lora = None
        if asked is not None and not 0 <= asked.rank <= 4096:
            raise UserError(f"A LoRA rank of {asked.rank} is not possible: use 1 to 4096, or 0 for full weights.")
        if asked is not None and asked.rank > 0:
            lora = LoraSettings(asked.rank, asked.seed, asked.train_mlp, asked.train_attn, asked.train_unembed)
        return TrainedModel(self.base, lora), None

    def create_from_checkpoint(self, request: types.LoadWeightsRequest) -> PendingRequest:
        assert request.session_id is not None
        model_id = f"{self.session(request.session_id).session_id}:train:{request.model_seq_id}"

        def make() -> tuple[TrainedModel, str | None]:
            if request.base_model is not None:
                self._check_base(request.base_model)
            if request.optimizer_config is not None:
                _check_optimizer(request.optimizer_config)
            found = self.checkpoints.find(request.path)
            return self.checkpoints.load(found, self.base, optimizer=request.optimizer), found.path

        return self._create(model_id, request.session_id, request.user_metadata, "load_weights", make)

    def _create(
        self,
        model_id: str,
        session_id: str,
        user_metadata: dict[str, JSON] | None,
        kind: str,
        make: Callable[[], tuple[TrainedModel, str | None]],
    ) -> PendingRequest:
        repeated = self.futures.find(f"{model_id}:0")
        if repeated is not None:
            return repeated
        pending = self.futures.add(f"{model_id}:0", session_id)
        self._start(self._make(model_id, session_id, user_metadata, kind, make, pending))
        return pending

    async def _make(
        self,
        model_id: str,
        session_id: str,
        user_metadata: dict[str, JSON] | None,
        kind: str,
        make: Callable[[], tuple[TrainedModel, str | None]],
        pending: PendingRequest,
    ) -> None:
        try:
            async with self._placing:
                await self._free_place(session_id)
                model, path = await self._in_thread(make)
                if session_id in self.sessions:
                    training = ModelTraining(model_id, session_id, model, self._clock.wall(), user_metadata)
                    training.worker = self._start(self._work(training))
                    self.trainings[model_id] = training
                    self.sessions[session_id].models.append(model_id)
            answer = FutureAnswer.of({"type": kind, "model_id": model_id, **({} if path is None else {"path": path})})
        except Exception as error:
            answer = _failure(error)
        self.futures.finish(pending, answer)

    async def _free_place(self, session_id: str) -> None:
        """Wait until there is room for a model, if one of the other sessions may be dead. A session that sends a
        heartbeat during the wait is alive; a session that is silent for `SILENT_S` ends. Raises `UserError` if all are
        alive."""
        began_s = self._clock.monotonic()
        while len(self.trainings) >= self._most_models:
            owners = {training.session_id for training in self.trainings.values()} - {session_id}
            silent = [self.sessions[owner] for owner in owners if self.sessions[owner].heard_s <= began_s]
            if not silent:
                raise UserError(
                    f"The server already has {self._most_models} models in training, its limit. Close the session of "
                    "one (ServiceClient.close), or start the server with a larger --max-models."
                )
            longest = min(silent, key=lambda session: session.heard_s)
            if self._clock.monotonic() - longest.heard_s > SILENT_S:
                self._end_silent(longest)
            else:
                await self._clock.sleep(1.0)

    def _end_silent(self, session: ClientSession) -> None:
        silent_s = self._clock.monotonic() - session.heard_s
        log.warning("session %s sent no heartbeat for %.0f s and has ended", session.session_id, silent_s)
        self.end_session(session.session_id)

    def _check_base(self, name: str) -> None:
        if not self.base.known_as(name):
            raise UserError(f"This server does not have the model '{name}'; it has '{self.base.name}'.")

    def training(self, model_id: str) -> ModelTraining:
        """Return a model in training. Raises `NotFound`."""
        found = self.trainings.get(model_id)
        if found is None:
            raise NotFound(
                f"There is no model {model_id} in training: its session has ended, or the server was restarted. Create "
                "one from a checkpoint (create_training_client_from_state_with_optimizer)."
            )
        self.session(found.session_id)
        return found

    def submit(
        self, model_id: str, sequence: int | None, run: Callable[[TrainedModel], FutureAnswer]
    ) -> PendingRequest:
        """Queue a request under its sequence number; if `sequence` is None, the request gets the next free number. If
        the number was already submitted, return the request that has it. Raises `NotFound`, `Busy`, and `UserError` for
        a number that has passed."""
        training = self.training(model_id)
        number = sequence or max([training.expected - 1, *training.waiting]) + 1
        request_id = f"{model_id}:{number}"
        repeated = self.futures.find(request_id)
        if repeated is not None:
            return repeated
        if number < training.expected:
            raise UserError(f"Request {number} of model {model_id} has already run; the next is {training.expected}.")
        pending = self.futures.add(request_id, training.session_id)
        training.waiting[number] = _Job(pending, run)
        training.arrived.set()
        return pending

    async def _work(self, training: ModelTraining) -> None:
        while True:
            job = await self._next_job(training)
            try:
                answer = await self._in_thread(partial(job.run, training.model))
            except Exception as error:
                answer = _failure(error)
            self.futures.finish(job.pending, answer)

    async def _next_job(self, training: ModelTraining) -> _Job:
        """Return the job with the next number. If that job does not arrive within `GAP_S` seconds, the jobs after it
        fail."""
        while True:
            job = training.waiting.pop(training.expected, None)
            if job is not None:
                training.expected += 1
                return job
            training.arrived.clear()
            try:
                async with asyncio.timeout(GAP_S if training.waiting else None):
                    await training.arrived.wait()
            except TimeoutError:
                message = f"Request {training.expected} of model {training.model_id} did not arrive within {GAP_S:g} s."
                last = max(training.waiting)
                for late in training.waiting.values():
                    self.futures.finish(late.pending, FutureAnswer.failure(message, "user"))
                training.waiting.clear()
                training.expected, training.failed = last + 1, True

    def refuse(self, model_id: str, sequence: int, reason: str) -> PendingRequest:
        """Let a request fail when its turn comes, so that the requests after it can run."""

        def run(model: TrainedModel) -> FutureAnswer:
            raise UserError(reason)

        return self.submit(model_id, sequence, run)

    def batch(self, batch: DatumBatch) -> PendingRequest:
        def run(model: TrainedModel) -> FutureAnswer:
            training = self.trainings.get(batch.model_id)
            try:
                session_id = training.session_id if training else ""
                checked = rows(batch, self.base, lambda sequence_id: self._recall(session_id, sequence_id))
                result = model.batch(checked, batch.loss, batch.config, backward=not batch.forward_only)
            except BaseException:
                if training is not None and not batch.forward_only:
                    training.failed = True
                raise
            return FutureAnswer(batch_output(result), protobuf=True)

        return self.submit(batch.model_id, batch.sequence, run)

    def optim_step(self, request: types.OptimStepRequest) -> PendingRequest:
        def run(model: TrainedModel) -> FutureAnswer:
            training = self.trainings.get(request.model_id)
            if training is not None and training.failed:
                training.failed = False
                model.drop_gradients()
                raise UserError("A forward_backward since the last step failed: the step was not taken.")
            return FutureAnswer.of({"metrics": dict(model.step(_adam(request.optim_params)))})

        return self.submit(request.model_id, request.seq_id, run)

    def unload(self, model_id: str) -> PendingRequest:
        """End the training of a model once the requests that have already arrived are done."""

        def run(model: TrainedModel) -> FutureAnswer:
            self.trainings.pop(model_id, None)
            return FutureAnswer.of({"type": "unload_model", "model_id": model_id})

        return self.submit(model_id, None, run)

    def save(self, request: types.SaveWeightsRequest) -> PendingRequest:
        def run(model: TrainedModel) -> FutureAnswer:
            name = request.path or f"step-{model.steps:06d}"
            saved = self.checkpoints.save(
                model,
                CheckpointPath(request.model_id, "weights", checked_name(name)),
                optimizer=True,
                overwrite=request.overwrite,
                ttl_s=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            return FutureAnswer.of({"type": "save_weights", "path": saved.path})

        return self.submit(request.model_id, request.seq_id, run)

    def load(self, request: types.LoadWeightsRequest) -> PendingRequest:
        """Load a checkpoint. For a request with a session instead of a model, create a model from the checkpoint."""
        if request.session_id is not None:
            return self.create_from_checkpoint(request)
        model_id = request.model_id or ""

        def run(model: TrainedModel) -> FutureAnswer:
            found = self.checkpoints.find(request.path)
            if _layers(found.lora) != _layers(model.lora):
                raise UserError(
                    f"The LoRA settings of {found.path} are not this model's: create a new model from the checkpoint."
                )
            if found.digest != self.base.digest:
                raise UserError(f"The checkpoint {found.path} belongs to a different model, '{found.base_model}'.")
            self.checkpoints.restore(
                model, self.checkpoints.folder_of(found), optimizer=request.optimizer, steps=found.steps
            )
            return FutureAnswer.of({"type": "load_weights", "path": found.path, "model_id": model_id})

        return self.submit(model_id, request.seq_id, run)

    def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> PendingRequest:
        training = self.training(request.model_id)
        loop = asyncio.get_running_loop()

        def run(model: TrainedModel) -> FutureAnswer:
            if request.path is not None:
                saved = self.checkpoints.save(
                    model,
                    CheckpointPath(request.model_id, "sampler_weights", checked_name(request.path)),
                    optimizer=False,
                    overwrite=True,
                    ttl_s=request.ttl_seconds,
                    user_metadata=request.user_metadata,
                )
                return FutureAnswer.of({"type": "save_weights_for_sampler", "path": saved.path})
            module = model.snapshot()
            number = request.seq_id if request.sampling_session_seq_id is None else request.sampling_session_seq_id
            sampler_id = f"{training.session_id}:sample:{number}"
            added = asyncio.run_coroutine_threadsafe(
                self._add_snapshot(training, sampler_id, module, inflight=request.kind == "inflight"), loop
            )
            added.result()
            return FutureAnswer.of({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

        return self.submit(request.model_id, request.seq_id, run)

    async def _add_snapshot(
        self, training: ModelTraining, sampler_id: str, module: PreTrainedModel, *, inflight: bool
    ) -> None:
        if training.session_id not in self.sessions:
            return
        await self._keep(sampler_id, Sampler(self.base, module))
        owner = training if inflight else None
        self._add_sampling(SamplingSession(sampler_id, training.session_id, sampler_id, training=owner))
        if inflight:
            training.inflight = sampler_id

    # Sampling

    def create_sampling(self, request: types.CreateSamplingSessionRequest) -> SamplingSession:
        """Create a sampling session. Raises `UserError` if the server does not have the weights."""
        session = self.session(request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in self.sampling:
            return self.sampling[sampler_id]
        if request.model_path is None:
            self._check_base(request.base_model or "")
            return self._add_sampling(SamplingSession(sampler_id, session.session_id, "base"))
        found = self._for_sampling(request.model_path)
        return self._add_sampling(
            SamplingSession(sampler_id, session.session_id, f"{found.path}#{found.folder}", path=found.path)
        )

    def _for_sampling(self, path: str) -> Checkpoint:
        found = self.checkpoints.find(path)
        if found.digest != self.base.digest:
            raise UserError(f"The checkpoint {path} belongs to a different base model, '{found.base_model}'.")
        return found

    def _add_sampling(self, sampling: SamplingSession) -> SamplingSession:
        self.sampling[sampling.sampler_id] = sampling
        self.sessions[sampling.session_id].samplers.append(sampling.sampler_id)
        return sampling

    def sampling_session(self, sampler_id: str) -> SamplingSession:
        """Return a sampling session. Raises `NotFound`."""
        found = self.sampling.get(sampler_id)
        if found is None:
            raise NotFound(f"There is no sampler {sampler_id}: its session has ended, or the server was restarted.")
        self.session(found.session_id)
        return found

    def sample(self, request: types.SampleRequest) -> PendingRequest:
        """Submit a sampling request. Raises `NotFound`, `Busy`, and `UserError` if the request names no sampling
        session; other invalid requests fail through their future."""
        if request.sampling_session_id is None:
            raise UserError("sampling_session_id is missing: create a sampling client first.")
        sampling = self.sampling_session(request.sampling_session_id)
        number = uuid.uuid4().hex if request.seq_id is None else request.seq_id
        request_id = f"{sampling.sampler_id}:{number}"
        repeated = self.futures.find(request_id)
        if repeated is not None:
            return repeated
        count = max(1, request.num_samples)
        if self._rows and self._rows + count > MOST_ROWS_WAITING:
            raise Busy(f"{self._rows} sequences are being sampled")
        pending = self.futures.add(request_id, sampling.session_id)
        pending.sequences = [f"{request_id}:{index}" for index in range(request.num_samples)]
        self._rows += count
        task = self._start(self._sample(sampling, request, pending, count))
        pending.cancel = task.cancel
        return pending

    async def _sample(
        self, sampling: SamplingSession, request: types.SampleRequest, pending: PendingRequest, count: int
    ) -> None:
        try:
            call = read_sampling(request, self.base, self.base.stop_ids(), self._seeds.getrandbits(63))
            sampler = await self._sampler(sampling)
            sampler.in_use += 1
            try:
                answer = await self._sampled(sampler, call, request, pending)
            finally:
                sampler.in_use -= 1
        except asyncio.CancelledError:
            self.futures.finish(pending, FutureAnswer.failure("The request was cancelled.", "user"))
            raise
        except Exception as error:
            answer = _failure(error)
        finally:
            self._rows -= count
        self.futures.finish(pending, answer)

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
                self._record(sequence_id, pending.session_id, Recorded(call.request.prompt, each.ids, each.logprobs))
        return FutureAnswer(sample_output(call, sampled, prompt, scored), protobuf=True)

    def cancel(self, request_id: str) -> None:
        """Stop sampling for a request. Has no effect on other kinds of requests, or on a request that is done."""
        pending = self.futures.find(request_id)
        if pending is not None and pending.cancel is not None:
            pending.cancel()

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.base.source)
        return self._tokenizer

    async def _sampler(self, sampling: SamplingSession) -> Sampler:
        """Return the sampler of a sampling session. Its weights are loaded again if they were dropped."""
        key = sampling.key
        if sampling.training is not None and sampling.training.inflight is not None:
            key = sampling.training.inflight
        found = self._samplers.get(key)
        if found is None:
            if key == "base":
                found = Sampler(self.base, self.base.module)
            elif sampling.path is not None:
                module = await self._in_thread(lambda: self._loaded(sampling.path or ""))
                found = self._samplers.get(key) or Sampler(self.base, module)
            else:
                raise UserError(
                    f"The weights of sampler {sampling.sampler_id} were dropped: the server keeps the weights of only "
                    f"{self._most_samplers} samplers. Save them by name (save_weights_for_sampler), or start "
                    "the server with a larger --max-samplers."
                )
            await self._keep(key, found)
        self._samplers.move_to_end(key)
        return found

    def _loaded(self, path: str) -> PreTrainedModel:
        return self.checkpoints.load(self._for_sampling(path), self.base, optimizer=False).module.requires_grad_(False)

    async def _keep(self, key: str, sampler: Sampler) -> None:
        if self._samplers.get(key) is not sampler:
            self._samplers[key] = sampler
            await self._evict(self._most_samplers)

    async def _evict(self, most: int) -> None:
        """Drop the least recently used weights until at most `most` are left. If `most` is 0, drop only the weights
        that no session uses. Weights in use are kept."""
        named = {sampling.key for sampling in self.sampling.values()}
        for key in list(self._samplers)[:-1] if most else list(self._samplers):
            sampler = self._samplers[key]
            over = len(self._samplers) > most if most else key not in named and key != "base"
            if over and not sampler.in_use:
                del self._samplers[key]
                await sampler.aclose()

    def _record(self, sequence_id: str, session_id: str, recorded: Recorded) -> None:
        self._recorded[sequence_id] = (session_id, self._clock.monotonic(), recorded)
        self._recorded_tokens += len(recorded.prompt) + len(recorded.ids)
        while self._recorded_tokens > MOST_RECORDED_TOKENS:
            self._forget(next(iter(self._recorded)))

    def _forget(self, sequence_id: str) -> None:
        _, _, recorded = self._recorded.pop(sequence_id)
        self._recorded_tokens -= len(recorded.prompt) + len(recorded.ids)

    def _recall(self, session_id: str, sequence_id: str) -> Recorded:
        owner, _, recorded = self._recorded.get(sequence_id, ("", 0.0, None))
        if recorded is None or owner != session_id:
            raise UserError(
                f"sequence {sequence_id} is not recorded in this session: sample with record_stability_info=True."
            )
        self._recorded[sequence_id] = (owner, self._clock.monotonic(), recorded)
        return recorded


def _failure(error: Exception) -> FutureAnswer:
    """Return the answer for an accepted request that failed: the SDK shows it and does not send the request again."""
    if isinstance(error, UserError):
        return FutureAnswer.failure(str(error), "user")
    if isinstance(error, DiskError | EngineError):
        return FutureAnswer.failure(str(error), "server")
    log.error("a request failed", exc_info=error)
    return FutureAnswer.failure(f"{type(error).__name__}: {error}", "server")


def _layers(lora: LoraSettings | None) -> LoraSettings | None:
    """Return the settings that decide which weights an adapter has, without the seed of the initial weights."""
    return None if lora is None else replace(lora, seed=None)


def _check_optimizer(config: Any) -> None:
    if config.type != "adamw":
        raise UserError(f"This server supports the optimizer 'adamw', not '{config.type}'.")


def _adam(params: Any) -> Adam:
    """Return the optimizer's settings. Raises `UserError` for an optimizer other than AdamW, or for settings that would
    ruin the weights."""
    if not isinstance(params, types.AdamParams):
        raise UserError(f"This server supports the optimizer 'adamw', not '{params.type}'.")
    adam = Adam(**params.model_dump())
    for name, value in asdict(adam).items():
        most = 1.0 if name.startswith("beta") else math.inf
        if not 0 <= value < most:
            raise UserError(f"{name} is {value}; it must be at least 0 and below {most:g}.")
    return adam
