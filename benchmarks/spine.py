"""The amount of code that one rollout passes through: python benchmarks/spine.py [--quick] [--json FILE] [--files]

Counts the files of our packages in which a function is called, and the deepest stack of their frames, in real runs of
the command line, each in a separate process:

`run` is one task, one rollout and one command in a slot (the reference solution), scored by a function that reads one
file. Grading is also counted alone, with everything that is called until it returns. The report that the run writes at
its end is counted alone too, and not as a part of the run: nothing of the run depends on it. `calls` is a rollout with
two commands, of which only the second is counted, because the first creates the slot. `tokens` is a token-exact run of
two turns that executes no tool; the functions that handle its tokens are counted: sampling, the record, the journal and
the exported group. `swe` is a run over one row of SWE-bench, made here, of which the score is counted; its tests run
with pytest from the package index. `message` is the second message of a conversation in the gateway, from its arrival
to the answer.

Only the process of the run counts, not the slot server. Code that runs while a module is imported does not count. The
numbers include code that runs concurrently, so they can differ by one or two between runs, and by more on a busy
machine. A run with a number above its cap is therefore traced again. The exit code is 1 if a number is still above its
cap. `--files` lists the files behind each number.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import io
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import _measure as measure

ENVIRONMENTS = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def greeting():
    yield Task(id="greet", prompt="Copy name.txt to greeting.txt", files={"name.txt": "Ada"},
               solution="cp name.txt greeting.txt", answer="Ada")

@greeting.score
async def copied(task, sandbox):
    return (await sandbox.read_text("greeting.txt", missing="")) == task.answer

@environment(toolsets=["terminal"])
def twice():
    yield Task(id="twice", prompt="Make a and b", solution=["touch a", "touch b"])

@twice.score
async def both(sandbox):
    return await sandbox.stat("b") is not None

@environment(toolsets=["terminal"])
def talk():
    yield Task(id="talk", prompt="Say hello")

@talk.score
async def spoken(rollout):
    return "hello" in rollout.final_response
"""
UNKNOWN_CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
"""The first reply of the token-exact run. It calls an unknown tool, so that a second turn follows and nothing is
executed."""
LAST_REPLY = "hello"
PYTEST = ["pytest", "pluggy", "iniconfig", "packaging", "pygments"]
"""What the tests of the row need; a row lists all packages, because it pins them."""


@dataclass(frozen=True)
class Part:
    """A part of a run: the time during which calls of these functions are in progress, except the first `skipped`
    calls.

    Functions are written as `file:qualified name`, with the file's path in `palaestra`.
    """

    functions: tuple[str, ...]
    skipped: int = 0


PARTS = {
    "tool call": Part(("agent/tool_calls.py:ToolCalls.run",), skipped=1),
    "grading": Part(("rollouts/environment.py:Environment.grade",)),
    "report": Part(("palaestra_view/page_file.py:write_report",)),
    "SWE score": Part(("palaestra_suites/swe/swe_smith_oracle.py:SweEnvironment.score",)),
    "token to group": Part(
        (
            "palaestra_tokens/token_exact/managed_chat.py:ManagedChat.chat_completion",
            "rollouts/turn_log.py:TurnLog.record",
            "rollouts/rollout.py:Rollout.trajectory",
            "rollouts/group.py:GroupRun._write_record",
            "rollouts/export/atropos.py:GroupsFile._write_lines",
        )
    ),
}
WHOLE, REPORT, MESSAGE = "whole run", "report", "message"
RUNS = {
    "run": (WHOLE, "grading", REPORT),
    "calls": ("tool call",),
    "tokens": ("token to group",),
    "swe": ("SWE score",),
    "message": (MESSAGE,),
}
"""The runs, and the parts that are counted in each run."""

