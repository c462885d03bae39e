"""A seeded client of the recording endpoint: conversations in three dialects, streamed and whole, with branches.

It keeps each conversation in its dialect's own form and sends replies back as a program would. `Tally` counts what a
ledger must have after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from palaestra_slots.core.types import JSON
from palaestra_tokens.ledger import verify_ledger
from palaestra_tokens.recording import Conversations, RecordingEndpoint, RolloutAddress
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat

TOKENIZER = toy_tokenizer(["hello there world, what is in the file? the answer is 42 <tool_call> {} bash"] * 5)
FORMAT = ChatFormat(TOKENIZER)
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def replies(rng: random.Random) -> Iterator[str]:
    """Texts as a model writes them: words, thinking, calls, and calls that are broken."""
    while True:
        text = " ".join(
            rng.choice(["hello", "wörld", "42", "\n", "answer 東京", "{}"]) for _ in range(rng.randrange(1, 6))
        )
        call = f'{{"name": "bash", "arguments": {{"command": "ls {rng.randrange(9)}",  "x": 1.0}}}}'
        broken = rng.choice(['{"name": "bash", "arguments": {"command": }}', '{"name": "nothing", "arguments": {}}'])
        parts = [f"<think>\nlet me see {rng.random()}\n</think>\n\n"] if rng.random() < 0.2 else []
        parts.append(text if rng.random() < 0.8 else "")
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            parts.append(f"\n<tool_call>\n{call if rng.random() < 0.85 else broken}\n</tool_call>")
        yield "".join(parts) or "hello"


@dataclass
class Tally:
    """What was asked: calls, and segments that a ledger must have, trained and not."""

    calls: int = 0
    segments: int = 0
    auxiliary: int = 0
    problems: list[str] = field(default_factory=list)


class Talk:
    """One conversation of a program in one dialect. `history` is in the dialect's own form."""

    path = ""

    def __init__(self, system: str, rng: random.Random, *, tools: bool = True) -> None:
        self.system, self.rng, self.tools = system, rng, tools
        self.history: list[JSON] = []
        self.open_calls: list[JSON] = []

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self) -> None:
        raise NotImplementedError

    def body(self) -> dict[str, JSON]:
        raise NotImplementedError

    def take(self, reply: JSON) -> None:
        raise NotImplementedError

    def joined(self, events: list[JSON]) -> JSON:
        """A streamed reply as a whole one."""
        raise NotImplementedError


class ChatTalk(Talk):
    path = "/v1/chat/completions"

    def results(self) -> None:
        for call in self.open_calls:
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": f"ok {self.rng.random()}"})

    def body(self) -> dict[str, JSON]:
        body: dict[str, JSON] = {"model": "m", "messages": [{"role": "system", "content": self.system}, *self.history]}
        if self.tools:
            body["tools"] = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
        return body

    def take(self, reply: JSON) -> None:
        message = reply["choices"][0]["message"]
        self.open_calls = message.get("tool_calls") or []
        for call in self.open_calls:  # some clients parse the arguments and write them again
            if self.rng.random() < 0.5:
                with_spaces = call["function"]["arguments"]
                with contextlib.suppress(ValueError):
                    call["function"]["arguments"] = json.dumps(json.loads(with_spaces), separators=(",", ":"))
        self.history.append({name: value for name, value in message.items() if value is not None})

    def joined(self, events: list[JSON]) -> JSON:
        message: dict[str, JSON] = {"role": "assistant", "content": ""}
        for event in events:
            for choice in event["choices"]:
                for name in ("content", "reasoning_content"):
                    if choice["delta"].get(name):
                        message[name] = message.get(name, "") + choice["delta"][name]
                for call in choice["delta"].get("tool_calls", []):
                    kept = {name: value for name, value in call.items() if name != "index"}
                    message.setdefault("tool_calls", []).append(kept)
        return {"choices": [{"message": message}]}


class ResponsesTalk(Talk):
    path = "/v1/responses"

    def results(self) -> None:
        for call in self.open_calls:
            output = f"ok {self.rng.random()}"
            self.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})

    def body(self) -> dict[str, JSON]:
        body: dict[str, JSON] = {"model": "m", "instructions": self.system, "input": list(self.history), "store": False}
        if self.tools:
            body["tools"] = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
        return body

    def take(self, reply: JSON) -> None:
        self.open_calls = [item for item in reply["output"] if item["type"] == "function_call"]
        self.history += reply["output"]

    def joined(self, events: list[JSON]) -> JSON:
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        last = events[-1]["response"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert done == last["output"]
        return last


class MessagesTalk(Talk):
    path = "/v1/messages"

    def results(self) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"ok {self.rng.random()}"}
            for call in self.open_calls
        ]
        self.history.append({"role": "user", "content": blocks})

    def body(self) -> dict[str, JSON]:
        system = [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}]
        body: dict[str, JSON] = {"model": "m", "max_tokens": 4096, "system": system, "messages": list(self.history)}
        if self.tools:
            body["tools"] = [{"name": "bash", "input_schema": SCHEMA}]
        return body

    def take(self, reply: JSON) -> None:
        self.open_calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        self.history.append({"role": "assistant", "content": reply["content"]})

    def joined(self, events: list[JSON]) -> JSON:
        blocks: list[JSON] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
                blocks[-1][name] += delta["partial_json" if name == "json" else name]
        for block in blocks:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
        assert events[-1]["type"] == "message_stop"
        return {"content": blocks}


