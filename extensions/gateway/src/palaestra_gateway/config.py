"""`GatewayConfig`: the settings of `palaestra gateway`, in the format that the project's interface contract fixes.
`read_config` reads them from a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from palaestra.tools.settings import ToolSettings
from palaestra_gateway.platform import ChatAddress, ChatType
from palaestra_gateway.session_reset import SessionResetPolicy
from palaestra_slots.core.config import Settings, host_path, local_path, sent_secret, setting
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig

CONFIG_NAME = "gateway.yaml"


class HomeChannel(Settings):
    """The chat that gets notices: failures, and messages that could not be sent."""

    platform: str = setting("", "The platform's name. Default: the platform whose settings contain the channel.")
    chat_id: str = Field(description="The chat's id on the platform.")
    name: str = setting("", "A readable name.")
    chat_type: ChatType = setting("dm", "dm, group or channel.")
    thread_id: str = setting("", "A thread of the chat. Default: the chat itself.")

    @property
    def address(self) -> ChatAddress:
        return ChatAddress(self.platform, self.chat_id, self.chat_type, self.thread_id)


class PlatformConfig(Settings):
    """One platform. `extra` has the platform's own settings, which docs/gateway.md lists."""

    enabled: bool = setting(True, "Whether the gateway connects to this platform.")
    token: str | None = setting(None, "The bot's token or password.")
    token_file: Path | None = host_path(None, "The file that holds the token, instead of `token`.")
    api_key: str | None = setting(None, "A second secret, if the platform needs one.")
    home_channel: HomeChannel | None = setting(None, "The chat that gets notices.")
    allowed_users: list[str] = Field(
        default_factory=list, description="User ids that may talk to the agent; `*` allows everyone."
    )
    extra: dict[str, JSON] = Field(default_factory=dict, description="The platform's own settings.")

    def secret(self, name: str) -> str | None:
        """Return the token, from `token` or from the file `token_file`. Raises `ConfigError`."""
        if self.token and self.token_file:
            raise ConfigError(f"platforms.{name} has both token and token_file; keep one of them")
        if self.token_file is None:
            return sent_secret(self.token, f"platforms.{name}.token")
        path = local_path(self.token_file)
        try:
            return sent_secret(path.read_text(encoding="utf-8"), f"platforms.{name}.token_file")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"platforms.{name}.token_file: cannot read {path} ({why}); write the token to that file"
            ) from None


class ModelPrices(Settings):
    """The price of a million tokens, in dollars."""

    prompt: float = setting(0.0, "The price of a million prompt tokens.", ge=0)
    completion: float = setting(0.0, "The price of a million completion tokens.", ge=0)


class UserLimits(Settings):
    """The limits of one person. A message beyond a limit is refused, with a reply that gives the reason."""

    messages_per_hour: int = setting(120, "Maximum messages of one person per hour; 0: no limit.", ge=0)
    cost_per_day: float = setting(0.0, "Maximum cost of one person's turns in 24 hours, in dollars; 0: no limit.", ge=0)


