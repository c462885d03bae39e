"""A bug-fixing task, and a model that solves it by text alone, for agents that others wrote."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence

from palaestra import Task, environment
from palaestra_slots.core.errors import SlotLost
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_tokens.testing.fake_engine import toy_logprob, toy_tokenizer

TOKENIZER = toy_tokenizer(["fix the bug in calc.py <tool_call> bash command sed the answer is done"] * 5)
FIX = "sed 's/a - b/a + b/' calc.py > fixed.py; mv fixed.py calc.py"


@environment
def fix_calc():
    yield Task(
        id="calc",
        prompt="calc.py has a bug: add(2, 3) gives -1. Fix it.",
        files={"calc.py": "def add(a, b):\n    return a - b\n"},
    )


@fix_calc.score
async def adds(task, sandbox):
    result = await sandbox.execute("python3 -c 'from calc import add; assert add(2, 3) == 5'")
    return 1.0 if result.success else 0.0


@environment
def repaired_by_tool():
    yield Task(id="calc", prompt="Repair calc.py.", files={"calc.py": "def add(a, b):\n    return a - b\n"})


@repaired_by_tool.tool
async def repair(file: str, sandbox: Slot) -> str:
    """Repair a Python file."""
    if file == "lost.py":
        raise SlotLost("the workshop burnt down")
    text = await sandbox.read_text(file)
    await sandbox.write_text(file, text.replace("a - b", "a + b"))
    return f"{file} is repaired."


repaired_by_tool.score(adds)


class Fixer(TokenChat):
    """Samples, with a toy tokenizer, a call of the agent's own shell tool that fixes the bug, and then an answer.
    Without tools it writes a title. `prompts` has what it was given, as text."""

    fix = FIX
    shells = (
        "exec_command", "shell_command", "shell", "bash", "Bash", "terminal", "run_shell_command", "run_commands",
        "execute_bash", "agent_run_shell_command", "execute",
    )  # fmt: skip

    def __init__(self, *, last: str = "The bug is fixed.") -> None:
        super().__init__(APIServerConfig(model_name="fixer", tool_parser="hermes"), tokenizer=TOKENIZER)
        self.prompts: list[str] = []
        self.sampled, self._last = 0, last

    async def aclose(self) -> None: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        text = TOKENIZER.decode(list(input_ids), skip_special_tokens=False)
        self.prompts.append(text)
        ids = [*TOKENIZER.encode(self._reply(text)), TOKENIZER.stop_ids[0]]
        self.sampled += len(ids)
        place = len(array("i", input_ids))
        return Sampled(ids, [toy_logprob(each, place + at) for at, each in enumerate(ids)], "stop", "v1")

    def _reply(self, text: str) -> str:
        offered = tools_of(text)
        shell = next((name for name in self.shells if name in offered), None)
        if shell is None:
            return "Fixing calc"
        if "<|im_start|>tool" in text:
            return self._last
        call = {"name": shell, "arguments": filled(offered[shell], self.fix)}
        return f"I fix it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def tools_of(text: str) -> dict[str, JSON]:
    """The parameters' schema of each tool in a prompt's list, by the tool's name."""
    lines = (line for line in text.split("<|im_end|>")[0].splitlines() if line.startswith('{"type": "function"'))
    functions = [json.loads(line)["function"] for line in lines]
    return {function["name"]: function["parameters"] for function in functions}


def required(schema: JSON, names: Sequence[str]) -> dict[str, JSON]:
    """Arguments for what a tool requires except these names."""
    values: dict[str, JSON] = {"boolean": False, "string": "Fix the bug", "integer": 10, "number": 10}
    needed = {name: schema["properties"][name] for name in schema.get("required", ()) if name not in names}
    return {
        name: min(each["enum"], key="shell".__ne__) if "enum" in each else values[each.get("type", "string")]
        for name, each in needed.items()
    }


def filled(schema: JSON, command: str) -> dict[str, JSON]:
    """Arguments of a shell's tool that run a command, and what else the tool requires."""
    arguments = required(schema, COMMANDS)
    name = next(name for name in COMMANDS if name in schema["properties"])
    if schema["properties"][name].get("type") != "array":
        return {**arguments, name: command}
    return {**arguments, name: [command] if name == "commands" else ["bash", "-c", command]}


COMMANDS = ("command", "cmd", "commands", "code")


class Repairer(Fixer):
    """Calls the environment's tool `repair`, by the name that an agent gives it, or by the shell if it gives none."""

    fix = """python3 /tmp/agent/tools.py repair '{"file": "calc.py"}'"""

    def _reply(self, text: str) -> str:
        offered = tools_of(text)
        tool = next((name for name in offered if name.endswith("repair")), None)
        if tool is None or "<|im_start|>tool" in text:
            return super()._reply(text)
        arguments = {**required(offered[tool], ("file",)), "file": "calc.py"}
        return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
