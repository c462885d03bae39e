"""Tasks of Inspect, which the tests run with Inspect's runner and with ours."""

import os
import time

from inspect_ai import Task, task
from inspect_ai.agent import AgentPrompt, react
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelAPI, ModelOutput, ModelUsage, get_model, modelapi
from inspect_ai.scorer import Score, Target, accuracy, choice, includes, match, model_graded_fact, scorer
from inspect_ai.solver import TaskState, chain_of_thought, generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import bash, web_search
from inspect_ai.util import sandbox


@task
def sums(n: int = 3, seed: int = 0, task_name: str = "sums"):
    """Add numbers."""
    samples = [Sample(input=f"{i}+{i}=?", target=str(2 * i)) for i in range(1, n + 1)]
    solver = [system_message("Answer with a number."), chain_of_thought(), generate()]
    return Task(dataset=samples, solver=solver, scorer=match(numeric=True))


@task
def colours(shuffle: bool = False):
    samples = [
        Sample(id=f"c{i}", input="Which?", choices=["red", "green", "blue"], target="ABC"[i], metadata={"n": i})
        for i in range(3)
    ]
    return Task(dataset=samples, solver=multiple_choice(shuffle=shuffle), scorer=choice())


@scorer(metrics=[accuracy()])
def counted():
    async def score(state: TaskState, target: Target) -> Score:
        text = await sandbox().read_file("answer.txt")
        total = await sandbox().exec(["sh", "-c", "wc -l < data.txt"])
        right = total.success and text.strip() == total.stdout.strip() == target.text
        return Score(value="C" if right else "P", answer=text)

    return score


@task
def count():
    samples = [
        Sample(
            id=f"n{n}",
            input="Count the lines of data.txt into answer.txt.",
            target=str(n),
            files={"data.txt": "x\n" * n},
            setup="#!/usr/bin/env python3\nopen('ready.txt', 'w').write('yes')\n",
        )
        for n in (2, 5)
    ]
    return Task(
        dataset=samples, solver=[use_tools(bash()), generate()], scorer=[counted(), includes()], sandbox="docker"
    )


@task
def slow(n: int = 12):
    samples = [Sample(id=f"s{i}", input="x", target="y", setup="sleep 0.3") for i in range(n)]
    return Task(dataset=samples, scorer=includes(), sandbox="local")


@task
def refused(why: str = "tool"):
    sample = Sample(input="x", target="y", files={"leak.txt": os.path.abspath(os.__file__)} if why == "file" else None)
    if why == "tool":
        return Task(dataset=[sample], solver=[use_tools(web_search("tavily")), generate()], scorer=match())
    if why == "scorer":
        return Task(dataset=[sample], scorer=model_graded_fact())
    if why == "image":
        return Task(dataset=[sample], scorer=match(), sandbox=("docker", "compose.yaml"))
    if why == "twice":
        return Task(dataset=[sample], solver=[generate(), generate()], scorer=match())
    if why == "model":
        return Task(dataset=[sample], solver=_own_model(), scorer=match())
    return Task(dataset=[sample], scorer=match())


def _own_model():
    async def solve(state: TaskState, generate):
        state.output = await get_model().generate(f"{time.time()}")
        return state

    return solve


@modelapi("judge")
class Judge(ModelAPI):
    """Finds the answer `y` correct."""

    async def generate(self, input, tools, tool_choice, config):  # noqa: A002  # the interface's names
        output = ModelOutput.from_content(
            "judge/x", "GRADE: C" if "[Submission]: y\n" in input[-1].text else "GRADE: I"
        )
        output.usage = ModelUsage()
        return output


@task
def judged():
    return Task(dataset=[Sample(input="x", target="y"), Sample(input="x", target="y")], scorer=model_graded_fact())


@task
def agent():
    solver = react(prompt=AgentPrompt(instructions="Be brief."), tools=[bash()])
    return Task(dataset=[Sample(input="x", target="y")], solver=solver, scorer=includes(), sandbox="docker")
