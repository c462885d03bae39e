"""Connects an environment to a trajectory server: sends requests, registers the environment, and keeps the server's
reports. The server is Palaestra's or the original one, which is part of atroposlib and stores no groups.

Invariants: each request is sent once, because only `feed` knows which requests may be repeated. Only one status request
is in progress at a time, so an older report never replaces a newer one. If the server has forgotten the environment,
the environment registers again.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import TrainerRefused, TrainerUnavailable
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.retry import retry_after_s
from palaestra_slots.core.types import JSON
from palaestra_tokens.http.transport import NOT_JSON, encode_json
from palaestra_train.atropos.groups import UnsavedGroups
from palaestra_train.atropos.wire import BatchInfo, EnvStatus, Registered

logger = logging.getLogger(__name__)

PACKED_BYTES = 1024
"""Bodies of at least this many bytes are sent with gzip, as atroposlib's environments do."""

LEAVE_S = 5.0
"""Seconds that a run, even an interrupted one, may wait at its end to disconnect."""

WATCH_FIRST_S, WATCH_S = 0.005, 0.1
"""Seconds between status requests to an original server, which stores no groups: the shortest interval (right after a
delivery) and the longest."""

_OTHER_PROGRAM = frozenset({401, 403, 404, 405})
"""HTTP statuses of another program, of a proxy, or of a server that rejects the token: waiting does not help."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The answer from the address `asked`. `retry_s` is the time that the server asks the client to wait before the
    next request."""

    asked: str
    status: int
    body: JSON
    retry_s: float | None = None

    def read(self, shape: type[T]) -> T:
        """Return the body as a `shape`. Raises `TrainerRefused` if the body cannot come from a trajectory server."""
        try:
            return msgspec.convert(self.body, shape, strict=False)
        except msgspec.ValidationError as error:
            raise TrainerRefused(
                f"{self.asked} does not answer like a trajectory server ({error}): {str(self.body)[:200]!r}. Set "
                "--env.rollout_server_url to the address of the trainer's server"
            ) from None

    @property
    def detail(self) -> str:
        """The reason for a failure, as text for an error message."""
        detail = self.body.get("detail") if isinstance(self.body, dict) else self.body
        return f"HTTP {self.status}: {without_middle(str(detail), 500)}"


