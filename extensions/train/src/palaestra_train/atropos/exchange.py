"""Keeps the state of a trajectory server: its trainer, its environments, and the groups that wait. No I/O.

Every change is an event, and only `apply` changes the state, so the same events in the same order give the same state.
The other methods make the decisions: they return an event, or raise `RequestRefusal`.

Invariants: each group is in at most one batch, and the sequences of a batch's groups sum exactly to the registered
batch size. A repeated delivery is not accepted again. The one exception to events is the time of an environment's last
request, which the server sets directly and does not record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

import msgspec

from palaestra_train.atropos.wire import EnvRegistration, EnvStatus, Registration, RequestRefusal, ScoredData

MIN_ENV_WEIGHT = 0.01
"""The minimum share of the work reported to an environment, so that no environment starves."""

SILENT_S = 120.0
"""After this many seconds without a request, an environment no longer gets a weight or an allocation."""


class ServerEvent(msgspec.Struct, tag_field="event", kw_only=True, omit_defaults=True):
    """A change of the state. Events are written to the store unchanged."""


class TrainerRegistered(ServerEvent, tag="trainer"):
    """A trainer registered."""

    registration: Registration


class TrainerStarted(ServerEvent, tag="start"):
    """The trainer requested its first batch, so environments may register from now on."""


class EnvRegistered(ServerEvent, tag="env"):
    """An environment registered."""

    registration: EnvRegistration


class EnvDisconnected(ServerEvent, tag="disconnect"):
    """An environment disconnected."""

    env_id: int


class GroupReceived(ServerEvent, tag="group", kw_only=True):
    """`group` is the JSON of a checked `ScoredData` without its `delivery_id`; `sequences` is its number of rows."""

    sequences: int
    env_id: int | None = None
    delivery_id: str | None = None
    group: msgspec.Raw


class BatchTaken(ServerEvent, tag="batch"):
    """The groups with these serial numbers went to the trainer, in this order."""

    serials: list[int]


class DataReset(ServerEvent, tag="reset"):
    """The server forgot everything."""


AnyEvent = TrainerRegistered | TrainerStarted | EnvRegistered | EnvDisconnected | GroupReceived | BatchTaken | DataReset


class Env(msgspec.Struct):
    """A registered environment. Its id is its index in the list of environments."""

    registration: EnvRegistration
    name: str
    connected: bool = True
    heard_s: float = 0.0


class WaitingGroup(msgspec.Struct):
    """A group that waits for the trainer, or for other short groups to combine with."""

    serial: int
    env_id: int | None
    sequences: int
    body: bytes


_EnvKind: TypeAlias = tuple[str, int]
"""The requested name and the group size. Short groups are combined by kind and not by id, because a restarted
environment has a new id and its groups should join those of its former process."""


class Exchange:
    """The state of a trajectory server. `most_groups` and `most_bytes` limit the queue. Callers pass the time to
    the methods that need it."""

    def __init__(self, *, most_groups: int = 10_000, most_bytes: int = 2 << 30) -> None:
        self.most_groups = most_groups
        self.most_bytes = most_bytes
        self._reset()

    def _reset(self) -> None:
        self.trainer: Registration | None = None
        self.started = False
        self.step = 0
        self.envs: list[Env] = []
        self.queue: list[WaitingGroup] = []
        self.buffers: dict[_EnvKind, list[WaitingGroup]] = {}
        self.latest: bytes | None = None
        self.bytes_waiting = 0
        self._received = 0
        self._deliveries: set[str] = set()

    def apply(self, event: AnyEvent, now_s: float = 0.0) -> None:
        """Apply an event to the state."""
        match event:
            case TrainerRegistered(registration=registration):
                if self.trainer is None or _counts_from(registration) != _counts_from(self.trainer):
                    self.trainer, self.step = registration, registration.starting_step
            case TrainerStarted():
                self.started = True
            case EnvRegistered(registration=registration):
                alike = sum(env.registration.desired_name == registration.desired_name for env in self.envs)
                self.envs.append(Env(registration, f"{registration.desired_name}_{alike}", heard_s=now_s))
            case EnvDisconnected(env_id=env_id):
                self.envs[env_id].connected = False
            case GroupReceived():
                self._add_group(event)
            case BatchTaken(serials=serials):
                self._remove_groups(set(serials))
            case DataReset():
                self._reset()

    def _remove_groups(self, serials: set[int]) -> None:
        """Remove groups. Groups are in a buffer only if the store was written by a version that combined short groups
        differently."""
        for waiting in (self.queue, *self.buffers.values()):
            self.bytes_waiting -= sum(len(each.body) for each in waiting if each.serial in serials)
            waiting[:] = [each for each in waiting if each.serial not in serials]
        self.step += 1

    def _add_group(self, event: GroupReceived) -> None:
        waiting = WaitingGroup(self._received, event.env_id, event.sequences, bytes(event.group))
        self._received += 1
        self.bytes_waiting += len(waiting.body)
        if event.delivery_id is not None:
            self._deliveries.add(event.delivery_id)
        self.latest = waiting.body
        kind = self._short_kind(event)
        if kind is None:
            self.queue.append(waiting)
            return
        buffer = self.buffers.setdefault(kind, [])
        buffer.append(waiting)
        places = combined([each.sequences for each in buffer], kind[1]) or []
        self.queue += [buffer[place] for place in places]
        self.buffers[kind] = [each for place, each in enumerate(buffer) if place not in set(places)]

    def _short_kind(self, event: GroupReceived) -> _EnvKind | None:
        """Return the kind of the environment if the group has fewer sequences than the environment registered."""
        if event.env_id is None:
            return None
        registration = self.envs[event.env_id].registration
        kind = registration.desired_name, registration.group_size
        return kind if event.sequences < registration.group_size else None

    def buffered(self, event: GroupReceived) -> int | None:
        """Return how many sequences wait in a short group's buffer to make up a whole group, or None if this group is
        whole."""
        kind = self._short_kind(event)
        return None if kind is None else sum(each.sequences for each in self.buffers[kind])

    def register(self, registration: Registration) -> TrainerRegistered:
        """Return the registration of a trainer, of another process of the same trainer, or of a restarted trainer. A
        restarted trainer has a different `starting_step` or `num_steps`, and steps are counted from there. Raises
        `RequestRefusal` with 422 for an invalid registration, and with 409 if the batches differ from those of the
        first registration.
        """
        if registration.batch_size < 1 or registration.max_token_len < 1:
            field = "batch_size" if registration.batch_size < 1 else "max_token_len"
            raise RequestRefusal(422, f"{field}: must be at least 1", field=field)
        for field in ("batch_size", "max_token_len") if self.trainer is not None else ():
            was, now = getattr(self.trainer, field), getattr(registration, field)
            if was != now:
                detail = f"{field}: a trainer is registered with {was}, not {now}; GET /reset_data forgets it"
                raise RequestRefusal(409, detail, field=field)
        return TrainerRegistered(registration=registration)

    def register_env(self, registration: EnvRegistration, now_s: float) -> EnvRegistered | None:
        """Return the registration of an environment, or None until a trainer has started. Raises `RequestRefusal` with
        422 for an invalid registration, and with 503 while other environments hold the share of a batch that it needs.
        The environment's own former process holds its share until it counts as silent."""
        share = registration.min_batch_allocation
        if registration.group_size < 1:
            raise RequestRefusal(422, "group_size: must be at least 1", field="group_size")
        if share is not None and not 0 <= share <= 1:
            detail = f"min_batch_allocation: {share} is not between 0 and 1"
            raise RequestRefusal(422, detail, field="min_batch_allocation")
        if self.trainer is None or not self.started:
            return None
        if registration.group_size > self.trainer.batch_size:
            detail = f"group_size: {registration.group_size} never fits a batch of {self.trainer.batch_size} sequences"
            raise RequestRefusal(422, detail, field="group_size")
        if share is not None and round(share + self._allocated(now_s), 6) > 1:
            holders = ", ".join(env.name for env in self._holders(now_s))
            left = f"{1 - self._allocated(now_s):.3f} is left while {holders} hold the rest"
            detail = f"min_batch_allocation: {share} of a batch is requested, but only {left}"
            raise RequestRefusal(503, detail, field="min_batch_allocation", retry_s=5.0)
        return EnvRegistered(registration=registration)

    def disconnect(self, env_id: int) -> EnvDisconnected:
        """Return the event that disconnects an environment. Raises `RequestRefusal` (404)."""
        self.env(env_id)
        return EnvDisconnected(env_id=env_id)

    def env(self, env_id: int) -> Env:
        """Return the environment with this id. Raises `RequestRefusal` (404)."""
        if not 0 <= env_id < len(self.envs):
            detail = f"env_id: no environment has registered as {env_id}; register again"
            raise RequestRefusal(404, detail, field="env_id")
        return self.envs[env_id]

    def receive(self, data: ScoredData) -> GroupReceived | None:
        """Return the event that accepts a group, or None if its delivery was already accepted. Raises `RequestRefusal`
        (404, 422, 429 or 503)."""
        if self.trainer is None:
            raise RequestRefusal(503, "no trainer has registered, so no trainer would get this group", retry_s=5.0)
        if data.delivery_id is not None and data.delivery_id in self._deliveries:
            return None
        if data.env_id is not None:
            self.env(data.env_id)
        self._check_size(data, self.trainer)
        count = len(self.queue) + sum(map(len, self.buffers.values()))
        if count >= self.most_groups or self.bytes_waiting >= self.most_bytes:
            bound = f"{self.most_groups} groups or {self.most_bytes >> 20} MiB"
            detail = (
                f"{count} groups ({self.bytes_waiting >> 20} MiB) wait for the trainer, and the limit is {bound}; "
                "send this group again later"
            )
            raise RequestRefusal(429, detail, retry_s=2.0)
        fields = msgspec.structs.asdict(data)
        delivery_id = fields.pop("delivery_id")
        group = msgspec.Raw(msgspec.json.encode(fields))
        return GroupReceived(sequences=len(data.tokens), env_id=data.env_id, delivery_id=delivery_id, group=group)

    def _check_size(self, data: ScoredData, trainer: Registration) -> None:
        """Refuse a group that is too large for any batch, or that has a sequence longer than the trainer accepts."""
        if len(data.tokens) > trainer.batch_size:
            detail = f"tokens: {len(data.tokens)} sequences never fit a batch of {trainer.batch_size}"
            raise RequestRefusal(422, detail, field="tokens")
        for number, tokens in enumerate(data.tokens):
            if len(tokens) > trainer.max_token_len:
                detail = f"tokens[{number}]: {len(tokens)} tokens, but the trainer accepts {trainer.max_token_len}"
                raise RequestRefusal(422, detail, field=f"tokens[{number}]")

    def batch(self, now_s: float) -> list[WaitingGroup] | None:
        """Return the groups of the next batch, or None while the waiting groups do not fill one. Raises
        `RequestRefusal` (503)."""
        if self.trainer is None:
            raise RequestRefusal(503, "no trainer has registered: POST /register comes first", retry_s=5.0)
        chosen = self._promised(self.trainer.batch_size, now_s)
        return None if chosen is None else self._filled(chosen, self.trainer.batch_size)

    def status(self, env_id: int, now_s: float) -> EnvStatus:
        """Return the queues and the share of an environment, which uses them to decide when to begin a group.

        Sizes count the environment's own groups, and groups of other environments that no minimum reserves. The meaning
        follows `/status-env` of atroposlib 0.4, without its packing of other environments' groups. Raises
        `RequestRefusal` (404).
        """
        own = self.env(env_id)
        work = {id(env): env.registration.max_token_length * max(0.0, env.registration.weight) for env in self.envs}
        total = sum(work[id(env)] for env in self.envs if self._alive(env, now_s))
        sequences: dict[int | None, int] = {}
        for each in self.queue:
            sequences[each.env_id] = sequences.get(each.env_id, 0) + each.sequences
        batch_size = self.trainer.batch_size if self.trainer else 0
        others = 0
        for other, count in sequences.items():
            least = 0.0 if other is None else self.envs[other].registration.min_batch_allocation or 0.0
            others += 0 if other == env_id else max(0, count - int(batch_size * least))
        unit, mine = own.registration.group_size, sequences.get(env_id, 0)
        return EnvStatus(
            current_step=self.step,
            queue_size=(mine + others) // unit,
            unallocated_fraction=max(0.0, 1.0 - self._allocated(now_s)),
            self_queue_size=mine // unit,
            max_group_size=max((each.sequences for each in self.queue), default=1),
            starving=self._starving(now_s),
            env_weight=min(1.0, max(MIN_ENV_WEIGHT, work[id(own)] / total if total else 0.0)),
        )

    def _starving(self, now_s: float) -> bool:
        """Return whether enough sequences wait for a batch but no combination of groups fills it exactly, so that only
        new groups can help."""
        if self.trainer is None or sum(each.sequences for each in self.queue) < self.trainer.batch_size:
            return False
        chosen = self._promised(self.trainer.batch_size, now_s)
        return chosen is not None and self._filled(chosen, self.trainer.batch_size) is None

    def _filled(self, chosen: Mapping[int, WaitingGroup], batch_size: int) -> list[WaitingGroup] | None:
        """Return the chosen groups together with groups from the queue that fill the batch exactly, or None if no
        combination does."""
        left = batch_size - sum(each.sequences for each in chosen.values())
        others = [each for each in self.queue if each.serial not in chosen]
        places = exact([each.sequences for each in others], left)
        if places is None:
            return None
        return sorted([*chosen.values(), *(others[place] for place in places)], key=attrgetter("serial"))

    def _promised(self, room: int, now_s: float) -> dict[int, WaitingGroup] | None:
        """Return the oldest groups that meet the environments' minima, by serial number, or None while there are not
        enough groups.

        Environments take turns, and groups that no longer fit stay in the queue. If groups do not fill the minima
        exactly, the minima may need more groups than fit into a batch.
        """
        lacking = dict(self._minima(room, now_s))
        waiting = {env_id: [each for each in self.queue if each.env_id == env_id] for env_id in lacking}
        if any(sum(each.sequences for each in waiting[env_id]) < least for env_id, least in lacking.items()):
            return None
        chosen: dict[int, WaitingGroup] = {}
        while lacking := {env_id: least for env_id, least in lacking.items() if least > 0}:
            for env_id in lacking:
                each = waiting[env_id].pop(0)
                lacking[env_id] -= each.sequences
                if each.sequences <= room:
                    chosen[each.serial] = each
                    room -= each.sequences
        return chosen

    def _minima(self, batch_size: int, now_s: float) -> Iterator[tuple[int, int]]:
        """Yield each environment's id with its minimum number of sequences in a batch."""
        for env_id, env in enumerate(self.envs):
            share = env.registration.min_batch_allocation
            if share is not None and self._alive(env, now_s):
                yield env_id, int(batch_size * share)

    def _alive(self, env: Env, now_s: float) -> bool:
        return env.connected and now_s - env.heard_s < SILENT_S

    def _allocated(self, now_s: float) -> float:
        return sum(env.registration.min_batch_allocation or 0.0 for env in self._holders(now_s))

    def _holders(self, now_s: float) -> list[Env]:
        return [env for env in self.envs if env.registration.min_batch_allocation and self._alive(env, now_s)]


