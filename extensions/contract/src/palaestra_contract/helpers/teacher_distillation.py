"""`TeacherDistillationEnv`: the class that Atropos environments derive from to train on a teacher's probabilities.

Palaestra does not ask a teacher, so `teacher_enabled` is refused; without it, such an environment is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from palaestra.envs.config.fields import BaseEnvConfig
from palaestra_contract.base_env import BaseEnv
from palaestra_slots.core.config import setting
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.config import APIServerConfig, ServerBaseline


class TeacherDistillationConfig(BaseEnvConfig):
    """The settings of a `TeacherDistillationEnv`."""

    teacher_enabled: bool = setting(False, "Ask a teacher for its probabilities; refused by a run.")

    def check_runnable(self, sources: Mapping[str, str] | None = None) -> None:
        super().check_runnable(sources)
        if self.teacher_enabled:
            raise ConfigError(
                "Palaestra does not ask a teacher for its probabilities; set teacher_enabled to false to train without "
                "one (--env.teacher_enabled=false)"
            )


class TeacherDistillationEnv(BaseEnv):
    """An environment whose settings may name a teacher."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = TeacherDistillationConfig

    @classmethod
    def teacher_config_init(cls) -> ServerBaseline | Sequence[APIServerConfig] | None:
        """Return the teacher's server; never called, because no teacher is asked."""
        return None
