"""Make the pictures of the README and the documentation: `make pictures`.

A picture shows the output of the program when this script ran it. `docs/pictures/sources.json` contains, for each
picture, a hash of the source text behind the picture; `--check` makes no pictures and fails if a hash no longer
matches. Plots are drawn from `docs/pictures/data`, without measuring again: `plots.py`. The script needs Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import diagram
import pexpect
import plots
import pyte
from playwright.sync_api import ViewportSize, sync_playwright
from rich.console import Console
from rich.style import Style
from rich.text import Text

import palaestra
from palaestra_slots.core.io.threads import LoopThread
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.testing.echo_chat_server import MODEL, EchoChatServer

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
SOURCES = PICTURES / "sources.json"
WIDTH, HEIGHT = 100, 44
PAGE: ViewportSize = {"width": 760, "height": 620}
"""The site shows pictures with 736 pixels, so that the text of a page keeps its size."""
_EXAMPLE = r"```python\n# my_env\.py\n(.*?)```"


@dataclass(frozen=True)
class Picture:
    """How a picture is made, and its source text: files below the root, either whole or only the matches of a
    pattern."""

    make: Callable[[Path, Path], None]
    shows: dict[str, str]

    def hash(self) -> str:
        found = hashlib.sha256()
        for path, pattern in sorted(self.shows.items()):
            text = (ROOT / path).read_text()
            found.update("\0".join([path, *re.findall(pattern, text, re.DOTALL)] if pattern else [path, text]).encode())
        return found.hexdigest()


def readme_environment(folder: Path) -> Path:
    """Write the README's environment to a file."""
    (block,) = re.findall(_EXAMPLE, (ROOT / "README.md").read_text(), re.DOTALL)
    path = folder / "my_env.py"
    path.write_text(block)
    return path


def record_run(folder: Path, target: Path) -> None:
    """Record a first run with the reference solutions, and the check of the environment."""
    readme_environment(folder)
    screen = Screen()
    for line in ("palaestra run my_env.py --policy oracle --env.n 20", "palaestra env check my_env.py"):
        screen.command(line)
        screen.run(line, folder)
    screen.save(target, "a first run")


def record_chat(folder: Path, target: Path) -> None:
    """Record a conversation, with a question before a dangerous command, against a server with fixed answers."""
    (folder / "logs").mkdir()
    (folder / "logs/old.log").write_text("GET /\nGET /\n")
    (folder / "report.csv").write_text("name,points\nada,3\ngrace,5\n")
    screen = Screen()
    screen.command("palaestra chat --workdir . --base-url http://localhost:8000/v1 --model NAME")
    loop, server = LoopThread("answers"), EchoChatServer(reply=tidy_up, delay_s=0.01)
    loop.wait(server.__aenter__())
    try:
        words = ["chat", "--workdir", ".", "--base-url", server.url, "--model", MODEL]
        screen.talk(words, folder, "Who has most points? Then remove the logs.")
    finally:
        loop.wait(server.__aexit__())
        loop.close()
    screen.save(target, "palaestra chat")


def draw_report(folder: Path, target: Path, *, failed: bool = False) -> None:
    """Draw the report of a run in which a scripted model solves about every second task; or, if `failed`, the page of a
    rollout that failed."""
    report = asyncio.run(run_half_solved(folder))
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport=PAGE, device_scale_factor=2)
        page.goto(report.as_uri())
        page.wait_for_selector("a.row")
        if failed:
            page.keyboard.press("/")
            page.keyboard.type("reward<1\n")
            page.wait_for_selector("text=clear filter")
            page.wait_for_timeout(300)
            failures = page.eval_on_selector_all("a.row", "rows => rows.map((row) => row.hash)")
            for place in failures:  # the first one whose page compares it with a sibling that succeeded
                page.evaluate("place => { location.hash = place }", place)
                page.wait_for_selector(".turn")
                page.wait_for_timeout(300)
                if "The sibling #" in page.inner_text("#main"):
                    break
        page.screenshot(path=target)
        browser.close()


def draw_spine(_folder: Path, target: Path) -> None:
    """Draw the diagram of the architecture page."""
    target.write_text(diagram.spine())


def draw_plot(_folder: Path, target: Path) -> None:
    """Draw a plot from its data file."""
    target.write_text(plots.PLOTS[target.name].svg(PICTURES / "data"))


_RUNTIME = "packages/palaestra/src/palaestra"
ALL = {
    "run.svg": Picture(record_run, {"README.md": _EXAMPLE, f"{_RUNTIME}/rollouts/observe/console.py": ""}),
    "chat.svg": Picture(
        record_chat,
        {f"extensions/chat/src/palaestra_chat/terminal/{name}.py": "" for name in ("screen", "renderers", "people")},
    ),
    "report.png": Picture(draw_report, {"README.md": _EXAMPLE, "extensions/view/src/palaestra_view/page/run.js": ""}),
    "view.png": Picture(
        partial(draw_report, failed=True),
        {"README.md": _EXAMPLE, "extensions/view/src/palaestra_view/page/rollout.js": ""},
    ),
    "spine.svg": Picture(draw_spine, {"scripts/diagram.py": "", "scripts/charts.py": ""}),
    **{
        name: Picture(
            draw_plot, {f"docs/pictures/data/{plot.data}": "", "scripts/plots.py": "", "scripts/charts.py": ""}
        )
        for name, plot in plots.PLOTS.items()
    },
}


