"""Checks a model server or a model's folder, and reports failures with their fixes.

The token checks request a few tokens from the engine. The template checks use the tokenizer, template and parser with
the same renderer as a run. The checks contact only the given endpoint, and the hub if the user named a tokenizer
that is not on this machine or, for a token-exact server, such a model.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
from yarl import URL

from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError, EngineError, EngineRefused, EngineReplyError
from palaestra_slots.core.retry import AT_START
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import TokenEngine
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.engines.token_engine import PROBE, SGLangEngine, TokenServer, VLLMEngine
from palaestra_tokens.engines.transformers import TransformersEngine
from palaestra_tokens.http.chat_completions import ListedModel, listed_models, server_kind
from palaestra_tokens.http.transport import NOT_JSON, public_url
from palaestra_tokens.ledger import HIGHEST_LOGPROB
from palaestra_tokens.ledger.verify import IMPOSSIBLE
from palaestra_tokens.parsers import GrammarParser, get_parser, list_parsers
from palaestra_tokens.templates import ChatFormat, History, TurnRenderer
from palaestra_tokens.templates.jinja import ChatTemplate, for_template, template_of
from palaestra_tokens.tokenizers import Tokenizer, load_tokenizer, model_source


class CheckState(StrEnum):
    """The result of a check."""

    OK = "ok"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check and its result. `way_out` is the fix if the check failed. If the check is not applicable, `way_out` may
    name an unmet requirement."""

    name: str
    state: CheckState
    found: str
    way_out: str = ""


def passed(name: str, found: str) -> DoctorCheck:
    return DoctorCheck(name, CheckState.OK, found)


def failed_check(name: str, found: str, way_out: str) -> DoctorCheck:
    return DoctorCheck(name, CheckState.FAILED, found, way_out)


def not_applicable(name: str, found: str, way_out: str = "") -> DoctorCheck:
    return DoctorCheck(name, CheckState.NOT_APPLICABLE, found, way_out)


@dataclass(slots=True)
class Diagnosis:
    """All checks, in the order of their dependencies. `server` is the kind of server. `refusal` is the server's error
    that ended the checks early, if there was one; the remaining checks are then not applicable."""

    target: str
    server: str = ""
    model: str = ""
    checks: list[DoctorCheck] = field(default_factory=list)
    refusal: EngineError | None = None

    @property
    def ok(self) -> bool:
        return all(check.state is not CheckState.FAILED for check in self.checks)

    def skip(self, names: Sequence[str], why: str, way_out: str = "") -> None:
        self.checks += [not_applicable(name, why, way_out) for name in names]


TOKENS, LOGPROBS, STOP = "tokens in and out", "log-probabilities", "stop token inside the mask"
SAMPLING = (TOKENS, LOGPROBS, STOP)
DISTRIBUTION = "sampling settings"
_REPEATED = 8

_UPGRADE = "Use vLLM 0.10.2 or newer without --disable-log-probs, or SGLang 0.4 or newer; check --openai.server_type."
_ASKED = 4


async def token_checks(engine: TokenEngine, prompt: Sequence[int]) -> AsyncIterator[DoctorCheck]:
    """Run the three token checks. If the first request fails, one check fails and the other two are not applicable."""
    try:
        sampled = await engine.generate(prompt, {"max_tokens": _ASKED, "temperature": 1.0})
    except EngineError as error:
        # The request has failed as a whole, so the message alone says which of the checks it answers.
        about = LOGPROBS if isinstance(error, EngineReplyError) and "log-prob" in str(error) else TOKENS
        for name in SAMPLING:
            yield (
                failed_check(name, str(error), _UPGRADE)
                if name == about
                else not_applicable(name, "see the failed check")
            )
        return
    if not sampled.ids or len(sampled.ids) > _ASKED:
        yield failed_check(TOKENS, f"{len(sampled.ids)} tokens were returned, but {_ASKED} were requested", _UPGRADE)
    else:
        yield passed(TOKENS, f"{len(prompt)} ids in, {len(sampled.ids)} out, finish reason '{sampled.finish_reason}'")
    sane = len(sampled.logprobs) == len(sampled.ids) and all(
        math.isfinite(value) and value <= HIGHEST_LOGPROB for value in sampled.logprobs
    )
    if sane:
        yield passed(LOGPROBS, "one per token: " + ", ".join(f"{value:.3f}" for value in sampled.logprobs))
    else:
        yield failed_check(LOGPROBS, f"{list(sampled.logprobs)} for {len(sampled.ids)} tokens", _UPGRADE)
    yield await _stop_token(engine, prompt)


