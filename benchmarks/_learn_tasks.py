"""Two tool tasks that a model with half a million weights can learn, and a tiny model that has practised them badly.

`count`: run a command that counts the lines of a file, and answer with the number. `write`: write a word to a file.
Only the command's output contains the number, and only the workspace shows whether the word was written. The practice
is supervised, on conversations in which most commands are wrong, and excludes the held-out tasks of the training.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from palaestra import JSON, Message, Rollout, Say, Slot, Task, ToolStep, environment
from palaestra_tokens.testing.fake_engine import train_bpe
from palaestra_tokens.testing.tiny_model import END_OF_TEXT, SPECIAL, TAGS, TURN_END, save_tokenizer

NAMES = ("ash", "birch", "cedar", "elm", "fir", "oak")
WORDS = ("red", "blue", "green", "gold", "grey", "pink")
COUNTS = range(1, 9)
CLEAN, RIGHT = 0.8, 0.3
"""The first part of the practice, in which all commands are right, and the share of right commands after it. The model
first learns to copy names, and then to copy them only seldom."""

VOCABULARY = 480

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}
{{- tool.function.name + ' ' + tool.function.parameters.properties | join(' ') + '\n' }}{% endfor %}
{{- '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": ' }}{{ call.function.name | tojson }}{{ ', "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A chat template with few tokens: it shows only the names of tools and parameters, and writes calls in the Hermes
format."""

HIDDEN, LAYERS, HEADS = 128, 2, 4
BATCH, LEARNING_RATE = 16, 2e-3
_UNTRAINED = -100

TOOL: dict[str, JSON] = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


@environment(toolsets=[])
def two_tools() -> Iterator[Task]:
    """Count the lines of a file, and write a word to one."""
    for name, lines in itertools.product(NAMES, COUNTS):
        yield Task(
            id=f"count-{name}-{lines}",
            prompt=f"count {name}",
            files={name: "x\n" * lines},
            answer=str(lines),
            solution=[ToolStep("terminal", {"command": f"wc -l < {name}"}), Say(str(lines))],
            data={"kind": "count"},
        )
    for name, word in itertools.product(NAMES, WORDS):
        yield Task(
            id=f"write-{name}-{word}",
            prompt=f"write {word} to {name}",
            answer=word,
            solution=f"echo {word} > {name}",
            data={"kind": "write", "name": name},
        )


async def terminal(command: str, sandbox: Slot) -> str:
    """Run a command."""
    return (await sandbox.execute(command)).output.strip()


two_tools.tool(terminal)


@two_tools.score
async def right(task: Task, rollout: Rollout, sandbox: Slot) -> bool:
    if task.data["kind"] == "write":
        return (await sandbox.read_text(task.data["name"], missing="")).strip() == task.answer
    return answered(task, rollout)


def answered(task: Task, rollout: Rollout) -> bool:
    """Return whether a command printed the task's answer, and the last message says it."""
    assert rollout.result is not None
    messages = rollout.result.messages
    asked = any(message["role"] == "tool" and message["content"].strip() == task.answer for message in messages)
    return asked and (messages[-1].get("content") or "").strip() == task.answer


def conversation(task: Task, rng: random.Random, hit: bool) -> list[Message]:
    """Return a task with a conversation for practice: the right command if `hit` is true, otherwise a wrong one, with
    the command's real output."""
    if task.id.startswith("count"):
        _, name, lines = task.id.split("-")
        chosen = name if hit else rng.choice(NAMES)
        command = f"wc -l < {chosen}" if hit or rng.random() < 0.7 else f"ls {chosen}"
        missing = f"/bin/bash: line 1: {chosen}: No such file or directory"
        output = chosen if command.startswith("ls") else lines
        if chosen != name:
            output = f"ls: cannot access '{chosen}': No such file or directory" if command[:2] == "ls" else missing
        said = output if output.isdecimal() else str(rng.choice(COUNTS))
    else:
        _, name, word = task.id.split("-")
        chosen, written = (name, word) if hit else (rng.choice(NAMES), rng.choice(WORDS))
        command, output, said = f"echo {written} > {chosen}", "", "done"
    return called(task, command, output, said)


def called(task: Task, command: str, output: str, said: str) -> list[Message]:
    """Return the conversation of a task in which the model runs one command and then answers."""
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": {"command": command}}}
    return [
        *task.messages(),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": output},
        {"role": "assistant", "content": said},
    ]


def make_model(out: Path, tasks: Sequence[Task], *, practice: int, seed: int) -> float:
    """Create a model in the folder `out`, let it practise `tasks`, and return the last loss in nats per token."""
    import torch
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    pool = [*tasks]
    texts = []
    for _ in range(400):
        talk = conversation(rng.choice(pool), rng, rng.random() < RIGHT)
        texts += [message.get("content") or "" for message in talk]
        texts += [json.dumps(call["function"]) for message in talk for call in message.get("tool_calls", ())]
    trained = train_bpe(texts, VOCABULARY, SPECIAL, TAGS)
    save_tokenizer(trained, out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    end, padding = trained.token_to_id(TURN_END), trained.token_to_id(END_OF_TEXT)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=trained.get_vocab_size(),
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            head_dim=HIDDEN // HEADS,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=end,
            pad_token_id=padding,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=[end, padding], pad_token_id=padding, do_sample=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    warm = 30
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.05, 1 - step / practice))
    )
    model.train()
    loss = torch.tensor(float("nan"))
    for step in range(practice):
        share = 1.0 if step < CLEAN * practice else RIGHT
        rows = [encoded(tokenizer, conversation(rng.choice(pool), rng, rng.random() < share)) for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([each + [padding] * (longest - len(each)) for each, _ in rows])
        labels = torch.tensor([each + [_UNTRAINED] * (longest - len(each)) for _, each in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(out)
    return float(loss.detach())


def encoded(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Return `ids[T]` and `labels[T]` of a conversation; only the assistant's tokens have labels."""
    made = tokenizer.apply_chat_template(
        list(messages), tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = made["input_ids"], made["assistant_masks"]
    return ids, [number if on else _UNTRAINED for number, on in zip(ids, mask, strict=True)]
