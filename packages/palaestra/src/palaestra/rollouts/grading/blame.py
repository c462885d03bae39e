"""Find out whose fault a failed check is, by playing the same task again with its reference solution.

If the check works over the reference solution, at the same load, then the work made it fail. If the check fails there
too, the check or this machine is at fault. Nothing that the work can write or start takes part: not its files, its
processes, its output or its conversation. A task without a reference solution is played by doing nothing.
"""

from __future__ import annotations

from dataclasses import replace

from palaestra.rollouts.events import Alive, JournalEvent, MemoryEvent
from palaestra.rollouts.journal.journal import EventStream
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Middleware
from palaestra_slots.core.errors import PalaestraError
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.scripted import NoopPolicy, OraclePolicy, ScriptedEngine

_REPLAYED = ":reference"
"""The end of a replay's group id, under which its slots are leased."""


class _Unrecorded(EventStream):
    """The events of a replay. None is recorded, and each is a sign of life of the rollout that waits for the replay."""

    def __init__(self, waiting: Rollout) -> None:
        super().__init__(waiting.run_context.events.journal)
        self._waiting = waiting

    def emit(self, event: JournalEvent | MemoryEvent) -> None:
        self._waiting.stages.sign_of_life()

    announce = emit

    def alive(self, event: Alive) -> None:
        self._waiting.stages.sign_of_life()


async def blame(rollout: Rollout, failure: PalaestraError) -> Rollout:
    """Return the rollout in which the reference solution got through, so that the work is to blame for `failure`, the
    error of its check or of a later set-up. Raises `failure` if the reference does not get through either. The rollout
    must hold no slot."""
    if rollout.spec.replays:
        raise failure
    reference = await replay(rollout)
    if reference.score is None:
        what = "the reference solution" if rollout.task.solution is not None else "doing nothing"
        error = reference.ending.error.replace(_REPLAYED, "")
        failure.add_note(f"{what} fails too" if str(failure) in error else f"{what} fails too: {error:.2000}")
        raise failure
    return reference


async def replay(rollout: Rollout) -> Rollout:
    """Play the rollout's task in a rollout of its own, with the reference solution or by doing nothing, and return that
    rollout, which has no score if its check failed.

    Call this while the rollout holds no slot, because a holder of a slot must not wait for another one.
    """
    run, spec = rollout.run_context, rollout.spec
    policy = NoopPolicy() if rollout.task.solution is None else OraclePolicy()
    engine = ScriptedEngine(APIServerConfig(server_type="scripted", model_name="noop"), policy)
    context = replace(
        run,
        engine=engine,
        workspaces=run.workspaces.keeping_nothing(),
        events=_Unrecorded(rollout),
        middleware=Middleware(),
        counterfactual=None,
        program=None,
    )
    # The other group id keeps its slots apart from those of the rollout, and its own failed check must not start a
    # replay.
    again = Rollout(rollout.hooks, context, replace(spec, group_id=spec.group_id + _REPLAYED, replays=True))
    again.workspace.begin()  # a run that stops lets its rollouts end
    await again.run()
    return again
