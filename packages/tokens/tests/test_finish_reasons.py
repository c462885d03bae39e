"""Who ended a reply: every vendor's documented word, in every spelling, has one class."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.core.errors import EngineReplyError, ReplyWithheld
from palaestra_tokens.finish_reasons import Ending, ending_of, read_finish_reason

DOCUMENTED = {
    "OpenAI chat": {"stop": "stop", "length": "length", "tool_calls": "stop", "content_filter": "content_filter"},
    "OpenAI responses": {"max_output_tokens": "length", "content_filter": "content_filter", "completed": "stop"},
    "Anthropic": {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "tool_use": "stop",
        "max_tokens": "length",
        "refusal": "content_filter",
        "model_context_window_exceeded": "length",
    },
    "Gemini": {
        "STOP": "stop",
        "MAX_TOKENS": "length",
        "SAFETY": "content_filter",
        "RECITATION": "content_filter",
        "BLOCKLIST": "content_filter",
        "PROHIBITED_CONTENT": "content_filter",
        "SPII": "content_filter",
        "LANGUAGE": "content_filter",
        "OTHER": "error",
        "MALFORMED_FUNCTION_CALL": "stop",
    },
    "Gemini compatible": {"content_filter: OTHER": "content_filter", "FINISH_REASON_SAFETY": "content_filter"},
    "Mistral": {"model_length": "length", "error": "error", "tool_calls": "stop"},
    "DeepSeek": {"insufficient_system_resource": "error", "content_filter": "content_filter"},
    "GLM": {"sensitive": "content_filter", "network_error": "error", "model_context_window_exceeded": "length"},
    "OpenRouter": {"error": "error", "content_filter": "content_filter"},
    "vLLM and SGLang": {"abort": "error", "stop": "stop", "length": "length"},
    "TGI": {"eos_token": "stop", "stop_sequence": "stop", "length": "length"},
    "LM Studio": {"eosFound": "stop", "maxPredictedTokensReached": "length", "contextLengthReached": "length"},
    "Cohere": {"COMPLETE": "stop", "TOOL_CALL": "stop", "MAX_TOKENS": "length", "ERROR": "error", "TIMEOUT": "error"},
    "Bedrock": {"guardrail_intervened": "content_filter", "content_filtered": "content_filter", "max_tokens": "length"},
    "xAI and Together": {"max_len": "length", "eos": "stop"},
}


@pytest.mark.parametrize(("vendor", "word"), [(vendor, word) for vendor, words in DOCUMENTED.items() for word in words])
def test_every_documented_word_has_its_class(vendor: str, word: str) -> None:
    wanted = DOCUMENTED[vendor][word]
    for spelled in (word, word.upper(), word.lower(), word.replace("_", "-"), f" {word} "):
        found = ending_of(spelled)
        assert found is not None
        assert found.value == wanted


@pytest.mark.parametrize("word", ["SAFETY", "sensitive", "content_filter", "content_filter: OTHER", "refusal"])
def test_a_withheld_reply_is_an_error_that_names_the_word(word: str) -> None:
    with pytest.raises(ReplyWithheld, match=rf"filter.*{word}") as caught:
        read_finish_reason(word, "S")
    assert caught.value.by_request


@pytest.mark.parametrize("word", ["abort", "error", "network_error", "insufficient_system_resource", "OTHER"])
def test_a_failed_reply_is_an_error_that_names_the_word(word: str) -> None:
    with pytest.raises(EngineReplyError, match=rf"S failed.*{word}"):
        read_finish_reason(word, "S")


@pytest.mark.parametrize(
    ("word", "read"),
    [
        *((each, each) for each in ("stop", "length", "tool_calls", "function_call")),
        *((None, None), ("", None), ("MAX_TOKENS", "length"), ("end_turn", "stop"), ("model_length", "length")),
    ],
)
def test_the_rest_of_the_package_sees_openais_words(word: str | None, read: str | None) -> None:
    assert read_finish_reason(word, "S") == read


def test_an_unknown_word_is_kept_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [read_finish_reason("weary_of_it", "S") for _ in range(3)] == ["weary_of_it"] * 3
    assert [record.getMessage().count("weary_of_it") for record in caplog.records] == [1]


@given(st.text(max_size=40))
def test_any_word_has_a_class_or_none(word: str) -> None:
    assert ending_of(word) in (None, *Ending)