async def distribution_check(engine: TokenEngine, bare: TokenEngine, prompt: Sequence[int]) -> DoctorCheck:
    """Check that the replies vary as their log-probabilities say. Also compare replies with the same seeds from `bare`,
    which leaves out the neutral settings, to find out whether the server has settings of its own."""
    asked: dict[str, JSON] = {"max_tokens": 8, "temperature": 1.0}
    try:
        replies = await asyncio.gather(*(engine.generate(prompt, asked) for _ in range(_REPEATED)))
        seeded = [{**asked, "seed": seed} for seed in range(1, 5)]
        first, again, plain = [
            [list((await one.generate(prompt, settings)).ids) for settings in seeded] for one in (engine, engine, bare)
        ]
    except EngineError as error:
        return failed_check(DISTRIBUTION, str(error), _UPGRADE)
    ids = {tuple(reply.ids) for reply in replies}
    if len(ids) == 1 and (_REPEATED - 1) * sum(replies[0].logprobs) < IMPOSSIBLE:
        found = f"{_REPEATED} replies at temperature 1 are identical, which their log-probabilities practically exclude"
        way_out = "Start vLLM with --generation-config vllm, and SGLang without --preferred-sampling-params."
        return failed_check(DISTRIBUTION, found, way_out)
    # If the server ignores seeds, a difference to the replies of `bare` would prove nothing.
    if first != again:
        return passed(DISTRIBUTION, "the settings sent are in force; the server's own ones are unknown (seeds differ)")
    if first != plain:
        own = "The server has its own sampling settings, such as those of the model's generation_config.json"
        return passed(DISTRIBUTION, f"{own}. Runs override them; a client that does not send every setting gets them.")
    return passed(DISTRIBUTION, "the settings sent are in force, and the server has none of its own")


async def _stop_token(engine: TokenEngine, prompt: Sequence[int]) -> DoctorCheck:
    """Request the likeliest token, then make it a stop token, and check that the next reply contains it."""
    likeliest = {"temperature": 0.0, "max_tokens": 1}
    try:
        first = (await engine.generate(prompt, likeliest)).ids
        if not first:
            return not_applicable(STOP, "the engine sampled no token")
        again = await engine.generate(prompt, {**likeliest, "max_tokens": _ASKED, "stop_token_ids": [first[0]]})
    except EngineError as error:
        return failed_check(STOP, str(error), "The server must accept stop_token_ids.")
    if again.finish_reason != "stop":
        return failed_check(STOP, f"stop_token_ids had no effect (finish reason '{again.finish_reason}')", _UPGRADE)
    if first[0] not in again.ids:
        return failed_check(
            STOP,
            "the engine leaves out the token that ended the reply",
            "The template then adds the token, which is not trained on, so the model does not learn to end its turns. "
            "With SGLang, do not set no_stop_trim to false in extra_body. With vLLM, use its own server, not a proxy.",
        )
    return passed(STOP, "the token that ends a reply is sampled, recorded and trained on")


TEMPLATE, PREFIX, ROUND_TRIP = "template renders tools", "prefix-preserving", "parser round trip"
WRITING = (TEMPLATE, PREFIX, ROUND_TRIP)

TOOL: dict[str, JSON] = {
    "type": "function",
    "function": {
        "name": "look_up_word",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}, "limit": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
ARGUMENTS = {"word": 'näive "x" </tool_call>', "limit": 3}
"""Arguments that are easy to get wrong: quotes, a closing tag, non-ASCII letters, a number."""

_PLAIN_ARGUMENTS = {"word": "naive", "limit": 3}
_USER: Message = {"role": "user", "content": "Which word?"}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "look_up_word", "content": "1 found"}


def writing_checks(tokenizer: Tokenizer, template: str | None, parser: str) -> Iterator[DoctorCheck]:
    """Yield the three template checks, in order. If the first check fails, the other two are not applicable."""
    try:
        source = template_of(tokenizer, template)
        renderer = ChatFormat(tokenizer, template).renderer([TOOL])
    except ConfigError as error:
        yield failed_check(TEMPLATE, str(error), "Set --openai.chat_template to a template that supports tools.")
        yield from (not_applicable(name, "no template was loaded") for name in (PREFIX, ROUND_TRIP))
        return
    ends = ", ".join(repr(tokenizer.decode([stop], skip_special_tokens=False)) for stop in renderer.stop_ids)
    yield passed(TEMPLATE, f"the template shows tools and results; a turn ends with {ends}")
    yield _prefix(renderer)
    yield _round_trip(renderer, source, tokenizer, parser)


