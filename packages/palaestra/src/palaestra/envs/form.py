"""The interface of every form of environment before a run: its name, its settings, and its construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from palaestra.envs.config.fields import BaseEnvConfig
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig, ServerBaseline

if TYPE_CHECKING:
    from palaestra.envs.run.evaluate import EvaluatedEnvironment
    from palaestra_tokens.chat_server import ChatServer


class Form(Protocol):
    """A form of environment that a command line can run. `command` is the default command. `reference` is the
    environment's reference for `envs.discovery`; empty if it has none."""

    name: str
    reference: str

    @property
    def kind(self) -> str:
        """`function`, or the name of the environment's class."""
        ...

    @property
    def about(self) -> str: ...

    @property
    def command(self) -> str | None: ...

    @property
    def bound(self) -> BaseEnvConfig | None:
        """The settings with which a function environment was called, as in `count_lines(n=3)`; otherwise None."""
        ...

    def config_type(self) -> type[BaseEnvConfig]: ...

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        """Return the environment's default settings (None if it has none) and its default servers."""
        ...

    def check_values(self) -> Mapping[str, JSON]:
        """Return settings that let a check run without further flags; ignored if the user sets one of them."""
        ...

    def build(
        self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer
    ) -> EvaluatedEnvironment: ...
