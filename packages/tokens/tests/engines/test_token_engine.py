"""SGLang's and vLLM's wires over a real connection: whole rollouts, and every wrong reply a typed error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from golden_messages import raises
from manual_clock import ManualClock
from palaestra_slots.core.errors import (
    ConfigError,
    ContextExceeded,
    EngineError,
    EngineRefused,
    EngineReplyError,
    EngineUnavailable,
)
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.sampling import NEUTRAL
from palaestra_tokens.engines.token_engine import SGLangEngine, TokenServer, VLLMEngine
from palaestra_tokens.ledger import verify_ledger
from palaestra_tokens.server_group import ServerGroup
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_logprob, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat

T = TypeVar("T")
TOKENIZER = toy_tokenizer(["hello there world, the answer is 42"] * 3)
HI: list[Message] = [{"role": "user", "content": "hello"}]
KINDS: dict[str, tuple[type[TokenServer], dict[str, JSON]]] = {
    "sglang": (SGLangEngine, {}),
    "vllm": (VLLMEngine, {}),
    "vllm before token ids": (VLLMEngine, {"token_ids": False}),
    "vllm of atropos": (VLLMEngine, {"stock": False}),
}
Work = Callable[[TokenServer], Awaitable[T]]


def replies() -> Iterator[str]:
    number = 0
    while True:
        yield f"hello there world, the answer is {(number := number + 1)}"


def config(url: str, **settings: JSON) -> APIServerConfig:
    return APIServerConfig(base_url=url, model_name="toy", tool_parser="none", **settings)


def with_server(kind: str, work: Work[T], server: JSON = None, toy: JSON = None, **settings: JSON) -> T:
    """A client of the kind against the loopback."""
    client, options = KINDS[kind]
    sampler = ToyEngine(TOKENIZER, replies(), rate=0.3, **(toy or {}))

    async def go() -> T:
        async with TokenLoopback(sampler, TOKENIZER, **options, **(server or {})) as loopback:
            engine = client(config(loopback.url, **settings), tokenizer=TOKENIZER, clock=ManualClock())
            try:
                await engine.start()
                return await work(engine)
            finally:
                await engine.aclose()

    return asyncio.run(go())


async def rollout(chat: ManagedChat, turns: int = 4) -> ManagedChat:
    messages = list(HI)
    for _ in range(turns):
        reply = await chat.chat_completion(messages=messages, max_tokens=200, temperature=0.7)
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": "go on"},
        ]
    return chat


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("toy", [{}, {"ends": False}, {"abort_rate": 0.5}], ids=["", "end stripped", "aborts"])
def test_a_rollout_is_exact(kind: str, toy: dict[str, JSON]) -> None:
    chat = with_server(kind, lambda engine: rollout(engine.session(SessionContext(rollout_id="r"))), toy=toy)
    verdict = verify_ledger(chat.ledger.record())
    assert verdict.ok, verdict.violation
    (row,) = chat.ledger.rows()
    assert verdict.turns == 4
    for place, (token, mask, logprob) in enumerate(zip(row.tokens, row.masks, row.logprobs, strict=True)):
        assert logprob == (1.0 if mask == -100 else toy_logprob(token, place))
    text = TOKENIZER.decode(row.tokens)
    assert text.count("<|im_end|>") == (8 if toy.get("ends", True) else 7)
    assert "answer is 4" in text


def test_sglang_is_asked_in_its_own_names_and_names_the_policy() -> None:
    async def work(engine: TokenServer) -> tuple[JSON, Sampled]:
        async with TokenLoopback(ToyEngine(TOKENIZER, replies()), TOKENIZER) as loopback:
            asked = SGLangEngine(config(loopback.url), tokenizer=TOKENIZER)
            sampling = {"max_tokens": 9, "temperature": 0.5, "top_k": 3, "stop_token_ids": [1]}
            sampled = await asked.generate([1, 2], sampling)
            await asked.aclose()
            return loopback.seen[0], sampled

    seen, sampled = with_server("sglang", work)
    assert seen["input_ids"] == [1, 2]
    assert seen["return_logprob"] is True
    assert seen["sampling_params"] == {
        **NEUTRAL,
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "stop_token_ids": [1],
        "skip_special_tokens": False,
    }
    assert sampled.policy_version == "0"


def test_concurrent_first_requests_learn_together_that_the_server_is_atropos_own() -> None:
    async def work(engine: TokenServer) -> list[Sampled]:
        return await asyncio.gather(*(engine.generate([1, 2], {"max_tokens": 9}) for _ in range(8)))

    assert len(with_server("vllm of atropos", work)) == 8


def test_vllm_is_asked_for_ids_and_log_probabilities() -> None:
    async def work(engine: TokenServer) -> JSON:
        async with TokenLoopback(ToyEngine(TOKENIZER, replies()), TOKENIZER) as loopback:
            asked = VLLMEngine(config(loopback.url), tokenizer=TOKENIZER)
            await asked.generate([1, 2], {"max_tokens": 9, "stop_token_ids": [1]})
            await asked.aclose()
            return loopback.seen[0]

    seen = with_server("vllm", work)
    assert (seen["model"], seen["prompt"], seen["max_tokens"]) == ("toy", [1, 2], 9)
    assert (seen["return_token_ids"], seen["logprobs"], seen["stop_token_ids"]) == (True, 1, [1])


@pytest.mark.parametrize("ignored", [True, False])
def test_ignore_eos_also_turns_off_the_stop_tokens_of_the_template(ignored: bool) -> None:
    async def work(engine: TokenServer) -> list[list[int]]:
        async with TokenLoopback(ToyEngine(TOKENIZER, replies()), TOKENIZER) as loopback:
            asked = VLLMEngine(config(loopback.url), tokenizer=TOKENIZER)
            chat = asked.managed_server()
            settings: JSON = {"max_tokens": 9, "stop_token_ids": [1], "extra_body": {"ignore_eos": ignored}}
            await chat.chat_completion(messages=HI, **settings)
            await chat.completion(prompt="one, two", **settings)
            await asked.aclose()
            return [each["stop_token_ids"] for each in loopback.seen]

    assert with_server("vllm", work) == [[1] if ignored else [1, *TOKENIZER.stop_ids]] * 2


def asked_of(kind: str, listed: JSON, prompt: Sequence[int], **sampling: JSON) -> list[JSON]:
    """The settings of the requests that one call makes to a server that lists itself like this."""
    info = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 5, None]]}
    choice = {"finish_reason": "stop", "token_ids": [5], "logprobs": {"tokens": [], "token_logprobs": [-0.5]}}
    choice["logprobs"]["tokens"] = ["token_id:5"]  # type: ignore[index]
    reply = {"meta_info": info, "choices": [choice]}
    models = FakeAnswer({"object": "list", "data": [{"id": "toy", **listed}]})

    async def go() -> list[JSON]:
        async with LoopbackServer(FakeAnswer(reply), models=models) as server:
            engine = KINDS[kind][0](config(server.url), tokenizer=TOKENIZER, clock=ManualClock())
            try:
                await engine.generate(prompt, sampling)
            finally:
                await engine.aclose()
                bodies = [seen.body for seen in server.seen if seen.method == "POST"]
            return [body.get("sampling_params", body) for body in bodies]

    return asyncio.run(go())


LIMITS = [
    ({}, 90),
    ({"max_tokens": None}, 90),
    ({"max_completion_tokens": None}, 90),
    ({"max_tokens": 7}, 7),
    ({"max_completion_tokens": 7}, 7),
]


@pytest.mark.parametrize(("kind", "name", "spare"), [("vllm", "max_tokens", 0), ("sglang", "max_new_tokens", 1)])
@pytest.mark.parametrize(("sampling", "limit"), LIMITS)
def test_the_limit_of_a_reply_is_computed_from_the_window(
    kind: str, name: str, spare: int, sampling: JSON, limit: int
) -> None:
    """vLLM reads null and a missing limit as 16 tokens, and SGLang a missing one as 128."""
    (asked,) = asked_of(kind, {"max_model_len": 100}, [3] * 10, **sampling)
    assert asked[name] == (limit - spare if limit == 90 else limit)
    assert None not in asked.values()


def test_a_limit_beyond_the_window_is_lowered_and_a_full_window_is_a_full_context() -> None:
    async def work(engine: TokenServer) -> tuple[int, int | None]:
        engine.window_tokens = 100
        lowered = await engine._complete_settings(90, {"max_tokens": 4096})
        with pytest.raises(ContextExceeded, match="window has 100 tokens") as caught:
            await engine.generate([3] * 100, {"max_tokens": 5})
        return lowered["max_tokens"], caught.value.window_tokens

    assert with_server("vllm", work) == (10, 100)
    assert with_server("sglang", work) == (9, 100)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "vllm of atropos"])
def test_without_a_limit_and_a_window_the_request_is_refused(kind: str) -> None:
    with pytest.raises(EngineRefused, match="max_token_length"):
        asked_of(kind, {}, [3] * 10)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("own", [{}, {"temperature": 0.6}, {"top_k": 20, "min_p": None}, {"repetition_penalty": 1.2}])
def test_every_sampling_setting_is_sent_also_at_its_neutral_value(kind: str, own: JSON) -> None:
    """vLLM takes a missing one from the model's generation_config.json, SGLang from its own options."""
    (asked,) = asked_of(kind, {}, [3] * 10, max_tokens=5, **own)
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    set_ = {name: value for name, value in own.items() if value is not None}
    assert {name: asked[name] for name in neutral} == {**neutral, **set_}


