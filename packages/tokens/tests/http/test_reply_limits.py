"""The limit of a reply under the name and with the value that a server accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from manual_clock import ManualClock
from palaestra_slots.core.errors import ContextExceeded, EngineRefused
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.http.reply_limits import AllowedLimit, largest_limit, wants_newer_name
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

VLLM = (
    "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 8192 tokens "
    "and your request has 6500 input tokens (4096 > 8192 - 6500). (parameter=max_tokens, value=4096)"
)
TOO_LARGE = {
    "vLLM": (VLLM, AllowedLimit(1691, False)),
    "vLLM, newer": (
        "You passed 6500 input tokens and requested 4096 output tokens. However, the model's context length is only "
        "8192 tokens, resulting in a maximum input length of 4096 tokens. Please reduce the length of the input.",
        AllowedLimit(1691, False),
    ),
    "vLLM, above the window": (
        "max_tokens=4096 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
        AllowedLimit(2048, True),
    ),
    "OpenAI": (
        "This model's maximum context length is 8192 tokens. However, you requested 10596 tokens (6500 in the "
        "messages, 4096 in the completion). Please reduce the length of the messages or completion.",
        AllowedLimit(1691, False),
    ),
    "OpenAI, output": (
        "max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas you provided "
        "100000.",
        AllowedLimit(16384, True),
    ),
    "Anthropic": (
        "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length or "
        "`max_tokens` and try again",
        AllowedLimit(11759, False),
    ),
    "Anthropic, output": (
        "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens for this model",
        AllowedLimit(64000, True),
    ),
    "SGLang": (
        "Requested token count exceeds the model's maximum context length of 64000 tokens. You requested a total of "
        "71897 tokens: 7897 tokens from the input messages and 64000 tokens for the completion.",
        AllowedLimit(56102, False),
    ),
    "TGI": (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 3000 `inputs` tokens and "
        "2000 `max_new_tokens`",
        AllowedLimit(1095, False),
    ),
    "OpenRouter": (
        "This endpoint's maximum context length is 32768 tokens. However, you requested about 50000 tokens (30000 of "
        "text input, 20000 in the output). Please reduce the length of either one.",
        AllowedLimit(2767, False),
    ),
    "DeepSeek": ("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]", AllowedLimit(8192, True)),
    "Qwen": ("Range of max_tokens should be [1, 8192]", AllowedLimit(8192, True)),
    "Groq": (
        "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` is less than the "
        "`context_window` for this model",
        AllowedLimit(8192, True),
    ),
    "Cohere": ("too many tokens: max tokens must be less than or equal to 4096", AllowedLimit(4096, True)),
}


@pytest.mark.parametrize("server", TOO_LARGE)
def test_a_limit_that_is_too_large_is_read_from_the_refusal(server: str) -> None:
    said, allowed = TOO_LARGE[server]
    assert largest_limit(said) == allowed


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "This model's maximum context length is 8192 tokens. However, you requested 12096 tokens (8200 in the "
        "messages, 3896 in the completion).",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "no such parameter",
        "tools: at most 128 tools",
        "",
    ],
)
def test_a_prompt_that_does_not_fit_and_other_refusals_have_no_limit(said: str) -> None:
    assert largest_limit(said) is None


def bodies(answers: list[FakeAnswer], *requests: JSON) -> list[Mapping[str, JSON]]:
    async def go() -> list[Mapping[str, JSON]]:
        async with LoopbackServer(*answers) as server:
            engine = OpenAIEngine(APIServerConfig(base_url=server.url, model_name="m"), clock=ManualClock())
            try:
                for request in requests:
                    await engine.chat_completion(messages=[{"role": "user", "content": "hi"}], **request)
            finally:
                await engine.aclose()
            names = ("max_tokens", "max_completion_tokens")
            return [{name: seen.body[name] for name in names if name in seen.body} for seen in server.seen]

    return asyncio.run(go())


def no(message: str) -> FakeAnswer:
    return FakeAnswer({"error": {"message": message, "type": "invalid_request_error"}}, 400)


YES = FakeAnswer(completion("ok"))
UNSUPPORTED = "Unsupported parameter: 'max_tokens' is not supported here. Use 'max_completion_tokens' instead."


@pytest.mark.parametrize(
    "said",
    [
        UNSUPPORTED,
        "`max_tokens` is deprecated for this model, use `max_completion_tokens`",
        "max_tokens is not supported. Please use max_completion_tokens instead",
    ],
)
def test_the_newer_name_is_learned_once(said: str) -> None:
    assert wants_newer_name(said)
    new, old = {"max_completion_tokens": 50}, {"max_tokens": 50}
    assert bodies([no(said), YES], {"max_tokens": 50}, {"max_tokens": 50}) == [old, new, new]


def test_what_is_left_is_asked_for_and_a_models_own_limit_is_kept() -> None:
    asked = {"max_tokens": 4096}
    assert bodies([no(VLLM), YES], asked, asked) == [asked, {"max_tokens": 1691}, asked]
    output = no(TOO_LARGE["vLLM, above the window"][0])
    assert bodies([output, YES], asked, asked, {"max_tokens": 9}) == [
        *(asked, {"max_tokens": 2048}, {"max_tokens": 2048}),
        {"max_tokens": 9},
    ]


def test_both_changes_may_follow_each_other() -> None:
    found = bodies([no(UNSUPPORTED), no(TOO_LARGE["vLLM, above the window"][0]), no(VLLM), YES], {"max_tokens": 4096})
    assert found[-1] == {"max_completion_tokens": 1691}
    assert len(found) == 4


@pytest.mark.parametrize("request_", [{"max_tokens": None}, {"extra_body": {"max_completion_tokens": None}}, {}])
def test_null_is_never_sent(request_: JSON) -> None:
    assert bodies([YES], request_) == [{}]


def test_a_name_that_the_request_sets_is_kept() -> None:
    assert bodies([YES], {"extra_body": {"max_completion_tokens": 5}}) == [{"max_completion_tokens": 5}]


def test_a_server_that_refuses_every_limit_ends_the_request() -> None:
    with pytest.raises(ContextExceeded):
        bodies([no(VLLM)], {"max_tokens": 4096})
    with pytest.raises(EngineRefused, match="not supported"):
        bodies([no(UNSUPPORTED)], {"max_tokens": 4096})
