"""Sends a run's metrics to its trackers. During the run, these are the metrics of the latest groups (`train/…` or
`eval/…`); at the end, they are the metrics of the whole run, without a prefix. Failures of trackers and of `wandb_log`
are reported once and never end a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from palaestra.envs.config.command_line import Parsed
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.run.run_folder import RunOutput
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import GroupFinished, Handlers, MetricsLogged
from palaestra.rollouts.journal.journal import without_secrets
from palaestra.rollouts.observe.metrics import Figures
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.config import DEFAULT
from palaestra_slots.core.io.durable_files import private
from palaestra_slots.core.types import JSON
from palaestra_slots.core.user_code import place, told
from palaestra_tokens.config import APIServerConfig

if TYPE_CHECKING:
    from palaestra.rollouts.observe.trackers.tracker import Shown, Tracker

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""The shortest time between two reports to trackers, so that fast runs do not flood them."""

ROLLOUTS = "rollouts"
"""The name of the table of sample rollouts, after the prefix."""


METRICS_SCHEMA = "palaestra.metrics/1"


class MetricsFile:
    """`metrics.jsonl`, the tracker that every run has: one line per call, written immediately.

    A torn last line gets a newline, so that later lines are readable. If a line cannot be written, it is lost and a
    warning is logged; on a full disk, the journal stops the run.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._clock = clock or SystemClock()
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - closed in `close`
        self._torn = _torn(path)

    def log(self, step: int, numbers: Mapping[str, float | str]) -> None:
        """Add a line. Numbers that are not finite become null."""
        line: dict[str, JSON] = {"schema": METRICS_SCHEMA, "time": self._clock.wall(), "step": step, **numbers}
        text = b"\n" * self._torn + msgspec.json.encode(line) + b"\n"
        try:
            self._torn = self._file.write(text) != len(text)
        except OSError as error:
            self._torn = True
            logger.warning("metrics are missing from %s: %s", self.path, error)

    def show(self, step: int, name: str, rollouts: Shown) -> None:
        """Do nothing: the journal has every rollout."""

    def close(self) -> None:
        self._file.close()

    async def aclose(self) -> None:
        self.close()


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class Reporting:
    """Logs to the trackers after every `every` groups. `known` are the numbers of groups that an earlier part of the
    run logged; they are not logged again."""

    def __init__(
        self,
        trackers: Collection[Tracker],
        *,
        prefix: str = "train/",
        every: int = 1,
        known: Collection[int] = (),
        clock: Clock | None = None,
    ) -> None:
        self._trackers = list(trackers)
        self._prefix = prefix
        self._every = every
        self._known = known
        self._clock = clock or SystemClock()
        self._latest = Figures()
        self._step = 0
        self._enough = asyncio.Event()
        self._note: Callable[[str], None] = lambda text: None
        self._own_failed = False
        self._texts: dict[str, str] = {}

    def handlers(self) -> Handlers:
        return {GroupFinished: self._on_group_finished, MetricsLogged: lambda event: self._log(event.numbers)}

    def report_to(self, note: Callable[[str], None]) -> None:
        """Call `note` from now on with a line about each failing tracker."""
        self._note = note

    def warn(self, text: str) -> None:
        """Report a failure through the current `note`."""
        self._note(text)

    def add(self, tracker: Tracker) -> None:
        self._trackers.append(tracker)

    def _on_group_finished(self, event: GroupFinished) -> None:
        group = event.group
        self._step += 1
        # Known groups count as steps all the same, so that the curves of a resumed run continue where they ended.
        if group.number in self._known:
            return
        self._latest.add(group)
        if self._latest.groups >= self._every:
            self._enough.set()

    @contextmanager
    def running(self, environment: Environment) -> Iterator[None]:
        reporting = asyncio.create_task(self._log_figures(environment), name="figures")
        try:
            yield
        finally:
            reporting.cancel()

    async def _log_figures(self, environment: Environment) -> None:
        while True:
            await self._enough.wait()
            self._enough.clear()
            own = await self.own(environment)
            # Taken after the wait, so that groups which finished meanwhile are in this line.
            latest, self._latest = self._latest, Figures()
            numbers = {f"{self._prefix}{name}": value for name, value in latest.numbers().items()}
            self._log({**numbers, **own})
            self._texts.clear()
            await self._clock.sleep(EVERY_S)

    async def own(self, environment: Environment) -> Mapping[str, float | str]:
        """Return the environment's own numbers and strings; none if computing them fails."""
        try:
            found = await environment.figures()
        except Exception as error:
            if not self._own_failed:
                self._own_failed = True
                logger.warning("metrics of %s failed with %s%s", environment.name, told(error), place(error))
            return {}
        self._texts.update({name: value for name, value in found.items() if isinstance(value, str)})
        return found

    async def finish(self, environment: Environment, figures: Mapping[str, float]) -> None:
        """Send the trackers the metrics of the whole run, and close them."""
        self._log({**figures, **self._texts} if figures else figures)
        try:
            shown = environment.shown()
        except Exception as error:
            shown = ()
            logger.warning("rollouts of %s cannot be shown: %s%s", environment.name, told(error), place(error))
        for tracker in self._trackers if shown else ():
            tracker.show(self._step, self._prefix + ROLLOUTS, shown)
        await asyncio.gather(*(tracker.aclose() for tracker in self._trackers))

    def log(self, numbers: Mapping[str, float]) -> None:
        """Send metrics to the trackers now."""
        self._log(numbers)

    def _log(self, numbers: Mapping[str, float | str]) -> None:
        for tracker in self._trackers:
            tracker.log(self._step, numbers)


def asked_for(config: BaseEnvConfig, sources: Mapping[str, str]) -> list[str]:
    """Return the requested services. `use_wandb` counts only if the user or the environment set it."""
    wandb = config.use_wandb and sources.get("env.use_wandb", DEFAULT) != DEFAULT
    return ["wandb"] * wandb + ["trackio"] * config.use_trackio


async def make_reporting(
    parsed: Parsed[BaseEnvConfig, APIServerConfig], output: RunOutput, note: Callable[[str], None]
) -> Reporting:
    """Return the reporting to the run's trackers: `metrics.jsonl` and the requested services. `note` gets a line for
    each service that is not installed or cannot be started."""
    config, folder = parsed.env_config, output.folder
    reporting = Reporting(
        [MetricsFile(folder.metrics)],
        prefix="eval/" if parsed.command == "evaluate" else "train/",
        every=config.min_items_sent_before_logging,
        known=frozenset(output.earlier.ended),
    )
    reporting.report_to(note)
    services = asked_for(config, parsed.sources)
    if not services:
        return reporting
    # imported here, because most runs send their metrics to no service
    from palaestra.rollouts.observe.trackers.subprocess_tracker import start_tracker
    from palaestra.rollouts.observe.trackers.tracker import RunLabel

    # The trainer may have opened a run of its own at the tracker, which this one joins.
    told: dict[str, str] = {}
    if parsed.command == "serve":
        from palaestra.envs.run.feed import trainers_tracking  # most runs feed no trainer

        told = await trainers_tracking(config)
    label = RunLabel(
        project=config.tracker_project or told.get("project") or output.env,
        group=told.get("group"),
        name=config.wandb_name or folder.run_id,
        run_id=folder.run_id,
        folder=folder.path,
        settings={"env": without_secrets(config.recorded()), "model": output.model},
        mode=config.wandb_mode,
    )
    for service in services:
        tracker = await start_tracker(service, label, reporting.warn)
        if tracker is not None:
            reporting.add(tracker)
    return reporting