def _prefix(renderer: TurnRenderer) -> DoctorCheck:
    """Check that the continued conversation still contains the sampled text."""
    problems = []
    for after, reply, new in (
        ("a tool's result", _calling(ARGUMENTS), _RESULT),
        ("the user's next message", {"role": "assistant", "content": "This one."}, _USER),
    ):
        for thinks in (False, True):
            said: Message = {**reply, **({"reasoning_content": "Let me see."} if thinks else {})}
            try:
                history = History(prompt=[_USER], reply=said, kinds=renderer.opening([_USER]).kinds)
                rewrites = renderer.step(history, [new], renderer.stop_ids[0]).rewrites
            except ConfigError as error:
                rewrites = str(error)
            if rewrites:
                problems.append(f"before {after}{', with thinking,' if thinks else ''} {rewrites}")
                break
    if not problems:
        return passed(PREFIX, "sampled text stays as it is when the conversation continues")
    return failed_check(
        PREFIX,
        "; ".join(problems),
        "No data is lost: each rewrite begins a new row. For one row per rollout, set --openai.history append, "
        "or use a template that keeps thinking (--openai.chat_template FILE).",
    )


def _round_trip(renderer: TurnRenderer, template: ChatTemplate, tokenizer: Tokenizer, parser: str) -> DoctorCheck:
    """Check that the parser can read calls in the form that the template writes, because the model has learned that
    form."""
    written = {}
    # Some parsers read plain words and fail on quotes, line ends or other scripts.
    for arguments in (_PLAIN_ARGUMENTS, ARGUMENTS):
        text = _rendered_call(renderer, template, tokenizer, arguments)
        if text is None:
            return not_applicable(
                ROUND_TRIP,
                "the template renders no reply after its generation prompt, or no stop token after the reply",
            )
        written[text] = arguments
    try:
        chosen = get_parser(parser)
    except KeyError as error:
        return failed_check(
            ROUND_TRIP, str(error.args[0]), f"Set --openai.tool_parser to one of {', '.join(list_parsers())}."
        )
    missed = [text for text, arguments in written.items() if not _reads(chosen, text, arguments)]
    if not missed:
        return passed(ROUND_TRIP, f"{parser} reads the calls that the template writes")
    # The check knows the right answer, so it names it.
    fitting = [name for name in list_parsers() if all(_reads(get_parser(name), *pair) for pair in written.items())]
    return failed_check(
        ROUND_TRIP,
        f"{parser} does not read {missed[0]!r}",
        f"Set --openai.tool_parser to one of these: {', '.join(fitting)}."
        if fitting
        else "No known parser reads this form; register your own.",
    )


def _rendered_call(
    renderer: TurnRenderer, template: ChatTemplate, tokenizer: Tokenizer, arguments: dict[str, JSON]
) -> str | None:
    """Return a call as the template writes it, up to the token that ends the turn, or None if the template does not
    continue the prompt or does not end the turn."""

    def rendered(messages: Sequence[Message], generation: bool) -> str:
        ready = for_template(messages, renderer.traits.reasoning_field)
        return template.render(ready, tools=[TOOL], add_generation_prompt=generation)

    prompt, whole = rendered([_USER], True), rendered([_USER, _calling(arguments), _RESULT], False)
    if not whole.startswith(prompt):
        return None
    reply = whole[len(prompt) :]
    ends = [tokenizer.decode([stop], skip_special_tokens=False) for stop in renderer.stop_ids]
    cuts = [at for end in ends if (at := reply.find(end)) >= 0]
    return reply[: min(cuts)] if cuts else None


def _reads(parser: GrammarParser, text: str, arguments: dict[str, JSON]) -> bool:
    parsed = parser.parse(text, tools=[TOOL])
    found = [(call.name, call.arguments) for call in parsed.calls]
    return found == [("look_up_word", arguments)] and not parsed.errors and not (parsed.content or "").strip()


