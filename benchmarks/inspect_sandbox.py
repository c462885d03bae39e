"""Inspect's evaluations in our sandbox and in Inspect's `local` one: equal scores, and the time that a sample needs.

    /path/to/env/bin/python benchmarks/inspect_sandbox.py

Needs an interpreter with palaestra, inspect-ai and inspect-evals. The model is Inspect's `mockllm`; the evaluations are
eight of `inspect_evals`, with their scorers over small rows, and tasks with files, setup, tools, input, timeouts and
binary files. `local` runs everything on this machine without isolation. Docker is not measured: Inspect
needs `docker compose` for it.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure as measure
import inspect_ai.util._sandbox.self_check as self_check
from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, includes, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash, python
from inspect_ai.util import sandbox
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment
from inspect_evals.apps.apps import verify as apps
from inspect_evals.bigcodebench.bigcodebench import verify as bigcodebench
from inspect_evals.class_eval.class_eval import class_eval_scorer
from inspect_evals.gaia.scorer import gaia_scorer
from inspect_evals.humaneval.humaneval import verify as humaneval
from inspect_evals.ifevalcode.scorer import ifevalcode_scorer
from inspect_evals.mbpp.mbpp import verify as mbpp
from inspect_evals.usaco.usaco import verify as usaco

from palaestra_integrations.inspect_sandbox import PalaestraSandbox

SANDBOXES = {"palaestra": PalaestraSandbox, "local": LocalSandboxEnvironment}

Reply = str | tuple[str, dict[str, str]]


@scorer(metrics=[accuracy()])
def passes(*command: str, stdin: str = "", path: str = "", timeout: int = 2) -> Any:
    """Score whether a command in the sandbox prints the target, given input or a file's content as input."""

    async def score(state: TaskState, target: Target) -> Score:
        try:
            given = (await sandbox().read_file(path, text=False)) if path else stdin
            result = await sandbox().exec(
                list(command), input=given, cwd="deep", env={"COLOUR": "red"}, timeout=timeout, timeout_retry=False
            )
        except (FileNotFoundError, TimeoutError) as error:
            return Score(value="N", answer=type(error).__name__)
        right = result.success and result.stdout.strip() == target.text
        return Score(value="C" if right else "I", answer=f"{result.returncode} {result.stdout}")

    return score


