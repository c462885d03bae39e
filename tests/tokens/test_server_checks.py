"""Looking at model servers: what is well, what is not, and the way out, over real connections on the loopback."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra_slots.core.errors import ConfigError, EngineUnavailable
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.server_checks import (
    DISTRIBUTION,
    LOGPROBS,
    PREFIX,
    ROUND_TRIP,
    STOP,
    TEMPLATE,
    TOKENS,
    CheckState,
    Diagnosis,
    DoctorCheck,
    Target,
    diagnose,
    token_checks,
    writing_checks,
)
from palaestra_tokens.serving.token_server import Reply, TokenLoopback
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from palaestra_tokens.testing.fake_engine import toy_tokenizer
from palaestra_tokens.testing.tiny_model import chat_template, save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import FastTokenizer, load_tokenizer

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


class Steady:
    """Always continues with the same ids. `trims`: leaves out the token that ended the reply."""

    name = "steady"

    def __init__(self, trims: bool = False, deaf: bool = False) -> None:
        self.trims = trims
        self.deaf = deaf

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        ids = [40, 41, 42, 43, 44][: sampling["max_tokens"]]
        stop = next((at for at, token in enumerate(ids) if token in sampling.get("stop_token_ids", ())), None)
        if stop is not None and not self.deaf:
            ids = ids[: stop if self.trims else stop + 1]
            return Sampled(ids, [-0.5] * len(ids), "stop")
        return Sampled(ids, [-0.5] * len(ids), "length")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(), out)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FastTokenizer:
    return load_tokenizer(str(folder))


def states(found: Diagnosis) -> dict[str, CheckState]:
    return {check.name: check.state for check in found.checks}


def named(checks: Sequence[DoctorCheck], name: str) -> DoctorCheck:
    return next(check for check in checks if check.name == name)


def look(target: Target) -> Diagnosis:
    return asyncio.run(diagnose(target))


async def of_engine(engine: Steady) -> list[DoctorCheck]:
    return [check async for check in token_checks(engine, [1, 2, 3])]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_token_server_in_good_health(kind: str, folder: Path, tokenizer: FastTokenizer) -> None:
    async with TokenLoopback(Steady(), tokenizer, kind=kind) as server:
        found = await diagnose(Target(server.url, tokenizer=str(folder)))
    assert (found.server, found.model, found.ok) == (kind, "steady", True)
    assert states(found).pop("chat with tools") is CheckState.NOT_APPLICABLE
    assert [check.name for check in found.checks if check.state is CheckState.NOT_APPLICABLE] == ["chat with tools"]
    assert f"--openai.server_type {kind}" in named(found.checks, "server").found


async def test_a_server_that_only_chats(folder: Path) -> None:
    async with LoopbackServer(FakeAnswer(completion()), models=FakeAnswer(MODELS)) as server:
        found = await diagnose(Target(server.url, tokenizer=str(folder)))
    assert (found.server, found.ok) == ("other", True)
    assert states(found)["chat with tools"] is CheckState.OK
    tokens = named(found.checks, TOKENS)
    assert tokens.state is CheckState.NOT_APPLICABLE
    assert "vLLM or SGLang" in tokens.way_out


def test_the_checks_that_do_not_apply_share_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(*argv: str) -> int:
        async with LoopbackServer(FakeAnswer(completion()), models=FakeAnswer(MODELS)) as server:
            return await asyncio.to_thread(main, ["doctor", server.url, *argv])

    assert asyncio.run(scenario()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "not applicable" in line]
    assert len(lines) == 1, lines
    assert "training checks" in lines[0]
    check_message(lines[0])
    assert asyncio.run(scenario("--json")) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert sum(each["state"] == "not applicable" for each in checks) == 8


async def test_nobody_is_asked_for_a_tokenizer_that_was_not_named(tokenizer: FastTokenizer) -> None:
    async with TokenLoopback(Steady(), tokenizer, kind="vllm") as server:
        found = await diagnose(Target(server.url))
    assert states(found)[TOKENS] is CheckState.OK
    for name in (TEMPLATE, PREFIX, ROUND_TRIP, "tokenizer agrees"):
        assert states(found)[name] is CheckState.NOT_APPLICABLE
    assert "--tokenizer" in named(found.checks, TEMPLATE).way_out


async def test_a_server_with_other_tokens(folder: Path) -> None:
    async with TokenLoopback(Steady(), toy_tokenizer(["abc"]), kind="sglang") as server:
        result = await diagnose(Target(server.url, tokenizer=str(folder)))
    agrees = named(result.checks, "tokenizer agrees")
    assert agrees.state is CheckState.FAILED
    assert "--openai.tokenizer_name" in agrees.way_out


def without_logprobs(reply: Reply) -> Reply:
    reply["choices"][0]["logprobs"] = None
    return reply


async def test_a_server_without_logprobs(tokenizer: FastTokenizer) -> None:
    async with TokenLoopback(Steady(), tokenizer, kind="vllm", spoil=without_logprobs) as server:
        found = await diagnose(Target(server.url))
    assert not found.ok
    assert states(found)[LOGPROBS] is CheckState.FAILED
    assert states(found)[STOP] is CheckState.NOT_APPLICABLE
    assert "0.10.2" in named(found.checks, LOGPROBS).way_out


def test_the_token_that_ends_a_reply() -> None:
    good, trims, deaf = (
        named(asyncio.run(of_engine(engine)), STOP) for engine in (Steady(), Steady(trims=True), Steady(deaf=True))
    )
    assert good.state is CheckState.OK
    assert (trims.state, "leaves out the token" in trims.found) == (CheckState.FAILED, True)
    assert (deaf.state, "no effect" in deaf.found) == (CheckState.FAILED, True)


def test_a_template_that_drops_tools_is_named(tokenizer: FastTokenizer) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    first, *others = writing_checks(tokenizer, plain, "hermes")
    assert (first.name, first.state) == (TEMPLATE, CheckState.FAILED)
    assert "look_up_word" in first.found
    assert {check.state for check in others} == {CheckState.NOT_APPLICABLE}


def test_a_template_that_strips_thinking_is_named(tokenizer: FastTokenizer) -> None:
    keeps = "{%- if message.reasoning_content %}"
    assert keeps in chat_template()
    strips = chat_template().replace(keeps, "{%- if message.reasoning_content and loop.last %}")
    prefix = named(list(writing_checks(tokenizer, strips, "hermes")), PREFIX)
    assert prefix.state is CheckState.FAILED
    assert "with thinking" in prefix.found
    assert "--openai.history append" in prefix.way_out


def test_a_parser_that_reads_something_else_is_named(tokenizer: FastTokenizer) -> None:
    wrong = named(list(writing_checks(tokenizer, None, "llama3_json")), ROUND_TRIP)
    assert wrong.state is CheckState.FAILED
    assert "--openai.tool_parser" in wrong.way_out
    assert "hermes" in wrong.way_out
    assert "llama3_json" not in wrong.way_out
    unknown = named(list(writing_checks(tokenizer, None, "hermess")), ROUND_TRIP)
    assert unknown.state is CheckState.FAILED
    assert "hermes, " in unknown.way_out


def test_what_is_no_target() -> None:
    with pytest.raises(ConfigError, match="neither an address"):
        look(Target("no/such/folder"))


def test_a_server_that_answers_500_is_told_apart_from_one_that_does_not_run() -> None:
    async def go(answer: FakeAnswer | None) -> str:
        async with LoopbackServer(FakeAnswer(completion()), models=answer) as server:
            where = server.url if answer is not None else "http://127.0.0.1:1"
            return named((await diagnose(Target(f"{where}/v1"))).checks, "reachable").way_out

    assert "log" in asyncio.run(go(FakeAnswer({"error": {"message": "boom"}}, 500, {"Retry-After": "0"})))
    assert "address" in asyncio.run(go(None))


async def test_a_refused_key() -> None:
    refusal = FakeAnswer({"error": {"message": "wrong key"}}, status=401)
    async with LoopbackServer(refusal, models=refusal) as server:
        found = await diagnose(Target(server.url, api_key="secret"))
    assert found.refusal is not None
    assert found.refusal.exit_code == 4
    assert states(found)["reachable"] is CheckState.FAILED
    assert "secret" not in str(found)


def test_the_command_and_its_exit_codes(unused_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor(*argv: str) -> int:
        return main(["doctor", *argv])

    assert doctor(unused_url, "--json") == EngineUnavailable.exit_code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["checks"][0]["name"] == "reachable"
    assert doctor("no/such/folder") == 2
    assert doctor(unused_url) == 4
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("failed          reachable: ")
    assert shown[1].strip().startswith("fix: ")


@pytest.fixture
def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(("kind", "hint"), [("vllm", "vLLM"), ("sglang", "SGLang"), ("", None)])
async def test_a_chat_engine_says_where_exact_tokens_are_to_be_had(
    kind: str, hint: str | None, tokenizer: FastTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with TokenLoopback(Steady(), tokenizer, kind=kind) as server:
        engine = OpenAIEngine(APIServerConfig(base_url=server.url, model_name="steady"))
        await engine.start()
        await engine.aclose()
    said = [record.getMessage() for record in caplog.records if "exact" in record.getMessage()]
    assert len(said) == (hint is not None)
    if hint is not None:
        assert f"protocol of {hint}" in said[0]
        assert f"--openai.server_type {kind}" in said[0]


class OwnDefaults:
    """Samples from 50 likely tokens, but from the likeliest alone where `top_k` is 1. As vLLM with a model's
    generation_config.json, it takes a setting that a request lacks from its own ones. If `deaf` is true, its own ones
    win."""

    name = "own"

    def __init__(self, deaf: bool = False, **own: JSON) -> None:
        self.own, self.deaf, self.random = own, deaf, random.Random(7)

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        settings = {**sampling, **self.own} if self.deaf else {**self.own, **sampling}
        rng = random.Random(settings["seed"]) if settings.get("seed") is not None else self.random
        often = 1 if settings.get("top_k") == 1 or settings.get("temperature") == 0 else 50
        ids = [40 + rng.randrange(often) for _ in range(settings["max_tokens"])]
        if ids[0] in settings.get("stop_token_ids", ()):
            return Sampled(ids[:1], [-3.9], "stop")
        return Sampled(ids, [-3.9] * len(ids), "length")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("engine", "state", "said"),
    [
        (OwnDefaults(), CheckState.OK, "none of its own"),
        (OwnDefaults(top_k=1), CheckState.OK, "generation_config.json"),
        (OwnDefaults(deaf=True, top_k=1), CheckState.FAILED, "identical"),
    ],
    ids=["neutral", "overridden", "in force"],
)
async def test_a_servers_own_sampling_settings_are_noticed(
    kind: str, engine: OwnDefaults, state: CheckState, said: str, tokenizer: FastTokenizer
) -> None:
    async with TokenLoopback(engine, tokenizer, kind=kind) as server:
        result = await diagnose(Target(server.url))
    check = named(result.checks, DISTRIBUTION)
    assert (check.state, said in check.found) == (state, True)
    assert ("--generation-config vllm" in check.way_out) is (state is CheckState.FAILED)
