"""Secrets by their place and by their shape; other text stays as it is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest

from palaestra.rollouts.journal.journal import without_secrets
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra_slots.core import redaction
from palaestra_slots.core.config import sent_secret
from palaestra_slots.core.errors import EngineRefused, PrepareError
from palaestra_slots.core.exits import report_failure
from palaestra_slots.core.io.process_arguments import hide
from palaestra_slots.core.redaction import HIDDEN, redacted, redacted_arguments
from palaestra_tokens.config import APIServerConfig

SECRET = "Zx81-hunter2-longenough"
PEM = "PRIVATE" + " KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@example.org/index/",
        f"https://{SECRET}@example.org",
        f"http://example.org/v1?api_key={SECRET}&n=1",
        f"postgres://u:{SECRET}@db:5432/x",
        f"https://example.org/f?X-Amz-Signature={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"--api-key={SECRET}",
        f"GITHUB_TOKEN={SECRET} make",
        f"the password: {SECRET} is wrong",
        f'{{"api_key": "{SECRET}"}}'.replace('": "', "="),
    ],
)
def test_secrets_by_their_place(text: str) -> None:
    assert SECRET not in redacted(text)


@pytest.mark.parametrize(
    "key", ["sk-proj-abcdefghij0123456789", "hf_" + "a" * 34, "ghp_" + "b" * 36, "AKIA" + "C" * 16]
)
def test_secrets_by_their_shape(key: str) -> None:
    assert redacted(f"Incorrect API key provided: {key}. You can") == "Incorrect API key provided: (hidden). You can"


def test_known_secrets_are_hidden_wherever_they_are() -> None:
    assert redacted("no key swordfish here", "swordfish", None, "") == "no key (hidden) here"


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=4096 top_k=50",
        "the tokenizer: meta-llama/Llama-3.1-8B",
        "http://127.0.0.1:8000/v1?beta=true",
        "ask the author of key ideas",
        "runs/my_env--model/20260101T000000Z-0a1b",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redacted(text) == text


def test_arguments_and_addresses_of_servers_are_recorded_without_secrets() -> None:
    server = MCPServerConfig(command="tool", args=["--api-key", SECRET, f"--token={SECRET}", "--port", "80", "${KEY}"])
    recorded = server.model_dump()["args"]
    assert SECRET not in str(recorded)
    assert [recorded[0], *recorded[3:]] == ["--api-key", "--port", "80", "${KEY}"]
    assert server.args[1] == SECRET
    assert SECRET not in repr(server)
    assert SECRET not in str(MCPServerConfig(url=f"https://x:{SECRET}@h/mcp?key={SECRET}").model_dump())
    assert redacted_arguments(["-p", "80", "--password", "--verbose"]) == ["-p", "80", "--password", "--verbose"]


def test_settings_are_recorded_without_secrets() -> None:
    settings = {"openai": [{"base_url": f"http://u:{SECRET}@h/v1", "api_key": SECRET}], "list": [f"https://{SECRET}@h"]}
    assert SECRET not in str(without_secrets(settings))


def test_the_error_of_a_command_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(PrepareError(f"https://user:{SECRET}@index.example/index/ cannot be read")) != 0
    assert report_failure(EngineRefused(f"refused: Incorrect API key provided: sk-{'x' * 30}.")) != 0
    shown = capsys.readouterr().err
    assert SECRET not in shown
    assert "xxxx" not in shown


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:p@{SECRET}@host/x",
        f"//user:{SECRET}@host/npm/",
        f'{{"api_key": "{SECRET}"}}',
        f"{{'password': '{SECRET}'}}",
        f'"accessToken":"{SECRET}"',
        f"password = {SECRET}",
        f"passphrase: {SECRET}",
        f"clientSecret: {SECRET}",
        f"AccountKey={SECRET};End",
        f"//host/:_authToken={SECRET}",
        f"Authorization: Token {SECRET}",
        f"proxy-authorization: Negotiate {SECRET}",
        f"Cookie: session={SECRET}; x=1",
        f"-----BEGIN RSA {PEM}\n{SECRET}\n-----END RSA {PEM}",
        f"-----BEGIN {PEM}\n{SECRET}",
        f"ya29.{SECRET * 3}",
    ],
)
def test_further_places_of_secrets(text: str) -> None:
    assert SECRET not in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "column 'key': invalid text",
        "a monkey: eating",
        "tokens=123456 max_tokens=4096",
        "see https://example.org/a@b and https://example.org/x?page=2",
        "the authorization failed",
        "KeyError: 'something'",
        "set --openai.api_key or pass --token FILE",
        "the token 4096 of 8192; the secret is safe; password protected",
        "req_011CSHoEeqs5C35K2UUqR7Fy chatcmpl-9aB8cD7eF6gH5iJ4kL3mN2oP1q",
        "sorted(rows, key=len)",
        *("write ${TICKETS_TOKEN:-default}", "${API_KEY:-default} stands for a variable"),
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "text",
    [
        *("x-" * 20_000 + "key", "a_" * 20_000, "//" * 20_000, "aK" * 20_000),
        *("\\" * 100_000, "\\\\'" * 100_000, "%3A%2F%2F" * 20_000, "%3a//a" * 20_000),
    ],
)
def test_a_long_text_is_redacted_in_time(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"error": json.dumps({"api_key": SECRET})}),
        json.dumps({"a": json.dumps({"error": json.dumps({"token": f"{SECRET}"})})}),
        f"the command tool --api-key {SECRET} --port 80 failed",
        f"machine example.org\n  login me\n  password {SECRET}\n",
        f"PGPASSWORD={SECRET} psql",
        f'password: "{SECRET} with blanks {SECRET}"',
        f"<password>{SECRET}</password>",
        "https://example.org/?next=" + quote(f"https://x/?api_key={SECRET}"),
        quote(f"https://user:{SECRET}@host/x", safe=""),
        repr(("api_key", SECRET)),
        f"api_key => {SECRET}",
        f"curl -u user:{SECRET} https://example.org",
    ],
)
def test_secrets_in_texts_of_programs(text: str) -> None:
    assert SECRET not in redacted(text)


@pytest.mark.parametrize("text", ["password=abc12", '{"password": "abc12"}', "{'api_key': 'abc12'}"])
def test_short_values_of_names_that_only_secrets_have(text: str) -> None:
    assert "abc12" not in redacted(text)


@pytest.mark.parametrize(
    "key",
    [
        *(f"{prefix}{'a1B2' * 8}" for prefix in ("gsk_", "xai-", "tml-", "nvapi-", "tvly-", "r8_", "zzz-")),
        *("fc-" + "0a" * 16, "dop_v1_" + "0a" * 32, "wandb_v1_" + "aB3" * 10),
        f"https://api.telegram.org/bot123456789:{'x' * 35}/sendMessage",
        "https://hooks.slack.com/services/T0/B0/" + "x" * 24,
    ],
)
def test_keys_of_other_services_by_their_shape(key: str) -> None:
    assert redacted(f"refused: {key} is wrong") not in f"refused: {key} is wrong"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> str:
    """A secret without a known shape that Palaestra was given."""
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setattr(redaction, "_known_pattern", None)
    return 'swordfish/and"more'


@pytest.mark.parametrize(
    "written",
    [
        lambda secret: secret,
        lambda secret: quote(secret, safe=""),
        lambda secret: json.dumps({"said": f"no: {secret}!"}),
        lambda secret: base64.b64encode(f"user:{secret}".encode()).decode(),
        lambda secret: base64.urlsafe_b64encode(f"me:{secret}".encode()).decode(),
        lambda secret: secret.encode().hex(),
        lambda secret: repr(ValueError(secret)),
        lambda secret: f"no: {secret}"[:17],
    ],
    ids=["plain", "address", "json", "base64", "base64-url", "hex", "exception", "cut-off"],
)
@pytest.mark.parametrize("way", ["setting", "header", "argument", "variable"])
def test_a_secret_that_was_given_is_hidden_in_every_form(given: str, written: Callable[[str], str], way: str) -> None:
    before = written(given)
    assert redacted(before) == before
    if way == "setting":
        APIServerConfig(api_key=given)
    elif way == "header":
        sent_secret(given, "the token")
    elif way == "argument":
        hide(given)
    else:
        MCPServerConfig(command="tool", env={"SERVICE_TOKEN": given, "MODE": "fast-and-wide"})
        assert redacted("fast-and-wide") == "fast-and-wide"
    assert HIDDEN in redacted(before)
    assert "swordfish/an" not in redacted(before)


def test_short_secrets_are_words_and_words_are_no_secrets(given: str) -> None:
    APIServerConfig(api_key="k3y-1")
    APIServerConfig(api_key="EMPTY")
    assert redacted("k3y-1 ak3y-1 EMPTY") == f"{HIDDEN} ak3y-1 EMPTY"


def test_placeholders_are_no_secrets_and_words_stay_in_paths(given: str) -> None:
    APIServerConfig(api_key="not-needed")
    assert redacted("not-needed") == "not-needed"
    APIServerConfig(api_key="correct-horse-battery-staple")
    assert redacted("the key correct-horse-battery-staple.") == f"the key {HIDDEN}."
    path = "/srv/correct-horse-battery-staple/correct-horse-battery-staple.py"
    assert redacted(path) == path
