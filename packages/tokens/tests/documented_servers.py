"""What the documentation of each model server says about replies, streams, refusals and limits: a table, newest first.

`test_conformance.py` sends each row over a real connection. Wordings are quoted from the named sources, with other
numbers where that makes the expected result clear. Deltas are the `delta` of one choice, in the order of the stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from palaestra_slots.core.types import JSON

Refusal: TypeAlias = tuple[int, JSON]
"""The status and the body of an answer."""

ARGUMENTS, OTHER = '{"path": "a"}', '{"path": "b"}'
ONE, TWO = [("read", ARGUMENTS)], [("read", ARGUMENTS), ("read", OTHER)]

OPENAI_WORDS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


@dataclass(frozen=True)
class Server:
    """One server. `finish` maps its finish reasons to the meaning that callers see: OpenAI's word, `withheld` or
    `failed`. `calls` pairs streams with the calls that they mean, `thinking` pairs streams with the thinking and the
    text. `full` maps answers to a conversation that is too long to the window, or None if they do not contain it.
    `too_large` maps answers to a limit that is too large to the limit of the next request. `limit` is the name of that
    field, and `listed` the window in its list of models."""

    sources: Sequence[str]
    finish: Mapping[str, str] = field(default_factory=lambda: OPENAI_WORDS)
    calls: Sequence[tuple[Sequence[JSON], Sequence[tuple[str, str]]]] = ()
    thinking: Sequence[tuple[Sequence[JSON], JSON, str, str]] = ()
    full: Sequence[tuple[Refusal, int | None]] = ()
    too_large: Sequence[tuple[Refusal, int]] = ()
    withheld: Sequence[Refusal] = ()
    broken: Sequence[JSON] = ()
    limit: str = "max_tokens"
    wants_limit: str = ""
    models: Mapping[str, JSON] = field(default_factory=dict)
    listed: int | None = None


def call(name: str | None = None, arguments: JSON = None, **more: JSON) -> JSON:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {**more, "function": function}


def calls(*each: JSON) -> JSON:
    return {"tool_calls": list(each)}


def error(message: str, **more: JSON) -> JSON:
    return {"error": {"message": message, **more}}


PIECES = [
    calls(call("read", "", index=0, id="c1")),
    calls(call(None, '{"path": ', index=0)),
    calls(call(None, '"a"}', index=0)),
]
PARALLEL = [calls(call("read", ARGUMENTS, index=0, id="c1")), calls(call("read", OTHER, index=1, id="c2"))]
REASONING_CONTENT = [{"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "so"}]
REASONING = [{"reasoning": "h"}, {"reasoning": "m"}, {"content": "so"}]

OPENAI_FULL = (
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. Please reduce "
    "the length of the messages."
)
OPENAI_SUM = (
    "This model's maximum context length is 8192 tokens. However, you requested {} tokens (6683 in the messages, 730 "
    "in the functions, and {} in the completion). Please reduce the length of the messages, functions, or completion."
)

SERVERS: Mapping[str, Server] = {
    "Gemini, compatible API": Server(
        sources=[
            "THU-MAIC/OpenMAIC#1556, September 2026: a recorded chunk without an index",
            "su-kaka/gcli2api#406 and dyedd/lens#49, August 2026: parallel calls with one index",
            "ai.google.dev, OpenAI compatibility, with gemini-3.8-flash, 2026",
            "google-gemini/gemini-cli#27197, May 2026: the wording of a full context",
            "Gemini API reference, FinishReason, 2026",
        ],
        finish={
            **OPENAI_WORDS,
            "MAX_TOKENS": "length",
            "STOP": "stop",
            "content_filter: SAFETY": "withheld",
            "RECITATION": "withheld",
            "PROHIBITED_CONTENT": "withheld",
            "OTHER": "failed",
            "MALFORMED_FUNCTION_CALL": "stop",
            "MALFORMED_RESPONSE": "stop",
        },
        calls=[
            (
                [calls({"extra_content": {"google": {"thought_signature": "s"}}, **call("read", ARGUMENTS, id="c1")})],
                ONE,
            ),
            ([calls(call("read", ARGUMENTS, index=0, id="c1")), calls(call("read", OTHER, index=0, id="c2"))], TWO),
            ([calls(call("read", ARGUMENTS, id="")), calls(call("read", OTHER, id=""))], TWO),
            (
                [
                    calls(call("read", "", index=0, id="c1")),
                    calls(call("", ARGUMENTS, index=0)),
                    calls(call("", OTHER, index=0)),
                ],
                TWO,
            ),
        ],
        full=[
            (
                (
                    400,
                    [
                        error(
                            "The input token count (134123) exceeds the maximum number of tokens allowed (131072).",
                            code=400,
                            status="INVALID_ARGUMENT",
                        )
                    ],
                ),
                131072,
            ),
            (
                (
                    200,
                    [
                        error(
                            "The input token count (134123) exceeds the maximum number of tokens allowed (131072).",
                            code=400,
                            status="INVALID_ARGUMENT",
                        )
                    ],
                ),
                131072,
            ),
        ],
        broken=[[error("The model is overloaded.", code=503, status="UNAVAILABLE")], {}],
    ),
    "vLLM": Server(
        sources=[
            "vllm-project/vllm#47963, September 2026: a truncated call that ends with tool_calls",
            "vllm-project/vllm#42474, May 2026: the wording of a limit that is too large",
            "vLLM 0.32, OpenAI-compatible server, 2026",
            "ogx-ai/ogx#4534, January 2026: the older wording",
        ],
        finish={**OPENAI_WORDS, "abort": "failed", "error": "failed", "repetition": "stop"},
        calls=[
            (PIECES, ONE),
            (PARALLEL, TWO),
            (
                [
                    calls({"index": 0, "id": "c1", "type": "function", "function": {"name": "read", "arguments": ""}}),
                    calls({"index": 0, "id": "", "function": {"name": None, "arguments": ARGUMENTS}}),
                    calls({"index": 0, "id": "c2", "type": "function", "function": {"name": "read", "arguments": ""}}),
                    calls({"index": 0, "id": "", "function": {"name": None, "arguments": OTHER}}),
                ],
                TWO,
            ),
        ],
        thinking=[(REASONING, {"reasoning": "hm", "content": "so"}, "hm", "so")],
        full=[
            (
                (
                    400,
                    error(
                        "This model's maximum context length is 128000 tokens. However, your request has 130000 input "
                        "tokens. Please reduce the length of the input messages.",
                        type="BadRequestError",
                        param="input_tokens",
                        code=400,
                    ),
                ),
                128000,
            ),
        ],
        too_large=[
            # The prompt is counted only to the point where the limit does not fit, so half of the rest is requested.
            (
                (
                    400,
                    error(
                        "This model's maximum context length is 128000 tokens. However, you requested 65535 output "
                        "tokens and your prompt contains at least 62466 input tokens, for a total of at least 128001 "
                        "tokens.",
                        code=400,
                    ),
                ),
                32766,
            ),
            (
                (
                    400,
                    {
                        "object": "error",
                        "message": "This model's maximum context length is 6048 tokens. However, you requested 65000 "
                        "tokens (568 in the messages, 64432 in the completion). Please reduce the length of the "
                        "messages or completion.",
                        "type": "BadRequestError",
                        "param": None,
                        "code": 400,
                    },
                ),
                5479,
            ),
        ],
        broken=[error("EngineCore encountered an issue.", code=500), b""],
        models={"owned_by": "vllm", "root": "org/model", "max_model_len": 4096},
        listed=4096,
    ),
    "OpenRouter": Server(
        sources=[
            "openrouter.ai, Errors and debugging; Streaming, 2026",
            "openrouter.ai, API reference, ErrorResponse in a choice, 2026",
            "ThinkInAIXYZ/deepchat#1320, February 2026: the wording of a limit that is too large",
            "ai-christianson/RA.Aid#41, January 2025: an error of the provider behind it",
        ],
        finish={**OPENAI_WORDS, "content_filter": "withheld", "error": "failed"},
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        thinking=[
            (
                [
                    {"reasoning": "h", "reasoning_details": [{"type": "reasoning.text", "text": "h"}], "content": ""},
                    {"reasoning": "m", "reasoning_details": [{"type": "reasoning.text", "text": "m"}], "content": ""},
                    {"content": "so"},
                ],
                {
                    "reasoning": "hm",
                    "reasoning_details": [
                        {"type": "reasoning.text", "text": "h"},
                        {"type": "reasoning.text", "text": "m"},
                    ],
                    "content": "so",
                },
                "hm",
                "so",
            )
        ],
        full=[
            (
                (
                    200,
                    error(
                        "ConnectionError: This model's maximum context length is 16000 tokens. However, your messages "
                        "resulted in 17165 tokens.",
                        code=502,
                        metadata={"provider_name": "P"},
                    ),
                ),
                16000,
            )
        ],
        too_large=[
            (
                (
                    400,
                    error(
                        "This endpoint's maximum context length is 32768 tokens. However, you requested about 94536 "
                        "tokens (26893 of text input, 1832 of tool input, 65811 in the output). Please reduce the "
                        "length of either one.",
                        code=400,
                    ),
                ),
                4042,
            )
        ],
        withheld=[
            (
                403,
                error("openai/m requires moderation. Your input was flagged for violence.", code=403, metadata={}),
            )
        ],
        broken=[
            error("Provider returned error", code=502, metadata={"raw": "x"}),
            {
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": ""},
                        "finish_reason": "stop",
                        "error": {"code": 502, "message": "Provider disconnected"},
                    }
                ]
            },
            {"choices": [{"index": 0, "message": {"content": ""}, "error": {"code": "server_error", "message": "x"}}]},
        ],
        models={"context_length": 32768, "top_provider": {"max_completion_tokens": 8192}},
        listed=32768,
    ),
    "Ollama": Server(
        sources=[
            "BerriAI/litellm#37792, August 2026: all calls with index 0, arguments as an object",
            "docs.ollama.com, OpenAI compatibility, 2026",
        ],
        finish={**OPENAI_WORDS, "load": "failed", "unload": "failed"},
        calls=[
            (
                [
                    calls(call("read", {"path": "a"}, index=0, id="c1")),
                    calls(call("read", {"path": "b"}, index=0, id="c2")),
                ],
                TWO,
            ),
            ([calls(call("read", ARGUMENTS, index=0, id="c1"), call("read", OTHER, index=0, id="c2"))], TWO),
        ],
        thinking=[(REASONING, {"reasoning": "hm", "content": "so"}, "hm", "so")],
        full=[
            ((500, error("input length exceeds the context length", type="api_error")), None),
            ((400, error("prompt too long; exceeded max context length by 512 tokens", type="api_error")), None),
        ],
        broken=[error("llama runner process has terminated", type="api_error")],
    ),
    "LM Studio": Server(
        sources=[
            "lmstudio-ai/lmstudio-bug-tracker#2256, August 2026: the wording of a full context",
            "lmstudio.ai, OpenAI compatibility; stop reasons of the SDK, 2026",
            "Gitlawb/openclaude#353, April 2026: the status and the body",
            "lmstudio-ai/lmstudio-bug-tracker#546, March 2025: the older wording",
        ],
        finish={
            **OPENAI_WORDS,
            "eosFound": "stop",
            "maxPredictedTokensReached": "length",
            "contextLengthReached": "length",
            "modelUnloaded": "failed",
            "userStopped": "failed",
            "failed": "failed",
        },
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        thinking=[(REASONING, {"reasoning": "hm", "content": "so"}, "hm", "so")],
        full=[
            (
                (
                    400,
                    {
                        "error": "The number of tokens to keep from the initial prompt is greater than the context "
                        "length (n_keep: 13055>= n_ctx: 4096). Try to load the model with a larger context length, or "
                        "provide a shorter input."
                    },
                ),
                4096,
            ),
            (
                (
                    200,
                    {
                        "error": "Trying to keep the first 10136 tokens when context the overflows. However, the model "
                        "is loaded with context length of only 7866 tokens, which is not enough."
                    },
                ),
                7866,
            ),
        ],
        broken=[{"error": "The model has crashed without additional information."}],
    ),
    "MiniMax": Server(
        sources=[
            "platform.minimax.io, Chat completions, OpenAI format, with MiniMax-M2.7, 2026",
            "MiniMax-AI/MiniMax-M2#119, May 2026; rowboatlabs/rowboat#514, April 2026: a full context",
            "NousResearch/hermes-agent#14743, April 2026: the number in that wording is no window",
            "platform.minimaxi.com, Error codes, 2026",
        ],
        finish={**OPENAI_WORDS, "content_filter": "withheld"},
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        thinking=[
            (
                REASONING_CONTENT,
                {"reasoning_content": "hm", "content": "so", "name": "MiniMax AI", "audio_content": ""},
                "hm",
                "so",
            )
        ],
        full=[
            (
                (
                    400,
                    {
                        "type": "error",
                        "error": {
                            "type": "bad_request_error",
                            "message": "invalid params, context window exceeds limit (2013)",
                            "http_code": "400",
                        },
                    },
                ),
                None,
            ),
            (
                (
                    200,
                    {
                        "choices": None,
                        "base_resp": {
                            "status_code": 2013,
                            "status_msg": "invalid params, context window exceeds limit",
                        },
                    },
                ),
                None,
            ),
        ],
        withheld=[
            (200, {"choices": None, "base_resp": {"status_code": 1026, "status_msg": "input new_sensitive"}}),
            (200, {"choices": None, "base_resp": {"status_code": 1027, "status_msg": "output new_sensitive"}}),
        ],
        broken=[{"choices": None, "base_resp": {"status_code": 1002, "status_msg": "rate limit"}}],
    ),
    "Azure": Server(
        sources=[
            "learn.microsoft.com/answers 5896505, May 2026: the refusal of a prompt",
            "learn.microsoft.com, Azure OpenAI, Content filtering, 2026",
            "openai/openai-agents-python#806, 2025: the body of the refusal",
        ],
        finish={**OPENAI_WORDS, "content_filter": "withheld"},
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        full=[((400, error(OPENAI_FULL, code="context_length_exceeded", param="messages")), 8192)],
        too_large=[((400, error(OPENAI_SUM.format(72944, 65531), code="context_length_exceeded")), 778)],
        withheld=[
            (
                400,
                error(
                    "The response was filtered due to the prompt triggering Azure OpenAI's content management policy. "
                    "Please modify your prompt and retry.",
                    code="content_filter",
                    status=400,
                    innererror={"code": "ResponsibleAIPolicyViolation"},
                ),
            )
        ],
        broken=[b"<html>Bad gateway</html>", {"choices": []}],
        limit="max_completion_tokens",
        wants_limit="Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
        "instead.",
    ),
    "Kimi": Server(
        sources=[
            "MoonshotAI/kimi-cli#2011, April 2026: the wording of a full context",
            "platform.moonshot.ai, Chat completions; Kimi K2 thinking, 2026",
        ],
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        thinking=[(REASONING_CONTENT, {"reasoning_content": "hm", "content": "so"}, "hm", "so")],
        full=[
            (
                (
                    400,
                    error(
                        "Invalid request: Your request exceeded model token limit: 262144 (requested: 269030)",
                        type="invalid_request_error",
                    ),
                ),
                262144,
            )
        ],
        withheld=[(400, error("The request was rejected because it was considered high risk", type="content_filter"))],
        models={"context_length": 262144},
        listed=262144,
    ),
    "SGLang": Server(
        sources=[
            "sgl-project/sglang#20027, March 2026: status 400 within a stream",
            "sgl-project/sglang, OpenAI-compatible server, 2026",
            "InternLM/lmdeploy#3412, April 2025: two calls with index 0, ids 0 and 1 in each piece",
        ],
        finish={**OPENAI_WORDS, "abort": "failed"},
        calls=[
            (PIECES, ONE),
            (
                [
                    calls(call("read", "", index=0, id="0")),
                    calls(call(None, ARGUMENTS, index=0, id="0")),
                    calls(call("read", "", index=0, id="1")),
                    calls(call(None, OTHER, index=0, id="1")),
                ],
                TWO,
            ),
        ],
        thinking=[(REASONING_CONTENT, {"reasoning_content": "hm", "content": "so"}, "hm", "so")],
        full=[
            (
                (
                    status,
                    error("The input (5000 tokens) is longer than the model's context length (4096 tokens).", code=400),
                ),
                4096,
            )
            for status in (400, 200)
        ],
        too_large=[
            (
                (
                    status,
                    error(
                        "Requested token count exceeds the model's maximum context length of 64000 tokens. You "
                        "requested a total of 71897 tokens: 7897 tokens from the input messages and 64000 tokens for "
                        "the completion.",
                        code=400,
                    ),
                ),
                56102,
            )
            for status in (400, 200)
        ],
        models={"owned_by": "sglang", "max_model_len": 4096},
        listed=4096,
    ),
    "Anthropic, compatible API": Server(
        sources=[
            "platform.claude.com, OpenAI SDK compatibility, with claude-opus-4-6, 2026",
            "platform.claude.com, Handling stop reasons, 2026",
            "anymorph-ai/Claudable#3, August 2025: a limit that is too large",
            "anthropics/claude-code#6368, August 2025: status 413",
        ],
        finish={
            **OPENAI_WORDS,
            "end_turn": "stop",
            "tool_use": "stop",
            "max_tokens": "length",
            "model_context_window_exceeded": "length",
            "refusal": "withheld",
        },
        calls=[
            (
                [
                    calls(call("read", "", index=0, id="c1")),
                    calls(call(None, "", index=0)),
                    calls(call(None, ARGUMENTS, index=0)),
                    calls(call("read", OTHER, index=1, id="c2")),
                ],
                TWO,
            ),
            ([calls(call("read", "{}", index=0, id="c1")), calls(call(None, ARGUMENTS, index=0))], ONE),
        ],
        full=[
            ((400, error("prompt is too long: 210000 tokens > 200000 maximum", type="invalid_request_error")), 200000),
            ((413, error("Request size exceeds model context window", type="invalid_request_error")), None),
        ],
        too_large=[
            (
                (
                    400,
                    error(
                        "input length and `max_tokens` exceed context limit: 198981 + 65535 > 200000, decrease input "
                        "length or `max_tokens` and try again",
                    ),
                ),
                1018,
            ),
            (
                (
                    400,
                    error("max_tokens: 65535 > 64000, which is the maximum allowed number of output tokens for m"),
                ),
                64000,
            ),
        ],
        broken=[{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}],
    ),
    "OpenAI, chat": Server(
        sources=[
            "platform.openai.com, API reference, Chat completions, 2026",
            "FoundationAgents/OpenManus#62, March 2025: the sum with functions",
        ],
        finish={**OPENAI_WORDS, "content_filter": "withheld", "function_call": "function_call"},
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        full=[((400, error(OPENAI_FULL, code="context_length_exceeded")), 8192)],
        too_large=[
            ((400, error(OPENAI_SUM.format(72944, 65531), code="context_length_exceeded")), 778),
            (
                (
                    400,
                    error(
                        "max_tokens is too large: 65535. This model supports at most 16384 completion tokens, whereas "
                        "you provided 65535.",
                        code="invalid_value",
                    ),
                ),
                16384,
            ),
        ],
        withheld=[(400, error("Your request was rejected.", code="content_policy_violation"))],
        broken=[b"", b"[]", error("The server had an error while processing your request.", type="server_error")],
        limit="max_completion_tokens",
        wants_limit="Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
        "instead.",
    ),
    "OpenAI, responses": Server(
        sources=["platform.openai.com, API reference, Responses: incomplete_details, version 2.3, 2026"],
        finish={
            "completed": "stop",
            "max_output_tokens": "length",
            "max_messages": "length",
            "content_filter": "withheld",
            "cancelled": "failed",
            "failed": "failed",
            "steered": "failed",
        },
    ),
    "GLM": Server(
        sources=[
            "docs.z.ai, Chat completion, with glm-5.1, 2026",
            "docs.bigmodel.cn, finish reasons and error codes, 2026",
            "lobehub/lobehub#1398, February 2024: an illegal limit",
        ],
        finish={
            **OPENAI_WORDS,
            "sensitive": "withheld",
            "network_error": "failed",
            "model_context_window_exceeded": "length",
        },
        calls=[([calls(call("read", ARGUMENTS, index=0, id="c1"))], ONE), (PARALLEL, TWO)],
        thinking=[(REASONING_CONTENT, {"reasoning_content": "hm", "content": "so"}, "hm", "so")],
        full=[((400, error("Prompt exceeds max length", code="1261")), None)],
        withheld=[
            (
                400,
                {
                    "contentFilter": [{"level": 0, "role": "user"}],
                    "error": {"code": "1301", "message": "系统检测到输入或生成内容可能包含不安全或敏感内容"},
                },
            )
        ],
        broken=[error("Network error, please contact customer service", code="1234")],
    ),
    "DeepSeek": Server(
        sources=[
            "api-docs.deepseek.com, Create chat completion; Reasoning model, 2026",
            "evalstate/fast-agent#621, January 2026: a limit that is too large",
            "RooCodeInc/Roo-Code#1767, March 2025: status 500 from a gateway",
        ],
        finish={**OPENAI_WORDS, "content_filter": "withheld", "insufficient_system_resource": "failed"},
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        thinking=[
            (
                [
                    {"content": None, "reasoning_content": "h"},
                    {"content": None, "reasoning_content": "m"},
                    {"content": "so", "reasoning_content": None},
                ],
                {"reasoning_content": "hm", "content": "so"},
                "hm",
                "so",
            )
        ],
        full=[
            (
                (
                    400,
                    error(
                        "This model's maximum context length is 65536 tokens. However, you requested 72814 tokens "
                        "(68718 in the messages, 4096 in the completion). Please reduce the length of the messages or "
                        "completion.",
                        code="invalid_request_error",
                    ),
                ),
                65536,
            ),
            ((500, error("input length too long")), None),
        ],
        too_large=[
            (
                (
                    400,
                    error(
                        "This model's maximum context length is 131072 tokens. However, you requested 188477 tokens "
                        "(122942 in the messages, 65535 in the completion). Please reduce the length of the messages "
                        "or completion.",
                        code="invalid_request_error",
                    ),
                ),
                8129,
            ),
            ((400, error("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]")), 8192),
        ],
        broken=[b"\n\n\n", error("Service is too busy.", type="service_unavailable_error")],
    ),
    "Mistral": Server(
        sources=[
            "docs.mistral.ai, Reasoning; API reference, 2026",
            "braintrustdata/braintrust-sdk-javascript#1857, 2026: thinking in the parts of a delta",
            "spring-projects/spring-ai#5020, December 2025: thinking in the parts of a message",
        ],
        finish={**OPENAI_WORDS, "model_length": "length", "error": "failed"},
        calls=[
            ([calls(call("read", ARGUMENTS, index=0, id="c1"), call("read", OTHER, index=1, id="c2"))], TWO),
            ([calls(call("read", ARGUMENTS, id="c1")), calls(call("read", OTHER, id="c2"))], TWO),
        ],
        thinking=[
            (
                [
                    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}]},
                    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "m"}], "closed": True}]},
                    {"content": [{"type": "text", "text": "s"}]},
                    {"content": "o"},
                ],
                {
                    "content": [
                        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                        {"type": "text", "text": "so"},
                    ]
                },
                "hm",
                "so",
            )
        ],
        full=[
            (
                (
                    400,
                    {
                        "object": "error",
                        "message": "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 "
                        "maximum context length",
                        "type": "invalid_request_prompt",
                        "code": "3051",
                    },
                ),
                None,
            )
        ],
        models={"max_context_length": 32768},
        listed=32768,
    ),
    "llama.cpp": Server(
        sources=[
            "ggml-org/llama.cpp#16486, October 2025: the counts in the message, and status 400",
            "oobabooga/textgen#7257, October 2025: status 200 with the error as the body",
            "ggml-org/llama.cpp#15780, September 2025: exceed_context_size_error with status 500",
            "tools/server/server-context.cpp of build 11434, November 2026: the list of models",
        ],
        calls=[(PIECES, ONE), (PARALLEL, TWO)],
        thinking=[(REASONING_CONTENT, {"reasoning_content": "hm", "content": "so"}, "hm", "so")],
        full=[
            (
                (
                    400,
                    error(
                        "request (14429 tokens) exceeds the available context size (8192 tokens), try increasing it",
                        code=400,
                        type="exceed_context_size_error",
                        n_prompt_tokens=14429,
                        n_ctx=8192,
                    ),
                ),
                8192,
            ),
            *(
                (
                    (
                        status,
                        error(
                            "the request exceeds the available context size. try increasing the context size or enable "
                            "context shift",
                            code=code,
                            type="exceed_context_size_error",
                            n_prompt_tokens=1407,
                            n_ctx=512,
                        ),
                    ),
                    512,
                )
                for status, code in ((500, 500), (200, 400), (200, 500))
            ),
        ],
        broken=[error("Loading model", code=503, type="unavailable_error")],
        models={"owned_by": "llamacpp", "meta": {"n_ctx": 8192, "n_ctx_train": 32768}},
        listed=8192,
    ),
    "TGI": Server(
        sources=[
            "huggingface/text-generation-inference#2949, January 2025: a streamed call without a list",
            "huggingface/text-generation-inference#2749, November 2024: errors with status 200",
            "huggingface/huggingface_hub#2514, September 2024: status 422, or an error in the stream",
        ],
        finish={**OPENAI_WORDS, "eos_token": "stop", "stop_sequence": "stop"},
        calls=[
            (
                [
                    {"tool_calls": call("read", '{"path"', index=0, id="")},
                    {"tool_calls": call(None, ": ", index=0, id="")},
                    {"tool_calls": call(None, '"a"}', index=0, id="")},
                ],
                ONE,
            ),
            ([{"tool_calls": call("read", {"path": "a"}, index=0, id="0")}], ONE),
        ],
        full=[
            (
                (
                    status,
                    {
                        "error": "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000",
                        "error_type": "validation",
                    },
                ),
                4095,
            )
            for status in (422, 200)
        ],
        too_large=[
            (
                (
                    status,
                    {
                        "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: "
                        "3000 `inputs` tokens and 65535 `max_new_tokens`",
                        "error_type": "validation",
                    },
                ),
                1095,
            )
            for status in (422, 200)
        ],
        broken=[{"error": "Request failed during generation: Server error", "error_type": "generation"}],
    ),
}


def as_whole(expected: Sequence[tuple[str, str]]) -> JSON:
    """Return the message of a whole reply with these calls."""
    listed = [
        call(name, arguments, id=f"c{number}", type="function") for number, (name, arguments) in enumerate(expected)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def as_stream(body: JSON) -> list[bytes]:
    """Return a body as the only event of a stream."""
    return [b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n", b"data: [DONE]\n\n"]
