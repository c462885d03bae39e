"""Whole rollouts through other packages: python _throughput_peers.py PEER URL CONCURRENCY ROLLOUTS

Runs in a separate interpreter that has atroposlib 0.4.0 (`atropos`) or verifiers 0.1.14 (`verifiers`). The agent's
commands and the command that scores run as plain subprocesses on this machine, without isolation. Prints rollouts per
second as JSON, without the time for start-up and imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
from typing import Any

PROMPT = "Do the five steps with the terminal. " + "x" * 480
TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a shell command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
CHECK = "cat answer.txt"


async def shell(command: str, folder: str) -> str:
    """Run `bash -c` on this machine."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return output.decode()


async def atropos(url: str, concurrency: int, rollouts: int) -> float:
    """Measure the command `process` of atroposlib. It runs one group at a time, so the group has as many rollouts as
    may run concurrently."""
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

    class Steps(BaseEnv):  # type: ignore[misc]
        name = "steps"
        env_config_cls = BaseEnvConfig

        async def setup(self) -> None: ...
        async def get_next_item(self) -> Any:
            return {"id": 1}

        async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

        async def collect_trajectory(self, item: Any) -> Any:
            messages: list[Any] = [{"role": "user", "content": PROMPT}]
            with tempfile.TemporaryDirectory() as folder:
                while True:
                    reply = await self.server.chat_completion(messages=messages, tools=[TERMINAL], max_tokens=256)
                    said = reply.choices[0].message
                    calls = [call.model_dump() for call in said.tool_calls or ()]
                    messages.append({"role": "assistant", "content": said.content or "", "tool_calls": calls})
                    if not calls:
                        break
                    for call in calls:
                        output = await shell(json.loads(call["function"]["arguments"])["command"], folder)
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
                score = float((await shell(CHECK, folder)).strip() == "done")
            tokens = self.tokenizer.encode("\n".join(str(message["content"]) for message in messages))
            return {"tokens": tokens, "masks": [-100, *tokens[1:]], "scores": score, "messages": messages}, []

    with tempfile.TemporaryDirectory() as out:
        tokenizer = _tokenizer(out)
        config = BaseEnvConfig(
            tokenizer_name=tokenizer,
            group_size=concurrency,
            use_wandb=False,
            include_messages=True,
            ensure_scores_are_not_same=False,
            max_token_length=1 << 20,
            data_path_to_save_groups=f"{out}/groups.jsonl",
        )
        server = APIServerConfig(
            model_name="m", base_url=f"{url}/v1", api_key="x", server_type="openai", num_max_requests_at_once=4096,
            health_check=False,
        )  # fmt: skip
        env = Steps(config=config, server_configs=[server])
        env.process_mode = True
        env.group_size_to_process = concurrency
        env.n_groups_to_process = rollouts // concurrency
        started = time.perf_counter()
        await env.process_manager()
        took = time.perf_counter() - started
        with open(f"{out}/groups.jsonl") as lines:  # noqa: ASYNC230
            scores = [score for line in lines for score in json.loads(line)["scores"]]
        assert scores == [1.0] * rollouts, scores
    return rollouts / took


async def verifiers(url: str, concurrency: int, rollouts: int) -> float:
    """Measure the tool environment of verifiers 0.1.14, which runs its tools in this process."""
    import verifiers as vf
    from datasets import Dataset
    from verifiers.types import ClientConfig

    class Steps(vf.StatefulToolEnv):  # type: ignore[misc]
        async def setup_state(self, state: Any, **kwargs: Any) -> Any:
            state["folder"] = tempfile.mkdtemp()
            return await super().setup_state(state, **kwargs)

        def update_tool_args(self, tool_name: str, tool_args: Any, messages: Any, state: Any, **kwargs: Any) -> Any:
            return {**tool_args, "folder": state["folder"]}

    async def terminal(command: str, folder: str) -> str:
        """Run a shell command.

        Args:
            command: what to run
            folder: where
        """
        return await shell(command, folder)

    async def right(state: Any, **kwargs: Any) -> float:
        return float((await shell(CHECK, state["folder"])).strip() == "done")

    prompt = [{"role": "user", "content": PROMPT}]
    data = Dataset.from_list([{"prompt": prompt, "answer": "", "example_id": number} for number in range(rollouts)])
    env = Steps(dataset=data, tools=[], max_turns=8, rubric=vf.Rubric(funcs=[right]))
    env.add_tool(terminal, args_to_skip=["folder"])
    os.environ["INSTANT_KEY"] = "x"
    client = ClientConfig(
        api_base_url=f"{url}/v1", api_key_var="INSTANT_KEY", max_retries=0,
        client_type="openai_chat_completions", max_connections=4096, max_keepalive_connections=4096,
    )  # fmt: skip
    rows = [dict(row) for row in env.get_dataset(n=rollouts)]
    settings = {"max_tokens": 256, "temperature": 1.0}
    started = time.perf_counter()
    done = await env.generate(
        rows, client=client, model="m", sampling_args=settings, max_concurrent=concurrency, independent_scoring=True
    )
    took = time.perf_counter() - started
    outputs = done["outputs"] if isinstance(done, dict) else done
    rewards = [output["reward"] for output in outputs]
    assert rewards == [1.0] * rollouts, rewards
    return rollouts / took


def _tokenizer(folder: str) -> str:
    """Save a byte-level tokenizer without merges in a folder, because the package always loads a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<end>": len(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(f"{folder}/tokenizer")
    return f"{folder}/tokenizer"


def main() -> None:
    """Measure one peer."""
    peer, url, concurrency, rollouts = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    os.environ["TQDM_DISABLE"] = "1"
    measured = {"atropos": atropos, "verifiers": verifiers}[peer]
    with contextlib.redirect_stdout(io.StringIO()):
        rate = asyncio.run(measured(url, int(concurrency), int(rollouts)))
    print(json.dumps({"per_s": rate}))


if __name__ == "__main__":
    main()
