"""Opens the cluster that the setting `on` names. Each kind of cluster is an entry point, so this package needs none:

    [project.entry-points."palaestra.clusters"]
    my_grid = "my_package.grid:opened_grid"

The entry point is called with the words after `my_grid:` in the setting and a `ClusterRequest`, and returns an
asynchronous context manager whose value is a `Cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO, TypeAlias, cast

from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.form import Form
from palaestra.rollouts.spec import GroupPlayer
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.sandbox.slot import Rung
from palaestra_tokens.config import APIServerConfig

if TYPE_CHECKING:
    from palaestra.rollouts.counterfactual import Counterfactual

GROUP = "palaestra.clusters"
"""The group of entry points for clusters."""


class Cluster(GroupPlayer, Protocol):
    """The nodes that play a run's groups: their isolation level, and the number of their slots."""

    @property
    def rung(self) -> Rung: ...

    @property
    def slots(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """What the nodes need to know about a run. `stream` gets the table of nodes."""

    form: Form
    config: BaseEnvConfig
    servers: Sequence[APIServerConfig]
    stream: TextIO


OpenCluster: TypeAlias = Callable[[str, ClusterRequest], AbstractAsyncContextManager[Cluster]]


def check_elsewhere(config: BaseEnvConfig, *, in_process: bool, begins: Counterfactual | None) -> None:
    """Raise `ConfigError` for what only one machine can do yet."""
    unusable = {
        "a model in this process": in_process,
        "a counterfactual run": begins is not None,
        f"--agent {config.agent}": config.agent is not None,
        "--keep-workspaces": config.save_workspaces,
        "--env.otel_endpoint": config.otel_endpoint is not None,
        f"--env.world {config.world}": config.world in ("replay", "fill"),
    }
    if found := [what for what, is_set in unusable.items() if is_set]:
        raise ConfigError(f"{', '.join(found)} works on one machine only: leave out --on {config.on}")


def open_cluster(request: ClusterRequest) -> AbstractAsyncContextManager[Cluster]:
    """Return the cluster of a run, not yet opened. Raises `ConfigError` for an unknown kind of cluster."""
    kind, _, words = (request.config.on or "").partition(":")
    known = plugins.installed(GROUP)
    if kind not in known:
        raise ConfigError(f"no cluster is called {kind!r} (--on).{nearest(kind, known)} Known: {', '.join(known)}")
    return cast("OpenCluster", plugins.load(known[kind]))(words, request)
