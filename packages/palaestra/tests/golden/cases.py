"""The golden runs and what the command line makes of each of them.

Everything here goes through `python -m palaestra`, so that it stays valid when modules move.
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS, RUNS, EXPORTS, MODEL = (HERE / name for name in ("environments", "runs", "exports", "model"))

FORMATS = {
    "atropos": "jsonl",
    "openai": "jsonl",
    "sharegpt": "jsonl",
    "atif": "jsonl",
    "rows": "jsonl",
    "table": "csv",
    "markdown": "md",
}
"""Every format of `palaestra export`, with the file extension that the fixtures use."""

OPTIONS = ((), ("--all",), ("--scored-only",), ("--placeholders",))
"""The options that each format is exported with. An output equal to the one without options is stored once."""

COMPRESSED_FROM_BYTES = 4_000

UNREACHABLE = "http://127.0.0.1:9"
"""An address where no server listens."""


@dataclass(frozen=True)
class Case:
    """One golden run.

    `flags` follow the environment on the command line; `{url}`, `{model}` and `{environments}` are filled in. `server`
    names the fake server that answers: tokens, rows, or a script of `servers.SCRIPTS`. `cut_off`: the run did not reach
    its end. `resumed`: it was cut off, and a second process finished it. `twin`: the undisturbed run with the same
    conversations. `exact`: it has token ledgers. `replays`: `palaestra replay` accepts it. `reports`: resuming the
    finished run, which writes its report again, needs no server.
    """

    name: str
    environment: str
    flags: Sequence[str]
    server: str = ""
    exit_code: int = 0
    cut_off: bool = False
    resumed: bool = False
    twin: str = ""
    exact: bool = False
    replays: bool = True
    reports: bool = True

    def command(self, environments: Path, url: str = UNREACHABLE, model: Path | None = None) -> list[str]:
        """The arguments of `palaestra` that start this run with the environments of a folder."""
        values = {"url": url, "model": str(model), "environments": str(environments)}
        return ["run", str(environments / self.environment), *(flag.format(**values) for flag in self.flags)]


_ORACLE = ["--policy", "oracle"]
_PRICES = ["--env.prompt_price", "3", "--env.completion_price", "15"]
_ONE_BY_ONE = ["--openai.health_check", "false", "--concurrency", "1"]
_CHAT = ["--base-url", "{url}/v1", "--model", "m", *_ONE_BY_ONE]
_ENDINGS = [
    *_CHAT,
    *_PRICES,
    *("--env.max_agent_turns", "4", "--env.agent_temperature", "0.7"),
    *("--env.world", "replay", "--env.world_file", "{environments}/empty.jsonl", "--env.world_miss", "fail"),
]
_TOKENS = [
    *("--base-url", "{url}", "--model", "by-prompt", "--openai.tokenizer_name", "{model}"),
    *("--openai.tool_parser", "hermes"),
    *_ONE_BY_ONE,
]
_EXACT = [
    *("--openai.server_type", "sglang"),
    *_TOKENS,
    *("--openai.chat_template", "{environments}/strips_thinking.jinja", "--group", "2"),
]
_HELD_OUT = ["--env.n", "6", "--env.held_out", "0.4"]
_MCP = ["--mcp", "{environments}/mcp.json"]

CASES = [
    Case("oracle", "lines_env.py", [*_ORACLE, *_PRICES, "--group", "2"]),
    Case("exact", "exact_env.py", _EXACT, "tokens", exact=True),
    Case("own_loop", "own_loop_env.py", ["process", *_TOKENS], "tokens", exact=True, replays=False),
    Case("chat", "endings_env.py", _ENDINGS, "endings", exit_code=3),
    Case("evaluate", "lines_env.py", ["evaluate", *_ORACLE, *_HELD_OUT, "--group", "2"]),
    Case("class", "words_env.py", ["process", *_ORACLE]),
    Case("evaluate_class", "words_env.py", ["evaluate", *_ORACLE]),
    Case("agent_env", "agent_env.py", ["process", *_ORACLE]),
    Case("rows", "rows_env.py:Rows", ["process", *_CHAT, "--group", "2"], "rows", exit_code=3, replays=False),
    Case("groups", "rows_env.py:Groups", ["process", *_CHAT, "--group", "2"], "rows", exit_code=3, replays=False),
    Case("recorded_tools", "recorded_tools_env.py", [*_ORACLE, *_MCP, "--group", "2"], reports=False),
    Case("resumed", "endings_env.py", _ENDINGS, "endings", exit_code=3, resumed=True, twin="chat"),
    Case("restarted", "lines_env.py", [*_CHAT, "--env.n", "1"], "restarted", resumed=True, replays=False),
    Case("cut_exact", "exact_env.py", _EXACT, "tokens", cut_off=True, exact=True, twin="exact"),
    Case("cut_chat", "endings_env.py", _ENDINGS, "endings", exit_code=3, cut_off=True, twin="chat"),
    Case("interrupted", "lines_env.py", [*_CHAT, "--env.drain_s", "0"], "interrupted", cut_off=True),
]

BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Output:
    """The result of one command."""

    exit_code: int
    stdout: bytes
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def palaestra(folder: Path, *arguments: object) -> Output:
    """Run `python -m palaestra` with these arguments in this process, with `folder` as the working directory."""
    stdout, stderr = io.BytesIO(), io.StringIO()
    text = io.TextIOWrapper(stdout, "utf-8", write_through=True)
    exit_code = 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(stderr),
        _argv(["palaestra", *map(str, arguments)]),
    ):
        try:
            runpy.run_module("palaestra", run_name="__main__")
        except SystemExit as end:
            exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Output(exit_code, stdout.getvalue(), stderr.getvalue())


@contextlib.contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def store(path: Path, data: bytes) -> None:
    """Write a fixture file, compressed from `COMPRESSED_FROM_BYTES` on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(data) < COMPRESSED_FROM_BYTES:
        path.write_bytes(data)
    else:
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(data, preset=9))


