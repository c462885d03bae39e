"""Reads the length and the codec of audio files from their headers, without decoding them."""

from __future__ import annotations

import base64
import io
import math
import wave

_OPUS_RATE = 48_000
_POINTS_PER_S, _MOST_POINTS = 10, 256


def is_ogg_opus(data: bytes) -> bool:
    """Return whether this is an Ogg file with Opus audio, the format of the platforms' voice messages."""
    return data.startswith(b"OggS") and b"OpusHead" in data[:64]


def audio_seconds(data: bytes) -> float | None:
    """Return the length in seconds of an Ogg (Opus or Vorbis), WAV or MP4 file, or None for all other data.

    Formats: RFC 3533 and RFC 7845, the Vorbis I specification 4.2.2, ISO/IEC 14496-12 8.2.2.
    """
    if data.startswith(b"OggS"):
        return _ogg_seconds(data)
    if data.startswith(b"RIFF"):
        try:
            with wave.open(io.BytesIO(data)) as file:
                stored = len(data) // (file.getnchannels() * file.getsampwidth())  # a stream states no true number
                return float(min(file.getnframes(), stored) / file.getframerate())
        except (
            wave.Error,
            EOFError,
            ZeroDivisionError,
            RuntimeError,
        ):  # the last: its chunks contradict each other
            return None
    return _mp4_seconds(data) if data[4:8] == b"ftyp" else None


def flat_waveform(seconds: float) -> str:
    """Return a waveform without peaks, in base64: one byte for 100 ms, at most 256. The true one needs a decoder."""
    points = max(1, min(_MOST_POINTS, math.ceil(seconds * _POINTS_PER_S)))
    return base64.b64encode(bytes([96]) * points).decode()


def _ogg_seconds(data: bytes) -> float | None:
    head = data[:128]
    if (at := head.find(b"OpusHead")) > 0:
        rate, skipped = _OPUS_RATE, int.from_bytes(head[at + 10 : at + 12], "little")
    elif (at := head.find(b"\x01vorbis")) > 0:
        rate, skipped = int.from_bytes(head[at + 12 : at + 16], "little"), 0
    else:
        return None
    page = data.rfind(b"OggS")
    while page > 0:
        position = int.from_bytes(data[page + 6 : page + 14], "little", signed=True)
        if position >= 0 and rate:  # -1: no packet ends on this page
            return max(0, position - skipped) / rate
        page = data.rfind(b"OggS", 0, page)
    return None


def _mp4_seconds(data: bytes) -> float | None:
    at = data.find(b"mvhd") + 4
    if at < 4:
        return None
    dates, size = (16, 8) if data[at : at + 1] == b"\x01" else (8, 4)
    at += 4 + dates
    scale = int.from_bytes(data[at : at + 4], "big")
    return int.from_bytes(data[at + 4 : at + 4 + size], "big") / scale if scale else None
