import re
import sys
from pathlib import Path

import pytest
import yaml

from golden_messages import raises
from palaestra.tools.registry.build import build_tool_registry
from palaestra_gateway.assembly import _chat_settings, assembled
from palaestra_gateway.command import EXAMPLE
from palaestra_gateway.config import GatewayConfig, PlatformConfig, read_config
from palaestra_gateway.platforms.registry import GROUP, PLATFORMS, make_platform
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.plugins import installed

PAGE = Path(__file__).parents[4] / "docs/gateway.md"


@pytest.mark.parametrize("text", [EXAMPLE, *re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)])
def test_the_settings_in_the_documentation_can_be_read(text):
    assert GatewayConfig.from_dict(yaml.safe_load(text)).platforms


def test_the_page_lists_every_platform():
    assert all(f"| `{name}` |" in PAGE.read_text() for name in PLATFORMS)


def test_a_token_comes_from_its_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    assert PlatformConfig(token_file=tmp_path / "token").secret("x") == "secret"
    with pytest.raises(ConfigError, match="both"):
        PlatformConfig(token="a", token_file=tmp_path / "token").secret("x")
    with pytest.raises(ConfigError, match=r"platforms\.x"):
        PlatformConfig(token_file=tmp_path / "none").secret("x")


def test_the_home_channel_is_the_platforms_own_or_the_first():
    channels = {"a": {"home_channel": {"chat_id": "1"}}, "b": {"home_channel": {"chat_id": "2"}}, "c": {}}
    config = GatewayConfig.from_dict({"platforms": channels})
    assert [config.home_channel(name).chat_id for name in ("a", "b", "c", "")] == ["1", "2", "1", "1"]
    assert config.home_channel("b").platform == "b"
    assert GatewayConfig().home_channel() is None


@pytest.mark.parametrize("text", ["- a list", "platforms: {openai: {tokens: x}}", "a: [", "platform: {}"])
def test_an_unusable_file_is_refused(tmp_path, text):
    (tmp_path / "gateway.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_config(tmp_path / "gateway.yaml")


def test_an_unknown_platform_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="matrix"):
        make_platform("matrx", PlatformConfig())
    with pytest.raises(ConfigError, match=r"prot .*platforms\.openai\.extra.*port"):
        make_platform("openai", PlatformConfig(extra={"prot": 8000}))
    assert make_platform("webhook-2", PlatformConfig(extra={"reply_url": "http://x"})).name == "webhook-2"


@pytest.mark.parametrize("name", ["mattermost", "signal", "sms"])
def test_a_package_offers_a_platform(name, tmp_path, monkeypatch):
    with raises(ConfigError, name, "webhook", "openai"):
        make_platform(name, PlatformConfig())
    (tmp_path / "their_chat.py").write_text(
        "class Chat:\n    extra_settings = ('url',)\n    def __init__(self, name, config):\n        self.name = name\n"
    )
    info = tmp_path / "their_chat-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-chat\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = their_chat:Chat\nmatrix = their_chat:Chat\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    try:
        assert make_platform(f"{name}-2", PlatformConfig(extra={"url": "x"})).name == f"{name}-2"
        with raises(ConfigError, "uri", "url"):
            make_platform(name, PlatformConfig(extra={"uri": "x"}))
        assert (
            type(make_platform("matrix", PlatformConfig(token="t", extra={"homeserver": "http://x"}))).__name__
            == "Matrix"
        )
    finally:
        sys.modules.pop("their_chat", None)
        installed.cache_clear()


async def test_an_unknown_toolset_ends_the_start(tmp_path):
    server = {"base_url": "http://127.0.0.1:9/v1", "model_name": "m"}
    platforms = {"openai": {"extra": {"port": 0}}}
    config = GatewayConfig.from_dict({"server": server, "toolsets": ["termnal"], "platforms": platforms})
    with pytest.raises(ConfigError, match="termnal"):
        async with assembled(config, tmp_path):
            pass


def test_tools_have_their_settings(tmp_path):
    config = GatewayConfig.from_dict({"toolsets": ["tts"], "tools": {"speech_base_url": "http://127.0.0.1:1"}})
    registry = build_tool_registry(config.toolsets, settings=_chat_settings(config).tool_settings)
    assert registry.list_tools() == ["text_to_speech"]
    with pytest.raises(ConfigError, match="speech_bas_url"):
        GatewayConfig.from_dict({"tools": {"speech_bas_url": "http://127.0.0.1:1"}})
