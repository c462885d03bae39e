"""Two tasks for token-exact runs: one for a single agent, one with sub-agents."""

from palaestra import Task, environment


@environment(toolsets=["terminal", "code_execution", "delegation"])
def exact():
    for name, prompt in (("alone", "Count the lines of a.txt."), ("shared", "Have a.txt counted and copied.")):
        yield Task(id=name, prompt=prompt, files={"a.txt": "one\ntwo\nthree\n"}, answer="3")


@exact.score
async def correct(task, rollout, sandbox):
    right = (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
    return right / (1 + rollout.index)
