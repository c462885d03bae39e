"""The backends by name: those of this package, and those that installed packages offer.

    [project.entry-points."palaestra.backends"]
    my_cloud = "my_package.cloud:CloudBackend.from_config"

An entry is called with the configuration of a run (`HermesAgentEnvConfig`) and returns a `Backend` that is not started.
`backend_options` of the configuration holds the settings that only such a backend knows. A package cannot replace a
backend of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import cast

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError
from palaestra.core.io import plugins
from palaestra.core.types import JSON
from palaestra.sandbox.slot import Backend

GROUP = "palaestra.backends"
"""The entry-point group of other packages' backends."""

_MODULES = "palaestra.sandbox.backends"

BUILTIN: Mapping[str, str] = {
    "local": f"{_MODULES}.local:LocalBackend.from_config",
    "docker": f"{_MODULES}.docker:DockerBackend.from_config",
    "singularity": f"{_MODULES}.singularity:SingularityBackend.from_config",
    "nomad": f"{_MODULES}.nomad:NomadBackend.from_config",
    "ssh": f"{_MODULES}.ssh:SSHBackend.from_config",
    "modal": f"{_MODULES}.modal:ModalBackend.from_config",
}
"""The entries of this package."""


def backend_names() -> tuple[str, ...]:
    """The names of all backends, this package's first."""
    return (*BUILTIN, *(name for name in plugins.installed(GROUP) if name not in BUILTIN))


def make_backend(name: str, config: JSON) -> Backend:
    """The backend of that name for a configuration. Raises `ConfigError` for an unknown name, a package that cannot be
    loaded, and settings that the backend refuses."""
    if name in BUILTIN:
        entry = EntryPoint(name, BUILTIN[name], GROUP)
    elif name in plugins.installed(GROUP):
        entry = plugins.installed(GROUP)[name]
    else:
        known = backend_names()
        raise ConfigError(f"there is no backend {name!r}.{nearest(name, known)} Available: {', '.join(known)}")
    make = cast("Callable[[JSON], Backend]", plugins.load(entry))
    return make(config)
