"""The server's words, in all the shapes that errors come in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from golden_messages import check_message
from palaestra_tokens.http.transport import engine_refusal, public_url, server_says


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "no key", "type": "x", "code": "invalid"}}', "no key (invalid)"),
        (b'{"error": {"message": "no key", "code": 401}}', "no key"),
        (b'{"error": "no key"}', "no key"),
        (b'{"object": "error", "message": "no\\n  key"}', "no key"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "msg": "bad"}]}', '[{"loc":["body"],"msg":"bad"}]'),
        (b"<html>Bad\ngateway</html>", "<html>Bad gateway</html>"),
        (b"", ""),
        (b"null", "null"),
        (b'{"error": "caf\xe9"}', '{"error": "caf\N{REPLACEMENT CHARACTER}"}'),
        (b"x" * 900, "x" * 250 + " … " + "x" * 250),
    ],
)
def test_what_the_server_says(body: bytes, says: str) -> None:
    assert server_says(body) == says


@given(st.binary(max_size=80) | st.recursive(st.none() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_any_body_gives_one_bounded_line(body: bytes) -> None:
    said = server_says(body)
    assert len(said) <= 500 + len(" … ")
    assert "\n" not in said


def test_addresses_are_shown_without_secrets() -> None:
    assert public_url(URL("https://me:pw@h:8/v1/x?api-key=k#f")) == "https://h:8/v1/x"


def test_a_redirect_says_what_to_change() -> None:
    check_message(str(engine_refusal(URL("http://h/v1"), 301, b"", "m")))