GOALS = {WHOLE: 74, "tool call": 26, "grading": 26, REPORT: 20, "token to group": 32, "SWE score": 30}
"""The target for the number of files of each part."""
LINES_GOAL = 19_000
"""The target for the number of lines in the files of a one-command run."""
DEPTH_GOALS = {"run": 20, "tokens": 26}
"""The target for the number of frames of each run's deepest stack."""
CAPS = {WHOLE: 90, "tool call": 24, "grading": 29, REPORT: 22, "token to group": 34, "SWE score": 41, MESSAGE: 49}
"""The number of files of each part above which the exit code is 1."""
DEPTH_CAPS = {"run": 22, "tokens": 28}
"""The number of frames of each run's deepest stack above which the exit code is 1."""

NAMES = {
    WHOLE: "a one-command run",
    "tool call": "one terminal call in a slot",
    "grading": "grading by one read file",
    REPORT: "the report at the end of a run",
    "token to group": "from token to exported group",
    "SWE score": "the score of a SWE row",
    MESSAGE: "one message through the gateway",
}

_AGAIN = 2
"""How often a run with a number above its cap is traced again; what all traces have counts."""

_YIELD_VALUE, _RESUME = dis.opmap["YIELD_VALUE"], dis.opmap["RESUME"]


@dataclass(frozen=True)
class Traced:
    """The result of one traced run: the frames of the deepest stack, and the sorted files of each part."""

    depth: int
    files: dict[str, list[str]]


@dataclass
class Tracer:
    """Records our files whose code runs, in total and by part. `depth` is the number of our frames on the deepest
    stack."""

    parts: Sequence[str]
    depth: int = 0
    files: dict[str, set[str]] = field(default_factory=dict)
    _called: Counter[str] = field(default_factory=Counter)
    _open: Counter[str] = field(default_factory=Counter)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Handle one event of the profiler. Source of the events: `sys.setprofile`."""
        if event not in ("call", "return") or not (file := measure.own_file(frame.f_code.co_filename)):
            return
        place = f"{file}:{frame.f_code.co_qualname}"
        if event == "return":
            if not _is_suspended(frame):
                self._open -= Counter(part for part in self._parts_of(place) if self._open[part])
            return
        depth = self._depth(frame)
        if depth == 0:
            return
        if not _is_resumed(frame):
            self._called.update([place])
            self._open.update(part for part in self._parts_of(place) if self._called[place] > PARTS[part].skipped)
            for opened in [REPORT] if self._open[REPORT] else [WHOLE, *self._open]:
                self.files.setdefault(opened, set()).add(file)
        if not self._open[REPORT]:
            self.depth = max(self.depth, depth)

    def _depth(self, frame: FrameType) -> int:
        """Return the number of our frames on the stack; 0 while a module is imported."""
        depth, each = 0, cast("FrameType | None", frame)
        while each is not None:
            if each.f_code.co_name == "<module>" and measure.own_file(each.f_code.co_filename) != "":
                return 0
            depth += measure.own_file(each.f_code.co_filename) != ""
            each = each.f_back
        return depth

    def _parts_of(self, place: str) -> list[str]:
        # The report is not a part of any run, so it is watched in all of them.
        return [part for part in {*self.parts, REPORT} if part in PARTS and place in PARTS[part].functions]

    def missing(self) -> list[str]:
        """Return the functions of the parts that were not called."""
        functions = (each for part in self.parts if part in PARTS for each in PARTS[part].functions)
        return [each for each in functions if not self._called[each]]


def _is_suspended(frame: FrameType) -> bool:
    """Return whether the frame has yielded or awaits, and has not really returned; both cause `return` events."""
    return frame.f_code.co_code[frame.f_lasti] == _YIELD_VALUE


def _is_resumed(frame: FrameType) -> bool:
    """Return whether the frame is resumed rather than called; both cause `call` events. Source: opcode `RESUME` in
    `dis`."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return code[at] == _RESUME and code[at + 1] & 3 != 0


