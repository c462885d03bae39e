import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from gateway.conftest import OPEN, MovedClock, a_gateway, until
from golden_messages import check_message
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra.tools.registry.build import build_tool_registry
from palaestra_chat.service import ChatSettings
from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.mailbox import CODES_PER_MINUTE
from palaestra_gateway.platform import Attachment, ChatAddress, PlatformLimits
from palaestra_gateway.platforms.loopback import Loopback
from palaestra_gateway.service import Gateway
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Prices

HOST_WRITER = str(Path(__file__).parents[4] / "packages/palaestra/tests/tools/mcp/host_writer.py")
"""A real MCP server whose tools write files on the host."""
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def only(*users, **settings):
    return {"platforms": {"loopback": {"allowed_users": list(users)}}, **settings}


async def test_messages_of_a_session_are_answered_in_order_and_continue_one_conversation(tmp_path):
    async with a_gateway(tmp_path) as scene:
        assert await scene.ask("one") == "echo 1: one"
        await scene.platform.say("two")
        await scene.platform.say("three")
        assert (await scene.platform.receive()).text == "echo 2: two"
        assert (await scene.platform.receive()).text == "echo 3: three"
        assert await scene.ask("other", chat_id="other") == "echo 1: other"
    async with a_gateway(tmp_path) as scene:  # after a restart
        assert await scene.ask("four", message_id="later") == "echo 4: four"


async def test_a_message_that_comes_twice_is_answered_once(tmp_path):
    async with a_gateway(tmp_path) as scene:
        await scene.platform.say("one", message_id="m")
        await scene.platform.say("one", message_id="m")
        assert (await scene.platform.receive()).text == "echo 1: one"
        assert await scene.ask("two", message_id="n") == "echo 2: two"
    async with a_gateway(tmp_path) as scene:
        await scene.platform.say("one", message_id="m")
        assert await scene.ask("three", message_id="o") == "echo 3: three"
        assert len(scene.platform.sent) == 1


async def test_messages_that_wait_when_the_gateway_stops_are_answered_after_the_next_start(tmp_path):
    async with a_gateway(tmp_path) as scene:
        await scene.platform.say("slowly one two three four five six seven", message_id="a")
        await scene.platform.say("two", message_id="b")
        await until(lambda: "a" in scene.platform.streamed)
    async with a_gateway(tmp_path) as scene:
        first, second = await scene.platform.receive(), await scene.platform.receive()
        assert "/retry" in first.text
        assert second.text.endswith("two")
        assert (first.answers.message_id, second.answers.message_id) == ("a", "b")
        assert [first.answers.last, second.answers.last] == [True, True]


async def test_pieces_of_an_answer_are_streamed(tmp_path):
    async with a_gateway(tmp_path) as scene:
        assert await scene.ask("slowly one two three", message_id="m") == "one two three"
        assert scene.platform.streamed == {"m": "one two three "}
        assert scene.platform.typing == set()


async def test_stop_interrupts_the_turn_of_its_chat_only(tmp_path):
    words = " ".join("word" for _ in range(60))
    async with a_gateway(tmp_path) as scene:
        await scene.platform.say(f"slowly {words}", chat_id="a", user_id="a", message_id="a1")
        await scene.platform.say("slowly all of this", chat_id="b", user_id="b", message_id="b1")
        await until(lambda: "a1" in scene.platform.streamed)
        check_message(await scene.ask("/stop", "c"))
        assert await scene.ask("/stop", "a") == "Stopping."
        stopped = (await scene.platform.receive("a")).text
        assert 0 < stopped.count("word") < 60
        assert stopped.endswith("\n\nStopped.")
        assert (await scene.platform.receive("b")).text == "all of this"
        assert (await scene.ask("and now?", "a")).startswith("echo")


