"""The class names under which existing scripts know the environments of the suites, such as `SweSmithOracleEnv`.

A script runs such a class, or subclasses it to change its name and settings. `SuiteEnv` adapts all of them: the suite's
environment, which an entry point names, does the work. The classes are made on first use, so that a script loads only
the suite that it names.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar, cast

from palaestra.envs.discovery import GROUP
from palaestra.rollouts.spec import Projection
from palaestra_contract.base_env import own_names
from palaestra_contract.hermes_env import HermesAgentBaseEnv
from palaestra_contract.scored_data import PLACEHOLDER, placeholder_tokens
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import Score
from palaestra_tokens.ledger.records import TokenRow

if TYPE_CHECKING:
    from palaestra.envs.api.listed_environment import ListedEnvironment
    from palaestra.envs.run.evaluate import EvaluatedEnvironment
    from palaestra.rollouts.environment import Environment
    from palaestra.rollouts.rollout import Rollout

_ENVIRONMENTS = {
    "EndlessTerminalsEnv": "endless_terminals",
    "HermesSweEnv": "hermes_swe",
    "SweSmithOracleEnv": "swe_smith_oracle",
    "TerminalBench2EvalEnv": "terminalbench_2",
}


class SuiteEnv(HermesAgentBaseEnv):
    """A class of existing scripts whose work an environment of a suite does."""

    suite: ClassVar[type[ListedEnvironment]]

    def as_environment(self) -> EvaluatedEnvironment:
        """Return the suite's environment with this class's name and settings. Raises `ConfigError` if the class
        overrides a hook, which the suite's environment would not call."""
        own, suite = type(self), self.suite
        hooks = {name for name in own_names(own) if inspect.isfunction(getattr(HermesAgentBaseEnv, name, None))}
        if hooks := hooks - {"__init__"}:
            raise ConfigError(
                f"{own.__name__} overrides {', '.join(sorted(hooks))}, which {suite.__name__} never calls; subclass "
                f"{suite.__module__}.{suite.__name__} and override its methods, or subclass HermesAgentBaseEnv"
            )
        parts = {"name": self.name, "official_name": self.official_name, "project": _placeholder_row}
        environment: EvaluatedEnvironment = type(own.__name__, (suite,), parts)(self.config)
        return environment


def _placeholder_row(environment: Environment, rollout: Rollout, score: Score | None) -> Projection:
    """Give a rollout whose server returned no tokens a row of placeholders, as a class of existing scripts does."""
    result = rollout.result
    if score is None or result is None or (result.managed_state or {}).get("nodes"):
        return Projection()
    tokens = placeholder_tokens(result.messages)
    return Projection(TokenRow(tokens=tokens, masks=[-100] * len(tokens), source=PLACEHOLDER))


SuiteEnv.__abstractmethods__ = frozenset()  # the suite's environment has its own in place of these methods

if TYPE_CHECKING:

    class EndlessTerminalsEnv(SuiteEnv): ...

    class HermesSweEnv(SuiteEnv): ...

    class SweSmithOracleEnv(SuiteEnv): ...

    class TerminalBench2EvalEnv(SuiteEnv): ...


def __getattr__(name: str) -> type[SuiteEnv]:
    if name not in _ENVIRONMENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    entry = _ENVIRONMENTS[name]
    suite = cast("type[ListedEnvironment]", plugins.load_named(GROUP, entry, f"the environment {entry}"))
    parts = {each: getattr(suite, each) for each in ("name", "official_name", "check_values", "__doc__")}
    parts |= {"suite": suite, "env_config_cls": suite.config_class, "__module__": __name__}
    made = globals()[name] = type(name, (SuiteEnv,), parts)
    return made
