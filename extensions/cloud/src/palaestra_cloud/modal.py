"""Runs slots in Modal sandboxes, with many slots in each sandbox. This needs the extra `modal` and a Modal account.

A sandbox is created with the configuration's resources, and with the configuration's image unless its slots name
another one. The slot server runs in it as a command whose streams are the connection. Modal isolates the sandbox from
everything else (gVisor); its slots are isolated from each other at the best level that Modal allows. The image needs
Python 3.11 or newer as `python3`.

A sandbox costs money as long as it runs, so it is ended early: when the backend no longer needs it, and `max_lifetime`
seconds after its start at the latest. It also ends `idle_timeout` seconds after its server has ended, and the server
ends when this process has been silent for `idle_timeout` seconds. Each sandbox is tagged with the process that started
it. A later run on this machine ends the sandboxes of processes that are gone.

If rollouts have a time limit, a slot starts only in a sandbox whose remaining lifetime is long enough for a whole
rollout.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import math
import os
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar

import yaml

from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import AcquireTimeout, ConfigError, SandboxError, SlotLost
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.owner import is_alive, process_name, this_host
from palaestra_slots.sandbox.backends.remote import Place, PlaceSpec, RemoteBackend
from palaestra_slots.sandbox.images import reference
from palaestra_slots.sandbox.images.image_store import ImageStore
from palaestra_slots.sandbox.local.client import OnLost, wait_uninterrupted
from palaestra_slots.sandbox.remote.remote_client import DistantClient, call_of, send_server
from palaestra_slots.sandbox.server_backend import SYSTEM_PATH, ServerBackend, environment, levels
from palaestra_slots.sandbox.slot import Mount, Rung, Slot, SlotSpec, Snapshot, View
from palaestra_slots.sandbox.slotd.protocol.frames import Fields

if TYPE_CHECKING:
    import modal

T = TypeVar("T")

DEFAULT_APP = "atropos-sandbox"

_MOST_LIFETIME_S = 24 * 3600  # Modal's own limit
_GRADING_S = 300.0  # seconds that a slot may outlive the time limit of its rollout
_CREATE_S = 900.0  # the first use of an image pulls the image
_START_S = 120.0  # the slot server starts in a running sandbox
_COPY_S = 900.0
_CALL_S = 60.0
_CHECK_S = 20.0
_CLOSE_S = 20.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 15.0
_PIECE = 256 << 10
_ENTRIES = 100

_OWN_VARIABLES = ("TMPDIR", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "TERM", "LANG")
# Prints the environment, and which of the given directories exist. If no directory is given, it also makes a link to
# the sandbox's Python at the path where tools expect this machine's Python.
_PREPARE = """
import json, os, sys
version, path, *folders = sys.argv[1:]
if not folders and version == "%d.%d" % sys.version_info[:2] and not os.path.lexists(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(os.path.relpath(sys.executable, os.path.dirname(path)), path)  # the slot server has another root
print(json.dumps([dict(os.environ), [folder for folder in folders if os.path.isdir(folder)]]))
"""
_NOT_COPIED = ("site-packages", "dist-packages", "test", "idlelib", "__pycache__")
_VERSION = "{}.{}".format(*sys.version_info)
# Unpacks its input into the given directory, or a new one, and prints the directory's name.
_UNPACK = """
import os, sys, tarfile, tempfile
folder = sys.argv[1] or tempfile.mkdtemp(prefix="palaestra-")
os.makedirs(folder, exist_ok=True)
options = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
tarfile.open(fileobj=sys.stdin.buffer, mode="r|").extractall(folder, numeric_owner=True, **options)
print(folder)
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModalSandboxConfig:
    """The settings of one profile's sandboxes, with the names and defaults of Atropos and Hermes. Times are in seconds;
    `memory` is in megabytes.

    The backend tries to keep `min_sandboxes` running, and never runs more than `max_sandboxes`. Sandboxes above the
    minimum end after `idle_timeout` without slots. `secrets` are names of Modal secrets. The secrets' variables and
    `env_vars` are in the environment of every command, unless the slot's image is a path. Raises `ConfigError` for
    invalid numbers of sandboxes or slots, and for an invalid `idle_timeout` or `max_lifetime`.
    """

    name: str = "default"
    app_name: str | None = None
    image: str = "python:3.11"
    gpu: str | None = None
    cpu: float = 1.0
    memory: int = 2048
    slots_per_sandbox: int = 10
    min_sandboxes: int = 1
    max_sandboxes: int = 5
    idle_timeout: int = 120
    max_lifetime: int = 3600
    acquire_timeout_s: float = 60.0
    execution_timeout_s: float = 30.0
    secrets: list[str] = field(default_factory=list)
    env_vars: dict[str, str] = field(default_factory=dict)
    workspace_base: str = "/data"
    """This setting exists only for compatibility and has no effect: every slot has its workspace at /workspace."""

    def __post_init__(self) -> None:
        if self.workspace_base != "/data":
            _log.warning("modal profile %s: workspace_base has no effect: workspaces are at /workspace", self.name)
        if not 0 <= self.min_sandboxes <= self.max_sandboxes or self.max_sandboxes < 1 or self.slots_per_sandbox < 1:
            raise ConfigError(
                f"modal profile {self.name}: max_sandboxes and slots_per_sandbox must be at least 1, and min_sandboxes "
                "must be from 0 to max_sandboxes"
            )
        if self.idle_timeout < 1 or not 1 <= self.max_lifetime <= _MOST_LIFETIME_S:
            raise ConfigError(
                f"modal profile {self.name}: idle_timeout must be at least 1 s, and max_lifetime from 1 to "
                f"{_MOST_LIFETIME_S} s"
            )

    def with_app_name(self, app_name: str) -> ModalSandboxConfig:
        """Return the same settings with a different app name."""
        return replace(self, app_name=app_name)

    def get_app_name(self) -> str:
        """Return the name of the Modal app for these sandboxes. This is `app_name` if it is set. Otherwise, it is
        `DEFAULT_APP` for the default profile, and `DEFAULT_APP`, a hyphen and the profile's name for other profiles."""
        if self.app_name is not None:
            return self.app_name
        return DEFAULT_APP if self.name == "default" else f"{DEFAULT_APP}-{self.name}"

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, JSON]) -> ModalSandboxConfig:
        """Return the settings of one profile in a profiles file. A key whose value is None is ignored. Raises
        `ConfigError` for an unknown key or a value of the wrong type."""
        found: dict[str, JSON] = {}
        known = {each.name: str(each.type) for each in fields(cls)}
        for key, value in data.items():
            if key not in known:
                raise ConfigError(f"modal profile {name}: unknown setting {key!r}; known are {', '.join(known)}")
            if value is not None:
                found[key] = _typed(f"modal profile {name}: {key}", known[key], value)
        return cls(**{"name": name, **found})

    @classmethod
    def from_env(cls, profile_name: str = "default", environ: Mapping[str, str] | None = None) -> ModalSandboxConfig:
        """Return the settings from environment variables. Each setting comes from the variable
        ATROPOS_MODAL_PROFILE_<NAME>_<SETTING> or, if that is not set, from ATROPOS_MODAL_<SETTING>, for example
        ATROPOS_MODAL_IMAGE. The variable's name may leave out the `_S` at the end of a setting. `environ` defaults to
        this process's environment."""
        environ = os.environ if environ is None else environ
        own = f"ATROPOS_MODAL_PROFILE_{profile_name.upper().replace('-', '_')}_"
        found: dict[str, JSON] = {}
        for each in fields(cls):
            name = each.name.upper()
            for variable in (own + name, own + name.removesuffix("_S"), *(f"ATROPOS_MODAL_{name}",
                             f"ATROPOS_MODAL_{name.removesuffix('_S')}")):  # fmt: skip
                if each.name != "name" and environ.get(variable):
                    found[each.name] = environ[variable]
                    break
        return cls.from_dict(profile_name, found)

    @classmethod
    def from_agent_env_config(cls, config: JSON) -> ModalSandboxConfig:
        """Return the settings from the `modal_*` fields of an environment's configuration."""
        given = {each.name: getattr(config, f"modal_{each.name.removesuffix('_s')}", None) for each in fields(cls)}
        return cls.from_dict("default", {key: value for key, value in given.items() if value is not None})

    @classmethod
    def load_profiles(
        cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None
    ) -> dict[str, ModalSandboxConfig]:
        """Return the profiles by name. They come from a YAML file with the key `profiles` (at `path`, or at
        ATROPOS_MODAL_PROFILES_FILE), and from the variables of each profile that ATROPOS_MODAL_PROFILES lists (see
        `from_env`). If a profile is in both, the file's profile is used. The profile `default` always exists."""
        environ = os.environ if environ is None else environ
        path = path or environ.get("ATROPOS_MODAL_PROFILES_FILE")
        found: dict[str, ModalSandboxConfig] = {}
        if path:
            try:
                content = yaml.safe_load(Path(path).read_text())
                profiles = content["profiles"].items()
            except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} is not a YAML file of Modal profiles with the key `profiles`: {error}"
                ) from None
            found |= {name: cls.from_dict(name, data or {}) for name, data in profiles}
        names = [name.strip() for name in environ.get("ATROPOS_MODAL_PROFILES", "").split(",")]
        found |= {name: cls.from_env(name, environ) for name in names if name and name not in found}
        found.setdefault("default", cls.from_env("default", environ))
        return found


