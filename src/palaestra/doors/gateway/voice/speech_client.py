"""Requests to a server with OpenAI's audio API.

Nothing that a message contains becomes a name or an option of a request: the file's name is ours, and its media type is
one of a list. Formats: https://platform.openai.com/docs/api-reference/audio/createTranscription and …/createSpeech.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping

from yarl import URL

from palaestra.core.config import sent_secret
from palaestra.core.errors import ConfigError
from palaestra.core.retry import RetryPolicy
from palaestra.core.types import JSON
from palaestra.doors.gateway.voice.speech_config import SpeechConfig
from palaestra.tools.net.json_client import JsonServer, model_server

_CONCURRENT = 4
_RETRY = RetryPolicy(attempts=3, first_s=0.5, longest_s=10.0)
_SUFFIXES: Mapping[str, str] = {
    "audio/ogg": "ogg", "application/ogg": "ogg", "audio/opus": "ogg", "audio/mpeg": "mp3", "audio/mp3": "mp3",
    "audio/mp4": "m4a", "audio/m4a": "m4a", "audio/x-m4a": "m4a", "audio/aac": "aac", "audio/amr": "amr",
    "audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/webm": "webm", "audio/flac": "flac",
    "audio/x-flac": "flac",
}  # fmt: skip
"""Media types of audio and the suffix of the file's name, by which servers recognise the format."""


class SpeechClient:
    """The server of `config`. Raises `ConfigError` for settings that contradict each other."""

    def __init__(self, config: SpeechConfig) -> None:
        if not config.base_url.startswith(("http://", "https://")) or not _is_address(config.base_url):
            raise ConfigError("speech.base_url must be the address of a server, such as http://127.0.0.1:8001/v1")
        if URL(config.base_url).user is not None:
            raise ConfigError("speech.base_url contains a user name or a password; set speech.api_key instead")
        if not (config.transcription_model or config.speech_model):
            raise ConfigError("speech needs transcription_model, speech_model or both")
        key = sent_secret(config.api_key, "speech.api_key")
        self._config, self._lane = config, asyncio.Semaphore(_CONCURRENT)
        self._server: JsonServer = model_server(
            "the speech server", "speech.", config.base_url, key, self._lane, config.timeout_s
        )
        self._server.key, self._server.retry = "speech.api_key", _RETRY

    async def transcribe(self, data: bytes, media_type: str) -> str:
        """Return the text of a recording. Raises `ToolMistake` if the server refuses it, and `ToolUnavailable` for all
        other failures."""
        kind = "audio/mp4" if data[4:8] == b"ftyp" else media_type.partition(";")[0].strip().lower()
        suffix = _SUFFIXES.get(kind, "ogg")
        fields = {"model": self._config.transcription_model or "", "response_format": "json"}
        if self._config.language:
            fields["language"] = self._config.language
        body, content_type = _multipart(fields, f"voice.{suffix}", kind if kind in _SUFFIXES else "audio/ogg", data)
        reply = await self._server.post_form("audio/transcriptions", body, content_type)
        text = reply.get("text") if isinstance(reply, Mapping) else None
        if not isinstance(text, str):
            raise self._server.malformed(reply)
        return text.strip()

    async def speak(self, text: str) -> bytes:
        """Return the recording of a text. Raises as `transcribe` does."""
        request: dict[str, JSON] = {
            "model": self._config.speech_model,
            "input": text,
            "voice": self._config.voice,
            "response_format": self._config.speech_format,
        }
        data = await self._server.post_for_bytes("audio/speech", request)
        if not data:
            raise self._server.malformed("nothing")
        return data


def _is_address(url: str) -> bool:
    try:
        return bool(URL(url).host)
    except ValueError:
        return False


def _multipart(fields: Mapping[str, str], name: str, media_type: str, data: bytes) -> tuple[bytes, str]:
    """Return the body and the content type of a form with these fields and one file, as RFC 7578 describes them."""
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
        for key, value in fields.items()
    ]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
    parts.append(f"{head}Content-Type: {media_type}\r\n\r\n".encode() + data + f"\r\n--{boundary}--\r\n".encode())
    return b"".join(parts), f"multipart/form-data; boundary={boundary}"
