"""The finish reasons of model servers, as one table: who ended a reply.

A reply ends because the model chose to end it, because it reached a limit, because the provider's filter withheld it,
or because the provider failed. Only the first two are the model's doing, so only they lead to a score. Replies are read
through this table where they are decoded, so the rest of the package knows OpenAI's words only.

Sources, as of November 2026: the API references of OpenAI (chat and responses), Azure, Anthropic, Gemini (native and
compatible), Mistral, DeepSeek, GLM, Kimi, MiniMax, OpenRouter, Cohere, Bedrock and watsonx; the sources of vLLM,
SGLang, llama.cpp, Ollama, LM Studio and TGI.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum

from palaestra_slots.core.errors import EngineReplyError, ReplyWithheld

logger = logging.getLogger(__name__)


class Ending(StrEnum):
    """Who ended a reply. The value is OpenAI's word for it, or OpenRouter's for a failure."""

    CHOICE = "stop"
    LENGTH = "length"
    REFUSED = "content_filter"
    FAILED = "error"


_WORDS: Mapping[Ending, str] = {
    # Gemini's MALFORMED_FUNCTION_CALL and its relatives are the model's mistakes, like a call that a parser rejects.
    Ending.CHOICE: """
        stop stopped tool_calls tool_call tool_use function_call end_turn stop_sequence eos eos_token eos_found eosfound
        complete completed done endoftext stop_token stop_string stopstringfound toolcalls malformed_function_call
        unexpected_tool_call too_many_tool_calls malformed_tool_use malformed_model_output malformed_response
        repetition
    """,
    Ending.LENGTH: """
        length max_tokens max_output_tokens max_completion_tokens max_length max_len model_length token_limit limit
        model_context_window_exceeded context_length_exceeded context_window_exceeded maxpredictedtokensreached
        contextlengthreached error_limit max_messages
    """,
    Ending.REFUSED: """
        content_filter content_filtered contentfilter sensitive safety recitation refusal blocklist blocked
        prohibited_content spii language image_safety image_prohibited_content image_recitation guardrail_intervened
        guardrails error_toxic moderation policy_violation model_armor
    """,
    Ending.FAILED: """
        error abort aborted cancelled canceled network_error insufficient_system_resource other failed failure timeout
        time_limit internal_error server_error user_cancel unavailable rate_limit_exceeded overloaded
        missing_thought_signature not_finished load unload modelunloaded userstopped steered
    """,
}

ENDINGS: Mapping[str, Ending] = {word: ending for ending, words in _WORDS.items() for word in words.split()}
"""The ending of each known word, in lower case."""

_OPENAI = frozenset({"stop", "length", "tool_calls", "function_call"})
_reported: set[str] = set()


def ending_of(reason: str) -> Ending | None:
    """Return who ended a reply with this finish reason, or None if the word is unknown. Case, and hyphens or spaces for
    underscores, do not matter; nor does a detail after a colon, which Gemini adds."""
    word = reason.partition(":")[0].strip().lower().replace("-", "_").replace(" ", "_")
    return ENDINGS.get(word.removeprefix("finish_reason_"))


def read_finish_reason(reason: str | None, source: str) -> str | None:
    """Return the finish reason in OpenAI's words. An unknown word is kept and counts as the model's choice, with one
    notice for each word. `source` names the server in errors.

    Raises `EngineReplyError` if the provider failed, and `ReplyWithheld` if its filter withheld the reply.
    """
    if not reason or reason in _OPENAI:
        return reason or None
    ending = ending_of(reason)
    if ending is Ending.FAILED:
        raise EngineReplyError(f"{source} failed in the middle of its reply (finish reason '{reason:.80}').")
    if ending is Ending.REFUSED:
        raise ReplyWithheld(
            f"The content filter of the provider withheld a reply (finish reason '{reason:.80}'), so the model did not "
            f"end it. Source: {source}."
        )
    # The limit, because a server may put a new text into each reply.
    if ending is None and reason not in _reported and len(_reported) < 100:
        _reported.add(reason)
        logger.warning("%s ended a reply with the unknown finish reason %r; it counts as the end", source, reason[:80])
    return reason if ending is None else str(ending)
