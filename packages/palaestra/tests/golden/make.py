"""Record the golden runs again: python packages/palaestra/tests/golden/make.py OUT [--exports]

The script writes three folders, with the layout of those next to it: `OUT/runs/NAME` has the journal and the tool
recording of each run, `OUT/exports/NAME` every export and the output of the commands that summarise a
run, `OUT/model` the tokenizer of the token-exact runs. Files of 4 kB and more are compressed with xz.

The committed folders are what earlier versions wrote and what later versions must read and export unchanged. Replace
them only after an intended change of the journal or of an export format.

With --exports the committed runs are exported again, and no run is recorded: for a change of an export alone.

Each run is a process of its own in /tmp/golden, so that no path of this machine is recorded. Times, run ids and ports
differ between two recordings; conversations, tokens and rewards do not. Runs that are to be cut off are killed while
their model server does not answer: with SIGKILL, `interrupted` with SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.cases import CASES, ENVIRONMENTS, RUNS, Case, copy_run, exports, load, store, summaries
from golden.cases import MODEL as COMMITTED_MODEL
from golden.servers import (
    MCP_SERVER,
    SCRIPTS,
    ChatServer,
    Site,
    TokenServer,
    rows_server,
    save_model,
    searxng,
    serving,
)

TOP = Path("/tmp/golden")
MODEL = TOP / "model"

TORN_LINE = b'{"event":"messages","at":17'
"""What a power cut leaves of a journal line."""

IsSilent = Callable[[], bool]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="record this run only")
    parser.add_argument("--exports", action="store_true", help="export the committed runs again, and record none")
    options = parser.parse_args()
    if TOP.exists():
        parser.error(f"{TOP} exists: wait for the other recording, or remove what it left")
    TOP.mkdir()
    try:
        chosen = [case for case in CASES if options.only in ("", case.name)]
        if options.exports:
            MODEL.mkdir()
            for name, data in load(COMMITTED_MODEL).items():
                (MODEL / name).write_bytes(data)
            for case in chosen:
                store_exports(case, TOP / case.name, RUNS, options.out)
            return 0
        save_model(MODEL)
        for path in MODEL.iterdir():
            store(options.out / "model" / path.name, path.read_bytes())
        for case in chosen:
            record(case, options.out)
    finally:
        shutil.rmtree(TOP)
    return 0


def record(case: Case, out: Path) -> None:
    """Record one run and store what the commands make of it."""
    folder = TOP / case.name
    folder.mkdir()
    for path in ENVIRONMENTS.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    with server_of(case, cut_off=case.cut_off or case.resumed) as (url, flags, is_silent):
        run_command(case, folder, [*case.command(Path(), url, MODEL), *flags], is_silent)
    (run,) = folder.glob("runs/*/*")
    journal = run / "journal.jsonl"
    if case.name in ("cut_chat", "resumed"):
        with journal.open("ab") as file:
            file.write(TORN_LINE)
    if case.resumed:
        with serving(ChatServer(case.server, "after")) as chat:
            resume = ["--resume", str(run.relative_to(folder))]
            run_command(case, folder, [*case.command(Path(), chat.url, MODEL), *resume])
    shutil.rmtree(out / "runs" / case.name, ignore_errors=True)
    for path in (journal, run / "world.jsonl"):
        if path.exists():
            store(out / "runs" / case.name / path.name, path.read_bytes())
    made = store_exports(case, folder / "copy", out / "runs", out)
    if not case.cut_off:
        start = json.loads(journal.read_bytes().partition(b"\n")[0])
        assert made["atropos.jsonl"] == Path(start["config"]["groups_file"]).read_bytes()


def store_exports(case: Case, copy: Path, runs: Path, out: Path) -> dict[str, bytes]:
    """Store what the commands make of a recorded run, copied to the folder `copy`."""
    copy_run(case, copy, runs)
    made = {**exports(copy), **summaries(case, copy)}
    shutil.rmtree(out / "exports" / case.name, ignore_errors=True)
    for name, data in made.items():
        store(out / "exports" / case.name / name, data)
    print(f"{case.name}: {', '.join(sorted(made))}")
    return made


@contextlib.contextmanager
def server_of(case: Case, *, cut_off: bool) -> Iterator[tuple[str, list[str], IsSilent | None]]:
    """Start the server of a run: its URL, flags for the recording only, and, where the run is to be cut off, whether
    the server has stopped answering."""
    if case.server == "tokens":
        with serving(TokenServer(MODEL, stalls=cut_off)) as tokens:
            yield tokens.url, [], (lambda: tokens.engine.stalled == 2) if cut_off else None
    elif case.server in SCRIPTS:
        with serving(ChatServer(case.server, "before" if cut_off else "whole")) as chat:
            yield chat.url, [], (lambda: len(chat.conversations) > SCRIPTS[case.server][1]) if cut_off else None
    elif case.server == "rows":
        with serving(rows_server()) as rows:
            yield rows.url, [], None
    elif case.name == "recorded_tools":
        shutil.copy(MCP_SERVER, TOP / case.name)
        with Site(searxng()) as search:
            yield "", ["--env.web_urls", f"searxng={search.url}"], None
    else:
        yield "", [], None


def run_command(case: Case, folder: Path, arguments: list[str], is_silent: IsSilent | None = None) -> None:
    """Run the command until it ends, or kill it once its server is silent. Checks the exit code."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "palaestra", *arguments],
            cwd=folder,
            env={"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8"},
            stdout=output,
            stderr=output,
        )
        expected = case.exit_code
        if is_silent is not None:
            while not is_silent():
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            time.sleep(1)  # the other rollouts of the group reach their own silent request
            graceful = case.name == "interrupted"
            process.send_signal(signal.SIGTERM if graceful else signal.SIGKILL)
            expected = 130 if graceful else -signal.SIGKILL
        exit_code = process.wait(120)
    assert exit_code == expected, f"exit code {exit_code}: {log.read_text()}"


if __name__ == "__main__":
    sys.exit(main())