class ModalBackend(RemoteBackend):
    """Slots in Modal sandboxes.

    `rollout_s` is the maximum time in seconds for which a rollout may hold a slot, not counting grading; if it is None,
    a slot may start in any sandbox. `rung` and `require` mean the same as in `ServerBackend`.
    """

    name = "modal"
    image_kinds = ("name", "path")

    def __init__(
        self,
        config: ModalSandboxConfig | None = None,
        *,
        rollout_s: float | None = None,
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        self.config = config = config or ModalSandboxConfig()
        super().__init__(
            image=config.image,
            places=config.max_sandboxes,
            slots_per_place=config.slots_per_sandbox,
            rung=rung,
            require=require,
        )
        self.rollout_s = 0.0 if rollout_s is None else rollout_s + _GRADING_S
        if self.rollout_s > config.max_lifetime:
            raise ConfigError(
                f"a rollout may hold its slot for {self.rollout_s:g} s, grading included, but sandboxes live only "
                f"{config.max_lifetime} s: raise modal_max_lifetime, or lower worker_timeout"
            )
        self.images = ImageStore()
        """Unpacks images that are directories or tar files on this machine."""
        self._changed = asyncio.Condition()
        self._keeping: asyncio.Task[None] | None = None
        self._app: modal.App | None = None

    @classmethod
    def from_config(cls, config: JSON) -> ModalBackend:
        """Return the backend for the settings of a run. If the run limits the time of a rollout and does not set the
        lifetime of sandboxes, the lifetime is made long enough for a rollout."""
        rung, require = levels(config.isolation, config.require_sandbox)
        wanted = replace(ModalSandboxConfig.from_agent_env_config(config), acquire_timeout_s=config.modal_wait_s)
        rollout_s = config.worker_timeout if config.worker_timeout > 0 else None
        if rollout_s is not None and "modal_max_lifetime" not in config.model_fields_set:
            needed = min(_MOST_LIFETIME_S, 2 * int(rollout_s + _GRADING_S))
            wanted = replace(wanted, max_lifetime=max(wanted.max_lifetime, needed))
        return cls(wanted, rollout_s=rollout_s, rung=rung, require=require)

    @property
    def credentials(self) -> str:
        token = load_sdk().config.config.get("token_id")
        return f"token {token[:6]}…" if token else "no token"

    async def check(self, host: str) -> None:
        sdk = load_sdk()
        name = self.config.get_app_name()
        try:
            self._app = await _with_timeout(_CHECK_S, sdk.App.lookup.aio(name, create_if_missing=True))
            for secret in self.config.secrets:
                await _with_timeout(_CHECK_S, sdk.Secret.from_name(secret).hydrate.aio())
            await self._end_leftovers()
        except sdk.exception.AuthError as error:
            raise ConfigError(
                "Modal does not accept the credentials, or there are none: set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, "
                f"or run `modal token set`. Modal reports: {error}"
            ) from None
        except sdk.exception.NotFoundError as error:
            raise ConfigError(f"Modal has no such secret: {error}. Create it, or change modal_secrets") from None
        except (sdk.exception.Error, OSError) as error:
            raise ConfigError(
                f"Modal does not answer: {_error_text(error)}. Check the connection and MODAL_SERVER_URL"
            ) from None

    async def _end_leftovers(self) -> None:
        """End the sandboxes whose owner was a process on this machine that no longer runs."""
        sdk = load_sdk()
        async for sandbox in sdk.Sandbox.list.aio(app_id=self._app_id, tags={"palaestra_host": this_host()}):
            process = (await sandbox.get_tags.aio()).get("palaestra_process", "")
            if process and not is_alive(process):
                _log.warning("ending the sandbox %s, because the process that owned it is gone", sandbox.object_id)
                await sandbox.terminate.aio()

    @property
    def _app_id(self) -> str:
        assert self._app is not None
        assert self._app.app_id is not None
        return self._app.app_id

    async def start(self) -> None:
        if self._started:
            return
        await super().start()
        try:
            await self._fill()
        except BaseException:
            await self.aclose()
            raise
        self._keeping = asyncio.create_task(self._keep_running())

    async def aclose(self) -> None:
        keeping, self._keeping = self._keeping, None
        await end_tasks(keeping)
        await super().aclose()
        await self.images.aclose()

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        return super().place_spec(spec if not is_path(spec.image) else replace(spec, image=None))

    def make_place(self, spec: PlaceSpec, number: int, rung: Rung | None) -> Place:
        return ModalPlace(self, spec, number, rung=rung, require=self._required)

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        """Return a new slot. Waits while `max_sandboxes` sandboxes run and none of them has room. Raises
        `AcquireTimeout` after `acquire_timeout_s` seconds."""
        try:
            return await super().create(spec, trajectory_id, snapshot)
        finally:
            await self._notify()

    async def _choose(self, spec: SlotSpec, without: Collection[str] = ()) -> Place:
        wanted = self.place_spec(spec)
        try:
            async with asyncio.timeout(self.config.acquire_timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._is_possible(wanted))
                if self._places.with_room(wanted) is None and len(self._places) >= self._most:
                    number = next(number for number, place in self._places.by_number.items() if place.idle)
                    await self._places.end(number)
                return await super()._choose(spec, without)
        except TimeoutError:
            raise AcquireTimeout(
                f"no Modal sandbox has had room for {self.config.acquire_timeout_s:g} s: {len(self._places)} of "
                f"{self._most} sandboxes are running; raise modal_max_sandboxes or modal_acquire_timeout"
            ) from None

    def _is_possible(self, wanted: PlaceSpec) -> bool:
        if self._places.with_room(wanted) is not None or len(self._places) < self._most:
            return True
        return any(place.idle for place in self._places.by_number.values())

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        try:
            return await super().seal(slot, view)
        finally:
            await self._notify()

    async def destroy(self, slot: Slot) -> None:
        try:
            await super().destroy(slot)
        finally:
            await self._notify()

    async def forget(self, snapshot: Snapshot) -> None:
        try:
            await super().forget(snapshot)
        finally:
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _keep_running(self) -> None:
        """Keep `min_sandboxes` running, and end other sandboxes that have been idle for more than `idle_timeout`
        seconds."""
        while True:
            await asyncio.sleep(min(15.0, self.config.idle_timeout / 4))
            await self._tidy()
            await self._fill()
            await self._notify()

    async def _fill(self) -> None:
        """Start sandboxes with the configured image until `min_sandboxes` run. If a sandbox fails to start, the failure
        is only logged."""
        missing = self.config.min_sandboxes - len(self._places)
        await asyncio.gather(*(self._start_place() for _ in range(missing)))

    async def _start_place(self) -> None:
        place = self._add_place(self.place_spec(SlotSpec()))
        place.starting += 1
        try:
            await place.open(self.gate)
        except SandboxError as error:
            _log.warning("modal: there are fewer sandboxes than min_sandboxes: %s", error)
        finally:
            place.starting -= 1
            await self._tidy()

    def _is_spare(self, place: Place) -> bool:
        assert isinstance(place, ModalPlace)
        if super()._is_spare(place) or not place.takes_slots:
            return True
        return len(self._places) > self.config.min_sandboxes and place.idle_for_s > self.config.idle_timeout

    async def _tidy(self) -> None:
        for place in self._places.by_number.values():
            assert isinstance(place, ModalPlace)
            place.look()
        await super()._tidy()

    async def make_sandbox(self, spec: PlaceSpec) -> modal.Sandbox:
        """Return a new sandbox with the settings `spec`. Retries for up to `acquire_timeout_s` seconds while Modal has
        no capacity. Raises `SandboxError`."""
        sdk = load_sdk()
        config = self.config
        deadline = time.monotonic() + config.acquire_timeout_s
        assert spec.image is not None
        for number in itertools.count():
            creating = sdk.Sandbox.create.aio(
                app=self._app,
                image=sdk.Image.from_registry(spec.image),
                tags={"palaestra_host": this_host(), "palaestra_process": process_name(os.getpid())},
                env=dict(config.env_vars),
                secrets=[sdk.Secret.from_name(name) for name in config.secrets],
                timeout=config.max_lifetime,
                idle_timeout=min(config.idle_timeout, config.max_lifetime),
                gpu=config.gpu,
                cpu=config.cpu,
                memory=config.memory,
                block_network=not spec.network,
            )
            try:
                return await _created(creating)
            except sdk.exception.ResourceExhaustedError as error:
                pause = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2**number)
                if time.monotonic() + pause > deadline:
                    raise SandboxError(f"Modal has no capacity for another sandbox: {_error_text(error)}") from None
                await asyncio.sleep(max(pause, min(await self.gate.throttled(), deadline - time.monotonic())))
            except (sdk.exception.Error, OSError) as error:
                raise SandboxError(f"Modal cannot create a sandbox from {spec.image}: {_error_text(error)}") from None
        raise AssertionError