TALKS = (ChatTalk, ResponsesTalk, MessagesTalk)


class Program:
    """One rollout's program: conversations that go on, branch, are compacted and have helpers."""

    def __init__(
        self, address: RolloutAddress, session: aiohttp.ClientSession, rng: random.Random, tally: Tally
    ) -> None:
        self.address, self.session, self.rng, self.tally = address, session, rng, tally
        self.kind = rng.choice(TALKS)

    async def run(self, calls: int) -> None:
        own = self.kind("You are the agent.", self.rng)
        own.user("Fix the bug.")
        await self.ask(own, begins=True)
        while self.tally.calls < calls:
            chance = self.rng.random()
            if chance < 0.08:
                await self.title()
            elif chance < 0.16:
                await asyncio.gather(self.helper(), self.helper())
            elif chance < 0.24:  # a client that lost the reply asks again
                kept = list(own.history)
                while own.history and not self.is_question(own.history[-1]):
                    own.history.pop()
                await self.ask(own, begins=True)
                own.history = own.history if self.rng.random() < 0.5 else kept
                own.open_calls = [] if own.history is kept else own.open_calls
                if own.history is kept:
                    own = self.fresh(own, "Something else then.")
                    await self.ask(own, begins=True)
            elif chance < 0.3:
                own = self.fresh(own, f"Summary so far: {self.rng.random()}")
                await self.ask(own, begins=True)
            else:
                self.answer(own)
                await self.ask(own, begins=False)

    def is_question(self, item: JSON) -> bool:
        return item.get("role") in ("user", "tool") or item.get("type") == "function_call_output"

    def fresh(self, old: Talk, text: str) -> Talk:
        talk = self.kind(old.system, self.rng)
        talk.user(f"{text} {self.rng.random()}")
        return talk

    def answer(self, talk: Talk) -> None:
        if talk.open_calls:
            talk.results()
        else:
            talk.user(f"Go on {self.rng.random()}")

    async def title(self) -> None:
        talk = self.kind(f"Write a title {self.rng.random()}.", self.rng, tools=False)
        talk.user("Fix the bug.")
        await self.ask(talk, begins=True, auxiliary=True)

    async def helper(self) -> None:
        talk = self.kind(f"You are a helper {self.rng.random()}.", self.rng)
        talk.user("Look it up.")
        await self.ask(talk, begins=True)
        for _ in range(self.rng.randrange(3)):
            self.answer(talk)
            await self.ask(talk, begins=False)

    async def ask(self, talk: Talk, *, begins: bool, auxiliary: bool = False) -> None:
        body, stream = talk.body(), self.rng.random() < 0.5
        headers = {"Authorization": f"Bearer {self.address.key}"}
        if talk.path == "/v1/messages":
            headers = {"x-api-key": self.address.key, "anthropic-version": "2023-06-01"}
        async with self.session.post(
            self.address.url + talk.path, json={**body, "stream": stream}, headers=headers
        ) as response:
            raw = await response.text()
            if response.status != 200:
                self.tally.problems.append(f"{response.status} {raw[:300]}")
                return
        talk.take(talk.joined(events_of(raw)) if stream else json.loads(raw))
        self.tally.calls += 1
        self.tally.segments += begins and not auxiliary
        self.tally.auxiliary += auxiliary


def events_of(raw: str) -> list[JSON]:
    """The data of a stream's events."""
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


async def play(endpoint: RecordingEndpoint, session: aiohttp.ClientSession, seed: int, calls: int) -> Tally:
    """One rollout of a generated program, and what is wrong with its record."""
    rng, tally = random.Random(seed), Tally()
    engine = ToyEngine(TOKENIZER, replies(random.Random(seed + 1)), rate=0.2, abort_rate=0.05, seed=seed)
    conversations = Conversations(ManagedChat(engine, FORMAT, "hermes"))
    with endpoint.open(conversations) as address:
        await Program(address, session, rng, tally).run(calls)
    found = conversations.recorded()
    assert found.ledger is not None
    assert found.auxiliary_ledger is not None
    record, auxiliary = found.ledger.record(), found.auxiliary_ledger.record()
    for name, each in (("own", record), ("auxiliary", auxiliary)):
        verdict = verify_ledger(each)
        if verdict.violation is not None:
            tally.problems.append(f"seed {seed}, {name}: {verdict.violation}")
    counted = len(record.segments), len(auxiliary.segments), len(record.turns) + len(auxiliary.turns)
    if counted != (tally.segments, tally.auxiliary, tally.calls):
        expected = tally.segments, tally.auxiliary, tally.calls
        tally.problems.append(f"seed {seed} {rng}: segments, auxiliary, turns {counted}, expected {expected}")
    trained = sum(segment.mask.count(1) for each in (record, auxiliary) for segment in each.segments)
    if trained != engine.sampled:
        tally.problems.append(f"seed {seed}: {trained} tokens recorded, {engine.sampled} sampled")
    return tally
