"""The tool `cronjob`: prompts that run as turns of a chat at set times, across restarts, and each time once."""

import json
import sqlite3
import uuid
from functools import partial

import openai
import pytest

from gateway.conftest import OPEN, MovedClock, a_gateway, until
from palaestra.tools.registry.build import build_tool_registry
from palaestra_chat.service import ChatSettings
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platforms.openai_api import OpenAIServer
from palaestra_slots.core.types import Prices

TOOLS = ChatSettings(toolsets=["cronjob"])
HOME = {"allowed_users": ["*"], "home_channel": {"chat_id": "home", "chat_type": "group"}}


def on_a_moved_clock(home):
    """A clock, and what opens a gateway of `home` on it, again and again."""
    clock = MovedClock()
    return clock, partial(a_gateway, home, settings=TOOLS, clock=clock)


async def call(scene, chat_id="anna", **arguments):
    answer = await scene.ask(f"call cronjob {json.dumps(arguments)}", chat_id, message_id=uuid.uuid4().hex)
    return json.loads(answer.removeprefix("done: "))


async def create(scene, prompt="say ran", schedule="every 10m", **more):
    reply = await call(scene, action="create", prompt=prompt, schedule=schedule, **more)
    assert reply.get("success"), reply
    return reply["job"]


async def quiet(scene, chat_id="anna"):
    """Check that nothing comes; longer than the scheduler's tick."""
    with pytest.raises(TimeoutError):
        await scene.platform.receive(chat_id, timeout_s=1.3)


