"""Environments as users write them, as files for the tests that run them from a command line."""

import asyncio
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from palaestra_slots.sandbox.isolation.isolation_probe import probe
from programs import nap

CLASS_ENV = '''
"""A class environment in the contract's shape: write a word to a file."""

from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

WORDS = ["alpha", "beta", "gamma"]


class WordsEnv(HermesAgentBaseEnv):
    name = "words"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal", "file"], group_size=2, total_steps=3)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.items = [{"id": word, "prompt": f"Write {word} to word.txt", "word": word,
                       "solution": f"echo {word} > word.txt"} for word in WORDS]
        self.iter = 0

    async def get_next_item(self):
        item = self.items[self.iter % len(self.items)]
        self.iter += 1
        return item

    def format_prompt(self, item):
        return item["prompt"]

    async def compute_reward(self, item, result, ctx):
        seen = ctx.terminal("cat word.txt")
        return 1.0 if seen["exit_code"] == 0 and seen["output"].strip() == item["word"] else 0.0

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log({**(wandb_metrics or {}), "train/words_seen": self.iter})

    async def evaluate(self, *args, **kwargs):
        done = await self.evaluate_items(self.items, 2)
        samples = [{"id": t.task_id} for t in done]
        await self.evaluate_log({"mean": sum(t.reward for t in done) / len(done)}, samples=samples)


if __name__ == "__main__":
    WordsEnv.cli()
'''

HOOKS_ENV = '''
"""A class environment with the sandbox hooks, called in both shapes."""

from palaestra import HermesAgentBaseEnv, ToolCall


class HooksEnv(HermesAgentBaseEnv):
    name = "hooks"

    async def setup(self):
        self.left = 2

    async def get_next_item(self):
        if not self.left:
            return None
        self.left -= 1
        return {"id": f"item{self.left}", "prompt": "?", "solution": "cat seed.txt > copy.txt"}

    def format_prompt(self, item):
        return item["prompt"]

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        wrote = await exec_tool("write_file", {"path": "seed.txt", "content": item["id"]})
        ran = await exec_tool(ToolCall("bash", {"command": "exit 3"}))
        assert wrote.success and not ran.success and ran.metadata["returncode"] == 3
        return {"seed": item["id"]}

    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        copied = await exec_tool("terminal", {"command": "cat copy.txt"}, timeout=30)
        alive = await exec_tool("bash", {"command": "pgrep -f '[s]leep 987' | wc -l"})
        right = copied.success and copied.output == workspace_meta["seed"]
        return float(right), {"copied": copied.output, "alive": alive.output.strip()}

    async def compute_reward(self, item, result, ctx):
        raise AssertionError("the verification hook replaces this")

    async def evaluate(self, *args, **kwargs):
        return {}


if __name__ == "__main__":
    HooksEnv.cli()
'''

COUNT_LINES = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def count_lines(n: int = 4):
    for i in range(n):
        yield Task(id=f"lines-{i}", prompt="Write the number of lines of a.txt to answer.txt",
                   files={"a.txt": "x\\n" * i}, solution="wc -l < a.txt > answer.txt", answer=str(i))

@count_lines.score
async def correct(task, sandbox):
    return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
"""

BAD_SETUP = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def half_broken():
    yield Task(id="good", prompt="?", solution="touch done")
    yield Task(id="bad", prompt="?", setup="echo no such thing >&2; exit 7", solution="touch done")

@half_broken.score
async def there(sandbox):
    return await sandbox.stat("done") is not None
"""

PAUSE = nap()
SLEEPER = f"""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def sleeper():
    yield Task(id="quick", prompt="?", solution="true")
    yield Task(id="slow", prompt="?", solution="{PAUSE}")

@sleeper.score
async def fine(task):
    return 1.0
"""

SUICIDE = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def dying():
    yield Task(id="calm", prompt="?", solution="touch done")
    yield Task(id="dying", prompt="?", solution="touch done")

@dying.score
async def there(task, rollout, sandbox):
    return await sandbox.stat("done") is not None
"""


def groups_file(folder: Path | str = "", env: str = "*") -> Path:
    """The groups of the latest run below the folder."""
    return max(Path(folder).glob(f"runs/{env}--*/*/groups.jsonl"), key=lambda path: path.stat().st_mtime_ns)


def need_level(level: str) -> None:
    """Skip the test if this isolation level is not available here."""
    if not any(status.available for status in asyncio.run(probe()) if status.rung.label == level):
        pytest.skip(f"{level} is not available here")


def acting(path: Path, works: Mapping[str, str | Sequence[str]], group_size: int = 1) -> str:
    """Write a recording in which the agent of each task runs these commands, and return the policy that plays it. The
    task's own solution is left to be the reference."""
    lines = []
    for task_id, commands in works.items():
        said: list[dict[str, object]] = []
        for number, command in enumerate([commands] if isinstance(commands, str) else commands):
            function = {"name": "terminal", "arguments": json.dumps({"command": command})}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            said += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        said += [{"role": "assistant", "content": "Done."}]
        lines += [{"task_id": task_id, "index": index, "messages": said} for index in range(group_size)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return f"replay:{path}"


def wheel(folder: Path, name: str, needs: str = "", version: str = "1.0", binary: Path | None = None) -> None:
    """Write a wheel with one module and its program `run-NAME`; `binary` is a further program, `NAME-binary`."""
    info = f"{name}-{version}.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        own = f"x = '{name} {version}'\n\ndef main():\n    print(x)\n"
        file.writestr(f"{name}.py", f"{f'import {needs}' if needs else ''}\n{own}")
        file.writestr(f"{info}/entry_points.txt", f"[console_scripts]\nrun-{name} = {name}:main\n")
        if binary is not None:
            file.write(binary, f"{name}-{version}.data/scripts/{name}-binary")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n")


def only_wheels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find packages in `folder / "index"` only, and begin with an empty cache."""
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