def _counts_from(registration: Registration) -> tuple[int, int]:
    return registration.starting_step, registration.num_steps


def exact(sizes: Sequence[int], target: int) -> list[int] | None:
    """Return the indices of entries of `sizes` (each at least 1), in order, that sum to `target`, or None if no entries
    do.

    The search considers as few entries as possible, and prefers the choice with the oldest entries. Bit `s` of
    `reached[n]` is set if some of the first n sizes sum to s.
    """
    if target <= 0:
        return [] if target == 0 else None
    wanted, reached = 1 << target, [1]
    for size in sizes:
        reached.append((reached[-1] | reached[-1] << size) & (2 * wanted - 1))
        if reached[-1] & wanted:
            return _walk_back(sizes, reached, target)
    return None


def _walk_back(sizes: Sequence[int], reached: Sequence[int], left: int) -> list[int]:
    taken: list[int] = []
    for place in range(len(reached) - 2, -1, -1):
        if not reached[place] >> left & 1:
            taken.append(place)
            left -= sizes[place]
    return taken[::-1]


def combined(sizes: Sequence[int], unit: int) -> list[int] | None:
    """Return the indices of entries of `sizes` that sum to `unit` or, if none do, to its smallest possible multiple.
    Returns None if no entries sum to a multiple.

    Among any `unit` sizes, some sum to a multiple of `unit`, so fewer than `unit` entries ever have to wait.
    """
    for target in range(unit, sum(sizes) + 1, unit):
        if (found := exact(sizes, target)) is not None:
            return found
    return None