class Screen:
    """A terminal's screen, which shows the output of programs and is saved as SVG."""

    def __init__(self) -> None:
        self._screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.Stream(self._screen)

    def command(self, line: str) -> None:
        self._stream.feed(f"\x1b[1m$ {line}\x1b[0m\r\n")

    def run(self, line: str, folder: Path) -> None:
        child = self._spawn(line.split()[1:], folder)
        self._until_end(child)

    def talk(self, words: list[str], folder: Path, message: str) -> None:
        """Type the message, allow the command and the file change that the chat asks about, and end the chat."""
        child = self._spawn(words, folder)
        self._until(child, "›")
        child.send(f"{message}\r")
        for question in ("Run it", "y: yes"):
            self._until(child, question)
            time.sleep(0.5)  # input before the question does not count
            child.send("y\r")
        self._until(child, "›")
        time.sleep(0.5)
        child.send("\x04")
        self._until_end(child)

    def save(self, target: Path, title: str) -> None:
        lines = []
        for row in range(HEIGHT):
            line = Text(no_wrap=True)
            for column in range(WIDTH):
                cell = self._screen.buffer[row][column]
                line.append(
                    cell.data,
                    Style(color=_color(cell.fg), bold=cell.bold, italic=cell.italics, underline=cell.underscore),
                )
            line.rstrip()
            lines.append(line)
        while lines and not lines[-1].plain:
            lines.pop()
        with open(os.devnull, "w") as nowhere:
            console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
            for line in lines:
                console.print(line)
            svg = console.export_svg(title=title, unique_id=target.stem)
        target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))

    def _spawn(self, words: list[str], folder: Path) -> pexpect.spawn:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "PALAESTRA"))}
        own = {"TERM": "xterm-256color", "PALAESTRA_STATE": str(folder / ".state"), "XDG_CONFIG_HOME": str(folder)}
        return pexpect.spawn(
            sys.executable, ["-m", "palaestra", *words], cwd=str(folder), env=kept | own, timeout=120,
            dimensions=(HEIGHT, WIDTH), encoding="utf-8",
        )  # fmt: skip

    def _until(self, child: pexpect.spawn, pattern: str) -> None:
        """Show the output up to the pattern. Like a real terminal, the screen answers requests for the cursor's
        position."""
        while True:
            found = child.expect([r"\x1b\[6n", pattern])
            self._stream.feed(child.before + child.after)
            if found:
                return
            child.send(f"\x1b[{self._screen.cursor.y + 1};{self._screen.cursor.x + 1}R")

    def _until_end(self, child: pexpect.spawn) -> None:
        child.expect(pexpect.EOF)
        self._stream.feed(child.before)
        child.wait()


def _color(name: str) -> str | None:
    if name == "default":
        return None
    return f"#{name}" if re.fullmatch(r"[0-9a-f]{6}", name) else {"brown": "yellow"}.get(name, name)


def half_solved(messages: Sequence[Message]) -> dict[str, JSON]:
    """Answer as a policy that counts lines, or wrongly counts characters in about every second conversation."""
    if messages[-1]["role"] == "tool":
        return {"content": "I have written the number to answer.txt."}
    flag = CHANCE.choice("lc")
    return {"content": None, "tool_calls": [_terminal(f"wc -{flag} < a.txt > answer.txt")]}


def tidy_up(messages: Sequence[Message]) -> dict[str, JSON]:
    """Answer the message that `record_chat` sends."""
    done = sum(message["role"] == "tool" for message in messages)
    if done == 0:
        return {
            "content": "I look at the table first.",
            "tool_calls": [_terminal("sort -t, -k2 -nr report.csv | head -3")],
        }
    if done == 1:
        return {"content": "Grace has most points: 5. Now the logs.", "tool_calls": [_terminal("rm -rf logs")]}
    return {"content": "**Grace** has most points (5), and `logs` is removed."}


def _terminal(command: str) -> dict[str, JSON]:
    function = {"name": "terminal", "arguments": json.dumps({"command": command})}
    return {"index": 0, "id": "call-1", "type": "function", "function": function}


CHANCE = random.Random(7)


async def run_half_solved(folder: Path) -> Path:
    """Run the README's environment; returns the path of the report."""
    async with EchoChatServer(reply=half_solved) as server:
        run = await palaestra.run(
            str(readme_environment(folder)), base_url=server.url, model=MODEL, n=8, group_size=4, folder=folder / "runs"
        )
    return run.path / "report.html"


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    raise SystemExit("pictures: Chromium is missing; install it with: apt-get install chromium")


def main() -> int:
    """Make the named pictures, or all; or check that all pictures are current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PICTURE", help=f"one or more of {', '.join(ALL)}")
    parser.add_argument("--check", action="store_true", help="fail if a picture is older than its source")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ALL):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    hashes = json.loads(SOURCES.read_text()) if SOURCES.exists() else {}
    if options.check:
        old = [name for name, picture in ALL.items() if hashes.get(name) != picture.hash()]
        print(f"older than their sources; run `make pictures`: {', '.join(old)}" if old else "pictures are current")
        return bool(old)
    PICTURES.mkdir(exist_ok=True)
    for name in options.names or ALL:
        print(f"{name} …", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "project").mkdir()
            ALL[name].make(Path(folder) / "project", PICTURES / name)
        hashes[name] = ALL[name].hash()
        SOURCES.write_text(json.dumps(hashes, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
