import base64
import io
import wave

import pytest

from palaestra.doors.gateway.voice.audio_length import audio_seconds, flat_waveform, is_ogg_opus
from palaestra.testing.fake_speech_server import silent_opus


@pytest.mark.parametrize("seconds", [0.02, 1.0, 1.5, 75.0])
def test_the_length_of_ogg_opus_is_read_from_its_last_page(seconds):
    data = silent_opus(seconds)
    assert is_ogg_opus(data)
    assert audio_seconds(data) == pytest.approx(seconds)
    assert audio_seconds(data + b"trailing bytes") == pytest.approx(seconds)


def test_a_last_page_on_which_no_packet_ends_is_passed_over():
    data = bytearray(silent_opus(2.0))
    last = data.rfind(b"OggS")
    data[last + 6 : last + 14] = b"\xff" * 8
    assert audio_seconds(bytes(data)) == pytest.approx(1.0)


def test_the_pages_have_the_checksum_that_the_format_requires():
    # computed a second time, bit by bit
    page = silent_opus(0.02)
    assert page[:4] == b"OggS"
    number = page.find(b"OggS", 4)
    kept = int.from_bytes(page[22:26], "little")
    blank, register = page[:22] + b"\0\0\0\0" + page[26:number], 0
    for byte in blank:
        for place in range(7, -1, -1):
            out = (register >> 31) ^ ((byte >> place) & 1)
            register = ((register << 1) & 0xFFFFFFFF) ^ (0x04C11DB7 if out else 0)
    assert register == kept


def test_the_length_of_a_wav_and_of_an_mp4_file_is_read():
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(bytes(2 * 8000 * 3))
    assert audio_seconds(file.getvalue()) == 3.0
    streamed = file.getvalue()[:40] + b"\xff" * 4 + file.getvalue()[44:]
    assert 3.0 <= audio_seconds(streamed) < 3.1
    for version, size in ((0, 4), (1, 8)):
        times = bytes(2 * size) + (1000).to_bytes(4, "big") + (4500).to_bytes(size, "big")
        movie = bytes(4) + b"ftypM4A " + bytes(8) + b"mvhd" + bytes([version, 0, 0, 0]) + times
        assert audio_seconds(movie) == 4.5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"OggS",
        b"OggS" + bytes(200),
        b"RIFF",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"ID3 of an mp3",
        bytes(4) + b"ftypM4A mvhd",
        # chunks that are longer than the file
        b"RIFF\xb4\x01\0\0WAVEfmt \x10\0\0\x80\x01\0\x01\0@\x1f\0\0\x80>\0\0\x02\0\x10\0data\x90\x80\0\0" + bytes(300),
    ],
)
def test_other_and_damaged_data_has_no_known_length(data):
    assert audio_seconds(data) is None
    assert not is_ogg_opus(data)


def test_a_waveform_has_at_most_256_points():
    assert [len(base64.b64decode(flat_waveform(seconds))) for seconds in (0.0, 1.0, 1000.0)] == [1, 10, 256]
