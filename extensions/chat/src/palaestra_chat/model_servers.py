"""The model servers that a person may have: those on the usual ports of this machine, and those of providers for which
a key is in an environment variable. No key is stored: settings name the address, and the key stays in its variable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from yarl import URL

from palaestra_slots.core.errors import ConfigError, EngineError
from palaestra_slots.core.retry import AT_START, RetryPolicy
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.http.chat_completions import listed_models

PORTS: Mapping[str, int] = {"vLLM": 8000, "llama.cpp": 8080, "LM Studio": 1234, "Ollama": 11434, "SGLang": 30000}
"""The port that each server has unless one is set."""

PROVIDERS: Mapping[str, tuple[str, str]] = {
    "OPENAI_API_KEY": ("OpenAI", "https://api.openai.com/v1"),
    "ANTHROPIC_API_KEY": ("Anthropic", "https://api.anthropic.com/v1"),
    "OPENROUTER_API_KEY": ("OpenRouter", "https://openrouter.ai/api/v1"),
    "GEMINI_API_KEY": ("Google", "https://generativelanguage.googleapis.com/v1beta/openai"),
    "MISTRAL_API_KEY": ("Mistral", "https://api.mistral.ai/v1"),
    "DEEPSEEK_API_KEY": ("DeepSeek", "https://api.deepseek.com/v1"),
    "GROQ_API_KEY": ("Groq", "https://api.groq.com/openai/v1"),
    "TOGETHER_API_KEY": ("Together", "https://api.together.xyz/v1"),
}
"""By the variable with the key, the provider and the address of its chat completions."""

_PROBE_S = 2.0
ONCE = RetryPolicy(attempts=1)
"""For a server that may not be there: a person who waits for the answer sees no retries."""


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server that a person can choose. `models` is None if it was not asked yet."""

    about: str
    base_url: str
    models: Sequence[str] | None = None


async def local_servers(ports: Mapping[str, int] = PORTS) -> list[FoundServer]:
    """Return the servers on these ports of the loopback address that list models."""

    async def models_on_port(name: str, port: int) -> FoundServer | None:
        url = f"http://127.0.0.1:{port}/v1"
        try:
            async with asyncio.timeout(_PROBE_S):
                models = await models_at(APIServerConfig(base_url=url), retry=ONCE)
        except (EngineError, TimeoutError):
            return None
        return FoundServer(f"a server at {url} (the port of {name})", url, models) if models else None

    found = await asyncio.gather(*(models_on_port(name, port) for name, port in ports.items()))
    return [each for each in found if each is not None]


def provider_servers(environ: Mapping[str, str]) -> list[FoundServer]:
    """Return the providers whose keys are in the variables."""
    return [
        FoundServer(f"{name}, with the key in {variable}", url)
        for variable, (name, url) in PROVIDERS.items() if environ.get(variable)
    ]  # fmt: skip


async def models_at(server: APIServerConfig, retry: RetryPolicy = AT_START) -> list[str]:
    """Return the models that a server lists; none if it has no list. Raises `EngineError` if it does not answer or
    refuses the key, and `ConfigError` for an unusable address."""
    engine = OpenAIEngine(server)
    try:
        reply = await engine.transport.list_models(engine.base_url / "models", retry=retry)
    finally:
        await engine.aclose()
    return [model.id for model in listed_models(reply.body)] if reply.status == 200 else []


async def first_reply(server: APIServerConfig) -> str:
    """Return what the model of a server answers to a short message. Raises `EngineError`."""
    engine = OpenAIEngine(server)
    try:
        completion = await engine.chat_completion(messages=[{"role": "user", "content": "Say hello in one word."}])
    finally:
        await engine.aclose()
    return (completion.choices[0].message.content or "").strip()


def with_provider_key(server: APIServerConfig, environ: Mapping[str, str]) -> APIServerConfig:
    """Return the server with the key of its provider, if the settings have no other key. The key of OpenAI, which all
    servers get by default, is not sent to another provider that is known."""
    if server.api_key not in (None, environ.get("OPENAI_API_KEY")) or not server.base_url:
        return server
    host = URL(server.base_url).host
    for variable, (_, url) in PROVIDERS.items():
        if URL(url).host == host:
            return server.model_copy(update={"api_key": environ.get(variable)})
    return server


async def with_model(server: APIServerConfig) -> APIServerConfig:
    """Return the server with the model that it lists, if the settings name none. A server that lists none, or that does
    not answer now, stays as it is. Raises `ConfigError` if there is no server, and if it lists several models."""
    if server.server_type != "openai":
        return server
    if not server.base_url:
        urls = [url for variable, (_, url) in PROVIDERS.items() if os.environ.get(variable)]
        example = " or ".join(urls or ["http://127.0.0.1:8000/v1"])
        raise ConfigError(
            f"no model server is configured. Set --base-url, for example {example}, and --model; or start "
            "`palaestra chat` in a terminal without flags: it asks for both and stores them"
        )
    if "model_name" in server.model_fields_set:
        return server
    try:
        models = await models_at(server)
    except EngineError:
        return server
    if len(models) > 1:
        raise ConfigError(f"name a model of {server.base_url} with --model: it lists {some(models)}")
    return server.model_copy(update={"model_name": models[0]}) if models else server


def some(names: Sequence[str], most: int = 10) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
