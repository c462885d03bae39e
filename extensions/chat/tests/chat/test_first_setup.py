"""The first start without settings: which server, which model, one message to try, and the file."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pexpect
import pytest
import yaml

from chat.chat_process import environment
from chat.test_one_shot import chat, play
from chat.test_terminal import CTRL_C, PROMPT, echo_server, finish, seen
from golden_messages import check_message, raises
from palaestra_chat.model_servers import (
    PROVIDERS,
    local_servers,
    provider_servers,
    some,
    with_model,
    with_provider_key,
)
from palaestra_chat.terminal.chat_terminal import is_first_start
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.echo_chat_server import EchoChatServer


def start(folder: Path, *words: str, **variables: str) -> pexpect.spawn:
    return pexpect.spawn(
        "palaestra", ["chat", *words], cwd=str(folder), timeout=40, dimensions=(40, 110), encoding="utf-8",
        env={**environment(folder), "TERM": "xterm-256color", **variables},
    )  # fmt: skip


@pytest.mark.slow
def test_the_first_start_asks_tests_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "config/palaestra/chat.yaml"
    with echo_server() as server:
        child = start(tmp_path)
        child.expect("Which model server")
        child.expect("address of a server.*: ")
        child.sendline("nonsense://")
        child.expect("must begin with http")
        child.expect("address of a server.*: ")
        child.sendline("http://127.0.0.1:9")
        child.expect("127.0.0.1:9")
        child.expect("address of a server.*: ")
        child.sendline(server.url)
        child.expect("one model: echo")
        child.expect("It answers:")
        child.expect("Written to .*chat.yaml")
        child.expect("tour")
        child.sendline("")
        for shown in ("copy of the folder", "/undo", "chat -c"):
            child.expect(shown)
            child.expect("Enter goes on")
            child.sendline("")
        seen(child, PROMPT)
        child.send("say hello\r")
        seen(child, "hello")
        finish(child)
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        assert yaml.safe_load(file.read_text()) == {"openai": {"base_url": server.url, "model_name": "echo"}}
        child = start(tmp_path)
        seen(child, PROMPT)  # without a question
        finish(child)


@pytest.mark.slow
def test_the_setup_can_be_left_and_begun_again(tmp_path: Path) -> None:
    file = tmp_path / "config/palaestra/chat.yaml"
    child = start(tmp_path, OPENAI_API_KEY="sk-none")
    child.expect("OpenAI, with the key in OPENAI_API_KEY")
    child.expect("address of a server")
    child.send(CTRL_C)
    child.expect("chat --setup")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 2
    assert not file.exists()
    file.parent.mkdir(parents=True)
    file.write_text("env: {mode: ask}\n")
    with echo_server() as server:
        child = start(tmp_path, "--setup")
        child.expect("address of a server.*: ")
        child.sendline(server.url)
        child.expect("tour")
        child.sendline("n")
        seen(child, "ask · echo")
        finish(child)
    assert yaml.safe_load(file.read_text())["env"] == {"mode": "ask"}
    assert (file.parent / "chat.yaml.old").read_text() == "env: {mode: ask}\n"


@pytest.mark.slow
def test_without_a_terminal_it_is_one_error(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        ran = await chat(tmp_path, "-p", "hi")
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.count("\n") == 1
        assert "--base-url" in ran.err
        assert "--policy" not in ran.err
        ran = await chat(tmp_path, "-p", "say hi", "--base-url", server.url, "--json")
        assert ran.events[0]["model"] == "echo"  # the only one of the server

    play(scene)


@pytest.mark.parametrize(
    ("words", "environ", "first"),
    [
        ([], {}, True), (["-c"], {"HOME": "/"}, True), (["--workdir", "."], {}, True), (["--base-url=x"], {}, False),
        (["--model", "m"], {}, False), (["--openai.server_type", "transformers"], {}, False),
        ([], {"OPENAI_BASE_URL": "x"}, False), ([], {"OPENAI_API_KEY": "x"}, True),
        ([], {"ATROPOS_SERVER_BASE_URL": "x"}, False), (["--config", "a.yaml"], {}, False),
    ],
)  # fmt: skip
def test_a_start_is_the_first_one_if_nothing_names_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], environ: dict[str, str], first: bool
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert is_first_start(words, environ) == first
    (tmp_path / "palaestra").mkdir()
    (tmp_path / "palaestra/chat.yaml").write_text("")
    assert not is_first_start(words, environ)


async def test_servers_are_found_on_ports_and_by_keys(caplog: pytest.LogCaptureFixture) -> None:
    async with EchoChatServer() as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        (found,) = await local_servers({"Ollama": port, "nothing": 9})
    assert not caplog.records
    check_message(found.about, "Ollama")
    assert found.models == ["echo"]
    assert [each.base_url for each in provider_servers({"GROQ_API_KEY": "k"})] == [PROVIDERS["GROQ_API_KEY"][1]]
    assert provider_servers({"GROQ_API_KEY": ""}) == []


@pytest.mark.parametrize(
    ("host", "given", "sent"),
    [
        ("openrouter.ai/api", None, "r"), ("openrouter.ai/api", "o", "r"), ("openrouter.ai/api", "mine", "mine"),
        ("api.openai.com", None, "o"), ("127.0.0.1:8000", None, None), ("api.mistral.ai", "o", None),
        ("example.org", "o", "o"),
    ],
)  # fmt: skip
def test_a_provider_gets_its_own_key(host: str, given: str | None, sent: str | None) -> None:
    environ = {"OPENAI_API_KEY": "o", "OPENROUTER_API_KEY": "r"}
    server = APIServerConfig(base_url=f"https://{host}/v1", api_key=given, model_name="m")
    assert with_provider_key(server, environ).api_key == sent


def test_a_model_is_chosen_only_if_it_is_the_only_one() -> None:
    async def scene(models: list[str], **given: str) -> str:
        async with EchoChatServer(models=models) as server:
            return (await with_model(APIServerConfig(base_url=server.url, **given))).model_name

    assert asyncio.run(scene(["one"])) == "one"
    assert asyncio.run(scene(["one", "two"], model_name="two")) == "two"
    with raises(ConfigError, "--model"):
        asyncio.run(scene([f"m{number}" for number in range(12)]))
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"
    assert asyncio.run(with_model(APIServerConfig(base_url="http://127.0.0.1:9"))).model_name == "default"
