"""Tasks with files that need one command each, for a model that can read and write but has never called a tool.

The names and the contents of held-out tasks do not occur in the tasks to train on. Which tasks are held out follows
from the seed of the training run, so the environment gets that seed, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from palaestra import Slot, Task, environment
from palaestra_train.training import split_tasks

KINDS = {
    "count": ("Write the number of lines of {a} to {b}.", "wc -l < {a} > {b}"),
    "first": ("Write the first line of {a} to {b}.", "head -n 1 {a} > {b}"),
    "last": ("Write the last line of {a} to {b}.", "tail -n 1 {a} > {b}"),
    "sort": ("Sort the lines of {a} and write them to {b}.", "sort {a} > {b}"),
    "copy": ("Copy {a} to {b}.", "cp {a} {b}"),
    "rename": ("Rename {a} to {b}.", "mv {a} {b}"),
}
ENDINGS = ("txt", "csv", "md", "log")
TRAINED = (
    ["notes", "data", "report", "list", "names", "words", "prices", "todo", "cities", "books", "orders", "plants"],
    ["apple", "river", "stone", "cloud", "green", "seven", "paper", "light", "house", "north", "table", "music"],
)
HELD_OUT = (
    ["letters", "items", "scores", "people", "hills", "songs", "birds", "tools", "rooms", "trains"],
    ["lemon", "forest", "iron", "storm", "purple", "eleven", "candle", "shadow", "garden", "south", "window", "violin"],
)


@environment(toolsets=[])
def files(n: int = 240, outside: int = 40, drawn_with: int = 0) -> Iterator[Task]:
    """Count, pick, sort, copy and rename: n tasks, of which a training run with this seed holds out some."""
    ids = [f"{list(KINDS)[number % len(KINDS)]}-{number}" for number in range(n)]
    _, held = split_tasks([Task(id=each, prompt=each) for each in ids], outside, drawn_with)
    held_out, rng = {task.id for task in held}, random.Random(drawn_with)
    for task_id in ids:
        names, words = HELD_OUT if task_id in held_out else TRAINED
        kind = task_id.partition("-")[0]
        a, b = (f"{name}.{rng.choice(ENDINGS)}" for name in rng.sample(names, 2))
        lines = [f"{rng.choice(words)} {rng.choice(words)}" for _ in range(rng.randint(3, 12))]
        prompt, command = (text.format(a=a, b=b) for text in KINDS[kind])
        yield Task(
            id=task_id,
            prompt=prompt,
            files={a: "".join(f"{line}\n" for line in lines)},
            solution=command,
            answer=wanted(kind, lines),
            data={"from": a, "to": b},
        )


def wanted(kind: str, lines: list[str]) -> str:
    """Return what the new file must contain, apart from spaces around it."""
    picked = {"count": [str(len(lines))], "first": lines[:1], "last": lines[-1:], "sort": sorted(lines)}
    return "\n".join(picked.get(kind, lines))


@files.tool
async def terminal(command: str, sandbox: Slot) -> str:
    """Run a shell command."""
    return (await sandbox.execute(command)).output


@files.score
async def right(task: Task, sandbox: Slot) -> bool:
    written = (await sandbox.read_text(task.data["to"], missing="")).strip() == task.answer
    gone = await sandbox.stat(task.data["from"]) is None
    return written and gone == task.id.startswith("rename")
