"""A run of 200 rollouts, watched in a real Chromium from its start to its end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import FastTokenizer, load_tokenizer

from . import fixing
from .test_page import chromium as chromium
from .test_page import until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from playwright.async_api import Browser, Page

    from palaestra_slots.core.types import JSON
    from palaestra_tokens.engine import Sampled

TASKS, GROUP = 50, 4
MOST_MB = 150

IDS = r"""async () => {
  const found = new Set();
  const wait = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)));
  for (let top = 0; ; top += innerHeight / 2) {
    scrollTo(0, top);
    await wait();
    for (const { hash } of document.querySelectorAll("a.row")) found.add(new URLSearchParams(hash.slice(6)).get("id"));
    if (top > document.documentElement.scrollHeight) return [...found];
  }
}"""
"""Returns the ids of all rollouts in the list, which draws only those on the screen."""


FLYING = "[...document.querySelectorAll('.cells > .is-flying')].map((each) => each.hash)"
"""Returns the addresses of the rollouts in flight on the tab of groups."""


async def command(*words: str, cwd: Path) -> Any:
    """Run a command of palaestra, and return what it prints as JSON."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "palaestra", *words, cwd=cwd, stdout=PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0, words
    return json.loads(out)


async def opened(browser: Browser, problems: list[str], address: str, view: str) -> Page:
    """Open a view in a tab of its own, which would forget `mark` if it were loaded again."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    await page.goto(address)
    await page.evaluate("view => { window.mark = 1; location.hash = view }", view)
    await page.wait_for_selector("#main h1")
    return page


def memory_mb(pid: int, name: str) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name))) / 1024


class Held(fixing.Solver):
    """Answers the first requests, and the others once somebody watches, so that a fast run is not over before that."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        super().__init__(tokenizer)
        self.watched = asyncio.Event()
        self._answered = 0

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        self._answered += 1
        if self._answered > TASKS:
            await self.watched.wait()
        return await super().generate(input_ids, sampling)


@pytest.mark.slots
@pytest.mark.timeout(300)
async def test_a_run_of_200_rollouts_is_watched_from_its_start_to_its_end(tmp_path: Path, chromium: str) -> None:
    from playwright.async_api import async_playwright

    (tmp_path / "model").mkdir()
    save_tokenizer(train_tokenizer(), tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    problems: list[str] = []
    seen: list[int] = []
    flying: set[str] = set()

    async def main() -> None:
        solver = Held(tokenizer)
        async with TokenLoopback(solver, tokenizer) as server, async_playwright() as playwright:
            began = time.monotonic()
            words = ["run", f"{fixing.__file__}:count_and_check", "--env.n", str(TASKS), "--group", str(GROUP),
                     "--concurrency", "2", "--openai.server_type", "vllm", "--base-url", server.url, "--model", "toy",
                     "--openai.tokenizer_name", str(tmp_path / "model"), "--env.max_agent_turns", "5"]  # fmt: skip
            running = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "palaestra", *words, cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL
            )
            while not (found := list(tmp_path.glob("runs/*/*/journal.jsonl"))):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            run = found[0].parent
            viewer = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "palaestra", "view", str(run), "--no-open", "--json", cwd=tmp_path, stdout=PIPE,
                stderr=DEVNULL, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            )  # fmt: skip
            assert viewer.stdout is not None
            address, _, view = json.loads(await viewer.stdout.readline())["url"].partition("#")
            assert view == f"/run?run={run.name}"
            browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = await opened(browser, problems, address, f"#{view}")
            groups = await opened(browser, problems, address, f"#/run?run={run.name}&tab=groups")
            runs = await opened(browser, problems, address, "#/runs")
            await runs.focus("[aria-label='Filter runs']")  # it is not drawn again while somebody writes there
            await groups.focus("text=Settings")  # what has the focus keeps it when the page is drawn again
            start_mb = memory_mb(viewer.pid, "VmRSS")
            state, rows = "", 0
            while state != "done" or rows < TASKS * GROUP:
                assert time.monotonic() - began < 240, (state, seen)
                await asyncio.sleep(0.25)
                state, rows = await page.evaluate(
                    "[document.querySelector('.state')?.textContent, "
                    "Number(document.querySelector('.table')?.getAttribute('aria-rowcount'))]"
                )
                flying.update(await groups.evaluate(FLYING))
                seen.append(rows)
                solver.watched.set()
            assert await running.wait() == 0
            assert await runs.evaluate("document.activeElement.ariaLabel") == "Filter runs"
            assert await runs.evaluate("document.querySelector('.state').textContent") == "running"
            assert await groups.evaluate("document.activeElement.textContent") == "Settings"
            await runs.evaluate("document.activeElement.blur()")
            await until(runs, "document.querySelector('.state').textContent === 'done'")
            await until(groups, f"document.querySelector('.tools').innerText.startsWith('{TASKS} groups')")
            await until(groups, "!document.querySelector('.cells > .is-flying')")
            assert sorted(await page.evaluate(IDS)) == sorted(
                f"{number:06}-count/{number}/{index}" for number in range(TASKS) for index in range(GROUP)
            )
            status = await command("status", str(run), "--json", cwd=tmp_path)
            facts = await page.evaluate("document.querySelector('.head').innerText.replace(/\\s+/g, ' ')")
            counts = {**status["outcomes"], **status["labels"], "blame: model": status["blame"]["model"]["count"]}
            figures = [f"reward {status['mean_reward']:.3f}", f"scored {status['scored']} of {TASKS * GROUP}",
                       f"groups {status['groups_ended']} of {TASKS}"]  # fmt: skip
            assert [
                each for each in (*figures, *map("{0[0]} {0[1]}".format, counts.items())) if each not in facts
            ] == []
            for each in (page, groups, runs):
                assert await each.evaluate("window.mark") == 1, "the page was loaded again"
            high_mb = memory_mb(viewer.pid, "VmHWM")
            print(f"\n{time.monotonic() - began:.1f} s, {len(seen)} looks with {len(set(seen))} numbers of rollouts, "
                  f"{len(flying)} seen in flight, viewer from {start_mb:.0f} to {high_mb:.0f} MB")  # fmt: skip
            await browser.close()
            viewer.terminate()
            await viewer.wait()
            assert high_mb < MOST_MB

    await main()
    assert problems == []
    assert seen == sorted(seen)
    assert seen[0] < TASKS * GROUP / 2
    assert len(set(seen)) >= 4
    assert flying
