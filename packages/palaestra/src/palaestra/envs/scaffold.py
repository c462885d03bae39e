"""Writes a new environment: one runnable file, in which the oracle passes and doing nothing fails."""

from __future__ import annotations

import builtins
import re
from keyword import iskeyword
from pathlib import Path

from palaestra_slots.core.errors import ConfigError

FUNCTION = '''"""{title}: the agent repairs a function, and fresh numbers decide.

palaestra run {path} --policy oracle
palaestra env check {path}
"""

from collections.abc import Iterator
from random import Random

from palaestra import Slot, Task, environment


@environment(toolsets=["terminal"])
def {name}(n: int = 10) -> Iterator[Task]:  # parameters become flags: --env.n 20
    for factor in range(2, n + 2):
        yield Task(
            id=f"{name}-{{factor}}",
            prompt=f"scale(numbers) in scale.py must return a list of the numbers multiplied by {{factor}}. Repair it.",
            files={{"scale.py": "def scale(numbers):\\n    return numbers\\n"}},
            solution=f"sed -i 's/return numbers/return [{{factor}} * number for number in numbers]/' scale.py",
            answer=factor,
        )


@{name}.score
async def right(task: Task, sandbox: Slot, rng: Random) -> bool:
    """Return whether the function is right. `sandbox` is a fresh slot with the agent's changes."""
    numbers = [rng.randint(1, 99) for _ in range(5)]
    # The agent's code runs in a process of its own, and cannot reach this comparison. For whole files of tests, use
    # run_tests of palaestra.grading.
    return await sandbox.call("scale:scale", [numbers]) == [task.answer * number for number in numbers]
'''

CLASS = '''"""{title}: the agent writes the sum of some numbers to a file.

python {path} process --policy oracle
palaestra env check {path}
"""

from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig


class {camel}Env(HermesAgentBaseEnv):
    name = "{name}"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=2, total_steps=10)
        return config, [APIServerConfig(base_url="http://localhost:8000/v1", model_name="NAME")]

    async def setup(self):
        self.items = [{{"id": f"{name}-{{i}}", "numbers": list(range(i, 3 * i))}} for i in range(1, 11)]
        self.drawn = 0

    async def get_next_item(self):
        self.drawn += 1
        return self.items[(self.drawn - 1) % len(self.items)]

    def format_prompt(self, item):
        return "numbers.txt has one number on each line. Write their sum to answer.txt."

    async def prepare_group(self, item, exec_tool):
        text = "".join(f"{{number}}\\n" for number in item["numbers"])
        await exec_tool("write_file", {{"path": "numbers.txt", "content": text}})

    def reference_solution(self, item):
        return "python3 -c 'print(sum(map(int, open(\\"numbers.txt\\"))))' > answer.txt"

    async def compute_reward(self, item, result, ctx):
        # Compare here what the agent left. A program that the agent wrote could print any output, or end early.
        answer = ctx.read_file("answer.txt").get("content", "")
        return float(answer.strip() == str(sum(item["numbers"])))

    async def evaluate(self, *args, **kwargs):
        done = await self.evaluate_items(self.items, samples=1)
        rewards = [each.reward for each in done if each.scored]  # a failed rollout has no reward, not 0
        mean = sum(rewards) / len(rewards) if rewards else None
        await self.evaluate_log({{"mean": mean, "unscored": len(self.items) - len(rewards)}})


if __name__ == "__main__":
    {camel}Env.cli()
'''

CONVERSATION = '''"""{title}: the agent serves a guest of a restaurant, with tools over a database.

palaestra run {path} --policy oracle
palaestra env check {path}
"""

from palaestra import Say, Task, ToolError, ToolStep, environment

TABLES = {{"T1": {{"seats": 2, "guest": ""}}, "T2": {{"seats": 4, "guest": "Kim"}}, "T3": {{"seats": 6, "guest": ""}}}}
POLICY = "You take bookings for a restaurant. Ask for name and number of people. Choose the smallest free table."
GUESTS = [("Ada", 2, "T1"), ("Bo", 5, "T3"), ("Cleo", 4, "T3")]


@environment(toolsets=[], max_turns=10)
def {name}():
    prompt = [{{"role": "system", "content": POLICY}}, {{"role": "user", "content": "Hello, I need a table."}}]
    for guest, people, table in GUESTS:
        calls = [ToolStep("free_tables", {{"people": people}}), ToolStep("book", {{"table": table, "guest": guest}})]
        steps = [Say("For whom, and how many?"), *calls, Say(f"It is {{table}}.")]
        yield Task(guest, prompt, data={{"guest": guest, "people": people, "table": table}}, solution=steps)


@{name}.state
def database():  # made for each rollout, and kept in the journal as JSON
    return {{"tables": {{number: dict(table) for number, table in TABLES.items()}}, "asked": 0}}


@{name}.user
def guest(task, state):  # returns the next message of the user, or None at the end
    state["asked"] += 1
    return f"{{task.data['guest']}}, for {{task.data['people']}}." if state["asked"] == 1 else None


@{name}.tool
def free_tables(people: int, *, state) -> list:
    """List the free tables for a number of people, with their seats."""
    free = {{number: table["seats"] for number, table in state["tables"].items() if not table["guest"]}}
    return [[number, seats] for number, seats in free.items() if seats >= people]


@{name}.tool
def book(table: str, guest: str, *, state) -> str:
    """Book a free table for a guest."""
    found = state["tables"].get(table)
    if found is None or found["guest"]:
        raise ToolError("there is no such free table")  # the model sees this text
    found["guest"] = guest
    return "booked"


@{name}.score
def right(task, state, rollout) -> bool:
    table, guest = task.data["table"], task.data["guest"]
    wanted = {{number: dict(each, guest=guest) if number == table else each for number, each in TABLES.items()}}
    said = (rollout.final_response or "").replace(".", " ").split()
    return state["tables"] == wanted and said.count(table) == 1 and not {{*said}} & ({{*TABLES}} - {{table}})
'''

TEMPLATES = {"function": FUNCTION, "class": CLASS, "conversation": CONVERSATION}

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def write_environment(name: str, folder: Path, template: str = "function") -> Path:
    """Write `<name>_env.py` from one of `TEMPLATES` and return its path. Raises `ConfigError` if the name is invalid or
    that of a function in the template, or if the file exists or cannot be written."""
    name = name.removesuffix(".py").removesuffix("_env")
    if not _NAME.fullmatch(name) or iskeyword(name) or hasattr(builtins, name):
        raise ConfigError(
            f"{name!r} cannot name an environment: use lower-case letters, digits and _, begin with a "
            "letter, and avoid the names of Python's keywords and built-in functions"
        )
    path = folder / f"{name}_env.py"
    camel = "".join(word.capitalize() for word in name.split("_"))
    text = TEMPLATES[template].format(name=name, camel=camel, title=name.replace("_", " ").capitalize(), path=path)
    if text.count(f"def {name}(") > 1:
        raise ConfigError(f"the template has another function {name!r}: choose another name")
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} already exists: choose another name, or move it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    return path