def drop_last_logprob(reply: JSON) -> JSON:
    if "meta_info" in reply:
        reply["meta_info"]["output_token_logprobs"].pop()
    elif "choices" in reply:
        reply["choices"][0]["logprobs"]["token_logprobs"].pop()
    else:
        reply["logprobs"][0][-1] = []
    return reply


def null_logprob(reply: JSON) -> JSON:
    if "meta_info" in reply:
        reply["meta_info"]["output_token_logprobs"][0][0] = None
    elif "choices" in reply:
        reply["choices"][0]["logprobs"]["token_logprobs"][0] = None
    else:
        reply["logprobs"][0][0] = [{"5": None}]
    return reply


def no_logprobs(reply: JSON) -> JSON:
    if "meta_info" in reply:
        del reply["meta_info"]["output_token_logprobs"]
    elif "choices" in reply:
        reply["choices"][0]["logprobs"] = None
    else:
        del reply["logprobs"]
    return reply


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [drop_last_logprob, null_logprob, no_logprobs])
def test_missing_log_probabilities_are_a_typed_error(kind: str, spoil: Callable[[JSON], JSON]) -> None:
    with raises(EngineReplyError, "token-exact"):
        with_server(kind, lambda engine: engine.chat_completion(messages=HI), server={"spoil": spoil})


