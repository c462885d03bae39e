"""`SpeechConfig`: the settings of the server that transcribes voice messages and speaks answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self, TypeAlias

from palaestra.core.config import Settings, sent_secret, setting
from palaestra.core.errors import ConfigError

VoiceMode: TypeAlias = Literal["on", "off", "auto"]
MODES: tuple[VoiceMode, ...] = ("on", "off", "auto")


class SpeechConfig(Settings):
    """A server with OpenAI's audio API. Its key stays in the gateway: no sandbox and no model gets it."""

    base_url: str = setting("", "The server's address, such as http://127.0.0.1:8001/v1; /v1 is optional.")
    api_key: str | None = setting(None, "The server's key, sent as a bearer token.")
    api_key_variable: str = setting("", "The environment variable with the key, instead of `api_key`.")
    transcription_model: str | None = setting(
        None, "The model that transcribes voice messages. Default: they are not transcribed."
    )
    language: str | None = setting(
        None,
        "The spoken language as an ISO 639-1 code, such as en. Default: the server detects it.",
        pattern=r"^[a-z]{2,3}$",
    )
    speech_model: str | None = setting(None, "The model that speaks answers. Default: they are not spoken.")
    voice: str = setting("alloy", "The voice's name at the server.")
    speech_format: Literal["opus", "mp3", "aac", "flac", "wav"] = setting(
        "opus",
        "The format of spoken answers. Only opus can be sent as a voice message; other formats are sent as files.",
    )
    replies: VoiceMode = setting(
        "auto", "Whether answers are also spoken where a person has not chosen with /voice: on, off or auto."
    )
    max_bytes: int = setting(
        10 << 20, "Maximum size in bytes of the audio of one message; longer audio is not transcribed.", ge=1
    )
    max_seconds: float = setting(
        600.0, "Maximum length in seconds of the audio of one message, if its format states the length.", gt=0
    )
    max_spoken_chars: int = setting(
        1500, "Maximum number of characters of an answer that are spoken; the text has the rest.", ge=100, le=4096
    )
    timeout_s: float = setting(
        60.0,
        "Time limit in seconds of one request. A failed transcription is repeated twice, within two minutes; a spoken "
        "answer has only this time.",
        gt=0, le=120,
    )  # fmt: skip

    def with_variable(self, variables: Mapping[str, str]) -> Self:
        """Return these settings with the key from `api_key_variable`. Raises `ConfigError` if it is not set."""
        if not self.api_key_variable:
            return self
        if self.api_key:
            raise ConfigError("speech has both api_key and api_key_variable; keep one of them")
        key = sent_secret(variables.get(self.api_key_variable), f"the variable {self.api_key_variable}")
        if key is None:
            raise ConfigError(f"speech.api_key_variable: the environment variable {self.api_key_variable} is not set")
        return self.model_copy(update={"api_key": key, "api_key_variable": ""})
