"""`ListedEnvironment`: an environment written as a class, whose items are known before the run, such as the rows of a
data set.

Unusable items are left out with a warning. The others become tasks in order, repeatedly, or only once if `total_steps`
is -1. The class itself is what a command line runs: it has a name and a class of settings.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from palaestra.envs import discovery
from palaestra.envs.config.build import warn_of_every_tool
from palaestra.envs.config.fields import BaseEnvConfig, ListedEnvConfig
from palaestra.envs.run import pass_at_k
from palaestra.envs.run.evaluate import EvaluatedEnvironment, HeldOutEnvironment
from palaestra.rollouts.grading.grader import SEALED
from palaestra.rollouts.records import Trajectory
from palaestra.tools.registry.registry import Kit
from palaestra.tools.tool import Tool
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import JSON, Message, Task
from palaestra_slots.core.user_code import run_hook
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.config import APIServerConfig, ServerBaseline

logger = logging.getLogger(__name__)

MOST_SHOWN = 20
"""The maximum number of left-out items that are named individually."""


class ListedEnvironment(HeldOutEnvironment):
    """Subclass this, and implement `load`, `item_id`, `prompt` and `score`. Work is graded sealed, unless the settings
    or the task choose otherwise."""

    name = ""
    official_name = "official"
    config_class: ClassVar[type[ListedEnvConfig]] = ListedEnvConfig
    check_values: ClassVar[Mapping[str, JSON]] = {}
    """Settings that let `palaestra env check` run without further flags; ignored if the user sets one of them."""

    config: ListedEnvConfig

    def __init__(self, config: ListedEnvConfig) -> None:
        super().__init__(config)
        self.items: list[JSON] = []
        self.left_out: list[TaskError] = []
        self._loaded = False

    @abstractmethod
    async def load(self) -> Iterable[JSON | TaskError]:
        """Return the items that the settings select, in order, with an error in place of each unusable item. Raises
        `ConfigError`."""

    @abstractmethod
    def item_id(self, item: JSON) -> str:
        """Return the id of an item, which is the same each time the item is drawn."""

    @abstractmethod
    def prompt(self, item: JSON) -> str | Sequence[Message]:
        """Return the user's message for an item."""

    def solution(self, item: JSON) -> JSON:
        """Return the solution of an item (see `Task.solution`), or None."""
        return None

    def labels(self, item: JSON) -> Collection[str]:
        """Return labels that group an evaluation's metrics, such as `category/NAME`."""
        return ()

    def own_tools(self, task: Task) -> Sequence[Tool]:
        """Return the tools of a task, besides those of the settings."""
        return ()

    def own_metrics(self, metrics: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Return metrics of an evaluation under names of this environment."""
        return {}

    @property
    def source(self) -> str:
        return self.config.dataset_name or self.name

    async def sort_out(self) -> None:
        """Load the usable items into `items` and the errors into `left_out`. Further calls have no effect."""
        if self._loaded:
            return
        self._loaded, known = True, set[str]()
        for item in await run_hook(ConfigError, self.load(), f"{self.name} cannot begin: load"):
            if isinstance(item, TaskError):
                self.left_out.append(item)
            elif (name := self.item_id(item)) in known:
                self.left_out.append(TaskError(f"{name}: another task has this name"))
            else:
                known.add(name)
                self.items.append(item)
        if self.choice is not None:  # a refused task that was not chosen is no news
            choice = self.choice.among(known)
            self.left_out = [each for each in self.left_out if not (name := _task_of(each)) or name in choice]

    async def open(self) -> None:
        await super().open()
        await self.sort_out()
        for error in self.left_out[:MOST_SHOWN]:
            logger.warning("left out: %s", error)
        if len(self.left_out) > MOST_SHOWN:
            logger.warning("left out: %d more unusable items", len(self.left_out) - MOST_SHOWN)
        if not self.items:
            said = f"; {len(self.left_out)} left out, for the reasons above" if self.left_out else ""
            raise ConfigError(f"{self.source} has no usable task among the chosen ones{said}")
        warn_of_every_tool(self.config, self._kit(None, (), random.Random(0)))  # reports an unknown toolset early

    @property
    def counts_tasks(self) -> bool:
        return not self._repeats

    @property
    def _repeats(self) -> bool:
        """Whether a run gets the same tasks again and again."""
        return not self._evaluating and self.config.total_steps >= 0

    @property
    def refused(self) -> Mapping[str, str]:
        return {_task_of(error): str(error) for error in self.left_out}

    def chosen(self) -> list[JSON]:
        """Return the items of this run or evaluation. Raises `ConfigError` if there are none."""
        items = [item for item in self.items if self._serves(self.item_id(item))]
        if self.choice is not None:
            known = [self.item_id(each) for each in items]
            choice = self.choice.among(known)
            choice.check(known, self.name, {**self._of_others, **self.refused})
            return [each for each, name in zip(items, known, strict=True) if name in choice]
        if not items:
            raise ConfigError(
                f"held_out {self.config.held_out:g} leaves none of {len(self.items)} tasks to "
                f"{'evaluate' if self._evaluating else 'train on'}; set a different share or a different seed"
            )
        return items

    def chosen_tasks(self) -> AsyncIterator[Task]:
        return self.tasks()  # already those of `choice`, which a run of more steps repeats

    async def tasks(self) -> AsyncIterator[Task]:
        items = self.chosen()
        for item in itertools.cycle(items) if self._repeats else items:
            yield self.task(item)

    def task(self, item: JSON) -> Task:
        """Return the task of an item."""
        config = self.config
        return Task(
            id=self.item_id(item),
            prompt=self.prompt(item),
            network=self._policy,
            grading=config.grading or SEALED,
            paths=config.graded_paths,
            programs=config.graded_programs,
            data=item,
            solution=self.solution(item),
        )

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return self._kit(None, self.own_tools(task), rng)

    def metrics(self, done: Sequence[Trajectory], attempts: int, tasks: int) -> Mapping[str, JSON]:
        labels = {self.item_id(item): self.labels(item) for item in self.evaluating().chosen()[:tasks]}
        found = pass_at_k.figures(done, attempts, tasks=tasks, labels=labels)
        names = map(_task_of, self.left_out)
        left_out = sum(not name or self.config.serves(name, evaluating=True) for name in names)
        return {**found, "tasks_left_out": left_out, **self.own_metrics(found)}


def _task_of(error: TaskError) -> str:
    """Return the id of the task that an error is about, with which its message begins; empty if it names none."""
    name, colon, _ = str(error).partition(": ")
    return name if colon else ""


class ListedForm:
    """A subclass of `ListedEnvironment`, before a run."""

    command: str | None = None
    bound: BaseEnvConfig | None = None

    def __init__(self, cls: type[ListedEnvironment], reference: str = "") -> None:
        self.cls, self.reference = cls, reference
        self.name, self.kind, self.about = cls.name, cls.__name__, inspect.getdoc(cls) or ""

    def config_type(self) -> type[BaseEnvConfig]:
        return self.cls.config_class

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        return None, ()

    def check_values(self) -> Mapping[str, JSON]:
        return self.cls.check_values

    def build(
        self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer
    ) -> EvaluatedEnvironment:
        assert isinstance(config, self.cls.config_class)
        return self.cls(config)


discovery.register_class(ListedEnvironment, ListedForm)