def other_ids(reply: JSON) -> JSON:
    if "meta_info" in reply:
        entries = reply["meta_info"]["output_token_logprobs"]
        reply["output_ids"] = [*(entry[1] for entry in entries[:-1]), entries[-1][1] + 1]
    else:
        reply["choices"][0]["logprobs"]["tokens"][-1] = "token_id:5"
    return reply


def no_number(reply: JSON) -> JSON:
    reply["choices"][0]["logprobs"]["tokens"][-1] = "token_id:"
    return reply


def no_reason(reply: JSON) -> JSON:
    if "meta_info" in reply:
        reply["meta_info"]["finish_reason"] = None
    else:
        reply["choices"][0]["finish_reason"] = None
    return reply


def beyond_32_bits(reply: JSON) -> JSON:
    if "meta_info" in reply:
        reply["meta_info"]["output_token_logprobs"][0][0] = -1e39
    else:
        reply["choices"][0]["logprobs"]["token_logprobs"][0] = -1e39
    return reply


@pytest.mark.parametrize(
    ("kind", "spoil", "complaint"),
    [
        ("sglang", other_ids, "are not those of its output_ids"),
        ("vllm", other_ids, "are not those of its token ids"),
        ("vllm before token ids", no_number, "it has no token ids"),
        ("sglang", no_reason, "finish_reason"),
        ("vllm", no_reason, "has no finish reason"),
        ("sglang", beyond_32_bits, "an impossible log-probability"),
        ("vllm", beyond_32_bits, "an impossible log-probability"),
    ],
)
def test_what_cannot_be_of_the_sampled_tokens_is_refused(
    kind: str, spoil: Callable[[JSON], JSON], complaint: str
) -> None:
    with pytest.raises(EngineReplyError, match=f"toy.*{complaint}"):
        with_server(kind, lambda engine: engine.chat_completion(messages=HI), server={"spoil": spoil})


