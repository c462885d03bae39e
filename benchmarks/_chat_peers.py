"""The chat servers of other packages, over an engine with one prepared answer. Each server runs in a separate
interpreter that has its package. This module imports nothing from Palaestra.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

Chat = Callable[..., Awaitable[object]]
LOGPROB = -0.5


def atropos(folder: str, reply: str) -> Callable[[], Chat]:
    """Set up the managed server of atroposlib 0.4.0. Its server object returns token ids, as its SGLang client
    would."""
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [*tokenizer.encode(reply), tokenizer.eos_token_id]

    class Server:
        config = SimpleNamespace(model_name="instant")

        async def tokens_and_logprobs_completion(self, **request: object) -> object:
            prompt = request.get("input_ids") or tokenizer.encode(request["prompt"])
            return prompt, [ids], [[LOGPROB] * len(ids)], ["stop"]

    return lambda: ManagedServer(Server(), tokenizer=tokenizer).chat_completion


def verifiers(folder: str, reply: str) -> Callable[[], Chat]:
    """Set up the training client of verifiers 0.4 with the Qwen3 renderer, as its interception server uses it: parse
    the request, resolve the prompt in the trace, call the model, commit the turn. The interception server does not run,
    and the HTTP client gets its replies in this process. Unlike the other cases, this client decodes the JSON of each
    reply.
    """
    from renderers import Qwen3RendererConfig
    from renderers.base import load_tokenizer
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import SamplingConfig

    logging.disable(logging.CRITICAL)
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer.encode(reply), tokenizer.eos_token_id]
    logprobs = [{"token": f"token_id:{number}", "logprob": LOGPROB} for number in ids]
    choice = {"token_ids": ids, "logprobs": {"content": logprobs}, "finish_reason": "stop"}
    answer = SimpleNamespace(content=json.dumps({"request_id": "", "choices": [choice]}).encode())

    class Http:
        base_url = "http://instant/v1"

        async def post(self, endpoint: str, **request: object) -> object:
            return answer

    def start() -> Chat:
        client = TrainClient(TrainClientConfig(renderer=Qwen3RendererConfig(), renderer_model_name=folder))
        client.client = Http()
        trace = Trace(task=TraceTask(type="Task", data=TaskData(prompt="")), agent=AgentInfo.model_construct())
        dialect = ChatDialect()

        async def chat(**request: object) -> object:
            body = {"model": "instant", **request}
            parsed = dialect.parse_request(body)
            turn = prepare_turn(trace, parsed.messages, parsed.tools)
            response = await client.get_response(dialect, body, SamplingConfig(), turn=turn)
            turn.commit(response)
            calls = [
                SimpleNamespace(id=call.id, function=SimpleNamespace(name=call.name, arguments=call.arguments))
                for call in response.message.tool_calls or ()
            ]
            message = SimpleNamespace(content=response.message.content, tool_calls=calls)
            return SimpleNamespace(choices=[SimpleNamespace(message=message)])

        return chat

    return start


PEERS = {"atropos": atropos, "verifiers": verifiers}
