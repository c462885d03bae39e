"""The environment `note` as text, for processes that tests start: its tasks and its tool. Each test adds a score."""

NOTE = '''
from palaestra import Rollout, Slot, Task, environment


@environment(toolsets=[])
def note(n: int = 6):
    for i in range(n):
        yield Task(id=f"note-{i}", prompt="Write hello to note.txt")


@note.tool
async def terminal(command: str, sandbox: Slot) -> str:
    """Run a command."""
    return (await sandbox.execute(command)).output


'''
