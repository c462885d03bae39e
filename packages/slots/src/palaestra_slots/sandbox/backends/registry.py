"""Looks up backends by name: those of this package, and those that other installed packages provide. Another package
registers its backend as an entry point:

    [project.entry-points."palaestra.backends"]
    my_cloud = "my_package.cloud:CloudBackend.from_config"

The entry point is called with a run's configuration (`HermesAgentEnvConfig`) and returns a `Backend` that has not been
started. The configuration's `backend_options` holds the settings that only such a backend reads. Other packages cannot
replace a backend of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from palaestra_slots.core.config import local_path, nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra_slots.sandbox.backends.spread import BackendName
    from palaestra_slots.sandbox.slot import Backend

GROUP = "palaestra.backends"
"""The entry-point group of backends outside this package."""

BUILTIN: Mapping[str, str] = {
    "local": "palaestra_slots.sandbox.backends.local:LocalBackend.from_config",
    "docker": "palaestra_slots.sandbox.backends.docker:DockerBackend.from_config",
    "docker_direct": "palaestra_slots.sandbox.backends.docker:DockerBackend.from_config",
    "singularity": "palaestra_slots.sandbox.backends.singularity:SingularityBackend.from_config",
    "nomad": "",
    "ssh": "palaestra_slots.sandbox.backends.ssh:SSHBackend.from_config",
    "slurm": "palaestra_slots.sandbox.backends.slurm:SlurmBackend.from_config",
    "kubernetes": "",
    "modal": "",
}
"""The functions that make the backends, by name. Those without one are in extensions, which register them as other
packages do."""


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends. Our own backends come first."""
    return (*BUILTIN, *(name for name in plugins.installed(GROUP) if name not in BUILTIN))


def backend_words(names: str) -> list[str]:
    """Return the backend names in a setting, without their hosts."""
    return [name for name, _ in _with_hosts(names)] or [names]


def _with_hosts(names: str) -> Iterator[tuple[str, bool]]:
    """Yield each backend name in a setting, and whether the setting lists its hosts."""
    for word in names.split():
        name, _, hosts = word.partition("=")
        yield name, hosts not in ("", "overflow")


_CONTAINERS = ("docker", "singularity", "nomad")
_READERS: Mapping[str, tuple[str, ...]] = {
    "docker_": ("docker",),
    "container_": ("docker",),
    "singularity_": ("singularity",),
    "ssh_": ("ssh",),
    "slurm_": ("slurm",),
    "kubernetes_": ("kubernetes",),
    "nomad_": ("nomad",),
    "modal_": ("modal",),
    **dict.fromkeys(("slots_per_container", "max_containers"), _CONTAINERS),
    **dict.fromkeys(("sandbox_job_id", "sandbox_image", "min_containers", "privileged", "driver"), ("nomad",)),
    **dict.fromkeys(("purge_job_on_start", "purge_job_on_shutdown"), ("nomad",)),
    **dict.fromkeys(("creates_per_s", "max_starting"), (*_CONTAINERS, "ssh", "slurm", "kubernetes", "modal")),
    "drain_file": ("docker", "ssh", "slurm", "kubernetes"),
    **dict.fromkeys(("host_ports", "keep_workspaces", "workspace_store"), ("local",)),
    "backend_options": (),
}
"""For each setting, or prefix of settings, that only some backends of this package read: the names of these
backends."""

_INSTEAD: Mapping[tuple[str, str], str] = {
    ("privileged", "docker"): "docker_privileged",
    ("sandbox_image", "docker"): "docker_image",
    ("sandbox_image", "singularity"): "singularity_image",
    ("sandbox_image", "modal"): "modal_image",
    ("sandbox_image", "kubernetes"): "kubernetes_image",
    ("slots_per_container", "kubernetes"): "kubernetes_slots_per_pod",
    ("max_containers", "kubernetes"): "kubernetes_pods",
    ("container_cpus", "kubernetes"): "kubernetes_cpus",
    ("container_memory", "kubernetes"): "kubernetes_memory",
    ("slots_per_container", "modal"): "modal_slots_per_sandbox",
    ("slots_per_container", "ssh"): "ssh_slots_per_host",
    ("slots_per_container", "slurm"): "slurm_slots_per_node",
    ("min_containers", "modal"): "modal_min_sandboxes",
    ("max_containers", "modal"): "modal_max_sandboxes",
}
"""For a setting and a backend that does not read it, the setting with the same purpose in that backend."""


class _Unread(NamedTuple):
    """Settings that their backend does not read while another setting has some value. `idle` gets the configuration and
    the names in the setting that names the backends; `why` is the middle of the message."""

    settings: tuple[str, ...]
    idle: Callable[[JSON, str], bool]
    why: str


_UNREAD: Sequence[_Unread] = (
    _Unread(
        ("workspace_store", "workspace_store_bytes"),
        lambda config, names: not config.keep_workspaces,
        "with keep_workspaces false: ",
    ),
    _Unread(("docker_hosts",), lambda config, names: _names_hosts(names, "docker"), "next to docker=HOSTS: "),
    _Unread(("ssh_hosts",), lambda config, names: _names_hosts(names, "ssh"), "next to ssh=HOSTS: "),
    _Unread(
        ("drain_file",),
        lambda config, names: not (
            {"ssh", "slurm"}.intersection(backend_words(names))
            or _names_hosts(names, "docker")
            or config.docker_hosts
            or getattr(config, "kubernetes_selector", None)
        ),
        "because no host has a name: set docker_hosts or kubernetes_selector, or ",
    ),
    _Unread(
        (
            "kubernetes_pods", "kubernetes_cpus", "kubernetes_memory", "kubernetes_disk", "kubernetes_start_s",
            "kubernetes_deadline_s", "kubernetes_pod_spec",
        ),
        lambda config, names: config.kubernetes_selector is not None,
        "with kubernetes_selector, because those pods exist already: ",
    ),
    _Unread(
        ("kubernetes_container",), lambda config, names: config.kubernetes_selector is None,
        "without kubernetes_selector: ",
    ),
    _Unread(("sandbox_image",), lambda config, names: config.driver == "raw_exec", "with the driver raw_exec: "),
    _Unread(
        ("nomad_ca_cert", "nomad_client_cert", "nomad_client_key", "nomad_tls_server_name"),
        lambda config, names: not config.nomad_address.startswith("https://"),
        "unless nomad_address begins with https://: ",
    ),
    _Unread(
        ("nomad_client_key",), lambda config, names: config.nomad_client_cert is None, "without nomad_client_cert: "
    ),
    _Unread(
        ("modal_execution_timeout",), lambda config, names: len(names.split()) > 1,
        "with several backends: set terminal_timeout, or ",
    ),
)  # fmt: skip