@pytest.mark.slots
async def test_a_dangerous_command_waits_for_the_approval_of_its_chat(tmp_path):
    async with a_gateway(tmp_path) as scene:
        command = "run mkdir -p a && rm -rf a && echo gone"
        question = await scene.ask(command)
        assert "rm -rf a" in question
        assert await scene.ask("/approve", "other") == "There is no command to approve in this chat."
        for wrong in ("/approve", "/approve session", f"{approval(question)} often"):
            assert "Nothing is approved" in await scene.ask(wrong)
        assert await scene.ask(approval(question).upper().replace("APPROVE", "approve")) == "Allowed."
        assert "gone" in (await scene.platform.receive()).text
        await scene.ask(command)
        assert await scene.ask("/deny") == "Not allowed."
        assert "did not allow" in (await scene.platform.receive()).text
        question = await scene.ask(f"run echo {'x' * 3000}; rm -rf b")
        assert "rm -rf b" in question
        await scene.ask("/deny")
        await scene.platform.receive()
        denied = await scene.ask(f"run rm -rf a; echo {'x' * 30_000}")
        assert "at most 20000 are shown" in denied
        assert "did not allow" in (await scene.platform.receive()).text
        question = await scene.ask("run rm -rf a #\u202e\x07\n```\n||rm -rf b||")
        assert "```\nrm -rf a #\\u202e\\x07\n\\x60\\x60\\x60\n||rm -rf b||\n```\n" in question
        await scene.ask("/deny")
        await scene.platform.receive()
        await scene.ask(command)
        assert await scene.ask("/stop") == "Stopping."
        assert (await scene.platform.receive()).text == "Stopped."


async def test_a_call_that_changes_the_host_waits_for_the_approval_of_its_chat(tmp_path):
    file = tmp_path / "written"
    arguments = json.dumps({"path": str(file), "content": "```\u202e"}, ensure_ascii=False)
    async with MCPServers({"fs": MCPServerConfig(command=sys.executable, args=[HOST_WRITER])}) as servers:
        settings = ChatSettings(
            toolsets=servers.toolsets(),
            build_tools=lambda names: build_tool_registry(list(names), installed=servers.installed()),
        )
        async with a_gateway(tmp_path, settings=settings) as scene:
            for word, allowed in (("/deny", False), ("", True)):
                question = await scene.ask(f"call mcp_fs_write {arguments}")
                check_message(question, "'write'", "'fs'")
                assert f'"path": "{file}"' in question
                assert r'"content": "\x60\x60\x60\u202e"' in question
                await scene.ask(word or approval(question))
                assert ("written" in (await scene.platform.receive()).text) == allowed
                assert file.exists() == allowed


def approval(question: str) -> str:
    """The command that allows what a question is about."""
    found = re.search(r"/approve \w+", question)
    assert found
    return found[0]


@pytest.mark.slots
async def test_a_late_approval_does_not_answer_the_next_question(tmp_path):
    async with a_gateway(tmp_path) as scene:
        first = await scene.ask("run rm -rf first")
        assert await scene.ask("/deny") == "Not allowed."
        await scene.platform.receive()
        second = await scene.ask("run rm -rf second && echo gone")
        for late in (approval(first), "/approve", "/approve session"):
            assert "Nothing is approved" in await scene.ask(late)
        assert await scene.ask(f"{approval(second)} session") == "Allowed."
        assert "gone" in (await scene.platform.receive()).text
        assert "exit_code" in await scene.ask("run rm -rf third")


@pytest.mark.slots
async def test_no_answer_to_an_approval_in_time_means_no(tmp_path):
    async with a_gateway(tmp_path, {**OPEN, "approval_timeout_s": 0.2}) as scene:
        await scene.ask("run rm -rf a")
        assert "did not allow" in (await scene.platform.receive()).text


async def test_a_question_of_the_model_is_answered_by_the_next_message(tmp_path):
    settings = ChatSettings(toolsets=["clarify"])
    async with a_gateway(tmp_path, settings=settings) as scene:
        assert await scene.ask("ask which colour?") == "which colour?"
        assert '"user_response": "blue"' in await scene.ask("blue")


async def test_of_two_messages_that_arrive_together_one_answers_a_question_and_the_other_is_answered(tmp_path):
    async with a_gateway(tmp_path, settings=ChatSettings(toolsets=["clarify"])) as scene:
        assert await scene.ask("ask which colour?") == "which colour?"
        await asyncio.gather(scene.platform.say("blue"), scene.platform.say("say red"))
        assert '"user_response": "blue"' in (await scene.platform.receive()).text
        assert (await scene.platform.receive()).text == "red"


async def test_a_late_answer_does_not_answer_the_next_question(tmp_path):
    config = {**OPEN, "approval_timeout_s": 2.0}
    async with a_gateway(tmp_path, config, settings=ChatSettings(toolsets=["clarify"])) as scene:
        assert await scene.ask("twice which colour?") == "which colour?"
        second = (await scene.platform.receive()).text
        answer = re.search(r"/answer \w+", second)[0]
        assert f"write {answer} TEXT" in await scene.ask("blue, to the first one")
        for wrong in ("/answer", "/answer xxx red", answer):
            assert "Nothing is answered" in await scene.ask(wrong)
        assert await scene.ask(f"{answer} red, or blue") == "Answered."
        assert '"user_response": "red, or blue"' in (await scene.platform.receive()).text
        assert "no question" in await scene.ask(f"{answer} green")
        assert await scene.ask("ask which size?") == "which size?"
        assert '"user_response": "large"' in await scene.ask("large")


