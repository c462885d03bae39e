"""Count the lines of a file: the function form with a prepare hook, two scores, metrics and detail."""

from palaestra import Score, Task, ToolStep, environment


@environment(toolsets=["terminal"])
def lines(n: int = 3):
    for i in range(n):
        yield Task(
            id=f"lines-{i}",
            prompt=f"Write the number of lines of a.txt to answer.txt ({i})",
            files={"a.txt": "x\n" * i},
            setup="mkdir notes && echo 'count them' > notes/how.txt",
            solution=["cat notes/how.txt seed.txt", ToolStep("terminal", {"command": "wc -l < a.txt > answer.txt"})],
            answer=str(i),
        )


@lines.prepare
async def write_seed(task, sandbox, rng):
    await sandbox.write_text("seed.txt", f"{task.id} {rng.randrange(1000)}\n")


@lines.score(weight=3)
async def correct(task, sandbox):
    answer = await sandbox.read_text("answer.txt", missing="")
    return Score(float(answer.strip() == task.answer), {"answer_chars": len(answer)}, {"answer": answer})


@lines.score
async def early(rollout):
    """Give the rollouts of a group different rewards."""
    return 1 / (1 + rollout.index), {"turns": len(rollout.result.turns)}
