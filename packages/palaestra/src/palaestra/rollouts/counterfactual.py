"""Counterfactual rollouts: a rollout of an earlier run is continued after one of its turns, in a new run.

All rollouts of the new run begin with the recorded turns. The model sees the recorded conversation, word for word, and
the replies after it are new. The sandbox starts from the kept workspace of that turn, or the recorded calls are run
again in a fresh sandbox. A result that differs from the recorded one does not end the rollout: the rollout's `origin`
describes the first one.

Invariants: the recorded turns are charged and trained on only in the earlier run, so their tokens are part of a prompt
here. They are in the new run's own folder (`FORK_NAME`), so the new run can be resumed without the earlier one. Calls
that reach outside of this machine are not repeated, unless they restore a session such as a browser's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from palaestra.agent.middleware import Ask, ChatCall
from palaestra.rollouts.events import (
    AnyJournalEvent,
    AttemptDiscarded,
    GroupStarted,
    RolloutEnded,
    RolloutResumed,
    RunResumed,
    RunStarted,
    TurnTaken,
)
from palaestra.rollouts.journal.journal import check_schema
from palaestra.rollouts.journal.reader import FORK_NAME, find_rollout
from palaestra.rollouts.records import Group, Origin, Trajectory
from palaestra.rollouts.resume.observation_diff import HARMLESS, classify, first_difference
from palaestra.rollouts.resume.recorded_turns import Mismatch, RecordedTurns, Start, exchanged
from palaestra.rollouts.resume.state import CutOff, taken_until
from palaestra.rollouts.workspaces import UNTOUCHED
from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io.durable_files import UNREADABLE, lines_of, read_regular
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import SlotSource, SlotSpec, Snapshot
from palaestra_tokens.engine import ChatCompletion

FORK_SCHEMA = "palaestra.fork/1"

KEPT, REBUILT = "kept", "rebuilt"
"""The values of `Origin.state`."""

_PROCESSES = ("live_processes", "processes_at_end")
"""The parts of a score's detail with the number of processes that ran when the agent had ended."""


class Counterfactual(msgspec.Struct, kw_only=True):
    """The point at which the rollouts of a run begin, with the recorded turns up to it. `turns` begins with the opening
    messages, and `model` has sampled them. `index`, `group_id`, `number`, `task_id` and `tools_hash` are those of the
    earlier rollout and its group. `workspace` is the folder of the kept workspace, or empty if the calls are run again.
    `seed` is the seed of the new run's scripted replies; model servers choose their own."""

    schema: str = FORK_SCHEMA
    origin: Origin
    index: int
    group_id: str
    number: int
    task_id: str
    tools_hash: str
    seed: str
    turns: list[TurnTaken]
    model: str = ""
    workspace: str = ""

    @property
    def facts(self) -> dict[str, JSON]:
        """What the settings of the new run record."""
        return {"run_id": self.origin.run_id, "rollout_id": self.origin.rollout_id, "turn": self.origin.turn}

    @property
    def calls(self) -> int:
        """The number of recorded calls in the turns."""
        return sum(map(_count_calls, self.turns))

    def for_model(self, name: str) -> Counterfactual:
        """Return the same point for a run with this model. Another model may have other tokens, so it gets the recorded
        turns as messages, which its own template renders."""
        if name == self.model:
            return self
        return msgspec.structs.replace(self, turns=[msgspec.structs.replace(turn, sampled=[]) for turn in self.turns])


