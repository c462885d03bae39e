"""Decoding a file loses nothing, so an edit changes what it names and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.tools.files.text_files import decode_file, is_binary


@given(st.binary() | st.lists(st.sampled_from([b"a", b"\r\n", b"\n", b"\r", b"\xef\xbb\xbf", b"\xe9"])).map(b"".join))
def test_decoding_and_encoding_give_the_same_bytes(data: bytes) -> None:
    assert decode_file(data).encode() == data


def test_crlf_files_are_edited_with_plain_line_ends() -> None:
    file = decode_file(b"\xef\xbb\xbfa\r\nb\r\n")
    assert file.text == "a\nb\n"
    assert file.with_text("a\nc\nd\n").encode() == b"\xef\xbb\xbfa\r\nc\r\nd\r\n"


@pytest.mark.parametrize("data", [b"a\r\nb\n", b"a\rb\r\n"])
def test_mixed_line_ends_are_left_alone(data: bytes) -> None:
    assert decode_file(data).text.encode() == data


def test_nul_makes_a_file_binary() -> None:
    assert is_binary(b"\x7fELF\0")
    assert not is_binary("ä".encode("latin-1"))