async def test_a_stranger_gets_a_code_and_may_write_once_it_is_confirmed(tmp_path):
    async with a_gateway(tmp_path, only("anna")) as scene:
        assert await scene.ask("hello", "anna") == "echo 1: hello"
        answer = await scene.ask("hello", "eve")
        code = answer.split("gateway pair ")[1].split(" ")[0]
        await scene.platform.say("hello?", chat_id="eve", user_id="eve")  # not answered again
        await scene.platform.say("hello", chat_id="g", user_id="mallory", chat_type="group")
        with pytest.raises(ConfigError, match="AAAAAAAA"):
            await scene.gateway.mailbox.pairings.add("AAAAAAAA", 0.0)
        assert len(scene.gateway._sessions) == 1  # those of strangers would never end
        assert await scene.gateway.mailbox.pairings.add(code.lower(), 0.0) == ("loopback", "eve", "eve")
        assert await scene.ask("hello", "eve") == "echo 1: hello"
        assert len(scene.model.requests) == 2
        assert {each.address.chat_id for each in scene.platform.sent} == {"anna", "eve"}


async def test_a_code_is_valid_for_an_hour_and_is_not_given_again_meanwhile(tmp_path):
    clock = MovedClock()
    async with a_gateway(tmp_path, only(), clock=clock) as scene:
        mailbox = scene.gateway.mailbox
        code = await mailbox.pairings.code("loopback", "eve", "Eve", 1000.0)
        assert await mailbox.pairings.code("loopback", "eve", "Eve", 1010.0) is None
        with pytest.raises(ConfigError):
            await mailbox.pairings.add(code, 1000.0 + 3601)
        assert await mailbox.pairings.code("loopback", "eve", "Eve", 1000.0 + 3601) not in (None, code)


async def test_forged_senders_keep_others_from_a_code_for_a_minute_only(tmp_path):
    clock = MovedClock()
    async with a_gateway(tmp_path, only(), clock=clock) as scene:
        for number in range(50):
            await scene.platform.say("hello", chat_id=f"f{number}", user_id=f"f{number}")
        await until(lambda: len(scene.platform.sent) == CODES_PER_MINUTE)
        assert await scene.gateway.mailbox.pairings.code("other", "anna", "Anna", clock.wall()) is not None
        clock.moved_s += 61
        assert "gateway pair" in await scene.ask("hello", "anna")
        assert len(scene.platform.sent) == CODES_PER_MINUTE + 1


async def test_a_person_over_the_limit_is_told_when_to_write_again(tmp_path):
    async with a_gateway(tmp_path, {**OPEN, "limits": {"messages_per_hour": 2}}) as scene:
        assert await scene.ask("one") == "echo 1: one"
        assert await scene.ask("two") == "echo 2: two"
        check_message(await scene.ask("three"), "60", "min")
        assert await scene.ask("one", "other") == "echo 1: one"
        check_message(await scene.ask("/status"), "running")


async def test_a_person_over_the_cost_of_a_day_is_told_so(tmp_path):
    settings = ChatSettings(toolsets=[], prices=Prices(prompt=1e4, completion=0))  # a dollar for each turn
    async with a_gateway(tmp_path, {**OPEN, "limits": {"cost_per_day": 2}}, settings=settings) as scene:
        assert await scene.ask("one") == "echo 1: one"
        assert await scene.ask("two") == "echo 2: two"
        assert "$2.00 of $2.00" in await scene.ask("three")


async def test_a_cost_limit_needs_prices(tmp_path):
    async def main():
        async with a_gateway(tmp_path, {**OPEN, "limits": {"cost_per_day": 2}}):
            pass

    with pytest.raises(ConfigError, match="prices"):
        await main()


async def test_messages_that_cannot_be_taken_are_refused_with_the_reason(tmp_path):
    config = {**OPEN, "max_attachment_bytes": 1000, "max_queued": 1}
    async with a_gateway(tmp_path, config) as scene:
        assert "5.0 MB" in await scene.ask("x" * (5 << 20))
        files = [Attachment("big.bin", "application/octet-stream", bytes(2000))]
        assert "big.bin" in await scene.ask("look", attachments=files)
        assert "empty" in await scene.ask("  ")
        await scene.platform.say("slowly one two three four five six seven eight", message_id="s1")
        await scene.platform.say("second")
        assert "not accepted" in (await scene.platform.receive()).text
        assert (await scene.platform.receive()).text.startswith("one")
        assert len(scene.model.requests) == 1


