"""What a trajectory server knows: its trainer, its environments, and the groups that wait. No I/O.

Everything that changes it is an event, and `apply` is the only thing that changes it: what was recorded and is applied
again in the same order gives the same exchange. The other methods decide, and return the event or raise `Refusal`.

Invariants: a group is in a batch once, and groups of a batch sum to the registered batch size exactly; a delivery that
came before is not taken again. Who was heard of when is not part of the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TypeAlias

import msgspec

from palaestra.trainers.atropos.batch_packing import exact, whole
from palaestra.trainers.atropos.server_events import (
    AnyEvent,
    BatchTaken,
    DataReset,
    EnvDisconnected,
    EnvRegistered,
    GroupReceived,
    TrainerRegistered,
    TrainerStarted,
)
from palaestra.trainers.atropos.wire import EnvRegistration, Refusal, Registration, ScoredData

MIN_ENV_WEIGHT = 0.01
"""The least share of the work that an environment is told it has, so that none starves."""

SILENT_S = 120.0
"""After so many seconds without a word, an environment no longer counts for weights and allocations."""


class Env(msgspec.Struct):
    """A registered environment; its id is its place in the list."""

    registration: EnvRegistration
    name: str
    connected: bool = True
    heard_s: float = 0.0


class Waiting(msgspec.Struct):
    """A group that waits for the trainer, or for others to make up a whole group with."""

    serial: int
    env_id: int | None
    sequences: int
    body: bytes


Kind: TypeAlias = tuple[str, int]
"""What environments are alike in whose short groups are put together: the name they asked for and their group size. An
environment that is started again has another id, and its groups go on where those of its former life wait."""


class Exchange:
    """The state. `most_groups` and `most_bytes` bound what may wait; clock readings are the caller's."""

    def __init__(self, *, most_groups: int = 10_000, most_bytes: int = 2 << 30) -> None:
        self.most_groups = most_groups
        self.most_bytes = most_bytes
        self._forget()

    def _forget(self) -> None:
        self.trainer: Registration | None = None
        self.started = False
        self.step = 0
        self.envs: list[Env] = []
        self.queue: list[Waiting] = []
        self.buffers: dict[Kind, list[Waiting]] = {}
        self.latest: bytes | None = None
        self.bytes_waiting = 0
        self._received = 0
        self._deliveries: set[str] = set()

    def apply(self, event: AnyEvent, now_s: float = 0.0) -> None:
        """Take the event over."""
        match event:
            case TrainerRegistered(registration=registration):
                if self.trainer is None or _begins_elsewhere(registration, self.trainer):
                    self.trainer, self.step = registration, registration.starting_step
            case TrainerStarted():
                self.started = True
            case EnvRegistered(registration=registration):
                alike = sum(env.registration.desired_name == registration.desired_name for env in self.envs)
                self.envs.append(Env(registration, f"{registration.desired_name}_{alike}", heard_s=now_s))
            case EnvDisconnected(env_id=env_id):
                self.envs[env_id].connected = False
            case GroupReceived():
                self._receive(event)
            case BatchTaken(serials=serials):
                self._take(set(serials))
            case DataReset():
                self._forget()

    def _take(self, serials: set[int]) -> None:
        """Let groups go. Those in a buffer are from a store of a version that put short groups together otherwise."""
        for waiting in (self.queue, *self.buffers.values()):
            self.bytes_waiting -= sum(len(each.body) for each in waiting if each.serial in serials)
            waiting[:] = [each for each in waiting if each.serial not in serials]
        self.step += 1

    def _receive(self, event: GroupReceived) -> None:
        waiting = Waiting(self._received, event.env_id, event.sequences, bytes(event.group))
        self._received += 1
        self.bytes_waiting += len(waiting.body)
        if event.delivery_id is not None:
            self._deliveries.add(event.delivery_id)
        self.latest = waiting.body
        kind = self._short_of(event)
        if kind is None:
            self.queue.append(waiting)
            return
        buffer = self.buffers.setdefault(kind, [])
        buffer.append(waiting)
        places = whole([each.sequences for each in buffer], kind[1]) or []
        self.queue += [buffer[place] for place in places]
        self.buffers[kind] = [each for place, each in enumerate(buffer) if place not in set(places)]

    def _short_of(self, event: GroupReceived) -> Kind | None:
        """The kind of the group's environment, where the group has fewer sequences than that registered."""
        if event.env_id is None:
            return None
        registration = self.envs[event.env_id].registration
        kind = registration.desired_name, registration.group_size
        return kind if event.sequences < registration.group_size else None

    def buffered(self, event: GroupReceived) -> int | None:
        """How many sequences wait beside a short group to make up a whole one; None for a group that is whole."""
        kind = self._short_of(event)
        return None if kind is None else sum(each.sequences for each in self.buffers[kind])

    def register(self, registration: Registration) -> TrainerRegistered:
        """A trainer, one more process of it, or the trainer started again, which says so by another `starting_step` or
        `num_steps`: steps are counted from there. Raises `Refusal` (409) when it wants other batches than the first.
        """
        if registration.batch_size < 1 or registration.max_token_len < 1:
            field = "batch_size" if registration.batch_size < 1 else "max_token_len"
            raise Refusal(422, f"{field}: must be at least 1", field=field)
        for field in ("batch_size", "max_token_len") if self.trainer is not None else ():
            was, now = getattr(self.trainer, field), getattr(registration, field)
            if was != now:
                detail = f"{field}: a trainer is registered with {was}, not {now}; GET /reset_data forgets it"
                raise Refusal(409, detail, field=field)
        return TrainerRegistered(registration=registration)

    def register_env(self, registration: EnvRegistration, now_s: float) -> EnvRegistered | None:
        """An environment; None while there is no trainer that has started. Raises `Refusal`: 422, or 503 while others
        hold what it wants of a batch, as its own former life does until it counts as silent."""
        share = registration.min_batch_allocation
        if registration.group_size < 1:
            raise Refusal(422, "group_size: must be at least 1", field="group_size")
        if share is not None and not 0 <= share <= 1:
            raise Refusal(422, f"min_batch_allocation: {share} is no share of a batch", field="min_batch_allocation")
        if self.trainer is None or not self.started:
            return None
        if registration.group_size > self.trainer.batch_size:
            detail = f"group_size: {registration.group_size} never fits a batch of {self.trainer.batch_size} sequences"
            raise Refusal(422, detail, field="group_size")
        if share is not None and round(share + self.allocated(now_s), 6) > 1:
            holders = ", ".join(env.name for env in self._holders(now_s))
            left = f"{1 - self.allocated(now_s):.3f} is left while {holders} hold the rest"
            detail = f"min_batch_allocation: {share} of a batch, of which {left}"
            raise Refusal(503, detail, field="min_batch_allocation", retry_s=5.0)
        return EnvRegistered(registration=registration)

    def disconnect(self, env_id: int) -> EnvDisconnected:
        """The environment has ended. Raises `Refusal` (404)."""
        self.env(env_id)
        return EnvDisconnected(env_id=env_id)

    def env(self, env_id: int) -> Env:
        """The environment of this id. Raises `Refusal` (404)."""
        if not 0 <= env_id < len(self.envs):
            raise Refusal(404, f"env_id: no environment has registered as {env_id}; register again", field="env_id")
        return self.envs[env_id]

    def receive(self, data: ScoredData) -> GroupReceived | None:
        """A group; None where its delivery came before. Raises `Refusal`: 404, 422, 429 or 503."""
        if self.trainer is None:
            raise Refusal(503, "no trainer has registered, so nobody would take this group", retry_s=5.0)
        if data.delivery_id is not None and data.delivery_id in self._deliveries:
            return None
        if data.env_id is not None:
            self.env(data.env_id)
        self._check_size(data, self.trainer)
        count = self.groups_waiting
        if count >= self.most_groups or self.bytes_waiting >= self.most_bytes:
            bound = f"{self.most_groups} groups or {self.most_bytes >> 20} MiB"
            detail = f"{count} groups ({self.bytes_waiting >> 20} MiB) wait for the trainer and the bound is {bound}"
            raise Refusal(429, detail, retry_s=2.0)
        fields = msgspec.structs.asdict(data)
        delivery_id = fields.pop("delivery_id")
        group = msgspec.Raw(msgspec.json.encode(fields))
        return GroupReceived(sequences=len(data.tokens), env_id=data.env_id, delivery_id=delivery_id, group=group)

    def _check_size(self, data: ScoredData, trainer: Registration) -> None:
        """A group that could never leave again is not let in."""
        if len(data.tokens) > trainer.batch_size:
            detail = f"tokens: {len(data.tokens)} sequences never fit a batch of {trainer.batch_size}"
            raise Refusal(422, detail, field="tokens")
        for number, tokens in enumerate(data.tokens):
            if len(tokens) > trainer.max_token_len:
                detail = f"tokens[{number}]: {len(tokens)} tokens, and the trainer takes {trainer.max_token_len}"
                raise Refusal(422, detail, field=f"tokens[{number}]")

    @property
    def groups_waiting(self) -> int:
        """In the queue and in the buffers."""
        return len(self.queue) + sum(map(len, self.buffers.values()))

    def batch(self, now_s: float) -> list[Waiting] | None:
        """The groups of the next batch; None while they do not make one up. Raises `Refusal` (503)."""
        if self.trainer is None:
            raise Refusal(503, "no trainer has registered: POST /register comes first", retry_s=5.0)
        chosen = self._promised(self.trainer.batch_size, now_s)
        return None if chosen is None else self._filled_up(chosen, self.trainer.batch_size)

    def starving(self, now_s: float) -> bool:
        """Whether enough waits for a batch and no choice of it makes one up: only other groups can help."""
        if self.trainer is None or sum(each.sequences for each in self.queue) < self.trainer.batch_size:
            return False
        chosen = self._promised(self.trainer.batch_size, now_s)
        return chosen is not None and self._filled_up(chosen, self.trainer.batch_size) is None

    def _filled_up(self, chosen: Mapping[int, Waiting], batch_size: int) -> list[Waiting] | None:
        """These groups, with others of the queue that make up a batch exactly; None where none do."""
        left = batch_size - sum(each.sequences for each in chosen.values())
        others = [each for each in self.queue if each.serial not in chosen]
        places = exact([each.sequences for each in others], left)
        if places is None:
            return None
        return sorted([*chosen.values(), *(others[place] for place in places)], key=attrgetter("serial"))

    def _promised(self, room: int, now_s: float) -> dict[int, Waiting] | None:
        """The oldest groups that meet the environments' minima, by serial number; None while some are lacking.

        Environments take turns, and what no longer fits is left: minima may be of more groups than a batch has room for
        where these do not fill them exactly.
        """
        lacking = dict(self._minima(room, now_s))
        waiting = {env_id: [each for each in self.queue if each.env_id == env_id] for env_id in lacking}
        if any(sum(each.sequences for each in waiting[env_id]) < least for env_id, least in lacking.items()):
            return None
        chosen: dict[int, Waiting] = {}
        while lacking := {env_id: least for env_id, least in lacking.items() if least > 0}:
            for env_id in lacking:
                each = waiting[env_id].pop(0)
                lacking[env_id] -= each.sequences
                if each.sequences <= room:
                    chosen[each.serial] = each
                    room -= each.sequences
        return chosen

    def _minima(self, batch_size: int, now_s: float) -> Iterator[tuple[int, int]]:
        """Each environment's least number of sequences in a batch."""
        for env_id, env in enumerate(self.envs):
            share = env.registration.min_batch_allocation
            if share is not None and self.alive(env, now_s):
                yield env_id, int(batch_size * share)

    def alive(self, env: Env, now_s: float) -> bool:
        """Whether the environment takes part: connected, and heard of lately."""
        return env.connected and now_s - env.heard_s < SILENT_S

    def allocated(self, now_s: float) -> float:
        """How much of a batch is promised to environments."""
        return sum(env.registration.min_batch_allocation or 0.0 for env in self._holders(now_s))

    def _holders(self, now_s: float) -> list[Env]:
        return [env for env in self.envs if env.registration.min_batch_allocation and self.alive(env, now_s)]


def _begins_elsewhere(now: Registration, before: Registration) -> bool:
    return (now.starting_step, now.num_steps) != (before.starting_step, before.num_steps)
