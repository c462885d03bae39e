"""The platforms by name, each imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError
from palaestra.core.extras import install_command
from palaestra.doors.gateway.config import PlatformConfig
from palaestra.doors.gateway.platform import Platform

PLATFORMS: Mapping[str, str] = {
    "webhook": "palaestra.doors.gateway.platforms.webhook:Webhook",
    "openai": "palaestra.doors.gateway.platforms.openai_api:OpenAIServer",
    "slack": "palaestra.doors.gateway.platforms.slack:Slack",
    "telegram": "palaestra.doors.gateway.platforms.telegram:Telegram",
    "discord": "palaestra.doors.gateway.platforms.discord:Discord",
    "email": "palaestra.doors.gateway.platforms.email:Email",
    "mattermost": "palaestra.doors.gateway.platforms.mattermost:Mattermost",
    "signal": "palaestra.doors.gateway.platforms.signal_cli:SignalCli",
    "whatsapp": "palaestra.doors.gateway.platforms.whatsapp:WhatsApp",
    "sms": "palaestra.doors.gateway.platforms.sms:Sms",
    "matrix": "palaestra.doors.gateway.platforms.matrix:Matrix",
}
"""The class of each platform, as module and name. The class is called with the platform's name and its
`PlatformConfig`. The attribute `extra_settings` lists the names that `extra` may have."""


def make_platform(name: str, config: PlatformConfig) -> Platform:
    """Return the platform with this name in the configuration: `KIND` or `KIND-WORD`, such as `webhook-2`.

    Raises `ConfigError` for an unknown platform, for unusable settings and if the extra `gateway` is not installed.
    """
    kind = name if name in PLATFORMS else name.partition("-")[0]
    if kind not in PLATFORMS:
        raise ConfigError(
            f"unknown platform {name!r}; the platforms are {', '.join(PLATFORMS)}.{nearest(name, PLATFORMS)}"
        )
    module, _, attribute = PLATFORMS[kind].partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"platform {name} needs {error.name}: {install_command('gateway')}") from None
    for setting in config.extra:
        if setting not in found.extra_settings:
            known = f"{nearest(setting, found.extra_settings)} The settings are {', '.join(found.extra_settings)}."
            known = known if found.extra_settings else " This platform has no such settings."
            raise ConfigError(f"unknown setting {setting} of platforms.{name}.extra.{known}")
    platform: Platform = found(name, config)
    return platform
