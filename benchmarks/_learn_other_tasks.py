"""Two more tool tasks for the tiny model of `_learn_tasks.py`, which neither the project's documents nor its settings
were tuned on.

`last`: run a command that shows the last line of a file, and answer with it. `move`: rename a file. Only the command's
output contains the line, and only the workspace shows whether the file was renamed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from _learn_tasks import NAMES, WORDS, answered, called, terminal

from palaestra import Message, Rollout, Say, Slot, Task, ToolStep, environment

PLACES = ("bay", "cove", "dune", "glen", "marsh", "ridge")


@environment(toolsets=[])
def other_tools() -> Iterator[Task]:
    """Show the last line of a file, and rename one."""
    for name, word in itertools.product(NAMES, WORDS):
        yield Task(
            id=f"last-{name}-{word}",
            prompt=f"last {name}",
            files={name: f"none\n{word}\n"},
            answer=word,
            solution=[ToolStep("terminal", {"command": f"tail -1 {name}"}), Say(word)],
            data={"kind": "last"},
        )
    for name, place in itertools.product(NAMES, PLACES):
        yield Task(
            id=f"move-{name}-{place}",
            prompt=f"move {name} to {place}",
            files={name: f"{name} {place}\n"},
            answer=f"{name} {place}",
            solution=f"mv {name} {place}",
            data={"kind": "move", "from": name, "to": place},
        )


other_tools.tool(terminal)


@other_tools.score
async def right(task: Task, rollout: Rollout, sandbox: Slot) -> bool:
    if task.data["kind"] == "move":
        moved = (await sandbox.read_text(task.data["to"], missing="")).strip() == task.answer
        return moved and await sandbox.stat(task.data["from"]) is None
    return answered(task, rollout)


def conversation(task: Task, rng: random.Random, hit: bool) -> list[Message]:
    """Return a task with a conversation for practice: the right command if `hit` is true, otherwise a wrong one, with
    the command's real output."""
    kind, name, wanted = task.id.split("-")
    chosen = name if hit else rng.choice(NAMES)
    if kind == "last":
        command = f"tail -1 {chosen}"
        output = wanted if chosen == name else f"tail: cannot open '{chosen}' for reading: No such file or directory"
        said = wanted if chosen == name else rng.choice(WORDS)
    else:
        place = wanted if hit else rng.choice(PLACES)
        command, said = f"mv {chosen} {place}", "done"
        output = "" if chosen == name else f"mv: cannot stat '{chosen}': No such file or directory"
    return called(task, command, output, said)
