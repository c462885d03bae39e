"""What the environment command line says about itself: `--help`, `--help-all`, `--show-config`.

Text only; the parser is `flags`. Invariant: the short help fits one screen (40 lines or little more) and names every
field that the environment itself declares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from palaestra.core.config import Merged, has_effect, is_secret
from palaestra.core.literals import describe
from palaestra.core.types import JSON
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig

if TYPE_CHECKING:
    from palaestra.envs.config.command_line import CommandLine

_COMMON = (
    "group_size",
    "total_steps",
    "max_num_workers",
    "max_agent_turns",
    "enabled_toolsets",
    "tool_pool_mode",
    "data_path_to_save_groups",
    "seed",
)
_WIDTH = 118


def usage(line: CommandLine[BaseModel, BaseModel], *, everything: bool) -> str:
    """The help text: examples first, then the environment's own fields, then the common ones (or all)."""
    run = line.prog if line.command else f"{line.prog} process"
    parts = [
        f"usage: {line.prog} {'[process|evaluate|serve]' if line.command else 'process|evaluate|serve'} "
        "[--env.FIELD VALUE] [--openai.FIELD VALUE] [--config FILE.yaml]",
        *([line.about.strip().splitlines()[0]] if line.about.strip() else []),
        "",
        f"  {run} --policy oracle --tasks 2 --group 4          # play the reference solutions",
        f"  {run} --base-url http://localhost:8000/v1 --model NAME   # ask a model server",
        f"  {run} --config run.yaml --show-config              # what would run, and why",
        f"  {run} … --resume runs/NAME/ID                       # go on with a run that was killed",
        "",
        "  process writes groups of rollouts; evaluate scores once and reports; serve feeds a trainer.",
        "  Short: --policy oracle|noop|patch:FILE|replay:FILE  --model  --base-url  --tasks (env.total_steps)",
        "         --group (env.group_size)  --concurrency (env.max_num_workers)  --backend (env.tool_pool_mode)",
        "         --max-cost (env.max_cost)  --max-infra-rate (env.max_infra_rate)  --metrics-port (env.metrics_port)",
        "         --mcp FILE (env.mcp_servers)  --config FILE",
        "  Lists: `a b`, `a,b` or JSON. Mappings: `k=v`, JSON or --env.field.key V. A boolean alone means true.",
    ]
    for title, fields in _sections(line, everything):
        parts += ["", f"{title}:", *fields]
    if not everything:
        parts += ["", f"  {line.prog} --help-all lists every setting."]
    return "\n".join(parts) + "\n"


def merged(env: Merged[BaseModel], servers: Sequence[Merged[BaseModel]]) -> str:
    """Every value with its source, one per line: `env.group_size = 4   # command line`."""
    rows = list(_rows("env", env))
    for index, server in enumerate(servers):
        rows += _rows("openai" if len(servers) == 1 else f"openai[{index}]", server)
    width = min(max(len(left) for left, _ in rows), 70)
    return "".join(f"{left:<{width}}  # {source}\n" for left, source in rows)


def _rows(group: str, config: Merged[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, source in config.sources.items():
        yield f"{group}.{name} = {_plain(name, getattr(config.value, name))}", source


def _plain(name: str, value: JSON) -> str:
    if value and is_secret(name):
        return "(hidden)"
    return str(getattr(value, "value", value)) if not isinstance(value, str) else value or '""'


def _sections(line: CommandLine[BaseModel, BaseModel], everything: bool) -> Iterator[tuple[str, list[str]]]:
    env, server = line.env_type, line.server_type
    inherited = {*BaseEnvConfig.model_fields, *HermesAgentEnvConfig.model_fields}
    own = [name for name in env.model_fields if name not in inherited]
    if own:
        yield "This environment", [_field("env", env, name, line.env_values.get(name)) for name in own]
    rest = [name for name in env.model_fields if name not in own]
    shown = [name for name in rest if has_effect(env, name)] if everything else [n for n in _COMMON if n in rest]
    yield "All environments", [_field("env", env, name, line.env_values.get(name)) for name in shown]
    first = line.server_values[0] if line.server_values else {}
    names = [n for n in server.model_fields if everything or n in ("base_url", "model_name", "api_key", "server_type")]
    yield "The model server", [_field("openai", server, name, first.get(name)) for name in names]
    if everything:
        idle = [name for name in rest if not has_effect(env, name)]
        yield (
            "Accepted for existing scripts, without effect yet",
            textwrap.wrap(
                " ".join(f"--env.{name}" for name in idle), _WIDTH, initial_indent="  ", subsequent_indent="  "
            ),
        )


def _field(group: str, model_type: type[BaseModel], name: str, own_default: JSON) -> str:
    """One line: flag, type, what it means, default."""
    info = model_type.model_fields[name]
    default = own_default if own_default is not None else info.get_default(call_default_factory=True)
    shown = "" if default is PydanticUndefined else f" [{_plain(name, default)}]"
    flag = f"--{group}.{name} {describe(info.annotation)}"
    text = f"  {flag:<46} {info.description or ''}{shown}"
    return text if len(text) <= 160 else text[:157] + "..."
