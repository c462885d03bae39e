"""The tool `send_message` of the agents of a gateway."""

import json
import uuid

import pytest

from gateway.conftest import OPEN, a_gateway, until
from palaestra.tools.registry.build import build_tool_registry
from palaestra_chat.service import ChatSettings
from palaestra_slots.core.errors import ConfigError

TOOLS = ChatSettings(toolsets=["messaging"])
HOME = {"allowed_users": ["*"], "home_channel": {"chat_id": "home", "chat_type": "group"}}


async def call(scene, **arguments):
    answer = await scene.ask(f"call send_message {json.dumps(arguments)}", "anna", message_id=uuid.uuid4().hex)
    return json.loads(answer.removeprefix("done: "))


async def test_an_agent_writes_to_the_home_channel_and_to_its_own_chat(tmp_path):
    async with a_gateway(tmp_path, {"platforms": {"loopback": HOME}}, settings=TOOLS) as scene:
        listed = await call(scene, action="list")
        assert [each["target"] for each in listed["targets"]] == ["origin", "loopback"]
        assert (await call(scene, target="loopback", message="the build is **done**"))["success"]
        received = await scene.platform.receive("home")
        assert (received.text, received.address.chat_type, received.answers) == (
            "the build is **done**", "group", None
        )  # fmt: skip
        await scene.platform.say('call send_message {"target": "origin", "message": "half"}', chat_id="anna")
        said = [(await scene.platform.receive("anna")).text for _ in range(2)]
        assert "half" in said


async def test_chats_of_others_are_reached_only_if_the_owner_allows_it(tmp_path):
    async with a_gateway(tmp_path, settings=TOOLS) as scene:
        await scene.ask("hello", "bert")
        for target in ("loopback:bert", "loopback:unknown", "", "matrix"):
            reply = await call(scene, target=target, message="psst")
            assert "success" not in reply
            assert reply["error"]
    assert [each.text for each in scene.platform.sent if each.address.chat_id == "bert"] == ["echo 1: hello"]
    for wanted in ("*", "loopback:bert"):
        async with a_gateway(tmp_path, {**OPEN, "message_targets": [wanted]}, settings=TOOLS) as scene:
            assert (await call(scene, target="loopback:bert", message=f"by {wanted}"))["success"]
            assert (await scene.platform.receive("bert")).text == f"by {wanted}"


async def test_a_message_waits_for_a_platform_that_is_down_and_survives_a_restart(tmp_path):
    config = {"platforms": {"loopback": HOME}}
    async with a_gateway(tmp_path, config, settings=TOOLS) as scene:
        scene.platform.outage = True
        await scene.platform.say('call send_message {"target": "loopback", "message": "late"}', chat_id="anna")
        await until(lambda: len(scene.model.requests) == 2)
    async with a_gateway(tmp_path, config, settings=TOOLS) as scene:
        assert (await scene.platform.receive("home")).text == "late"


def test_the_tool_is_missing_without_a_gateway():
    registry = build_tool_registry(["messaging"])
    assert registry.list_tools() == []
    assert "palaestra gateway" in registry.missing["send_message"]
    with pytest.raises(ConfigError, match="send_message"):
        build_tool_registry(["messaging"], strict=True)