@pytest.mark.parametrize("kind", KINDS)
def test_both_names_of_the_limit_count_over_aborts(kind: str) -> None:
    def work(engine: TokenServer) -> Awaitable[ManagedChat]:
        async def go() -> ManagedChat:
            chat = engine.managed_server()
            await chat.chat_completion(messages=HI, max_completion_tokens=5)
            return chat

        return go()

    chat = with_server(kind, work, toy={"abort_rate": 0.5})
    assert len([mask for mask in chat.ledger.rows()[0].masks if mask != -100]) == 5


@pytest.mark.parametrize("kind", KINDS)
async def test_evaluation_does_not_wait_behind_training(kind: str) -> None:
    begun, free = asyncio.Event(), asyncio.Event()

    class Busy(ToyEngine):
        async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
            assert "split" not in sampling
            if not begun.is_set():
                begun.set()
                await free.wait()
            return await super().generate(input_ids, sampling)

    async with TokenLoopback(Busy(TOKENIZER, replies()), TOKENIZER, **KINDS[kind][1]) as loopback:
        engine = KINDS[kind][0](config(loopback.url, num_max_requests_at_once=1), tokenizer=TOKENIZER)
        training = asyncio.create_task(engine.chat_completion(messages=HI))
        await begun.wait()
        await asyncio.wait_for(engine.chat_completion(messages=HI, split="eval"), 10)
        assert not training.done()
        with pytest.raises(ConfigError, match="Unknown split 'test'"):
            await engine.chat_completion(messages=HI, split="test")
        free.set()
        await training
        await engine.aclose()


async def test_vllm_says_itself_which_model_it_does_not_have() -> None:
    refusal = {"object": "error", "message": "The model `toy` does not exist.", "type": "NotFoundError", "code": 404}

    async def go() -> None:
        async with LoopbackServer(FakeAnswer(refusal, 404)) as server:
            engine = VLLMEngine(config(server.url), tokenizer=TOKENIZER, clock=ManualClock())
            try:
                await engine.chat_completion(messages=HI, max_tokens=5)
            finally:
                assert [seen.path for seen in server.seen] == ["/v1/completions"]
                await engine.aclose()

    with pytest.raises(EngineRefused, match="does not exist"):
        await go()


def other_prompt(reply: JSON) -> JSON:
    if "meta_info" in reply:
        reply["meta_info"]["prompt_tokens"] += 1
    else:
        reply["usage"]["prompt_tokens"] += 1
    return reply


def other_prompt_ids(reply: JSON) -> JSON:
    reply["choices"][0]["prompt_token_ids"][0] += 1
    return reply


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("sglang", other_prompt),
        ("vllm", other_prompt),
        ("vllm before token ids", other_prompt),
        ("vllm", other_prompt_ids),
    ],
)
def test_a_server_that_sampled_after_other_ids_is_found_out(kind: str, spoil: Callable[[JSON], JSON]) -> None:
    with pytest.raises(EngineReplyError, match="it reports"):
        with_server(kind, lambda engine: engine.chat_completion(messages=HI), server={"spoil": spoil})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("answers", "error", "requests"),
    [
        ([FakeAnswer({"error": "slow down"}, 429)], EngineUnavailable, 8),
        ([FakeAnswer({"error": "oops"}, 500)], EngineUnavailable, 8),
        ([FakeAnswer(cut=True)], EngineUnavailable, 8),
        ([FakeAnswer(b'{"meta_info": {"finish')], EngineReplyError, 8),
        (
            [FakeAnswer(b'{"meta_info": {"finish_reason": {"type": "\xff"}}, "choices": [{"finish_reason": "\xff"}]}')],
            EngineReplyError,
            8,
        ),
        ([FakeAnswer([])], EngineReplyError, 8),
        ([FakeAnswer(b"")], EngineReplyError, 8),
        ([FakeAnswer({"error": {"message": "Internal"}})], EngineReplyError, 8),
        ([FakeAnswer({"error": {"message": "overloaded", "code": 503}})], EngineUnavailable, 8),
        ([FakeAnswer({"error": "The input is longer than the model's context length"}, 500)], ContextExceeded, 1),
        ([FakeAnswer({"error": {"message": "no such model"}}, 400)], EngineRefused, 1),
        ([FakeAnswer({"error": "The input is longer than the model's context length"}, 400)], ContextExceeded, 1),
    ],
    ids=[
        *("429", "500", "cut", "half a reply", "no UTF-8", "another shape", "empty", "an error with 200"),
        *("an error with 200 and a status", "too long with 500", "400", "too long"),
    ],
)
async def test_what_a_server_does_wrong(
    kind: str, answers: list[FakeAnswer], error: type[EngineError], requests: int
) -> None:
    async with LoopbackServer(*answers) as server:
        engine = KINDS[kind][0](config(server.url), tokenizer=TOKENIZER, clock=ManualClock())
        chat = engine.managed_server()
        try:
            with pytest.raises(error, match=r"127\.0\.0\.1"):
                await chat.chat_completion(messages=HI, max_tokens=5)
        finally:
            await engine.aclose()
        assert chat.ledger.rows() == []
        result = len(server.seen)
    assert result == requests


