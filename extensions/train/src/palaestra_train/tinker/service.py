"""Keeps the state of a training server (sessions, models in training, samplers), and orders their work.

One thread trains; samplers have their own threads, and all take turns on the device. Invariants: a model's requests run
once each, in the order of their sequence numbers. An invalid request consumes its number and fails with the reason, so
no number is missing. A step is never taken with only part of a batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker import types

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.types import JSON
from palaestra_train.tinker.checkpoints import CheckpointFolder, CheckpointPath, checked_name
from palaestra_train.tinker.client_sessions import ClientSession, ClientSessions, NotFound
from palaestra_train.tinker.futures import FutureAnswer, Futures, PendingRequest, failure_answer
from palaestra_train.tinker.model import Adam, BaseModel, LoraSettings, TrainedModel, UserError
from palaestra_train.tinker.sampler import Sampler
from palaestra_train.tinker.sampling_sessions import (
    InflightWeights,
    RecordedSequences,
    SamplerWeights,
    SamplingSession,
    SamplingSessions,
)
from palaestra_train.tinker.wire import DatumBatch, batch_output, checked_rows
from palaestra_train.tinker.work import BackgroundWork

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
    inflight: InflightWeights = field(default_factory=InflightWeights)


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The base model's name for clients (default: that of its folder), its device and type; the maximum number of
    models in training, and of weights in memory that samplers use; the most GiB of one pass; and the seed that makes
    sampling repeatable."""

    name: str | None = None
    device: str | None = None
    dtype: str = "float32"
    most_models: int = 16
    most_samplers: int = 16
    pass_memory: float | None = None
    seed: int | None = None


class TinkerService:
    """The server without its HTTP routes. Used by one event loop. `sessions`, `futures` and `sampling` are its parts
    that routes use directly."""

    def __init__(
        self,
        base: BaseModel,
        checkpoints: CheckpointFolder,
        clock: Clock,
        settings: ServiceSettings,
    ) -> None:
        self.base = base
        self.checkpoints = checkpoints
        self.futures = Futures(clock)
        self.sessions = ClientSessions(clock)
        self.trainings: dict[str, ModelTraining] = {}
        self._clock = clock
        self._most_models = settings.most_models
        self._background = BackgroundWork()
        self._placing = asyncio.Lock()
        self.sampling = SamplingSessions(
            base, checkpoints, self.sessions, self.futures, self._background,
            weights=SamplerWeights(settings.most_samplers), recorded=RecordedSequences(clock), seed=settings.seed,
        )  # fmt: skip

    async def aclose(self) -> None:
        """End all work. Idempotent."""
        for session_id in list(self.sessions.open):
            self.end_session(session_id)
        await self._background.aclose()
        await self.sampling.weights.aclose()

    # Sessions

    def end_session(self, session_id: str) -> None:
        """Stop the session's work, and free its models and weights; saved checkpoints stay. Idempotent."""
        session = self.sessions.open.pop(session_id, None)
        if session is None:
            return
        for model_id in session.models:
            training = self.trainings.pop(model_id, None)
            if training is not None and training.worker is not None:
                training.worker.cancel()
        self.sampling.end_session(session.samplers)
        self.futures.end_session(session_id)
        self.sampling.recorded.end_session(session_id)

    async def sweep(self) -> None:
        """End silent sessions, and drop expired answers, expired sequences and unused weights."""
        for session in list(self.sessions.open.values()):
            if self.sessions.silent_for_s(session) > SESSION_S:
                self._end_silent(session)
        self.futures.sweep()
        self.sampling.recorded.sweep()
        await self.sampling.sweep()

    # Models in training

    def create_model(self, request: types.CreateModelRequest) -> PendingRequest:
        model_id = f"{self.sessions.find(request.session_id).session_id}:train:{request.model_seq_id}"
        return self._create_model(
            model_id, request.session_id, request.user_metadata, "create_model", lambda: self._new(request)
        )

    def _new(self, request: types.CreateModelRequest) -> tuple[TrainedModel, str | None]:
        self.base.check_name(request.base_model)
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
        model_id = f"{self.sessions.find(request.session_id).session_id}:train:{request.model_seq_id}"

        def make() -> tuple[TrainedModel, str | None]:
            if request.base_model is not None:
                self.base.check_name(request.base_model)
            if request.optimizer_config is not None:
                _check_optimizer(request.optimizer_config)
            found = self.checkpoints.find(request.path)
            return self.checkpoints.load(found, self.base, optimizer=request.optimizer), found.path

        return self._create_model(model_id, request.session_id, request.user_metadata, "load_weights", make)

    def _create_model(
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
        self._background.start(self._make_model(model_id, session_id, user_metadata, kind, make, pending))
        return pending

    async def _make_model(
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
                model, path = await self._background.in_thread(make)
                if session_id in self.sessions.open:
                    training = ModelTraining(model_id, session_id, model, self._clock.wall(), user_metadata)
                    training.worker = self._background.start(self._work(training))
                    self.trainings[model_id] = training
                    self.sessions.open[session_id].models.append(model_id)
            answer = FutureAnswer.of({"type": kind, "model_id": model_id, **({} if path is None else {"path": path})})
        except Exception as error:
            answer = failure_answer(error)
        self.futures.finish(pending, answer)

    async def _free_place(self, session_id: str) -> None:
        """Wait until there is room for a model, if one of the other sessions may be dead. A session that sends a
        heartbeat during the wait is alive; a session that is silent for `SILENT_S` ends. Raises `UserError` if all are
        alive."""
        began_s = self._clock.monotonic()
        while len(self.trainings) >= self._most_models:
            owners = {training.session_id for training in self.trainings.values()} - {session_id}
            sessions = [self.sessions.open[owner] for owner in owners]
            silent = [session for session in sessions if session.heard_s <= began_s]
            if not silent:
                raise UserError(
                    f"The server already has {self._most_models} models in training, its limit. Close the session of "
                    "one (ServiceClient.close), or start the server with a larger --max-models."
                )
            longest = min(silent, key=lambda session: session.heard_s)
            if self.sessions.silent_for_s(longest) > SILENT_S:
                self._end_silent(longest)
            else:
                await self._clock.sleep(1.0)

    def _end_silent(self, session: ClientSession) -> None:
        silent_s = self.sessions.silent_for_s(session)
        log.warning("session %s sent no heartbeat for %.0f s and has ended", session.session_id, silent_s)
        self.end_session(session.session_id)

    def training(self, model_id: str) -> ModelTraining:
        """Return a model in training. Raises `NotFound`."""
        found = self.trainings.get(model_id)
        if found is None:
            raise NotFound(
                f"There is no model {model_id} in training: its session has ended, or the server was restarted. Create "
                "one from a checkpoint (create_training_client_from_state_with_optimizer)."
            )
        self.sessions.find(found.session_id)
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
                answer = await self._background.in_thread(partial(job.run, training.model))
            except Exception as error:
                answer = failure_answer(error)
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
                checked = checked_rows(
                    batch, self.base, lambda sequence_id: self.sampling.recorded.get(session_id, sequence_id)
                )
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
        if training.session_id not in self.sessions.open:
            return
        shared = training.inflight if inflight else None
        # Before the weights are kept: while older ones are closed, a sweep would drop weights that no session names.
        self.sampling.add(SamplingSession(sampler_id, training.session_id, sampler_id, inflight=shared))
        await self.sampling.weights.keep(sampler_id, Sampler(self.base, module))
        if inflight:
            training.inflight.key = sampler_id


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
