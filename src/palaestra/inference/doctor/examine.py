"""One examination: reach the model, find out what serves it, run the checks in order.

Invariant: only the given endpoint is contacted, and a tokenizer is fetched only for a model that the user named; a
server's list of models is not consent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
from yarl import URL

from palaestra.core.config import local_path
from palaestra.core.errors import ConfigError, EngineError
from palaestra.core.retry import AT_START
from palaestra.core.types import JSON
from palaestra.inference.config import APIServerConfig
from palaestra.inference.doctor.checks import (
    SAMPLING,
    TOOL,
    WRITING,
    Diagnosis,
    failed,
    not_applicable,
    passed,
    token_checks,
    writing_checks,
)
from palaestra.inference.engine import TokenEngine
from palaestra.inference.engines.openai import OpenAIEngine
from palaestra.inference.engines.sglang import SGLangEngine
from palaestra.inference.engines.token_engine import PROBE, TokenServer
from palaestra.inference.engines.transformers import TransformersEngine
from palaestra.inference.engines.vllm import VLLMEngine
from palaestra.inference.http.chat_completions import ListedModel, listed_models, server_kind
from palaestra.inference.http.transport import NOT_JSON, shown
from palaestra.inference.tokenizers import Tokenizer, load_tokenizer

REACHABLE, SERVER, CHAT, AGREES = "reachable", "server", "chat with tools", "tokenizer agrees"
_AFTER_REACHING = (SERVER, CHAT, *SAMPLING, *WRITING, AGREES)
_FALLBACK_PROMPT = tuple(range(10, 18))
_ONLY_CHATS = (
    "The server only chats: rows are placeholders and train nothing. To train, serve the model with vLLM or SGLang."
)


@dataclass(frozen=True, slots=True)
class Target:
    """`where` is an address or a model's folder. `server_type` None detects it."""

    where: str
    model: str | None = None
    api_key: str | None = None
    tokenizer: str | None = None
    parser: str = "hermes"
    server_type: str | None = None


async def diagnose(target: Target) -> Diagnosis:
    """Run all checks. Raises `ConfigError` for an invalid target, and nothing for failures of the server."""
    if "://" in target.where:
        return await _Examination(target).endpoint()
    if local_path(target.where).is_dir():
        return await _Examination(target).folder()
    raise ConfigError(f"'{target.where}' is neither an address (http://…) nor the folder of a model.")


