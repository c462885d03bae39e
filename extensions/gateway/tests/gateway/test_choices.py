import pytest

from gateway.conftest import OPEN, a_gateway
from gateway.echo_model import EchoModel
from golden_messages import check_message
from palaestra_chat.service import ChatSettings
from palaestra_gateway.platforms.loopback import Loopback
from palaestra_tokens.config import APIServerConfig

CONFIG = {**OPEN, "toolsets": ["todo"], "more_toolsets": ["file"]}


def settings(other: EchoModel) -> ChatSettings:
    models = {"big": APIServerConfig(base_url=other.url, model_name="other")}
    return ChatSettings(toolsets=["todo"], models=models)


def tools(model: EchoModel) -> set[str]:
    return {each["function"]["name"] for each in model.requests[-1].get("tools", ())}


async def test_a_chosen_model_answers_from_the_next_message_on_and_after_a_restart(tmp_path):
    loopback = Loopback()
    other = EchoModel()
    async with other.serving():
        async with a_gateway(tmp_path, CONFIG, settings=settings(other), platform=loopback) as scene:
            assert await scene.ask("/model") == (
                "Choose one of these models with /model NAME:\n→ default: m\n- big: other"
            )
            check_message(await scene.ask("/model big"), "big", "other")
            assert await scene.ask("hello") == "echo 1: hello"
            assert (other.requests[-1]["model"], len(scene.model.requests)) == ("other", 0)
            assert "model other" in await scene.ask("/status")
            assert await scene.ask("hi", "anna") == "echo 1: hi"  # another chat is not affected
            assert len(other.requests) == 1
        async with a_gateway(tmp_path, CONFIG, settings=settings(other), platform=loopback) as scene:
            assert await scene.ask("again") == "echo 2: again"
            assert len(other.requests) == 2
            await scene.ask("/new")
            assert await scene.ask("new") == "echo 1: new"
            assert len(other.requests) == 3
            await scene.ask("/model default")
            await scene.ask("back")
            assert (len(other.requests), len(scene.model.requests)) == (3, 1)


async def test_a_model_that_is_no_longer_offered_is_left(tmp_path):
    loopback = Loopback()
    other = EchoModel()
    async with other.serving():
        async with a_gateway(tmp_path, CONFIG, settings=settings(other), platform=loopback) as scene:
            await scene.ask("/model big")
        async with a_gateway(tmp_path, CONFIG, settings=ChatSettings(toolsets=["todo"]), platform=loopback) as scene:
            assert await scene.ask("hello") == "echo 1: hello"
            assert scene.model.requests[-1]["model"] == "m"


async def test_toolsets_are_turned_on_and_off_for_one_chat(tmp_path):
    loopback = Loopback()
    async with a_gateway(tmp_path, CONFIG, settings=ChatSettings(toolsets=["todo"]), platform=loopback) as scene:
        assert (await scene.ask("/toolsets")).splitlines()[1:] == ["→ todo", "- file"]
        check_message(await scene.ask("/toolsets +file -todo"))
        await scene.ask("hello")
        assert "read_file" in tools(scene.model)
        assert "todo" not in tools(scene.model)
        await scene.ask("hello", "anna")
        assert tools(scene.model) == {"todo"}
    async with a_gateway(tmp_path, CONFIG, settings=ChatSettings(toolsets=["todo"]), platform=loopback) as scene:
        await scene.ask("after a restart")
        assert "read_file" in tools(scene.model)
        await scene.ask("/toolsets default")
        await scene.ask("again")
        assert tools(scene.model) == {"todo"}
    async with a_gateway(tmp_path, CONFIG, settings=ChatSettings(toolsets=["todo"]), platform=loopback) as scene:
        await scene.ask("/toolsets file todo")
    narrow = {**CONFIG, "more_toolsets": []}
    async with a_gateway(tmp_path, narrow, settings=ChatSettings(toolsets=["todo"]), platform=loopback) as scene:
        await scene.ask("less is offered")
        assert tools(scene.model) == {"todo"}


@pytest.mark.parametrize("command", ["/model huge", "/toolsets +terminal"])
async def test_only_what_the_configuration_offers_can_be_chosen(tmp_path, command):
    loopback = Loopback()
    async with a_gateway(tmp_path, CONFIG, settings=ChatSettings(toolsets=["todo"]), platform=loopback) as scene:
        assert "there is no" in await scene.ask(command)
        await scene.ask("hello")
        assert tools(scene.model) == {"todo"}