async def test_a_server_that_recovers_costs_the_rollout_nothing() -> None:
    info = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 5, None]]}
    answers = [FakeAnswer({"error": "loading"}, 503), FakeAnswer(cut=True), FakeAnswer({"text": "", "meta_info": info})]
    async with LoopbackServer(*answers) as server:
        engine = SGLangEngine(config(server.url), tokenizer=TOKENIZER, clock=ManualClock())
        chat = await rollout(engine.managed_server(), 1)
        await engine.aclose()
        requests = len(server.seen)
    assert requests == 3
    assert len(chat.ledger.turns) == 1
    assert verify_ledger(chat.ledger.record()).ok


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("stop must be a text", EngineRefused),
        ("Input length (9 tokens) exceeds the maximum allowed length (8 tokens).", ContextExceeded),
    ],
)
async def test_sglang_refuses_in_an_abort(message: str, error: type[EngineError]) -> None:
    abort = {"type": "abort", "message": message, "status_code": 400}
    reply = {"text": "", "meta_info": {"finish_reason": abort, "output_token_logprobs": []}}

    async def go() -> None:
        async with LoopbackServer(FakeAnswer(reply)) as server:
            engine = SGLangEngine(config(server.url), tokenizer=TOKENIZER)
            try:
                await engine.generate([1], {"max_tokens": 5})
            finally:
                await engine.aclose()

    with pytest.raises(EngineRefused, match=re.escape(message.rstrip("."))) as caught:
        await go()
    assert type(caught.value) is error


async def test_another_tokenizer_than_the_servers_ends_the_start() -> None:
    other = toy_tokenizer(["completely different words"] * 3)

    async def go() -> None:
        async with TokenLoopback(ToyEngine(TOKENIZER, replies()), TOKENIZER) as loopback:
            engine = SGLangEngine(config(loopback.url), tokenizer=other)
            try:
                await engine.start()
            finally:
                await engine.aclose()

    with raises(ConfigError):
        await go()


async def test_a_tokenizer_that_cannot_be_had_ends_the_start(tmp_path: Path) -> None:
    engine = SGLangEngine(config("http://h", tokenizer_name=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        await engine.start()


def test_a_chat_template_from_a_file(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", encoding="utf-8")

    async def work(engine: TokenServer) -> str:
        chat = engine.managed_server()
        await chat.chat_completion(messages=HI)
        return TOKENIZER.decode(chat.ledger.rows()[0].tokens)

    text = with_server("sglang", work, chat_template=str(template))
    assert text.startswith("<|im_start|>hello<|im_end|>hello there")


async def test_a_group_moves_on_when_a_server_goes_away() -> None:
    async with TokenLoopback(ToyEngine(TOKENIZER, replies(), name="a"), TOKENIZER) as good:
        async with LoopbackServer(FakeAnswer({"error": "down"}, 500)) as bad:
            group = ServerGroup([config(bad.url, server_type="sglang"), config(good.url, server_type="sglang")])
            for server in group.servers:
                server.transport.retry = type(server.transport.retry)(attempts=1)  # type: ignore[attr-defined]
            assert group.token_exact
            chat = await rollout(group.managed_server(tokenizer=TOKENIZER), 2)
            await group.aclose()
        assert verify_ledger(chat.ledger.record()).ok
        assert [row.reason for row in chat.ledger.rows()] == ["start"]


def test_servers_that_only_chat_have_no_managed_server() -> None:
    group = ServerGroup([APIServerConfig(base_url="http://h"), config("http://h", server_type="vllm")])
    assert not group.token_exact
    with raises(NotImplementedError):
        group.managed_server(tokenizer=TOKENIZER, tool_call_parser=None)
