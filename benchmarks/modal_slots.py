"""Slots in Modal's sandboxes against Modal's own `exec`: python benchmarks/modal_slots.py [--real]

Without --real, Modal's client talks to the stand-in in tests/stand_ins. The numbers are then the cost of the client,
the streams and the slots, without Modal's network and machines. The cases alternate: a command in a slot and with
`Sandbox.exec`; a new slot, a slot from a snapshot and a new sandbox; finally 50 slots in 5 sandboxes concurrently.
--real needs the credentials of an account, which is charged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import _measure as measure
import _slot_turns as turns
import modal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from palaestra_cloud.modal import DEFAULT_APP, ModalBackend, ModalSandboxConfig
from palaestra_slots.sandbox.slot import SlotSpec
from stand_ins.fake_modal import FakeModal

SANDBOXES, SLOTS = 5, 50


async def commands(rounds: int) -> list[measure.Row]:
    """Measure the milliseconds of a command and of a fresh workspace, in each way."""
    found: dict[str, list[float]] = {}
    app = await modal.App.lookup.aio(DEFAULT_APP, create_if_missing=True)
    image = modal.Image.from_registry("python:3.11")
    own = await modal.Sandbox.create.aio(app=app, image=image, timeout=600)
    async with ModalBackend() as backend:
        slot = await backend.create(SlotSpec(), "slot")
        snapshot = await backend.seal(await backend.create(SlotSpec(), "sealed"))

        async def by_exec() -> None:
            process = await own.exec.aio("bash", "-c", "true")
            await process.wait.aio()

        async def fresh() -> None:
            made = await backend.create(SlotSpec(), "fresh")
            await made.execute("true")
            await backend.destroy(made)

        async def forked() -> None:
            made = await backend.create(snapshot.spec, "forked", snapshot)
            await made.execute("true")
            await backend.destroy(made)

        async def new_sandbox() -> None:
            made = await modal.Sandbox.create.aio(app=app, image=image, timeout=600)
            process = await made.exec.aio("bash", "-c", "true")
            await process.wait.aio()
            await made.terminate.aio()

        cases: dict[str, Callable[[], Awaitable[object]]] = {
            "command in a slot": lambda: slot.execute("true"),
            "command by Sandbox.exec": by_exec,
            "new slot, a command, its end": fresh,
            "slot from a snapshot, a command, its end": forked,
            "new sandbox, a command, its end": new_sandbox,
        }
        for _ in range(rounds):
            for case, call in cases.items():
                found.setdefault(case, []).append(await turns.timed(call))
        level = backend.rung.label
    await own.terminate.aio()
    print(f"isolation between the slots: {level}")
    median = {case: statistics.median(each) for case, each in found.items()}
    peer = {case: "new sandbox, a command, its end" for case in median if "its end" in case}
    return [
        measure.Row(case, value, "ms", value / median[peer.get(case, "command by Sandbox.exec")])
        for case, value in median.items()
    ]


async def many() -> list[measure.Row]:
    """Measure the seconds until this many slots have run a command."""
    config = ModalSandboxConfig(max_sandboxes=SANDBOXES, slots_per_sandbox=SLOTS // SANDBOXES)
    return await turns.many_slots(ModalBackend(config), SLOTS, "sandboxes", SANDBOXES)


def main() -> int:
    """Measure and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="use Modal itself instead of the stand-in")
    options = parser.parse_args()
    rounds = options.rounds or (20 if options.quick else 100)
    with contextlib.ExitStack() as stack:
        if not options.real:
            os.environ.update(stack.enter_context(FakeModal()).variables)
        rows = asyncio.run(commands(rounds)) + asyncio.run(many())
        modal.Client.from_env().close()
    measure.report("Slots in Modal's sandboxes", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
