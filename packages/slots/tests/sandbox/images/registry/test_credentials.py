"""Challenges of registries, and the user's credentials for them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.images.registry.credentials import Challenge, parse_challenge, read_credentials, token_of

HUB = 'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push"'


@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        ([HUB], Challenge("bearer", "https://auth.docker.io/token", "registry.docker.io")),
        (['Basic realm="x"', HUB], Challenge("bearer", "https://auth.docker.io/token", "registry.docker.io")),
        (['Basic realm="x, y", Bearer realm="https://a/b"'], Challenge("bearer", "https://a/b")),
        (["BASIC realm=x"], Challenge("basic", "x")),
        (["Negotiate"], None),
        ([], None),
        (["Bearer " + 'a="' * 100_000], Challenge("bearer")),
    ],
)
def test_the_challenge_that_can_be_answered_is_found(headers: list[str], challenge: Challenge | None) -> None:
    assert parse_challenge(headers) == challenge


def test_credentials_are_those_of_the_registry_itself(tmp_path: Path) -> None:
    pair = base64.b64encode(b"person:pass:word").decode()
    auths = {
        "https://index.docker.io/v1/": {"auth": pair},
        "GHCR.io": {"username": "person", "password": "pass:word"},
        "ghcr.io/other": {"auth": base64.b64encode(b"other:pw").decode()},
        "localhost:5000": {},
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"auths": auths, "credsStore": "desktop", "credHelpers": {"gcr.io": "gcloud"}}))
    found = read_credentials(config)
    assert found.basic == {"docker.io": f"Basic {pair}", "ghcr.io": f"Basic {pair}"}
    assert found.of("localhost:5000") is None
    assert "'gcloud'" in found.hint("gcr.io")
    assert "'desktop'" in found.hint("quay.io")
    assert "do not allow" in found.hint("ghcr.io")
    assert read_credentials(tmp_path / "missing.json").basic == {}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"auths": [1]}', '{"auths": {"a": 1}}', '{"auths": {"a": {"auth": "eA=="}}}', "[" * 9000]
)
def test_a_damaged_configuration_is_named_without_its_content(text: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    with raises(ConfigError, "config.json"):
        read_credentials(config)


@pytest.mark.parametrize("reply", [b"", b"[]", b"{}", b'{"token": 7}', b'{"token": ""}', b'{"token": "a\\r\\nX: y"}'])
def test_a_reply_without_a_token_is_an_error(reply: bytes) -> None:
    with pytest.raises(ValueError, match="its reply"):
        token_of(reply)
    assert token_of(b'{"access_token": "abc"}') == "abc"
