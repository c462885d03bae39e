"""The settings of these tools.

A run's configuration has each of them as an attribute, and each is a flag, such as `--env.web_provider`. Keys come only
from these settings: no tool reads the process environment, and no model sees or sets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from palaestra.tools.net.host_policy import HostPolicy
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.config import Settings, host_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

RL_LOCKED: dict[str, JSON] = {
    "max_token_length": 8192,
    "max_num_workers": None,
    "steps": 2500,
    "lora_rank": 32,
    "learning_rate": 4e-5,
}
"""Training settings that an agent cannot change unless the tool settings allow it. The project's interface contract
fixes the values."""


class WebSettings(Settings):
    """Search the web and read its pages."""

    web_provider: Literal["auto", "tavily", "exa", "brave", "serper", "firecrawl", "searxng", "ddgs"] = Field(
        default="auto",
        description="The provider of web_search. auto selects the first one with a key or an address. ddgs needs "
        "neither, only the extra `web`.",
    )
    web_extract_provider: Literal["fetch", "tavily", "exa", "firecrawl"] = Field(
        default="fetch",
        description="The provider that reads pages for web_extract. With fetch, this machine reads them, which needs "
        "the extra `web`.",
    )
    web_api_keys: dict[str, str] = Field(
        default_factory=dict,
        description="Keys of providers by name, such as `tavily=KEY`. Variables such as TAVILY_API_KEY also work.",
    )
    web_urls: dict[str, str] = Field(
        default_factory=dict, description="Addresses of your own servers by provider, such as `searxng=URL`."
    )
    web_allow: list[str] = Field(
        default_factory=list,
        description="Private addresses or networks that web tools may reach, such as 10.1.0.0/16.",
    )


class BrowserSettings(Settings):
    """A browser for rollouts."""

    browser_executable: str | None = Field(
        default=None,
        description="The Chromium that browser_* tools start. By default, the first one found that works.",
    )
    browser_allow: list[str] = Field(
        default=["*:*"],
        description="Hosts that the browser may reach: example.org, *.example.org:443, 10.0.0.0/8:*; *:* is every "
        "host on the internet. Addresses of private networks and of this machine must be listed here.",
    )
    browser_block: list[str] = Field(
        default_factory=list,
        description="Hosts that the browser never reaches, in the same form.",
    )
    browser_max_contexts: int = Field(
        default=16, ge=1, description="Maximum number of rollouts with an open browser (50 to 200 MB each)."
    )
    browser_wait_s: float = Field(default=120, gt=0, description="Maximum seconds that a rollout waits for a browser.")
    browser_navigation_timeout_s: float = Field(default=30, gt=0, description="Maximum seconds for a page to load.")
    browser_action_timeout_s: float = Field(
        default=5, gt=0, description="Maximum seconds for an element to become usable."
    )
    browser_snapshot_chars: int = Field(
        default=12_000, ge=500, description="Maximum characters of a page in one snapshot."
    )

    @field_validator("browser_allow", "browser_block")
    @classmethod
    def _hosts_mean_something(cls, entries: list[str]) -> list[str]:
        try:
            HostPolicy(entries)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return entries


class VisionSettings(Settings):
    """Questions about images."""

    vision_base_url: str | None = Field(
        default=None, description="The vision model's server, such as http://HOST:8000/v1; None disables vision tools."
    )
    vision_model: str = Field(default="default", description="The vision model's name at its server.")
    vision_api_key: str | None = Field(default=None, description="The vision server's key, sent as a bearer token.")
    vision_timeout_s: float = Field(
        default=90, gt=0, description="Seconds to wait for an answer about an image before the request is repeated."
    )
    vision_max_tokens: int = Field(default=1024, ge=1, description="Maximum tokens of an answer about an image.")
    vision_max_image_bytes: int = Field(default=10 << 20, ge=1, description="Maximum bytes of an image.")


class ImageSettings(Settings):
    """Images that a model makes."""

    image_base_url: str | None = Field(
        default=None, description="The image model's server (OpenAI's images API); None disables image_generate."
    )
    image_model: str = Field(default="default", description="The image model's name at its server.")
    image_api_key: str | None = Field(default=None, description="The image server's key, sent as a bearer token.")
    image_sizes: dict[Literal["landscape", "square", "portrait"], str] = Field(
        default={"landscape": "1536x1024", "square": "1024x1024", "portrait": "1024x1536"},
        description="The size of images to request, by shape.",
    )


class SpeechSettings(Settings):
    """Speech that a model makes."""

    speech_base_url: str | None = Field(
        default=None, description="The speech model's server (OpenAI's speech API); None disables text_to_speech."
    )
    speech_model: str = Field(default="default", description="The speech model's name at its server.")
    speech_api_key: str | None = Field(default=None, description="The speech server's key, sent as a bearer token.")
    speech_voice: str = Field(default="alloy", description="The voice's name at the speech server.")
    speech_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = Field(
        default="mp3", description="The format of the audio file."
    )


class MediaSettings(Settings):
    """Requests for images and for speech."""

    media_timeout_s: float = Field(
        default=100, gt=0, description="Seconds to wait for an image or for speech before the request is repeated."
    )


class MixtureSettings(Settings):
    """Questions to several models: mixture_of_agents."""

    moa_base_url: str | None = Field(
        default=None, description="The server of the models that mixture_of_agents asks; None disables the tool."
    )
    moa_models: list[str] = Field(
        default_factory=list, description="The names of the models that mixture_of_agents asks."
    )
    moa_aggregator: str | None = Field(
        default=None, description="The model that combines the answers into one. By default, the first of moa_models."
    )
    moa_api_key: str | None = Field(default=None, description="The key for moa_base_url, sent as a bearer token.")
    moa_timeout_s: float = Field(
        default=180,
        gt=0,
        description="Seconds to wait for a model in mixture_of_agents before the request is repeated.",
    )
    moa_max_tokens: int = Field(default=4096, ge=1, description="Maximum tokens of one answer in mixture_of_agents.")


class SkillsSettings(Settings):
    """A folder of skills."""

    skills_dir: str | None = Field(
        default=None,
        description="The folder of skills for skills_list, skill_view and skill_manage; None disables these tools, so "
        "that rollouts do not learn from each other.",
        json_schema_extra={"host_path": True},
    )


class MemorySettings(Settings):
    """Notes that the agent keeps for later conversations."""

    memory_dir: str | None = host_path(
        None, "The folder of the `memory` tool. None disables the tool, so that rollouts do not learn from each other."
    )


class SessionsSettings(Settings):
    """A search in earlier conversations."""

    sessions_dir: str | None = host_path(
        None, "The folder of earlier conversations for the `session_search` tool. None disables the tool."
    )


class TrainingSettings(Settings):
    """Training runs that agents start: rl_*."""

    rl_dir: str | None = Field(
        default=None,
        description="The folder of the training runs that rl_* tools start; None disables these tools. Rollouts with a "
        "common folder see each other's training runs.",
        json_schema_extra={"host_path": True},
    )
    rl_model: str | None = Field(
        default=None,
        description="The model that agents train: a folder, or the OWNER/NAME of a model on the hub.",
        json_schema_extra={"host_path": True},
    )
    rl_trainer: Literal["trl", "tinker"] = Field(
        default="trl", description="The trainer, as in `palaestra train --trainer`."
    )
    rl_tinker_url: str | None = Field(default=None, description="The Tinker server, for rl_trainer tinker.")
    rl_locked: dict[str, JSON] = Field(
        default=RL_LOCKED,
        description="Training settings that the agent cannot change, with their values. null stands for the setting's "
        "default.",
    )
    rl_unchecked: list[str] = Field(
        default_factory=list,
        description="Environments that agents may train on even if `palaestra env check` fails for them.",
    )
    rl_max_running: int = Field(default=1, ge=1, description="Maximum number of concurrent training runs in rl_dir.")
    rl_status_interval_s: float = Field(
        default=1800, ge=0, description="Minimum seconds between an agent's checks of a running training run."
    )
    rl_outlive: bool = Field(
        default=False, description="Let training runs continue after the conversation that started them."
    )
    rl_test_url: str | None = Field(
        default=None,
        description="URL of the model server for rl_test_inference. By default, rl_model runs in a separate process.",
    )
    rl_test_models: list[str] = Field(
        default_factory=list, description="Names of the models that rl_test_inference may request at rl_test_url."
    )


if TYPE_CHECKING:

    class ToolsetSettings(
        ToolSettings,
        WebSettings,
        BrowserSettings,
        VisionSettings,
        ImageSettings,
        SpeechSettings,
        MediaSettings,
        MixtureSettings,
        SkillsSettings,
        MemorySettings,
        SessionsSettings,
        TrainingSettings,
    ):
        """The settings that a tool gets, for type checkers: any `ToolSettings` has all of these attributes."""

else:
    ToolsetSettings = ToolSettings
