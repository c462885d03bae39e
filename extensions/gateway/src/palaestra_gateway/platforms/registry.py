"""The platforms by name, each imported when it is used.

A package offers a platform as an entry point of `palaestra.platforms`, whose name is the platform's in `gateway.yaml`:

    [project.entry-points."palaestra.platforms"]
    mattermost = "my_package.mattermost:Mattermost"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Platform
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io.plugins import installed, load

GROUP = "palaestra.platforms"

PLATFORMS: Mapping[str, str] = {
    "webhook": "palaestra_gateway.platforms.webhook:Webhook",
    "openai": "palaestra_gateway.platforms.openai_api:OpenAIServer",
    "slack": "palaestra_gateway.platforms.slack:Slack",
    "telegram": "palaestra_gateway.platforms.telegram:Telegram",
    "discord": "palaestra_gateway.platforms.discord:Discord",
    "email": "palaestra_gateway.platforms.email:Email",
    "whatsapp": "palaestra_gateway.platforms.whatsapp:WhatsApp",
    "matrix": "palaestra_gateway.platforms.matrix:Matrix",
}
"""The class of each platform, as module and name. The class is called with the platform's name and its
`PlatformConfig`. The attribute `extra_settings` lists the names that `extra` may have."""


def make_platform(name: str, config: PlatformConfig) -> Platform:
    """Return the platform with this name in the configuration: `KIND` or `KIND-WORD`, such as `webhook-2`.

    Raises `ConfigError` for an unknown platform, for unusable settings, for a plug-in that cannot be loaded, and if the
    extra `gateway` is not installed.
    """
    offered = installed(GROUP)
    known = dict.fromkeys([*PLATFORMS, *offered])
    kind = name if name in known else name.partition("-")[0]
    if kind not in known:
        raise ConfigError(f"unknown platform {name!r}; the platforms are {', '.join(known)}.{nearest(name, known)}")
    found: Any = _import_platform(name, *PLATFORMS[kind].split(":")) if kind in PLATFORMS else load(offered[kind])
    for setting in config.extra:
        if setting not in found.extra_settings:
            hint = f"{nearest(setting, found.extra_settings)} The settings are {', '.join(found.extra_settings)}."
            hint = hint if found.extra_settings else " This platform has no such settings."
            raise ConfigError(f"unknown setting {setting} of platforms.{name}.extra.{hint}")
    platform: Platform = found(name, config)
    return platform


def _import_platform(name: str, module: str, attribute: str) -> object:
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"platform {name} needs {error.name}: {install_command('gateway')}") from None