async def test_a_long_reply_is_split_as_the_platform_needs(tmp_path):
    platform = Loopback(limits=PlatformLimits(max_text=100, idempotent=True))
    async with a_gateway(tmp_path, platform=platform) as scene:
        text = " ".join(f"word{number}" for number in range(60))
        await scene.platform.say(f"say {text}")
        pieces = [await platform.receive()]
        while not pieces[-1].answers.last:
            pieces.append(await platform.receive())
        assert all(len(piece.text) <= 100 for piece in pieces)
        assert "".join(piece.text for piece in pieces) == text
        assert len({piece.key for piece in pieces}) == len(pieces)


@pytest.mark.slots
async def test_files_go_both_ways(tmp_path):
    config = {**OPEN, "model_sees_images": True}
    async with a_gateway(tmp_path, config) as scene:
        image = Attachment("../my picture.png", "image/png", PNG)
        await scene.ask("look", attachments=[image])
        content = scene.model.requests[-1]["messages"][-1]["content"]
        assert "uploads/my_picture.png (image/png" in content[0]["text"]
        assert content[1]["image_url"]["url"].startswith("data:image/png;base64,")
        await scene.platform.say("say Here it is.\nMEDIA:uploads/my_picture.png\nMEDIA:no/such.txt")
        text = await scene.platform.receive()
        assert text.text.startswith("Here it is.\n(The file no/such.txt could not be sent")
        file = (await scene.platform.receive()).file
        assert (file.name, file.media_type, file.data) == ("my_picture.png", "image/png", PNG)


@pytest.mark.slots
async def test_a_file_with_a_long_name_in_another_script_is_taken(tmp_path):
    async with a_gateway(tmp_path) as scene:
        await scene.ask("look", attachments=[Attachment(f"{'字' * 120}.txt", "text/plain", b"data")])
        assert "字.txt (text/plain, 4 bytes)" in scene.model.requests[-1]["messages"][-1]["content"]


async def test_nothing_is_lost_while_the_platform_does_not_answer(tmp_path):
    async with a_gateway(tmp_path) as scene:
        scene.platform.outage = True
        for number in range(5):
            await scene.platform.say(f"say {number}", message_id=f"m{number}")
        await until(lambda: len(scene.model.requests) == 5)
    assert scene.platform.sent == []
    async with a_gateway(tmp_path) as scene:
        assert [(await scene.platform.receive()).text for _ in range(5)] == [str(number) for number in range(5)]


async def test_an_answer_waits_until_its_platform_has_started(tmp_path):
    class SlowToStart(Loopback):
        """As every platform that opens a client when it starts."""

        async def start(self, deliver):
            await asyncio.sleep(0.3)
            self.client = object()
            await super().start(deliver)

        def _send_once(self, message):
            assert self.client is not None
            return super()._send_once(message)

    async with a_gateway(tmp_path) as scene:
        scene.platform.outage = True
        await scene.platform.say("say it", message_id="m")
        await until(lambda: len(scene.model.requests) == 1)
    async with a_gateway(tmp_path, platform=SlowToStart()) as scene:
        assert (await scene.platform.receive()).text == "it"
        assert await scene.gateway.mailbox.refused_messages() == []


async def test_sending_goes_on_by_itself_when_the_platform_answers_again(tmp_path):
    async with a_gateway(tmp_path) as scene:
        scene.platform.outage = True
        await scene.platform.say("say it")
        await until(lambda: len(scene.model.requests) == 1)
        scene.platform.outage = False
        assert (await scene.platform.receive(timeout_s=5)).text == "it"


async def test_a_session_begins_anew_after_the_policys_time_and_says_so(tmp_path):
    clock = MovedClock()
    policy = {"default_reset_policy": {"mode": "idle", "idle_minutes": 60}}
    async with a_gateway(tmp_path, {**OPEN, **policy}, clock=clock) as scene:
        assert await scene.ask("one", message_id="a") == "echo 1: one"
        clock.moved_s += 3599
        assert await scene.ask("two", message_id="b") == "echo 2: two"
        clock.moved_s += 3600
        answer = await scene.ask("three", message_id="c")
        assert answer.startswith("(A new session")
        assert answer.endswith("echo 1: three")
    async with a_gateway(tmp_path, {**OPEN, **policy}, clock=clock) as scene:
        clock.moved_s -= 100_000  # the clock was set back meanwhile
        assert await scene.ask("four", message_id="d") == "echo 2: four"