class Continuation(Start):
    """What the rollouts of a counterfactual run share: the point at which they begin, and the kept workspace."""

    def __init__(self, point: Counterfactual) -> None:
        self.point = point
        self._kept: Snapshot | None = None
        self._rebuilds = False

    async def load(self, pool: SlotSource, spec: SlotSpec) -> Exception | None:
        """Load the kept workspace, if there is one, and return the error if it cannot be used. The recorded calls are
        then run again."""
        if not self.point.workspace or self._kept is not None:
            return None
        try:
            self._kept = pool.snapshots.continued(await pool.snapshots.load(Path(self.point.workspace), spec))
        except (OSError, ConfigError, SandboxError) as error:
            return error
        return None

    def rebuild(self) -> None:
        self._rebuilds = True

    async def aclose(self, pool: SlotSource) -> None:
        """Drop the kept workspace. Idempotent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            await pool.snapshots.forget(kept)

    def retried(self, recorded: RecordedTurns | None) -> None:
        return None  # `recorded` gives the shared turns again

    def seed_index(self, index: int) -> int:
        # All rollouts repeat the turns of one recorded rollout, whose random choices must come out again. Only what
        # they sample afterwards differs.
        return self.point.index

    def sampling_seed(self, index: int) -> str:
        return f"{self.point.seed}:{index}"

    def recorded(self) -> ContinuedTurns:
        point = self.point
        turns = [msgspec.structs.replace(event, messages=list(event.messages)) for event in point.turns]
        cut_off = CutOff(point.tools_hash, turns, shared=point.origin.turn)
        return ContinuedTurns(point.origin, cut_off, journalled=False, snapshot=self._snapshot)

    def resumed(self, cut_off: CutOff) -> ContinuedTurns | None:
        origin = self.point.origin
        cut_off.shared = origin.turn
        if all(event.turn <= origin.turn for event in cut_off.events):
            return None
        return ContinuedTurns(origin, cut_off, journalled=True, snapshot=self._snapshot)

    @property
    def _snapshot(self) -> Snapshot | None:
        return None if self._rebuilds else self._kept

    def summary(self, trajectories: Sequence[Trajectory]) -> str:
        """Return one line about the state from which the rollouts continued."""
        origins = [each.origin for each in trajectories if each.origin is not None]
        rebuilt = [each for each in origins if each.state == REBUILT]
        if not origins:
            return "no rollout was continued"
        if not rebuilt:
            return "state: the kept workspace of the turn, without its processes and /tmp"
        differing = [each.difference for each in rebuilt if each.difference]
        if not differing:
            return "state: rebuilt by the recorded calls, with the recorded results"
        where = f"{len(differing)} of {plural(len(rebuilt), 'rollout')}"
        return f"state: rebuilt by the recorded calls, whose results differ in {where}. The first: {differing[0]}"


class ContinuedTurns(RecordedTurns):
    """The recorded turns of a counterfactual rollout, for one attempt at it."""

    def __init__(self, origin: Origin, cut_off: CutOff, *, journalled: bool, snapshot: Snapshot | None) -> None:
        super().__init__(cut_off, journalled=journalled, forked=snapshot is not None, snapshot=snapshot)
        self._origin = origin
        self._difference = ""
        self._exact_events = self._events
        self._exact_samples = dict(self._sampled)

    @property
    def origin(self) -> Origin:
        state = KEPT if self.forked else REBUILT
        return msgspec.structs.replace(self._origin, state=state, difference=self._difference)

    @property
    def shared(self) -> int:
        return self._origin.turn

    @property
    def shared_samples(self) -> int:
        return sum(len(event.sampled) for event in self._events if event.turn <= self.shared)

    @property
    def restarts(self) -> bool:
        return self.continues or self.failed is Mismatch.SETUP

    @property
    def continues(self) -> bool:
        return any(event.turn > self.shared for event in self.cut_off.events)

    @property
    def _is_shared(self) -> bool:
        """Whether the turn that is repeated now belongs to the earlier run."""
        return not self.caught_up and self._events[self._at].turn <= self.shared

    def answers_text(self, exact: bool) -> bool:
        """Drop the recorded tokens if the server of the new run returns none. If the earlier run has none, the shared
        turns are given as messages, and become part of the first prompt."""
        # Called whenever somebody asks for the server, so it must not add up: each call begins from the exact turns.
        self._events = self._exact_events
        self._sampled.clear()
        if exact:
            self._sampled.update(self._exact_samples)
        else:
            self._events = [msgspec.structs.replace(event, sampled=[]) for event in self._events]
        return any(event.turn and not event.sampled for event in self._events)

    async def answer(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        if self.failed is None and not self.caught_up and self._events[self._at].sampled:
            return await ask(call)  # the token-exact server answers from the recorded tokens
        return await super().answer(call, ask)

    def answers(self, touches_world: bool) -> bool:
        return self._is_shared and (self.forked or touches_world)

    def found_setup(self) -> None:
        if self.forked and not self._at:
            raise self.fail(Mismatch.SETUP)

    def found_background(self) -> None:
        if not self._was_shared:
            super().found_background()
        self._note_difference(
            self.latest.turn, "a repeated call left a process in the background, whose state may differ"
        )

    @property
    def _was_shared(self) -> bool:
        return self.latest.turn <= self.shared

    def match_observation(self, expected: str, text: str, call: str = "") -> str:
        if not self._is_shared:
            return super().match_observation(expected, text, call)
        if text != expected and (kind := classify(expected, text, asked=call)) not in HARMLESS:
            was, now = first_difference(expected, text)
            self._note_difference(
                self._events[self._at].turn, f"{call}: {was!r} was recorded, but it is {now!r} now ({kind})"
            )
        return expected

    def _note_difference(self, turn: int, what: str) -> None:
        self._difference = self._difference or f"turn {turn}: {what}"


def read_fork(folder: Path) -> Counterfactual | None:
    """Return the point at which the rollouts of a counterfactual run begin; None for another run. Raises
    `ConfigError`."""
    path = folder / FORK_NAME
    try:
        found = msgspec.json.decode(read_regular(path), type=Counterfactual)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path} cannot be read, so the run cannot be resumed: {error}") from None
    if found.schema != FORK_SCHEMA:
        raise ConfigError(f"{path} has the format {found.schema!r}; this version reads {FORK_SCHEMA!r}")
    return found


def resumed_fork(folder: Path, config: Mapping[str, JSON]) -> Counterfactual | None:
    """Return the point at which the rollouts of a run to resume begin; None if it is not counterfactual. `config` are
    its recorded settings. Raises `ConfigError` if that point is not the one of its settings."""
    wanted = config.get("fork")
    if wanted is None:
        return None
    begins = read_fork(folder)
    if begins is None:
        raise ConfigError(f"{folder} has lost its file {FORK_NAME}, so it cannot be resumed")
    if begins.facts != wanted:
        raise ConfigError(f"{folder / FORK_NAME} is not the file of this run, so it cannot be resumed")
    return begins if _is_kept(Path(begins.workspace), folder) else msgspec.structs.replace(begins, workspace="")


def _is_kept(workspace: Path, folder: Path) -> bool:
    """Return whether a folder is the kept workspace of a run next to this one. The file that names it may come from
    another person, so it must not choose any other folder of this machine."""
    return workspace.resolve().is_relative_to(folder.resolve().parents[1]) and workspace.parts[-3:-2] == ("workspaces",)


def fork_of(journal: Path, rollout: str, turn: int, seed: str) -> Counterfactual:
    """Return the point after turn `turn` of a rollout that has ended, named by its id or by the beginning of it. Turn 0
    is the beginning. Raises `ConfigError` if there is no such rollout or turn, or if it cannot be continued."""
    reader = _Reader(journal, find_rollout(journal, rollout))
    ended, group = reader.ended, reader.group
    if ended is None or group is None:
        raise ConfigError(f"rollout {reader.rollout_id} has not ended, so it cannot be continued in another run")
    cut_off = reader.turns.get(reader.rollout_id)
    if cut_off is None or not cut_off.events:
        raise ConfigError(f"{journal} does not have the turns of {reader.rollout_id}")
    last = cut_off.events[-1]
    # Nothing follows a reply without results, so there is no conversation after it that another model could continue.
    answered = bool(last.messages) and last.messages[-1].get("role") != "assistant"
    most = last.turn if answered else last.turn - 1
    if not 0 <= turn <= most:
        why = "" if answered else ", because its last reply ended it"
        raise ConfigError(f"{reader.rollout_id} can be continued after the turns 0 to {most}{why}, not after {turn}")
    if any(each.turn <= turn for each in ended.every_subagent()):
        first = min(each.turn for each in ended.subagents)
        raise ConfigError(
            f"{reader.rollout_id} started a sub-agent in turn {first}, whose work cannot be repeated: continue the "
            "rollout after an earlier turn"
        )
    place = next((place for place, event in enumerate(cut_off.events) if event.turn == turn), None)
    if place is None:
        raise ConfigError(f"{journal} does not have turn {turn} of {reader.rollout_id}")
    shared = cut_off.events[: place + 1]
    return Counterfactual(
        origin=Origin(run_id=reader.run_id, rollout_id=reader.rollout_id, turn=turn),
        index=ended.index,
        group_id=group.group_id,
        number=group.number,
        task_id=group.task_id,
        tools_hash=group.tools_hash,
        seed=seed,
        # The earlier run has paid for these turns.
        turns=[msgspec.structs.replace(event, cost=None, model_calls={}) for event in shared],
        model=reader.model,
        workspace=_workspace(journal.parent, ended, cut_off.events, turn),
    )


def _workspace(folder: Path, ended: Trajectory, events: Sequence[TurnTaken], turn: int) -> str:
    """Return the folder of the kept workspace if it has the state after `turn`, which is so if no call follows that
    turn; otherwise an empty text. The path must be in the run's folder, which may have been moved."""
    named = ended.beside.sandbox.get("workspace")
    # The kept workspace is that of the rollout's end. It has no processes, so it is not the state of a rollout that
    # left some.
    later = any(_count_calls(event) for event in events if event.turn > turn)
    running = any(ended.detail.get(name) for name in _PROCESSES)
    if not isinstance(named, str) or not named or named.endswith(UNTOUCHED) or later or running or not turn:
        return ""
    here = Path(folder.resolve(), *Path(named).parts[-3:])
    inside = here.resolve().is_relative_to(folder.resolve() / "workspaces") and here.is_dir()
    return str(here.resolve()) if inside else ""