class TrajectoryClient:
    """Connections to the server at `url`, which may require a token. They open on first use; `aclose` is idempotent.

    `answered_s` is the monotonic time of the last answer of any kind.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout_s: float = 120.0, clock: Clock | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._clock = clock or SystemClock()
        self.answered_s = self._clock.monotonic()
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, method: str, path: str, payload: JSON = None) -> ServerAnswer:
        """Send one request. Raises `TrainerUnavailable` if there is no answer, although the request may have
        arrived."""
        body = None if payload is None else encode_json(payload)
        headers = {"Content-Type": "application/json", **self._headers}
        if body is not None and len(body) >= PACKED_BYTES:
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar())
        try:
            async with self._session.request(method, self.url + path, data=body, headers=headers) as reply:
                content = await reply.read()
                self.answered_s = self._clock.monotonic()
                asked_s = retry_after_s(reply.headers.get("Retry-After"), self._clock.wall())
                return ServerAnswer(self.url + path, reply.status, _json_or_text(content), asked_s)
        except (aiohttp.ClientError, OSError) as error:  # a time-out is also an OSError
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TrainerUnavailable(f"the trajectory server {self.url} does not answer {path}: {what}") from None


def _json_or_text(content: bytes) -> JSON:
    try:
        return msgspec.json.decode(content)
    except NOT_JSON:
        return content.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """How an environment registers and feeds. `patience_s` is the time that the server may be silent before the feed
    gives up. `poll_s` is the time between attempts to register, and `heartbeat_s` the time between status requests."""

    name: str
    group_size: int
    max_token_length: int
    weight: float = 1.0
    min_batch_allocation: float | None = None
    max_batches_offpolicy: int = 3
    patience_s: float = 600.0
    poll_s: float = 1.0
    heartbeat_s: float = 1.0


@dataclass(slots=True)
class Standing:
    """The server's last report. Queue sizes count groups of this environment's size, `batch_size` counts sequences.

    `keeps` is true if the server recognizes repeated deliveries and stores groups. `alone` is true if the server has no
    groups of other environments. `starving` is true if no combination of the waiting groups fills a batch, although
    there are enough sequences for one.
    """

    env_id: int
    name: str
    batch_size: int
    most_tokens: int | None
    num_steps: int
    step: int
    weight: float = 1.0
    queue: int = 0
    own_queue: int = 0
    keeps: bool = True
    alone: bool = False
    starving: bool = False


class TrainerConnection:
    """One environment's registration. `current` is None while the environment is not registered; `changed` is notified
    after every report.

    `unsaved` receives the reports of an original server, which stores no groups. `returned` is called with the
    standings before and after the server forgot the environment.
    """

    def __init__(
        self,
        settings: FeedSettings,
        client: TrajectoryClient,
        unsaved: UnsavedGroups,
        *,
        note: Callable[[str], None],
        clock: Clock,
        returned: Callable[[Standing, Standing], None],
    ) -> None:
        self.changed = asyncio.Condition()
        self.current: Standing | None = None
        self.finished = False
        self._settings = settings
        self._client = client
        self._unsaved = unsaved
        self._note = note
        self._clock = clock
        self._returned = returned
        self._before: Standing | None = None
        self._reported_starving = False
        self._joining = asyncio.Lock()
        self._asking = asyncio.Lock()

    async def standing(self) -> Standing:
        """Return the server's last report, after registration. Waits until a trainer has started.

        Raises `TrainerRefused` for a server that rejects the environment or is not a trajectory server, and
        `TrainerUnavailable` for one that is silent for too long.
        """
        async with self._joining:
            if self.current is None:
                self.current = await self._registered()
                if self._before is not None:
                    self._returned(self._before, self.current)
            return self.current

    async def _registered(self) -> Standing:
        noted = ""
        while True:
            try:
                reason = await self._register()
                if isinstance(reason, Standing):
                    return reason
            except TrainerUnavailable as error:
                self.lose_patience(error)
                reason = f"waiting: {error}"
            if reason != noted:
                self._note(reason)
                noted = reason
            await self._clock.sleep(max(self._settings.poll_s, 0.0))

    async def _register(self) -> Standing | str:
        """Register, request the batch size and return the standing, or return the reason to wait if that is not
        possible yet."""
        settings, client = self._settings, self._client
        registration = {
            "max_token_length": settings.max_token_length,
            "desired_name": settings.name,
            "weight": settings.weight,
            "group_size": settings.group_size,
            "min_batch_allocation": settings.min_batch_allocation,
        }
        answer = await client.ask("POST", "/register-env", registration)
        if answer.status == 422:
            raise TrainerRefused(f"{client.url} does not accept this environment: {answer.detail}")
        if answer.status in _OTHER_PROGRAM and self._before is None:  # later, a proxy may answer for the server
            raise TrainerRefused(
                f"{client.url} is not a trajectory server, or rejects the request: {answer.detail}. Set "
                "--env.rollout_server_url to the address of the trainer's server, and --env.rollout_server_token to "
                "its token"
            )
        if answer.status != 200:
            return f"waiting: {answer.asked} answers {answer.detail}"
        registered = answer.read(Registered)
        if registered.status != "success":
            return "waiting for the trainer to start"
        info, root = await client.ask("GET", "/info"), await client.ask("GET", "/")
        for each in (info, root):
            if each.status != 200:
                return f"waiting: {each.asked} answers {each.detail}"
        batches = info.read(BatchInfo)
        standing = Standing(
            env_id=registered.env_id,
            name=str(registered.wandb_name),
            batch_size=max(1, batches.batch_size),
            most_tokens=batches.max_token_len if batches.max_token_len > 0 else None,
            num_steps=registered.num_steps or -1,
            step=registered.starting_step or 0,
            keeps=isinstance(root.body, dict) and "server" in root.body,  # the original has no such key
        )
        size = settings.group_size
        self._note(f"registered with {client.url} as {standing.name}, batches of {standing.batch_size} sequences")
        if standing.batch_size % size:
            self._note(f"groups of {size} do not fill a batch of {standing.batch_size} sequences exactly")
        return standing

    async def forget(self, standing: Standing) -> None:
        """Record that the server does not know this environment, so that `standing` is no longer valid."""
        if self.current is standing:
            self.current, self._before = None, standing
            self._note("the trainer's server no longer knows this environment: registering again")
            async with self.changed:
                self.changed.notify_all()

    def lose_patience(self, error: TrainerUnavailable) -> None:
        """Raise `error` if the server has been silent for too long."""
        if self._clock.monotonic() - self._client.answered_s > self._settings.patience_s:
            raise error

    async def beat(self) -> None:
        """Request the status repeatedly. The requests show the server that the environment is alive, and the answers
        report its queues and steps."""
        while not self.finished:
            await self._ask_patiently()
            await self._clock.sleep(self._settings.heartbeat_s)

    async def watch(self) -> None:
        """Request the number of waiting groups from an original server repeatedly, while any groups wait.

        The newer the groups are, the shorter the intervals, because an idle trainer takes a batch immediately.
        """
        seen, wait_s = 0, WATCH_S
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: self.current is not None and bool(self._unsaved.given))
            count = self._unsaved.asking().given
            wait_s = WATCH_FIRST_S if count != seen else min(WATCH_S, 1.05 * wait_s)
            seen = count
            await self._ask_patiently()
            await self._clock.sleep(wait_s)

    async def _ask_patiently(self) -> None:
        standing = await self.standing()
        try:
            await self.ask(standing)
        except TrainerUnavailable as error:
            self.lose_patience(error)

    async def ask(self, standing: Standing) -> bool:
        """Request the status once; return whether the server still knows this environment."""
        async with self._asking:
            asked = self._unsaved.asking()
            answer = await self._client.ask("GET", "/status-env", {"env_id": standing.env_id})
            status = answer.read(EnvStatus) if answer.status == 200 else None
            reused = status is not None and status.current_step < standing.step  # another environment now has this id
            if reused or answer.status in (404, 500):  # the original fails with 500 for an unknown id
                await self.forget(standing)
            elif status is not None and self.current is standing:
                if not standing.keeps:
                    self._unsaved.heard(status.self_queue_size, asked)
                await self._update_standing(standing, status)
            return self.current is standing

    async def _update_standing(self, standing: Standing, status: EnvStatus) -> None:
        async with self.changed:
            standing.step = status.current_step
            standing.weight = status.env_weight
            standing.queue = status.queue_size
            standing.own_queue = status.self_queue_size
            if status.starving and not self._reported_starving:
                self._reported_starving = True
                self._note(
                    f"no choice of the waiting groups makes up a batch of {standing.batch_size} sequences exactly, "
                    "because some are short or have several rows per rollout: more groups are rolled out, one at a time"
                )
            standing.starving = status.starving
            standing.alone = standing.weight >= 1 and standing.queue == standing.own_queue
            if not self.finished and 0 < standing.num_steps <= standing.step:
                self.finished = True
                self._note(f"the trainer has completed its {standing.num_steps} steps")
            self.changed.notify_all()

    async def disconnect(self) -> None:
        """Disconnect if the server is reachable, so that the server no longer gives this environment a weight."""
        if self.current is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._client.ask("POST", "/disconnect-env", {"env_id": self.current.env_id})
            except (TrainerUnavailable, TimeoutError) as error:
                logger.info("leaving the trainer: %s", error)
