"""A small environment for training: docs/train.md."""

from palaestra import Rollout, Slot, Task, environment


@environment(toolsets=[])
def note(n: int = 64):
    for i in range(n):
        yield Task(id=f"note-{i}", prompt="Write hello to note.txt", solution="echo hello > note.txt")


@note.tool
async def terminal(command: str, sandbox: Slot) -> str:
    """Run a command."""
    return (await sandbox.execute(command)).output


@note.score
async def written(rollout: Rollout, sandbox: Slot) -> float:
    if (await sandbox.read_text("note.txt", missing="")).strip() == "hello":
        return 1.0
    replies = [each["content"] for each in rollout.result.messages if each["role"] == "tool"]
    return 0.5 * any('"error"' not in reply for reply in replies)
