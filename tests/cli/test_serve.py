"""`palaestra serve api` as a process: its address on stdout, a clean end, nothing lost when it is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from talking import Talk, group

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra_train.atropos.connection import FeedSettings
from palaestra_train.atropos.feed import feeding
from palaestra_train.atropos.groups import Deliveries


@contextmanager
def server(*argv: str, port: str = "0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and its address; killed in the end."""
    command = [sys.executable, "-m", "palaestra", "serve", "api", "--port", port, *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_ends_cleanly_when_told_to() -> None:
    with server() as (process, url):
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_kill_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    async def before(url: str) -> None:
        async with Talk(url) as api:
            await api.both()
            for number in range(3):
                await api.post("/scored_data", group(first=number, env_id=0))
            assert (await api.get("/batch"))["batch"]

    async def after(url: str) -> None:
        async with Talk(url) as api:
            assert await api.get("/status") == {"current_step": 4, "queue_size": 1}

    store = str(tmp_path / "groups")
    with server("--store", store) as (_, url):
        asyncio.run(before(url))
    with server("--store", store) as (_, url):
        asyncio.run(after(url))


async def test_a_feed_whose_server_is_killed_again_and_again_sends_each_group_once(tmp_path: Path) -> None:
    """Twenty groups; after each five the server dies while they are under way, and comes back."""
    store, deliveries = str(tmp_path / "groups"), Deliveries(tmp_path / "deliveries.jsonl")
    settings = FeedSettings(name="words", group_size=2, max_token_length=32, poll_s=0.01, heartbeat_s=0.01)
    with ExitStack() as running:
        process, url = running.enter_context(server("--store", store))
        port = url.rpartition(":")[2]
        async with Talk(url) as api:
            await api.both(batch_size=40)
        async with feeding(settings, url, deliveries) as feed:
            for start in range(0, 20, 5):
                for number in range(start, start + 5):
                    feed.offer(f"run/{number}", group(first=number))
                await asyncio.sleep(0)  # the first of them are on their way
                process.kill()
                process, _ = running.enter_context(server("--store", store, port=port))
            await feed.drained()
        async with Talk(url) as api:
            batch = (await api.get("/batch"))["batch"]
            assert (await api.get("/status"))["queue_size"] == 0
            result = sorted(each["tokens"][0][0] for each in batch)
    assert result == list(range(20))
    assert len(deliveries) == 20
    deliveries.close()


@pytest.mark.parametrize("model", ["tiny", "models/tiny", "/no/such/folder"])
def test_a_model_folder_that_is_missing_is_refused_immediately(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    begun = time.monotonic()
    assert main(["serve", "model", model]) == 2
    assert time.monotonic() - begun < 10
    check_message(capsys.readouterr().err, model)
