"""What a person wants to know of an environment before running it. Loads its file; opens nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from palaestra.core.types import JSON
from palaestra.envs.adapters.forms import FunctionFace, form_of
from palaestra.envs.config.command_line import set_fields
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.discovery import load_environment


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of an environment's own, or one that it sets otherwise than others."""

    name: str
    value: JSON
    about: str


@dataclass(frozen=True, slots=True)
class Shown:
    """`form` is `function` or the name of the class."""

    name: str
    form: str
    about: str
    settings: tuple[Setting, ...]

    def to_json(self) -> dict[str, JSON]:
        """For machines."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        lines = [f"{self.name} ({self.form})", "", self.about or "(no docstring)", ""]
        width = max((len(setting.name) for setting in self.settings), default=0)
        lines += [f"  --env.{each.name:<{width}}  {each.value!r}  {each.about}".rstrip() for each in self.settings]
        lines += [] if self.settings else ["  no settings of its own"]
        return "\n".join(lines)


def show_environment(reference: str, start: Path) -> Shown:
    """The environment that `reference` names. Raises `ConfigError`."""
    form = form_of(load_environment(reference, start))
    config, _ = form.defaults()
    common = {**BaseEnvConfig.model_fields, **HermesAgentEnvConfig.model_fields}
    changed = set_fields(config) if config is not None else {}
    settings = [
        Setting(name, changed.get(name, field.get_default(call_default_factory=True)), field.description or "")
        for name, field in form.config_type().model_fields.items()
        if name not in common or name in changed
    ]
    kind = "function" if isinstance(form, FunctionFace) else getattr(form, "cls", type(form)).__name__
    return Shown(form.name, kind, form.about, tuple(settings))