def load(folder: Path) -> dict[str, bytes]:
    """The uncompressed fixture files of a folder by name."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return {
        name.removesuffix(".xz"): lzma.decompress(data) if name.endswith(".xz") else data
        for name, data in files.items()
    }


def copy_run(case: Case, folder: Path, runs: Path = RUNS) -> Path:
    """Copy a golden run to `folder/run`."""
    run = folder / "run"
    run.mkdir(parents=True)
    for name, data in load(runs / case.name).items():
        (run / name).write_bytes(data)
    return run


def exports(folder: Path) -> dict[str, bytes]:
    """The exports of `folder/run` by file name, without those that `palaestra export` refuses to make."""
    made: dict[str, bytes] = {}
    for name, extension in FORMATS.items():
        for options in OPTIONS:
            output = palaestra(folder, "export", "run", "--to", name, *options, "--out", "-")
            assert output.exit_code in (0, 2), output.stderr
            if output.exit_code == 0 and output.stdout != made.get(f"{name}.{extension}"):
                made[f"{''.join((name, *options))}.{extension}"] = output.stdout
    return made


def summaries(case: Case, folder: Path) -> dict[str, bytes]:
    """What `status`, `compare` and, for runs with tokens, `verify` report of `folder/run` as JSON, by file name."""
    status = palaestra(folder, "status", "run", "--json").json
    for of_this_machine in ("disk_bytes", "disk_free_bytes"):
        del status[of_this_machine]
    made = {"status.json": status, "compare.json": palaestra(folder, "compare", "run", "run", "--json").json}
    if case.exact:
        made["verify.json"] = palaestra(folder, "verify", "run", "--json").json
    return {name: json.dumps(value, indent=1).encode() + b"\n" for name, value in made.items()}


def report(case: Case, folder: Path, model: Path) -> dict[str, Any]:
    """The data in the HTML report of the finished run `folder/run`.

    Resuming a finished run writes its report again and asks no server.
    """
    journal = folder / "run/journal.jsonl"
    before = journal.read_bytes()
    output = palaestra(folder, *case.command(ENVIRONMENTS, model=model), "--resume", "run")
    assert output.exit_code == case.exit_code, output.stderr
    added = {json.loads(line)["event"] for line in journal.read_bytes().removeprefix(before).splitlines()}
    assert added <= {"resume", "group", "group_end", "end"}, "the resumed run repeated a rollout"
    from recorded import embedded  # imported here, because `make.py` has no need of it

    return embedded(folder / "run/report.html")