@pytest.mark.slots
async def test_a_session_whose_process_runs_is_not_reset(tmp_path):
    clock = MovedClock()
    policy = {"default_reset_policy": {"mode": "idle", "idle_minutes": 60, "notify": False}}
    async with a_gateway(tmp_path, {**OPEN, **policy}, clock=clock) as scene:
        assert "session_id" in await scene.ask("start sleep 1000", message_id="a")
        clock.moved_s += 7200
        assert await scene.ask("two", message_id="b") == "echo 2: two"
        assert "sleep 1000" in await scene.ask("/status", message_id="c")
        assert "new session" in await scene.ask("/new", message_id="d")
        assert (await scene.ask("three", message_id="e")) == "echo 1: three"


async def test_retry_and_undo_change_the_history(tmp_path):
    async with a_gateway(tmp_path) as scene:
        check_message(await scene.ask("/retry"))
        await scene.ask("one")
        assert await scene.ask("two") == "echo 2: two"
        assert await scene.ask("/retry") == "echo 2: two"
        for command in ("/undo 3", "/retry it", "/new one", "/status all"):
            assert "nothing was done" in await scene.ask(command)
        assert "Nothing was stopped" in await scene.ask("/stop it")
        assert "was undone" in await scene.ask("/undo")
        assert await scene.ask("three") == "echo 2: three"


@pytest.mark.slots
async def test_stop_processes_ends_the_background_processes_of_its_chat(tmp_path):
    async with a_gateway(tmp_path) as scene:
        await scene.ask("start sleep 1000", "a")
        await scene.ask("start sleep 1000", "b")
        check_message(await scene.ask("/stop", "a"))
        assert "running: sleep" in await scene.ask("/status", "a")
        said = [await scene.ask("/stop processes", "a"), (await scene.platform.receive("a")).text]
        assert "Ended 1 background process." in said
        assert any("ended with exit code" in text for text in said)
        assert "running: sleep" in await scene.ask("/status", "b")


@pytest.mark.slots
async def test_the_end_of_a_background_process_is_reported_to_its_chat(tmp_path):
    async with a_gateway(tmp_path) as scene:
        await scene.ask("start sleep 0.5; echo finished", "a")
        report = (await scene.platform.receive("a")).text
        assert "ended with exit code 0" in report
        assert "finished" in report


async def test_what_a_platform_refuses_is_kept_and_reported_to_the_home_channel(tmp_path):
    class Refusing(Loopback):
        async def send_text(self, address: ChatAddress, text, *, key, answers=None):
            from palaestra_slots.core.errors import PlatformRefused

            if address.chat_id == "gone":
                raise PlatformRefused("the chat does not exist")
            return await super().send_text(address, text, key=key, answers=answers)

    config = {"platforms": {"loopback": {"allowed_users": ["*"], "home_channel": {"chat_id": "home"}}}}
    async with a_gateway(tmp_path, config, platform=Refusing()) as scene:
        await scene.platform.say("hello", chat_id="gone")
        notice = (await scene.platform.receive("home")).text
        assert "gone" in notice
        assert "does not exist" in notice
        ((message, reason),) = await scene.gateway.mailbox.refused_messages()
        assert (message.text, reason) == ("echo 1: hello", "the chat does not exist")


async def test_a_failing_model_server_is_an_answer_and_the_next_message_is_taken(tmp_path):
    async with a_gateway(tmp_path) as scene:
        await scene.ask("one")
        scene.model.failing = True
        assert "api_error" in await scene.ask("two")
        scene.model.failing = False
        assert (await scene.ask("three")).startswith("echo")


def test_two_platforms_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="name"):
        Gateway(GatewayConfig(), [Loopback(), Loopback()], None, None)


async def test_a_message_that_a_platform_cannot_send_ends_nothing_else(tmp_path):
    class Odd(Loopback):
        async def send_text(self, address, text, *, key, answers=None):
            if address.chat_id == "odd":
                raise ValueError("a header may not contain a line end")
            return await super().send_text(address, text, key=key, answers=answers)

    async with a_gateway(tmp_path, platform=Odd()) as scene:
        await scene.platform.say("say hello", chat_id="odd", user_id="odd")
        for _ in range(500):
            if refused := await scene.gateway.mailbox.refused_messages():
                break
            await asyncio.sleep(0.01)
        assert [message.address.chat_id for message, _ in refused] == ["odd"]
        assert await scene.ask("hi") == "echo 1: hi"