class ModalPlace(Place):
    """One sandbox, and the slot server in it."""

    _backend: ModalBackend

    def __init__(
        self, backend: ModalBackend, spec: PlaceSpec, number: int, *, rung: Rung | None, require: Rung | None
    ) -> None:
        super().__init__(backend, spec, number, rung=rung, require=require)
        self._sandbox: modal.Sandbox | None = None
        self._variables: dict[str, str] = {}  # the sandbox's environment, which commands inherit
        self._roots: dict[str, asyncio.Task[str]] = {}  # directories in the sandbox, by path of the image
        self._trying = False
        self._ends_at = math.inf
        self._idle_since: float | None = None

    @property
    def takes_slots(self) -> bool:
        return time.monotonic() + self._backend.rollout_s < self._ends_at

    @property
    def idle_for_s(self) -> float:
        """Seconds for which the place has been idle, according to the calls of `look`."""
        return 0.0 if self._idle_since is None else time.monotonic() - self._idle_since

    def look(self) -> None:
        """Record whether the place is idle."""
        if not self.idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()

    async def start(self) -> None:
        async with self._starting:
            if self._server is not None:
                return
            try:
                await self._new_sandbox()
                await ServerBackend.start(self)
            except BaseException:
                await self.aclose()
                raise

    async def attempt(self, rung: Rung) -> str | None:
        self._trying = True  # the next level is tried in the same sandbox
        try:
            return await super().attempt(rung)
        finally:
            self._trying = False

    async def aclose(self) -> None:
        await super().aclose()
        sandbox = self._sandbox
        if sandbox is not None and not self._trying:
            self._sandbox = None
            await wait_uninterrupted(asyncio.ensure_future(_terminate(sandbox)), _CLOSE_S)

    async def _new_sandbox(self) -> None:
        self._ends_at = time.monotonic() + self._backend.config.max_lifetime
        self._roots.clear()
        self._sandbox = sandbox = await self._backend.make_sandbox(self.spec)
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        ours = [mount.target for mount in self.spec.mounts if is_interpreter(mount)]
        found = await _call_sandbox(_START_S, _output_of(sandbox, _PREPARE, _VERSION, python, *ours))
        variables, present = json.loads(found)
        self._variables = {
            name: value
            for name, value in variables.items()
            if name not in _OWN_VARIABLES and not name.startswith("MODAL_")
        }
        for mount in self.spec.mounts:
            if mount.target not in present:
                skipped = _NOT_COPIED if is_interpreter(mount) else ()
                await _call_sandbox(_COPY_S, _copy_in(sandbox, mount.source, mount.target, skipped))

    async def _start_server(self, rung: Rung) -> None:
        if self._server is not None:  # the server has died, so the sandbox is dead too, or not worth keeping
            if self._sandbox is not None:
                await _terminate(self._sandbox)
            await self._new_sandbox()
        assert self._sandbox is not None
        self._server = await ModalClient.start_in(
            self._sandbox,
            float(self._backend.config.idle_timeout),
            rung,
            {"prefix": "", "first_epoch": self._last_epoch + 1},
            self._on_lost,
        )

    async def _place(self, spec: SlotSpec) -> dict[str, JSON]:
        fields = await super()._place(spec)
        if is_path(spec.image):
            return {**fields, "image": await self._root(spec.image)}
        own = environment(spec, self._variables.get("PATH", SYSTEM_PATH))
        return {**fields, "env": {**self._variables, **own}}

    async def _root(self, image: str) -> str:
        """Return the directory in the sandbox to which an image on this machine is copied on first use."""

        async def copy() -> str:
            folder = await self._backend.images.directory(image)
            assert self._sandbox is not None
            return await _call_sandbox(_COPY_S, _copy_in(self._sandbox, folder))

        copying = self._roots.get(image)
        if copying is None or (copying.done() and (copying.cancelled() or copying.exception() is not None)):
            copying = self._roots[image] = asyncio.create_task(copy())
        return await asyncio.shield(copying)


