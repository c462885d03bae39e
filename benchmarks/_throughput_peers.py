"""Whole rollouts through atroposlib and verifiers: python _throughput_peers.py PEER URL CONCURRENCY ROLLOUTS

`peers.py` plays tasks with files with the same functions. Runs in a separate interpreter that has atroposlib 0.4.0
(`atropos`) or verifiers 0.1.14 (`verifiers`). The agent's commands and the command that scores run as plain
subprocesses on this machine, without isolation. Prints rollouts per second as JSON, without the time for start-up and
imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True)
class Steps:
    """One task: the files in its folder at the start, and what `CHECK` must print at the end."""

    files: Mapping[str, str]
    answer: str


FIVE_STEPS = Steps({"task.txt": "five steps\n"}, "done")


def put(files: Mapping[str, str], folder: str) -> None:
    """Write the files of a task."""
    for name, text in files.items():
        Path(folder, name).write_text(text)


async def shell(command: str, folder: str) -> str:
    """Run `bash -c` on this machine."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return output.decode()


async def atropos(url: str, concurrency: int, tasks: Sequence[Steps]) -> float:
    """Return the seconds of the command `process` of atroposlib. It runs one group at a time, so the group has as many
    rollouts as may run concurrently, each of the next task."""
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

    left = iter(tasks)

    class Terminal(BaseEnv):  # type: ignore[misc]
        name = "steps"
        env_config_cls = BaseEnvConfig

        async def setup(self) -> None: ...
        async def get_next_item(self) -> Any:
            return {"id": 1}

        async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

        async def collect_trajectory(self, item: Any) -> Any:
            messages: list[Any] = [{"role": "user", "content": PROMPT}]
            task = next(left)
            with tempfile.TemporaryDirectory() as folder:
                put(task.files, folder)
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
                score = float((await shell(CHECK, folder)).strip() == task.answer)
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
        env = Terminal(config=config, server_configs=[server])
        env.process_mode = True
        env.group_size_to_process = concurrency
        env.n_groups_to_process = len(tasks) // concurrency
        started = time.perf_counter()
        await env.process_manager()
        took = time.perf_counter() - started
        with open(f"{out}/groups.jsonl") as lines:  # noqa: ASYNC230
            scores = [score for line in lines for score in json.loads(line)["scores"]]
        assert scores == [1.0] * len(tasks), scores
    return took


async def verifiers(url: str, concurrency: int, tasks: Sequence[Steps]) -> float:
    """Return the seconds of the tool environment of verifiers 0.1.14, which runs its tools in this process."""
    import verifiers as vf
    from datasets import Dataset
    from verifiers.types import ClientConfig

    class Terminal(vf.StatefulToolEnv):  # type: ignore[misc]
        async def setup_state(self, state: Any, **kwargs: Any) -> Any:
            state["folder"] = tempfile.mkdtemp()
            put(tasks[state["info"]["number"]].files, state["folder"])
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
        output = await shell(CHECK, state["folder"])
        shutil.rmtree(state["folder"])
        return float(output.strip() == state["answer"])

    prompt = [{"role": "user", "content": PROMPT}]
    rows = [
        {"prompt": prompt, "answer": task.answer, "info": {"number": number}, "example_id": number}
        for number, task in enumerate(tasks)
    ]
    env = Terminal(dataset=Dataset.from_list(rows), tools=[], max_turns=8, rubric=vf.Rubric(funcs=[right]))
    env.add_tool(terminal, args_to_skip=["folder"])
    os.environ["INSTANT_KEY"] = "x"
    client = ClientConfig(
        api_base_url=f"{url}/v1", api_key_var="INSTANT_KEY", max_retries=0,
        client_type="openai_chat_completions", max_connections=4096, max_keepalive_connections=4096,
    )  # fmt: skip
    rows = [dict(row) for row in env.get_dataset(n=len(tasks))]
    settings = {"max_tokens": 256, "temperature": 1.0}
    started = time.perf_counter()
    done = await env.generate(
        rows, client=client, model="m", sampling_args=settings, max_concurrent=concurrency, independent_scoring=True
    )
    took = time.perf_counter() - started
    outputs = done["outputs"] if isinstance(done, dict) else done
    rewards = [output["reward"] for output in outputs]
    assert rewards == [1.0] * len(tasks), rewards
    return took


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
        took = asyncio.run(measured(url, int(concurrency), [FIVE_STEPS] * int(rollouts)))
    print(json.dumps({"per_s": int(rollouts) / took}))


if __name__ == "__main__":
    main()
