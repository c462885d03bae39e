"""The two forms of an environment behind one face: what `running.py` needs to know of either."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from palaestra.core.errors import ConfigError, PalaestraError
from palaestra.core.types import JSON
from palaestra.core.user_code import place, told
from palaestra.envs.adapters.collected_adapter import collects
from palaestra.envs.api.base_env import BaseEnv
from palaestra.envs.api.function_env import FunctionEnvConfig, FunctionForm
from palaestra.envs.api.hermes_env import HermesAgentBaseEnv
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.inference.chat_server import ChatServer
from palaestra.inference.config import APIServerConfig, ServerBaseline
from palaestra.rollouts.environment import Environment


class Form(Protocol):
    """Something that can be run from a command line. `command` is used when the line names none."""

    name: str
    about: str
    command: str | None

    def config_type(self) -> type[BaseEnvConfig]: ...

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        """What the environment itself sets; None where it sets nothing."""
        ...

    def check_values(self) -> Mapping[str, JSON]:
        """Settings with which a check needs nothing else; left aside where a user says one of them."""
        ...

    def build(self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer) -> Environment: ...


class FunctionFace:
    """A function environment; `process` is what its script does when nothing else is said."""

    command: str | None = "process"

    def __init__(self, form: FunctionForm) -> None:
        self.form = form
        self.name = form.name
        self.about = inspect.getdoc(form.source) or ""
        self._config_type = form.config_type()

    def config_type(self) -> type[BaseEnvConfig]:
        return self._config_type

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        return None, ()

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer) -> Environment:
        assert isinstance(config, FunctionEnvConfig)
        return self.form.build(config)


class ClassFace:
    """A subclass of `BaseEnv`, most often of `HermesAgentBaseEnv` or `AgentEnv`."""

    command: str | None = None

    def __init__(self, cls: type[BaseEnv]) -> None:
        self.cls = cls
        self.name = cls.name or cls.__name__
        self.about = inspect.getdoc(cls) or ""

    def config_type(self) -> type[BaseEnvConfig]:
        return self.cls.env_config_cls

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        """What `config_init` gives: a configuration and a list of servers, one server, or what all have in common."""
        name, wanted = self.cls.__name__, self.cls.env_config_cls
        with _asking(f"{name}.config_init"):
            given: JSON = self.cls.config_init()
        match given:
            case (BaseEnvConfig() as config, (ServerBaseline() | [*_]) as said):
                servers = [said] if isinstance(said, ServerBaseline) else list(said)
                if not issubclass(wanted, type(config)):
                    own = type(config).__name__
                    raise ConfigError(f"{name}.config_init gives {own}: say env_config_cls = {own} in the class")
                if all(isinstance(each, ServerBaseline) for each in servers):
                    return config, servers
        must = f"({wanted.__name__}, [APIServerConfig, …])"
        raise ConfigError(f"{name}.config_init must give {must}, and gave {given!r:.200}")

    def check_values(self) -> Mapping[str, JSON]:
        return self.cls.check_values

    def build(self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer) -> Environment:
        with _asking(f"{self.cls.__name__}(config, servers)"):
            inner = self.cls(config, list(servers))
        inner._server = server
        return inner.as_environment()


@contextmanager
def _asking(doing: str) -> Iterator[None]:
    """Say what of a class failed, and where, if it does. Raises `ConfigError`."""
    try:
        yield
    except PalaestraError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{doing} failed with {told(error)}{place(error)}") from error


def form_of(environment: object) -> Form:
    """The form of what a file offers. Raises `ConfigError` for anything that is no environment."""
    if isinstance(environment, FunctionForm):
        return FunctionFace(environment)
    if inspect.isclass(environment) and issubclass(environment, BaseEnv):
        missing = sorted(getattr(environment, "__abstractmethods__", ()))
        if not issubclass(environment, HermesAgentBaseEnv) and not collects(environment):
            missing.append("collect_trajectory or collect_trajectories")
        if missing:
            raise ConfigError(f"{environment.__name__} lacks {', '.join(missing)}")
        return ClassFace(environment)
    raise ConfigError(
        f"{environment!r} is not an environment: it must be a function with @environment or a subclass of "
        f"HermesAgentBaseEnv, AgentEnv or BaseEnv"
    )