class _Examination:
    """One run through the checks."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.found = Diagnosis(target.where, model=target.model or "")

    async def folder(self) -> Diagnosis:
        """A model that is sampled in this process."""
        engine = TransformersEngine(self._config("transformers", self.target.where))
        self.found.model = self.target.where
        try:
            await engine.start()
            self._add_server("transformers", "in this process: --openai.server_type transformers")
            await self._tokens(engine, engine.tokenizer)
            self.found.checks += writing_checks(engine.tokenizer, None, self.target.parser)
            self.found.skip([AGREES], "the tokenizer lies in the model's folder")
        except ConfigError as error:
            self.found.checks.append(failed(SERVER, str(error), "Name a folder with a model and its tokenizer."))
        finally:
            await engine.aclose()
        return self.found

    async def endpoint(self) -> Diagnosis:
        """A model server."""
        engine = OpenAIEngine(self._config("openai", self.target.model or "default"))
        try:
            models = await self._reach(engine)
            kind = self.target.server_type or await self._kind(engine, models)
            self.found.model = self.target.model or (models[0].id if models else "default")
            tokenizer = await self._tokenizer()
            if kind in ("vllm", "sglang"):
                self._add_server(kind, f"exact tokens: --openai.server_type {kind}")
                self.found.skip([CHAT], "token-exact rollouts do not use it")
                await self._token_server(kind, tokenizer)
            else:
                self._add_server("other", "neither vLLM nor SGLang, as far as it says")
                await self._chat(OpenAIEngine(self._config("openai", self.found.model)))
                self.found.skip(SAMPLING, "not a token server", _ONLY_CHATS)
                self._writing(tokenizer)
                self.found.skip([AGREES], "not a token server")
        except EngineError as error:
            self._unreachable(error)
        finally:
            await engine.aclose()
        return self.found

    async def _reach(self, engine: OpenAIEngine) -> list[ListedModel]:
        url = engine.base_url / "models"
        models = listed_models((await engine.transport.list_models(url)).body)
        names = ", ".join(model.id for model in models[:5]) or "no models listed"
        self.found.checks.append(passed(REACHABLE, f"{shown(url)} answers: {names}"))
        return models

    async def _kind(self, engine: OpenAIEngine, models: list[ListedModel]) -> str:
        """By the list of models, else by an address that only one of them has."""
        kind = server_kind(models)
        if kind != "other":
            return kind
        root = engine.base_url.parent if engine.base_url.name == "v1" else engine.base_url
        for path, its in (("get_model_info", "sglang"), ("version", "vllm")):
            if await self._answers_json(engine, root / path):
                return its
        return kind

    async def _answers_json(self, engine: OpenAIEngine, url: URL) -> bool:
        response = await engine.transport.look("GET", url)
        try:
            value: JSON = msgspec.json.decode(response.body)
        except NOT_JSON:
            return False
        return response.status == 200 and isinstance(value, dict) and bool(value.keys() & {"version", "model_path"})

    async def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the user named; None without a name or if it cannot be loaded."""
        named = self.target.tokenizer or self.target.model
        if named is None:
            return None
        try:
            return await asyncio.to_thread(load_tokenizer, named)
        except ConfigError as error:
            self.found.checks.append(failed("tokenizer", str(error), "Name it: --tokenizer FOLDER, or a model's name."))
            return None

    async def _token_server(self, kind: str, tokenizer: Tokenizer | None) -> None:
        made = SGLangEngine if kind == "sglang" else VLLMEngine
        engine = made(self._config(kind, self.found.model), retry=AT_START)
        try:
            await self._tokens(engine, tokenizer)
            self._writing(tokenizer)
            await self._agreement(engine, tokenizer)
        finally:
            await engine.aclose()

    async def _tokens(self, engine: TokenEngine, tokenizer: Tokenizer | None) -> None:
        prompt = tokenizer.encode("Say a word.", add_special_tokens=False) if tokenizer else _FALLBACK_PROMPT
        async for check in token_checks(engine, prompt):
            self.found.checks.append(check)

    def _writing(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            self.found.skip(WRITING, "no tokenizer was named", "Name the model: --model NAME, or --tokenizer FOLDER.")
        else:
            self.found.checks += writing_checks(tokenizer, None, self.target.parser)

    async def _agreement(self, engine: TokenServer, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            self.found.skip([AGREES], "no tokenizer was named", "Name the model: --model NAME, or --tokenizer FOLDER.")
            return
        theirs = await engine.tokens_of(PROBE)
        if theirs is None:
            self.found.skip([AGREES], "the server has no /tokenize to ask")
        elif theirs == list(tokenizer.encode(PROBE, add_special_tokens=False)):
            self.found.checks.append(passed(AGREES, f"both write a test text in the same {len(theirs)} tokens"))
        else:
            way_out = f"Set --openai.tokenizer_name to the tokenizer of '{self.found.model}'."
            self.found.checks.append(failed(AGREES, "the server writes a test text in other tokens", way_out))

    async def _chat(self, engine: OpenAIEngine) -> None:
        try:
            reply = await engine.chat_completion(
                messages=[{"role": "user", "content": "Say a word."}], tools=[TOOL], max_tokens=16
            )
        except EngineError as error:
            way_out = "Start the server with tool calls, and name its model with --model."
            self.found.checks.append(failed(CHAT, str(error), way_out))
        else:
            finish = reply.choices[0].finish_reason
            self.found.checks.append(passed(CHAT, f"a reply came, finish reason '{finish}'"))
        finally:
            await engine.aclose()

    def _add_server(self, kind: str, found: str) -> None:
        self.found.server = kind
        self.found.checks.append(passed(SERVER, f"{kind}; {found}"))

    def _unreachable(self, error: EngineError) -> None:
        self.found.refusal = error
        asked = {check.name for check in self.found.checks}
        if REACHABLE not in asked:
            way_out = "DoctorCheck address and key, and that the server runs."
            self.found.checks.append(failed(REACHABLE, str(error), way_out))
        self.found.checks += [
            not_applicable(name, "the server could not be asked") for name in _AFTER_REACHING if name not in asked
        ]

    def _config(self, server_type: str, model: str) -> APIServerConfig:
        settings: dict[str, JSON] = {
            "server_type": server_type,
            "model_name": model,
            "api_key": self.target.api_key,
            "tokenizer_name": self.target.tokenizer or "none",
            "tool_parser": self.target.parser if server_type == "transformers" else "none",
            "timeout": 120,
            "health_check": False,
        }
        if "://" in self.target.where:
            settings["base_url"] = self.target.where
        return APIServerConfig(**settings)