def _count_calls(event: TurnTaken) -> int:
    """Return the number of calls in a turn; some agents write calls as text."""
    if not event.turn or not event.messages:
        return 0
    return len(event.messages[0].get("tool_calls") or ()) or len(list(exchanged(event.messages)))


_events: msgspec.json.Decoder[AnyJournalEvent] = msgspec.json.Decoder(AnyJournalEvent)


class _Reader:
    """Reads one rollout with its turns, and those of the rollout that it continues, if it is a branch."""

    def __init__(self, journal: Path, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.run_id = self.model = ""
        self.group: Group | None = None
        self.ended: Trajectory | None = None
        self.turns: dict[str, CutOff] = {}
        self._group_id = rollout_id.rpartition("/")[0]
        wanted = msgspec.json.encode(self._group_id)[1:-1]
        with journal.open("rb") as file:
            for number, line in enumerate(lines_of(file), 1):
                # Decoding is what takes time, and most lines of a large run are about other groups. The first line
                # names the run.
                if number > 1 and wanted not in line:
                    continue
                try:
                    self._take_event(_events.decode(line), journal)
                except UNREADABLE as error:
                    if line.endswith(b"\n"):
                        raise ConfigError(f"{journal}: line {number} is damaged: {error}") from None

    def _take_event(self, event: AnyJournalEvent, journal: Path) -> None:
        match event:
            case RunStarted(run_id=run_id, model=model, schema=schema):
                check_schema(schema, journal)
                self.run_id, self.model = run_id, model
            case RunResumed():
                pass
            case GroupStarted(group=group) if group.group_id == self._group_id:
                self.group = group
            case TurnTaken(rollout_id=rollout_id) if self._is_member(rollout_id):
                self.turns.setdefault(rollout_id, CutOff("")).add(event)
            # A branch of an old tree: its turns up to the fork point are those of its parent.
            case RolloutResumed(rollout_id=rollout_id, turns=turns, parent=int(parent)):
                before = self.turns.get(f"{self._group_id}/{parent}")
                self.turns[rollout_id] = CutOff("", taken_until(before.events if before else [], turns))
            case RolloutResumed(rollout_id=rollout_id, anew=str(anew)) if anew:
                self.turns.pop(rollout_id, None)
            case AttemptDiscarded(trajectory=trajectory):
                self.turns.pop(trajectory.rollout_id, None)
            case RolloutEnded(trajectory=trajectory) if trajectory.rollout_id == self.rollout_id:
                self.ended = trajectory
            case _:
                pass

    def _is_member(self, rollout_id: str) -> bool:
        return rollout_id.rpartition("/")[0] == self._group_id
