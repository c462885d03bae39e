"""The cost of a command before it does its work: python benchmarks/startup.py [--peers] [--quick] [--json FILE]

Each command runs in a separate process. The table shows the processor time of the process and its children, which
depends little on other work on the machine, and the wall time. The five-task run plays the reference solutions of an
environment with one command each. `inspect --help` (inspect-ai) and `vf-eval --help` (verifiers) are the peers. With
--peers they are installed once, with pip, into a virtual environment in the user's cache folder; otherwise they are
measured if they are on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _measure as measure

from palaestra_slots.core.config import cache_folder

ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 5):
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p", solution="echo hi > answer.txt")

@words.score
async def right(task, sandbox):
    return "hi" in await sandbox.read_text("answer.txt", missing="")
"""

CLASS_ENVIRONMENT = """
from palaestra import HermesAgentBaseEnv

class WordsEnv(HermesAgentBaseEnv):
    name = "words"
    async def setup(self): self.left = [{"prompt": "p"}]
    async def get_next_item(self): return self.left.pop() if self.left else None
    def format_prompt(self, item): return item["prompt"]
    async def compute_reward(self, item, result, ctx): return 1.0
    async def evaluate(self): pass
"""

PALAESTRA = (sys.executable, "-m", "palaestra.cli.main")
COMMANDS = {
    "palaestra --help": ("--help",),
    "palaestra run --help": ("run", "--help"),
    "palaestra run my_env.py --help": ("run", "my_env.py", "--help"),
    "palaestra run my_env.py --polcy x": ("run", "my_env.py", "--polcy", "x"),
    "palaestra run class_env.py --polcy x": ("run", "class_env.py", "--polcy", "x"),
    "palaestra run class_env.py --env.bogus x": ("run", "class_env.py", "--env.bogus", "x"),
    "palaestra runs": ("runs",),
    "palaestra run my_env.py --policy oracle": ("run", "my_env.py", "--policy", "oracle"),
}
CEILINGS_S = {
    "palaestra run --help": 0.35,
    "palaestra run my_env.py --help": 0.35,
    "palaestra run my_env.py --polcy x": 0.35,
    "palaestra run class_env.py --polcy x": 0.35,
    "palaestra run class_env.py --env.bogus x": 0.35,
    "palaestra run my_env.py --policy oracle": 1.2,
}
PEERS = {"inspect": "inspect-ai", "vf-eval": "verifiers"}
"""The peers' programs, and the distributions that contain them."""


def installed_peers() -> Path:
    """Return the programs of a virtual environment with the peers, which the first call creates (1 to 3 minutes)."""
    folder = cache_folder("startup-peers")
    programs, python = folder / "bin", Path(sys.executable).resolve()
    if not all((programs / name).exists() for name in PEERS):
        print(f"installing {', '.join(PEERS.values())} into {folder}", file=sys.stderr)
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = (programs / "python", "-m", "pip", "--disable-pip-version-check", "--quiet")
        subprocess.run([*pip, "install", *PEERS.values()], check=True)
    return programs


def sample(words: tuple[str, ...], folder: str) -> measure.Sample:
    """Measure the seconds of one process."""
    begun = time.perf_counter()
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    return {"cpu": used.ru_utime + used.ru_stime, "wall": time.perf_counter() - begun}


def main() -> int:
    parser = measure.options_parser(__doc__)
    parser.add_argument("--peers", action="store_true", help="install the peers into a separate virtual environment")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    places = str(installed_peers()) if options.peers else None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_env.py").write_text(ENVIRONMENT)
        (Path(folder) / "class_env.py").write_text(CLASS_ENVIRONMENT)
        cases: dict[str, Callable[[], measure.Sample]] = {
            name: partial(sample, (*PALAESTRA, *words), folder) for name, words in COMMANDS.items()
        }
        peers = {f"{name} --help": path for name in PEERS if (path := shutil.which(name, path=places)) is not None}
        cases |= {name: partial(sample, (path, "--help"), folder) for name, path in peers.items()}
        found = measure.interleaved(cases, options.rounds)
    rows = []
    for name, seconds in found.items():
        row = measure.Row(name, seconds["cpu"], "s CPU")
        rows.append(measure.with_ceiling(row, CEILINGS_S[name]) if name in CEILINGS_S else row)
        rows.append(measure.Row(f"{name}: wall", seconds["wall"], "s"))
    return measure.report("Start-up", rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