@contextmanager
def tracing(tracer: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """Trace this thread and the threads that start in the block."""
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def sample(run: str, url: str) -> Traced:
    """Trace one run of the command line in this process."""
    from palaestra.cli.main import main as command

    tracer = Tracer(RUNS[run])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("envs.py").write_text(ENVIRONMENTS)
        settings = [f"envs.py:{'twice' if run == 'calls' else 'greeting'}", "--policy", "oracle"]
        if run == "tokens":
            settings = ["envs.py:talk", *_token_server(url, folder)]
        if run == "swe":
            settings = ["swe_smith_oracle", "--policy", "oracle", "--group", "1", *_swe_row(Path(folder))]
        sys.argv = ["palaestra", "run", *settings]
        with contextlib.redirect_stderr(io.StringIO()) as log, tracing(tracer):
            try:
                code: object = command()
            except SystemExit as ended:
                code = ended.code
        assert not code, f"{sys.argv} ended with {code}:\n{log.getvalue()}"
        (groups,) = Path("runs").rglob("groups.jsonl")
        assert json.loads(groups.read_text())["scores"] == [1.0], log.getvalue()
    assert not tracer.missing(), f"these functions were never called, or were renamed: {tracer.missing()}"
    return Traced(tracer.depth, {part: sorted(files) for part, files in tracer.files.items()})


def _swe_row(folder: Path) -> list[str]:
    """Make a repository with one bug, and a row about it; return the settings of its run."""
    repository, settings = folder / "repository", ["-c", "user.name=a", "-c", "user.email=a@localhost"]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *settings, *words], cwd=repository, check=True, capture_output=True, text=True
        ).stdout

    repository.mkdir()
    git("init", "-q")
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    test = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    (repository / "test_calc.py").write_text(test)
    git("add", "-A")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    patch = git("diff")
    git("checkout", "-q", ".")
    (repository / "note.txt").write_text("a note\n")
    git("add", "-AN")
    row = {
        "instance_id": "one",
        "repo": "owner/name",
        "base_commit": commit,
        "problem_statement": "add subtracts",
        "repo_path": str(repository),
        "patch": patch,
        "test_patch": git("diff"),
        "FAIL_TO_PASS": ["test_calc.py::test_add"],
        "PASS_TO_PASS": [],
        "install": {"python_path": ["."], "requirements": PYTEST},
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return ["--env.dataset_name", str(folder / "rows.jsonl"), "--env.cache_dir", str(folder / "cache")]


async def message(url: str) -> Traced:
    """Trace the second message of a conversation in a gateway."""
    from palaestra_chat.service import ChatService, ChatSettings
    from palaestra_chat.store import ConversationStore
    from palaestra_gateway.config import GatewayConfig
    from palaestra_gateway.mailbox import Mailbox
    from palaestra_gateway.platforms.loopback import Loopback
    from palaestra_gateway.service import Gateway
    from palaestra_tokens.config import APIServerConfig

    tracer = Tracer(())
    config = GatewayConfig.from_dict({"platforms": {"loopback": {"allowed_users": ["*"]}}})
    async with contextlib.AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        platform, mailbox = Loopback(), Mailbox(home / "gateway.db")
        stack.push_async_callback(mailbox.aclose)
        store = stack.enter_context(contextlib.closing(ConversationStore(home / "conversations.db")))
        server = APIServerConfig(base_url=f"{url}/v1", model_name="m")
        chat = await stack.enter_async_context(ChatService(server, store, ChatSettings()))
        await stack.enter_async_context(Gateway(config, [platform], mailbox, chat).running())

        async def say(number: str) -> None:
            await platform.say("hello", chat_id="anna", user_id="anna", message_id=number)
            await platform.receive("anna")

        await say("1")
        with tracing(tracer):
            await say("2")
            await asyncio.sleep(0.1)  # the answer is recorded after it was sent
    return Traced(tracer.depth, {MESSAGE: sorted(tracer.files[WHOLE])})


def _token_server(url: str, folder: str) -> list[str]:
    from _exact import saved_tokenizer

    model = {"base_url": url, "server_type": "sglang", "model_name": "m", "tokenizer_name": saved_tokenizer(folder)}
    return [word for name, value in model.items() for word in (f"--openai.{name}", value)]


async def model_server() -> None:
    """Serve the replies of the token-exact run, as tokens of the tiny model's tokenizer."""
    from _exact import said, saved_tokenizer, turn_counter
    from _instant_server import chat_reply, serve

    from palaestra_tokens.tokenizers import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(saved_tokenizer(folder))
    await serve([chat_reply("Hello.")], said(tokenizer, [UNKNOWN_CALL], LAST_REPLY), turn_counter(tokenizer))


def rows(found: dict[str, dict[str, float]]) -> list[measure.Row]:
    """Return the table: the files of each part, and the deepest stacks."""
    counts = {part: found[run][part] for run, parts in RUNS.items() for part in parts}
    table = [measure.Row(f"{name}: files", counts[part], "files") for part, name in NAMES.items()]
    table = [
        measure.with_ceiling(row, GOALS[part]) if part in GOALS else row for row, part in zip(table, NAMES, strict=True)
    ]
    lines = measure.with_ceiling(measure.Row(f"{NAMES[WHOLE]}: lines", found["run"]["lines"], "lines"), LINES_GOAL)
    deepest = measure.Row("deepest stack from main", found["run"]["depth"], "frames")
    exact = measure.Row("deepest stack from main, token-exact", found["tokens"]["depth"], "frames")
    stacks = {"run": deepest, "tokens": exact}
    return [*table, lines, *(measure.with_ceiling(row, DEPTH_GOALS[run]) for run, row in stacks.items())]


def traced(run: str, url: str) -> Traced:
    """Trace one run in a separate process."""
    command = [sys.executable, __file__, "--sample", run, url]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Traced(found["depth"], found["files"])


def above_caps(run: str, found: Traced) -> list[str]:
    """Return the numbers of a run that are above their caps, with the caps."""
    numbers = [(NAMES[part], len(found.files[part]), CAPS[part]) for part in RUNS[run]]
    if run in DEPTH_CAPS:
        numbers.append((f"deepest stack of {run}", found.depth, DEPTH_CAPS[run]))
    return [f"{name}: {number} (cap {cap})" for name, number, cap in numbers if number > cap]


def main() -> int:
    """Trace the runs and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--files", action="store_true", help="list the files behind each number on standard error")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    last: dict[str, Traced] = {}

    def counted(run: str) -> measure.Sample:
        found = traced(run, url)
        for _ in range(_AGAIN if above_caps(run, found) else 0):
            again = traced(run, url)
            common = {part: sorted({*files}.intersection(again.files[part])) for part, files in found.files.items()}
            found = Traced(min(found.depth, again.depth), common)
        last[run] = found
        lines = sum(
            path.read_text().count("\n") for file in found.files[RUNS[run][0]] for path in measure.sources(file)
        )
        return {"depth": found.depth, "lines": lines, **{part: len(found.files[part]) for part in RUNS[run]}}

    with measure.serving(__file__, "--serve") as url:
        found = measure.interleaved({run: partial(counted, run) for run in RUNS}, rounds)
    if options.files:
        for run, parts in RUNS.items():
            for part in parts:
                print(f"{NAMES[part]}:", *last[run].files[part], sep="\n  ", file=sys.stderr)
    measure.report("Files and frames of one rollout", rows(found), options.json)
    above = [line for run in RUNS for line in above_caps(run, last[run])]
    if above:
        print("above the caps:", "; ".join(above), file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(model_server())
    elif sys.argv[1:2] == ["--sample"]:
        run, url = sys.argv[2:]
        print(json.dumps(asdict(asyncio.run(message(url)) if run == MESSAGE else sample(run, url))))
    else:
        sys.exit(main())
