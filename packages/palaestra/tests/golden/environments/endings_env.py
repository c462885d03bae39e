"""One task for each ending: scored, graded again, ungraded, without a tool's reply, unprepared, at a limit."""

from palaestra import Score, Task, ToolMistake, environment

graded: list[str] = []


@environment(toolsets=["terminal", "delegation"])
def endings():
    for name in ("errors", "flaky", "ungraded", "unavailable", "unprepared", "delegates", "endless", "short"):
        yield Task(
            id=name,
            prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Do it: {name}."}],
            files={"a.txt": "one\ntwo\nthree\n"},
            setup="echo 'no such thing' >&2; exit 7" if name == "unprepared" else None,
        )


@endings.tool(parallel_safe=True)
async def look_up(word: str) -> dict[str, object]:
    """Look a word up.

    Args:
        word: The word.
    """
    if word == "nothing":
        raise ToolMistake("There is no such word")
    return {"word": word, "letters": len(word)}


@endings.tool(touches_world=True)
async def ask_outside(question: str) -> str:
    """Ask somebody outside.

    Args:
        question: What to ask.
    """
    raise AssertionError("the run replays an empty recording")


@endings.score
async def done(task, rollout, sandbox):
    graded.append(task.id)
    if task.id == "ungraded" or (task.id == "flaky" and graded.count("flaky") == 1):
        raise KeyError("a missing column")
    made = await sandbox.read_text("done.txt", missing="")
    metrics = {"bytes": len(made), "errors": len(rollout.result.tool_errors)}
    return Score(float(bool(made)), metrics, {"made": made, "reply": rollout.final_response, "mixed": [1, None, "ä"]})