class ModalClient(DistantClient):
    """The client of a slot server that runs as a command in a sandbox."""

    def __init__(self, on_lost: OnLost, sandbox: modal.Sandbox, silence_s: float) -> None:
        super().__init__(on_lost)
        self._sandbox, self._silence_s = sandbox, silence_s
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start_in(
        cls, sandbox: modal.Sandbox, silence_s: float, rung: Rung, settings: Fields, on_lost: OnLost
    ) -> Self:
        """Start a server in a sandbox. The server ends when its client has been silent for `silence_s` seconds. Raises
        `SandboxError`."""
        client = cls(on_lost, sandbox, silence_s)
        try:
            async with asyncio.timeout(_START_S):
                await client._launch(rung.label, settings)
        except TimeoutError:
            raise SlotLost(f"Modal's sandbox has not started the slot server in {_START_S:g} s") from None
        client.beat(silence_s)
        return client

    async def _spawn(self, stream: socket.socket, rung: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        process = await _call_sandbox(_START_S, self._sandbox.exec.aio(*call_of(rung, self._silence_s), text=False))
        ours = stream.dup()
        ours.setblocking(False)
        pumps = (self._send_all(ours, process), self._receive_all(ours, process))
        self._tasks = [asyncio.create_task(pump) for pump in pumps]

    async def _deliver(self, stream: socket.socket) -> None:
        await send_server(stream)

    async def _send_all(self, ours: socket.socket, process: modal.container_process.ContainerProcess[bytes]) -> None:
        """Forward the client's bytes to the server as they arrive."""
        try:
            while piece := await self.loop.sock_recv(ours, _PIECE):
                process.stdin.write(piece)
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
        except Exception as error:
            self._end(SlotLost(f"the connection to Modal's sandbox is gone: {_error_text(error)}"))

    async def _receive_all(self, ours: socket.socket, process: modal.container_process.ContainerProcess[bytes]) -> None:
        """Forward the server's bytes until the server ends."""
        with ours:
            try:
                async for piece in process.stdout:
                    await self.loop.sock_sendall(ours, piece)
                errors = await _with_timeout(_CALL_S, process.stderr.read.aio())
                if self._log is not None and not self._log.closed:
                    self._log.write(errors)
                    self._log.flush()
            except Exception as error:
                self._end(SlotLost(f"Modal's sandbox has ended: {_error_text(error)}"))

    async def aclose(self) -> None:
        self._end()
        await super().aclose()
        tasks, self._tasks = self._tasks, []
        await end_tasks(*tasks)


def load_sdk() -> Any:  # The type is the module `modal`, whose functions have attributes that its types do not declare.
    """Return Modal's client library, the module `modal`. Raises `ConfigError` if it is not installed."""
    try:
        import modal
        import modal.exception
    except ImportError:
        raise ConfigError(f"the backend modal needs Modal's client: {install_command('modal')}") from None
    return modal


async def _with_timeout(limit_s: float, work: Awaitable[T]) -> T:
    """Return the result of a call. Raises OSError if the call takes longer than `limit_s` seconds."""
    try:
        return await asyncio.wait_for(work, limit_s)
    except TimeoutError:
        raise OSError(f"no answer in {limit_s:g} s") from None


async def _call_sandbox(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a call to a sandbox. Raises `SlotLost` if the call fails."""
    try:
        return await _with_timeout(limit_s, work)
    except Exception as error:  # the client also raises errors of the libraries it uses
        raise SlotLost(f"Modal's sandbox cannot run a command: {_error_text(error)}") from None


async def _created(creating: Coroutine[Any, Any, modal.Sandbox]) -> modal.Sandbox:
    """Wait for a new sandbox and return it. If the caller stops waiting, the sandbox is ended."""
    task = asyncio.ensure_future(creating)
    try:
        return await _with_timeout(_CREATE_S, asyncio.shield(task))
    except BaseException:
        task.add_done_callback(_end_unwanted)
        raise


_ending: set[asyncio.Task[None]] = set()


def _end_unwanted(creating: asyncio.Future[modal.Sandbox]) -> None:
    if not creating.cancelled() and creating.exception() is None:
        task = asyncio.ensure_future(_terminate(creating.result()))
        _ending.add(task)
        task.add_done_callback(_ending.discard)


async def _terminate(sandbox: modal.Sandbox) -> None:
    sdk = load_sdk()
    try:
        await _with_timeout(_CLOSE_S, sandbox.terminate.aio())
    except (sdk.exception.Error, OSError) as error:
        _log.warning(
            "the sandbox %s could not be ended; it ends at its deadline: %s", sandbox.object_id, _error_text(error)
        )


async def _output_of(sandbox: modal.Sandbox, program: str, *arguments: str) -> str:
    process = await sandbox.exec.aio("python3", "-I", "-S", "-c", program, *arguments)
    output, errors = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
    if await process.wait.aio() != 0:
        raise OSError(f"python3 does not run in the sandbox: {without_middle(errors.strip(), 500)}")
    return str(output)


async def _copy_in(sandbox: modal.Sandbox, source: str, target: str = "", skipped: Collection[str] = ()) -> str:
    """Copy a directory on this machine into the directory `target` of the sandbox, without the directories named in
    `skipped`. If `target` is empty, a new directory is made. Returns the path of the target."""
    process = await sandbox.exec.aio("python3", "-I", "-S", "-c", _UNPACK, target)
    async for packed in _packed(source, skipped):
        for start in range(0, len(packed), _PIECE):
            process.stdin.write(packed[start : start + _PIECE])
            await process.stdin.drain.aio()
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    output, errors = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
    if await process.wait.aio() != 0:
        raise OSError(f"{source} cannot be copied to {target or 'the sandbox'}: {without_middle(errors.strip(), 500)}")
    return str(output).strip()


async def _packed(source: str, skipped: Collection[str]) -> AsyncIterator[bytes]:
    """Yield a tar file of the directory in pieces of `_ENTRIES` entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w|", bufsize=_PIECE) as files:
        paths = await asyncio.to_thread(lambda: list(_walk(source, skipped)))

        def add(some: Sequence[str]) -> bytes:
            for path in some:
                files.add(path, os.path.relpath(path, source), recursive=False)
            packed = buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
            return packed

        for start in range(0, len(paths), _ENTRIES):
            yield await asyncio.to_thread(add, paths[start : start + _ENTRIES])
    yield buffer.getvalue()


def _walk(source: str, skipped: Collection[str]) -> Iterator[str]:
    """Yield the directory and everything in it, parents first, without the directories named in `skipped`."""
    yield source
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if name not in skipped]
        yield from (os.path.join(folder, name) for name in (*folders, *files))


def is_interpreter(mount: Mount) -> bool:
    """Return whether a mount is the directory of this machine's Python, whose packages tools do not use."""
    return bool(os.path.realpath(mount.source) == os.path.realpath(sys.base_prefix))


def is_path(image: str | None) -> TypeGuard[str]:
    """Return whether an image is a directory or a file on this machine, not a name."""
    return image is not None and reference.is_path(image)


def _error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _typed(what: str, declared: str, value: JSON) -> JSON:
    """Convert a value from a file or a variable to the type of its field. Raises `ConfigError` if it cannot be
    converted."""
    try:
        if declared.startswith("list"):
            return (
                [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else list(value)
            )
        if declared.startswith("dict"):
            pairs = (
                (pair.partition("=") for pair in value.split(";") if pair.strip()) if isinstance(value, str) else None
            )
            if pairs is None:
                return {str(key): str(each) for key, each in value.items()}
            found = {key.strip(): each.strip() for key, equals, each in pairs if equals}
            if len(found) != len([pair for pair in value.split(";") if pair.strip()]):
                raise ValueError(value)
            return found
        return {"int": int, "float": float}.get(declared, str)(value)
    except (TypeError, ValueError, AttributeError):
        if declared.startswith("dict"):  # its values may be secrets
            raise ConfigError(f"{what} must have the form NAME=VALUE;NAME=VALUE") from None
        raise ConfigError(f"{what} must be of the type {declared}, not {value!r}") from None