class GatewayConfig(Settings):
    """The configuration of a gateway. `from_dict({})` and `GatewayConfig()` are equal."""

    server: APIServerConfig | None = setting(
        None, "The model server: base_url, model_name, api_key and other settings."
    )
    models: dict[str, dict[str, JSON]] = setting(
        {},
        "Further models that people can choose with /model: a name, and the settings of its server (base_url, "
        "model_name, api_key, …). What a model does not set is as in `server`.",
    )
    more_toolsets: list[str] = Field(
        default_factory=list, description="Toolsets that people can turn on with /toolsets, in addition to `toolsets`."
    )
    toolsets: list[str] = Field(default=["terminal", "file", "todo", "clarify"], description="The agent's toolsets.")
    tools: ToolSettings = Field(
        default_factory=ToolSettings,
        description="Settings of tools, such as web_provider, vision_base_url and skills_dir.",
    )
    system_prompt: str | None = setting(None, "The system prompt. Default: a short built-in prompt.")
    max_turns: int = setting(60, "Maximum model calls for one message.", ge=1)
    context_tokens: int | None = setting(
        None, "The size of the model's window in tokens. Default: what the server reports.", ge=1
    )
    prices: ModelPrices | None = setting(None, "The prices of the model; needed for limits.cost_per_day.")
    backend: str = setting("local", "Where sandboxes are: local, docker, ssh, singularity, or another backend.")
    backend_settings: dict[str, JSON] = setting(
        {}, "Settings of that backend, named as in a run, such as docker_image or ssh_hosts."
    )
    isolation: str = setting("best", "The isolation level of sandboxes: best, full, userns, confined or none.")
    network: Literal["on", "off"] = setting("off", "Whether sandboxes have a network.")
    image: str | None = host_path(
        None, "The root file system of sandboxes. Default: this machine's system directories."
    )
    max_sandboxes: int | None = setting(
        None, "Maximum number of sandboxes. Default: as many as this machine can hold.", ge=1
    )
    keep_sandboxes: bool = setting(True, "Whether sandboxes and their processes outlive a restart of the gateway.")
    platforms: dict[str, PlatformConfig] = Field(default_factory=dict, description="The platforms, by name.")
    message_targets: list[str] = Field(
        default_factory=list,
        description="Chats that the tool send_message may write to, in addition to its own chat and the home channels: "
        "PLATFORM:CHAT, or `*` for every chat that has a session.",
    )
    default_reset_policy: SessionResetPolicy = Field(
        default_factory=SessionResetPolicy, description="When a session is reset."
    )
    reset_by_type: dict[ChatType, SessionResetPolicy] = Field(
        default_factory=dict, description="Reset policies by type of chat (dm, group, channel)."
    )
    reset_by_platform: dict[str, SessionResetPolicy] = Field(
        default_factory=dict, description="Reset policies by platform; these take precedence over those by type."
    )
    group_sessions_per_user: bool = setting(True, "Whether each member of a group has their own session.")
    limits: UserLimits = Field(default_factory=UserLimits, description="The limits of one person.")
    status_port: int | None = setting(
        None, "The port of /metrics and /status, on the loopback address. Default: neither is served.", ge=0, le=65535
    )
    max_message_bytes: int = setting(
        1 << 20, "Maximum length of a message in bytes. Longer messages are refused with a notice.", ge=1000
    )
    max_attachment_bytes: int = setting(
        20 << 20, "Maximum size of a file in bytes. Larger files are refused with a notice.", ge=0
    )
    max_queued: int = setting(50, "Maximum queued messages of one session; further ones are refused.", ge=1)
    model_sees_images: bool = setting(False, "Whether images are also part of the message to the model.")
    approval_timeout_s: float = setting(
        300.0, "Seconds to wait for /approve; after that, the command is rejected.", gt=0
    )

    @classmethod
    def from_dict(cls, values: Mapping[str, JSON] | None) -> GatewayConfig:
        """Read the configuration from a mapping; a key that is missing or None gets its default. Raises
        `ConfigError`."""
        return cls(**_without_none(dict(values or {})))

    def to_dict(self) -> dict[str, JSON]:
        return self.recorded()

    def reset_policy(self, platform: str, chat_type: ChatType) -> SessionResetPolicy:
        """Return the reset policy for a chat: the policy for its platform, or else the policy for its type, or else the
        default policy."""
        return self.reset_by_platform.get(platform) or self.reset_by_type.get(chat_type) or self.default_reset_policy

    def home_channel(self, platform: str = "") -> ChatAddress | None:
        """Return the platform's home channel, or else the first home channel of any enabled platform, or else None."""
        own = self.platforms.get(platform)
        for name, each in ([(platform, own)] if own is not None else []) + list(self.platforms.items()):
            if each.enabled and each.home_channel is not None:
                home = each.home_channel
                return home.address if home.platform else home.model_copy(update={"platform": name}).address
        return None


def read_config(path: Path) -> GatewayConfig:
    """Read the configuration from a YAML file. Raises `ConfigError`."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration {path}; create one: mkdir -p {path.parent} && palaestra gateway "
            f"example > {path}"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} must contain settings by name, such as `platforms:`")
    return GatewayConfig.from_dict(values)


def _without_none(values: dict[str, JSON]) -> dict[str, JSON]:
    """Remove the keys whose value is None, in nested mappings too."""
    return {
        name: _without_none(value) if isinstance(value, dict) and name != "extra" else value
        for name, value in values.items()
        if value is not None
    }