async def test_a_job_runs_in_its_session_at_its_times(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    async with gateway() as scene:
        job = await create(scene, prompt="how are you?", name="check", repeat=2)
        assert (job["schedule"], job["runs"], job["state"]) == ("every 10m", 0, "on")
        assert "Scheduled job check (every 10m)" in await scene.ask("/status", "anna")
        await quiet(scene)
        for number in (2, 3):
            clock.moved_s += 600
            received = await scene.platform.receive("anna")
            assert received.text.startswith(f"(Scheduled job check:)\n\necho {number}: [Scheduled job check")
            assert received.text.endswith("how are you?")
            assert received.answers is None
        clock.moved_s += 6000
        await quiet(scene)
        assert (await call(scene, action="list"))["jobs"] == []
        assert len({each["messages"][1]["content"] for each in scene.model.requests}) == 1  # one conversation


async def test_jobs_survive_a_restart_and_what_was_missed_is_reported_once(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    async with gateway() as scene:
        await create(scene, name="often")
        await create(scene, name="once", schedule="20m", prompt="say once")
    clock.moved_s += 65 * 60  # six times of the one, the other one long ago
    async with gateway() as scene:
        said = sorted([(await scene.platform.receive("anna", timeout_s=5)).text for _ in range(3)])
        assert said[0].startswith("(Scheduled job often: 5 runs were missed")
        assert said[1].startswith("(Scheduled job often:)\n\nran")
        assert said[2].startswith("(Scheduled job once: a run was missed")
        assert [each["name"] for each in (await call(scene, action="list"))["jobs"]] == ["often"]
    async with gateway() as scene:
        await quiet(scene)


async def test_a_run_that_was_begun_before_a_crash_is_answered_once(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    async with gateway() as scene:
        await create(scene, prompt="slowly one two three four five six seven eight nine ten")
        clock.moved_s += 600
        await until(lambda: len(scene.model.requests) == 3)
        runs = len(scene.model.requests)
    async with gateway() as scene:
        text = (await scene.platform.receive("anna")).text
        assert text.startswith("(Scheduled job")
        await quiet(scene)
        assert runs + len(scene.model.requests) <= 4  # the turn that was cut off, and its continuation


async def test_a_clock_that_is_set_back_runs_nothing_again(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    async with gateway() as scene:
        await create(scene)
        clock.moved_s += 600
        assert "ran" in (await scene.platform.receive("anna")).text
        clock.moved_s -= 3600
        await quiet(scene)
        clock.moved_s += 3600
        await quiet(scene)
        clock.moved_s += 600
        assert "ran" in (await scene.platform.receive("anna")).text


async def test_a_run_is_skipped_while_the_earlier_one_is_not_finished(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    words = " ".join("word" for _ in range(60))
    async with gateway() as scene:
        await create(scene, prompt=f"slowly {words}", schedule="every 1m")
        clock.moved_s += 60
        await until(lambda: len(scene.model.requests) == 3)
        clock.moved_s += 60
        assert "had not finished" in (await scene.platform.receive("anna")).text
        assert "word word" in (await scene.platform.receive("anna")).text


async def test_jobs_are_changed_paused_run_and_removed_by_their_chat_only(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    async with gateway() as scene:
        job = (await create(scene))["job_id"]
        for action in ("update", "pause", "resume", "remove", "run"):
            assert "no job" in (await call(scene, "bert", action=action, job_id=job))["error"]
        assert (await call(scene, "bert", action="list"))["jobs"] == []
        changed = await call(scene, action="update", job_id=job, schedule="every 1h", prompt="say hourly")
        assert (changed["job"]["schedule"], changed["job"]["prompt"]) == ("every 1h", "say hourly")
        assert (await call(scene, action="pause", job_id=job))["job"]["state"] == "paused"
        clock.moved_s += 7200
        await quiet(scene)
        assert (await call(scene, action="resume", job_id=job))["job"]["next_run"]
        assert (await call(scene, action="run", job_id=job))["success"]
        assert "hourly" in (await scene.platform.receive("anna")).text
        assert (await call(scene, action="remove", job_id=job))["removed"] == job
        clock.moved_s += 7200
        await quiet(scene)


async def test_what_cannot_be_a_job_is_refused(tmp_path):
    async with a_gateway(tmp_path, settings=TOOLS) as scene:
        for arguments, problem in (
            ({"prompt": "x"}, "needs prompt and schedule"),
            ({"prompt": "x", "schedule": "soon"}, "not a schedule"),
            ({"prompt": "x", "schedule": "every 5s"}, "once a minute"),
            ({"prompt": "x", "schedule": "1h", "deliver": "loopback:bert"}, "may write to"),
        ):
            assert problem in (await call(scene, action="create", **arguments))["error"]
        for _ in range(20):
            await create(scene, schedule="1h")
        assert "20 jobs" in (await call(scene, action="create", prompt="x", schedule="1h"))["error"]


async def test_the_answer_goes_where_the_job_says(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    async with gateway({"platforms": {"loopback": HOME}}) as scene:
        await create(scene, prompt="say to home", schedule="1m", deliver="loopback")
        await create(scene, prompt="say to nobody", schedule="1m", deliver="local")
        clock.moved_s += 60
        assert "to home" in (await scene.platform.receive("home")).text
        await until(lambda: len(scene.model.requests) == 6)
        await quiet(scene)


async def test_a_person_who_may_no_longer_write_or_has_used_up_the_cost_starts_no_runs(tmp_path):
    clock, gateway = on_a_moved_clock(tmp_path)
    async with gateway() as scene:
        await create(scene)
    clock.moved_s += 600
    nobody = {"platforms": {"loopback": {"allowed_users": []}}}
    async with gateway(nobody) as scene:
        assert "may no longer write" in (await scene.platform.receive("anna")).text
    clock.moved_s += 600
    priced = ChatSettings(toolsets=["cronjob"], prices=Prices(prompt=1e4, completion=0))
    async with gateway({**OPEN, "limits": {"cost_per_day": 1}}, settings=priced) as scene:
        assert "ran" in (await scene.platform.receive("anna")).text
        clock.moved_s += 600
        assert "$1.00" in (await scene.platform.receive("anna")).text


async def test_a_chat_that_takes_no_later_answers_needs_another_target(tmp_path):
    platform = OpenAIServer("openai", PlatformConfig(token="secret", extra={"port": 0}))
    async with (
        a_gateway(tmp_path, settings=TOOLS, others=[platform]),
        openai.AsyncOpenAI(base_url=platform.url, api_key="secret", max_retries=0) as program,
    ):
        made = json.dumps({"action": "create", "prompt": "x", "schedule": "1h"})
        messages = [{"role": "user", "content": f"call cronjob {made}"}]
        reply = await program.chat.completions.create(model="m", messages=messages)
        assert "set deliver" in reply.choices[0].message.content


async def test_a_mailbox_of_the_earlier_version_gets_the_table(tmp_path):
    path = tmp_path / "gateway.db"
    await Mailbox(path).aclose()
    with sqlite3.connect(path) as db:
        db.execute("drop table jobs")
        db.execute("pragma user_version = 1")
    db.close()
    async with a_gateway(tmp_path, settings=TOOLS) as scene:
        await create(scene)


async def test_a_mailbox_of_the_version_with_voice_messages_loses_their_transcripts(tmp_path):
    path = tmp_path / "gateway.db"
    await Mailbox(path).aclose()
    with sqlite3.connect(path) as db:
        db.execute("create table transcripts (hash text primary key, text text not null, at real not null)")
        db.execute("pragma user_version = 4")
    db.close()
    await Mailbox(path).aclose()
    with sqlite3.connect(path) as db:
        assert db.execute("select name from sqlite_master where name = 'transcripts'").fetchall() == []
    db.close()


def test_the_tool_is_missing_without_a_gateway():
    assert "palaestra gateway" in build_tool_registry(["cronjob"]).missing["cronjob"]