def default_image(names: str, config: JSON) -> str | None:
    """Return Docker's image for tasks that name none; None for other backends."""
    return config.docker_image if "docker" in backend_words(names) else None


_ON_THIS_MACHINE = frozenset({"local", "singularity", "docker", "docker_direct"})
"""The backends whose slots are on this machine unless the setting names hosts."""


def uses_this_machine(names: str, config: JSON) -> bool:
    """Return whether one of the backends in `names` has slots on this machine."""
    for name, listed in _with_hosts(names):
        is_elsewhere = name.startswith("docker") and (listed or config.docker_hosts)
        if name in _ON_THIS_MACHINE and not is_elsewhere:
            return True
    return False


def _names_hosts(names: str, backend: str) -> bool:
    """Return whether the setting that names the backends also names the hosts of `backend`."""
    return any(name.removesuffix("_direct") == backend and listed for name, listed in _with_hosts(names))


def is_of_backends(setting: str) -> bool:
    """Return whether only some backends read this setting. Those of other packages begin with the backend's name."""
    return setting.startswith((*_READERS, *(f"{name}_" for name in backend_names())))


def require_read(names: str, settings: Iterable[str], config: JSON) -> None:
    """Raise `ConfigError` for a setting that none of the backends in `names` reads, or that has no effect there with
    the other settings in `config`. A backend of another package may read any setting."""
    # `docker_direct` and `docker` read the same settings: one is only another name for the other.
    used = {name.removesuffix("_direct") for name in backend_words(names)}
    if not used <= {name.removesuffix("_direct") for name in BUILTIN}:
        return
    for setting in settings:
        readers = next((_READERS[each] for each in _READERS if setting.startswith(each)), tuple(used))
        if used.isdisjoint(readers):
            others = (_INSTEAD[setting, name] for name in sorted(used) if (setting, name) in _INSTEAD)
            other = next(others, None)
            whose = f"the backend {' or '.join(readers)}" if readers else "a backend from another package"
            fix = "leave it out, or change tool_pool_mode" if other is None else f"set {other} instead"
            raise ConfigError(f"{setting} is a setting of {whose}, but the slots are in {' and '.join(used)}: {fix}")
        for unread in _UNREAD:
            if setting in unread.settings and unread.idle(config, names):
                raise ConfigError(f"{setting} has no effect {unread.why}leave it out")


_HOSTS = {"docker": "docker_hosts", "docker_direct": "docker_hosts", "ssh": "ssh_hosts"}
"""For each backend with hosts, the setting that lists them."""


def make_backend(names: str, config: JSON) -> Backend:
    """Return the backend that `names` selects, or for several names a backend that spreads slots over them
    (`spread.py`).

    Raises `ConfigError` for an unknown name, a package that cannot be loaded, and settings that the backend rejects.
    """
    if names == "local":
        return _load_backend(names, config)
    from palaestra_slots.sandbox.backends import spread  # a local run needs no part of this import

    wanted = spread.parse_names(names)
    if len(wanted) == 1:
        return _make_backend(wanted[0], config)
    own = [_make_backend(each, config) for each in wanted if not each.overflow]
    return spread.SpreadBackend(own, [_make_backend(each, config) for each in wanted if each.overflow])


def _make_backend(wanted: BackendName, config: JSON) -> Backend:
    from palaestra_slots.sandbox.backends.remote import RemoteBackend
    from palaestra_slots.sandbox.creation_gate import CreationGate

    name = wanted.name
    if wanted.hosts:
        if name not in _HOSTS:
            raise ConfigError(
                f"the backend {name} has no hosts: leave them out of tool_pool_mode, or use {' or '.join(_HOSTS)}"
            )
        config = config.model_copy(update={_HOSTS[name]: list(wanted.hosts)})
    backend = _load_backend(name, config)
    if isinstance(backend, RemoteBackend):
        backend.gate = CreationGate(name, per_s=config.creates_per_s, most=config.max_starting)
        backend.hosts.drain_file = None if config.drain_file is None else local_path(config.drain_file)
    return backend


def _load_backend(name: str, config: JSON) -> Backend:
    if reference := BUILTIN.get(name):
        from importlib.metadata import EntryPoint  # a slow import that a command line needs only if it has no mistake

        own: Callable[[JSON], Backend] = EntryPoint(name, reference, GROUP).load()
        return own(config)
    if name not in (known := backend_names()):
        raise ConfigError(f"unknown backend {name!r}.{nearest(name, known)} Available: {', '.join(known)}")
    make = cast("Callable[[JSON], Backend]", plugins.load_named(GROUP, name, f"the backend {name}"))
    try:
        return make(config)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        options = ", ".join(config.backend_options) or "none"
        raise ConfigError(f"the backend {name} rejects its settings (backend_options: {options}): {error}") from error