FILES = {"deep/data.txt": "one\ntwo\n", "deep/b.bin": "data:application/octet-stream;base64,w/8AAQ=="}
HUMANEVAL = {"prompt": "def f(n):\n    ", "test": "def check(f):\n    assert f(3) == 6\n", "entry_point": "f"}
CLASS = {"test": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(A().f(), 1)\n"}


UNIT_TEST = {"test": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)\n"}
LANGUAGES = {
    "python": ("```python\ndef f(n): return n * 2\n```", "def check_correctness():\n    assert f(2) == 4"),
    "javascript": (
        "```javascript\nfunction f(n) { return n * 2 }\n```",
        "function check_correctness() { if (f(2) !== 4) throw new Error('wrong') }",
    ),
    "shell": ("```bash\nf() { echo $(($1 * 3)); }\n```", 'check_correctness() { [ "$(f 2)" = 4 ] || exit 1; }'),
}


USACO_TESTS = tempfile.TemporaryDirectory(prefix="usaco-")


def usaco_metadata() -> dict[str, Any]:
    """Return a sample's metadata, with the folder of its tests."""
    folder = Path(USACO_TESTS.name)
    for number in (1, 2):
        (folder / f"{number}.in").write_text(f"{number}\n")
        (folder / f"{number}.out").write_text(f"{2 * number}\n")
    limits = {"runtime_limit_secs": 2, "memory_limit_mbs": 512}
    return {"num_tests": 2, "test_assets_path": folder, **limits}


def ifevalcode_samples() -> list[Sample]:
    adheres = "def check_instruction(response):\n    return 'f' in response\n"
    return [
        sample("", metadata={"programming_language": name, "check_correctness": check, "check_instruction": adheres})
        for name, (_, check) in LANGUAGES.items()
    ]


def sample(target: str | list[str], **more: Any) -> Sample:
    return Sample(input="x", target=target, **{"files": FILES, **more})


EVALUATIONS: dict[str, tuple[Callable[[], Task], list[Reply]]] = {
    "humaneval": (
        lambda: Task([sample("", metadata=HUMANEVAL) for _ in range(3)], scorer=humaneval()),
        ["return n * 2", "return n", "while True: pass; (" * 2],
    ),
    "mbpp": (
        lambda: Task([sample(["assert f(2) == 4", "assert f(0) == 0"]) for _ in range(2)], scorer=mbpp()),
        ["```python\ndef f(n): return n * n\n```", "```python\ndef f(n): return n + 1\n```"],
    ),
    "class_eval": (
        lambda: Task([sample("", metadata=CLASS) for _ in range(2)], scorer=class_eval_scorer()),
        ["```python\nclass A:\n    def f(self): return 1\n```", "```python\nclass A: pass\n```"],
    ),
    "apps": (
        lambda: Task([sample(["assert f(2) == 4", "assert f(0) == 0"]) for _ in range(2)], scorer=apps()),
        ["```python\ndef f(n): return n * 2\n```", "```python\ndef f(n): return 4\n```"],
    ),
    "bigcodebench": (
        lambda: Task([sample("", metadata=UNIT_TEST) for _ in range(2)], scorer=bigcodebench()),
        ["```python\ndef f(n): return n * 2\n```", "```python\ndef f(n): return n\n```"],
    ),
    "usaco": (
        lambda: Task([sample("", metadata=usaco_metadata()) for _ in range(3)], scorer=usaco()),
        ["```python\nprint(2 * int(input()))\n```", "```python\nprint(2)\n```", "```python\nwhile True: pass\n```"],
    ),
    "ifevalcode": (
        lambda: Task(ifevalcode_samples(), scorer=ifevalcode_scorer()), [code for code, _ in LANGUAGES.values()],
    ),
    "gaia": (
        lambda: Task([sample("2"), sample("3")], solver=[use_tools(bash()), generate()], scorer=gaia_scorer()),
        [("bash", {"command": "wc -l < deep/data.txt"}), "2", ("bash", {"command": "cat deep/none"}), "2"],
    ),
    "files and setup": (
        lambda: Task([sample("two!", setup="tail -n 1 deep/data.txt | tr -d '\\n' > deep/o; printf ! >> deep/o")],
                     scorer=passes("cat", "o")),
        ["done"],
    ),
    "bash": (
        lambda: Task([sample("2"), sample("3")], solver=[use_tools(bash()), generate()], scorer=passes("cat", "n")),
        [("bash", {"command": "wc -l < deep/data.txt > deep/n"}), "done", ("bash", {"command": "exit 3"}), "done"],
    ),
    "python": (
        lambda: Task([sample("42")], solver=[use_tools(python()), generate()], scorer=[passes("cat", "n"), includes()]),
        [("python", {"code": "open('deep/n', 'w').write(str(6 * 7))"}), "42"],
    ),
    "input and variables": (
        lambda: Task([sample("a $b `c` red")], scorer=passes("sh", "-c", 'cat; echo " $COLOUR"', stdin="a $b `c`")),
        ["done"],
    ),
    "binary file": (
        lambda: Task([sample("c3ff0001")], scorer=passes("sh", "-c", "od -An -tx1 | tr -d ' '", path="deep/b.bin")),
        ["done"],
    ),
    "time limit": (lambda: Task([sample("x")], scorer=passes("sleep", "30", timeout=1)), ["done"]),
    "missing file": (lambda: Task([sample("x")], scorer=passes("cat", path="deep/none")), ["done"]),
    "failing command": (lambda: Task([sample("x")], scorer=passes("sh", "-c", "echo x; exit 3")), ["done"]),
}  # fmt: skip


def model(replies: list[Reply]) -> Any:
    outputs = [
        ModelOutput.from_content("mockllm/model", each)
        if isinstance(each, str)
        else ModelOutput.for_tool_call("mockllm/model", *each)
        for each in replies
    ]
    for output in outputs:
        output.usage = ModelUsage()  # counting tokens would need the network
    return get_model("mockllm/model", custom_outputs=outputs, memoize=False)


def scores(name: str, where: str, folder: str) -> list[Any]:
    """Run an evaluation, and return the values and answers of all scores."""
    task, replies = EVALUATIONS[name]
    log = eval(task(), model=model(replies), sandbox=where, display="none", log_dir=folder, max_samples=1)[0]
    assert log.status == "success", log.error
    found = [(str(each.id), name, score) for each in log.samples or () for name, score in (each.scores or {}).items()]
    return [(number, scorer, score.value, score.answer) for number, scorer, score in found]


async def times(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds to make a sandbox, to run a command, and to end the sandbox."""
    found: dict[str, dict[str, list[float]]] = {where: {} for where in SANDBOXES}
    for kind in SANDBOXES.values():
        await kind.task_init("t", None)
    for _ in range(rounds):
        for where, kind in SANDBOXES.items():
            marks = [time.perf_counter()]
            made = await kind.sample_init("t", None, {})
            marks.append(time.perf_counter())
            await made["default"].exec(["true"])
            marks.append(time.perf_counter())
            await kind.sample_cleanup("t", None, made, False)
            marks.append(time.perf_counter())
            for name, begin, end in zip(("init", "exec", "cleanup"), marks, marks[1:], strict=False):
                found[where].setdefault(name, []).append((end - begin) * 1000)
    for kind in SANDBOXES.values():
        await kind.task_cleanup("t", None, True)
    return {where: {name: statistics.median(each) for name, each in of.items()} for where, of in found.items()}


async def checks(where: str, quick: bool) -> float:
    """Return the share of Inspect's self-check that passes in percent."""
    kind = SANDBOXES[where]
    names = [each for each in self_check.__all__ if not (quick and "timeout" in each)]
    await kind.task_init("t", None)
    made = await kind.sample_init("t", None, {})
    passed = 0
    for name in names:
        try:
            await getattr(self_check, name)(made["default"])
            passed += 1
        except Exception as error:
            print(f"{where}: {name}: {error!r:.200}", file=sys.stderr)
    await kind.sample_cleanup("t", None, made, False)
    await kind.task_cleanup("t", None, True)
    return 100 * passed / len(names)


def main() -> int:
    """Measure and print the table."""
    options = measure.parse_options(__doc__, rounds=100)
    names = list(EVALUATIONS)[:3] if options.quick else list(EVALUATIONS)
    equal = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            measure.progress(name)
            ours, local = (scores(name, where, folder) for where in SANDBOXES)
            equal += ours == local
            if ours != local:
                print(f"{name}: {ours} in palaestra, {local} in local", file=sys.stderr)
    measured = asyncio.run(times(max(3, options.rounds)))
    rows = [measure.with_floor(measure.Row(f"of {len(names)} evaluations with equal scores", equal, ""), len(names))]
    rows += [measure.Row(f"self-check: {where}", asyncio.run(checks(where, options.quick)), "%") for where in SANDBOXES]
    for name in ("init", "exec", "cleanup"):
        peer = measured["local"][name]
        rows.append(measure.Row(f"sample {name}: local", peer, "ms"))
        row = measure.Row(f"sample {name}: palaestra", measured["palaestra"][name], "ms")
        rows.append(measure.Row(row.name, row.value, "ms", row.value / peer))
    return measure.report("Inspect's samples in slots, next to its local sandbox", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
