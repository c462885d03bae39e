"""`--dry-run`: reports what a command line would run. It starts no slot, calls no model server and writes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

from palaestra.envs.config.build import prices, server_settings
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.form import Form
from palaestra.envs.run.evaluate import EvaluatedEnvironment
from palaestra.envs.run.run import concurrency, offered_tools, opened, task_limit
from palaestra.envs.run.run_folder import RunLine, resumed_folder, run_place
from palaestra.rollouts.journal.reader import RUNS
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.schedule import numbered
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import Task
from palaestra_tokens.server_group import ServerGroup

_SHOWN = 3
"""The maximum number of tasks that a plan names."""

_CHARS_PER_TOKEN = 4
"""A common estimate for English text; the run itself counts the server's tokens."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run. `tasks` is None if the number of tasks is up to the trainer or the environment's own code;
    `most_tasks` is the maximum number, if there is one."""

    command: str
    environment: str
    tasks: int | None
    first_tasks: tuple[str, ...]
    group_size: int
    groups_in_flight: int
    most_tasks: int | None
    slots: int | None
    isolation: str
    model: str
    servers: tuple[str, ...]
    folder: str
    kept_groups: int = 0
    cost: str = ""
    """An estimate of what the model's tokens cost; empty without prices."""

    def __str__(self) -> str:
        most = "" if self.most_tasks is None else f", at most {self.most_tasks}"
        tasks = f"as many as the environment or the trainer requests{most}"
        if self.tasks is not None:
            named = ", ".join(self.first_tasks) + (", …" if self.tasks > len(self.first_tasks) else "")
            tasks = f"{self.tasks} ({named})" if self.tasks else "none"
            tasks += f", {plural(self.tasks * self.group_size, 'rollout')}"
        kept = f"; {self.kept_groups} of the groups in it are kept" if self.kept_groups else ""
        return "\n".join([
            f"{self.command} {self.environment} (dry run: nothing was created)",
            f"  tasks   {tasks}",
            f"  groups  of {self.group_size}, {self.groups_in_flight} in flight",
            f"  slots   {self.slots or 'as memory and open files allow'}, isolation {self.isolation}",
            f"  model   {self.model}{' at ' + ', '.join(self.servers) if self.servers else ''}",
            *([f"  cost    {self.cost}"] if self.cost else ()),
            f"  folder  {self.folder}{kept}",
        ])  # fmt: skip


async def plan_run(form: Form, parsed: RunLine) -> RunPlan:
    """Plan a run. This sets up the environment, so that its tasks can be counted. Raises `ConfigError`."""
    config = parsed.env_config
    config.check_runnable(parsed.sources)
    config.check_command(parsed.command, parsed.sources)
    servers = server_settings(config, parsed.server_configs)
    engine = ServerGroup(servers)
    async with contextlib.aclosing(engine):
        environment = form.build(config, servers, engine)
        limit = task_limit(parsed, environment)
        async with opened(environment, config.only_tasks):
            found = await _tasks(parsed, environment, limit)
            tasks, prompt_chars = None if found is None else list[str](), 0
            if tasks is not None and found is not None:
                async for task in found:
                    tasks.append(task.id)
                    # Characters, because a dry run loads no tokenizer; the cost is an estimate.
                    prompt_chars += len(task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt))
            cost = _cost(config, environment, len(tasks or ()), prompt_chars)
        folder, kept = run_place(RUNS, form.name, engine.name), 0
        if parsed.resume is not None:
            resumed = resumed_folder(parsed.resume)
            folder, kept = resumed.path, RunReader(resumed.journal).read().groups_ended
        return RunPlan(
            command=parsed.command,
            environment=form.name,
            tasks=None if tasks is None else len(tasks),
            first_tasks=tuple((tasks or [])[:_SHOWN]),
            group_size=config.group_size,
            groups_in_flight=concurrency(config, len(servers)),
            most_tasks=limit,
            slots=config.slots,
            isolation=str(config.isolation),
            model=engine.name,
            servers=tuple(each.base_url for each in servers if each.server_type != "scripted" and each.base_url),
            folder=str(folder) if parsed.resume is not None else f"{folder}/<new>",
            kept_groups=kept,
            cost=cost,
        )


def _cost(config: BaseEnvConfig, environment: EvaluatedEnvironment, tasks: int, prompt_chars: int) -> str:
    """Estimate what the model's tokens cost: with one call per rollout and an empty reply, and with all calls and the
    longest replies, each of which the next calls send again. Results of tools are not known, and left out. Empty
    without prices."""
    price = prices(config)
    if price is None or not tasks:
        return ""
    agent = environment.agent
    offered = json.dumps(offered_tools(environment, config.seed)) + (agent.system_prompt or "")
    sent = (prompt_chars / tasks + len(offered)) / _CHARS_PER_TOKEN
    calls, reply, rollouts = agent.max_turns, config.max_token_length, tasks * config.group_size
    least = rollouts * price.cost(round(sent), 0)
    most = rollouts * price.cost(round(calls * sent + calls * (calls - 1) / 2 * reply), calls * reply)
    return (
        f"about {least:.2f} with one call per rollout and empty replies, {most:.2f} with {plural(calls, 'call')} of "
        f"{reply} tokens each, at {_CHARS_PER_TOKEN} characters per token and without results of tools; --max-cost "
        "limits it"
    )


async def _tasks(parsed: RunLine, environment: EvaluatedEnvironment, limit: int | None) -> AsyncIterator[Task] | None:
    """Return the tasks; None if they are not known before the run."""
    found = await environment.evaluated_tasks() if parsed.command == "evaluate" else environment.chosen_tasks()
    if found is None or (parsed.command == "serve" and limit is None):
        return None
    return (task async for _, task in numbered(found, 0, limit))