def _calling(arguments: dict[str, JSON]) -> Message:
    call = {"id": "call00001", "type": "function", "function": {"name": "look_up_word", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


REACHABLE, SERVER, CHAT, AGREES = "reachable", "server", "chat with tools", "tokenizer agrees"
_AFTER_REACHING = (SERVER, CHAT, *SAMPLING, DISTRIBUTION, *WRITING, AGREES)
_FALLBACK_PROMPT = tuple(range(10, 18))
_ONLY_CHATS = (
    "This server returns no tokens, so its rows are placeholders. To train, serve the model with vLLM or SGLang."
)


def _probe_prompt(tokenizer: Tokenizer | None) -> Sequence[int]:
    return tokenizer.encode("Say a word.", add_special_tokens=False) if tokenizer else _FALLBACK_PROMPT


@dataclass(frozen=True, slots=True)
class Target:
    """`where` is an address or a model's folder. If `server_type` is None, the kind of server is detected."""

    where: str
    model: str | None = None
    api_key: str | None = None
    tokenizer: str | None = None
    parser: str = "hermes"
    server_type: str | None = None


async def diagnose(target: Target) -> Diagnosis:
    """Run all checks. Raises `ConfigError` for an invalid target; server failures are reported, not raised."""
    if "://" in target.where:
        return await _Examination(target).endpoint()
    if local_path(model_source(target.where)).is_dir():
        return await _Examination(target).folder()
    raise ConfigError(f"'{target.where}' is neither an address (http://…) nor the folder of a model.")


class _Examination:
    """One run of all checks on a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.found = Diagnosis(target.where, model=target.model or "")

    async def folder(self) -> Diagnosis:
        engine = TransformersEngine(self._config("transformers", self.target.where))
        self.found.model = self.target.where
        try:
            await engine.start()
            self._add_server("transformers", "runs in this process (--openai.server_type transformers)")
            await self._tokens(engine, engine.tokenizer)
            self.found.checks += writing_checks(engine.tokenizer, None, self.target.parser)
            self.found.skip([AGREES], "the tokenizer comes from the model's folder")
        except ConfigError as error:
            self.found.checks.append(
                failed_check(SERVER, str(error), "Specify a folder with a model and its tokenizer.")
            )
        finally:
            await engine.aclose()
        return self.found

    async def endpoint(self) -> Diagnosis:
        engine = OpenAIEngine(self._config("openai", self.target.model or "default"))
        try:
            models = await self._reach(engine)
            kind = self.target.server_type or await self._detect_server(engine, models)
            self.found.model = self.target.model or (models[0].id if models else "default")
            exact = kind in ("vllm", "sglang")
            # Only exact tokens are worth a look at the hub, which the user did not name.
            asked = exact or (self.target.model and local_path(model_source(self.target.model)).is_dir())
            tokenizer = await self._tokenizer(self.target.model if asked else None)
            if exact:
                self._add_server(kind, f"returns exact tokens (--openai.server_type {kind})")
                self.found.skip([CHAT], "token-exact rollouts do not use chat completions")
                await self._token_server(kind, tokenizer)
            else:
                unknown = kind == "other"
                what = "it does not identify itself as vLLM or SGLang" if unknown else "it returns no exact tokens"
                self._add_server(kind, what)
                await self._check_chat(OpenAIEngine(self._config("openai", self.found.model)))
                self.found.skip([*SAMPLING, DISTRIBUTION], "the server returns no tokens", _ONLY_CHATS)
                self._writing(tokenizer)
                self.found.skip([AGREES], "the server returns no tokens")
        except EngineError as error:
            self._unreachable(error)
        finally:
            await engine.aclose()
        return self.found

    async def _reach(self, engine: OpenAIEngine) -> list[ListedModel]:
        url = engine.base_url / "models"
        models = listed_models((await engine.transport.list_models(url)).body)
        names = ", ".join(model.id for model in models[:5]) or "it lists no models"
        self.found.checks.append(passed(REACHABLE, f"{public_url(url)} answers: {names}"))
        return models

    async def _detect_server(self, engine: OpenAIEngine, models: list[ListedModel]) -> str:
        """Detect the kind of server from its list of models, or else by requesting a path that only one kind serves."""
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
        # Any web server may answer at these paths; the keys are those of vLLM's and SGLang's answers.
        return response.status == 200 and isinstance(value, dict) and bool(value.keys() & {"version", "model_path"})

    async def _tokenizer(self, model: str | None) -> Tokenizer | None:
        """Return the tokenizer that the user named, or else the tokenizer of the model. Returns None if neither is
        named or the tokenizer cannot be loaded."""
        named = self.target.tokenizer or model
        if named is None:
            return None
        try:
            return await asyncio.to_thread(load_tokenizer, named)
        except ConfigError as error:
            self.found.checks.append(
                failed_check("tokenizer", str(error), "Set --tokenizer to a folder, or to a model's name.")
            )
            return None

    async def _token_server(self, kind: str, tokenizer: Tokenizer | None) -> None:
        made = SGLangEngine if kind == "sglang" else VLLMEngine
        config = self._config(kind, self.found.model)
        # With the patience of a run, each failing check would take minutes.
        engine, bare = made(config, retry=AT_START), made(config, retry=AT_START, neutral={})
        try:
            await self._tokens(engine, tokenizer)
            if any(check.state is CheckState.FAILED for check in self.found.checks if check.name in SAMPLING):
                self.found.skip([DISTRIBUTION], "see the failed check")
            else:
                self.found.checks.append(await distribution_check(engine, bare, _probe_prompt(tokenizer)))
            self._writing(tokenizer)
            await self._agreement(engine, tokenizer)
        finally:
            await engine.aclose()
            await bare.aclose()

    async def _tokens(self, engine: TokenEngine, tokenizer: Tokenizer | None) -> None:
        async for check in token_checks(engine, _probe_prompt(tokenizer)):
            self.found.checks.append(check)

    def _writing(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            self.found.skip(WRITING, "no tokenizer was given", "Set --tokenizer to a folder, or to a model's name.")
        else:
            self.found.checks += writing_checks(tokenizer, None, self.target.parser)

    async def _agreement(self, engine: TokenServer, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            self.found.skip([AGREES], "no tokenizer was given", "Set --model NAME, or --tokenizer FOLDER.")
            return
        theirs = await engine.tokens_of(PROBE)
        if theirs is None:
            self.found.skip([AGREES], "the server has no /tokenize")
        elif theirs == list(tokenizer.encode(PROBE, add_special_tokens=False)):
            self.found.checks.append(passed(AGREES, f"both encode a test text as the same {len(theirs)} tokens"))
        else:
            way_out = f"Set --openai.tokenizer_name to the tokenizer of '{self.found.model}'."
            self.found.checks.append(failed_check(AGREES, "the server encodes a test text differently", way_out))

    async def _check_chat(self, engine: OpenAIEngine) -> None:
        try:
            reply = await engine.chat_completion(
                messages=[{"role": "user", "content": "Say a word."}], tools=[TOOL], max_tokens=16
            )
        except EngineError as error:
            way_out = "Start the server with tool calls enabled, and set --model to its model."
            self.found.checks.append(failed_check(CHAT, str(error), way_out))
        else:
            finish = reply.choices[0].finish_reason
            self.found.checks.append(passed(CHAT, f"the server replied, finish reason '{finish}'"))
        finally:
            await engine.aclose()

    def _add_server(self, kind: str, found: str) -> None:
        self.found.server = kind
        self.found.checks.append(passed(SERVER, f"{kind}; {found}"))

    def _unreachable(self, error: EngineError) -> None:
        self.found.refusal = error
        asked = {check.name for check in self.found.checks}
        if REACHABLE not in asked:
            way_out = "Check the address, and that the server is running."
            if isinstance(error, EngineRefused):
                way_out = "Check the key, the address and the model's name."
            elif " answered HTTP " in str(error):
                way_out = "The server is running, but it fails to answer; see its log."
            self.found.checks.append(failed_check(REACHABLE, str(error), way_out))
        self.found.checks += [
            not_applicable(name, "the server could not be checked") for name in _AFTER_REACHING if name not in asked
        ]

    def _config(self, server_type: str, model: str) -> APIServerConfig:
        settings: dict[str, JSON] = {
            "server_type": server_type,
            "model_name": model,
            "api_key": self.target.api_key,
            "tokenizer_name": self.target.tokenizer or "none",
            "tool_parser": self.target.parser if server_type == "transformers" else "none",
            "timeout": 120,
            # The client's own check raises at the first problem, but here each problem is reported.
            "health_check": False,
        }
        if "://" in self.target.where:
            settings["base_url"] = self.target.where
        return APIServerConfig(**settings)
